"""A `Strategy`: one component of each kind. What a preset returns and the driver runs. Read next: `presets.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mdlm.samplers.cache import CachePolicy, NoCache
from mdlm.samplers.constrain import Constraint
from mdlm.samplers.draw import Draw
from mdlm.samplers.observe import Observer
from mdlm.samplers.revise import Reviser
from mdlm.samplers.scores import Scorer, probability
from mdlm.samplers.select import Selector, TopK
from mdlm.samplers.state import Step
from mdlm.samplers.stop import StopRule
from mdlm.samplers.windows import Window, whole

Transform = Callable[[Float[Tensor, "rows vocab"], Step], Float[Tensor, "rows vocab"]]
"""Log-probabilities of one step's predictions to others; the driver normalises again and keeps the mask id out."""

Admission = Callable[
    [Step, Int64[Tensor, " rows"], Int64[Tensor, " rows"], Int64[Tensor, " rows"], Float[Tensor, " rows"]],
    Bool[Tensor, " rows"],
]
"""Which of one step's commits are written, after their tokens are drawn: from the step, and row, position, token and
log-probability of each commit. It keeps at least one commit of every row; the others stay undecided."""


@dataclass(frozen=True)
class InTurn:
    """Admissions one after the other, each of what those before it have left."""

    admissions: tuple[Admission, ...]

    def __call__(
        self,
        step: Step,
        row: Int64[Tensor, " rows"],
        position: Int64[Tensor, " rows"],
        tokens: Int64[Tensor, " rows"],
        log_probs: Float[Tensor, " rows"],
    ) -> Bool[Tensor, " rows"]:
        """See `Admission`."""
        stay = torch.ones_like(row, dtype=torch.bool)
        for admit in self.admissions:
            stay[stay.clone()] = admit(step, row[stay], position[stay], tokens[stay], log_probs[stay])
        return stay


@dataclass(frozen=True)
class Strategy:
    """How a canvas is unmasked; see the module of each kind.

    A step runs them in this order: window, forward (through the cache), transforms, constraint (the marginals given
    it), draw (if before selection), score, select, draw (if after), admit, commit, observers, revise, stop.
    """

    score: Scorer = probability
    select: Selector = field(default_factory=TopK)
    draw: Draw = field(default_factory=Draw)
    window: Window = whole
    admit: Admission | None = None
    constraint: Constraint | None = None
    revise: Reviser | None = None
    transforms: tuple[Transform, ...] = ()
    stop: tuple[StopRule, ...] = ()
    cache: CachePolicy = field(default_factory=NoCache)
    observers: tuple[Observer, ...] = ()
