"""Exact laws: what each kind of unmasking writes when the denoiser is perfect, against closed forms and known figures.

The source of the figures (`exact_law.markov`): uniform over three symbols, then x -> x + 1 (mod 3) with probability
0.92, 0.04 for each other. Renaming symbol x at position i to x - i (mod 3) makes that "stay with probability 0.92", so
both readings of the published description have the same laws.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import reference
import torch
from exact_law import exact_law, markov, source_law
from scipy import stats
from torch import Tensor

from mdlm.eval.sources import CopySource, ExactSource, MarkovSource, TabularSource
from mdlm.samplers.ancestral import Ancestral, JointAncestral
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.draw import Draw
from mdlm.samplers.driver import Run, row_keys
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.scores import SCORES, drawn_probability, random
from mdlm.samplers.select import Quota, RandomOrder, Threshold, TopK
from mdlm.samplers.state import Step
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.windows import Blocks

SAMPLE = Draw(temperature=1.0)


def parity(length: int) -> TabularSource:
    """Bits with an even sum: every proper subset is independent, all together are not."""
    joint = torch.zeros((2,) * length, dtype=torch.float64)
    for x in itertools.product(range(2), repeat=length):
        joint[x] = 1.0 if sum(x) % 2 == 0 else 0.0
    return TabularSource(joint / joint.sum(), impossible="uniform")


def sampled(name: str, **knobs: Any) -> Strategy:
    """The preset at temperature 1, tokens drawn after their positions are chosen."""
    return dataclasses.replace(build_strategy(name, **knobs), draw=SAMPLE)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SOURCES: dict[str, ExactSource] = {
    "markov": markov(5),
    "other markov": MarkovSource.random(4, 3, _seeded(1)),
    "tabular": TabularSource.random(4, 3, _seeded(2)),
    "copy": CopySource(torch.tensor([0.6, 0.3, 0.1]), 4, impossible="uniform"),
    "parity": parity(5),
    "nearly certain chain": markov(5, forward=0.995),
    "nearly independent": TabularSource.random(4, 3, _seeded(3), scale=0.3),
}
each_source = pytest.mark.parametrize("name", SOURCES)


# One token a step, drawn after its position was chosen: exact in whatever order.


@each_source
@pytest.mark.parametrize("score", SCORES)
def test_one_token_a_step_is_exact_whatever_the_score(name: str, score: str) -> None:
    source = SOURCES[name]
    law = exact_law(source, Strategy(score=SCORES[score], select=TopK(1), draw=SAMPLE))
    assert law.kl(source_law(source)) < 1e-12
    assert law.nfe == pytest.approx(source.length)


@each_source
@pytest.mark.parametrize("window", [None, Blocks(1), Blocks(2), Blocks(3)])
def test_first_hitting_is_exact_in_blocks_too(name: str, window: Blocks | None) -> None:
    source = SOURCES[name]
    strategy = Strategy(select=RandomOrder(1), draw=SAMPLE)
    if window is not None:
        strategy = Strategy(select=RandomOrder(1), draw=SAMPLE, window=window)
    law = exact_law(source, strategy)
    assert law.kl(source_law(source)) < 1e-12
    assert law.nfe == pytest.approx(source.length)


def test_an_order_that_looks_at_nothing_may_draw_before_it_selects() -> None:
    """A random order is independent of the draws, so drawing first changes nothing (LLaDA's `random`)."""
    source = SOURCES["tabular"]
    strategy = Strategy(score=random, select=TopK(1), draw=Draw(temperature=1.0, before_select=True))
    assert exact_law(source, strategy).kl(source_law(source)) < 1e-12


def _rounded_drawn_probability(step: Step) -> Tensor:
    return drawn_probability(step).round(decimals=9)


def test_confidence_of_the_drawn_token_is_biased_and_looks_better_than_the_truth() -> None:
    """Known figures: KL 0.996, TV 0.213, entropy 1.49 (true 2.44), mean -log p 1.71 though it is 2.44 for true samples.

    They hold for exact ties: many marginals of this source are equal, and rounding in the last bit would break the ties
    in another way each time the sums are ordered differently (KL 0.89 to 1.13). So scores are rounded here.
    """
    source = markov(5)
    p = source_law(source)
    strategy = Strategy(score=_rounded_drawn_probability, select=TopK(1), draw=Draw(1.0, before_select=True))
    law = exact_law(source, strategy)
    assert law.kl(p) == pytest.approx(0.9961, abs=6e-5)
    assert law.tv(p) == pytest.approx(0.2133, abs=6e-5)
    assert law.entropy() == pytest.approx(1.4874, abs=6e-5)
    assert source.entropy() == pytest.approx(2.435, abs=1e-3)
    assert -float((law.probs * p.log()).sum()) == pytest.approx(1.7079, abs=6e-5)


@each_source
def test_at_temperature_zero_the_draw_mode_does_not_matter(name: str) -> None:
    source = SOURCES[name]
    after, before = (
        exact_law(source, Strategy(score=score, select=TopK(2), draw=Draw(0.0, before_select=first)))
        for score, first in ((SCORES["probability"], False), (drawn_probability, True))
    )
    torch.testing.assert_close(after.probs, before.probs)
    assert float(after.probs.max()) == pytest.approx(1.0)


# Ancestral sampling.

ANCESTRAL_KL = {1: 3.0576, 2: 0.7345, 3: 0.3585, 5: 0.1497, 8: 0.0668, 16: 0.0198, 32: 0.0057}


def test_ancestral_sampling_tends_to_the_source_as_steps_grow() -> None:
    source = markov(5)
    p = source_law(source)
    laws = {steps: exact_law(source, Strategy(select=Ancestral(steps), draw=SAMPLE)) for steps in ANCESTRAL_KL}
    found = {steps: law.kl(p) for steps, law in laws.items()}
    assert found == pytest.approx(ANCESTRAL_KL, abs=6e-5)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    for steps, law in laws.items():  # forwards of steps that reveal nothing are not run
        assert law.nfe == pytest.approx(steps * (1 - (1 - 1 / steps) ** 5), rel=1e-10)


def test_ancestral_sampling_is_a_product_over_tokens_that_share_a_step() -> None:
    """Each position is revealed at an independent, uniformly chosen step: the law as a sum over those choices."""
    source, steps = TabularSource.random(3, 3, _seeded(5)), 3
    every = list(itertools.product(range(3), repeat=3))
    table = {x: float(source.joint[x]) for x in every}
    expected = []
    for x in every:
        total = 0.0
        for at in itertools.product(range(steps), repeat=3):
            chance = 1.0
            for i in range(3):
                before: Sequence[int | None] = [x[j] if at[j] < at[i] else None for j in range(3)]
                chance *= float(reference.table_conditional(table, before, 3)[i][x[i]])
            total += chance / steps**3
        expected.append(total)
    law = exact_law(source, Strategy(select=Ancestral(steps), draw=SAMPLE))
    torch.testing.assert_close(law.probs, torch.tensor(expected, dtype=torch.float64))


# Several tokens a step: no selector dominates.

FIGURES = {
    "random 2": (Strategy(select=RandomOrder(2), draw=SAMPLE), 0.3892, 3),
    "random 3": (Strategy(select=RandomOrder(3), draw=SAMPLE), 1.1036, 2),
    "random 2 by score": (Strategy(score=random, select=TopK(2), draw=SAMPLE), 0.3892, 3),
    "confidence 2": (Strategy(select=TopK(2), draw=SAMPLE), 1.1513, 3),
    "confidence 3": (Strategy(select=TopK(3), draw=SAMPLE), 2.0522, 2),
    "confidence in 3 steps": (Strategy(select=Quota(3), draw=SAMPLE), 1.1513, 3),
    "threshold .6": (Strategy(select=Threshold(0.6), draw=SAMPLE), 1.4613, 2),
    "threshold .8": (Strategy(select=Threshold(0.8), draw=SAMPLE), 0.3869, 4),
    "dilated": (sampled("dus"), 0.6846, 2),
    "dilated in a block of 6": (sampled("dus", block_length=6), 0.6846, 2),
    "entropy bound .5": (sampled("eb", gamma=0.5), 0.3869, 4),
    "entropy bound 1": (sampled("eb", gamma=1.0), 0.7169, 3),
}


@pytest.mark.parametrize("name", FIGURES)
def test_several_tokens_a_step_cost_what_is_known(name: str) -> None:
    strategy, kl, nfe = FIGURES[name]
    source = markov(6)
    law = exact_law(source, strategy)
    assert law.kl(source_law(source)) == pytest.approx(kl, abs=6e-5)
    assert law.nfe == pytest.approx(nfe)


def test_confident_neighbours_are_the_wrong_pair_on_a_chain_and_the_right_one_on_copies() -> None:
    chain, copies = markov(6), CopySource(torch.tensor([0.6, 0.3, 0.1]), 6, impossible="uniform")
    confident, spread = Strategy(select=TopK(3), draw=SAMPLE), Strategy(select=RandomOrder(3), draw=SAMPLE)
    p, q = source_law(chain), source_law(copies)
    assert exact_law(chain, confident).kl(p) > exact_law(chain, spread).kl(p)
    assert exact_law(copies, confident).kl(q) < 1e-12  # the three leftmost of equal ones, then their copies
    assert exact_law(copies, spread).kl(q) > 0.1


# The entropy budget keeps its promise.

GAMMAS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 100.0)


