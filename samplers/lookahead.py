"""LoPA, lookahead parallel decoding (2512.16229): try several next commits in one forward and keep the most promising.

The anchor is what a base selector commits. Each branch commits one more position, one of the best-scored that the base
left out. One forward evaluates all of them; the branch whose remaining masks have the highest mean confidence is taken,
and its predictions serve the next step, which therefore needs no forward of its own. Read next: `speculate.py`, which
keeps what is evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from mdlm.samplers.select import Looking, Selector, at_least_one_of, ranks
from mdlm.samplers.speculate import Branches, Evaluated
from mdlm.samplers.state import NOISE_TOKEN, Step


@dataclass(frozen=True)
class Lookahead(Looking):
    """`base`, and the best of `branches` further positions or none of them. Needs the cache policy `Speculative`.

    A branch must leave something undecided, or there is nothing to compare it by; equal ones: the one with the better
    score, the anchor first. `branches` 0 is the base. Confidences are those of the denoiser, before transforms.

    Raises ValueError for a base that does not look at predictions or follows a schedule.
    """

    base: Selector
    branches: int = 4
    draws: ClassVar[str] = "sampling"

    def __post_init__(self) -> None:
        at_least_one_of("branches", self.branches, 0)
        if self.base.blind or self.base.schedule is not None:
            raise ValueError(
                f"{type(self.base).__name__} chooses without looking or may wait; take a selector that looks and "
                "commits something in every step"
            )

    @property
    def parts(self) -> tuple[Selector]:
        """See `traits.py`."""
        return (self.base,)

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        chosen = self.base(scores, step) & step.candidates
        if self.branches == 0:
            return chosen
        state = step.state
        best = scores.argmax(dim=-1, keepdim=True)
        forced = torch.zeros_like(chosen).scatter_(-1, best, True) & ~chosen.any(dim=-1, keepdim=True)
        chosen = chosen | (forced & (scores > -torch.inf))  # as the driver would
        rest = step.candidates & ~chosen
        further = torch.where(rest, scores, -torch.inf)
        order = ranks(further)
        left, sure = rest.sum(dim=-1), (further > -torch.inf).sum(dim=-1)
        number = torch.arange(self.branches + 1, device=scores.device)[:, None]
        tried = chosen.any(dim=-1) & (left > (number > 0)) & (number <= sure)
        branch, row = tried.nonzero(as_tuple=True)
        if not len(row):
            return chosen
        extra = rest[row] & (order[row] == branch[:, None] - 1)
        filled = chosen[row] | extra
        tokens = torch.where(filled, step.dense(self._tokens(step), 0)[row], state.tokens[row])
        found = self._memory(step).evaluate(state, row, tokens, rest[row] & ~extra)
        value = torch.full(tried.shape, -torch.inf, dtype=torch.float64, device=scores.device)
        value[branch, row] = mean_confidence(found)
        winner = value.argmax(dim=0)  # of rows without branches: 0, the anchor
        return chosen | (rest & (order == winner[:, None] - 1))

    @staticmethod
    def _tokens(step: Step) -> Int64[Tensor, " rows"]:
        """What will be written at each prediction."""
        if step.drawn is None and step.draw.temperature > 0:  # the numbers that the driver would take
            step.drawn = step.draw(step.log_probs, step.packed(step.state.uniform(NOISE_TOKEN)))
        return step.predicted

    @staticmethod
    def _memory(step: Step) -> Evaluated:
        found = [memory for memory in step.state.memory.values() if isinstance(memory, Evaluated)]
        if len(found) != 1:
            raise ValueError(
                "lookahead evaluates branches of its own, so it needs cache=Speculative(drafts=1), without guidance or "
                "another cache"
            )
        return found[0]


def mean_confidence(branches: Branches) -> Float64[Tensor, " branches"]:
    """Mean over the predictions of each branch of the largest probability."""
    owner = branches.at.nonzero()[:, 0]
    largest = branches.log_probs.amax(dim=-1).double().exp()
    total = torch.zeros(len(branches.rows), dtype=torch.float64, device=owner.device).index_add_(0, owner, largest)
    return total / branches.at.sum(dim=-1)
