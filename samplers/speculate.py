"""Lossless self-speculation (FreeDave, 2510.00294): evaluate guesses of the next canvases in the same forward.

While the denoiser looks at a canvas, it also looks at the canvases that the next steps would lead to if the predictions
of the step before still held: the best-scored position filled, the two best, ... Whenever a step really leads to one of
them, its predictions are already there and the step costs nothing. As only a canvas equal token for token is taken,
every strategy writes what it would have written without: bit for bit, if the denoiser answers a row alike in any batch.

That makes it a cache policy, not another loop: it stands behind every selector, reviser and temperature. Each guess
counts as an evaluation (`nfe`, `tokens_fed`), all guesses of a step as one of the row's `forwards`. Read next:
`lookahead.py`, which chooses between branches instead of guessing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mdlm.denoiser import Denoiser
from mdlm.samplers.select import at_least_one_of, ranks
from mdlm.samplers.state import State
from mdlm.samplers.wino import trimmed


@dataclass
class Branches:
    """Canvases evaluated in one forward, and their predictions."""

    rows: Int64[Tensor, " branches"]
    """Row of the state that each belongs to; -1: nobody's any more."""
    tokens: Int64[Tensor, "branches seq"]
    at: Bool[Tensor, "branches seq"]
    log_probs: Float[Tensor, "rows vocab"]
    """At `at`, packed."""

    def found(self, tokens: Int64[Tensor, "batch seq"], at: Bool[Tensor, "batch seq"]) -> Int64[Tensor, " batch"]:
        """The first branch of each row that is its canvas and has the predictions at `at`; -1: none."""
        mine, asked = tokens[self.rows.clamp(min=0)], at[self.rows.clamp(min=0)]
        fits = (self.rows >= 0) & (mine == self.tokens).all(dim=-1) & (~asked | self.at).all(dim=-1)
        of_row = fits[:, None] & (self.rows[:, None] == torch.arange(len(tokens), device=tokens.device))
        return torch.where(of_row.any(dim=0), of_row.int().argmax(dim=0), -1)


class Evaluated:
    """What a feeder of branches remembers of one run, in `State.memory`: canvases with predictions, and guesses."""

    def __init__(
        self,
        denoiser: Denoiser,
        scores: Float[Tensor, "batch seq"],
        guesses: Int64[Tensor, "batch seq"],
        kept: tuple[Branches, ...] = (),
    ) -> None:
        self.denoiser, self.kept = denoiser, kept
        self.scores, self.guesses = scores, guesses

    def keep(self, rows: Int64[Tensor, " batch"]) -> Evaluated:
        """See `Memory`."""
        number = torch.full((len(self.scores) + 1,), -1, device=rows.device)  # the last entry is that of row -1
        number[rows] = torch.arange(len(rows), device=rows.device)
        kept = (Branches(number[b.rows], b.tokens, b.at, b.log_probs) for b in self.kept)
        return Evaluated(self.denoiser, self.scores[rows], self.guesses[rows], _alive(kept))

    def evaluate(
        self,
        state: State,
        rows: Int64[Tensor, " branches"],
        tokens: Int64[Tensor, "branches seq"],
        at: Bool[Tensor, "branches seq"],
    ) -> Branches:
        """Ask the denoiser about these canvases in one call. What it said before about the same rows is forgotten."""
        count = torch.zeros_like(state.nfe).index_add_(0, rows, torch.ones_like(rows))
        state.nfe += count
        state.forwards += count > 0
        state.tokens_fed += count * state.lengths
        fed, mask, longest = trimmed(tokens, state.lengths[rows])
        log_probs = self.denoiser(fed, attention_mask=mask, at=at[:, :longest])
        new = Branches(rows, tokens, at, log_probs)
        for old in self.kept:
            old.rows = torch.where((old.rows >= 0) & (count[old.rows.clamp(min=0)] > 0), -1, old.rows)
        self.kept = (*_alive(self.kept), new)
        return new

    def missing(self, tokens: Int64[Tensor, "batch seq"], at: Bool[Tensor, "batch seq"]) -> Bool[Tensor, " batch"]:
        """Rows with a position in `at` whose canvas has not been evaluated there."""
        missing = at.any(dim=-1)
        for branches in self.kept:
            missing = missing & (branches.found(tokens, at) < 0)
        return missing

    def answer(self, tokens: Int64[Tensor, "batch seq"], at: Bool[Tensor, "batch seq"]) -> Float[Tensor, "rows vocab"]:
        """The predictions at `at`, packed; every row must have been evaluated."""
        seq, open_ = at.shape[1], at.any(dim=-1)
        places, parts = [], []
        for branches in self.kept:
            found = torch.where(open_, branches.found(tokens, at), -1)
            open_ = open_ & (found < 0)
            branch, position = branches.at.nonzero(as_tuple=True)
            row = branches.rows[branch]
            taken = (row >= 0) & (found[row.clamp(min=0)] == branch) & at[row.clamp(min=0), position]
            places.append((row * seq + position)[taken])
            parts.append(branches.log_probs if bool(taken.all()) else branches.log_probs[taken])
        assert not bool(open_.any()), "a row was not evaluated"
        place = torch.cat(places)
        log_probs = parts[0] if len(parts) == 1 else torch.cat(parts)
        ordered = bool((place[1:] > place[:-1]).all())
        return log_probs if ordered else log_probs[place.argsort()]