@each_source
@pytest.mark.parametrize("name_of_score", ["entropy", "probability", "margin"])
def test_the_entropy_budget_bounds_the_divergence_of_the_whole_run(name: str, name_of_score: str) -> None:
    """EB (2505.24857): a step that commits U loses at most sum H - max H <= gamma nats, so a run gamma E[NFE]."""
    source = SOURCES[name]
    p, nfe = source_law(source), []
    for gamma in GAMMAS:
        law = exact_law(source, sampled("eb", gamma=gamma, score=name_of_score))
        assert law.kl(p) <= gamma * law.nfe + 1e-12
        nfe.append(law.nfe)
    if name_of_score == "entropy":
        assert all(more >= less - 1e-9 for more, less in itertools.pairwise(nfe))
    assert nfe[-1] == pytest.approx(1.0)


def test_an_empty_entropy_budget_still_lets_certain_tokens_join() -> None:
    """Copies of what is known have no entropy: each joins the next step's one uncertain token."""
    copies = CopySource(torch.tensor([0.6, 0.3, 0.1]), 6, impossible="uniform")
    law = exact_law(copies, sampled("eb", gamma=0.0))
    assert law.kl(source_law(copies)) < 1e-12
    assert law.nfe == pytest.approx(4.0)  # three free symbols, then the last copy
    assert law.committed.tolist() == pytest.approx([0, 2, 2, 0, 0, 0, 0])


