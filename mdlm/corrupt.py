"""The forward process: which tokens are masked, and what an at-least-one-mask rule does to the weights.

A row whose draw masks nothing would cost a forward pass and teach nothing, so one uniformly chosen position is masked
then. That makes single-mask configurations more likely than the process says: with n maskable positions and mask
probability p, one of them has probability p (1-p)^(n-1) in the process, and p (1-p)^(n-1) + (1-p)^n / n with the rule.
`Corruption.importance` is the ratio of the two, n p / (n p + 1 - p), for rows with exactly one mask and 1 elsewhere;
with it the expectation of everything that vanishes on the empty configuration (as every masked-token loss does) is
exact. It also bounds the weights: with the linear schedule's 1/t a lone mask weighs n / (n t + 1 - t) <= n however
small t is, so times need no clipping. (Stable-DiffCoder, arXiv 2601.15892, forces a mask without the correction.)

`mask_count` masks a given number of tokens instead: the same process given how many it masked. With the weights of
`schedule.exact_counts` it has the same expectations and less variance. Read next: `objective.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from mdlm.rng import counter_uniform

_MASK = 0x6D61736B  # stream tag, see schedule.py


@dataclass(frozen=True)
class Corruption:
    """A draw from the forward process: `input_ids` with the mask id where `masked`, and each row's importance."""

    input_ids: Int[Tensor, "batch seq"]
    masked: Bool[Tensor, "batch seq"]
    importance: Float64[Tensor, "batch"]


def _keyed_uniform(
    input_ids: Int[Tensor, "batch seq"],
    maskable: Bool[Tensor, "batch seq"],
    rows: Int[Tensor, "batch"],
    seed: int,
    mask_token_id: int,
) -> Float64[Tensor, "batch seq"]:
    """Each maskable position's own number in (0, 1); 2 elsewhere. Refuses text that holds the mask token."""
    if bool((maskable & (input_ids == mask_token_id)).any()):
        raise ValueError(
            f"the clean text holds the mask token (id {mask_token_id}) at a position that may be noised; "
            "the mask token must be one that no text contains"
        )
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    return counter_uniform(seed, _MASK, rows[:, None], positions).masked_fill(~maskable, 2.0)


def mask_tokens(
    input_ids: Int[Tensor, "batch seq"],
    maskable: Bool[Tensor, "batch seq"],
    mask_prob: Float[Tensor, "batch"],
    rows: Int[Tensor, "batch"],
    seed: int,
    mask_token_id: int,
    ensure_one: bool = True,
) -> Corruption:
    """Mask each maskable token of a row with the row's probability, independently.

    The draw is a function of (seed, row number, position) alone, and for a fixed key the masked set only grows with
    `mask_prob`. With `ensure_one` a row that has any maskable position gets at least one mask; see the module docstring
    for `importance`, which is 1 everywhere without it. Raises ValueError where a probability is not in [0, 1] or a
    maskable token already is the mask token.
    """
    p = mask_prob.double()
    if not bool(((p >= 0) & (p <= 1)).all()):
        raise ValueError(f"mask probabilities must lie in [0, 1], got {p.tolist()}")
    u = _keyed_uniform(input_ids, maskable, rows, seed, mask_token_id)
    masked = u < p[:, None]
    importance = torch.ones_like(p)
    if ensure_one and input_ids.shape[1] > 0:
        count = maskable.sum(dim=1)
        # Given that no draw fell below p, the smallest one is still at a uniformly distributed position.
        forced = torch.zeros_like(masked).scatter_(1, u.argmin(dim=1, keepdim=True), True)
        masked = masked | (forced & maskable & ~masked.any(dim=1, keepdim=True))
        importance = lone_mask_importance(p, count, masked.sum(dim=1))
    return Corruption(input_ids.masked_fill(masked, mask_token_id), masked, importance)


def lone_mask_importance(
    mask_prob: Float64[Tensor, "batch"], maskable: Int[Tensor, "batch"], masked: Int[Tensor, "batch"]
) -> Float64[Tensor, "batch"]:
    """`Corruption.importance` of rows in which `masked` of `maskable` tokens are masked, at least one of them."""
    expected = maskable * mask_prob
    return torch.where(masked == 1, expected / (expected + 1.0 - mask_prob), 1.0)


def mask_count(
    input_ids: Int[Tensor, "batch seq"],
    maskable: Bool[Tensor, "batch seq"],
    count: Int[Tensor, "batch"],
    rows: Int[Tensor, "batch"],
    seed: int,
    mask_token_id: int,
) -> Corruption:
    """Mask exactly `count` maskable tokens of each row, every set of that size alike; importance 1.

    The draw is a function of (seed, row number, position) alone, and for a fixed key the masked set only grows with
    `count`. Raises ValueError where a row has fewer maskable tokens, or one that already is the mask token.
    """
    if not bool(((count >= 0) & (count <= maskable.sum(dim=1))).all()):
        raise ValueError("each row's count must lie between 0 and its number of maskable tokens")
    u = _keyed_uniform(input_ids, maskable, rows, seed, mask_token_id)
    rank = u.argsort(dim=1, stable=True).argsort(dim=1, stable=True)
    masked = rank < count[:, None]
    importance = torch.ones(input_ids.shape[0], dtype=torch.float64, device=input_ids.device)
    return Corruption(input_ids.masked_fill(masked, mask_token_id), masked, importance)
