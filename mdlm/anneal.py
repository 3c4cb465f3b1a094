"""Attention-mask annealing: a causal model learns step by step to look ahead (DiffuLLaMA, 2410.17891, section 3.3).

A query always sees itself and what is before it. Of the keys behind it, each is visible with a probability that grows
linearly from step to step until everything is. Which ones is a function of (seed, row, query's and key's position).
`Objective` says how far it is, `MDLMModel.forward` applies it. Read next: `attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from mdlm.config import MDLMConfig
from mdlm.rng import counter_uniform, hash_counters

_STREAM = 0x414E4E45


@dataclass(frozen=True)
class Annealing:
    """How much of what is behind it each query of a batch sees."""

    share: Float64[Tensor, "batch"]
    """Probability that a later key is visible, in [0, 1]; a tensor, so that compiled code need not know its value."""
    keys: Int[Tensor, "batch"]
    """Hash of each row."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Annealing:
        """The same on `device`."""
        share, keys = (x.to(device, non_blocking=non_blocking) for x in (self.share, self.keys))
        return Annealing(share, keys)


def annealing_at(step: int, steps: int, seed: int, rows: Int[Tensor, "batch"]) -> Annealing | None:
    """The annealing of `step` (from 0) of `steps`: share (step + 1) / steps; None once it is 1, and for `steps` = 0."""
    if step + 1 >= steps:
        return None
    share = torch.full(rows.shape, (step + 1) / steps, dtype=torch.float64, device=rows.device)
    return Annealing(share, hash_counters(seed, _STREAM, rows))


def annealed(
    mask: Bool[Tensor, "rows 1 seq seq"] | None, positions: Int[Tensor, "rows seq"], annealing: Annealing
) -> Bool[Tensor, "batch 1 seq seq"]:
    """`mask` (None: everything visible) without the later keys that are not visible yet."""
    query, key = positions[:, :, None], positions[:, None, :]
    draws = counter_uniform(annealing.keys[:, None, None], query, key)
    seen = ((key <= query) | (draws < annealing.share[:, None, None]))[:, None]
    return seen if mask is None else mask & seen


def check_annealing(config: MDLMConfig, feeds_parts: bool = False) -> None:
    """Raises ValueError for models that cannot be annealed: with blocks, or an attention that takes no boolean mask;
    and where a row is fed in parts (`kv`)."""
    if feeds_parts:
        raise ValueError("annealing is for training on whole rows, kv feeds parts of rows; give one of them")
    if config.block_size is not None:
        raise ValueError(
            f"attention is annealed from causal to bidirectional, but this model has blocks (block_size="
            f"{config.block_size}); leave anneal_steps at 0, or set block_size to null"
        )
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"{config._attn_implementation} takes no mask that differs from key to key; anneal with "
            "attn_implementation='sdpa', and go on with the other afterwards"
        )
