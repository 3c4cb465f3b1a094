"""Weights of the loss beyond the NELBO's own: context-adaptive (CART), of complementary masks, of clipped blocks.

Read first: `objective.py`, which uses them.
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


def clipped_weights(
    count: Int64[Tensor, "units"],
    maskable: Int[Tensor, "units"],
    width: int,
    floor: float,
    eps: float,
    t_max: float,
) -> Float64[Tensor, "units"]:
    """The NELBO's weight of a block with `count` of `maskable` tokens masked under block-clipped noise.

    The noise (Stable-DiffCoder, arXiv 2601.15892): u = max(t, floor), t uniform in (eps, t_max]; each token masked with
    probability u; one uniformly chosen token if none was. The published weight 1/u is not the importance of that law,
    whose share of blocks with one mask is larger. This one is: the NELBO of n tokens weighs a set of k masked ones by
    (k-1)! (n-k)! / n!, whatever the noise, and the law gives that set the probability

        q(k) = E over u of u^k (1-u)^(n-k), and for k = 1 another E over u of (1-u)^n / n.

    Their ratio makes the loss unbiased for the NELBO, the part of t that is left out included. In terms of binomial
    probabilities C(n,k) q(k) is, for a = max(floor, eps) and the share s = (a - eps) / (t_max - eps) of t below it,

        s P(Bin(n, a) = k) + (1 - s) (P(Bin(n+1, t_max) > k) - P(Bin(n+1, a) > k)) / ((n + 1) (t_max - a))

    and for k = 1 in addition s (1-a)^n + (1 - s) ((1-a)^(n+1) - (1-t_max)^(n+1)) / ((n + 1) (t_max - a)).

    `width`: the largest n. A count of 0 has weight 0.
    """
    a = max(floor, eps)
    atom = min(1.0, (a - eps) / (t_max - eps))
    n = torch.arange(width + 1, dtype=torch.float64)[:, None]
    k = torch.arange(width + 1, dtype=torch.float64)[None]
    chance = atom * _binomial(n, k, a)
    chance[:, 1] += atom * (1.0 - a) ** n[:, 0]
    if atom < 1.0:
        spread = (n + 1.0) * (t_max - eps)  # (1 - s) / (t_max - a) = 1 / (t_max - eps)
        chance += (_tail(n + 1.0, k, t_max) - _tail(n + 1.0, k, a)) / spread
        chance[:, 1] += (((1.0 - a) ** (n + 1.0) - (1.0 - t_max) ** (n + 1.0)) / spread)[:, 0]
    weight = torch.where((k > 0) & (k <= n), 1.0 / (k * chance), 0.0)
    return weight.to(count.device)[maskable.long(), count.long()]


def _binomial(n: Float64[Tensor, "n 1"], k: Float64[Tensor, "1 k"], p: float) -> Float64[Tensor, "n k"]:
    """P(Bin(n, p) = k); 0 for k > n."""
    rest = (n - k).clamp(min=0.0)
    log_choose = torch.lgamma(n + 1.0) - torch.lgamma(k + 1.0) - torch.lgamma(rest + 1.0)
    return torch.where(k <= n, (log_choose + torch.xlogy(k, p) + torch.xlogy(rest, 1.0 - p)).exp(), 0.0)


def _tail(n: Float64[Tensor, "n 1"], k: Float64[Tensor, "1 k"], p: float) -> Float64[Tensor, "n k"]:
    """P(Bin(n, p) > k) for k = 0, 1, ..."""
    return (1.0 - _binomial(n, k, p).cumsum(dim=1)).clamp(min=0.0)
