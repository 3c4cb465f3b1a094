"""Prophet (2508.19982): when the model is sure enough of all that is left, write it at once.

As a selector around another one: it commits what the other chooses, and everything once the gap between the two most
probable tokens, averaged over what is undecided, reaches a threshold. The threshold falls as the window fills. Read
next: `presets_revise.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from mdlm.samplers.select import Selector
from mdlm.samplers.state import NOISE_TOKEN, Step


@dataclass(frozen=True)
class EarlyExit:
    """`base`, until the mean gap log p(1) - log p(2) in nats reaches `gaps[third]`; then the rest by its most probable
    tokens, at every temperature. `third` is that of the share of the window that is decided: 0, 1 or 2.

    The mean is over the window's undecided positions, or those of them in `region`: (first, last + 1), counted from the
    first editable position (where the answer stands). If that is written, the row exits. Infinite gaps: never.

    Raises ValueError for values out of range and for a base that does not look at predictions.
    """

    base: Selector
    gaps: tuple[float, float, float] = (7.5, 5.0, 2.5)
    region: tuple[int, int] | None = None
    blind: ClassVar[bool] = False
    draws: ClassVar[str] = "sampling"

    def __post_init__(self) -> None:
        if len(self.gaps) != 3 or not all(gap >= 0 for gap in self.gaps):
            raise ValueError(f"gaps are {self.gaps}; they must be three numbers of 0 or more, in nats")
        if self.region is not None and not 0 <= self.region[0] < self.region[1]:
            raise ValueError(f"region is {self.region}; it must be (first, last + 1), counted from the first position")
        if self.base.blind:
            raise ValueError(f"{type(self.base).__name__} chooses without looking, so there is no gap to exit on")

    @property
    def parts(self) -> tuple[Selector]:
        """See `traits.py`."""
        return (self.base,)

    @property
    def schedule(self) -> int | None:
        """See `Selector`."""
        return self.base.schedule

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        chosen = self.base(scores, step)
        leaves = self._exits(step)[:, None] & step.candidates
        if step.draw.temperature > 0 and bool(leaves.any()):  # at 0 what is drawn is the most probable already
            drawn = step.drawn
            if drawn is None:  # the numbers that the driver would take
                drawn = step.draw(step.log_probs, step.packed(step.state.uniform(NOISE_TOKEN)))
            step.drawn = torch.where(step.packed(leaves), step.best[1], drawn)
        return chosen | leaves

    def _exits(self, step: Step) -> Bool[Tensor, " batch"]:
        """Rows that are sure of the rest."""
        state, variable = step.state, step.window & step.state.editable
        counted, open_ = step.candidates, state.masked
        if self.region is not None:
            place = torch.arange(variable.shape[1], device=variable.device) - state.origin[:, None]
            inside = (place >= self.region[0]) & (place < self.region[1])
            counted, open_ = counted & inside, open_ & inside
        mean = torch.where(counted, self._gap(step), 0.0).sum(dim=-1) / counted.sum(dim=-1)
        unseen = torch.where(open_.any(dim=-1), -torch.inf, torch.inf).double()
        mean = torch.where(counted.any(dim=-1), mean, unseen)
        decided = (variable & ~step.candidates).sum(dim=-1)
        third = (3 * decided // variable.sum(dim=-1).clamp(min=1)).clamp(max=2)
        least = torch.tensor(self.gaps, dtype=torch.float64, device=mean.device)[third]
        return (mean >= least) & (least < torch.inf)

    @staticmethod
    def _gap(step: Step) -> Float64[Tensor, "batch seq"]:
        """log p(1) - log p(2) at the predictions; infinite where one token has all the mass."""
        if step.log_probs.shape[-1] < 2:
            return torch.full(step.window.shape, torch.inf, dtype=torch.float64, device=step.window.device)
        first, second = step.log_probs.topk(2, dim=-1).values.unbind(dim=-1)
        return step.dense((first - second).double(), 0.0)
