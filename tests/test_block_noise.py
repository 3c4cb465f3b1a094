"""The noise of block diffusion: a level per block, spread over the global batch; clipped blocks and their weights."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import reference_block as rb
import reference_model as ref
import torch
from block_tools import SIZES, layout_batch, loss_and_gradient, objective, rows_batch
from model_tools import VOCAB, make_model
from torch import Tensor

from mdlm.block import units_of
from mdlm.data import Batch
from mdlm.objective import NoisedBatch

# --- noise --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ref.LAYOUTS)
@pytest.mark.parametrize("block_size", [*SIZES, 3, 50])
def test_units_are_the_blocks_of_each_document(layout: str, block_size: int) -> None:
    clean = layout_batch(layout)
    units = units_of(clean, block_size, group=2)
    expected = [
        (r, block)
        for r, row in enumerate(ref.LAYOUTS[layout].rows())
        for block in rb.blocks(*row, block_size)
    ]  # fmt: skip
    assert len(units.numbers) == len(expected) == len(set(units.numbers.tolist()))
    assert units.per_row == math.ceil(9 / block_size)
    for u, (r, block) in enumerate(expected):
        assert units.input_ids[u, : len(block)].tolist() == clean.input_ids[r, block].tolist()
        assert units.maskable[u].tolist() == [True] * len(block) + [False] * (min(9, block_size) - len(block))
    numbered = torch.arange(1, len(expected) + 1)[:, None] * units.maskable
    back = units.per_token(torch.cat([numbered, -numbered]), views=2)
    assert back.shape == (4, 9)
    assert torch.equal(back[2:], -back[:2])
    for u, (r, block) in enumerate(expected):
        assert back[r, block].tolist() == [u + 1] * len(block)
    assert int((back[:2] != 0).sum()) == int(clean.maskable.sum())


def test_a_batch_of_padding_has_no_blocks_and_no_loss() -> None:
    clean = Batch(
        torch.ones(2, 6, dtype=torch.long), torch.zeros(2, 6, dtype=torch.bool), torch.arange(2),
        torch.zeros(2, 6, dtype=torch.bool),
    )  # fmt: skip
    for options in ({}, {"masking": "count"}, {"masking": "count", "complementary": True}, {"block_clip": "exact"}):
        loss = objective(2, **options)
        noised = loss.noise(clean, 0)
        assert not bool(noised.masked.any())
        assert float(loss.numerator(make_model("sdpa", block_size=2), noised).loss.detach()) == 0.0
        assert float(loss.denominator(noised)) == 0.0


@pytest.mark.parametrize("step", [0, 5])
def test_levels_are_low_discrepancy_over_rows_and_blocks_of_the_global_batch(step: int) -> None:
    """BD3-LM, section 4.2: K rows of B blocks draw one level from each of K B strata, whoever holds the rows."""
    rows, seq, block_size = 6, 20, 4
    loss = objective(block_size, rows)
    parts = [loss.noise(rows_batch(2, seq, step * rows + first), step) for first in (0, 2, 4)]
    times = torch.cat([part.times for part in parts])
    strata = ((times - 1e-3) / (1 - 1e-3) * 30).floor().long()
    assert sorted(strata.tolist()) == list(range(30))


def test_levels_do_not_follow_the_order_of_blocks_or_rows() -> None:
    """bd3lms draws strata in reading order: the first row of every batch always has the least noise."""
    rows, seq, steps = 4, 16, 400
    loss = objective(4, rows)
    times = torch.stack([loss.noise(rows_batch(rows, seq, s * rows), s).times for s in range(steps)])
    error = math.sqrt(1 / 12 / steps)
    assert float((times.mean(0) - 0.5005).abs().max()) < 4.5 * error


def test_levels_of_packed_rows_are_uniform_and_their_own() -> None:
    """Short documents give a row more blocks than a whole one has: their levels come from further grids."""
    rows, seq, steps = 8, 16, 250
    loss = objective(4, rows, eps=0.0)
    found = [loss.noise(rows_batch(rows, seq, s * rows, packed=True), s).times for s in range(steps)]
    times = torch.cat(found)
    assert len(times) > 1.3 * rows * 4 * steps
    counts = torch.histc(times.float(), 10, 0.0, 1.0) / len(times)
    assert float((counts - 0.1).abs().max()) < 0.01
    assert all(len(set(part.tolist())) == len(part) for part in found)


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed"])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sequence_mean"}, {"masking": "count"}, {"masking": "count", "complementary": True},
     {"weighting": "none"}, {"block_clip": "exact"}, {"warmup_steps": 10}],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)  # fmt: skip
def test_the_same_global_batch_in_any_split_gives_the_same_loss_and_gradient(
    options: dict[str, Any], packed: bool
) -> None:
    """Float32, to 1e-6; the levels of a block depend on its row's number alone."""
    rows, seq = 8, 12
    loss = objective(4, rows, **options)
    model = make_model("sdpa", block_size=4, initializer_range=0.1)
    whole, gradient = loss_and_gradient(model, [loss.noise(rows_batch(rows, seq, 8, packed), 1)], loss)
    for size in (1, 4):
        parts = [loss.noise(_part(rows_batch(rows, seq, 8, packed), i, size), 1) for i in range(0, rows, size)]
        assert torch.equal(torch.cat([p.masked for p in parts if not loss.complementary] or [torch.zeros(0)]),
                           loss.noise(rows_batch(rows, seq, 8, packed), 1).masked
                           if not loss.complementary else torch.zeros(0))  # fmt: skip
        split, parted = loss_and_gradient(model, parts, loss)
        assert split == pytest.approx(whole, rel=1e-6)
        for name, value in gradient.items():
            torch.testing.assert_close(parted[name], value, rtol=0, atol=1e-6 * float(value.abs().max()), msg=name)


