"""Saber (2510.18165): commit what is surer than commits have been so far, then take back what has become doubtful.

`RisingBar` is its selector, `Backtrack` its reviser. Read next: `presets_adaptive.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mdlm.samplers.revise import Revision
from mdlm.samplers.select import Looking, at_least_one_of
from mdlm.samplers.select_adaptive import highest
from mdlm.samplers.state import RowMemory, State, Step


@dataclass(frozen=True)
class RisingBar(Looking):
    """Every score above the mean probability that the decided tokens had when they were written, at least `least`.

    The mean is over what the row has written up to the end of the window; before the first token nothing exceeds it.
    """

    least: int = 2

    def __post_init__(self) -> None:
        at_least_one_of("least", self.least, 1)

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        state = step.state
        up_to_end = step.window.flip(-1).cumsum(dim=-1).flip(-1) > 0
        written = state.editable & ~state.masked & up_to_end
        total = state.log_probs.exp().masked_fill(~written, 0.0).sum(dim=-1)
        number = written.sum(dim=-1)
        bar = torch.where(number > 0, total / number.clamp(min=1), 1.0)
        sure = scores.double() > bar.log()[:, None]
        enough = sure.sum(dim=-1) >= self.least
        return torch.where(enough[:, None], sure, highest(scores, torch.full_like(number, self.least)))


@dataclass(frozen=True)
class Backtrack:
    """After a step that committed k tokens, mask the r decided ones again whose probability has fallen most since the
    last step, r = max(`least` // 2, ceil(k / 8)), but at most k - 1, so every step gains a token. A full window is
    left as it is.

    A token's probability is that of what is written, read in place; in the step after its commit it is compared with
    that at its commit. Tokens of this very step have not been read in place yet and stay. (Published code compares the
    best token's probability, whatever is written, and may take back what it has just committed.)
    """

    least: int = 2
    max_edits: int = 8
    reads_decided: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least_one_of("least", self.least, 1)
        at_least_one_of("max_edits", self.max_edits, 0)

    def pending(self, state: State) -> Bool[Tensor, " batch"]:
        """See `Reviser`: nothing is left to do once everything is written."""
        return torch.zeros_like(state.rows, dtype=torch.bool)

    def __call__(self, step: Step, committed: Bool[Tensor, "batch seq"]) -> Revision:
        """See `Reviser`."""
        state = step.state
        held = step.window & state.editable & ~step.candidates
        written = state.tokens.masked_fill(~held, 0)
        now = step.dense(step.of(step.packed(written)).double().exp(), torch.nan).masked_fill(~held, torch.nan)
        memory = step.remember(self, lambda: RowMemory({"last": torch.full_like(now, torch.nan)}))
        assert isinstance(memory, RowMemory)
        last = torch.where(memory["last"].isnan(), state.log_probs.exp(), memory["last"])
        fall = torch.where(held & (state.edits < self.max_edits), last - now, -torch.inf)
        k = committed.sum(dim=-1)
        r = torch.maximum(torch.full_like(k, self.least // 2), (k + 7) // 8).minimum((k - 1).clamp(min=0))
        r = r.masked_fill(~(state.masked & step.window).any(dim=-1), 0)
        memory["last"] = now
        return Revision(remask=highest(fall, r))
