"""Learning-rate schedules as pure functions of the step: no state, so a resumed run needs nothing but the step number.

The factor multiplies every parameter group's own peak rate. `accelerate`'s scheduler wrapper is not used: it steps once
per *process*, so the same recipe would decay at another speed on another machine. Read next: `optim.py`.

Sources: cosine, Loshchilov & Hutter, SGDR (1608.03983), eq. 5 without restarts; WSD (warm-up, stable, decay), Hu et
al., MiniCPM (2404.06395), section 4, with a linear decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


def constant(progress: float, decay_fraction: float) -> float:
    """1 throughout."""
    return 1.0


def linear(progress: float, decay_fraction: float) -> float:
    """From 1 to 0 in a straight line."""
    return 1.0 - progress


def cosine(progress: float, decay_fraction: float) -> float:
    """Half a cosine from 1 to 0."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def wsd(progress: float, decay_fraction: float) -> float:
    """1, then a straight line to 0 over the last `decay_fraction` of the steps after warm-up."""
    return min(1.0, (1.0 - progress) / decay_fraction)


SHAPES: dict[str, Callable[[float, float], float]] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "wsd": wsd,
}
"""Name -> f(progress in [0, 1], decay_fraction), falling from 1 to 0 (except `constant`)."""


@dataclass(frozen=True)
class LRSchedule:
    """Learning rate over the run, as a factor on the peak rate `--optim.lr`."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 1/warmup_steps of the peak rate. Give this or `warmup_fraction`."""
    warmup_fraction: float = 0.0
    """Warm-up as a fraction of all steps, in [0, 1)."""
    final: float = 0.1
    """Rate that the decay tends to, as a fraction of the peak, in [0, 1]."""
    decay_fraction: float = 0.2
    """`wsd` only: the last fraction of the steps after warm-up in which the rate falls, in (0, 1]."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the flag."""
        if self.kind not in SHAPES:
            raise ValueError(f"--lr_schedule.kind is {self.kind!r}; it must be one of {', '.join(SHAPES)}")
        if self.warmup_steps < 0:
            raise ValueError(f"--lr_schedule.warmup_steps is {self.warmup_steps}; it must be 0 or more")
        if not 0.0 <= self.warmup_fraction < 1.0:
            raise ValueError(f"--lr_schedule.warmup_fraction is {self.warmup_fraction}; it must lie in [0, 1)")
        if self.warmup_steps and self.warmup_fraction:
            raise ValueError(
                f"--lr_schedule.warmup_steps ({self.warmup_steps}) and --lr_schedule.warmup_fraction "
                f"({self.warmup_fraction}) both set the warm-up; set one of them to 0"
            )
        if not 0.0 <= self.final <= 1.0:
            raise ValueError(f"--lr_schedule.final is {self.final}; it is a fraction of the peak rate, in [0, 1]")
        if not 0.0 < self.decay_fraction <= 1.0:
            raise ValueError(f"--lr_schedule.decay_fraction is {self.decay_fraction}; it must lie in (0, 1]")

    def warmup(self, total_steps: int) -> int:
        """Number of warm-up steps in a run of `total_steps`."""
        return self.warmup_steps or round(self.warmup_fraction * total_steps)

    def factor(self, step: int, total_steps: int) -> float:
        """Factor on the peak rate at `step`, counted from 0, in a run of `total_steps`; in (0, 1] before the end.

        Warm-up: (step + 1) / warmup, so the first step already moves and step `warmup - 1` has the peak rate. After
        it, `1 - (1 - final) * (1 - shape(progress))` with progress = (step - warmup) / (total_steps - warmup): 0 at the
        first step after the warm-up and just below 1 at the last, so that `final = 0` wastes no step.
        """
        warmup = self.warmup(total_steps)
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return 1.0 - (1.0 - self.final) * (1.0 - SHAPES[self.kind](progress, self.decay_fraction))
