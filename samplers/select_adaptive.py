"""Selectors that commit as many positions as the predictions allow, and filters on selectors.

- `Factor`: the sorted prefix in which the joint argmax is provably the marginal ones (Fast-dLLM, 2505.22618, Th. 1);
- `EntropyBudget`: the sorted prefix whose dependence is bounded by its entropies (EB-Sampler, 2505.24857);
- `Dynamic`: all above a threshold, or a quota (SDAR 2510.06303, LLaDA2.0);
- `ShrinkingQuota`: Dream's share of what is left, with its random ranking (2508.15487);
- `Hierarchy`: the best position of each run of masks (dInfer, 2510.08666);
- `Dilated`: strides that halve, blind; `MinSpacing`: no two commits of a step closer than that (DUS, 2506.19037).

Scores are logarithms of confidences (`scores.py`). Read next: `history.py`, whose rules compare steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mdlm.samplers.select import Looking, Selector, at_least_one_of, ranks, within
from mdlm.samplers.state import NOISE_RANK, NOISE_REVEAL, Step


def log_threshold(probability: float) -> float:
    """log of a threshold on a probability; -inf at 0."""
    return math.log(probability) if probability > 0 else -math.inf


def highest(scores: Float[Tensor, "batch seq"], count: Int64[Tensor, " batch"]) -> Bool[Tensor, "batch seq"]:
    """The `count` highest scores of each row, without refused ones."""
    return (ranks(scores) < count[:, None]) & (scores > -torch.inf)


def sorted_prefix(
    order: Int64[Tensor, "batch seq"], fits: Bool[Tensor, "batch seq"], scores: Float[Tensor, "batch seq"]
) -> Bool[Tensor, "batch seq"]:
    """The positions `order[:, :n]`, n = where `fits` fails first, without refused ones."""
    prefix = (~fits).cumsum(dim=-1) == 0
    return torch.zeros_like(fits).scatter(-1, order, prefix) & (scores > -torch.inf)


@dataclass(frozen=True)
class Factor(Looking):
    """The n most confident positions, n the largest with (n + 1)(1 - c_(n)) < `factor`, and at least one.

    c_(n) is the n-th highest confidence; the left side grows with n. With `factor` 1 the tokens committed together are
    the argmax of every joint law that has these marginals (Th. 1). `compat`: as published, which commits one token more
    if only the last candidate fails, and takes equality for success.
    """

    factor: float = 1.0
    compat: bool = False

    def __post_init__(self) -> None:
        at_least_one_of("factor", self.factor, 0)

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        ordered, order = scores.double().sort(dim=-1, descending=True, stable=True)
        n = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
        doubt = -(n + 1) * torch.expm1(ordered)
        fits = (doubt <= self.factor if self.compat else doubt < self.factor) & (ordered > -torch.inf)
        fits[:, 0] = True
        if self.compat:
            candidates = (ordered > -torch.inf).sum(dim=-1)
            only_last_fails = (~fits).cumsum(dim=-1).eq(0).sum(dim=-1) == candidates - 1
            fits = fits | (only_last_fails[:, None] & (n == candidates[:, None]))
        return sorted_prefix(order, fits, scores)


@dataclass(frozen=True)
class EntropyBudget(Looking):
    """The longest prefix U, best score first, with sum of H over U - max of H over U <= `gamma` nats; at least one.

    Sum of H minus the joint entropy is the dependence that drawing independently loses, and it is at most sum - max:
    for an exact denoiser each step loses at most `gamma` nats of KL, a run at most `gamma` per step. Any score may
    sort. The bound is one for tokens drawn from the untempered marginals after selection.
    """

    gamma: float = 0.1

    def __post_init__(self) -> None:
        at_least_one_of("gamma", self.gamma, 0)

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        order = scores.argsort(dim=-1, descending=True, stable=True)
        entropy = step.dense(step.entropy.double(), 0.0).gather(-1, order)
        loss = entropy.cumsum(dim=-1) - entropy.cummax(dim=-1).values
        return sorted_prefix(order, loss <= self.gamma, scores)


@dataclass(frozen=True)
class Dynamic(Looking):
    """Every score above log(`threshold`) if those are at least as many as the quota, else the quota's highest ones.

    The quota is `quota`, or with `steps` the even share of the window in its `step`-th step (larger shares first), so
    that a window is full after at most `steps` steps.
    """

    threshold: float = 0.85
    quota: int = 1
    steps: int | None = None

    def __post_init__(self) -> None:
        at_least_one_of("threshold", self.threshold, 0)
        at_least_one_of("quota", self.quota, 1)
        if self.steps is not None:
            at_least_one_of("steps", self.steps, 1)

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        quota = torch.full_like(step.state.rows, self.quota)
        if self.steps is not None:
            whole = (step.window & step.state.editable).sum(dim=-1)
            quota = whole // self.steps + (step.state.block_step < whole % self.steps)
        sure = scores > log_threshold(self.threshold)
        enough = sure.sum(dim=-1) >= quota
        return torch.where(enough[:, None], sure, highest(scores, quota))


@dataclass(frozen=True)
class ShrinkingQuota(Looking):
    """Dream's schedule: of m masks, floor(m (1 - s/t)) with t -> s on an even grid from 1 to `eps`, all in the last.

    Per row; published code takes the mean over the batch. At least one: published code spends steps that commit nothing
    whenever `steps` exceeds the masks, and pays with several tokens in the last step.

    `alg_temp` > 0 ranks at random: positions are drawn without replacement in proportion to exp(score / alg_temp),
    where the score is the confidence itself if `linear`, else its logarithm. Never more draws than candidates.
    """

    steps: int = 64
    eps: float = 1e-3
    alg_temp: float = 0.0
    linear: bool = False

    def __post_init__(self) -> None:
        at_least_one_of("steps", self.steps, 1)
        within("eps", self.eps, 0, 0.5)
        at_least_one_of("alg_temp", self.alg_temp, 0)

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        done = step.state.block_step.clamp(max=self.steps - 1)
        masks = step.candidates.sum(dim=-1)
        share = masks * (1 - self.eps) / (self.steps - (1 - self.eps) * done.double())
        quota = torch.where(done == self.steps - 1, masks, share.long().clamp(min=1))
        if self.alg_temp == 0:
            return highest(scores, quota)
        weight = scores.double().exp().masked_fill(scores == -torch.inf, -torch.inf) if self.linear else scores.double()
        gumbel = -(-step.state.uniform(NOISE_RANK).log()).log()
        return highest(weight / self.alg_temp + gumbel, quota)


@dataclass(frozen=True)
class ShrinkingReveal:
    """Dream's `origin`: every candidate with probability 1 - s/t on the grid of `ShrinkingQuota`, all in the last step.

    Published code reveals and draws in every step; here a step that reveals nothing in a row costs it no forward.
    """

    steps: int = 64
    eps: float = 1e-3
    blind: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least_one_of("steps", self.steps, 1)
        within("eps", self.eps, 0, 0.5)

    @property
    def schedule(self) -> int:
        """See `Selector`."""
        return self.steps

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        done = step.state.block_step.clamp(max=self.steps - 1).double()
        chance = (1 - self.eps) / (self.steps - (1 - self.eps) * done)
        return step.candidates & (step.state.uniform(NOISE_REVEAL) < chance[:, None])


@dataclass(frozen=True)
class Hierarchy(Looking):
    """The best position of each maximal run of masks if its confidence exceeds `low`, all above `threshold`, and the
    best of all: commits that stand apart, found by dividing what is left (dInfer, 2510.08666)."""

    threshold: float = 0.9
    low: float = 0.4

    def __post_init__(self) -> None:
        at_least_one_of("threshold", self.threshold, 0)
        at_least_one_of("low", self.low, 0)

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        begins = torch.diff(step.candidates.int(), dim=-1, prepend=scores.new_zeros(len(scores), 1).int()).eq(1)
        run = (begins.cumsum(-1) - 1).clamp(min=0)
        rank = ranks(scores)
        first = torch.full_like(rank, rank.shape[-1]).scatter_reduce(
            -1, run, rank.masked_fill(~step.candidates, rank.shape[-1]), "amin"
        )
        best_of_run = rank == first.gather(-1, run)
        chosen = (best_of_run & (scores > log_threshold(self.low))) | (scores > log_threshold(self.threshold))
        return (chosen | (rank == 0)) & (scores > -torch.inf)


@dataclass(frozen=True)
class Dilated:
    """Blind: in round r the positions whose distance to the window's start is a multiple of length // `base`^r.

    A window of base^R positions takes R rounds, whatever the model. A row goes on with the first round that has a
    candidate left, so given texts between the masks cost nothing.
    """

    base: int = 2
    blind: ClassVar[bool] = True
    schedule: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        at_least_one_of("base", self.base, 2)

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        seq = scores.shape[-1]
        position = torch.arange(seq, device=scores.device)
        start = step.window.int().argmax(dim=-1, keepdim=True)
        length = seq - step.window.flip(-1).int().argmax(dim=-1, keepdim=True) - start
        never = seq + 1
        turn = torch.full_like(position.expand_as(step.window), never)
        power, number = self.base, 1
        while True:
            stride = (length // power).clamp(min=1)
            turn = torch.where((turn == never) & ((position - start) % stride == 0), number, turn)
            if power >= seq:
                break
            power, number = power * self.base, number + 1
        turn = turn.masked_fill(~step.candidates, never)
        return step.candidates & (turn == turn.amin(dim=-1, keepdim=True))


@dataclass(frozen=True)
class MinSpacing:
    """`base`, but of two positions less than `spacing` apart only the better scored one is committed in a step.

    Positions are taken best first, each unless one taken before is too near. Spacing 1 is `base` itself.
    """

    base: Selector
    spacing: int = 2

    def __post_init__(self) -> None:
        at_least_one_of("spacing", self.spacing, 1)

    @property
    def parts(self) -> tuple[Selector]:
        """See `traits.py`."""
        return (self.base,)

    @property
    def blind(self) -> bool:
        """See `Selector`."""
        return self.base.blind

    @property
    def schedule(self) -> int | None:
        """See `Selector`."""
        return self.base.schedule

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        left = self.base(scores, step) & step.candidates
        if self.spacing == 1:
            return left
        # Whoever is the best in its own neighbourhood is taken in any case, so all of those are taken at once; this
        # gives what one at a time gives, in a few rounds instead of one per commit.
        reach = self.spacing - 1
        rank = ranks(scores)
        taken = torch.zeros_like(left)
        while bool(left.any()):
            value = (-rank).masked_fill(~left, -rank.shape[-1]).double()[:, None]
            best = torch.nn.functional.max_pool1d(value, 2 * reach + 1, stride=1, padding=reach)[:, 0]
            now = left & (value[:, 0] == best)
            near = torch.nn.functional.max_pool1d(now.double()[:, None], 2 * reach + 1, stride=1, padding=reach)[:, 0]
            taken, left = taken | now, left & (near == 0)
        return taken
