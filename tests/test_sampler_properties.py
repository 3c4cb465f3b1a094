"""Strategies under hypothesis and on hostile models: random canvases and compositions, ties, extreme logits, draws."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampler_tools import (
    MASK,
    VOCAB,
    HashDenoiser,
    every_strategy,
    few_steps,
    preset,
    ragged_canvas,
    same_rows,
    small_canvas,
    unmask,
)
from scipy import stats
from torch import Tensor

from mdlm.denoiser import FunctionDenoiser
from mdlm.samplers.ancestral import Ancestral, JointAncestral
from mdlm.samplers.cache import NoCache
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.draw import Draw
from mdlm.samplers.driver import Run, row_keys
from mdlm.samplers.presets import PRESETS, build_strategy
from mdlm.samplers.scores import drawn_probability
from mdlm.samplers.select import Threshold
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.windows import Blocks

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
each_preset = pytest.mark.parametrize("name", PRESETS)
STRATEGIES = [s for _, s in every_strategy() if isinstance(s.cache, NoCache)]
"""Those with a cache or branches of their own go with that only."""


def constant(logits: list[float] | Tensor, dtype: torch.dtype = torch.float64) -> FunctionDenoiser:
    """These logits everywhere."""
    row = torch.as_tensor(logits).to(dtype)
    return FunctionDenoiser(lambda tokens: row.expand(*tokens.shape, -1), MASK, len(row), ragged_ok=True)


def takes(name: str, denoiser: FunctionDenoiser | HashDenoiser) -> bool:
    """Whether the preset asks for no capability that a plain function lacks."""
    canvas = Canvas.from_prompts([[]], 2)
    try:
        Run(denoiser, canvas, preset(name), row_keys(0, 1))
    except ValueError:
        return False
    return True


# Hostile logits.

INF = math.inf
HOSTILE = {
    "the mask is always the best": [1e9, *[0.0] * (VOCAB - 1)],
    "the mask is +inf": [INF, *[0.0] * (VOCAB - 1)],
    "constant": [0.0] * VOCAB,
    "one +inf": [0.0, 0.0, INF, *[0.0] * (VOCAB - 3)],
    "several +inf, the mask too": [INF, INF, 0.0, INF, *[0.0] * (VOCAB - 4)],
    "one finite": [0.0, *[-INF] * (VOCAB - 2), 1.0],
    "huge": [3e38, -3e38, 3e38, *[0.0] * (VOCAB - 3)],
}


@each_preset
@pytest.mark.parametrize("logits", HOSTILE.values(), ids=HOSTILE)
def test_hostile_logits_end_in_text_without_masks(name: str, logits: list[float]) -> None:
    """The argmax is the mask id: public samplers commit nothing and hang, or write masks."""
    temperature = 1.0 if logits[2] == 0.0 else 0.0
    strategy, canvas = few_steps(name), small_canvas()
    strategy = dataclasses.replace(strategy, draw=dataclasses.replace(strategy.draw, temperature=temperature))
    denoiser = constant(logits, torch.float32)
    if not takes(name, denoiser):
        pytest.skip("needs a model")
    last = unmask(denoiser, canvas, strategy).last
    written = last.tokens[canvas.editable]
    assert not bool(last.masked.any())
    assert not bool((written == MASK).any())
    allowed = torch.tensor(logits[1:])
    possible = allowed == INF if INF in logits[1:] else allowed > -1e38
    assert bool(possible[written - 1].all())
    assert bool(last.log_probs[canvas.editable].isfinite().all())


@each_preset
def test_nan_is_an_error_not_a_text(name: str) -> None:
    denoiser = constant([0.0, math.nan, *[0.0] * (VOCAB - 2)])
    if not takes(name, denoiser):
        pytest.skip("needs a model")
    with pytest.raises(ValueError, match="NaN"):
        unmask(denoiser, Canvas.from_prompts([[3]], 4), preset(name))


@dataclasses.dataclass
class Raw:
    """A denoiser of one's own that breaks the rules."""

    row: Tensor
    mask_token_id: int = MASK
    num_tokens: int = VOCAB
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))

    def __call__(self, tokens: Tensor, *, attention_mask: Any = None, position_ids: Any = None, at: Tensor) -> Tensor:
        return self.row.expand(int(at.sum()), -1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_denoiser_of_ones_own_may_not_give_nan_or_write_the_mask(temperature: float) -> None:
    canvas = Canvas.from_prompts([[3]], 4)
    everywhere, once = (
        torch.full((VOCAB,), math.nan),
        torch.full((VOCAB,), -2.0).index_fill(0, torch.tensor(4), math.nan),
    )
    mask = torch.full((VOCAB,), -60.0).index_fill(0, torch.tensor(MASK), 0.0)
    for row in (everywhere, once, mask):
        for before in (False, True):
            strategy = Strategy(draw=Draw(temperature, before_select=before))
            with pytest.raises(ValueError, match="NaN, or mass to the mask id"):
                unmask(Raw(row), canvas, strategy)


# Random compositions of what the presets are made of.


@st.composite
def compositions(draw: st.DrawFn) -> Strategy:
    """A component of each kind, each from any preset or one of the plain ones."""
    score, select, window, transforms, draws = (draw(st.sampled_from(STRATEGIES)) for _ in range(5))
    strategy = Strategy(
        score=score.score,
        select=select.select,
        revise=select.revise,  # revisers and what admits tokens know their selector
        admit=select.admit,
        window=window.window,
        transforms=transforms.transforms,
        draw=draws.draw,
    )
    if strategy.score is drawn_probability:
        strategy = dataclasses.replace(strategy, draw=dataclasses.replace(strategy.draw, before_select=True))
    temperature, top_p = draw(st.sampled_from([0.0, 0.3, 1.0, 5.0])), draw(st.sampled_from([None, 0.5]))
    return dataclasses.replace(strategy, draw=dataclasses.replace(strategy.draw, temperature=temperature, top_p=top_p))


@st.composite
def canvases(draw: st.DrawFn) -> Canvas:
    """One to four rows of one to eight positions, any of them to write, any ids given."""
    rows = draw(
        st.lists(
            st.lists(st.tuples(st.integers(0, VOCAB - 1), st.booleans()), min_size=1, max_size=8),
            min_size=1,
            max_size=4,
        )
    )
    return Canvas.from_rows(
        [torch.tensor([token for token, _ in row]) for row in rows],
        [torch.tensor([flag for _, flag in row]) for row in rows],
    )


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(strategy=compositions(), canvas=canvases(), scale=st.sampled_from([0.0, 1.0, 8.0, 60.0]), seed=st.integers(0, 9))
def test_any_composition_ends_keeps_what_is_given_and_does_not_know_its_batch(
    strategy: Strategy, canvas: Canvas, scale: float, seed: int
) -> None:
    denoiser = HashDenoiser(scale, seed)
    seeds = [seed + number for number in range(len(canvas))]
    try:
        Run(denoiser, canvas, strategy, row_keys(seeds, len(canvas)))
    except ValueError:
        return  # these components refuse each other
    outcome = unmask(denoiser, canvas, strategy, seeds)
    last, given_tokens = outcome.last, canvas.real & ~canvas.editable
    assert not bool(last.masked.any())
    assert torch.equal(last.tokens[given_tokens], canvas.tokens[given_tokens])
    assert not bool((last.tokens[canvas.editable] == MASK).any())
    assert bool((last.nfe[~canvas.editable.any(-1)] == 0).all())
    if strategy.revise is None and strategy.select.schedule is None:
        assert bool((last.nfe <= canvas.editable.sum(-1)).all())
    number = len(canvas) - 1
    same_rows(unmask(denoiser, canvas[[number]], strategy, [seeds[number]]).row(0), outcome.row(number))


# Steps, blocks and lengths in any proportion.


@quick
@given(length=st.integers(0, 20), block=st.integers(1, 25), share=st.integers(1, 25))
def test_forwards_follow_from_length_block_and_steps(length: int, block: int, share: int) -> None:
    """Nothing needs to divide anything (LLaDA asserts that it does), no step is run for nothing, nothing is left."""
    canvas = Canvas.from_prompts([[3, 4]], length)
    blocks = [min(block, length - start) for start in range(0, length, block)]
    by_count = unmask(HashDenoiser(), canvas, build_strategy("confidence", k=share, block_length=block)).last
    assert int(by_count.nfe) == sum(math.ceil(size / share) for size in blocks)
    for name in ("confidence", "llada"):
        by_steps = unmask(HashDenoiser(), canvas, build_strategy(name, steps=share, block_length=block)).last
        assert int(by_steps.nfe) == sum(min(share, size) for size in blocks)
        for number, size in enumerate(blocks):
            steps = by_steps.step_map[0, 2 + number * block : 2 + number * block + size]
            quotas = steps.unique(return_counts=True)[1].tolist()
            assert quotas == sorted(quotas, reverse=True)  # the larger shares first, and they differ by at most one
            assert quotas[0] - quotas[-1] <= 1
    order = by_steps.step_map[0, 2:].tolist()
    for place, step in enumerate(order):
        assert all(step < later for later in order[(place // block + 1) * block :])


def test_blocks_of_one_go_from_left_to_right() -> None:
    canvas = Canvas.from_prompts([[3, 4], []], [7, 5])
    step_map = unmask(HashDenoiser(), canvas, build_strategy("threshold", threshold=0.0, block_length=1)).last.step_map
    assert step_map[0, 2:].tolist() == list(range(7))
    assert step_map[1, :5].tolist() == list(range(5))


def test_blocks_may_be_counted_from_the_row_or_from_the_answer() -> None:
    canvas = Canvas.from_prompts([[3, 4, 5]], 6)
    for align, expected in (("answer", [0, 0, 0, 0, 1, 1]), ("row", [0, 1, 1, 1, 1, 2])):
        strategy = Strategy(select=Threshold(0.0), window=Blocks(4, align=align))  # type: ignore[arg-type]
        assert unmask(HashDenoiser(), canvas, strategy).last.step_map[0, 3:].tolist() == expected


# Order of commits.


@pytest.mark.parametrize("score", ["probability", "margin", "entropy"])
def test_ties_are_taken_from_the_left_and_the_lowest_id_is_written(score: str) -> None:
    """Saturated scores tie (Dream #56, #72): which one is taken must be a rule, not the sort's whim."""
    canvas = Canvas.from_prompts([[3], [3, 4, 5]], [40, 7])
    for k in (1, 3):
        last = unmask(constant([0.0] * VOCAB), canvas, build_strategy("confidence", score=score, k=k)).last
        assert last.step_map[0, 1:41].tolist() == [i // k for i in range(40)]
        assert last.step_map[1, 3:10].tolist() == [i // k for i in range(7)]
        assert bool((last.tokens[canvas.editable] == 1).all())


def test_scores_come_from_untempered_probabilities() -> None:
    """LLaDA #37, Dream #72: tempered scores saturate; temperature decides the token and nothing else."""

    def logits(tokens: Tensor) -> Tensor:
        peak = torch.tensor([3.0, 9.0, 5.0, 7.0])  # confident enough to tie at 1 at a temperature of 0.02
        row = torch.zeros(*tokens.shape, VOCAB)
        row[..., 2] = peak
        return row

    denoiser = FunctionDenoiser(logits, MASK, VOCAB)
    for temperature in (0.0, 0.02, 1.0, 50.0):
        strategy = Strategy(draw=Draw(temperature))
        assert unmask(denoiser, Canvas.from_prompts([[]], 4), strategy).last.step_map.tolist() == [[3, 0, 2, 1]]


def test_bfloat16_logits_give_the_order_and_tokens_of_float32() -> None:
    """Scores and draws are float32 or better whatever the model computes in."""
    table = (torch.randperm(8 * VOCAB, generator=torch.Generator().manual_seed(0)).reshape(8, VOCAB) / 4).float()
    assert torch.equal(table.bfloat16().float(), table)  # these values exist in bfloat16
    for name, knobs in (("confidence", {}), ("threshold", {"threshold": 0.6}), ("llada", {"steps": 3})):
        runs = []
        for dtype in (torch.float32, torch.bfloat16):
            denoiser = FunctionDenoiser(lambda tokens, d=dtype: table.to(d).expand(len(tokens), -1, -1), MASK, VOCAB)
            strategy = preset(name, **knobs)
            strategy = dataclasses.replace(strategy, draw=dataclasses.replace(strategy.draw, temperature=1.0))
            runs.append(unmask(denoiser, Canvas.from_prompts([[]], 8), strategy, seed=5).row(0))
        same_rows(runs[0], runs[1])


# Draws.

LOGITS = [9.0, 1.0, 0.0, -1.0, 2.5, 0.5]


def frequencies(draw: Draw, n: int = 6000) -> Tensor:
    """How often each id is drawn from LOGITS at n positions of one row."""
    strategy = Strategy(select=Threshold(0.0), draw=draw)
    return unmask(constant(LOGITS), Canvas.from_prompts([[]], n), strategy).last.tokens[0].bincount(minlength=6)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_draws_follow_the_tempered_softmax(temperature: float) -> None:
    counts = frequencies(Draw(temperature))
    expected = (torch.tensor(LOGITS[1:]).double() / temperature).softmax(0) * counts.sum()
    keep = expected > 1
    assert counts[0] == 0
    assert (
        stats.chisquare(counts[1:][keep], (expected[keep] * counts[1:][keep].sum() / expected[keep].sum())).pvalue
        > 1e-3
    )


def test_truncation_keeps_the_crossing_token_and_the_proportions() -> None:
    p = torch.tensor(LOGITS[1:]).double().softmax(0)  # most probable first: ids 4, 1, 5, 2, 3
    order = [4, 1, 5, 2, 3]
    assert p[3] < 0.7 < p[3] + p[0]
    for draw, kept in (
        (Draw(1.0, top_p=0.7), 2),
        (Draw(1.0, top_p=1e-9), 1),
        (Draw(1.0, top_k=3), 3),
        (Draw(1.0, min_p=float(p[4] / p[3]) * 0.99), 3),
        (Draw(1.0, min_p=1.0), 1),
        (Draw(1.0, top_k=4, top_p=0.7), 2),
    ):
        counts = frequencies(draw)
        support = order[:kept]
        assert sorted(counts.nonzero()[:, 0].tolist()) == sorted(support), draw
        weights = p[[i - 1 for i in support]]
        if kept > 1:
            expected = weights / weights.sum() * counts.sum()
            assert stats.chisquare(counts[support], expected).pvalue > 1e-3


def test_truncations_that_cut_nothing_change_nothing() -> None:
    canvas = ragged_canvas()
    plain = unmask(HashDenoiser(2.0), canvas, Strategy(draw=Draw(1.0))).rows()
    for draw in (Draw(1.0, top_p=1.0), Draw(1.0, top_k=VOCAB), Draw(1.0, top_k=1000), Draw(1.0, min_p=0.0)):
        for mine, theirs in zip(unmask(HashDenoiser(2.0), canvas, Strategy(draw=draw)).rows(), plain):
            same_rows(mine, theirs)


def test_a_small_temperature_is_greedy() -> None:
    canvas = ragged_canvas()
    greedy, cold = (unmask(HashDenoiser(), canvas, Strategy(draw=Draw(t))).rows() for t in (0.0, 1e-6))
    for mine, theirs in zip(greedy, cold):
        same_rows(mine, theirs)


# Precision of many steps.

STEPS = 4096


def _reveals(select: Ancestral | JointAncestral, rows: int, seq: int, advances: int) -> tuple[int, float, float]:
    """Positions revealed in the first steps of 4096, their expectation and its standard deviation."""
    run = Run(
        constant([0.0] * 3, torch.float32),
        Canvas.from_prompts([[]] * rows, seq),
        Strategy(select=select),
        row_keys(0, rows),
    )
    for _ in range(advances):
        run.advance()
    chance = advances / STEPS
    n = rows * seq
    return int((~run.frame().masked).sum()), n * chance, math.sqrt(n * chance * (1 - chance))


@pytest.mark.parametrize("select", [Ancestral(3), JointAncestral(3)])
def test_every_step_of_a_schedule_is_as_likely_to_reveal_a_position(select: Ancestral | JointAncestral) -> None:
    last = unmask(constant([0.0] * 3), Canvas.from_prompts([[]] * 4, 2000), Strategy(select=select)).last
    assert stats.chisquare(last.step_map.flatten().bincount(minlength=3)).pvalue > 1e-3


def test_the_rate_of_reveals_is_right_at_4096_steps() -> None:
    for select, advances in ((Ancestral(STEPS), 40), (JointAncestral(STEPS), 10)):
        seen, mean, deviation = _reveals(select, 128, 512, advances)
        assert abs(seen - mean) < 3 * deviation


def test_float32_noise_of_a_joint_race_reveals_too_little() -> None:
    """The negative control (MDLM as published): at 4096 steps and 4096 equal tokens a token's share of the race is near
    the spacing 2^-24 of float32 uniforms, so it cannot be met exactly."""
    n, vocab = 4_000_000, 4096
    generator = np.random.default_rng(0)
    stay = -np.log1p(-generator.random(n))
    best = -np.log(generator.random(n)) / vocab  # the smallest of `vocab` exponentials
    single = -np.log1p(-np.ceil(-np.expm1(-best) * 2.0**24) * 2.0**-24)  # from uniforms that are multiples of 2^-24
    share = 1 / STEPS / vocab
    mean, deviation = n / STEPS, math.sqrt(n / STEPS)
    exact, rounded = ((value / share < stay / (1 - 1 / STEPS)).sum() for value in (best, single))
    assert abs(exact - mean) < 3 * deviation
    assert rounded < mean - 6 * deviation


@pytest.mark.parametrize("logits", [[-INF, 0.0, -40.0], [-INF, -40.0, 0.0]])
def test_tails_beyond_float32_uniforms_are_reached_in_proportion(logits: list[float]) -> None:
    """vllm #37798: races in float32 never draw what is rarer than 2^-24. Inverting a float64 uniform does."""
    from mdlm.samplers.draw import invert_cdf

    probs = torch.tensor(logits).exp()[None]
    rare = 1 if logits[1] < logits[2] else 2
    p = math.exp(-40.0)
    inside, outside = (p * 0.99, p * 1.01) if rare == 1 else (1 - p * 0.0, 0.5)
    assert int(invert_cdf(probs, torch.tensor([outside]).double())) != rare
    if rare == 1:
        assert int(invert_cdf(probs, torch.tensor([inside]).double())) == rare
