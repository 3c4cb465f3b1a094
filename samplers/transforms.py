"""Transforms of log-probabilities before anything is scored or drawn. The driver normalises afterwards.

What reaches them is the `Denoiser`'s answer, shifted and without the mask id, after guidance. `generate` appends them
to the strategy's own in this order: repetition penalty, repeated runs (`ngrams.py`), suppressed tokens, tokens
suppressed at the start; a constraint (`constrain.py`) comes last. So a penalty never brings back what is suppressed.
Read next: `scores.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mdlm.samplers.state import Step


@dataclass(frozen=True)
class SuppressTokens:
    """These ids are never written."""

    token_ids: tuple[int, ...]

    def __call__(self, log_probs: Float[Tensor, "rows vocab"], step: Step) -> Float[Tensor, "rows vocab"]:
        """See `Transform`."""
        return log_probs.index_fill(-1, torch.tensor(self.token_ids, device=log_probs.device), -torch.inf)


@dataclass(frozen=True)
class SuppressAtStart:
    """These ids are never written at the first editable position of a row."""

    token_ids: tuple[int, ...]

    def __call__(self, log_probs: Float[Tensor, "rows vocab"], step: Step) -> Float[Tensor, "rows vocab"]:
        """See `Transform`."""
        row, position = step.index
        first = (position == step.state.origin[row]).nonzero()[:, 0]
        tokens = torch.tensor(self.token_ids, device=log_probs.device)
        log_probs = log_probs.clone()
        log_probs[first[:, None], tokens] = -torch.inf
        return log_probs


def tokens_held(step: Step, vocab: int) -> Bool[Tensor, "batch vocab"]:
    """Which tokens each row holds, given and written ones; padding and undecided positions hold none."""
    state = step.state
    real = torch.arange(state.tokens.shape[1], device=state.tokens.device) < state.lengths[:, None]
    tokens = torch.where(real & ~state.masked, state.tokens, vocab)
    held = torch.zeros(len(tokens), vocab + 1, dtype=torch.bool, device=tokens.device)
    return held.scatter_(1, tokens, True)[:, :-1]


@dataclass(frozen=True)
class RepetitionPenalty:
    """Divides the probability of every token that the row holds already, given or written, by `penalty`.

    CTRL (Keskar et al., 1909.05858) divides logits instead, whose zero point is arbitrary; log-probabilities are never
    positive, and one near 0 would hardly change. Here the odds against a token that the row does not hold change by
    `penalty` whatever they were. Tokens of one step do not see each other in their marginals: use `OncePerStep` too.

    Raises ValueError for a penalty below 1 or not finite.
    """

    penalty: float

    def __post_init__(self) -> None:
        if not (self.penalty >= 1 and math.isfinite(self.penalty)):
            raise ValueError(f"repetition_penalty is {self.penalty}; it must be 1 (none) or a larger number")

    def __call__(self, log_probs: Float[Tensor, "rows vocab"], step: Step) -> Float[Tensor, "rows vocab"]:
        """See `Transform`."""
        held = tokens_held(step, log_probs.shape[-1])[step.index[0]]
        return torch.where(held, log_probs - math.log(self.penalty), log_probs)


@dataclass(frozen=True)
class OncePerStep:
    """Admits each token that a row does not hold yet once per step, where it was most probable (then: leftmost).

    The others wait: in the next step the penalty sees the first, so that no second occurrence escapes it, as happens
    when two neighbours choose "the" at the same time. At least one commit of every row stays.
    """

    def __call__(
        self,
        step: Step,
        row: Int64[Tensor, " rows"],
        position: Int64[Tensor, " rows"],
        tokens: Int64[Tensor, " rows"],
        log_probs: Float[Tensor, " rows"],
    ) -> Bool[Tensor, " rows"]:
        """See `Admission`."""
        vocab = step.log_probs.shape[-1]
        held = tokens_held(step, vocab)[row, tokens]
        likely = log_probs.argsort(descending=True, stable=True)  # commits come in row-major order
        group = (row * vocab + tokens)[likely]
        order = group.argsort(stable=True)
        ordered = group[order]
        first = torch.ones_like(held)
        first[1:] = ordered[1:] != ordered[:-1]
        return held | torch.zeros_like(held).scatter_(0, likely[order], first)
