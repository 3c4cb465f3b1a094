"""Classifier-free guidance without a trained class: the answer is pushed towards what the given text makes likelier.

The model is asked twice, once as it is and once with every given token masked ("unsupervised" guidance, Nie et al.,
2410.18514; LLaDA, 2502.09992): log p = l_u + (w + 1) (l_c - l_u) = l_c + w (l_c - l_u), normalised again. It wraps any
cache policy, each branch with a feeder and thus a cache of its own, and transforms come after it.
Read next: `cache.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mdlm.denoiser import Denoiser
from mdlm.samplers.cache import CachePolicy, Feeder, NoCache
from mdlm.samplers.state import State


def guided_log_probs(
    conditional: Float[Tensor, "rows vocab"], unconditional: Float[Tensor, "rows vocab"], weight: float
) -> Float[Tensor, "rows vocab"]:
    """l_c + w (l_c - l_u), normalised over the last axis; `weight` w >= 0.

    What the conditional branch excludes (the mask id) stays excluded. Tokens that only the unconditional branch
    excludes have an infinite ratio: as its limit says, they share all the mass, in proportion to p_c^(w + 1).
    """
    excluded = conditional == -torch.inf
    guided = torch.lerp(unconditional.masked_fill(excluded, 0.0), conditional, weight + 1.0)
    guided = guided.masked_fill(excluded, -torch.inf)
    total = guided.logsumexp(dim=-1, keepdim=True)
    if not bool(total.isfinite().all()):
        infinite = (unconditional == -torch.inf) & ~excluded
        limit = torch.where(infinite, (weight + 1.0) * conditional, -torch.inf)
        guided = torch.where(infinite.any(dim=-1, keepdim=True), limit, guided)
        total = guided.logsumexp(dim=-1, keepdim=True)
    return guided - total


@dataclass(frozen=True)
class Guided:
    """Guidance of strength `weight` (the paper's w; 0: none, and no second evaluation) over the cache policy `base`.

    Costs two evaluations, two forwards and twice the tokens per step: the branches are two calls, so that each may keep
    its own cache. Raises ValueError for a weight below 0 or not finite.
    """

    weight: float
    base: CachePolicy = field(default_factory=NoCache)

    def __post_init__(self) -> None:
        if not (self.weight >= 0 and math.isfinite(self.weight)):
            raise ValueError(f"guidance is {self.weight}; it must be 0 (none) or a positive number")

    def start(self, denoiser: Denoiser) -> Feeder:
        """See `CachePolicy`."""
        if self.weight == 0:
            return self.base.start(denoiser)
        return GuidedFeeder(self.base.start(denoiser), self.base.start(denoiser), self.weight, denoiser.mask_token_id)


@dataclass
class GuidedFeeder:
    """The feeder of `Guided`: one feeder per branch."""

    conditional: Feeder
    unconditional: Feeder
    weight: float
    mask_token_id: int

    def __call__(
        self,
        state: State,
        tokens: Int64[Tensor, "batch seq"],
        at: Bool[Tensor, "batch seq"],
        window: Bool[Tensor, "batch seq"],
    ) -> Float[Tensor, "rows vocab"]:
        """See `Feeder`."""
        real = torch.arange(tokens.shape[1], device=tokens.device) < state.lengths[:, None]
        without = tokens.masked_fill(real & ~state.editable, self.mask_token_id)
        conditional = self.conditional(state, tokens, at, window)
        return guided_log_probs(conditional, self.unconditional(state, without, at, window), self.weight)

    def keep(self, rows: Int64[Tensor, " batch"]) -> None:
        """See `Feeder`."""
        self.conditional.keep(rows)
        self.unconditional.keep(rows)
