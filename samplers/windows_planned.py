"""Blocks whose length is read off the predictions with which they begin; see `windows.PlanningWindow`.

`AdaBlock` ends a block at a delimiter the model is sure of, `EntropyBlocks` (Swordsman) where entropy jumps,
`InfluenceBlocks` (DepCap, experimental) where the last block's influence ends. The forward in which a block begins also
commits tokens, so planning costs no forward. Every row has its own blocks. Read next: `driver.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mdlm.samplers.delimiters import Delimiters, ids_of
from mdlm.samplers.state import RowMemory, State, Step
from mdlm.samplers.windows import leftmost


class Planned(ABC):
    """What planned blocks share: a block runs from a row's leftmost undecided position to where its plan says."""

    @abstractmethod
    def reach(self, state: State) -> Int64[Tensor, " batch"]:
        """How long each row's next block may become: predictions are asked for so far."""

    @abstractmethod
    def ends(self, step: Step, start: Int64[Tensor, " batch"]) -> Int64[Tensor, " batch"]:
        """Where the block of each row ends (exclusive) if it begins at `start`, an undecided position."""

    def _bounds(self, state: State) -> RowMemory:
        memory = state.remember(
            self, lambda: RowMemory({"start": torch.zeros_like(state.rows), "end": torch.zeros_like(state.rows)})
        )
        assert isinstance(memory, RowMemory)
        return memory

    def __call__(self, state: State) -> tuple[Bool[Tensor, "batch seq"], Int64[Tensor, " batch"]]:
        """See `PlanningWindow`."""
        bounds = self._bounds(state)
        position = torch.arange(state.tokens.shape[1], device=state.tokens.device)
        block = (position >= bounds["start"][:, None]) & (position < bounds["end"][:, None])
        goes_on = (state.masked & block).any(dim=1) | ((state.block >= 0) & ~state.masked.any(dim=1))
        start = leftmost(state)[:, None]
        horizon = (position >= start) & (position < start + self.reach(state)[:, None])
        return state.editable & torch.where(goes_on[:, None], block, horizon), state.block + (~goes_on).long()

    def plan(self, step: Step) -> Bool[Tensor, "batch seq"]:
        """See `PlanningWindow`."""
        state, bounds = step.state, self._bounds(step.state)
        begins = state.block_step == 0
        if not bool(begins.any()):
            return step.window
        start = leftmost(state)
        end = torch.maximum(self.ends(step, start), start + 1)
        bounds["start"] = torch.where(begins, start, bounds["start"])
        bounds["end"] = torch.where(begins, end, bounds["end"])
        position = torch.arange(state.tokens.shape[1], device=state.tokens.device)
        return step.window & (position < bounds["end"][:, None])


def _first(where: Bool[Tensor, "batch seq"], otherwise: Int64[Tensor, " batch"]) -> Int64[Tensor, " batch"]:
    """First True position of each row, or `otherwise`."""
    return torch.where(where.any(dim=1), where.int().argmax(dim=1), otherwise)


