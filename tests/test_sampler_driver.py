"""What the driver promises of every strategy: laws of structure, checked on every preset and on random compositions."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
from sampler_tools import (
    MASK,
    HashDenoiser,
    denoiser_for,
    every_strategy,
    few_steps,
    preset,
    ragged_canvas,
    same_rows,
    small_canvas,
    unmask,
)

from mdlm.samplers.cache import NoCache
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.driver import Run, row_keys
from mdlm.samplers.presets import PRESETS
from mdlm.samplers.strategy import Strategy

STRATEGIES = every_strategy()
each_strategy = pytest.mark.parametrize(
    "strategy", [strategy for _, strategy in STRATEGIES], ids=[name for name, _ in STRATEGIES]
)
each_preset = pytest.mark.parametrize("name", PRESETS)


def hot(strategy: Strategy, temperature: float = 1.0) -> Strategy:
    return dataclasses.replace(strategy, draw=dataclasses.replace(strategy.draw, temperature=temperature))


@each_preset
def test_greedy_structure(name: str) -> None:
    check_structure(hot(preset(name), 0.0))


@each_strategy
def test_structure(strategy: Strategy) -> None:
    check_structure(hot(strategy))


def check_structure(strategy: Strategy) -> None:
    """Given tokens stay, no mask id is written, every step's books balance, and it ends."""
    canvas = ragged_canvas()
    outcome = unmask(denoiser_for(strategy, canvas), canvas, strategy)
    last, given = outcome.last, canvas.real & ~canvas.editable
    for frame in outcome.frames:
        assert torch.equal(frame.tokens[given], canvas.tokens[given])
        assert torch.equal(frame.tokens[~canvas.real], canvas.tokens[~canvas.real])
        assert bool((frame.tokens[frame.masked] == MASK).all())
        written = canvas.editable & ~frame.masked
        assert not bool((frame.tokens[written] == MASK).any())
        assert torch.equal(frame.step_map >= 0, written)
        assert torch.equal(~frame.log_probs.isnan(), written)
        assert int(frame.step_map.max()) < max(frame.step, 1)
    assert not bool(last.masked.any())
    assert bool((last.log_probs[canvas.editable] <= 0).all())
    assert outcome.finish == ["length"] * len(canvas)
    assert torch.equal(last.ends, canvas.lengths)
    masks = canvas.editable.sum(-1)
    commits, remasks = torch.zeros_like(masks), torch.zeros_like(masks)
    for before, after in zip(outcome.frames, outcome.frames[1:]):
        commits += (before.masked & ~after.masked).sum(-1)
        remasks += (~before.masked & after.masked).sum(-1)
        if strategy.revise is None:
            assert not bool((~before.masked & after.masked).any())
            decided = ~before.masked
            assert torch.equal(before.tokens[decided], after.tokens[decided])
            if strategy.select.schedule is None and strategy.admit is None:
                busy = before.masked.any(-1)
                assert bool((before.masked.sum(-1) - after.masked.sum(-1))[busy].ge(1).all())
    assert torch.equal(commits - remasks, masks)
    assert bool((last.forwards[masks == 0] == 0).all())
    assert bool((last.nfe[masks == 0] == 0).all())
    if isinstance(strategy.cache, NoCache) and strategy.revise is None:
        assert bool((last.nfe[masks > 0] >= 1).all())
        if strategy.select.schedule is None or strategy.select.blind:
            assert bool((last.nfe <= masks).all())
        assert torch.equal(last.tokens_fed, last.forwards * canvas.lengths)


@each_preset
@pytest.mark.parametrize("block_length", [None, 3])
def test_a_row_does_not_know_its_batch(name: str, block_length: int | None) -> None:
    """Alone, in a batch, permuted, padded on the left, in smaller batches: one result, counts and all, bit for bit."""
    if block_length is not None and "block_length" not in inspect.signature(PRESETS[name]).parameters:
        pytest.skip("has no blocks")
    canvas = ragged_canvas()
    try:
        strategy = hot(few_steps(name, **({} if block_length is None else {"block_length": block_length})))
    except ValueError:
        pytest.skip("such blocks contradict another default")
    denoiser = denoiser_for(strategy, canvas)
    exact = isinstance(denoiser, HashDenoiser)
    canvas = ragged_canvas(nothing_given=exact)
    seeds = [11, 5, 7, 3, 2, 13]
    together = unmask(denoiser, canvas, strategy, seeds).rows()
    for number in (0, 2, 5):
        alone = unmask(denoiser, canvas[[number]], strategy, seeds[number : number + 1])
        same_rows(alone.row(0), together[number], exact)
    order = [3, 0, 5, 1, 4, 2]
    permuted = unmask(denoiser, canvas[order], strategy, [seeds[i] for i in order]).rows()
    for place, number in enumerate(order):
        same_rows(permuted[place], together[number], exact)
    width = canvas.tokens.shape[1] + 3
    ids, real = torch.full((len(canvas), width), 4), torch.zeros(len(canvas), width, dtype=torch.bool)
    write = torch.zeros_like(real)
    for number, length in enumerate(canvas.lengths.tolist()):
        ids[number, width - length :] = canvas.tokens[number, :length]
        real[number, width - length :] = True
        write[number, width - length :] = canvas.editable[number, :length]
    left = unmask(denoiser, Canvas.from_padded(ids, real, editable=write), strategy, seeds).rows()
    for mine, theirs in zip(left, together):
        same_rows(mine, theirs, exact)


@each_preset
def test_two_interleaved_requests_do_not_see_each_other(name: str) -> None:
    canvas, strategy = small_canvas(), hot(few_steps(name))
    denoiser = denoiser_for(strategy, canvas)
    first, second = (Run(denoiser, canvas, strategy, row_keys(seed, len(canvas))) for seed in (1, 2))
    while not (first.done and second.done):
        for run in (first, second, second):
            if not run.done:
                run.advance()
    for run, seed in ((first, 1), (second, 2)):
        apart = unmask(denoiser, canvas, strategy, seed).last
        for name in ("tokens", "step_map", "nfe", "tokens_fed"):
            assert torch.equal(getattr(run.frame(), name), getattr(apart, name))


@each_preset
def test_seeds_decide_and_rows_differ(name: str) -> None:
    """The same seed gives the same text, another one another; rows with one prompt differ (Dream #79)."""
    canvas = Canvas.from_prompts([[3, 4]] * 4, 8)
    strategy = hot(few_steps(name))
    denoiser = denoiser_for(strategy, canvas, scale=2.0)
    once, again, other = (unmask(denoiser, canvas, strategy, seed).last.tokens for seed in (0, 0, 1))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    assert len({tuple(row) for row in once.tolist()}) == 4


@each_preset
def test_counts_are_what_the_model_saw(name: str) -> None:
    canvas, strategy = ragged_canvas(), few_steps(name)
    if not isinstance(strategy.cache, NoCache):
        pytest.skip("feeds through a cache")
    denoiser = denoiser_for(strategy, canvas)
    if not isinstance(denoiser, HashDenoiser):
        pytest.skip("needs a model")
    last = unmask(denoiser, canvas, strategy).last
    assert int(last.forwards.sum()) == denoiser.rows_fed
    assert int(last.nfe.sum()) == denoiser.rows_fed
    assert int(last.tokens_fed.sum()) == denoiser.tokens_fed
    denoiser.calls = 0
    alone = unmask(denoiser, canvas[[0]], strategy).last
    assert int(alone.nfe[0]) == denoiser.calls
