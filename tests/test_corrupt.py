"""The forward process: exact probabilities of every mask configuration, and an importance that keeps expectations."""

from __future__ import annotations

import pytest
import reference
import torch
from scipy import stats
from torch import Tensor

from mdlm.corrupt import Corruption, mask_count, mask_tokens

MASK = 0


def _draw(rows: int, maskable: list[bool], p: float, seed: int = 1, ensure_one: bool = True) -> Corruption:
    seq = len(maskable)
    return mask_tokens(
        torch.ones(rows, seq, dtype=torch.long),
        torch.tensor(maskable).expand(rows, seq),
        torch.full((rows,), p, dtype=torch.float64),
        torch.arange(rows),
        seed,
        MASK,
        ensure_one,
    )


def _frequencies(masked: Tensor) -> dict[tuple[int, ...], int]:
    code = (masked.long() << torch.arange(masked.shape[1])).sum(1).bincount(minlength=2 ** masked.shape[1])
    return {m: int(code[sum(1 << i for i in m)]) for m in reference.configurations(range(masked.shape[1]))}


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("p", [0.03, 0.3, 0.8])
@pytest.mark.parametrize("ensure_one", [True, False])
def test_every_configuration_has_its_exact_probability(n: int, p: float, ensure_one: bool) -> None:
    rows = 40_000
    seen = _frequencies(_draw(rows, [True] * n, p, ensure_one=ensure_one).masked)
    law = reference.forced_probability if ensure_one else reference.process_probability
    expected = {m: rows * law(m, n, p) for m in seen}
    assert all(seen[m] == 0 for m in seen if expected[m] == 0)
    used = [m for m in seen if expected[m] > 0]
    assert sum(expected.values()) == pytest.approx(rows)
    if len(used) > 1:
        assert stats.chisquare([seen[m] for m in used], [expected[m] for m in used]).pvalue > 1e-4


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("p", [1e-9, 0.01, 0.5, 0.99, 1.0])
def test_importance_makes_every_expectation_exact(n: int, p: float) -> None:
    """Enumerated: probability with forcing x importance = probability of the process, for each configuration."""
    draw = _draw(400, [True] * n, p)
    by_count = {int(k): draw.importance[draw.masked.sum(1) == k].unique() for k in draw.masked.sum(1).unique()}
    for count, importance in by_count.items():
        assert importance.numel() == 1
        masked = tuple(range(count))
        exact = reference.process_probability(masked, n, p) / reference.forced_probability(masked, n, p)
        assert float(importance) == pytest.approx(exact, rel=1e-9)
    assert p > 0.9 or 1 in by_count  # the case that matters was drawn


def test_importance_counts_only_the_maskable_tokens() -> None:
    draw = _draw(500, [True, False, True, False, False], 0.05)
    single = draw.masked.sum(1) == 1
    assert draw.importance[single].unique().tolist() == pytest.approx([2 * 0.05 / (2 * 0.05 + 0.95)])
    assert bool((draw.importance[~single] == 1).all())


def test_only_maskable_positions_are_masked_and_the_rest_is_carried_over() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (64, 30), generator=generator)
    maskable = torch.rand(64, 30, generator=generator) < 0.5
    maskable[:5] = False
    p = torch.rand(64, dtype=torch.float64, generator=generator)
    draw = mask_tokens(ids, maskable, p, torch.arange(64), 3, MASK)
    assert not bool((draw.masked & ~maskable).any())
    assert torch.equal(draw.input_ids, torch.where(draw.masked, MASK, ids))
    assert torch.equal(draw.masked.any(1), maskable.any(1))  # at least one mask where there can be one, else none


def test_the_forced_position_is_uniform_over_the_maskable_ones() -> None:
    rows = 30_000
    draw = _draw(rows, [True, False, True, True], 0.0)
    assert bool((draw.masked.sum(1) == 1).all())
    assert bool((draw.importance == 0).all())  # such a configuration cannot happen in the process
    counts = draw.masked.sum(0)[[0, 2, 3]]
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4


