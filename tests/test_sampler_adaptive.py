"""Confidence-adaptive samplers without memory: parity with plain-Python references, reductions, exact laws, bounds, and
the public bugs of this family."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import reference_samplers as reference
import torch
from exact_law import exact_law, markov, source_law
from sampler_tools import (
    MASK,
    VOCAB,
    DriftDenoiser,
    HashDenoiser,
    ragged_canvas,
    tiny_model,
    unmask,
)
from scipy import stats
from torch import Tensor

from mdlm.denoiser import Denoiser, FunctionDenoiser, ModelDenoiser
from mdlm.eval.sources import CopySource, ExactSource, TabularSource
from mdlm.rng import counter_uniform
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.draw import Draw
from mdlm.samplers.driver import Run, row_keys
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.scores import DistancePenalty, PositionCalibrated, drawn_probability, negative_entropy, probability
from mdlm.samplers.scores import random as random_score
from mdlm.samplers.select import Quota, RandomOrder, Selector, Threshold, TopK
from mdlm.samplers.select_adaptive import (
    Dilated,
    Dynamic,
    EntropyBudget,
    Factor,
    Hierarchy,
    MinSpacing,
    ShrinkingQuota,
    ShrinkingReveal,
)
from mdlm.samplers.state import NOISE_REVEAL, NOISE_TOKEN, State, Step
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.windows import Blocks, whole

SAMPLE = Draw(temperature=1.0)
MODELS: dict[str, Callable[[], Denoiser]] = {
    "sharp": lambda: HashDenoiser(9.0, seed=1),
    "flat": lambda: HashDenoiser(3.0, seed=2),
    "steady": lambda: DriftDenoiser(9.0, seed=3),
    "transformer": tiny_model,
}
each_model = pytest.mark.parametrize("model", MODELS)
each_length = pytest.mark.parametrize("block_length", [None, 1, 4])


def laws_of(denoiser: Denoiser) -> reference.Model:
    return lambda row: denoiser(torch.tensor([row]))[0].double().exp().tolist()


def parity_canvas(denoiser: Denoiser) -> Canvas:
    """For a transformer without the row of masks alone, whose positions differ by rounding only."""
    return ragged_canvas()[[0, 2, 3, 4, 5]] if isinstance(denoiser, ModelDenoiser) else ragged_canvas()


def check_parity(
    strategy: Strategy,
    denoiser: Denoiser,
    block_length: int | None,
    rule: Callable[[int], reference.Rule],
    pick: Callable[[int, int, int, reference.Law], int] | None = None,
    canvas: Canvas | None = None,
) -> None:
    """Tokens, steps and NFE of every row of a batch are those of the reference, row for row."""
    canvas = parity_canvas(denoiser) if canvas is None else canvas
    outcome = unmask(denoiser, canvas, strategy)
    for number, length in enumerate(canvas.lengths.tolist()):
        one = canvas.tokens[number, :length].tolist(), canvas.editable[number, :length].tolist()
        expected = reference.decode(
            laws_of(denoiser),
            *one,
            denoiser.mask_token_id,
            block_length,
            lambda number=number: rule(number),  # type: ignore[misc]
            None if pick is None else lambda *now, number=number: pick(number, *now),  # type: ignore[misc]
        )
        found = outcome.row(number)
        assert found["tokens"] == expected.tokens
        assert found["step_map"] == expected.step_map
        assert found["nfe"] == expected.steps


def window(block_length: int | None) -> Blocks | Callable:
    return whole if block_length is None else Blocks(block_length)


# Parity, greedy token for token.


@each_model
@each_length
@pytest.mark.parametrize("compat", [False, True])
def test_factor_is_the_reference(model: str, block_length: int | None, compat: bool) -> None:
    for factor in (0.5, 1.0, 2.5):
        strategy = build_strategy("factor", factor=factor, compat=compat, block_length=block_length)
        rule = lambda view, f=factor: reference.factor(view, f, compat)  # noqa: E731
        check_parity(strategy, MODELS[model](), block_length, lambda number, rule=rule: rule)


@each_model
@each_length
@pytest.mark.parametrize(
    ("score", "function"),
    [("entropy", lambda p: -reference.entropy(p)), ("probability", reference.top1), ("margin", reference.margin)],
)
def test_eb_is_the_reference(
    model: str, block_length: int | None, score: str, function: Callable[[reference.Law], float]
) -> None:
    for gamma in (0.05, 0.7, 2.0):
        strategy = build_strategy("eb", gamma=gamma, score=score, block_length=block_length)
        rule = lambda view, gamma=gamma: reference.entropy_budget(view, gamma, function)  # noqa: E731
        check_parity(strategy, MODELS[model](), block_length, lambda number, rule=rule: rule)


@each_model
@each_length
def test_sdar_and_llada2_are_the_reference_when_greedy(model: str, block_length: int | None) -> None:
    for steps in (1, 2, 3):
        strategy = build_strategy("sdar", threshold=0.6, steps=steps, block_length=block_length)
        strategy = dataclasses.replace(strategy, draw=dataclasses.replace(strategy.draw, temperature=0.0))

        def rule(view: reference.View, steps: int = steps) -> Sequence[int]:
            return reference.dynamic(view, 0.6, reference.even_quotas(len(view.block), steps))

        check_parity(strategy, MODELS[model](), block_length, lambda number, rule=rule: rule)
    strategy = build_strategy("llada2", threshold=0.7, quota=2, block_length=block_length)
    constant = lambda view: reference.dynamic(view, 0.7, [2] * 20)  # noqa: E731
    check_parity(strategy, MODELS[model](), block_length, lambda number: constant)


def test_sdar_at_temperature_one_ranks_what_it_has_drawn() -> None:
    denoiser, keys = HashDenoiser(6.0, seed=5), row_keys(0, 6).tolist()

    def pick(number: int, time: int, position: int, law: reference.Law) -> int:
        u = float(counter_uniform(keys[number], NOISE_TOKEN, time, position))
        return next(v for v, total in enumerate(itertools.accumulate(law)) if total > u)

    def rule(number: int) -> reference.Rule:
        def choose(view: reference.View) -> Sequence[int]:
            drawn = {i: p[pick(number, view.time, i, p)] for i, p in view.laws.items()}
            sure = [i for i in drawn if drawn[i] > 0.5]
            quota = reference.even_quotas(len(view.block), 3)[view.step]
            return sure if len(sure) >= quota else reference.ranked(drawn)[:quota]

        return choose

    check_parity(build_strategy("sdar", threshold=0.5, steps=3), denoiser, 4, rule, pick)


DREAM_SCORES: dict[str, Callable[[reference.Law], float]] = {
    "maskgit_plus": reference.top1,
    "topk_margin": reference.margin,
    "entropy": lambda p: -reference.entropy(p),
}


@each_model
@each_length
@pytest.mark.parametrize("alg", DREAM_SCORES)
def test_dream_is_the_reference(model: str, block_length: int | None, alg: str) -> None:
    for steps in (1, 3, 40):
        strategy = build_strategy("dream", alg=alg, steps=steps, block_length=block_length)

        def rule(view: reference.View, steps: int = steps) -> Sequence[int]:
            quota = reference.dream_quota(len(view.laws), view.step, steps, 1e-3)
            return reference.ranked(view.score(DREAM_SCORES[alg]))[:quota]

        check_parity(strategy, MODELS[model](), block_length, lambda number, rule=rule: rule)


@pytest.mark.parametrize("tempered", [True, False])
@pytest.mark.parametrize("alg", DREAM_SCORES)
def test_dream_scores_what_it_draws_from_only_if_told(alg: str, tempered: bool) -> None:
    denoiser, keys = HashDenoiser(6.0, seed=7), row_keys(0, 6).tolist()
    strategy = build_strategy("dream", alg=alg, steps=3, score_tempered=tempered)
    draw = dataclasses.replace(strategy.draw, temperature=0.4, top_p=0.9)

    def truncated(p: reference.Law) -> list[float]:
        hot = [x ** (1 / 0.4) for x in p]
        order = sorted(range(len(p)), key=lambda v: -hot[v])
        kept, mass = [], 0.0
        for v in order:
            if mass < 0.9 * sum(hot):
                kept.append(v)
            mass += hot[v]
        total = sum(hot[v] for v in kept)
        return [hot[v] / total if v in kept else 0.0 for v in range(len(p))]

    def pick(number: int, time: int, position: int, law: reference.Law) -> int:
        u = float(counter_uniform(keys[number], NOISE_TOKEN, time, position))
        return next(v for v, total in enumerate(itertools.accumulate(truncated(law))) if total > u)

    def rule(number: int) -> reference.Rule:
        def choose(view: reference.View) -> Sequence[int]:
            scores = {}
            for i, p in view.laws.items():
                seen = truncated(p) if tempered else p
                drawn = seen[pick(number, view.time, i, p)]
                scores[i] = drawn if alg == "maskgit_plus" else DREAM_SCORES[alg](seen)
            return reference.ranked(scores)[: reference.dream_quota(len(scores), view.step, 3, 1e-3)]

        return choose

    check_parity(dataclasses.replace(strategy, draw=draw), denoiser, None, rule, pick)


def test_dream_origin_is_the_reference() -> None:
    denoiser, keys = DriftDenoiser(6.0, seed=7), row_keys(0, 6).tolist()
    canvas, steps = ragged_canvas(), 5
    outcome = unmask(denoiser, canvas, build_strategy("dream", steps=steps))
    for number, length in enumerate(canvas.lengths.tolist()):
        editable = canvas.editable[number, :length].tolist()
        row = [MASK if flag else token for token, flag in zip(canvas.tokens[number].tolist(), editable)]
        at, forwards = [-1] * length, 0
        for step in range(steps):
            t, s = (1 - (1 - 1e-3) * k / steps for k in (step, step + 1))
            chance = 1.0 if step == steps - 1 else 1 - s / t
            law = laws_of(denoiser)(row)
            hit = [
                i
                for i in range(length)
                if editable[i]
                and at[i] < 0
                and (step == steps - 1 or float(counter_uniform(keys[number], NOISE_REVEAL, step, i)) < chance)
            ]
            forwards += bool(hit)
            for i in hit:
                row[i], at[i] = reference.best(law[i]), step
        found = outcome.row(number)
        assert (found["tokens"], found["step_map"], found["nfe"]) == (row, at, forwards)


@each_model
@each_length
def test_hierarchy_dus_and_spacing_are_the_reference(model: str, block_length: int | None) -> None:
    denoiser = MODELS[model]()
    strategy = build_strategy("hierarchy", threshold=0.7, low=0.3, block_length=block_length)
    check_parity(strategy, denoiser, block_length, lambda number: lambda view: reference.hierarchy(view, 0.7, 0.3))
    for base in (2, 3):
        strategy = build_strategy("dus", base=base, block_length=block_length)
        check_parity(strategy, denoiser, block_length, lambda number, b=base: lambda view: reference.dilated(view, b))
    for spacing in (2, 3, 20):

        def rule(view: reference.View, spacing: int = spacing) -> Sequence[int]:
            scores = view.score(lambda p: -reference.entropy(p))
            budget = reference.entropy_budget(view, 2.0, lambda p: -reference.entropy(p))
            return reference.spaced(budget, scores, spacing)

        strategy = build_strategy("spaced", gamma=2.0, spacing=spacing, block_length=block_length)
        check_parity(strategy, denoiser, block_length, lambda number, rule=rule: rule)


@each_model
def test_pc_and_wedlm_are_the_reference(model: str) -> None:
    denoiser, counts = MODELS[model](), [7.0, 900.0, 3.0, 0.0, 50.0, 1.0, 12.0, 400.0, 2.0]
    share = [max(x, 1.0) / sum(counts) for x in counts]  # never seen counts as seen once

    def calibrated(view: reference.View) -> Sequence[int]:
        score = {i: reference.calibrated(p, i - view.block[0], share, 0.25, 1.5) for i, p in view.laws.items()}
        return reference.ranked(score)[:1]

    strategy = build_strategy("pc", frequencies=counts, alpha=1.5)
    check_parity(strategy, denoiser, None, lambda number: calibrated)

    def penalised(view: reference.View) -> Sequence[int]:
        first = min(view.laws)
        near = sorted(view.laws)[:6]
        score = {i: -reference.entropy(view.laws[i]) - 0.1 * (i - first) for i in near}
        return [i for i in score if score[i] >= -1.2] or reference.ranked(score)[:1]

    strategy = build_strategy("wedlm", max_entropy=1.2, penalty=0.1, masks=6)
    check_parity(strategy, denoiser, None, lambda number: penalised)


# Reductions: the effect off is the base, bit for bit.

SPAN = 10**6
REDUCTIONS: dict[str, tuple[Strategy, Strategy]] = {
    "factor 0 is one a step": (build_strategy("factor", factor=0.0), Strategy(select=TopK(1), window=Blocks(32))),
    "factor near 0": (Strategy(select=Factor(1e-300)), Strategy(select=TopK(1))),
    "nothing exceeds the threshold: the quota": (Strategy(select=Dynamic(1.5, 3)), Strategy(select=TopK(3))),
    "nothing exceeds the threshold: the even quota": (
        Strategy(select=Dynamic(1.5, steps=3), window=Blocks(5)),
        Strategy(select=Quota(3), window=Blocks(5)),
    ),
    "dynamic with quota 1 is a threshold": (Strategy(select=Dynamic(0.5, 1)), Strategy(select=Threshold(0.5))),
    "no budget limit is everything": (Strategy(select=EntropyBudget(math.inf)), Strategy(select=TopK(SPAN))),
    "sdar above 1 is llada with drawn scores": (
        build_strategy("sdar", threshold=1.5, steps=4, block_length=8),
        Strategy(
            score=drawn_probability,
            select=Quota(4),
            draw=Draw(temperature=1.0, before_select=True),
            window=Blocks(8),
        ),
    ),
    "one frequency and no place: confidence": (
        build_strategy("pc", lam=0.0),
        Strategy(score=probability, select=TopK(1)),
    ),
    "no penalty: entropy threshold": (
        build_strategy("wedlm", penalty=0.0, max_entropy=0.9, masks=99),
        build_strategy("entropy_threshold", max_entropy=0.9, block_length=None),
    ),
    "dus with base of the block: all at once": (
        build_strategy("dus", base=4, block_length=4),
        Strategy(select=RandomOrder(SPAN), window=Blocks(4)),
    ),
    "spacing 1 of eb": (build_strategy("spaced", spacing=1, gamma=0.5), build_strategy("eb", gamma=0.5)),
    "spacing 1 of a blind selector": (
        Strategy(select=MinSpacing(RandomOrder(3), 1)),
        Strategy(select=RandomOrder(3)),
    ),
    "spacing beyond the row: one a step": (Strategy(select=MinSpacing(TopK(4), 99)), Strategy(select=TopK(1))),
    "no run's best: a threshold": (Strategy(select=Hierarchy(0.5, low=2.0)), Strategy(select=Threshold(0.5))),
    "dream in one step is all at once": (
        build_strategy("dream", alg="entropy", steps=1),
        Strategy(select=TopK(SPAN), draw=Draw(before_select=True)),
    ),
    "dream with many steps is one a step": (
        build_strategy("dream", alg="entropy"),
        Strategy(score=negative_entropy, select=TopK(1), draw=Draw(before_select=True)),
    ),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reduction(name: str, temperature: float) -> None:
    canvas = ragged_canvas()
    for denoiser in (HashDenoiser(7.0, seed=11), DriftDenoiser(7.0, seed=12)):
        rows = []
        for strategy in REDUCTIONS[name]:
            hot = dataclasses.replace(strategy, draw=dataclasses.replace(strategy.draw, temperature=temperature))
            rows.append([dict(row) for row in unmask(denoiser, canvas, hot).rows()])
        assert repr(rows[0]) == repr(rows[1])


def test_rising_knobs_mean_fewer_steps() -> None:
    canvas = ragged_canvas()

    def steps(name: str, **knobs: float) -> int:
        return int(unmask(DriftDenoiser(7.0), canvas, build_strategy(name, block_length=None, **knobs)).last.nfe.sum())

    for name, knob, values in (
        ("eb", "gamma", (0.0, 0.1, 1.0, 5.0, 1e9)),
        ("factor", "factor", (0.0, 0.5, 1.0, 4.0, 1e9)),
        ("entropy_threshold", "max_entropy", (0.0, 0.5, 1.5, 9.0)),
    ):
        found = [steps(name, **{knob: value}) for value in values]
        assert found == sorted(found, reverse=True)
        assert len(set(found)) > 2
        assert found[-1] == int(canvas.editable.any(dim=-1).sum())


# Exact laws on enumerable sources.

EXACT = {
    "dilated": (Strategy(select=Dilated(2), draw=SAMPLE), 0.6846, 2),
    "EB .5": (Strategy(score=negative_entropy, select=EntropyBudget(0.5), draw=SAMPLE), 0.3869, 4),
    "EB 1": (Strategy(score=negative_entropy, select=EntropyBudget(1.0), draw=SAMPLE), 0.7169, 3),
}


@pytest.mark.parametrize("name", EXACT)
def test_known_figures_on_the_chain(name: str) -> None:
    strategy, kl, nfe = EXACT[name]
    law = exact_law(markov(6), strategy)
    assert law.kl(source_law(markov(6))) == pytest.approx(kl, abs=6e-5)
    assert law.nfe == pytest.approx(nfe)


def sources() -> dict[str, ExactSource]:
    generator = torch.Generator().manual_seed(0)
    return {
        "chain": markov(5, impossible="uniform"),
        "copies": CopySource(torch.tensor([0.6, 0.3, 0.1]), 4, impossible="uniform"),
        "anything": TabularSource.random(5, 3, generator),
        "bits": TabularSource.random(6, 2, generator, scale=3.0),
    }


@pytest.mark.parametrize("spacing", [1, 2])
@pytest.mark.parametrize("gamma", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("score", [negative_entropy, probability, random_score])
@pytest.mark.parametrize("name", sources())
def test_eb_loses_at_most_gamma_per_step(name: str, score: Callable, gamma: float, spacing: int) -> None:
    source = sources()[name]
    select: Selector = EntropyBudget(gamma) if spacing == 1 else MinSpacing(EntropyBudget(gamma), spacing)
    law = exact_law(source, Strategy(score=score, select=select, draw=SAMPLE))
    assert law.kl(source_law(source)) <= gamma * law.nfe + 1e-12


def test_each_single_step_of_eb_stays_within_gamma() -> None:
    """Sum of entropies minus joint entropy of what is committed in one step, by enumeration."""
    generator = torch.Generator().manual_seed(3)
    source = TabularSource.random(6, 3, generator, scale=2.5)
    widest = 0.0
    for trial in range(40):
        tokens = source.sample(1, generator)
        editable = torch.rand(1, 6, generator=generator) < 0.7
        if not editable.any():
            continue
        gamma = (0.1, 0.5, 1.5)[trial % 3]
        run = Run(
            source, Canvas(tokens, editable, torch.tensor([6])), build_strategy("eb", gamma=gamma), row_keys(0, 1)
        )
        run.advance()
        together = (run.frame().step_map[0] == 0).nonzero()[:, 0].tolist()
        joint = source.joint[tuple(slice(None) if free else int(x) for x, free in zip(tokens[0], editable[0]))]
        axes = [i for i in range(6) if editable[0, i]]
        joint = joint / joint.sum()
        chosen = [axes.index(i) for i in together]

        def entropy_of(keep: list[int], joint: Tensor = joint) -> float:
            rest = [axis for axis in range(joint.ndim) if axis not in keep]
            return float(torch.special.entr(joint.sum(rest) if rest else joint).sum())

        loss = sum(entropy_of([axis]) for axis in chosen) - entropy_of(chosen)
        assert -1e-12 <= loss <= gamma + 1e-12
        widest = max(widest, len(together))
    assert widest >= 3, "the trials must commit several tokens together"


def test_eb_without_budget_joins_only_certain_tokens() -> None:
    source = CopySource(torch.tensor([0.6, 0.3, 0.1]), 8)
    canvas = Canvas.from_prompts([[]] * 50, 8)
    strategy = dataclasses.replace(build_strategy("eb", gamma=0.0), draw=SAMPLE)
    last = unmask(source, canvas, strategy).last
    assert last.nfe.tolist() == [5] * 50  # one of a pair, then its twin together with one of the next pair
    for log_probs, step_map in zip(last.log_probs, last.step_map):
        for step in range(5):
            assert int((log_probs[step_map == step] < 0).sum()) <= 1


def test_one_token_a_step_is_exact_under_every_calibration() -> None:
    source = markov(5)
    scores = [PositionCalibrated(torch.tensor([5.0, 1.0, 2.0, 1.0])), build_strategy("wedlm").score]
    for score in scores:
        law = exact_law(source, Strategy(score=score, select=TopK(1), draw=SAMPLE))
        assert law.kl(source_law(source)) == pytest.approx(0, abs=1e-12)


def test_dream_origin_without_an_end_is_ancestral() -> None:
    source = markov(5)
    for steps, kl in {1: 3.0576, 2: 0.7345, 3: 0.3585, 5: 0.1497}.items():
        law = exact_law(source, Strategy(select=ShrinkingReveal(steps, eps=0.0), draw=SAMPLE))
        assert law.kl(source_law(source)) == pytest.approx(kl, abs=6e-5)


# Single rules by hand.


def view(log_probs: Tensor) -> Step:
    """A step over whole rows of candidates with these laws `[batch, seq, vocab]`; the last id is the mask."""
    batch, seq, vocab = log_probs.shape
    zeros, flags = torch.zeros(batch, dtype=torch.int64), torch.ones(batch, seq, dtype=torch.bool)
    state = State(
        rows=torch.arange(batch),
        keys=row_keys(0, batch),
        tokens=torch.full((batch, seq), vocab),
        editable=flags,
        masked=flags.clone(),
        window=flags.clone(),
        lengths=zeros + seq,
        origin=zeros,
        step_map=torch.full((batch, seq), -1),
        log_probs=torch.full((batch, seq), torch.nan, dtype=torch.float64),
        edits=torch.zeros(batch, seq, dtype=torch.int64),
        nfe=zeros,
        forwards=zeros,
        tokens_fed=zeros,
        block=zeros,
        block_step=zeros,
    )
    return Step(state, flags, flags, vocab, at=flags, log_probs=log_probs.reshape(batch * seq, vocab))


def confident(*rows: Sequence[float]) -> tuple[Tensor, Step]:
    """Scores log c and a step whose laws have these largest probabilities, the rest on one other token."""
    c = torch.tensor(rows, dtype=torch.float64)
    return c.log(), view(torch.stack([c, 1 - c], dim=-1).log())


def chosen(flags: Tensor) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in flags]


def test_factor_commits_one_below_the_bound_only_in_compat_mode() -> None:
    """Fast-dLLM, dInfer, AdaBlock: when only the last candidate fails, the loop takes it for a pass."""
    scores, step = confident([0.9, 0.99, 0.1], [0.9, 0.2, 0.1], [0.99, 0.98, 0.97])
    # row 0: 3 * .1 < 1, but 4 * .9 is not; row 1: 3 * .8 is not, two fail; row 2: all pass
    assert chosen(Factor(1.0)(scores, step)) == [[0, 1], [0], [0, 1, 2]]
    assert chosen(Factor(1.0, compat=True)(scores, step)) == [[0, 1, 2], [0], [0, 1, 2]]


def test_factor_keeps_the_theorem() -> None:
    """Theorem 1: n tokens whose confidences exceed 1 - eps with (n + 1) eps <= 1 are the joint argmax."""
    generator, several = torch.Generator().manual_seed(0), 0
    for _ in range(300):
        joint = torch.rand(3, 3, 3, generator=generator, dtype=torch.float64) ** 20
        joint = joint / joint.sum()
        marginals = [joint.sum([a for a in range(3) if a != axis]) for axis in range(3)]
        scores, step = torch.stack([m.max() for m in marginals]).log()[None], view(torch.stack(marginals)[None].log())
        together = chosen(Factor(1.0)(scores, step))[0]
        part = joint.sum([axis for axis in range(3) if axis not in together]) if len(together) < 3 else joint
        best = [int(i) for i in torch.unravel_index(part.argmax(), part.shape)]
        assert best == [int(marginals[axis].argmax()) for axis in together]
        several += len(together) > 1
    assert several > 50


def test_hierarchy_takes_the_best_of_every_run() -> None:
    scores, step = confident([0.5, 0.6, 0.45, 0.3, 0.7, 0.2, 0.35, 0.95])
    step.candidates = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 1]], dtype=torch.bool)
    scores = scores.masked_fill(~step.candidates, -torch.inf)
    assert chosen(Hierarchy(0.9, 0.4)(scores, step)) == [[1, 4, 7]]
    assert chosen(Hierarchy(0.4, 0.4)(scores, step)) == [[0, 1, 4, 7]]
    assert chosen(Hierarchy(0.99, 0.99)(scores, step)) == [[7]]


def test_dilation_halves_its_stride_at_every_length() -> None:
    def rounds(length: int, base: int) -> list[int]:
        denoiser = FunctionDenoiser(lambda tokens: torch.zeros(*tokens.shape, 3), 2, 3)
        strategy = build_strategy("dus", base=base, block_length=None)
        return unmask(denoiser, Canvas.from_prompts([[]], length), strategy).last.step_map[0].tolist()

    assert rounds(8, 2) == [0, 2, 1, 2, 0, 2, 1, 2]
    assert rounds(9, 3) == [0, 1, 1, 0, 1, 1, 0, 1, 1]
    assert rounds(6, 2) == [0, 1, 1, 0, 1, 1]
    assert rounds(1, 2) == [0]
    for length in range(1, 40):
        assert max(rounds(length, 2)) + 1 == max(1, int(math.log2(length)))


def test_min_spacing_is_one_after_the_other() -> None:
    generator = torch.Generator().manual_seed(0)
    for spacing in (2, 3, 5):
        scores = torch.randint(1, 6, (50, 17), generator=generator).double() / 10  # many ties
        scores, step = confident(*scores.tolist())
        found = chosen(MinSpacing(TopK(9), spacing)(scores, step))
        for row, got in enumerate(found):
            values = {i: float(scores[row, i]) for i in range(17)}
            assert got == sorted(reference.spaced(reference.ranked(values)[:9], values, spacing))


@pytest.mark.parametrize("linear", [True, False])
def test_alg_temp_draws_without_replacement_in_proportion_to_the_softmax(linear: bool) -> None:
    """Two of four: P(i then j) = w_i / W * w_j / (W - w_i), w = exp(c / alg_temp) or c^(1 / alg_temp)."""
    rows, c = 20_000, [0.9, 0.5, 0.3, 0.1]
    scores, step = confident(*[c] * rows)
    picked = ShrinkingQuota(steps=2, eps=0.0, alg_temp=0.4, linear=linear)(scores, step)
    weight = [math.exp(x / 0.4) if linear else x ** (1 / 0.4) for x in c]
    pairs = list(itertools.combinations(range(4), 2))
    found = [int((picked[:, i] & picked[:, j]).sum()) for i, j in pairs]
    assert sum(found) == rows

    def ordered(i: int, j: int) -> float:
        return weight[i] / sum(weight) * weight[j] / (sum(weight) - weight[i])

    expected = [rows * (ordered(i, j) + ordered(j, i)) for i, j in pairs]
    assert stats.chisquare(found, expected).pvalue > 1e-4


def test_public_bug_dream_10_alg_temp_never_draws_more_than_there_are() -> None:
    canvas = ragged_canvas()
    for alg_temp, steps in itertools.product((0.01, 0.3, 100.0), (1, 2, 9)):
        for alg in DREAM_SCORES:
            strategy = build_strategy("dream", alg=alg, steps=steps, alg_temp=alg_temp)
            last = unmask(HashDenoiser(60.0), canvas, strategy).last
            assert not bool(last.masked.any())
            assert int(last.nfe.max()) <= steps


def test_public_bug_dream_quota_is_not_a_batch_mean() -> None:
    """Dream: int(mean masks per row * (1 - s/t)); short rows then had the mask id written over their prompts."""
    canvas = Canvas.from_prompts([[3, MASK], [4] * 11, [5] * 3], [10, 1, 4])
    strategy = build_strategy("dream", alg="maskgit_plus", steps=4)
    together = unmask(HashDenoiser(), canvas, strategy)
    for number in range(3):
        alone = unmask(HashDenoiser(), canvas[[number]], strategy, seed=0)
        assert together.row(number)["step_map"] == alone.row(0)["step_map"]
        assert together.row(number)["tokens"] == alone.row(0)["tokens"]
    assert together.last.nfe.tolist() == [4, 1, 4]
    assert [int((together.last.step_map[0] == step).sum()) for step in range(4)] == [2, 2, 2, 4]


def test_public_bug_dream_pays_no_forward_that_commits_nothing() -> None:
    """Dream #3: a short answer costs all 512 steps."""
    last = unmask(HashDenoiser(), Canvas.from_prompts([[3]], 6), build_strategy("dream", alg="entropy")).last
    assert last.nfe.tolist() == [6]
    assert sorted(last.step_map[0, 1:].tolist()) == [0, 1, 2, 3, 4, 5]


