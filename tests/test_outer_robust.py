"""Islands that fail, weights, metrics: what the outer step does with more than plain means."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from simulated_islands import Network, on_islands
from test_outer_state import CONFIGS
from torch import nn
from toy_islands import Island, Toy, flat, quadratic_, train_islands

from mdlm.training.exchange import Alone, Merged, Message, measure
from mdlm.training.outer import OuterStep
from mdlm.training.outer_config import CompressConfig, MergeConfig, OuterConfig


def poisoned(bad: int, at: int) -> Any:
    def inner(model: nn.Module, island: int, step: int) -> None:
        quadratic_(model, island, step)
        if island == bad and step == at:
            with torch.no_grad():
                next(model.parameters())[0, 0] = float("nan")

    return inner


@pytest.mark.parametrize("name", ["diloco", "streaming", "eager", "low_rank", "sparse", "edit", "pairs"])
def test_an_island_that_is_not_finite_leaves_the_round_and_is_reported(name: str) -> None:
    islands = train_islands(CONFIGS[name], 3, 20, poisoned(bad=1, at=9))
    for island in islands:
        assert np.isfinite(flat(island.model)).all()
        assert all(torch.isfinite(a).all() for a in island.outer.anchors)
    if name != "pairs":
        left_out = [r for r in islands[0].landed if r.stats.contributors == (0, 2)]
        assert len(left_out) >= 1
        assert all(len(r.stats.contributors) in (2, 3) for r in islands[0].landed)


def test_an_island_that_was_left_out_starts_again_without_residual() -> None:
    config = OuterConfig(every=5, compress=CompressConfig(codec="int4", feedback="classic"))
    for island in train_islands(config, 3, 10, poisoned(bad=1, at=9)):
        memory = island.exchange.state_dict()[0]
        assert (memory["push"] is None) == (island.island == 1)


def test_a_rolled_back_tensor_returns_to_its_anchor_and_its_momentum_stays() -> None:
    """EDiT's roll-back: no outer step for that tensor, not even one along old momentum."""

    class RollingBack(Alone):
        def start(self, message: Message) -> Any:
            merged = super().start(message)()
            return lambda: dataclasses.replace(merged, rolled_back=(1,) if message.round else ())

    model = Toy()
    outer = OuterStep(model, OuterConfig(every=1), RollingBack())
    parameters = dict(model.named_parameters())
    for n in (1, 2):
        state = {name: p.detach().clone() for name, p in parameters.items()}
        momentum = [dict(s)["momentum_buffer"].clone() for s in outer.optimizers[0].state.values()]
        quadratic_(model, 0, n)
        outer.step(n)
    assert torch.equal(parameters["layers.0.weight"], state["layers.0.weight"])
    assert not torch.equal(parameters["layers.1.weight"], state["layers.1.weight"])
    after = [dict(s)["momentum_buffer"] for s in outer.optimizers[0].state.values()]
    assert [torch.equal(a, b) for a, b in zip(momentum, after)] == [False, True, False, False, False]


def test_one_island_alone_that_is_not_finite_returns_to_its_anchor() -> None:
    model = Toy()
    outer = OuterStep(model, OuterConfig(every=1))
    anchor = flat(model)
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("inf")
    (landed,) = outer.step(1)
    assert np.array_equal(flat(model), anchor)
    assert landed.stats.contributors == ()


def test_torchft_249_286_the_sum_is_divided_by_all_islands_instead_of_the_contributors() -> None:
    def inner(model: nn.Module, island: int, step: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(float("nan") if island == 1 else 1.0)

    island = train_islands(OuterConfig(every=1, optimizer="sgd", lr=1.0), 3, 1, inner)[0]
    np.testing.assert_allclose(flat(Toy()) - flat(island.model), 1.0, atol=1e-6)


def test_islands_are_weighted_by_their_tokens() -> None:
    config = OuterConfig(every=2, optimizer="sgd", lr=1.0, merge=MergeConfig(weights="tokens"))
    network = Network(2)

    def work(island: int) -> np.ndarray:
        one = Island(config, network, island)
        for n in (1, 2):
            with torch.no_grad():
                for p in one.model.parameters():
                    p.sub_(float(island))
            one.outer.step(n, tokens=1 + 2 * island)
        one.exchange.close()
        return flat(one.model)

    for result in on_islands(2, work):
        np.testing.assert_allclose(flat(Toy()) - result, 2 * 6 / 8, atol=1e-6)
    forgetful = OuterStep(Toy(), dataclasses.replace(config, every=1))
    with pytest.raises(ValueError, match="needs the tokens"):
        forgetful.step(1)


def test_muloco_the_learning_rate_enters_twice_with_error_feedback() -> None:
    """Halving the outer rate halves the move: it must not also scale what is fed back."""

    def move(lr: float) -> np.ndarray:
        compress = CompressConfig(feedback="classic")
        config = OuterConfig(every=2, optimizer="sgd", lr=lr, compress=compress)
        return flat(Toy()) - flat(train_islands(config, 2, 2)[0].model)

    np.testing.assert_allclose(move(0.25), 0.25 * move(1.0), atol=1e-6)


def test_the_metrics_of_a_round() -> None:
    def inner(model: nn.Module, island: int, step: int) -> None:
        with torch.no_grad():
            for k, p in enumerate(model.parameters()):
                p.sub_(1.0 if k % 2 == island else 0.0)  # the islands move orthogonal parts

    island = train_islands(OuterConfig(every=1), 2, 1, inner)[0]
    (report,) = island.landed
    own, other = 20 + 16 + 20, 16 + 16
    assert report.stats.norms == pytest.approx((own**0.5, other**0.5), rel=1e-6)
    assert report.stats.merged_norm == pytest.approx(0.5 * (own + other) ** 0.5, rel=1e-6)
    assert report.stats.cosine == pytest.approx((own / (own + other)) ** 0.5, rel=1e-6)
    # each island is half the difference away from their mean
    assert report.stats.consensus == pytest.approx(0.5 * (own + other) ** 0.5, rel=1e-6)
    assert report.staleness == 0
    assert report.wait_seconds >= 0


def test_the_exchange_is_a_function_passed_in() -> None:
    """Anything with `start` will do: here the merge is done by the test."""

    class Halving:
        islands = 2

        def start(self, message: Message) -> Any:
            stats = measure(message, message.delta, [1.0], [0], 0)
            return lambda: Merged(message.delta / 2, (), 0.5, stats)

        def rewind(self) -> None:
            raise AssertionError

        def state_dict(self) -> dict[Any, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    model = Toy()
    before = flat(model)
    outer = OuterStep(model, OuterConfig(every=1, optimizer="sgd", lr=1.0), Halving())
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(1.0)
    outer.step(1)
    np.testing.assert_allclose(before - flat(model), 0.5, atol=1e-6)