def _part(clean: Batch, first: int, size: int) -> Batch:
    at = slice(first, first + size)
    positions = None if clean.position_ids is None else clean.position_ids[at]
    return Batch(clean.input_ids[at], clean.maskable[at], clean.rows[at], None, positions)


@pytest.mark.parametrize(
    "options",
    [{}, {"schedule": "cosine"}, {"masking": "count"}, {"reduction": "sequence_mean"}, {"eps": 0.3, "t_max": 0.8},
     {"masking": "count", "complementary": True}, {"weighting": "llada"}, {"block_clip": "exact"}],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)  # fmt: skip
def test_uniform_logits_cost_log_v(options: dict[str, Any]) -> None:
    rows = 2000
    loss = objective(4, rows, sampling="uniform", **options)
    clean = rows_batch(rows, 10, packed=True)

    def uniform(logits_at: Tensor, clean_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.full((int(logits_at.sum()), VOCAB), 0.3))

    noised = loss.noise(clean, 0)
    share = noised.weight.double().sum(1)
    got = float(loss.numerator(uniform, noised).loss) / float(loss.denominator(noised))
    error = float(share.std()) * len(share) ** 0.5 / float(loss.denominator(noised))
    assert error < 0.05
    assert abs(got / math.log(VOCAB - 1) - 1) < 4 * error + 1e-5


# --- block-clipped noise ------------------------------------------------------------------------------------------