# The driver itself draws from the propagated law.


def _drawn(source: ExactSource, strategy: Strategy, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Counts of each sequence over independent rows, and their NFE."""
    run = Run(source, Canvas.from_prompts([[]] * rows, source.length), strategy, row_keys(seed, rows))
    while not run.done:
        run.advance()
    frame = run.frame()
    radix = source.vocab ** torch.arange(source.length - 1, -1, -1)
    return (frame.tokens * radix).sum(-1).bincount(minlength=source.vocab**source.length), frame.nfe.double()


def _p_value(counts: Tensor, probs: Tensor) -> float:
    """Chi-square of counts against a law; cells that expect fewer than 5 are pooled."""
    expected = probs * counts.sum()
    assert int(counts[probs == 0].sum()) == 0
    rare = expected < 5
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    hoped = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = hoped > 0
    hoped = hoped[keep] * seen.sum() / hoped[keep].sum()
    return float(stats.chisquare(seen[keep].numpy(), hoped.numpy()).pvalue)


DRIVEN = {
    "ancestral": Strategy(select=Ancestral(3), draw=SAMPLE),
    "ancestral in blocks": Strategy(select=Ancestral(2), draw=SAMPLE, window=Blocks(3)),
    "first hitting": Strategy(select=RandomOrder(1), draw=SAMPLE),
    "random 2": Strategy(select=RandomOrder(2), draw=SAMPLE),
    "confidence": Strategy(select=TopK(2), draw=SAMPLE),
    "margin": Strategy(score=SCORES["margin"], select=TopK(2), draw=SAMPLE),
    "entropy": Strategy(score=SCORES["entropy"], select=Quota(2), draw=SAMPLE),
    "threshold": Strategy(select=Threshold(0.5), draw=SAMPLE),
    "threshold, tempered and cut": Strategy(select=Threshold(0.5), draw=Draw(0.8, top_p=0.9, top_k=2)),
    "before selection": Strategy(score=drawn_probability, select=TopK(1), draw=Draw(1.0, before_select=True)),
}


@pytest.mark.parametrize("name", DRIVEN)
def test_the_driver_draws_from_the_propagated_law(name: str) -> None:
    source, rows = MarkovSource.random(4, 3, _seeded(1)), 4000
    law = exact_law(source, DRIVEN[name])
    counts, nfe = _drawn(source, DRIVEN[name], rows, seed=3)
    assert _p_value(counts, law.probs) > 1e-3
    assert float(nfe.mean()) == pytest.approx(law.nfe, abs=4 * float(nfe.std()) / math.sqrt(rows) + 1e-9)
    other = 0.3 / len(law.probs) + 0.7 * law.probs
    assert _p_value(counts, other) < 1e-3  # so many rows show an error


def test_the_joint_race_over_tokens_and_mask_has_the_law_of_the_split_draw() -> None:
    source = MarkovSource.random(4, 3, _seeded(1))
    law = exact_law(source, Strategy(select=Ancestral(3), draw=SAMPLE))
    counts, nfe = _drawn(source, Strategy(select=JointAncestral(3), draw=SAMPLE), 4000, seed=3)
    assert _p_value(counts, law.probs) > 1e-3
    assert float(nfe.mean()) >= law.nfe  # it looks in every step


def test_mean_forwards_of_ancestral_sampling_are_the_expected_number_of_distinct_steps() -> None:
    source, rows = markov(5), 2000
    for steps in (2, 8, 32):
        _, nfe = _drawn(source, Strategy(select=Ancestral(steps), draw=SAMPLE), rows, seed=1)
        expected = steps * (1 - (1 - 1 / steps) ** 5)
        assert float(nfe.mean()) == pytest.approx(expected, abs=4 * float(nfe.std()) / math.sqrt(rows))
        assert int(nfe.max()) <= 5
