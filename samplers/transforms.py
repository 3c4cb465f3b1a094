"""Transforms of log-probabilities before anything is scored or drawn. The driver normalises afterwards.

Read next: `scores.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mdlm.samplers.state import Step


@dataclass(frozen=True)
class SuppressTokens:
    """These ids are never written."""

    token_ids: tuple[int, ...]

    def __call__(self, log_probs: Float[Tensor, "rows vocab"], step: Step) -> Float[Tensor, "rows vocab"]:
        """See `Transform`."""
        return log_probs.index_fill(-1, torch.tensor(self.token_ids, device=log_probs.device), -torch.inf)