def _clipped(kind: Any, n: int, rows: int = 40_000, **options: Any) -> tuple[NoisedBatch, Tensor]:
    """Draws of one block of n tokens, and their numbers of masks."""
    loss = objective(n, rows, block_clip=kind, **{"eps": 0.0, **options})
    clean = Batch(torch.ones(rows, n, dtype=torch.long), torch.ones(rows, n, dtype=torch.bool), torch.arange(rows))
    noised = loss.noise(clean, 0)
    return noised, noised.masked.sum(1)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_clipped_blocks_have_a_mask_and_the_law_that_was_enumerated(n: int) -> None:
    """Without clipping a block of n would have no mask with probability 1 / (n + 1)."""
    noised, counts = _clipped("exact", n)
    assert int(counts.min()) == 1
    for k in range(1, n + 1):
        p = math.comb(n, k) * rb.clipped_law(n, k, 1 / n)
        share = float((counts == k).double().mean())
        assert abs(share - p) < 4.5 * math.sqrt(p / len(counts)), k
    assert len({tuple(row) for row in noised.masked[counts == 1].tolist()}) == n, "any token may be the lone mask"


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("eps", [0.0, 1e-3, 0.4])
def test_exact_weights_make_clipped_blocks_the_nelbo(n: int, eps: float) -> None:
    """Weight times probability of each set of masks is what the NELBO gives it: the loss is unbiased for any model."""
    noised, counts = _clipped("exact", n, rows=3000, eps=eps)
    for k in set(counts.tolist()):
        expected = rb.nelbo_set_weight(n, k) / rb.clipped_law(n, k, 1 / n, eps)
        assert noised.weight[noised.masked & (counts == k)[:, None]].tolist() == pytest.approx(
            [expected] * (k * int((counts == k).sum())), rel=1e-6
        )
    whole = sum(math.comb(n, k) * rb.nelbo_set_weight(n, k) * k for k in range(1, n + 1))
    assert whole == pytest.approx(n)  # the reference is calibrated: uniform logits cost n log V


@pytest.mark.parametrize("n", [2, 4, 8])
def test_published_weights_of_clipped_blocks_are_bounded_and_biased(n: int) -> None:
    """Stable-DiffCoder: 1 / max(t, 1/n) <= n. It forgets the forced mask: uniform logits cost more than log V."""
    paper, counts = _clipped("paper", n)
    assert float(paper.weight.max()) <= n
    t = paper.times.clamp(min=1 / n)
    torch.testing.assert_close(paper.weight.double().amax(1), 1 / t, rtol=1e-6, atol=0)
    cost = float((paper.weight.double().sum(1)).mean()) / n  # in units of log V
    law = sum(
        math.comb(n, k) * k * _expected_inverse(n, k) for k in range(1, n + 1)
    ) / n  # fmt: skip
    error = float(paper.weight.double().sum(1).std()) / len(counts) ** 0.5 / n
    assert abs(cost - law) < 4.5 * error
    assert law > 1.05
    exact, _ = _clipped("exact", n)
    assert float(exact.weight.double().sum(1).mean()) / n == pytest.approx(1.0, abs=4.5 * error)


def _expected_inverse(n: int, k: int) -> float:
    """E over u of 1/u times the probability of one set of k masks."""

    def at(u: float) -> float:
        return (u**k * (1 - u) ** (n - k) + ((1 - u) ** n / n if k == 1 else 0.0)) / u

    return at(1 / n) / n + rb.quadrature(at, 1 / n, 1.0)


def test_the_warm_up_of_the_corruption_is_not_clipped_from_below() -> None:
    """Stable-DiffCoder warms up from almost no noise and without weights; every block still has its mask."""
    loss = objective(4, 200, block_clip="paper", warmup_steps=10)
    noised = loss.noise(rows_batch(200, 16), 1)
    counts = Counter(units_of(rows_batch(200, 16), 4, 200).per_unit(noised.masked.long()).sum(1).tolist())
    assert float(noised.times.max()) < 0.11
    assert counts[1] > 0.8 * counts.total()
    assert set(noised.weight.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("block_size", "options", "message"),
    [
        (None, {"block_clip": "paper"}, "the model has no blocks"),
        (4, {"weighting": "cart"}, "does not see the right side"),
        (4, {"block_clip": "exakt"}, "did you mean 'exact'"),
        (4, {"block_clip": "exact", "masking": "count"}, "block_clip has its own noise"),
        (4, {"block_clip": "paper", "schedule": "cosine"}, "block_clip has its own noise"),
        (4, {"search_range": True, "masking": "count"}, "search_range compares"),
        (4, {"search_range": True, "weighting": "none"}, "search_range compares"),
        (4, {"search_range": True, "block_clip": "paper"}, "search_range compares"),
    ],
    ids=lambda value: str(value).replace(" ", "")[:40],
)
def test_options_that_contradict_each_other_are_refused(
    block_size: int | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        objective(block_size, **options)
