"""Steps made by hand, for tests of selectors without a run."""

from __future__ import annotations

import torch
from sampler_tools import VOCAB, HashDenoiser
from torch import Tensor

from mdlm.attention_rows import Attention
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.driver import Run, row_keys
from mdlm.samplers.scores import probability
from mdlm.samplers.state import Step
from mdlm.samplers.strategy import Strategy


def between(weights: Tensor) -> Attention:
    """The attention of a forward whose weights are `[batch, seq, seq]`."""

    def ask(at: Tensor) -> Tensor:
        wanted = [positions(row) for row in at]
        width = max(map(len, wanted))
        out = torch.zeros(len(at), width, width, dtype=weights.dtype)
        for row, places in enumerate(wanted):
            for a, i in enumerate(places):
                for b, j in enumerate(places):
                    out[row, a, b] = weights[row, i, j]
        return out

    return ask


def make_step(logits: Tensor, undecided: Tensor | None = None, attention: Tensor | None = None) -> Step:
    """A step over a canvas without a prompt, from logits `[batch, seq, vocab]` of all positions, mask id 0 left out;
    `attention`: weights `[batch, seq, seq]`."""
    batch, seq, _ = logits.shape
    masked = torch.ones(batch, seq, dtype=torch.bool) if undecided is None else undecided
    editable = torch.ones_like(masked)
    canvas = Canvas(torch.zeros(batch, seq, dtype=torch.int64), editable, torch.full((batch,), seq))
    state = Run(HashDenoiser(), canvas, Strategy(), row_keys(0, batch)).state
    state.masked = masked
    step = Step(state, editable, masked, 0, at=masked, attention=None if attention is None else between(attention))
    logits = logits.double().index_fill(-1, torch.tensor(0), -torch.inf)
    step.log_probs = logits[masked].log_softmax(dim=-1)
    return step


def scores_of(step: Step) -> Tensor:
    return step.dense(probability(step), fill=-torch.inf)


def random_step(seed: int, batch: int = 3, seq: int = 12, scale: float = 4.0, attention: bool = False) -> Step:
    generator = torch.Generator().manual_seed(seed)
    undecided = torch.rand(batch, seq, generator=generator) < 0.75
    undecided[:, seed % seq] = True
    logits = scale * torch.randn(batch, seq, VOCAB, generator=generator)
    weights = torch.rand(batch, seq, seq, generator=generator).double() if attention else None
    return make_step(logits, undecided, weights)


def positions(row: Tensor) -> list[int]:
    return row.nonzero()[:, 0].tolist()
