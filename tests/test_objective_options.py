"""Options of the loss: CART against its formula, complementary masks and clipped noise against exact expectations."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mdlm.data import Batch
from mdlm.objective import NoisedBatch, Objective, ObjectiveConfig
from mdlm.schedule import SCHEDULES
from mdlm.weights import cart_weights

VOCAB, TOKENS, MASK = 24, 20, 3
INVERSE = {"linear": lambda p: p, "cosine": lambda p: 2 / math.pi * math.asin(p), "polynomial": lambda p: math.sqrt(p)}
"""Time at which a token is masked with probability p: t, sin(pi t / 2), t^2 solved for t."""


TRIPLES = st.tuples(st.booleans(), st.booleans(), st.booleans())


def objective(global_batch: int = 8, seed: int = 0, **options: Any) -> Objective:
    return ObjectiveConfig(**options).build(global_batch=global_batch, seed=seed, mask_token_id=MASK, num_tokens=TOKENS)


def make_batch(rows: int, seq: int = 16, start: int = 0, fraction: float = 0.7) -> Batch:
    generator = torch.Generator().manual_seed(start + 1)
    return Batch(
        input_ids=torch.randint(MASK + 1, TOKENS, (rows, seq), generator=generator),
        maskable=torch.rand(rows, seq, generator=generator) < fraction,
        rows=torch.arange(start, start + rows),
    )


def constant(logits_at: Tensor, **_: Any) -> SimpleNamespace:
    return SimpleNamespace(logits=torch.zeros(int(logits_at.sum()), VOCAB))


def value(loss: Objective, parts: list[NoisedBatch], model: Any = constant) -> float:
    total = sum(float(loss.denominator(p)) for p in parts)
    return sum(float(loss.numerator(model, p).loss) for p in parts) / total


# --- CART ---------------------------------------------------------------------------------------------------------


def reference_cart(masked: list[bool], visible: list[bool], document: list[int], p: float) -> list[float]:
    """1/2 sum over visible i of Geo(p, |n - i| - 1), Geo(p, k) = (1 - p)^k p: Dream's formula, term by term."""
    size = len(masked)
    return [
        0.5 * sum((1 - p) ** (abs(n - i) - 1) * p for i in range(size) if visible[i] and document[i] == document[n])
        if masked[n]
        else 0.0
        for n in range(size)
    ]


@given(
    rows=st.lists(st.lists(TRIPLES, min_size=13, max_size=13), min_size=1, max_size=3),
    p=st.floats(0.01, 0.99),
    packed=st.booleans(),
)  # fmt: skip
@settings(max_examples=150)
def test_cart_weights_equal_the_formula(rows, p, packed):
    masked = torch.tensor([[m for m, _, _ in row] for row in rows])
    real = torch.tensor([[r or m for m, r, _ in row] for row in rows])
    starts = [[i == 0 or (packed and s) for i, (_, _, s) in enumerate(row)] for row in rows]
    documents = [list(itertools.accumulate(map(int, row))) for row in starts]
    positions = torch.tensor([[i - max(j for j in range(i + 1) if row[j]) for i in range(13)] for row in starts])
    found = cart_weights(masked, real, positions if packed else None, p)
    for r in range(len(rows)):
        visible = (~masked[r] & real[r]).tolist()
        expected = reference_cart(masked[r].tolist(), visible, documents[r], p)
        assert found[r].tolist() == pytest.approx(expected, abs=1e-12)


def test_a_visible_neighbour_counts_half_p_and_not_half_p_times_one_minus_p():
    """dllm #92: one was taken off the distance twice, so neighbours counted p / (1 - p)."""
    masked = torch.tensor([[False, True, True]])
    for p in (0.1, 0.3):
        weights = cart_weights(masked, None, None, p)[0].tolist()
        assert weights == pytest.approx([0.0, p / 2, p * (1 - p) / 2], abs=1e-15)


def test_a_token_between_endless_context_has_weight_one():
    """The geometric distribution sums to 1 on either side."""
    masked = torch.zeros(1, 2001, dtype=torch.bool)
    masked[0, 1000] = True
    assert float(cart_weights(masked, None, None, 0.1)[0, 1000]) == pytest.approx(1.0, abs=1e-12)


def test_the_prompt_is_context_and_padding_is_not():
    batch = Batch(
        torch.full((1, 6), 5), torch.tensor([[False, True, False, False, False, False]]), torch.zeros(1).long(),
        torch.tensor([[True, True, False, False, False, False]]),
    )  # fmt: skip
    noised = objective(1, weighting="cart", cart_p=0.3).noise(batch, 0)
    assert noised.masked[0].tolist() == [False, True] + [False] * 4
    assert float(noised.weight[0, 1]) == pytest.approx(0.15)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("complementary", [False, True])
