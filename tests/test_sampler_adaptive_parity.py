"""Adaptive selectors equal their references, greedy token for token."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import pytest
import reference_samplers as reference
from adaptive_tools import (
    DREAM_SCORES,
    MODELS,
    check_parity,
    each_length,
    each_model,
    laws_of,
)
from sampler_tools import (
    MASK,
    DriftDenoiser,
    HashDenoiser,
    ragged_canvas,
    unmask,
)

from mdlm.rng import counter_uniform
from mdlm.samplers.driver import row_keys
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.state import NOISE_REVEAL, NOISE_TOKEN

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
