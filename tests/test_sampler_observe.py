"""Observers see every step of every strategy and change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sampler_tools import HashDenoiser, preset, ragged_canvas, tiny_model, unmask
from torch import Tensor

from mdlm.samplers.canvas import Canvas
from mdlm.samplers.draw import Draw
from mdlm.samplers.generate import generate
from mdlm.samplers.observe import Trace
from mdlm.samplers.state import Step
from mdlm.samplers.strategy import Strategy

NAMES = ["threshold", "eb", "ancestral", "llada", "remdm", "t2t", "dus", "freedave", "adablock"]


@pytest.mark.parametrize("name", NAMES)
def test_watching_changes_nothing_and_counts_what_is_written(name: str) -> None:
    canvas, strategy, trace = ragged_canvas(), preset(name), Trace()
    plain = unmask(HashDenoiser(), canvas, strategy)
    watched = unmask(HashDenoiser(), canvas, replace(strategy, observers=(trace,)))
    for field in ("tokens", "step_map", "nfe", "forwards", "tokens_fed"):
        assert torch.equal(getattr(plain.last, field), getattr(watched.last, field)), field
    assert [seen.step for seen in trace.steps] == list(range(len(trace.steps)))
    for seen in trace.steps:
        assert bool((seen.committed <= seen.masks).all())
    if strategy.revise is None:
        written = torch.zeros(len(canvas), dtype=torch.int64)
        for seen in trace.steps:
            written.index_add_(0, seen.rows, seen.committed)
        assert torch.equal(written, canvas.editable.sum(dim=-1))


def test_the_figures_of_a_step() -> None:
    trace = Trace()
    model = HashDenoiser(2.0)
    canvas = Canvas.from_prompts([[3]], 4)
    unmask(model, canvas, Strategy(draw=Draw(), observers=(trace,)))
    law = model(canvas.tokens.masked_fill(canvas.editable, 0), at=canvas.editable).double()
    entropy = -(law.exp() * law.clamp(min=-1e9)).sum(dim=-1).mean()
    first = trace.steps[0]
    assert (first.masks.tolist(), first.committed.tolist(), first.block.tolist()) == ([4], [1], [0])
    assert float(first.entropy) == pytest.approx(float(entropy), abs=1e-5)
    assert [int(seen.masks) for seen in trace.steps] == [4, 3, 2, 1]


def test_any_function_may_watch() -> None:
    """Voting over intermediate answers needs the whole prediction of each step, and nothing else."""
    guesses: list[list[int]] = []

    def watch(step: Step, committed: Tensor) -> None:
        guess = torch.where(step.candidates & ~committed, step.dense(step.predicted, 0), step.state.tokens)
        guesses.append(guess[0].tolist())

    strategy = Strategy(observers=(watch,))
    out = generate(tiny_model(), None, [[3, 4]], strategy=strategy, max_new_tokens=5, eos="ignore")
    assert guesses[-1] == out.tokens[0].tolist()
    assert all(0 not in guess[2:] for guess in guesses)
