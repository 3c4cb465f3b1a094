"""Samplers that mask decided tokens again along a schedule, so that early mistakes can be taken back.

ReMDM (Wang et al., 2503.00307). The mask rate goes from t to s < t. A decided token is masked again with probability
sigma, a masked position is revealed with probability

    (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t) = ((t - s) + sigma (1 - t)) / t,        alpha = 1 - mask rate,

so whatever sigma in [0, sigma_max = min(1, s / (1 - t))] is taken, the mask rate after the step is s. sigma = 0 is
ancestral sampling. As there, the reveal is drawn first and the token second; a step that reveals nothing costs nothing.

P2, path planning (Peng et al., 2502.03540): each step keeps the best-scored share of all positions, decided ones
included, whose tokens are scored in place; what does not make it is masked again. Read next: `edit.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from mdlm.samplers.ancestral import grid
from mdlm.samplers.revise import Revision, held
from mdlm.samplers.scores import LOWEST
from mdlm.samplers.select import at_least_one_of, ranks
from mdlm.samplers.state import NOISE_REMASK, NOISE_REVEAL, State, Step

MaskRate = Callable[[Float64[Tensor, "batch 1"]], Float64[Tensor, "batch 1"]]
"""Share of masked positions at a time; 1 at time 1, 0 at time 0, never rising as time falls."""

Sigma = Callable[[Step, Float64[Tensor, "batch 1"], Float64[Tensor, "batch 1"]], Float64[Tensor, "batch _"]]
"""Probability of masking each decided position again, from the mask rates (t, s) before and after the step: per row, or
per position with 0 at undecided ones."""


def even(time: Float64[Tensor, "batch 1"]) -> Float64[Tensor, "batch 1"]:
    """The mask rate falls evenly."""
    return time


@dataclass(frozen=True)
class Plateau:
    """The mask rate falls to 1 - `alpha_on` until time `t_on`, stands until `t_off`, then falls to 0 (ReMDM-loop)."""

    t_on: float = 0.55
    t_off: float = 0.05
    alpha_on: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.t_off <= self.t_on < 1:
            raise ValueError(f"t_off={self.t_off} and t_on={self.t_on} must lie in (0, 1), t_off not above t_on")
        if not 0 < self.alpha_on < 1:
            raise ValueError(f"alpha_on is {self.alpha_on}; it must lie in (0, 1): the share decided on the plateau")

    def __call__(self, time: Float64[Tensor, "batch 1"]) -> Float64[Tensor, "batch 1"]:
        """See `MaskRate`."""
        rate = torch.full_like(time, 1 - self.alpha_on)
        before = 1 - self.alpha_on * (1 - time) / (1 - self.t_on)
        after = (1 - self.alpha_on) * time / self.t_off
        return torch.where(time > self.t_on, before, torch.where(time < self.t_off, after, rate))


def sigma_max(t: Float64[Tensor, "batch 1"], s: Float64[Tensor, "batch 1"]) -> Float64[Tensor, "batch 1"]:
    """Largest probability of remasking that keeps the mask rate: min(1, s / (1 - t)); 0 in the last step."""
    return (s / (1 - t).clamp(min=torch.finfo(t.dtype).tiny)).clamp(max=1.0)


def _share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; it must lie in [0, 1]")


@dataclass(frozen=True)
class Cap:
    """sigma = min(eta, sigma_max)."""

    eta: float = 0.008

    def __post_init__(self) -> None:
        _share("eta", self.eta)

    def __call__(
        self, step: Step, t: Float64[Tensor, "batch 1"], s: Float64[Tensor, "batch 1"]
    ) -> Float64[Tensor, "batch _"]:
        """See `Sigma`."""
        return sigma_max(t, s).clamp(max=self.eta)


@dataclass(frozen=True)
class Rescale:
    """sigma = eta * sigma_max."""

    eta: float = 0.01

    def __post_init__(self) -> None:
        _share("eta", self.eta)

    def __call__(
        self, step: Step, t: Float64[Tensor, "batch 1"], s: Float64[Tensor, "batch 1"]
    ) -> Float64[Tensor, "batch _"]:
        """See `Sigma`."""
        return self.eta * sigma_max(t, s)


@dataclass(frozen=True)
class Standing:
    """sigma = min(eta, sigma_max) while the mask rate stands still, 0 while it falls (ReMDM-loop)."""

    eta: float = 0.02

    def __post_init__(self) -> None:
        _share("eta", self.eta)

    def __call__(
        self, step: Step, t: Float64[Tensor, "batch 1"], s: Float64[Tensor, "batch 1"]
    ) -> Float64[Tensor, "batch _"]:
        """See `Sigma`."""
        return torch.where(t == s, sigma_max(t, s).clamp(max=self.eta), 0.0)


def by_confidence(
    step: Step, t: Float64[Tensor, "batch 1"], s: Float64[Tensor, "batch 1"]
) -> Float64[Tensor, "batch _"]:
    """sigma_max shared over the decided positions by softmax(-probability of the token when it was written).

    What was written hesitantly goes first. Undecided positions have sigma = 0, as in the paper, so they are revealed no
    oftener than in ancestral sampling and the mask rate stays a little above s, until the last step reveals the rest.
    """
    decided = held(step)
    weight = (-step.state.log_probs.exp()).masked_fill(~decided, -torch.inf).softmax(dim=-1)
    return sigma_max(t, s) * torch.where(decided, weight, 0.0)


@dataclass(frozen=True)
class Process:
    """The mask rates and remasking probabilities of one ReMDM sampler, shared by its selector and its reviser."""

    steps: int = 64
    sigma: Sigma = Cap()
    rate: MaskRate = even

    def __post_init__(self) -> None:
        at_least_one_of("steps", self.steps, 1)

    def rates(self, step: Step) -> tuple[Float64[Tensor, "batch 1"], Float64[Tensor, "batch 1"]]:
        """Mask rates (t, s) before and after this step."""
        time, later = grid(step, self.steps)
        return self.rate(time[:, None]), self.rate(later[:, None])

    def remask_probability(self, step: Step) -> Float64[Tensor, "batch _"]:
        """sigma of each decided position."""
        return self.sigma(step, *self.rates(step))

    def reveal_probability(self, step: Step) -> Float64[Tensor, "batch _"]:
        """Of each undecided position."""
        t, s = self.rates(step)
        return ((t - s) + self.sigma(step, t, s) * (1 - t)) / t


@dataclass(frozen=True)
class Reveal:
    """The selector of a `Process`."""

    process: Process
    blind: ClassVar[bool] = True

    @property
    def schedule(self) -> int:
        """See `Selector`."""
        return self.process.steps

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        return step.candidates & (step.state.uniform(NOISE_REVEAL) < self.process.reveal_probability(step))


@dataclass(frozen=True)
class Remask:
    """The reviser of a `Process`. A row stays in its window until the schedule ends, also if nothing is undecided."""

    process: Process
    reads_decided: ClassVar[bool] = False
    max_edits: ClassVar[int | None] = None

    def pending(self, state: State) -> Bool[Tensor, " batch"]:
        """See `Reviser`."""
        return state.block_step < self.process.steps

    def __call__(self, step: Step, committed: Bool[Tensor, "batch seq"]) -> Revision:
        """See `Reviser`."""
        sigma = self.process.remask_probability(step)
        return Revision(remask=held(step) & (step.state.uniform(NOISE_REMASK) < sigma))


@dataclass(frozen=True)
class Planner:
    """P2 with the model as its own planner; selector and, through `Unplanned`, reviser.

    Step i of `steps` keeps floor((i + 1) / steps * N) of the N positions of the window. An undecided position is scored
    by the log-probability of the token drawn for it, a decided one by `eta` times that of the token it holds. 0 never
    revises (all decided tokens outrank the rest); the larger eta, the more is taken back.
    """

    steps: int = 64
    eta: float = 1.0
    blind: ClassVar[bool] = False
    reads_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least_one_of("steps", self.steps, 1)
        at_least_one_of("eta", self.eta, 0)

    @property
    def schedule(self) -> int:
        """See `Selector`."""
        return self.steps

    def kept(self, step: Step) -> Bool[Tensor, "batch seq"]:
        """The best positions of the window, decided or not; equal scores from the left. Computed once a step."""
        if self in step.shared:
            return step.shared[self]
        decided, variable = held(step), step.window & step.state.editable
        log_prob = step.of(torch.where(step.packed(decided), step.packed(step.state.tokens), step.predicted))
        score = step.dense(log_prob.clamp(min=LOWEST), -torch.inf)
        held_score = score * self.eta if self.eta > 0 else torch.inf
        score = torch.where(decided, held_score, score).masked_fill(~variable, -torch.inf)
        done = step.state.block_step.clamp(max=self.steps - 1)
        quota = (done + 1) * variable.sum(dim=-1) // self.steps
        step.shared[self] = (ranks(score) < quota[:, None]) & variable
        return step.shared[self]

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        return self.kept(step) & step.candidates


@dataclass(frozen=True)
class Unplanned:
    """The reviser of a `Planner`: masks the decided positions that it does not keep."""

    planner: Planner
    max_edits: ClassVar[int | None] = None

    @property
    def reads_decided(self) -> bool:
        """See `Reviser`."""
        return self.planner.eta > 0

    def pending(self, state: State) -> Bool[Tensor, " batch"]:
        """See `Reviser`: never, the quota is full in the last step only."""
        return torch.zeros_like(state.rows, dtype=torch.bool)

    def __call__(self, step: Step, committed: Bool[Tensor, "batch seq"]) -> Revision:
        """See `Reviser`."""
        return Revision(remask=held(step) & ~self.planner.kept(step)) if self.planner.eta > 0 else Revision()
