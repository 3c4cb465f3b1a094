"""Steps made by hand, for tests of selectors without a run."""

from __future__ import annotations

import torch
from sampler_tools import VOCAB, HashDenoiser
from torch import Tensor

from mdlm.samplers.canvas import Canvas
from mdlm.samplers.driver import Run, row_keys
from mdlm.samplers.scores import probability
from mdlm.samplers.state import Step
from mdlm.samplers.strategy import Strategy


def make_step(logits: Tensor, undecided: Tensor | None = None, attention: Tensor | None = None) -> Step:
    """A step over a canvas without a prompt, from logits `[batch, seq, vocab]` of all positions, mask id 0 left out."""
    batch, seq, _ = logits.shape
    masked = torch.ones(batch, seq, dtype=torch.bool) if undecided is None else undecided
    editable = torch.ones_like(masked)
    canvas = Canvas(torch.zeros(batch, seq, dtype=torch.int64), editable, torch.full((batch,), seq))
    state = Run(HashDenoiser(), canvas, Strategy(), row_keys(0, batch)).state
    state.masked = masked
    step = Step(state, editable, masked, 0, at=masked, attention=attention)
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
    width = int(undecided.sum(dim=1).max())
    weights = torch.rand(batch, width, width, generator=generator).double() if attention else None
    return make_step(logits, undecided, weights)


def positions(row: Tensor) -> list[int]:
    return row.nonzero()[:, 0].tolist()
