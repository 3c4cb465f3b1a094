"""How the denoiser is fed: the whole canvas in every step, or less of it with the help of stored keys and values.

A `CachePolicy` is a value; `start` makes the `Feeder` of one run, so no two runs share anything. Feeders count what
they cost: evaluations (`nfe`), model calls (`forwards`) and tokens per row. Read next: `cache_policies.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mdlm.denoiser import Denoiser
from mdlm.samplers.state import State


class Feeder(Protocol):
    """Answers one run's questions to the denoiser."""

    def __call__(
        self,
        state: State,
        tokens: Int64[Tensor, "batch seq"],
        at: Bool[Tensor, "batch seq"],
        window: Bool[Tensor, "batch seq"],
    ) -> Float[Tensor, "rows vocab"]:
        """Log-probabilities at `at`, packed; `tokens` is the canvas (or guidance's variant of it). Rows without a
        position in `at` are not fed and cost nothing."""

    def keep(self, rows: Int64[Tensor, " batch"]) -> None:
        """Forget all rows but these."""


class CachePolicy(Protocol):
    """Makes feeders."""

    def start(self, denoiser: Denoiser) -> Feeder:
        """A feeder without memory of other runs. Raises ValueError if the denoiser lacks a capability it needs."""


@dataclass(frozen=True)
class NoCache:
    """The whole canvas in every step: exact for every model."""

    def start(self, denoiser: Denoiser) -> Feeder:
        """See `CachePolicy`."""
        return WholeCanvas(denoiser)


@dataclass
class WholeCanvas:
    """The feeder of `NoCache`."""

    denoiser: Denoiser

    def __call__(
        self,
        state: State,
        tokens: Int64[Tensor, "batch seq"],
        at: Bool[Tensor, "batch seq"],
        window: Bool[Tensor, "batch seq"],
    ) -> Float[Tensor, "rows vocab"]:
        """See `Feeder`."""
        fed = at.any(dim=-1)
        state.nfe += fed
        state.forwards += fed
        state.tokens_fed += fed * state.lengths
        lengths = state.lengths
        if not bool(fed.all()):
            tokens, at, lengths = tokens[fed], at[fed], lengths[fed]
        shortest, longest = torch.stack(lengths.aminmax()).tolist()
        mask = None if shortest == longest else torch.arange(longest, device=tokens.device) < lengths[:, None]
        return self.denoiser(tokens[:, :longest], attention_mask=mask, at=at[:, :longest])

    def keep(self, rows: Int64[Tensor, " batch"]) -> None:
        """See `Feeder`."""
