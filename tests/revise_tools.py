"""What the tests of revising and speculating samplers share: a model of tunable stubbornness, runs, comparisons."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import reference_revise as reference
import torch
from torch import Tensor

from mdlm.denoiser import Denoiser, FunctionDenoiser
from mdlm.rng import counter_uniform, hash_counters
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.driver import Frame, Run, row_keys
from mdlm.samplers.strategy import Strategy

VOCAB = 9
MASK = VOCAB - 1


def hashed(seed: int, scale: float = 6.0, memory: float = 0.5) -> FunctionDenoiser:
    """A model whose logits are hashes: of (position, token), and of everything on the canvas (`memory` of the weight).

    Integer arithmetic, so a row's logits are the same bits in any batch. Id 0 stands for padding: it adds nothing to
    the canvas's hash and is never predicted.
    """

    def logits(tokens: Tensor) -> Tensor:
        position = torch.arange(tokens.shape[1])
        canvas = (hash_counters(seed, position, tokens) * (tokens != 0)).sum(dim=-1)
        token = torch.arange(VOCAB)
        own = counter_uniform(seed, position[:, None], token)
        context = counter_uniform(canvas[:, None, None], position[:, None], token)
        mixed = scale * ((1 - memory) * own + memory * context)
        return mixed.index_fill(-1, torch.tensor(0), -torch.inf)

    return FunctionDenoiser(logits, MASK, VOCAB, ragged_ok=True)


def plain(denoiser: FunctionDenoiser) -> reference.Model:
    """The model as a reference takes it."""
    return lambda row: denoiser(torch.tensor([row]))[0].tolist()


def run(
    denoiser: Denoiser,
    canvas: Canvas,
    strategy: Strategy,
    seed: int | Sequence[int] = 0,
    watch: Callable[[Run], object] | None = None,
    most_steps: int = 10_000,
) -> Frame:
    """The final frame."""
    at_work = Run(denoiser, canvas, strategy, row_keys(seed, len(canvas)))
    while not at_work.done:
        assert at_work.state.step < most_steps, "does not end"
        at_work.advance()
        if watch is not None:
            watch(at_work)
    return at_work.frame()


def ragged(prompts=((1, 2), (), (MASK, 3, 4), (5,)), new=(10, 7, 12, 0)) -> Canvas:
    """Rows of different lengths; a prompt with the mask id; a row with nothing to write; a hole before given text."""
    prompted = Canvas.from_prompts([list(p) for p in prompts], list(new))
    rows = [prompted.tokens[i, : prompted.lengths[i]] for i in range(len(prompted))]
    flags = [prompted.editable[i, : prompted.lengths[i]] for i in range(len(prompted))]
    rows.append(torch.tensor([3, 1, 1, 1, 4, 1, 1, 2]))
    flags.append(torch.tensor([0, 1, 1, 1, 0, 1, 1, 0]).bool())
    return Canvas.from_rows(rows, flags)


def same(a: Frame, b: Frame) -> None:
    """Bit for bit, counts included; the number of steps done apart."""
    for field in dataclasses.fields(Frame):
        if field.name != "step":
            left, right = getattr(a, field.name), getattr(b, field.name)
            assert torch.equal(left.nan_to_num(7.0), right.nan_to_num(7.0)), field.name
