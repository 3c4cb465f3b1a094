"""Observers: whoever wants to see every step as it happens, without having a part in it.

An observer is called with the `Step` (window, predictions, scores' raw material) and this step's commits, after they
are written and before anything is revised. It looks and keeps what it likes; what it sees is the run's own and must not
be changed. `Strategy(observers=...)` takes any number. For the canvas between steps there is `generate.stream`; for
voting over intermediate answers, figures of a run or a plot, write one of these. Read next: `driver.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mdlm.samplers.state import Step


class Observer(Protocol):
    """See the module's docstring."""

    def __call__(self, step: Step, committed: Bool[Tensor, "batch seq"]) -> None:
        """Look at one step. Rows are those still unfinished: `step.state.rows` are their numbers in the canvas."""


@dataclass(frozen=True)
class Seen:
    """One step in figures, per unfinished row."""

    step: int
    rows: Int64[Tensor, " batch"]
    block: Int64[Tensor, " batch"]
    """Number of the window."""
    masks: Int64[Tensor, " batch"]
    """Undecided positions of the window before the step."""
    committed: Int64[Tensor, " batch"]
    entropy: Float[Tensor, " batch"]
    """Mean over the predictions made, in nats; NaN in a row for which none was."""


@dataclass
class Trace:
    """An observer that keeps the figures of every step of one run or several."""

    steps: list[Seen] = field(default_factory=list)

    def __call__(self, step: Step, committed: Bool[Tensor, "batch seq"]) -> None:
        """See `Observer`."""
        state = step.state
        entropy = (
            step.dense(step.entropy, 0.0) if step.log_probs.numel() else state.log_probs.new_zeros(committed.shape)
        )
        asked = committed.new_zeros(committed.shape) if step.at is None else step.at
        self.steps.append(
            Seen(
                step=state.step,
                rows=state.rows.clone(),
                block=state.block.clone(),
                masks=step.candidates.sum(dim=-1),
                committed=committed.sum(dim=-1),
                entropy=entropy.sum(dim=-1) / asked.sum(dim=-1),
            )
        )
