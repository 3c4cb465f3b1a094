"""Weights of the loss beyond the NELBO's own: context-adaptive (CART) and those of complementary masks.

Read first: `objective.py`, which uses both.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float64, Int, Int64
from torch import Tensor

from mdlm.schedule import NoiseSchedule


def cart_weights(
    masked: Bool[Tensor, "batch seq"],
    real: Bool[Tensor, "batch seq"] | None,
    position_ids: Int[Tensor, "batch seq"] | None,
    p: float,
) -> Float64[Tensor, "batch seq"]:
    """Context-adaptive token weights (CART; Dream 7B, arXiv 2508.15487): how much is visible near each masked token.

    w[n] = 1/2 * sum over visible i != n of Geo(|n - i|), with Geo(d) = p (1 - p)^(d - 1), d = 1, 2, ...: a visible
    neighbour (d = 1) counts p / 2. Visible is what is `real` (None: everything) and not masked, the prompt included, in
    the same document (`position_ids` restart with each; None: one per row). 0 where not masked. Weights lie in [0, 1].

    The sum over distances below 2^k doubles its reach in every pass, log2(seq) in all.
    """
    visible = ~masked if real is None else ~masked & real
    if position_ids is None:
        document = torch.zeros_like(masked, dtype=torch.int64)
    else:
        document = (position_ids == 0).long().cumsum(dim=1)
    left = _before(visible.double(), document, 1.0 - p)
    right = _before(visible.double().flip(1), document.flip(1), 1.0 - p).flip(1)
    return torch.where(masked, 0.5 * p * (left + right), 0.0)


def _before(
    value: Float64[Tensor, "batch seq"], document: Int64[Tensor, "batch seq"], decay: float
) -> Float64[Tensor, "batch seq"]:
    """sum over d >= 1 of decay^(d - 1) value[n - d], within the document of n."""
    total, reach = value, 1
    while reach < value.shape[1]:
        total = total + decay**reach * _shifted(total, document, reach)
        reach *= 2
    return _shifted(total, document, 1)


def _shifted(x: Tensor, document: Tensor, by: int) -> Tensor:
    out = torch.zeros_like(x)
    out[:, by:] = torch.where(document[:, by:] == document[:, :-by], x[:, :-by], 0.0)
    return out


def complementary_weights(
    schedule: NoiseSchedule,
    count: Int64[Tensor, "batch"],
    maskable: Int[Tensor, "batch"],
    eps: float,
    t_max: float,
) -> Float64[Tensor, "batch"]:
    """The NELBO's weight of a view with `count` of `maskable` tokens masked, drawn as one of a pair of complements.

    A pair is a draw k = ceil(mask_prob(t) n), t uniform in (eps, t_max], and its complement with n - k masked tokens
    (Fast-dLLM v2, arXiv 2509.26328: every token is predicted once). A count c comes up in P(c) + P(n - c)
    views of a pair, so with weight 2 n / (R c (P(c) + P(n - c))), R the number of counts from 1 on that come up at all,
    the two views together estimate twice the NELBO without bias, and uniform logits over V tokens cost 2 n log V (with
    the linear schedule and times from all of (0, 1] in every draw). A count of 0 has weight 0.
    """
    n = maskable.double()
    size = n.clamp(min=1.0)
    bounds = schedule.mask_prob(torch.tensor([eps, t_max], dtype=torch.float64)).tolist()

    def chance(c: Tensor) -> Tensor:
        upper = schedule.time(c.clamp(min=0.0) / size).clamp(eps, t_max)
        lower = schedule.time((c - 1.0).clamp(min=0.0) / size).clamp(eps, t_max)
        return torch.where(c > 0, (upper - lower) / (t_max - eps), 0.0)

    c = count.double()
    low, high = torch.floor(bounds[0] * n) + 1.0, torch.ceil(bounds[1] * n)
    other_low, other_high = (n - high).clamp(min=1.0), n - low
    overlap = torch.minimum(high, other_high) - torch.maximum(low, other_low) + 1.0
    reached = (high - low + 1.0) + (other_high - other_low + 1.0).clamp(min=0.0) - overlap.clamp(min=0.0)
    weight = 2.0 * n / (reached * c.clamp(min=1.0) * (chance(c) + chance(n - c)))
    return torch.where(c > 0, weight, 0.0)
