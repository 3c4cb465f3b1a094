"""Scorers: which undecided position deserves to be committed first (higher = earlier).

A scorer maps a `Step` to one number per prediction (packed); -inf means: not now, unless nothing else is left. Scores
live in log space, so that a factor on a score is a sum and thresholds are compared as probabilities' logarithms:
`probability` is log p(1), `margin` log(p(1) - p(2)), `negative_entropy` is -H, the logarithm of exp(-H). They come from
untempered log-probabilities: tempered ones tie near 1, and ties are broken by position. Read next: `select.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mdlm.samplers.state import NOISE_ORDER, Step

Scorer = Callable[[Step], Float[Tensor, " rows"]]

LOWEST = -1e30
"""A score below every other that is still a score."""


def probability(step: Step) -> Float[Tensor, " rows"]:
    """log of the largest probability: the confidence of LLaDA at temperature 0 and of Fast-dLLM (2505.22618)."""
    return step.best[0]


def margin(step: Step) -> Float[Tensor, " rows"]:
    """log of the difference of the two largest probabilities (Kim et al., 2502.06768, "top-k probability margin")."""
    if step.log_probs.shape[-1] < 2:
        return torch.zeros_like(step.best[0])
    first, second = step.log_probs.topk(2, dim=-1).values.unbind(dim=-1)
    difference = first + torch.log1p(-(second - first).exp())
    return difference.clamp(min=LOWEST)  # of two equal ones: the lowest score, not the refusal that -inf is


def negative_entropy(step: Step) -> Float[Tensor, " rows"]:
    """-H in nats."""
    return -step.entropy


def drawn_probability(step: Step) -> Float[Tensor, " rows"]:
    """log-probability of the token already drawn (LLaDA 2502.09992, algorithm 5); needs `Draw(before_select=True)`."""
    assert step.drawn is not None, "drawn_probability needs Draw(before_select=True)"
    return step.of(step.drawn)


def random(step: Step) -> Float[Tensor, " rows"]:
    """Independent uniform numbers: every order of positions is equally likely. Does not look at the predictions."""
    return step.packed(step.state.uniform(NOISE_ORDER))


SCORES: dict[str, Scorer] = {
    "probability": probability,
    "margin": margin,
    "entropy": negative_entropy,
    "random": random,
}
"""The scores a preset offers by name."""


@dataclass(frozen=True)
class DeferEos:
    """`base`, but a position whose predicted token ends the sequence is committed only as the leftmost undecided one.

    A position may always be reached in the end: the driver commits the best candidate if nothing else is left. It acts
    on the score, so it works at every temperature; banning the token instead would inflate the confidence of the rest.
    """

    base: Scorer
    eos_token_ids: tuple[int, ...]

    def __call__(self, step: Step) -> Float[Tensor, " rows"]:
        """See `Scorer`."""
        score = self.base(step)
        ends = torch.isin(step.predicted, torch.tensor(self.eos_token_ids, device=score.device))
        undecided = step.state.masked.cumsum(dim=1)
        leftmost = step.packed(step.state.masked & (undecided == 1))
        return score.masked_fill(ends & ~leftmost, -torch.inf)