@dataclass(frozen=True)
class AdaBlock(Planned):
    """A block ends behind the most probable predicted delimiter within the next `share` of the answer, if its
    probability is at least `least`; else it has `length` positions (AdaBlock-dLLM, 2509.26432).

    Raises ValueError for values out of range.
    """

    delimiters: Delimiters
    """The tokens that end a step of text, a line end first of all (`delimiters.py`)."""
    length: int = 32
    share: float = 0.25
    least: float = 0.3

    def __post_init__(self) -> None:
        if not self.delimiters:
            raise ValueError("delimiters is empty; give the tokens that end a block, such as the line end")
        if self.length < 1:
            raise ValueError(f"block_length is {self.length}; it must be 1 or more")
        for name, value in (("share", self.share), ("least", self.least)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; it must lie in [0, 1]")

    def _search(self, state: State) -> Int64[Tensor, " batch"]:
        return (self.share * state.editable.sum(dim=1)).long()

    def reach(self, state: State) -> Int64[Tensor, " batch"]:
        """See `Planned`."""
        return self._search(state).clamp(min=self.length)

    def ends(self, step: Step, start: Int64[Tensor, " batch"]) -> Int64[Tensor, " batch"]:
        """See `Planned`."""
        best, token = step.best
        wanted = torch.tensor(ids_of(self.delimiters, self), device=token.device)
        score = step.dense(best.masked_fill(~torch.isin(token, wanted), -torch.inf), fill=-torch.inf)
        position = torch.arange(score.shape[1], device=score.device)
        near = step.candidates & (position < (start + self._search(step.state))[:, None])
        score = score.masked_fill(~near, -torch.inf)
        value, place = score.max(dim=1)
        found = (value.exp() >= self.least) & (value > -torch.inf)
        return torch.where(found, place + 1, start + self.length)


@dataclass(frozen=True)
class EntropyBlocks(Planned):
    """A block ends before the first position whose entropy differs from its left neighbour's by more than `jump` nats,
    with `shortest` to `longest` positions (Swordsman, 2602.04399). The paper's threshold is not published; 0.5 is ours.

    Raises ValueError for values out of range.
    """

    jump: float = 0.5
    shortest: int = 8
    longest: int = 64

    def __post_init__(self) -> None:
        if self.jump < 0:
            raise ValueError(f"jump is {self.jump}; it must be 0 or more nats")
        check_lengths(self.shortest, self.longest)

    def reach(self, state: State) -> Int64[Tensor, " batch"]:
        """See `Planned`."""
        return torch.full_like(state.rows, self.longest)

    def ends(self, step: Step, start: Int64[Tensor, " batch"]) -> Int64[Tensor, " batch"]:
        """See `Planned`."""
        entropy = step.dense(step.entropy, fill=torch.nan)  # no jump is measured across what is given or decided
        change = torch.nn.functional.pad(entropy.diff(dim=1).abs(), (1, 0), value=torch.nan)
        position = torch.arange(entropy.shape[1], device=entropy.device)
        far_enough = position >= (start + self.shortest)[:, None]
        return _first(step.candidates & far_enough & (change > self.jump), start + self.longest)


def check_lengths(shortest: int, longest: int) -> None:
    """Raises ValueError unless 1 <= shortest <= longest."""
    if not 1 <= shortest <= longest:
        raise ValueError(f"shortest is {shortest} and longest {longest}; they must obey 1 <= shortest <= longest")


@dataclass
class _Seen:
    """Predictions at the beginning of each row's last block."""

    log_probs: Float[Tensor, "batch reach vocab"]
    start: Int64[Tensor, " batch"]
    known: Bool[Tensor, "batch reach"]

    def keep(self, rows: Int64[Tensor, " batch"]) -> _Seen:
        """See `Memory`."""
        return _Seen(self.log_probs[rows], self.start[rows], self.known[rows])


@dataclass(frozen=True)
class InfluenceBlocks(Planned):
    """Experimental. The next block is as long as the last block's influence reaches: with I_j the divergence
    KL(now || then) between the predictions at j after and before the last block, the longest stretch from the left
    whose mean I is at least `influence` nats; or as long as the sum of entropies stays within `entropy` nats, whichever
    is longer; from `shortest` to `longest` positions. A first block has no influence to go by.

    DepCap (2604.15750) sizes blocks by this signal and an entropy; its stopping rule and thresholds are our reading.
    Keeps 2 * longest predictions per row. Raises ValueError for values out of range.
    """

    shortest: int = 8
    longest: int = 64
    influence: float = 0.1
    entropy: float = 4.0

    def __post_init__(self) -> None:
        check_lengths(self.shortest, self.longest)
        for name, value in (("influence", self.influence), ("entropy", self.entropy)):
            if not value >= 0:
                raise ValueError(f"{name} is {value}; it must be 0 or more nats")

    def reach(self, state: State) -> Int64[Tensor, " batch"]:
        """See `Planned`: twice the longest block, so that the block after it has predictions to compare with."""
        return torch.full_like(state.rows, 2 * self.longest)

    def ends(self, step: Step, start: Int64[Tensor, " batch"]) -> Int64[Tensor, " batch"]:
        """See `Planned`."""
        state, reach = step.state, 2 * self.longest
        seq, vocab = state.tokens.shape[1], step.log_probs.shape[-1]
        rows = (state.block_step == 0).nonzero()[:, 0]  # the others are in the middle of a block
        at = start[rows, None] + torch.arange(reach, device=start.device)
        here = at.clamp(max=seq - 1)
        known = (at < seq) & step.candidates[rows].gather(1, here)
        assert step.at is not None
        number = (step.at.flatten().long().cumsum(dim=0).view_as(step.at) - 1)[rows].clamp(min=0).gather(1, here)
        now = step.log_probs[number]

        def nothing() -> _Seen:
            size = (len(state.rows), reach)
            return _Seen(now.new_zeros(*size, vocab), start.clone(), torch.zeros(size, dtype=torch.bool).to(at.device))

        seen = state.remember(("influence", self), nothing)
        assert isinstance(seen, _Seen)
        then_at = at - seen.start[rows, None]
        there = then_at.clamp(0, reach - 1)
        compared = known & (then_at >= 0) & (then_at < reach) & seen.known[rows].gather(1, there)
        then = seen.log_probs[rows[:, None], there]
        floor = -1e4  # where a token had no mass before, the divergence is large, not infinite
        moved = (now.exp() * (now.clamp(min=floor) - then.clamp(min=floor))).sum(dim=-1).clamp(min=0)
        moved = moved.masked_fill(~compared, 0.0)
        uncertain = step.entropy[number].masked_fill(~known, 0.0)
        seen.log_probs[rows], seen.start[rows], seen.known[rows] = now, start[rows], known

        length = torch.arange(1, reach + 1, device=start.device)
        informed = compared & (moved.cumsum(dim=1) / length >= self.influence)
        cheap = known & (uncertain.cumsum(dim=1) <= self.entropy)
        longest = torch.where(informed | cheap, length, 0).amax(dim=1)
        return start.index_add(0, rows, longest.clamp(self.shortest, self.longest))
