"""Which *spans* are committed together: units of candidates, and a selector over units.

A unit is a token, a run of adjacent candidates, a chunk between delimiters, or what lies between two jumps of entropy.
`Clusters` takes the candidates that are sure enough, groups them, drops units that conflict (`conflicts.py`,
`solvers.py`) and keeps the sum of entropies within a budget. Without conflict and budget it is `Threshold`: grouping
alone changes nothing. With runs and attention it is CLAD (Qi et al., 2605.29607), with tokens and cross-probabilities
DepCap's inner rule (2604.15750), with tokens and a budget the entropy-bounded sampler (Ben-Hamu et al., 2505.24857).

The budget over units is this package's own: for any set U committed in one step, sum of H over U minus the joint
entropy of U is at most sum H - max H, so with an exact denoiser the divergence of that step is at most `budget` nats,
and that of the whole row at most `budget` times its steps, whatever spans are chosen. Read next: `conflicts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from mdlm.attention_rows import slots
from mdlm.passes import entropies
from mdlm.samplers.conflicts import Conflict
from mdlm.samplers.delimiters import Delimiters, ids_of
from mdlm.samplers.select import Looking, at_least_one_of
from mdlm.samplers.solvers import Greedy, Solver, matching
from mdlm.samplers.state import Step

UnitRule = Callable[[Step, Bool[Tensor, "batch seq"]], Bool[Tensor, "batch seq"]]
"""Where a new unit begins among the members: True only at members; the first member of a row begins one."""


def tokens(step: Step, members: Bool[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq"]:
    """Every member by itself."""
    return members


def first_of_run(members: Bool[Tensor, "batch seq"], max_gap: int = 0) -> Bool[Tensor, "batch seq"]:
    """Members with more than `max_gap` other positions between them and the member before."""
    position = torch.arange(members.shape[1], device=members.device)
    nowhere = -2 - max_gap
    seen = torch.where(members, position, nowhere).cummax(dim=1).values
    before = torch.nn.functional.pad(seen[:, :-1], (1, 0), value=nowhere)
    return members & (position - before > 1 + max_gap)


@dataclass(frozen=True)
class Runs:
    """Maximal runs of adjacent members. Raises ValueError for values out of range."""

    max_len: int | None = None
    """Longer runs are cut from the left into pieces of so many members."""
    max_gap: int = 0
    """So many positions without a member may lie inside a run (they are not committed)."""

    def __post_init__(self) -> None:
        if self.max_len is not None:
            at_least_one_of("max_len", self.max_len, 1)
        at_least_one_of("max_gap", self.max_gap, 0)

    def __call__(self, step: Step, members: Bool[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq"]:
        """See `UnitRule`."""
        starts = first_of_run(members, self.max_gap)
        if self.max_len is None:
            return starts
        number = members.long().cumsum(dim=1)
        first = torch.where(starts, number, 0).cummax(dim=1).values
        return members & ((number - first) % self.max_len == 0)


@dataclass(frozen=True)
class Delimited:
    """Runs, cut after every predicted token of `delimiters` (commas, full stops, line ends; see `delimiters.py`)."""

    delimiters: Delimiters

    def __post_init__(self) -> None:
        if not self.delimiters:
            raise ValueError("no delimiters: give at least one token that ends a chunk")

    def __call__(self, step: Step, members: Bool[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq"]:
        """See `UnitRule`."""
        wanted = torch.tensor(ids_of(self.delimiters, self), device=members.device)
        ends = step.dense(torch.isin(step.predicted, wanted), fill=False) & members
        return first_of_run(members) | (members & torch.nn.functional.pad(ends[:, :-1], (1, 0), value=False))


@dataclass(frozen=True)
class EntropyJumps:
    """Runs, cut where the entropy of neighbours differs by more than `jump` nats."""

    jump: float = 0.5

    def __post_init__(self) -> None:
        at_least_one_of("jump", self.jump, 0)

    def __call__(self, step: Step, members: Bool[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq"]:
        """See `UnitRule`."""
        entropy = step.dense(step.entropy, fill=0.0)
        change = torch.nn.functional.pad(entropy.diff(dim=1).abs(), (1, 0))
        return first_of_run(members) | (members & (change > self.jump))


@dataclass(frozen=True)
class Spans:
    """The units of one step, row by row in columns of equal number: *slots* for members (from the left), *units* for
    units (from the left). There are as many unit columns as slots; unused ones have length 0."""

    step: Step
    position: Int64[Tensor, "batch slots"]
    used: Bool[Tensor, "batch slots"]
    unit: Int64[Tensor, "batch slots"]
    """Unit of each member; 0 in unused slots, which every reduction here leaves out."""
    scores: Float[Tensor, "batch slots"]
    """Score of each member."""
    single: bool = False
    """Every member is a unit of its own, so nothing need be gathered."""

    @staticmethod
    def of(
        step: Step,
        members: Bool[Tensor, "batch seq"],
        starts: Bool[Tensor, "batch seq"],
        scores: Float[Tensor, "batch seq"],
    ) -> Spans:
        """The units that begin at `starts`."""
        position, used = slots(members)
        single = starts is members
        if single:
            unit = torch.arange(position.shape[1], device=position.device).expand_as(position)
        else:
            unit = (starts.long().cumsum(dim=1) - 1).gather(1, position)
        return Spans(step, position, used, unit.masked_fill(~used, 0), scores.gather(1, position), single)

    @cached_property
    def length(self) -> Int64[Tensor, "batch units"]:
        """Members of each unit."""
        if self.single:
            return self.used.long()
        return torch.zeros_like(self.unit).scatter_add_(1, self.unit, self.used.long())

    @cached_property
    def prediction(self) -> Int64[Tensor, "batch slots"]:
        """Row of `step.log_probs` of each member."""
        assert self.step.at is not None
        number = self.step.at.flatten().long().cumsum(dim=0).view(self.step.at.shape) - 1
        return number.gather(1, self.position).clamp(min=0)

    @cached_property
    def member_of(self) -> Bool[Tensor, "batch slots units"]:
        """Whether a slot belongs to a unit."""
        column = torch.arange(self.unit.shape[1], device=self.unit.device)
        return (self.unit[:, :, None] == column) & self.used[:, :, None]

    def total(self, values: Float[Tensor, "batch slots"]) -> Float[Tensor, "batch units"]:
        """Sum over the members of each unit."""
        values = values.masked_fill(~self.used, 0)
        return values if self.single else torch.zeros_like(values).scatter_add_(1, self.unit, values)

    def least(self, values: Float[Tensor, "batch slots"]) -> Float[Tensor, "batch units"]:
        """Minimum over the members of each unit; inf where there is none."""
        values = values.masked_fill(~self.used, torch.inf)
        return values if self.single else _reduced(values, self.unit, "amin", torch.inf)

    def unit_score(self, kind: Literal["min", "mean"]) -> Float[Tensor, "batch units"]:
        """Least or mean score of the members of each unit; -inf where there is none."""
        if kind == "min":
            score = self.least(self.scores)
        else:
            score = self.total(self.scores) / self.length.clamp(min=1)
        return score.masked_fill(self.length == 0, -torch.inf)

    def pair_max(self, values: Float[Tensor, "batch slots slots"], least: float) -> Float[Tensor, "batch units units"]:
        """Largest value over the pairs of members of two units; `least` where there is no pair."""
        values = values.masked_fill(~(self.used[:, :, None] & self.used[:, None, :]), least)
        if self.single:
            return values
        by_column = _reduced(values, self.unit[:, None, :].expand_as(values), "amax", least)
        return _reduced(by_column.mT, self.unit[:, None, :].expand_as(values), "amax", least).mT

    def dense(self, chosen: Bool[Tensor, "batch slots"]) -> Bool[Tensor, "batch seq"]:
        """Chosen members at their positions."""
        out = torch.zeros_like(self.step.candidates)
        return out.scatter_reduce_(1, self.position, chosen & self.used, "amax")  # unused slots: False at position 0


def _reduced(values: Tensor, index: Tensor, how: str, start: float) -> Tensor:
    return torch.full_like(values, start).scatter_reduce_(-1, index, values, how)


def within_budget(
    spans: Spans,
    keep: Bool[Tensor, "batch units"],
    rank: Float[Tensor, "batch units"],
    entropy: Float64[Tensor, "batch slots"],
    budget: float,
) -> Bool[Tensor, "batch slots"]:
    """Members of the best-ranked kept units such that sum H - max H over all of them is at most `budget` nats.

    Whole units as long as they fit; if not even the first does, those of its members that do, best scores first. One
    member always fits, since a single token costs H - H = 0.
    """
    kept = keep.gather(1, spans.unit) & spans.used
    place = rank.masked_fill(~keep, -torch.inf).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    key = place.gather(1, spans.unit).masked_fill(~kept, kept.shape[1])
    order = spans.scores.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, key.gather(1, order).argsort(dim=1, stable=True))
    entropy = entropy.masked_fill(~kept, 0.0).gather(1, order)
    cost = entropy.cumsum(dim=1) - entropy.cummax(dim=1).values  # never falls from one member to the next
    key = key.gather(1, order)
    last = torch.full_like(cost, -torch.inf).scatter_reduce_(1, key.clamp(max=kept.shape[1] - 1), cost, "amax")
    fits = (last <= budget).long().cummin(dim=1).values.bool()
    whole = fits.gather(1, key.clamp(max=kept.shape[1] - 1)) | ((key == 0) & (cost <= budget))
    return torch.zeros_like(kept).scatter_(1, order, whole & (key < kept.shape[1]))


@dataclass(frozen=True)
class Clusters(Looking):
    """Units of sure candidates, without those that conflict, within a budget of entropy.

    Raises ValueError for values out of range and for a solver that does not fit the conflict graph.
    """

    threshold: float = 0.7
    """Least probability (exp of the score). Above 1: one token a step."""
    units: UnitRule = Runs()
    reach: Literal["token", "min", "mean"] = "token"
    """What must reach the threshold: `token`: each candidate, units are made of those that do; `min` or `mean`: the
    least or the mean score of a unit, units are made of all candidates (whole phrases or nothing)."""
    conflict: Conflict | None = None
    solver: Solver | None = None
    """None: `matching` where the graph is one, else `Greedy()`."""
    budget: float | None = None
    """Nats per step; None: no budget. The bound holds for tokens drawn after selection from the predictions as they
    are, at temperature 1 without truncation."""
    rank: Literal["min", "mean"] = "mean"
    """By which score of a unit the budget is spent, best first."""

    def __post_init__(self) -> None:
        at_least_one_of("threshold", self.threshold, 0)
        if self.reach not in ("token", "min", "mean"):
            raise ValueError(f"reach is {self.reach!r}; it must be 'token', 'min' or 'mean'")
        if self.rank not in ("min", "mean"):
            raise ValueError(f"rank is {self.rank!r}; it must be 'min' or 'mean'")
        if self.budget is not None:
            at_least_one_of("budget", self.budget, 0)
        if self.solver is not None and self.conflict is None:
            raise ValueError("a solver without a conflict graph does nothing; give conflict= as well")
        if self.solver is matching and self.conflict is not None and not self.conflict.is_matching:
            raise ValueError(
                f"the graph of {type(self.conflict).__name__} is not a matching; take solver=Greedy() or Exact()"
            )

    @property
    def attention_layers(self) -> int | float | None:
        """Of how many last layers the conflict reads attention; None: of none."""
        return None if self.conflict is None else self.conflict.attention_layers

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        least = math.log(self.threshold) if self.threshold > 0 else -math.inf
        allowed = scores > -torch.inf
        if self.reach == "token":
            best = torch.zeros_like(allowed).scatter_(1, scores.argmax(dim=1, keepdim=True), True)
            members = allowed & ((scores >= least) | best)
            starts = self.units(step, members)
        else:
            starts = self.units(step, allowed)
            spans = Spans.of(step, allowed, starts, scores)
            sure = (spans.unit_score(self.reach) >= least).gather(1, spans.unit)
            members = spans.dense(sure)  # whole units, so their first members still begin them
            starts = starts & members
        spans = Spans.of(step, members, starts, scores)
        if spans.position.shape[1] == 0:
            return members
        keep = spans.length > 0
        if self.conflict is not None and bool((keep.sum(dim=1) > 1).any()):
            graph = self.conflict(spans)
            solver = self.solver or (matching if self.conflict.is_matching else Greedy())
            keep = solver(graph, spans)
        chosen = keep.gather(1, spans.unit)
        if self.budget is not None:
            entropy = torch.zeros_like(spans.scores, dtype=torch.float64)
            entropy[spans.used] = entropies(step.log_probs, spans.prediction[spans.used]).double()
            chosen = within_budget(spans, keep, spans.unit_score(self.rank), entropy, self.budget)
        return spans.dense(chosen)
