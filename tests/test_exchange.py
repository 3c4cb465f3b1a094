"""The exchange of packed messages: how often values are coded, what arrives, how many bytes it took."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference_outer as ref
import torch
from simulated_islands import Link, Network, on_islands
from torch import Tensor

from mdlm.training.compress import Codec
from mdlm.training.exchange import Message
from mdlm.training.fragments import Piece
from mdlm.training.outer_config import CompressConfig, MergeConfig, OuterConfig
from mdlm.training.routes import IslandExchange
from mdlm.training.wire import OVERHEAD, Tag, seal, unseal


def pieces(*shapes: tuple[int, ...]) -> tuple[Piece, ...]:
    ends = np.cumsum([math.prod(s) for s in shapes]).tolist()
    return tuple(Piece(f"p{i}", s, e - math.prod(s), e, False) for i, (s, e) in enumerate(zip(shapes, ends)))


class Counting:
    """A codec that counts how often each value is coded."""

    granule = 1

    def __init__(self, inner: Codec) -> None:
        self.inner, self.encoded = inner, 0

    def wire_bytes(self, count: int) -> int:
        return self.inner.wire_bytes(count)

    def encode(self, values: Tensor) -> Tensor:
        self.encoded += len(values)
        return self.inner.encode(values)

    def decode(self, wire: Tensor, count: int) -> Tensor:
        return self.inner.decode(wire, count)


def exchanged(config: OuterConfig, deltas: list[Tensor], layout: tuple[Piece, ...], weights: list[float]) -> list:
    """One exchange between as many islands as there are deltas; (merged, exchange, link) of each."""
    network = Network(len(deltas))

    def work(i: int) -> tuple:
        link = Link(network, i)
        one = IslandExchange(config, link)
        one.codec = Counting(one.codec)
        merged = one.start(Message(0, 0, layout, deltas[i], torch.zeros_like(deltas[i]), weights[i]))()
        one.close()
        return merged, one, link

    return on_islands(len(deltas), work)


@pytest.mark.parametrize("islands", [1, 2, 4, 5])
def test_each_value_is_quantised_exactly_twice_whatever_the_number_of_islands(islands: int) -> None:
    """Not per hop, as in a quantised ring, whose error grows with the islands."""
    n = 1000
    deltas = list(torch.randn(islands, n, generator=torch.Generator().manual_seed(0)))
    config = OuterConfig(compress=CompressConfig(codec="int8"))
    done = exchanged(config, deltas, pieces((n,)), [1.0] * islands)
    total = sum(one.codec.encoded for _, one, _ in done)
    assert total == n * islands + n  # every island's values once, the merged values once
    mean = torch.stack(deltas).mean(0)
    for merged, _, _ in done:
        assert torch.equal(merged.delta, done[0][0].delta)
        assert float((merged.delta - mean).norm()) < 0.02 * float(mean.norm())


@pytest.mark.parametrize("count", [0, 1, 3, 130, 1001])
@pytest.mark.parametrize("rule", ["mean", "radial", "edit"])
@pytest.mark.parametrize("route", ["scatter", "gather"])
def test_routes_agree_for_any_count_and_rule(count: int, rule: Any, route: Any) -> None:
    layout = pieces((count // 2,), (), (count - count // 2,))
    n = layout[-1].stop
    deltas = list(torch.randn(3, n, generator=torch.Generator().manual_seed(count)))
    merge = MergeConfig(rule=rule, clip=3.0)
    config = OuterConfig(merge=merge, compress=CompressConfig(route=route))
    done = exchanged(config, deltas, layout, [1.0, 2.0, 3.0])
    vectors = [[p.of(d).reshape(-1).double().numpy() for d in deltas] for p in layout]
    for i, piece in enumerate(layout):
        weights = np.array([1.0, 2.0, 3.0])
        if rule == "edit":
            weights = weights * np.exp(-np.array([np.linalg.norm(v) for v in vectors[i]]))
        expected = ref.radial_mean(vectors[i], weights.tolist()) if rule == "radial" else (
            sum(w * v for w, v in zip(weights, vectors[i])) / weights.sum()
        )  # fmt: skip
        length = np.linalg.norm(expected)
        expected = expected * min(1.0, 3.0 / length) if length else expected
        for merged, _, _ in done:
            np.testing.assert_allclose(piece.of(merged.delta).reshape(-1).numpy(), expected, rtol=1e-4, atol=1e-6)


def test_bytes_are_twice_the_buffer_less_the_own_part() -> None:
    n, islands = 128 * 400, 4
    deltas = list(torch.randn(islands, n))
    config = OuterConfig(compress=CompressConfig(codec="int4"))
    for merged, _, link in exchanged(config, deltas, pieces((n,)), [1.0] * islands):
        assert merged.stats.bytes_sent == link.bytes_out
        formula = 2 * (4.25 / 8) * n * (islands - 1) / islands
        assert formula < link.bytes_out < formula * 1.01


def test_pytorch_162338_gloo_average_is_wrong_the_mean_is_a_sum_divided() -> None:
    deltas = [torch.full((4,), float(i + 1)) for i in range(3)]
    for merged, _, _ in exchanged(OuterConfig(), deltas, pieces((4,)), [1.0] * 3):
        assert torch.equal(merged.delta, torch.full((4,), 2.0))


def test_messages_out_of_order_or_damaged_are_loud_errors() -> None:
    payload = torch.arange(10, dtype=torch.uint8)
    tag = Tag(1, 2, 3, 0)
    wire = seal(payload, tag)
    assert len(wire) == 10 + OVERHEAD
    assert torch.equal(unseal(wire, tag), payload)
    for other in (Tag(0, 2, 3, 0), Tag(1, 3, 3, 0), Tag(1, 2, 2, 0), Tag(1, 2, 3, 1)):
        with pytest.raises(RuntimeError, match="out of step"):
            unseal(wire, other)
    wire[OVERHEAD + 4] ^= 1
    with pytest.raises(RuntimeError, match="damaged"):
        unseal(wire, tag)
