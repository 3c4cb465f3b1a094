"""Selectors whose rule changes as a row fills: a threshold that moves, a rule that another relieves.

Read next: `presets_span.py`, which uses them for Swordsman and DAPD.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mdlm.samplers.select import Looking, Selector
from mdlm.samplers.state import Step


@dataclass(frozen=True)
class MovingThreshold(Looking):
    """Every score of at least log(threshold), the threshold moving linearly from `first` (window undecided) to `last`
    (window decided). Equal ends: `Threshold`. Raises ValueError for values out of range."""

    first: float = 0.9
    last: float = 0.8

    def __post_init__(self) -> None:
        for name, value in (("first", self.first), ("last", self.last)):
            if value < 0:
                raise ValueError(f"{name} is {value}; it must be 0 or more")

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        left = step.candidates.sum(dim=1).double() / step.window.sum(dim=1).clamp(min=1)
        least = (self.last + (self.first - self.last) * left).log()
        return (scores >= least[:, None]) & (scores > -torch.inf)


@dataclass(frozen=True)
class Relay(Looking):
    """`early` while more than the fraction `until` of a row's editable positions is undecided, `late` from then on.

    Raises ValueError for a fraction outside [0, 1] and for parts that do not look at predictions or follow a schedule.
    """

    early: Selector
    late: Selector
    until: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.until <= 1:
            raise ValueError(f"until is {self.until}; it must lie in [0, 1]")
        for part in (self.early, self.late):
            if part.blind or part.schedule is not None:
                raise ValueError(f"{type(part).__name__} does not look at predictions or follows a schedule of its own")

    @property
    def parts(self) -> tuple[Selector, Selector]:
        """See `traits.py`."""
        return self.early, self.late

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        left = step.state.masked.sum(dim=1) / step.state.editable.sum(dim=1)
        return torch.where((left > self.until)[:, None], self.early(scores, step), self.late(scores, step))
