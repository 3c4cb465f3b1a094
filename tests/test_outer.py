"""The outer step: its identities and its schedule; public bugs of other implementations by their symptoms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from reference_outer import quadratic_anchor
from torch import nn
from toy_islands import Toy, flat, loss, train_islands

from mdlm.config import MDLMConfig
from mdlm.modeling import MDLMForMaskedLM
from mdlm.training.fragments import Schedule, layout
from mdlm.training.outer import OuterStep
from mdlm.training.outer_config import PRESETS, OuterConfig
from mdlm.training.outer_optim import DelayedNesterov

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
ADAMW: Make = lambda p: torch.optim.AdamW(p, lr=0.02)  # noqa: E731
SGD: Make = lambda p: torch.optim.SGD(p, lr=0.2)  # noqa: E731
MOMENTUM: Make = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)  # noqa: E731


def with_optimizer(make: Make) -> Callable[[nn.Module, int, int], None]:
    """An inner training with its own optimizer per model."""
    optimizers: dict[int, torch.optim.Optimizer] = {}

    def inner(model: nn.Module, island: int, step: int) -> None:
        optimizer = optimizers.setdefault(id(model), make(list(model.parameters())))
        loss(model, island, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    return inner


def alone(config: OuterConfig, steps: int, make: Make = ADAMW, model: nn.Module | None = None) -> nn.Module:
    model = Toy() if model is None else model
    outer, inner = OuterStep(model, config), with_optimizer(make)
    for n in range(1, steps + 1):
        inner(model, 0, n)
        outer.step(n)
    return model


# Identities ---------------------------------------------------------------------------------------------------------


def test_one_island_every_step_is_plain_training_bit_for_bit() -> None:
    plain, inner = Toy(), with_optimizer(ADAMW)
    for n in range(1, 61):
        inner(plain, 0, n)
    model = alone(OuterConfig(every=1, optimizer="sgd", lr=1.0), 60)
    assert np.array_equal(flat(model), flat(plain))
    assert (np.sign(flat(model)) != np.sign(flat(Toy()))).sum() > 5, "no value crossed zero, where rounding bites"


@pytest.mark.parametrize("make", [SGD, MOMENTUM])
def test_islands_that_exchange_every_step_are_data_parallel_sgd(make: Make) -> None:
    together = Toy()
    optimizer = make(list(together.parameters()))
    for n in range(1, 31):
        torch.stack([loss(together, i, n) for i in range(4)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    islands = train_islands(OuterConfig(every=1, optimizer="sgd", lr=1.0), 4, 30, with_optimizer(make))
    for island in islands:
        np.testing.assert_allclose(flat(island.model), flat(together), atol=1e-6)


def test_negative_control_with_adamw_inside_they_are_not() -> None:
    together = Toy()
    optimizer = ADAMW(list(together.parameters()))
    for n in range(1, 31):
        torch.stack([loss(together, i, n) for i in range(4)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    islands = train_islands(OuterConfig(every=1, optimizer="sgd", lr=1.0), 4, 30, with_optimizer(ADAMW))
    assert np.abs(flat(islands[0].model) - flat(together)).max() > 1e-2


def test_one_island_is_the_snoo_recurrence() -> None:
    slow, momentum, model, inner = flat(Toy()), np.zeros(88), Toy(), with_optimizer(ADAMW)
    for n in range(1, 41):
        inner(model, 0, n)
        if n % 5 == 0:
            d = slow - flat(model)
            momentum = 0.9 * momentum + d
            slow = slow - 0.7 * (d + 0.9 * momentum)
            nn.utils.vector_to_parameters(torch.tensor(slow, dtype=torch.float32), model.parameters())
    np.testing.assert_allclose(flat(alone(OuterConfig(every=5), 40)), flat(model), atol=1e-6)


def test_one_island_without_momentum_is_lookahead() -> None:
    slow, model, inner = [p.detach().clone() for p in Toy().parameters()], Toy(), with_optimizer(ADAMW)
    for n in range(1, 41):
        inner(model, 0, n)
        if n % 5 == 0:
            with torch.no_grad():
                for s, p in zip(slow, model.parameters()):
                    p.copy_(s.lerp_(p, 0.5))
    assert np.array_equal(flat(alone(OuterConfig(every=5, optimizer="sgd", lr=0.5), 40)), flat(model))


def test_streaming_with_one_fragment_no_delay_no_mixing_is_diloco_bit_for_bit() -> None:
    a = train_islands(OuterConfig(every=6), 2, 24)
    b = train_islands(OuterConfig(every=6, overlap="streaming", tau=0, alpha=0.0), 2, 24)
    assert np.array_equal(flat(a[1].model), flat(b[1].model))


def test_eager_with_one_island_is_no_overlap_bit_for_bit() -> None:
    a, b = (alone(OuterConfig(every=5, overlap=o), 32) for o in ("none", "eager"))
    assert np.array_equal(flat(a), flat(b))


def test_one_step_delay_is_no_overlap_one_round_later_where_progress_is_constant() -> None:
    def inner(model: nn.Module, island: int, step: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.01)

    now = train_islands(OuterConfig(every=4), 2, 20, inner)[0]
    later = train_islands(OuterConfig(every=4, overlap="one_step"), 2, 24, inner)[0]
    np.testing.assert_allclose(flat(later.model), flat(now.model), atol=1e-6)


@pytest.mark.parametrize(("every", "lr", "mu"), [(1, 0.7, 0.9), (10, 0.7, 0.9), (4, 1.0, 0.5), (30, 0.3, 0.0)])
def test_closed_form_on_a_quadratic(every: int, lr: float, mu: float) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    outer = OuterStep(model, OuterConfig(every=every, lr=lr, momentum=mu))
    for n in range(1, 12 * every + 1):
        with torch.no_grad():
            model.weight.mul_(1 - 0.05)
        outer.step(n)
    expected = quadratic_anchor(2.0, 0.05, every, lr, mu, 12)
    assert model.weight.item() == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("overlap", ["none", "streaming", "one_step", "eager"])
def test_nothing_is_lost_or_applied_twice(overlap: Any) -> None:
    """With an outer rate of 1 and a constant step, every inner step of every island counts once."""

    def inner(model: nn.Module, island: int, step: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(2.0 ** -(8 + island))

    tau = 2 if overlap == "streaming" else 0
    config = OuterConfig(every=4, optimizer="sgd", lr=1.0, overlap=overlap, tau=tau)
    island = train_islands(config, 2, 18, inner, finish=True)[0]
    # streaming with alpha 0 throws away the tau steps between start and landing, in each of the 4 full rounds
    counted = 18 - (tau * 4 if overlap == "streaming" else 0)
    np.testing.assert_allclose(flat(Toy()) - flat(island.model), counted * (2**-8 + 2**-9) / 2, rtol=1e-4)


def test_delayed_nesterov_equals_its_formulas_and_torch_at_buffer_one() -> None:
    gradients = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    n, c, mu, lr = 3, 0.2, 0.8, 0.1
    theta, m, d = np.zeros(3), np.zeros(3), np.zeros(3)
    for k, g in enumerate(gradients.numpy(), start=1):
        d = d + g
        if k % n == 0:
            m, d = mu * m + d / n, np.zeros(3)
            theta = theta - lr * ((1 - c * n + c) * mu * m + g / n)
        else:
            theta = theta - lr * (c * mu * m + g / n)
    anchors = [torch.zeros(3, dtype=torch.float64) for _ in range(3)]
    optimizers = [
        DelayedNesterov([anchors[0]], lr, mu, n, c),
        DelayedNesterov([anchors[1]], lr, mu, 1, 0.5),
        torch.optim.SGD([anchors[2]], lr=lr, momentum=mu, nesterov=True),
    ]
    for g in gradients:
        for anchor, optimizer in zip(anchors, optimizers):
            anchor.grad = g.clone()
            optimizer.step()
    np.testing.assert_allclose(anchors[0].numpy(), theta, rtol=1e-12)
    np.testing.assert_allclose(anchors[1].numpy(), anchors[2].numpy(), rtol=1e-12)


@pytest.mark.parametrize("kappa", [1e-3, 0.01, 0.1, 0.3, 0.7, 1.0])
def test_the_delayed_preset_is_stable_where_dilocos_rates_are_not(kappa: float) -> None:
    def growth(lr: float, mu: float) -> float:
        step = np.array([[1, -lr * kappa * (1 + mu), -lr * mu * mu], [1, 0, 0], [0, kappa, mu]])
        return float(np.abs(np.linalg.eigvals(step)).max())

    assert growth(PRESETS["diloco_x"].lr, PRESETS["diloco_x"].momentum) < 1
    assert kappa < 0.7 or growth(0.7, 0.9) > 1


# Schedule and layout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "fragments", "tau", "start"), [(10, 1, 0, 0), (12, 5, 3, 7), (6, 6, 6, 0), (7, 3, 1, 20)]
)
def test_every_fragment_is_exchanged_once_per_round(every: int, fragments: int, tau: int, start: int) -> None:
    schedule = Schedule(every, fragments, tau, start)
    for f in range(fragments):
        moments = [n for n in range(start + 5 * every + 1) if f in schedule.starts(n)]
        assert np.diff(moments).tolist() == [every] * (len(moments) - 1)
        assert len(moments) == 5
        assert [schedule.round(f, n) for n in moments] == [0, 1, 2, 3, 4]
        assert all(f in schedule.finishes(n + tau) for n in moments)
    first = sorted(n for n in range(start, start + every + 1) for _ in schedule.starts(n))
    gaps = np.diff([start, *first])
    assert gaps.max() - gaps.min() <= 1, "the exchanges are not spread evenly over the round"
    assert all(schedule.dense(n) == (n < start) for n in range(2 * start + 2))


def test_torch_averager_averages_at_its_first_call() -> None:
    assert not Schedule(10).starts(0)
    assert not Schedule(10).starts(1)
    assert Schedule(10).starts(10) == (0,)


def test_torchft_206_a_joiner_walks_the_fragments_in_another_order() -> None:
    """The order is a function of the step alone, not of how often this object was asked."""
    schedule, used = Schedule(12, 4), Schedule(12, 4)
    for n in range(29):
        used.starts(n)
    assert [schedule.starts(n) for n in range(30, 60)] == [used.starts(n) for n in range(30, 60)]


@pytest.mark.parametrize("pattern", ["strided", "balanced"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_parameter_is_in_exactly_one_fragment(count: int, pattern: Any) -> None:
    parameters = dict(Toy().named_parameters())
    fragments = layout(parameters, count, pattern)
    names = [piece.name for fragment in fragments for piece in fragment]
    assert sorted(names) == sorted(parameters)
    assert len(fragments) == count
    for fragment in fragments:
        assert [p.start for p in fragment] == [0, *[p.stop for p in fragment[:-1]]]
    if pattern == "balanced" and count == 4:
        assert max(f[-1].stop for f in fragments) <= 32


def test_strided_fragments_take_every_second_layer_and_leave_the_rest_to_the_last() -> None:
    names = [[piece.name for piece in f] for f in layout(dict(Toy().named_parameters()), 3)]
    assert names == [["layers.0.weight", "layers.2.weight"], ["layers.1.weight"], ["embed.weight", "head.weight"]]
    with pytest.raises(ValueError, match="at most 4"):
        layout(dict(Toy().named_parameters()), 5)


def test_tied_parameters_count_once_and_frozen_ones_not_at_all() -> None:
    model = Toy()
    model.head.weight = model.embed.weight
    model.layers[1].weight.requires_grad_(False)
    outer = OuterStep(model, OuterConfig(every=1))
    pieces = {piece.name: piece for piece in outer.fragments[0]}
    assert set(pieces) == {"embed.weight", "layers.0.weight", "layers.2.weight"}
    assert pieces["embed.weight"].embedding
    assert not pieces["layers.0.weight"].embedding


def test_the_models_of_this_package_are_cut_into_layers_and_the_rest(tiny_config: MDLMConfig) -> None:
    outer = OuterStep(MDLMForMaskedLM(tiny_config), OuterConfig(every=6, fragments=3))
    names = [{piece.name for piece in fragment} for fragment in outer.fragments]
    assert all(".layers.0." in name for name in names[0])
    assert all(".layers.1." in name for name in names[1])
    assert not any(".layers." in name for name in names[2])
    assert sum(piece.embedding for piece in outer.fragments[2]) == 1, "one table, tied to the head"
    assert sum(f[-1].stop for f in outer.fragments) == sum(p.numel() for p in MDLMForMaskedLM(tiny_config).parameters())


def test_floating_buffers_that_are_saved_are_refused() -> None:
    with pytest.raises(ValueError, match="running_mean"):
        OuterStep(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), OuterConfig())
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.ones(3), persistent=False)
    OuterStep(model, OuterConfig())
