"""Revisers that judge decided tokens in place: the same forward that predicts the masks also reads what stands written.

Token to token (LLaDA2.1, 2602.08676): a decided token is replaced where the model is sure of another one. Token to mask
(2604.18738): a doubtful one is masked and predicted anew. Both judge only tokens that the forward has seen. Read next:
`wino.py`, which judges each token without seeing it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mdlm.samplers.revise import Revision, held
from mdlm.samplers.select import at_least_one_of, within
from mdlm.samplers.select_adaptive import highest
from mdlm.samplers.state import RowMemory, State, Step


def log_of(probability: float) -> float:
    """log, -inf at 0."""
    return math.log(probability) if probability > 0 else -math.inf


@dataclass(frozen=True)
class EditTokens:
    """Replace a decided token by the most probable one where that is another, with a probability above `tau_edit`.

    After the last mask of a window is written the row stays in it while edits occur, at most `post_steps` steps. Each
    position is edited at most `max_edits` times, so two tokens that call for each other's replacement do not loop. With
    `tau_edit` 1 or more nothing is ever edited and nothing more is computed.
    """

    tau_edit: float = 0.5
    post_steps: int = 16
    max_edits: int = 8
    replaces: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least_one_of("tau_edit", self.tau_edit, 0)
        at_least_one_of("post_steps", self.post_steps, 0)
        at_least_one_of("max_edits", self.max_edits, 0)

    @property
    def reads_decided(self) -> bool:
        """See `Reviser`."""
        return self.tau_edit < 1

    def pending(self, state: State) -> Bool[Tensor, " batch"]:
        """See `Reviser`: rows of a full window whose last step changed something, within `post_steps`."""
        if self not in state.memory:
            return torch.zeros_like(state.rows, dtype=torch.bool)
        memory = state.memory[self]
        assert isinstance(memory, RowMemory)
        return memory["again"]

    def __call__(self, step: Step, committed: Bool[Tensor, "batch seq"]) -> Revision:
        """See `Reviser`."""
        if not self.reads_decided:
            return Revision()
        state = step.state
        value, token = step.best
        other = step.dense(token, -1)
        sure = step.dense(value > log_of(self.tau_edit), fill=False)
        replace = held(step) & sure & (other != state.tokens) & (state.edits < self.max_edits)
        full = ~(state.masked & step.window).any(dim=-1)
        had_masks = step.candidates.any(dim=-1)
        memory = step.remember(self, lambda: RowMemory({"posts": torch.zeros_like(state.rows)}))
        assert isinstance(memory, RowMemory)
        memory["posts"] = torch.where(had_masks, 0, memory["posts"] + 1)
        memory["again"] = full & (had_masks | replace.any(dim=-1)) & (memory["posts"] < self.post_steps)
        return Revision(replace=replace, tokens=other)


Doubt = Callable[[Step, Int64[Tensor, " rows"]], Float[Tensor, " rows"]]
"""By how many nats the predictions cast doubt on the tokens that are written at their positions; 0 or less: none."""


@dataclass(frozen=True)
class Unlikely:
    """The written token has a probability below `threshold`; 0: never."""

    threshold: float = 0.1

    def __call__(self, step: Step, written: Int64[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """See `Doubt`."""
        return log_of(self.threshold) - step.of(written) if self.threshold > 0 else torch.zeros_like(step.best[0])


@dataclass(frozen=True)
class Outvoted:
    """Another token has a probability above `threshold`; 1: never."""

    threshold: float = 0.9

    def __call__(self, step: Step, written: Int64[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """See `Doubt`."""
        value, token = step.best
        return torch.where(token != written, value - log_of(self.threshold), 0.0)


@dataclass(frozen=True)
class Behind:
    """The written token's logit is more than `difference` nats below the largest one; infinite: never."""

    difference: float = 0.3

    def __call__(self, step: Step, written: Int64[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """See `Doubt`."""
        gap = step.best[0] - step.of(written)
        return gap - self.difference if self.difference < math.inf else torch.zeros_like(gap)


@dataclass(frozen=True)
class MaskDoubtful:
    """Mask the doubtful tokens again, each position at most `max_edits` times.

    With `ratio` at most this share of the window's decided tokens in one step, rounded down, the most doubtful first
    (equal ones from the left).
    """

    doubt: Doubt = Unlikely()
    max_edits: int = 3
    ratio: float | None = None
    reads_decided: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least_one_of("max_edits", self.max_edits, 0)
        if self.ratio is not None:
            within("ratio", self.ratio, 0, 1)

    def pending(self, state: State) -> Bool[Tensor, " batch"]:
        """See `Reviser`: never."""
        return torch.zeros_like(state.rows, dtype=torch.bool)

    def __call__(self, step: Step, committed: Bool[Tensor, "batch seq"]) -> Revision:
        """See `Reviser`."""
        written = step.packed(step.state.tokens)  # at undecided positions without a meaning, and not judged
        decided = held(step)
        doubt = step.dense(self.doubt(step, written), fill=0.0)
        remask = (doubt > 0) & decided & (step.state.edits < self.max_edits)
        if self.ratio is not None:
            most = (decided.sum(dim=-1).double() * self.ratio).floor().long()
            remask = highest(torch.where(remask, doubt, -torch.inf), most)
        return Revision(remask=remask)
