"""Merge rules: norms and angles they promise, who is left out, and what becomes of the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import reference_outer as ref
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mdlm.training.merge import clip, combine, decide, gram, mean, norms, pair_of, penalty, radial, trusted
from mdlm.training.outer_config import PRESETS, MergeConfig, OuterConfig, pair_growth

PLAIN = torch.tensor([False])


def random(islands: int, values: int, seed: int = 0) -> list[Tensor]:
    return list(torch.randn(islands, values, generator=torch.Generator().manual_seed(seed)))


def whole(deltas: list[Tensor]) -> Tensor:
    return gram(deltas, [(0, 0, len(deltas[0]))], 1)


def merged(deltas: list[Tensor], coefficients: Tensor) -> np.ndarray:
    return combine(deltas, [(0, 0, len(deltas[0]))], coefficients).double().numpy()


def weights_of(*weights: float) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64)


def test_gram_matrices_of_tensors_and_of_parts_add_up() -> None:
    deltas = random(3, 20)
    products = gram(deltas, [(0, 0, 7), (2, 7, 20)], 3)
    stacked = torch.stack(deltas).double()
    torch.testing.assert_close(products[0], stacked[:, :7] @ stacked[:, :7].T)
    assert not products[1].any()
    halves = gram([d[:10] for d in deltas], [(0, 0, 7), (2, 7, 10)], 3) + gram(
        [d[10:] for d in deltas], [(2, 0, 10)], 3
    )
    torch.testing.assert_close(products, halves)
    torch.testing.assert_close(norms(products)[2], stacked[:, 7:].norm(dim=1))


def test_weighted_mean_leaves_out_islands_without_weight_whatever_they_hold() -> None:
    deltas = random(3, 5)
    deltas[1] = torch.full((5,), float("nan"))
    c = mean(whole(deltas), weights_of(1.0, 0.0, 3.0))
    np.testing.assert_allclose(merged(deltas, c), (deltas[0] / 4 + 3 * deltas[2] / 4).double().numpy(), rtol=1e-6)
    assert not mean(whole(deltas), weights_of(0.0, 0.0, 0.0)).any()


# Radial-directional averaging ---------------------------------------------------------------------------------------


def test_radial_keeps_the_norm_of_orthogonal_deltas_where_the_mean_shrinks_it() -> None:
    for islands in (2, 4, 8, 16):
        deltas = list(3.0 * torch.eye(islands))
        ones = torch.ones(islands, dtype=torch.float64)
        products = whole(deltas)
        assert np.linalg.norm(merged(deltas, radial(products, ones, PLAIN))) == pytest.approx(3.0, rel=1e-6)
        assert np.linalg.norm(merged(deltas, mean(products, ones))) == pytest.approx(3.0 / islands**0.5, rel=1e-6)


def test_radial_survives_zero_and_cancelling_deltas() -> None:
    d = torch.tensor([1.0, 2.0, -2.0])
    ones = weights_of(1, 1)
    half = merged([d, torch.zeros(3)], radial(whole([d, torch.zeros(3)]), ones, PLAIN))
    np.testing.assert_allclose(half, 0.5 * d.numpy(), rtol=1e-6)  # direction of d, mean length 3/2
    nothing = [torch.zeros(3), torch.zeros(3)]
    assert not merged(nothing, radial(whole(nothing), ones, PLAIN)).any()
    (u,) = random(1, 50)
    nearly = [u, -3 * u, torch.zeros(50)]  # directions cancel but for rounding, which must not become the direction
    np.testing.assert_allclose(
        merged(nearly, radial(whole(nearly), weights_of(1, 1, 1), PLAIN)), -2 / 3 * u.numpy(), rtol=1e-5
    )
    opposite = [d, -2 * d]  # directions cancel: the mean
    np.testing.assert_allclose(merged(opposite, radial(whole(opposite), ones, PLAIN)), -0.5 * d.numpy(), rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 30), st.integers(0, 10_000), st.floats(-18, 18))
def test_radial_equals_the_oracle_at_any_scale_and_in_any_order(islands: int, values: int, seed: int, e: float) -> None:
    deltas = [d * 10.0**e for d in random(islands, values, seed)]
    weights = torch.rand(islands, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.1
    got = merged(deltas, radial(whole(deltas), weights, PLAIN))
    expected = ref.radial_mean([d.double().numpy() for d in deltas], weights.tolist())
    size = max(float(d.norm()) for d in deltas)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5 * size)
    order = torch.randperm(islands, generator=torch.Generator().manual_seed(seed)).tolist()
    shuffled = [deltas[i] for i in order]
    again = merged(shuffled, radial(whole(shuffled), weights[order], PLAIN))
    np.testing.assert_allclose(again, got, rtol=1e-4, atol=1e-5 * size)


def test_radial_of_one_island_is_that_island_and_plain_tensors_get_the_mean() -> None:
    (d,) = random(1, 9)
    np.testing.assert_allclose(merged([d], radial(whole([d]), weights_of(5.0), PLAIN)), d.numpy(), rtol=1e-6)
    deltas = random(3, 9)
    products, ones = whole(deltas), weights_of(1, 1, 1)
    torch.testing.assert_close(radial(products, ones, torch.tensor([True])), mean(products, ones))


def test_radial_ignores_an_island_without_weight() -> None:
    deltas = [*random(2, 6), torch.full((6,), float("inf"))]
    got = merged(deltas, radial(whole(deltas), weights_of(1, 1, 0), PLAIN))
    np.testing.assert_allclose(got, ref.radial_mean([d.double().numpy() for d in deltas[:2]], [1, 1]), rtol=1e-5)


# Robustness ---------------------------------------------------------------------------------------------------------


def test_not_finite_too_long_or_contrary_islands_lose_their_weight() -> None:
    base = torch.ones(8)
    deltas = [base + 0.1 * d for d in random(6, 8)]
    ones = torch.ones(6, dtype=torch.float64)
    deltas[1] = torch.full((8,), float("nan"))
    assert trusted(whole(deltas), ones, None, None).tolist() == [1, 0, 1, 1, 1, 1]
    deltas[2] = 50 * base
    assert trusted(whole(deltas), ones, 5.0, None).tolist() == [1, 0, 0, 1, 1, 1]
    deltas[3] = -base
    assert trusted(whole(deltas), ones, 5.0, 0.0).tolist() == [1, 0, 0, 0, 1, 1]
    assert trusted(whole(deltas), ones, None, None).tolist() == [1, 0, 1, 1, 1, 1]


def test_of_two_islands_that_disagree_neither_is_left_out() -> None:
    deltas = [torch.ones(4), -torch.ones(4)]
    assert trusted(whole(deltas), weights_of(1, 1), 3.0, 0.5).tolist() == [1, 1]


def test_a_round_in_which_nobody_is_finite_is_void() -> None:
    deltas = [torch.full((4,), float("nan"))] * 2
    c, _ = decide(MergeConfig(max_norm_ratio=2.0), whole(deltas), weights_of(1, 1), PLAIN, None)
    assert not c.any()


def test_clipping_bounds_the_merged_length_and_no_other() -> None:
    deltas = random(3, 10)
    c = mean(whole(deltas), weights_of(1, 1, 1))
    size = float(np.linalg.norm(merged(deltas, c)))
    assert np.linalg.norm(merged(deltas, clip(whole(deltas), c, size / 3))) == pytest.approx(size / 3, rel=1e-6)
    torch.testing.assert_close(clip(whole(deltas), c, 2 * size), c)
    assert not clip(whole([torch.zeros(4)] * 2), mean(whole([torch.zeros(4)] * 2), weights_of(1, 1)), 1.0).isnan().any()


# EDiT's penalty -----------------------------------------------------------------------------------------------------


def history(rounds: int, islands: int = 3, scale: float = 1.0, seed: int = 0) -> tuple[Any, list[Tensor]]:
    memory: Any = None
    last: list[Tensor] = []
    for k in range(rounds):
        last = [scale * d for d in random(islands, 50, seed + k)]
        _, memory = penalty(whole(last), torch.ones(islands, dtype=torch.float64), memory, 3.0, 0.02, 20)
    return memory, last


def test_edit_prefers_the_shorter() -> None:
    deltas = [torch.tensor([3.0, 0.0]), torch.tensor([0.0, 1.0])]
    c, _ = penalty(whole(deltas), weights_of(1, 2), None, 3.0, 0.02, 20)
    expected = np.exp([-3.0, -1.0]) * [1, 2]
    np.testing.assert_allclose(c[0].numpy(), expected / expected.sum(), rtol=1e-9)


def test_edit_leaves_out_a_sudden_norm_only_after_warm_up() -> None:
    for rounds, kept in ((10, True), (40, False)):
        memory, last = history(rounds)
        last[1] = 20 * last[1]
        c, _ = penalty(whole(last), weights_of(1, 1, 1), memory, 3.0, 0.02, 20)
        assert (c[0, 1] > 0) == kept or c[0, 1] < 1e-8
        assert c[0].sum() == pytest.approx(1.0)
        assert kept or c[0, 1] == 0


def test_edit_rolls_back_where_all_islands_jump_and_recovers_from_a_lasting_change() -> None:
    memory, last = history(60)
    jumped = [3 * d for d in last]
    c, _ = penalty(whole(jumped), weights_of(1, 1, 1), memory, 3.0, 0.02, 20)
    assert not c.any()
    for k in range(80):
        deltas = [3 * d for d in random(3, 50, 1000 + k)]
        c, memory = penalty(whole(deltas), weights_of(1, 1, 1), memory, 3.0, 0.02, 20)
    assert c.any(), "after a lasting change of scale everybody is excluded for ever"


def test_edit_recovers_from_constant_norms_and_from_zeros() -> None:
    for start in (torch.ones(4), torch.zeros(4)):
        memory = None
        for k in range(200):
            d = start if k < 60 else start * 2 + 1
            c, memory = penalty(whole([d, d]), weights_of(1, 1), memory, 3.0, 0.02, 20)
        assert c.any()


def test_edit_keeps_statistics_of_a_nan_round_finite() -> None:
    memory, last = history(30)
    last[0] = torch.full((50,), float("nan"))
    products = whole(last)
    c, memory = penalty(products, trusted(products, weights_of(1, 1, 1), None, None), memory, 3.0, 0.02, 20)
    assert c[0, 0] == 0
    assert bool(memory["average"].isfinite().all())
    assert bool(memory["variance"].isfinite().all())


def test_edit_moving_average_and_variance_equal_their_recurrence() -> None:
    average, variance, memory = None, 0.0, None
    for k in range(15):
        deltas = random(1, 12, k)
        length = float(deltas[0].double().norm())
        if average is None:
            average = length
        else:
            gap = length - average
            average, variance = average + 0.1 * gap, 0.9 * (variance + 0.1 * gap * gap)
        _, memory = penalty(whole(deltas), weights_of(1), memory, 3.0, 0.1, 100)
    assert memory is not None
    assert float(memory["average"]) == pytest.approx(average, rel=1e-9)
    assert float(memory["variance"]) == pytest.approx(variance, rel=1e-9)


# Pairs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("islands", [1, 2, 3, 8, 9])
def test_pairs_are_mutual_and_change_from_round_to_round(islands: int) -> None:
    seen = set()
    for number in range(200):
        peers = [pair_of(i, number, islands, 3) for i in range(islands)]
        assert [peers[p] for p in peers] == list(range(islands))
        assert sum(p == i for i, p in enumerate(peers)) == islands % 2
        seen |= set(enumerate(peers))
    together = islands * (islands - 1)
    assert len([pair for pair in seen if pair[0] != pair[1]]) == together, "some islands never meet"


def test_pairs_differ_by_seed_and_need_no_state() -> None:
    assert [pair_of(0, n, 8, 1) for n in range(20)] != [pair_of(0, n, 8, 2) for n in range(20)]
    with pytest.raises(ValueError, match="island"):
        pair_of(3, 0, 3, 0)


@pytest.mark.parametrize(("momentum", "pull"), [(0.0, 1.0), (0.3, 0.6), (0.5, 1.7)])
def test_the_growth_of_distance_between_paired_anchors_is_what_a_simulation_shows(momentum: float, pull: float) -> None:
    rng = np.random.default_rng(0)
    x, m = rng.normal(size=100_000), np.zeros(100_000)
    sizes = []
    for _ in range(12):
        pairs = rng.permutation(len(x)).reshape(-1, 2)
        mate = np.empty(len(x), dtype=int)
        mate[pairs[:, 0]], mate[pairs[:, 1]] = pairs[:, 1], pairs[:, 0]
        m = momentum * m + pull * (x - (x + x[mate]) / 2)
        x = x - m
        sizes.append(float((x * x).mean()))
    measured = (sizes[-1] / sizes[3]) ** (1 / 8)
    assert measured == pytest.approx(pair_growth(momentum, pull), rel=0.1)
    assert pair_growth(0.0, pull) == pytest.approx(max(abs(1 - pull + pull * pull / 2), 0.0), abs=1e-12)


def test_a_pull_that_drives_anchors_apart_is_refused() -> None:
    noloco = PRESETS["noloco"]
    with pytest.raises(ValueError, match="drift apart"):
        dataclasses.replace(noloco, merge=dataclasses.replace(noloco.merge, pull=2.5))
    with pytest.raises(ValueError, match="heavy_ball"):
        OuterConfig(merge=MergeConfig(rule="pairs"))
