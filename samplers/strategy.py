"""A `Strategy`: one component of each kind. What a preset returns and the driver runs. Read next: `presets.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from mdlm.samplers.cache import CachePolicy, NoCache
from mdlm.samplers.draw import Draw
from mdlm.samplers.revise import Reviser
from mdlm.samplers.scores import Scorer, probability
from mdlm.samplers.select import Selector, TopK
from mdlm.samplers.state import Step
from mdlm.samplers.stop import StopRule
from mdlm.samplers.windows import Window, whole

Transform = Callable[[Float[Tensor, "rows vocab"], Step], Float[Tensor, "rows vocab"]]
"""Log-probabilities of one step's predictions to others; the driver normalises again and keeps the mask id out."""


@dataclass(frozen=True)
class Strategy:
    """How a canvas is unmasked; see the module of each kind.

    A step runs them in this order: window, forward (through the cache), transforms, draw (if before selection), score,
    select, draw (if after), commit, revise, stop.
    """

    score: Scorer = probability
    select: Selector = field(default_factory=TopK)
    draw: Draw = field(default_factory=Draw)
    window: Window = whole
    revise: Reviser | None = None
    transforms: tuple[Transform, ...] = ()
    stop: tuple[StopRule, ...] = ()
    cache: CachePolicy = field(default_factory=NoCache)