def test_cart_is_a_weighted_mean_and_the_same_in_any_split(reduction, complementary):
    loss = objective(weighting="cart", reduction=reduction, complementary=complementary, masking="count")
    batch = make_batch(8)

    def model(logits_at: Tensor, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
        return SimpleNamespace(logits=table[input_ids.roll(1, 1)[logits_at]])

    whole = value(loss, [loss.noise(batch, 0)], model)
    for size in (1, 2, 4):
        parts = [
            loss.noise(Batch(batch.input_ids[i : i + size], batch.maskable[i : i + size], batch.rows[i : i + size]), 0)
            for i in range(0, 8, size)
        ]
        assert value(loss, parts, model) == pytest.approx(whole, rel=1e-6)
    noised = loss.noise(batch, 0)
    logits = model(noised.masked, noised.input_ids).logits.double()[:, [v for v in range(TOKENS) if v != MASK]]
    answers = noised.targets[noised.masked]
    nll = logits.logsumexp(1) - logits.gather(1, (answers - (answers > MASK).long())[:, None])[:, 0]
    spread = torch.zeros(noised.masked.shape, dtype=torch.float64)
    spread[noised.masked] = nll
    rows = []
    for r in range(len(noised.rows)):
        flags = noised.masked[r].tolist()
        weights = reference_cart(flags, [not m for m in flags], [0] * len(flags), 0.1)
        rows.append((sum(w * x for w, x in zip(weights, spread[r].tolist())), sum(weights)))
    if reduction == "token_mean":
        expected = sum(a for a, _ in rows) / sum(b for _, b in rows)
    else:
        kept = [a / b for a, b in rows if b > 0]
        expected = sum(kept) / len(kept)
    assert whole == pytest.approx(expected, rel=1e-6)


# --- constant logits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weighting", "schedule"), [("nelbo", "linear"), *((w, s) for w in ("cart", "none") for s in SCHEDULES)]
)
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("complementary", [False, True])
def test_constant_logits_cost_log_v_in_every_draw(schedule, reduction, weighting, complementary):
    """(The NELBO of other schedules in expectation: test_every_count_contributes_as_in_the_nelbo.)"""
    options = {"schedule": schedule, "reduction": reduction, "weighting": weighting, "complementary": complementary}
    loss = objective(masking="count", eps=0.0, **options)
    for step in range(5):
        batch = make_batch(8, start=8 * step)
        assert value(loss, [loss.noise(batch, step)]) == pytest.approx(math.log(TOKENS - 1), rel=2e-6)


# --- clipped noise and complements, in expectation ----------------------------------------------------------------


def count_law(n: int, low: float, high: float, schedule: str) -> dict[int, float]:
    """P(k = ceil(mask_prob(t) n)) for t uniform in (low, high], from the lengths of the intervals of t."""
    inverse = INVERSE[schedule]
    law = {}
    for k in range(1, n + 1):
        a, b = max(inverse((k - 1) / n), low), min(inverse(k / n), high)
        if b > a + 1e-12:
            law[k] = (b - a) / (high - low)
    return law


def mean_weights(loss: Objective, n: int, draws: int = 4096) -> dict[int, tuple[float, float]]:
    """Count -> (share of views with it, its weight), from many rows of n maskable tokens."""
    batch = Batch(torch.full((draws, n), 5), torch.ones(draws, n, dtype=torch.bool), torch.arange(draws))
    noised = loss.noise(batch, 0)
    counts, weights = noised.masked.sum(1), noised.weight.amax(1)
    found = {}
    for k in counts.unique().tolist():
        here = weights[counts == k]
        assert float(here.max() - here.min()) == 0.0, "a weight depends on the count alone"
        found[k] = (float((counts == k).double().mean()), float(here[0]))
    return found


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.001, 1.0), (0.3, 0.8), (0.45, 0.95), (0.0, 0.5)])
@pytest.mark.parametrize("complementary", [False, True])
def test_every_count_contributes_as_in_the_nelbo(schedule, low, high, complementary):
    """Over the counts that come up, P(view has c) * c * weight(c) is the same number, and together they make n."""
    n = 7
    loss = objective(
        4096,
        masking="count",
        schedule=schedule,
        eps=low,
        t_max=high,
        complementary=complementary,
        sampling="stratified",
    )
    found = mean_weights(loss, n)
    law = count_law(n, low, high, schedule)
    if complementary:
        views = {c: (law.get(c, 0.0) + law.get(n - c, 0.0)) / 2 for c in range(n + 1)}
        views = {c: p for c, p in views.items() if p > 0}
    else:
        views = law
    assert set(found) - {0} == set(views) - {0}
    learnt = {c: p for c, p in views.items() if c > 0}
    for c, (share, weight) in found.items():
        assert share == pytest.approx(views[c], abs=2e-3)
        if c > 0:
            assert learnt[c] * c * weight == pytest.approx(n / len(learnt), rel=1e-6)
    if (low, high) == (0.0, 1.0):  # the NELBO itself: the mean over c = 1..n of the mean over sets of c, times n
        assert len(learnt) == n


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("weighting", ["nelbo", "llada"])
def test_clipped_times_stay_in_their_range_and_constant_logits_cost_log_v_on_average(schedule, weighting):
    if weighting == "llada" and schedule != "linear":
        with pytest.raises(ValueError, match="llada"):
            objective(weighting=weighting, schedule=schedule)
        return
    loss = objective(4096, schedule=schedule, weighting=weighting, eps=0.3, t_max=0.8, sampling="low_discrepancy")
    noised = loss.noise(make_batch(4096), 0)
    assert 0.3 < float(noised.times.min()) < 0.301
    assert 0.799 < float(noised.times.max()) <= 0.8
    assert value(loss, [noised]) == pytest.approx(math.log(TOKENS - 1), rel=0.02)


