"""Adaptive selectors: the effect switched off is the base, and exact laws on enumerable sources."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from adaptive_tools import SAMPLE
from exact_law import exact_law, markov, source_law
from sampler_tools import (
    DriftDenoiser,
    HashDenoiser,
    ragged_canvas,
    unmask,
)
from torch import Tensor

from mdlm.eval.sources import CopySource, ExactSource, TabularSource
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.draw import Draw
from mdlm.samplers.driver import Run, row_keys
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.scores import PositionCalibrated, drawn_probability, negative_entropy, probability
from mdlm.samplers.scores import random as random_score
from mdlm.samplers.select import Quota, RandomOrder, Selector, Threshold, TopK
from mdlm.samplers.select_adaptive import (
    Dilated,
    Dynamic,
    EntropyBudget,
    Factor,
    Hierarchy,
    MinSpacing,
    ShrinkingReveal,
)
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.windows import Blocks

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
