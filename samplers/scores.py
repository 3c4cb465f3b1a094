"""Scorers: which undecided position deserves to be committed first (higher = earlier).

A scorer maps a `Step` to one number per prediction (packed); -inf means: not now, unless nothing else is left. Scores
live in log space, so that a factor on a score is a sum and thresholds are compared as probabilities' logarithms:
`probability` is log p(1), `margin` log(p(1) - p(2)), `negative_entropy` is -H, the logarithm of exp(-H). They come from
untempered log-probabilities: tempered ones tie near 1, and ties are broken by position. Read next: `select.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from mdlm.samplers.draw import truncated_probs
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


@dataclass(frozen=True)
class DistancePenalty:
    """`base` minus `penalty` nats per position between here and the first candidate (WeDLM, 2512.22737): what lies far
    ahead must be surer, so a window fills from the left. With `negative_entropy`: -(H + penalty * distance)."""

    base: Scorer
    penalty: float = 0.02

    def __post_init__(self) -> None:
        if not self.penalty >= 0:
            raise ValueError(f"penalty is {self.penalty}; it must be 0 or more (nats per position)")

    def __call__(self, step: Step) -> Float[Tensor, " rows"]:
        """See `Scorer`."""
        score = self.base(step)
        if self.penalty == 0:
            return score
        row, position = step.index
        return score - self.penalty * (position - step.candidates.int().argmax(dim=-1)[row])


@dataclass(frozen=True)
class PositionCalibrated:
    """log of exp(-lam * i) * min(-p * log f, alpha): PC-Sampler / UNCODE (2508.13021).

    i: distance to the start of the window; p: probability of the predicted token; f: its frequency in text, so that
    common tokens (commas, newlines) do not go first only because they are common.
    """

    frequencies: Float[Tensor, " vocab"] | None = None
    """Count or frequency of each token id, any scale; 0 counts as the smallest above 0. None: all the same."""
    lam: float = 0.25
    alpha: float = 10.0

    def __post_init__(self) -> None:
        if not self.lam >= 0:
            raise ValueError(f"lam is {self.lam}; it must be 0 (no preference for the start) or more")
        if not self.alpha > 0:
            raise ValueError(f"alpha is {self.alpha}; it must be above 0 (nats)")
        table = self.frequencies
        if table is not None and not (table.dim() == 1 and bool((table >= 0).all()) and bool(table.sum() > 0)):
            raise ValueError("frequencies must be one number of 0 or more for each token id, not all 0")

    def __call__(self, step: Step) -> Float[Tensor, " rows"]:
        """See `Scorer`. Raises ValueError if there is not one frequency per token id."""
        token = step.predicted
        row, position = step.index
        vocab = step.log_probs.shape[-1]
        if self.frequencies is None:
            information = torch.full_like(step.best[0], math.log(vocab - 1))
        else:
            if len(self.frequencies) != vocab:
                raise ValueError(f"{len(self.frequencies)} frequencies for {vocab} token ids; give one for each")
            table = self.frequencies.to(token.device).double()
            share = (table / table.sum()).clamp(min=table[table > 0].min() / table.sum())
            information = -share[token].log().to(step.log_probs.dtype)
        score = (step.of(token) + information.log()).clamp(min=LOWEST, max=math.log(self.alpha))
        return score - self.lam * (position - step.window.int().argmax(dim=-1)[row])


@dataclass(frozen=True)
class Tempered:
    """`base` computed from the tempered and truncated law that tokens are drawn from, as Dream does.

    For parity only: sharpened probabilities tie near 1, and ties are taken from the left. At temperature 0 only the
    truncation acts.
    """

    base: Scorer

    def __call__(self, step: Step) -> Float[Tensor, " rows"]:
        """See `Scorer`."""
        draw = step.draw if step.draw.temperature > 0 else replace(step.draw, temperature=1.0)
        probs = truncated_probs(step.log_probs, draw)
        return self.base(replace(step, log_probs=(probs / probs.sum(dim=-1, keepdim=True)).log()))
