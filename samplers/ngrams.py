"""No run of n tokens twice in a row, tokens of one step included.

`NoRepeatNgram` forbids a token where it would complete a run that the row holds already; `DistinctNgrams` admits the
commits of one step only as far as they do not make such a run together. What was given may hold repetitions; none is
added. Read next: `transforms.py`, whose penalty is the gentler way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mdlm.samplers.select import at_least_one_of
from mdlm.samplers.state import Step


def _runs(
    tokens: Int64[Tensor, "batch seq"], decided: Bool[Tensor, "batch seq"], size: int
) -> tuple[Int64[Tensor, "batch runs size"], Bool[Tensor, "batch runs size"]]:
    """Every run of `size` positions, and which of its tokens are decided."""
    return tokens.unfold(1, size, 1), decided.unfold(1, size, 1)


def _decided(step: Step) -> Bool[Tensor, "batch seq"]:
    state = step.state
    real = torch.arange(state.tokens.shape[1], device=state.tokens.device) < state.lengths[:, None]
    return real & ~state.masked


@dataclass(frozen=True)
class NoRepeatNgram:
    """A transform: no token with which some run of `size` tokens would stand twice. Raises ValueError for a size below
    1."""

    size: int

    def __post_init__(self) -> None:
        at_least_one_of("no_repeat_ngram", self.size, 1)

    def __call__(self, log_probs: Float[Tensor, "rows vocab"], step: Step) -> Float[Tensor, "rows vocab"]:
        """See `Transform`."""
        size, state = self.size, step.state
        if state.tokens.shape[1] <= size - 1:
            return log_probs
        row, position = step.index
        open_ = state.masked[row, position]
        runs, known = _runs(state.tokens, _decided(step), size)
        complete, last = known.all(dim=-1), runs.shape[1] - 1
        banned: list[tuple[Tensor, Tensor]] = []
        for place in range(size):  # of the prediction in the run
            start = position - place
            inside = open_ & (start >= 0) & (start <= last)
            own, own_known = runs[row, start.clamp(0, last)], known[row, start.clamp(0, last)]
            rest = [k for k in range(size) if k != place]
            inside = inside & own_known[:, rest].all(dim=-1)
            found = (runs[row][:, :, rest] == own[:, None, rest]).all(dim=-1) & complete[row] & inside[:, None]
            which, where = found.nonzero(as_tuple=True)
            banned.append((which, runs[row[which], where, place]))
            for shift in range(1, place + 1):  # a run and one that overlaps it, both with this position
                later = (start + shift).clamp(0, last)
                token = own[:, place - shift]
                first, second = own.clone(), runs[row, later]
                first[:, place], second[:, place - shift] = token, token
                other_known = known[row, later].clone()
                other_known[:, place - shift] = True
                twice = inside & (start + shift <= last) & other_known.all(dim=-1) & (first == second).all(dim=-1)
                which = twice.nonzero()[:, 0]
                banned.append((which, token[which]))
        which, token = (torch.cat(parts) for parts in zip(*banned))
        return log_probs.index_put((which, token), log_probs.new_tensor(-torch.inf)) if len(which) else log_probs


@dataclass(frozen=True)
class DistinctNgrams:
    """An admission: of commits that together would repeat a run of `size` tokens the least probable waits, until there
    is no repetition. With `NoRepeatNgram`, which sees to it that one commit alone makes none."""

    size: int

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
        if step.state.tokens.shape[1] < self.size:
            return stay
        decided = _decided(step)
        while True:
            written, now = step.state.tokens.clone(), decided.clone()
            written[row[stay], position[stay]] = tokens[stay]
            now[row[stay], position[stay]] = True
            runs, known = _runs(written, now, self.size)
            complete, last = known.all(dim=-1), runs.shape[1] - 1
            number = torch.arange(last + 1, device=row.device)
            repeats = torch.zeros_like(stay)
            for place in range(self.size):
                start = position - place
                here = start.clamp(0, last)
                inside = stay & (start >= 0) & (start <= last) & complete[row, here]
                equal = (runs[row] == runs[row, here][:, None]).all(dim=-1) & complete[row]
                repeats |= inside & (equal & (number != here[:, None])).any(dim=-1)
            if not bool(repeats.any()):
                return stay
            worst = torch.full_like(step.state.lengths, torch.inf, dtype=log_probs.dtype)
            value = torch.where(repeats, log_probs, torch.inf)
            worst = worst.scatter_reduce(0, row, value, "amin")
            drop = repeats & (value == worst[row])
            furthest = torch.zeros_like(step.state.lengths).scatter_reduce(0, row, position * drop, "amax")
            stay = stay & ~(drop & (position == furthest[row]))  # of equal ones the rightmost