def test_no_clipping_is_bit_for_bit_the_plain_loss():
    for masking in ("independent", "count"):
        one, other = (objective(masking=masking, **o).noise(make_batch(8), 0) for o in ({}, {"t_max": 1.0}))
        assert torch.equal(one.weight, other.weight)
        assert torch.equal(one.input_ids, other.input_ids)


# --- complements --------------------------------------------------------------------------------------------------


def test_a_pair_masks_every_token_once_and_no_prompt():
    loss = objective(masking="count", complementary=True)
    batch = make_batch(8)
    noised = loss.noise(batch, 0)
    first, second = noised.masked[:8], noised.masked[8:]
    assert torch.equal(first ^ second, batch.maskable)
    assert not (first & second).any()
    assert torch.equal(noised.input_ids[:8][~first], batch.input_ids[~first])
    assert torch.equal(noised.input_ids[8:][~second], batch.input_ids[~second])
    assert torch.equal(noised.rows, batch.rows.repeat(2))
    alone = objective(masking="count").noise(batch, 0)
    assert torch.equal(alone.masked, first), "the first view is the draw without complement"


def test_the_plain_mean_over_a_pair_is_the_mean_over_all_tokens():
    """Fast-dLLM v2's loss: the cross entropy of every token, once."""
    for reduction in ("token_mean", "sequence_mean"):
        loss = objective(masking="count", complementary=True, weighting="none", reduction=reduction)
        batch = make_batch(8)
        parts = [loss.noise(batch, 0)]

        def by_target(logits_at: Tensor, **_: Any) -> SimpleNamespace:
            return SimpleNamespace(logits=torch.arange(VOCAB).float().expand(int(logits_at.sum()), -1) / 4)

        logits = torch.arange(VOCAB).double() / 4
        allowed = [v for v in range(TOKENS) if v != MASK]
        nll = logits[allowed].logsumexp(0) - logits[batch.input_ids]
        if reduction == "token_mean":
            expected = float(nll[batch.maskable].mean())
        else:
            expected = float(torch.stack([x[m].mean() for x, m in zip(nll, batch.maskable)]).mean())
        assert value(loss, parts, by_target) == pytest.approx(expected, rel=1e-6)


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"complementary": True}, "complementary needs masking 'count'"),
        ({"complementary": True, "masking": "count", "warmup_steps": 3}, "no corruption warm-up"),
        ({"cart_p": 0.3}, "has no effect with weighting 'nelbo'"),
        ({"weighting": "cart", "cart_p": 1.0}, r"cart_p must lie in \(0, 1\)"),
        ({"eps": 0.5, "t_max": 0.4}, r"got eps=0\.5, t_max=0\.4"),
        ({"t_max": 1.5}, r"t_max=1\.5"),
        ({"t_max": 0.5, "warmup_steps": 3, "warmup_start": 0.7}, "must not lie above t_max"),
        ({"weighting": "dream"}, "unknown weighting 'dream'"),
    ],
)
def test_options_that_do_not_go_together_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**options)


def test_the_warm_up_leads_to_the_clipped_range():
    loss = objective(warmup_steps=10, warmup_start=0.1, t_max=0.6)
    assert [loss.max_time(s) for s in (0, 5, 10, 99)] == pytest.approx([0.1, 0.35, 0.6, 0.6])
