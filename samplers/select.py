"""Selectors: which candidates are committed in this step.

A selector maps dense scores (`[batch, seq]`, -inf where there is no candidate or its scorer refuses it) and the `Step`
to a dense boolean mask. Every rule is per row. Equal scores are taken from the left, by a stable sort. The driver
commits the best candidate of a row for which a selector picks none, unless the selector follows a schedule
(`ancestral.py`).

`blind` selectors choose without looking at predictions; the driver then asks the denoiser for the chosen positions
only, and not at all in a step that chooses none. Read next: `ancestral.py`, `windows.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mdlm.samplers.state import NOISE_ORDER, Step


class Selector(Protocol):
    """See the module's docstring. `schedule` is the number of steps per window after which everything is committed."""

    @property
    def blind(self) -> bool:
        """Whether it never looks at scores or predictions."""

    @property
    def schedule(self) -> int | None:
        """None: at least one commit per row and step. A number: steps without a commit are legitimate until then."""

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """The positions to commit."""


class Looking:
    """What selectors share that look at scores and commit something in every step."""

    blind: ClassVar[bool] = False
    schedule: ClassVar[int | None] = None


def ranks(scores: Float[Tensor, "batch seq"]) -> Int64[Tensor, "batch seq"]:
    """Rank of each score within its row, 0 = highest; equal ones from the left."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    positions = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, positions)


def at_least_one_of(score_name: str, value: float | int, least: float | int) -> None:
    """Raises ValueError if a knob is below its least value."""
    if not value >= least:
        raise ValueError(f"{score_name} is {value}; it must be {least} or more")


def within(name: str, value: float, low: float, high: float) -> None:
    """Raises ValueError if a knob lies outside [low, high]."""
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must lie in [{low}, {high}]")


@dataclass(frozen=True)
class TopK(Looking):
    """The `k` highest scores."""

    k: int = 1

    def __post_init__(self) -> None:
        at_least_one_of("k", self.k, 1)

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        if self.k == 1:  # the usual case needs no sort; argmax takes the leftmost of equal ones
            best = scores.argmax(dim=-1, keepdim=True)
            chosen = torch.zeros_like(step.candidates).scatter_(-1, best, True)
            return chosen & (scores > -torch.inf)
        return (ranks(scores) < self.k) & (scores > -torch.inf)


def even_quota(step: Step, steps: int) -> Int64[Tensor, " batch"]:
    """How many to commit so that a window is full after `steps` steps, the larger shares first (LLaDA, algorithm 5).

    With m masks left and s steps left that is ceil(m / s): never 0, so steps beyond the number of masks are not run.
    """
    left = (steps - step.state.block_step).clamp(min=1)
    masks = (step.state.masked & step.window).sum(dim=-1)
    return (masks + left - 1) // left


@dataclass(frozen=True)
class Quota(Looking):
    """The highest scores, as many per step as fill the window in `steps` steps."""

    steps: int

    def __post_init__(self) -> None:
        at_least_one_of("steps", self.steps, 1)

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        return (ranks(scores) < even_quota(step, self.steps)[:, None]) & (scores > -torch.inf)


@dataclass(frozen=True)
class Threshold(Looking):
    """Every score of at least log(`threshold`), and never fewer than one (Fast-dLLM, 2505.22618).

    With `probability` that is confidence >= threshold; with `negative_entropy` it is H <= -log(threshold).
    """

    threshold: float = 0.9

    def __post_init__(self) -> None:
        at_least_one_of("threshold", self.threshold, 0)

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        least = math.log(self.threshold) if self.threshold > 0 else -math.inf
        return (scores >= least) & (scores > -torch.inf)


@dataclass(frozen=True)
class RandomOrder:
    """`k` uniformly random candidates.

    With k = 1 this is the first-hitting sampler (Zheng et al., 2409.02908): the limit of ancestral sampling for
    infinitely many steps, in as many forwards as there are tokens. Exact for an exact denoiser.
    """

    k: int = 1
    blind: ClassVar[bool] = True
    schedule: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        at_least_one_of("k", self.k, 1)

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        order = step.state.uniform(NOISE_ORDER).masked_fill(~step.candidates, -torch.inf)
        return (ranks(order) < self.k) & step.candidates
