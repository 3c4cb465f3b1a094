"""Revisers: which decisions are taken back (masked again) or replaced after a step's commits.

A reviser maps the `Step` and this step's commits to a `Revision`. The driver keeps its promises whatever a reviser
says: given tokens never change, a position is revised at most `max_edits` times (so the number of steps is bounded),
and in the last step of a schedule nothing is masked again. Read next: `remdm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Bool, Int64
from torch import Tensor

from mdlm.samplers.state import State, Step


@dataclass(frozen=True)
class Revision:
    """What to change; None: nothing."""

    remask: Bool[Tensor, "batch seq"] | None = None
    replace: Bool[Tensor, "batch seq"] | None = None
    tokens: Int64[Tensor, "batch seq"] | None = None
    """New tokens where `replace`."""


class Reviser(Protocol):
    """See the module's docstring."""

    @property
    def reads_decided(self) -> bool:
        """Whether it needs predictions at the decided positions of the window."""

    @property
    def max_edits(self) -> int | None:
        """Revisions per position; None: as many as the selector's schedule allows."""

    def pending(self, state: State) -> Bool[Tensor, " batch"]:
        """Rows to keep in their window though it holds nothing undecided. Must come to an end by itself: the driver
        asks before the first step, after every step, and before the next window."""

    def __call__(self, step: Step, committed: Bool[Tensor, "batch seq"]) -> Revision:
        """The changes. `committed` was written in this step; `step.candidates` was undecided before it."""


def held(step: Step) -> Bool[Tensor, "batch seq"]:
    """Positions of the window that were decided before this step: what there is to revise."""
    return step.window & step.state.editable & ~step.candidates
