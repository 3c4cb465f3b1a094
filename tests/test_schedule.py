"""Schedules against their definitions; times: uniform, stratified over the global batch, the same for any split."""

from __future__ import annotations

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mdlm.schedule import (
    SCHEDULES,
    TIME_SAMPLING,
    Linear,
    NoiseSchedule,
    Polynomial,
    discrete_times,
    draw_times,
    exact_counts,
    make_schedule,
    nelbo_weight,
)

NAMES = list(SCHEDULES)
KINDS = list(TIME_SAMPLING)
ALL = [*(make_schedule(name) for name in NAMES), Polynomial(0.7), Polynomial(1.0), Polynomial(3.5)]


@pytest.mark.parametrize("name", NAMES)
def test_alpha_equals_its_definition(name: str) -> None:
    t = torch.linspace(0.001, 1.0, 50)
    expected = torch.tensor([reference.ALPHAS[name](x) for x in t.double().tolist()], dtype=torch.float64)
    alpha = make_schedule(name).alpha(t)
    assert alpha.dtype == torch.float64  # although t came in float32
    torch.testing.assert_close(alpha, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_derivative_weight_and_inverse_agree_with_alpha(schedule: NoiseSchedule) -> None:
    t = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    h = 1e-5
    slope = (schedule.alpha(t + h) - schedule.alpha(t - h)) / (2 * h)
    torch.testing.assert_close(schedule.dalpha(t), slope, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(schedule.weight(t), -schedule.dalpha(t) / schedule.mask_prob(t), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(schedule.time(schedule.mask_prob(t)), t, rtol=1e-9, atol=1e-9)
    ends = schedule.alpha(torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(ends, torch.tensor([1.0, 0.0], dtype=torch.float64), rtol=0, atol=1e-15)
    assert bool((schedule.alpha(t).diff() < 0).all())


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_weights_are_finite_and_not_negative_down_to_tiny_times(schedule: NoiseSchedule) -> None:
    t = torch.tensor([2.0**-53, 1e-12, 1e-6, 1e-3, 0.5, 1.0], dtype=torch.float64)
    for values in (schedule.weight(t), schedule.mask_prob(t), schedule.dalpha(t)):
        assert bool(values.isfinite().all())
    assert bool((schedule.weight(t) >= 0).all())


def test_linear_is_one_over_t_and_the_first_power() -> None:
    t = torch.rand(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Linear().weight(t), 1.0 / t)
    assert torch.equal(Polynomial(1.0).weight(t), Linear().weight(t))
    assert torch.equal(Polynomial(1.0).mask_prob(t), Linear().mask_prob(t))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_discrete_weights_sum_the_steps_of_alpha(name: str, steps: int) -> None:
    schedule, alpha = make_schedule(name), reference.ALPHAS[name]
    middle = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    grid, weight = discrete_times(schedule, middle, steps)
    for i in range(1, steps + 1):
        assert float(grid[i - 1]) == i / steps
        step = (alpha((i - 1) / steps) - alpha(i / steps)) / (1 - alpha(i / steps))
        assert float(weight[i - 1]) / steps == pytest.approx(step, rel=1e-12)
    edges, _ = discrete_times(schedule, torch.tensor([1e-300, 1.0 / steps, 1.0], dtype=torch.float64), steps)
    assert edges.tolist() == [1 / steps, 1 / steps, 1.0]


@pytest.mark.parametrize("schedule", ALL, ids=repr)
@pytest.mark.parametrize("eps", [0.0, 1e-3, 0.3])
def test_expected_weight_times_mask_probability_is_one(schedule: NoiseSchedule, eps: float) -> None:
    """Symptom (a public code base): clipping t by eps lowers every loss by the factor 1 - eps."""

    def integrand(t: float) -> float:
        time = torch.tensor(t, dtype=torch.float64)
        return float(nelbo_weight(schedule, time, eps) * schedule.mask_prob(time))

    # The 0.7th power has an integrable singularity at 0: substitute t = s^4 there.
    mean = reference.quadrature(lambda s: 4 * s**3 * integrand(s**4), eps**0.25, 1.0) / (1.0 - eps)
    assert mean == pytest.approx(1.0, abs=1e-6)
    if eps == 0.0:
        t = torch.linspace(0.01, 1, 50)
        assert torch.equal(nelbo_weight(schedule, t, eps), schedule.weight(t))


@pytest.mark.parametrize("schedule", ALL, ids=repr)
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("eps", [0.0, 1e-3, 0.3])
def test_counts_and_their_weights(schedule: NoiseSchedule, n: int, eps: float) -> None:
    """weight(k) = 1 / (k P(k)), with P(k) found by counting a fine grid of times; all weights together make n."""
    grid = 200_000
    t = eps + (1 - eps) * (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    k, weight = exact_counts(schedule, t, torch.full((grid,), n), eps)
    assert torch.equal(k, torch.ceil(schedule.mask_prob(t) * n).long())
    seen = k.unique().tolist()
    assert seen == list(range(seen[0], n + 1))
    for count in seen:
        share = float((k == count).double().mean())
        assert weight[k == count].unique().numel() == 1
        expected = n / len(seen) / (count * share)  # counts that eps leaves out are taken to cost as the others
        assert float(weight[k == count][0]) == pytest.approx(expected, rel=2e-2 if share < 1e-3 else 1e-3)
    assert float((weight * k).mean()) == pytest.approx(n, rel=1e-3)


def test_counts_of_the_linear_schedule_weigh_n_over_k() -> None:
    t = torch.rand(500, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    n = torch.randint(0, 9, (500,), generator=torch.Generator().manual_seed(2))
    k, weight = exact_counts(Linear(), t, n, 0.0)
    assert bool((k[n > 0] >= 1).all())
    torch.testing.assert_close(weight[n > 0], (n / k)[n > 0].double())
    assert not bool(k[n == 0].any() | weight[n == 0].any())
    edges, _ = exact_counts(Linear(), torch.tensor([1e-300, 1.0], dtype=torch.float64), torch.tensor([7, 7]), 0.0)
    assert edges.tolist() == [1, 7]


@given(
    kind=st.sampled_from(KINDS),
    per_process=st.integers(1, 5),
    world=st.integers(1, 4),
    accumulation=st.integers(1, 4),
    step=st.integers(0, 10**6),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_times_are_the_same_for_every_split(
    kind: str, per_process: int, world: int, accumulation: int, step: int, seed: int
) -> None:
    size = per_process * world * accumulation
    rows = torch.arange(step * size, (step + 1) * size)
    whole = draw_times(rows, size, seed, kind, 1e-3)
    for rank in range(world):
        for micro in range(accumulation):
            part = slice(micro * per_process * world + rank, (micro + 1) * per_process * world, world)
            assert torch.equal(draw_times(rows[part], size, seed, kind, 1e-3), whole[part])


def test_rows_of_several_steps_in_one_batch() -> None:
    rows = torch.arange(6, 30)
    for kind in KINDS:
        together = draw_times(rows, 8, 5, kind, 0.0)
        apart = torch.cat([draw_times(row[None], 8, 5, kind, 0.0) for row in rows])
        assert torch.equal(together, apart), kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 5, 8])
def test_a_row_has_uniform_times_wherever_it_stands(kind: str, size: int) -> None:
    steps = 6000
    t = draw_times(torch.arange(steps * size), size, 11, kind, 0.1, 0.9).reshape(steps, size)
    assert 0.1 < float(t.min()) < 0.11
    assert 0.89 < float(t.max()) <= 0.9
    for place in range(size):  # a place that always got the same stratum would fail
        assert stats.kstest(((t[:, place] - 0.1) / 0.8).numpy(), "uniform").pvalue > 1e-4, place
    if size > 1:
        following = torch.corrcoef(torch.stack([t[:-1, 0], t[1:, 0]]))[0, 1]
        assert abs(float(following)) < 4.5 / steps**0.5


@pytest.mark.parametrize("kind", ["low_discrepancy", "stratified"])
def test_each_stratum_of_the_global_batch_is_hit_once_in_shuffled_order(kind: str) -> None:
    size = 16
    orders = set()
    for step in range(50):
        t = draw_times(torch.arange(step * size, (step + 1) * size), size, 3, kind, 0.0)
        strata = (t * size).floor().long()
        assert strata.sort().values.tolist() == list(range(size))
        orders.add(tuple(strata.tolist()))
        offsets = t * size - strata
        assert (float(offsets.std()) < 1e-9) == (kind == "low_discrepancy")
    assert len(orders) == 50


def test_antithetic_times_come_in_pairs() -> None:
    for size in (6, 7):
        t = draw_times(torch.arange(size, 2 * size), size, 3, "antithetic", 0.0)
        partner = (t[:, None] + t - 1.0).abs().min(dim=1).values < 1e-12
        assert int(partner.sum()) == size - size % 2


def test_stratification_removes_the_variance_that_comes_from_t() -> None:
    size, steps = 8, 4000
    rows = torch.arange(size * steps)
    variance = {kind: float(draw_times(rows, size, 1, kind, 0.0).reshape(steps, size).mean(1).var()) for kind in KINDS}
    assert variance["uniform"] == pytest.approx(1 / (12 * size), rel=0.12)
    assert variance["stratified"] == pytest.approx(1 / (12 * size**3), rel=0.12)
    assert variance["low_discrepancy"] == pytest.approx(1 / (12 * size**2), rel=0.12)
    assert variance["antithetic"] < 1e-25


def test_seeds_and_steps_give_different_times() -> None:
    rows = torch.arange(8)
    for kind in KINDS:
        assert not torch.equal(draw_times(rows, 8, 0, kind, 0.0), draw_times(rows, 8, 1, kind, 0.0))
        assert not torch.equal(draw_times(rows, 8, 0, kind, 0.0), draw_times(rows + 8, 8, 0, kind, 0.0))


def test_errors_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"unknown schedule 'cosin'.*did you mean 'cosine'"):
        make_schedule("cosin")
    with pytest.raises(ValueError, match="'linear' has no power"):
        make_schedule("linear", 2.0)
    for power in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="positive number"):
            make_schedule("polynomial", power)
    rows = torch.arange(4)
    with pytest.raises(ValueError, match=r"unknown sampling.*low_discrepancy"):
        draw_times(rows, 4, 0, "low-discrepancy", 0.0)
    for eps, t_max in ((-0.1, 1.0), (0.5, 0.5), (0.0, 1.1), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match="times are drawn from"):
            draw_times(rows, 4, 0, "uniform", eps, t_max)
    with pytest.raises(ValueError, match="at least one row"):
        draw_times(rows, 0, 0, "uniform", 0.0)
    with pytest.raises(ValueError, match="at least one step"):
        discrete_times(Linear(), torch.tensor([0.5]), 0)


def test_times_of_large_batches_are_those_of_their_rows_alone() -> None:
    """The permutation of a large batch is kept between micro-batches; neither order nor company of rows matters."""
    size = 5000
    rows = torch.tensor([4999, 3, 5000, 17, 3 * size + 1, 0])
    whole = draw_times(torch.arange(4 * size), size, 7, "low_discrepancy", 0.0)
    assert torch.equal(draw_times(rows, size, 7, "low_discrepancy", 0.0), whole[rows])
    for step in range(4):
        strata = (whole[step * size : (step + 1) * size] * size).floor().long()
        assert torch.equal(strata.sort().values, torch.arange(size))
    assert not torch.equal(draw_times(rows, size, 8, "low_discrepancy", 0.0), whole[rows])