def test_public_bug_dream_72_scores_do_not_tie_at_low_temperature() -> None:
    """Dream #56, #72: at temperature .1 every tempered confidence is 1 in float32: left to right."""
    logits = torch.zeros(5, 4)
    logits[:, 1] = torch.tensor([4.0, 5.0, 6.0, 7.0, 8.0])

    def order(tempered: bool) -> list[int]:
        denoiser = FunctionDenoiser(lambda tokens: logits.expand(len(tokens), -1, -1), 3, 4)
        strategy = build_strategy("dream", alg="maskgit_plus", score_tempered=tempered)
        draw = dataclasses.replace(strategy.draw, temperature=0.1)
        strategy = dataclasses.replace(strategy, draw=draw)
        return unmask(denoiser, Canvas.from_prompts([[]], 5), strategy).last.step_map[0].tolist()

    assert order(tempered=False) == [4, 3, 2, 1, 0]
    assert order(tempered=True) == [0, 1, 2, 3, 4]


def test_public_bug_entropy_baselines_commit_the_most_certain_first() -> None:
    """KLASS: the "entropy" baseline ranks by +H and commits what is least certain."""
    _, step = confident([0.6, 0.99, 0.8])
    entropy = step.dense(negative_entropy(step), 0.0)
    assert chosen(TopK(1)(entropy, step)) == [[1]]
    last = unmask(DriftDenoiser(coupling=0.0), Canvas.from_prompts([[]], 7), build_strategy("eb", gamma=0.0)).last
    laws = laws_of(DriftDenoiser(coupling=0.0))([MASK] * 7)
    expected = reference.ranked({i: -reference.entropy(p) for i, p in enumerate(laws)})
    assert last.step_map[0].argsort().tolist() == expected