def test_a_row_does_not_depend_on_its_neighbours_and_grows_with_p() -> None:
    ids = torch.arange(1, 41).repeat(8, 1)
    maskable = torch.ones(8, 40, dtype=torch.bool)
    p = torch.linspace(0.1, 0.9, 8, dtype=torch.float64)
    rows = torch.tensor([3, 99, 7, 12, 0, 5, 10**9, 8])
    whole = mask_tokens(ids, maskable, p, rows, 2, MASK)
    for i in range(8):
        alone = mask_tokens(ids[i : i + 1], maskable[i : i + 1], p[i : i + 1], rows[i : i + 1], 2, MASK)
        assert torch.equal(alone.masked[0], whole.masked[i])
        assert torch.equal(alone.importance[0], whole.importance[i])
    same_row = mask_tokens(ids, maskable, p, torch.full((8,), 4), 2, MASK).masked
    assert all(bool((same_row[i] <= same_row[i + 1]).all()) for i in range(7))


def test_masks_of_neighbouring_positions_rows_and_seeds_are_independent() -> None:
    masks = torch.stack([_draw(400, [True] * 100, 0.5, seed=s).masked for s in (0, 1)]).double() - 0.5
    for a, b in ((masks[:, :, 1:], masks[:, :, :-1]), (masks[:, 1:], masks[:, :-1]), (masks[1], masks[0])):
        assert abs(float((a * b).mean()) * 4) < 4.5 / a.numel() ** 0.5


def test_degenerate_probabilities_and_empty_rows() -> None:
    assert bool(_draw(5, [True] * 4, 1.0).masked.all())
    nothing = _draw(5, [False] * 4, 0.7)
    assert not bool(nothing.masked.any())
    assert bool(nothing.importance.isfinite().all())
    assert not bool(_draw(5, [True] * 4, 0.0, ensure_one=False).masked.any())
    assert _draw(0, [True] * 4, 0.5).masked.shape == (0, 4)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_probabilities_outside_0_1_are_refused(p: float) -> None:
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        _draw(2, [True], p)


def test_text_that_holds_the_mask_token_is_refused_where_it_would_be_predicted() -> None:
    ids = torch.tensor([[5, MASK, 6]])
    p, rows = torch.tensor([0.5]), torch.tensor([0])
    with pytest.raises(ValueError, match="clean text holds the mask token"):
        mask_tokens(ids, torch.tensor([[True, True, True]]), p, rows, 0, MASK)
    mask_tokens(ids, torch.tensor([[True, False, True]]), p, rows, 0, MASK)


def _count(rows: int, maskable: list[bool], count: list[int] | int, seed: int = 1) -> Tensor:
    seq = len(maskable)
    counts = torch.tensor(count).expand(rows)
    ids = torch.ones(rows, seq, dtype=torch.long)
    return mask_count(ids, torch.tensor(maskable).expand(rows, seq), counts, torch.arange(rows), seed, MASK).masked


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_exact_counts_mask_every_set_of_that_size_alike(count: int) -> None:
    rows = 30_000
    seen = _frequencies(_count(rows, [True, False, True, True], count))
    allowed = [m for m in seen if len(m) == count and 1 not in m]
    assert sum(seen[m] for m in allowed) == rows
    if len(allowed) > 1:
        assert stats.chisquare([seen[m] for m in allowed]).pvalue > 1e-4


def test_exact_counts_grow_and_share_the_order_of_independent_masks() -> None:
    maskable = [True] * 20 + [False] * 4
    one_row = torch.tensor(maskable).expand(21, 24)
    ids, rows = torch.ones(21, 24, dtype=torch.long), torch.full((21,), 5)
    masked = mask_count(ids, one_row, torch.arange(21), rows, 3, MASK).masked
    assert masked.sum(1).tolist() == list(range(21))
    assert all(bool((masked[i] <= masked[i + 1]).all()) for i in range(20))
    independent = mask_tokens(ids, one_row, torch.linspace(0, 1, 21).double(), rows, 3, MASK).masked
    assert torch.equal(independent, masked[independent.sum(1)])


@pytest.mark.parametrize("count", [-1, 4])
def test_counts_that_do_not_fit_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="number of maskable tokens"):
        _count(2, [True, False, True, True], count)