def _alive(branches: Iterable[Branches]) -> tuple[Branches, ...]:
    """Those that belong to some row."""
    return tuple(b for b in branches if bool((b.rows >= 0).any()))


@dataclass(frozen=True)
class Speculative:
    """Cache policy: `drafts` canvases per forward, the row's own and guesses of the next ones, each with `per_step`
    tokens more. 1: no guesses, the plain feeder."""

    drafts: int = 4
    per_step: int = 1
    exchangeable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least_one_of("drafts", self.drafts, 1)
        at_least_one_of("per_step", self.per_step, 1)

    def start(self, denoiser: Denoiser) -> SpeculativeFeeder:
        """See `CachePolicy`."""
        return SpeculativeFeeder(denoiser, self.drafts, self.per_step)


@dataclass(eq=False)
class SpeculativeFeeder:
    """The feeder of `Speculative`; all it remembers is in the state, under the feeder itself."""

    denoiser: Denoiser
    drafts: int
    per_step: int

    def __call__(
        self,
        state: State,
        tokens: Int64[Tensor, "batch seq"],
        at: Bool[Tensor, "batch seq"],
        window: Bool[Tensor, "batch seq"],
    ) -> Float[Tensor, "rows vocab"]:
        """See `Feeder`."""
        memory = evaluated(state, self)
        missing = memory.missing(tokens, at)
        if bool(missing.any()):
            memory.evaluate(state, *self._canvases(memory, state, tokens, at, missing))
        log_probs = memory.answer(tokens, at)
        if self.drafts > 1:
            best = log_probs.max(dim=-1)
            memory.scores = torch.full_like(memory.scores, -torch.inf)
            memory.scores[at] = best.values.double()
            memory.guesses[at] = best.indices
        return log_probs

    def _canvases(
        self, memory: Evaluated, state: State, tokens: Tensor, at: Tensor, missing: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The canvases of the missing rows, then guesses: the row of each, its tokens, where to predict."""
        row = missing.nonzero()[:, 0]
        if self.drafts == 1:
            return row, tokens[row], at[row]
        open_ = at & state.masked
        known = open_ & (memory.scores > -torch.inf)
        order = ranks(torch.where(known, memory.scores, -torch.inf))
        more = torch.arange(1, self.drafts, device=tokens.device)[:, None] * self.per_step
        useful = missing & (more <= known.sum(dim=-1)) & (more < open_.sum(dim=-1))
        draft, guessing = useful.nonzero(as_tuple=True)
        filled = known[guessing] & (order[guessing] < more[draft])
        guessed = torch.where(filled, memory.guesses[guessing], tokens[guessing])
        return (
            torch.cat([row, guessing]),
            torch.cat([tokens[row], guessed]),
            torch.cat([at[row], at[guessing]]),
        )

    def keep(self, rows: Int64[Tensor, " batch"]) -> None:
        """See `Feeder`."""


def evaluated(state: State, feeder: SpeculativeFeeder) -> Evaluated:
    """The feeder's memory of this run."""
    memory = state.remember(
        feeder,
        lambda: Evaluated(
            feeder.denoiser, torch.full_like(state.log_probs, -torch.inf), torch.zeros_like(state.tokens)
        ),
    )
    assert isinstance(memory, Evaluated)
    return memory