def test_public_bug_sdar_works_at_temperature_zero_and_its_budget_is_per_position() -> None:
    """SDAR: division by 0 at temperature 0; `entropy_bounded` sums over positions and returns uninitialised memory."""
    strategy = build_strategy("sdar", block_length=4)
    greedy = dataclasses.replace(strategy, draw=dataclasses.replace(strategy.draw, temperature=0.0))
    assert not bool(unmask(HashDenoiser(), ragged_canvas(), greedy).last.masked.any())
    law = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.9, 0.1]]).log()
    step = view(law.expand(2, 3, 2))
    scores = step.dense(negative_entropy(step), -torch.inf)
    h = [math.log(2), 0.0, 0.9 * math.log(1 / 0.9) + 0.1 * math.log(10)]
    assert chosen(EntropyBudget(0.0)(scores, step)) == [[1, 2]] * 2  # sum - max: the first uncertain one is free
    assert chosen(EntropyBudget(h[2] - 1e-6)(scores, step)) == [[1, 2]] * 2
    assert chosen(EntropyBudget(h[2] + 1e-6)(scores, step)) == [[0, 1, 2]] * 2


def test_refused_positions_are_nobodys_choice() -> None:
    scores, step = confident([0.9, 0.99, 0.95, 0.9, 0.97, 0.9])
    scores = scores.masked_fill(torch.tensor([0, 1, 0, 0, 1, 0]).bool(), -torch.inf)
    for select in (
        Factor(1e9),
        Factor(1e9, compat=True),
        EntropyBudget(1e9),
        Dynamic(0.0, 6),
        Dynamic(1.5, 6),
        ShrinkingQuota(1),
        ShrinkingQuota(1, alg_temp=50.0, linear=True),
        Hierarchy(0.0, 0.0),
        MinSpacing(TopK(6), 1),
    ):
        assert chosen(select(scores, step)) == [[0, 2, 3, 5]], select


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("dream", {"alg": "best"}, "origin, maskgit_plus, topk_margin, entropy"),
        ("dream", {"alg_temp": 0.1}, "origin"),
        ("dream", {"alg": "entropy", "alg_temp": -0.1}, "0 or more"),
        ("dream", {"eps": 0.9}, r"\[0, 0.5\]"),
        ("dream", {"steps": 0}, "1 or more"),
        ("factor", {"factor": -1.0}, "0 or more"),
        ("factor", {"factor": math.nan}, "0 or more"),
        ("eb", {"gamma": -0.1}, "0 or more"),
        ("eb", {"score": "size"}, "probability, margin, entropy, random"),
        ("dynamic", {"quota": 2, "steps": 3}, "contradict"),
        ("dynamic", {"score": "random"}, "probability, margin, entropy"),
        ("sdar", {"steps": 0}, "1 or more"),
        ("llada2", {"threshold": -1.0}, "0 or more"),
        ("entropy_threshold", {"max_entropy": -1.0}, "0 or more"),
        ("pc", {"lam": -1.0}, "0 .* or more"),
        ("pc", {"alpha": 0.0}, "above 0"),
        ("pc", {"frequencies": [0.0] * VOCAB}, "not all 0"),
        ("wedlm", {"penalty": -1.0}, "0 or more"),
        ("wedlm", {"max_entropy": math.nan}, "0 or more"),
        ("wedlm", {"masks": 0}, "1 or more"),
        ("dus", {"base": 1}, "2 or more"),
        ("spaced", {"spacing": 0}, "1 or more"),
        ("hierarchy", {"low": -0.1}, "0 or more"),
    ],
)
def test_a_knob_out_of_range_names_what_is_allowed(name: str, knobs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_strategy(name, **knobs)


def test_distances_are_counted_from_the_first_candidate_and_places_from_the_window() -> None:
    step = view(torch.full((1, 5, 3), 1 / 3, dtype=torch.float64).log())
    step.window = torch.tensor([[0, 1, 1, 1, 1]], dtype=torch.bool)
    step.candidates = torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.bool)
    step.at = step.candidates
    step.log_probs = step.log_probs[:3]
    far = DistancePenalty(negative_entropy, 0.1)(step)
    assert far.tolist() == pytest.approx([-math.log(3), -math.log(3) - 0.1, -math.log(3) - 0.2])
    placed = PositionCalibrated(lam=0.25)(step)
    at_start = math.log(1 / 3 * math.log(2))
    assert placed.tolist() == pytest.approx([at_start - 0.25 * offset for offset in (1, 2, 3)])


def test_a_frequency_table_of_the_wrong_length_is_an_error() -> None:
    strategy = build_strategy("pc", frequencies=[1.0, 2.0])
    with pytest.raises(ValueError, match="2 frequencies for 9 token ids"):
        unmask(HashDenoiser(), ragged_canvas(), strategy)
