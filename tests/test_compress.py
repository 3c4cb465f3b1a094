"""Codecs, error feedback, projections and the exchange of packed messages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference_outer as ref
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mdlm.training.compress import CodeBook, Sliced, codec, pack, packed_bytes, unpack
from mdlm.training.feedback import ErrorFeedback
from mdlm.training.fragments import Piece
from mdlm.training.outer_config import CompressConfig, MergeConfig, OuterConfig
from mdlm.training.project import CyclicTopK, LowRank, effective_rank

NAMES = ["fp32", "fp16", "bf16", "int8", "int4", "fp4", "codebook", "topk"]
TOPK = CompressConfig(codec="topk", route="gather", values="fp16", density=0.1)
CODECS = {name: codec(name, TOPK) for name in NAMES} | {f"codebook{b}": Sliced(CodeBook(b), 2) for b in range(2, 9)}
CODECS["topk of bf16 values"] = codec("topk", dataclasses.replace(TOPK, values="bf16"))
CODECS["topk of 2-bit values"] = codec("topk", dataclasses.replace(TOPK, values="codebook", bits=2))
LARGEST = torch.finfo(torch.float32).max


@st.composite
def buffers(draw: Callable) -> Tensor:
    """Flat float32 buffers: none, one, block boundaries, thousands; constant, sparse, tiny, huge or mixed."""
    count = draw(st.sampled_from([0, 1, 2, 7, 127, 128, 129, 1000, 4095, 4096, 4097, 9000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(count, generator=generator)
    kind = draw(st.sampled_from(["normal", "constant", "zeros", "sparse", "tiny", "huge", "mixed", "largest"]))
    if kind == "mixed":
        x = x * 10.0 ** torch.randint(-38, 38, (count,), generator=generator).float()
    scales = {"constant": 0.0, "zeros": 0.0, "tiny": 1e-41, "huge": 1e37}
    x = x * scales.get(kind, 1.0) + (3.3 if kind == "constant" else 0.0)
    if kind == "sparse":
        x[torch.rand(count, generator=generator) < 0.9] = 0.0
    if kind == "largest":
        x = LARGEST * x.sign()
    return x.clamp(-LARGEST, LARGEST)


def size(x: Tensor) -> float:
    return float(x.double().norm())


@settings(max_examples=150, deadline=None)
@given(buffers(), st.sampled_from(sorted(CODECS)))
def test_codecs_keep_shape_count_bytes_stay_finite_and_contract(x: Tensor, name: str) -> None:
    before = x.clone()
    wire = CODECS[name].encode(x)
    decoded = CODECS[name].decode(wire, len(x))
    assert wire.dtype == torch.uint8
    assert len(wire) == CODECS[name].wire_bytes(len(x))
    assert decoded.shape == x.shape
    assert decoded.dtype == torch.float32
    assert bool(decoded.isfinite().all())
    assert torch.equal(x, before), "the input was changed"
    assert size(decoded.double() - x.double()) <= size(x) * (1 + 1e-6) + 1e-44 * math.sqrt(len(x))


@pytest.mark.parametrize("name", sorted(CODECS))
def test_the_largest_and_the_smallest_numbers_of_float32(name: str) -> None:
    smallest = 2.0**-149
    for x in (torch.tensor([LARGEST, -LARGEST, 1.0]), torch.tensor([smallest, -3 * smallest, 0.0])):
        decoded = CODECS[name].decode(CODECS[name].encode(x), 3)
        assert bool(decoded.isfinite().all())
        assert size(decoded.double() - x.double()) <= size(x) * (1 + 1e-6)


@settings(max_examples=80, deadline=None)
@given(buffers(), st.sampled_from(sorted(set(CODECS) - {"topk", "topk of 2-bit values"})), st.integers(1, 5))
def test_torchft_278_buckets_lose_tensors_many_give_the_same_as_one(x: Tensor, name: str, buckets: int) -> None:
    one = CODECS[name]
    step = one.granule * max(1, -(-len(x) // (one.granule * buckets)))
    parts = [one.decode(one.encode(part), len(part)) for part in x.split(step)] or [x]
    assert torch.equal(torch.cat(parts), one.decode(one.encode(x), len(x)))
    sliced = Sliced(one, 1)
    assert torch.equal(sliced.decode(sliced.encode(x), len(x)), one.decode(one.encode(x), len(x)))
    assert sliced.wire_bytes(len(x)) == one.wire_bytes(len(x))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**16 - 1), max_size=50), st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16]))
def test_packing_is_exact_and_as_short_as_it_can_be(values: list[int], bits: int) -> None:
    codes = torch.tensor(values, dtype=torch.int64) & (2**bits - 1)
    wire = pack(codes, bits)
    assert len(wire) == packed_bytes(len(values), bits) == math.ceil(len(values) * bits / 8)
    assert torch.equal(unpack(wire, len(values), bits), codes)
    number = int.from_bytes(bytes(wire.tolist()), "little")
    assert number == sum(c << (bits * i) for i, c in enumerate(codes.tolist()))


@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        ("int8", lambda x: ref.int_code(x, 8)),
        ("int4", lambda x: ref.int_code(x, 4)),
        ("fp4", ref.e3m0_code),
        *[(f"codebook{b}", lambda x, b=b: ref.codebook_code(x, b)) for b in range(2, 9)],
        ("topk", lambda x: ref.topk_code(x, 0.1, ref.exact)),
    ],
)
def test_codecs_equal_the_oracle(name: str, oracle: Callable[[np.ndarray], np.ndarray]) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(3)) * 5
    got = CODECS[name].decode(CODECS[name].encode(x), 1000).double().numpy()
    np.testing.assert_allclose(got, oracle(x.double().numpy()), rtol=1e-3 if name == "topk" else 2e-6, atol=1e-6)


def test_error_bounds_of_the_elements() -> None:
    x = torch.randn(128 * 50, generator=torch.Generator().manual_seed(0))
    scale = x.view(-1, 128).abs().amax(1, keepdim=True)
    for name, bound in (("int8", scale / 254), ("int4", scale / 14)):
        error = (CODECS[name].decode(CODECS[name].encode(x), len(x)) - x).abs().view(-1, 128)
        assert bool((error <= bound * (1 + 1e-5)).all())
    error = (CODECS["fp4"].decode(CODECS["fp4"].encode(x), len(x)) - x).abs().view(-1, 128)
    assert bool((error <= torch.maximum(x.abs().view(-1, 128) / 3, scale * 2**-7) * (1 + 1e-5)).all())


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("int8", 0.005, 0.008),
        ("int4", 0.10, 0.13),
        ("fp4", 0.18, 0.21),
        ("bf16", 0.001, 0.002),
        ("codebook2", 0.5, 0.6),
    ],
)
def test_relative_errors_on_gaussian_values(name: str, low: float, high: float) -> None:
    x = torch.randn(65536, generator=torch.Generator().manual_seed(1))
    assert low < size(CODECS[name].decode(CODECS[name].encode(x), len(x)) - x) / size(x) < high


def test_bits_per_value_on_the_wire() -> None:
    n = 2**20
    bits = {name: 8 * CODECS[name].wire_bytes(n) / n for name in CODECS}
    assert bits["int8"] == 8.25
    assert bits["int4"] == bits["fp4"] == 4.25
    assert bits["bf16"] == 16
    assert bits["codebook2"] == 2.125
    assert bits["codebook8"] == 8.125
    sparse = codec("topk", CompressConfig(codec="topk", route="gather", bits=2))  # SparseLoCo
    assert 8 * sparse.wire_bytes(n) / n == pytest.approx(64 / 4096 * (12 + 2.125))


def test_torchft_203_the_quantiser_takes_matrices_only() -> None:
    """Any shape is a flat buffer here: a scalar, an empty shard, a row."""
    for shape in ((), (0,), (0, 3), (1,), (3, 0, 2), (2, 3, 4)):
        x = torch.ones(shape)
        for one in CODECS.values():
            assert one.decode(one.encode(x.reshape(-1)), x.numel()).numel() == x.numel()


# Error feedback -----------------------------------------------------------------------------------------------------


def feedback(kind: Any = "classic", decay: float = 1.0, reset_every: int = 0, store: Any = "fp32") -> ErrorFeedback:
    return ErrorFeedback.of(CompressConfig(feedback=kind, decay=decay, reset_every=reset_every, store=store))


@pytest.mark.parametrize("name", ["int8", "int4", "fp4", "codebook2", "topk", "topk of 2-bit values"])
def test_what_was_sent_telescopes_over_a_thousand_messages(name: str) -> None:
    """Sum sent + residual = sum meant, and the residual stays bounded; without feedback the error grows."""
    one, keep = CODECS[name], feedback()
    generator = torch.Generator().manual_seed(5)
    bias = torch.randn(300, generator=generator) * 0.01
    memory, sums = None, [torch.zeros(300, dtype=torch.float64) for _ in range(3)]
    longest = 0.0
    for _ in range(1000):
        x = bias + torch.randn(300, generator=generator)
        meant = keep.meant(memory, x)
        sent = one.decode(one.encode(meant), 300)
        memory = keep.after(memory, meant, sent)
        for total, part in zip(sums, (x, sent, one.decode(one.encode(x), 300))):
            total += part.double()
        longest = max(longest, size(keep.residual(memory, x)))
    assert memory is not None
    true, fed, unfed = sums
    torch.testing.assert_close(fed + keep.residual(memory, fed).double(), true, atol=2e-3, rtol=0)
    assert longest < 40 * math.sqrt(300)
    assert size(fed - true) <= longest + 0.1
    assert size(unfed - true) > 1.3 * size(fed - true)


def test_classic_feedback_with_decay_and_the_moving_average_of_loco() -> None:
    x, sent = torch.tensor([1.0, -2.0]), torch.tensor([0.5, -2.5])
    classic = feedback(decay=0.9)
    first = classic.after(None, x, sent)
    torch.testing.assert_close(classic.residual(first, x), 0.9 * (x - sent))
    torch.testing.assert_close(classic.meant(first, x), x + 0.9 * (x - sent))
    loco = feedback("loco", decay=0.8)
    first = loco.after(None, x, sent)
    second = loco.after(first, x, sent)
    torch.testing.assert_close(loco.residual(first, x), 0.2 * (x - sent))
    torch.testing.assert_close(loco.residual(second, x), 0.8 * 0.2 * (x - sent) + 0.2 * (x - sent))
    assert feedback("none").after(None, x, sent) is None
    assert feedback("none").meant(None, x) is x


def test_deepspeed_loco_resets_one_tensor_per_thousand_tensors_instead_of_every_tensor() -> None:
    """Each buffer counts its own messages, and is reset at its own every-fourth."""
    loco = feedback("loco", decay=0.5, reset_every=4)
    memories: dict[str, object] = {"a": None, "b": None, "c": None}
    x, sent = torch.tensor([1.0]), torch.tensor([0.0])
    for k in range(1, 13):
        for key, memory in memories.items():
            if key != "c" or k > 2:  # buffer c joins late
                memories[key] = loco.after(memory, x, sent)  # type: ignore[arg-type]
        empty = [not loco.residual(memories[key], x).any() for key in memories]  # type: ignore[arg-type]
        assert empty == [k % 4 == 0, k % 4 == 0, k <= 2 or (k - 2) % 4 == 0]


def test_residuals_kept_in_eight_bits_are_close_and_four_times_smaller() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(2))
    memory = feedback(store="int8").after(None, x, torch.zeros_like(x))
    assert memory is not None
    assert len(memory["wire"]) == 4096 + 128
    assert size(feedback(store="int8").residual(memory, x) - x) < 0.01 * size(x)


# Projections --------------------------------------------------------------------------------------------------------


class Self:
    """A group of one: the mean is the value itself."""

    island, islands = 0, 1

    def mean(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return values, values

    def tell(self, wire: Tensor, teller: int, size: int) -> Tensor:
        assert len(wire) == size
        return wire


def pieces(*shapes: tuple[int, ...]) -> tuple[Piece, ...]:
    ends = np.cumsum([math.prod(s) for s in shapes]).tolist()
    return tuple(Piece(f"p{i}", s, e - math.prod(s), e, False) for i, (s, e) in enumerate(zip(shapes, ends)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["low_rank", "cyclic"]), st.floats(-15, 15))
def test_projections_contract_and_merge_what_they_send(seed: int, kind: str, e: float) -> None:
    layout = pieces((20, 30), (), (0, 4), (7,), (16, 2, 8), (3, 3))
    x = torch.randn(layout[-1].stop, generator=torch.Generator().manual_seed(seed)) * 10.0**e
    project = LowRank(2, False, 1) if kind == "low_rank" else CyclicTopK(0.1)
    merged, sent, memory = project(x, layout, 4, None, Self())
    assert torch.equal(merged, sent)
    assert size(x - sent) <= size(x) * (1 + 1e-5)
    if kind == "low_rank":
        assert torch.equal(layout[3].of(sent), layout[3].of(x)), "a vector is sent as it is"
        assert set(memory["bases"]) == {0, 4}
        assert torch.linalg.matrix_rank(layout[0].of(sent).double(), rtol=1e-4) == 2
    else:
        assert int((sent != 0).sum()) == math.ceil(0.1 * len(x))


@pytest.mark.parametrize("kind", ["low_rank", "cyclic"])
def test_projections_with_feedback_telescope(kind: str) -> None:
    layout, keep = pieces((20, 30), (9,)), feedback()
    project = LowRank(2, False, 1) if kind == "low_rank" else CyclicTopK(0.05)
    generator = torch.Generator().manual_seed(0)
    state, memory, meant_sum, sent_sum = None, None, torch.zeros(609), torch.zeros(609)
    for k in range(1000):
        x = torch.randn(609, generator=generator) + 0.1
        meant = keep.meant(memory, x)
        _, sent, state = project(meant, layout, k, state, Self())
        memory = keep.after(memory, meant, sent)
        meant_sum, sent_sum = meant_sum + x, sent_sum + sent
    assert memory is not None
    torch.testing.assert_close(sent_sum + keep.residual(memory, sent_sum), meant_sum, atol=0.02, rtol=0)
    assert size(keep.residual(memory, x)) < 60 * size(x), "the residual grows without bound"


def test_low_rank_finds_a_matrix_of_that_rank_and_its_rank_follows_the_effective_one() -> None:
    generator = torch.Generator().manual_seed(0)
    layout = pieces((40, 50))
    thin = torch.randn(40, 2, generator=generator) @ torch.randn(2, 50, generator=generator)
    full = torch.randn(40, 50, generator=generator)
    project, memory = LowRank(12, True, 3), None
    for k in range(10):
        merged, _, memory = project(thin.flatten(), layout, k, memory, Self())
    torch.testing.assert_close(merged.view(40, 50), thin, rtol=1e-3, atol=1e-3)
    assert memory is not None
    assert memory["bases"][0].shape[1] <= 3
    assert len(memory["ranks"][0]) == 3
    for k in range(30):
        _, _, memory = project(full.flatten(), layout, k, memory, Self())
    assert memory["bases"][0].shape[1] == 12, "the rank could not grow again"


def test_effective_rank() -> None:
    assert effective_rank(torch.eye(5)) == pytest.approx(5)
    assert effective_rank(torch.zeros(4, 2)) == 0
    assert effective_rank(torch.outer(torch.ones(4), torch.ones(3))) == pytest.approx(1, abs=1e-3)


def test_options_that_make_no_sense_together_are_refused() -> None:
    with pytest.raises(ValueError, match="route gather"):
        CompressConfig(codec="topk")
    with pytest.raises(ValueError, match="route scatter"):
        dataclasses.replace(TOPK, projection="low_rank")
    with pytest.raises(ValueError, match="decay"):
        CompressConfig(feedback="loco")
    with pytest.raises(ValueError, match="averages coordinates"):
        OuterConfig(merge=MergeConfig(rule="radial"), compress=CompressConfig(projection="low_rank"))
