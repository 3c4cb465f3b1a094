"""How the islands' pseudo-gradients become one: every rule is a function of their Gram matrices.

Per parameter tensor, G[i, j] = <d_i, d_j> holds all norms and angles of the islands' pseudo-gradients d_i, hence of any
weighted sum of them. A rule turns G and the islands' weights into coefficients c, and the merged pseudo-gradient is
sum_i c_i d_i. So a rule never sees a pseudo-gradient, all islands compute the same coefficients from the same few
numbers, and G can be summed from parts that different processes hold.

An island that does not take part has weight 0: the others' coefficients sum to 1 without it. Read next: `exchange.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float32, Float64
from torch import Tensor

from mdlm.rng import hash_counters
from mdlm.training.outer_config import MergeConfig

CANCELLED = 1e-6
"""A weighted sum of unit vectors shorter than this has no direction to speak of: the mean is used instead."""

SMALLEST_DEVIATION = 1e-2
"""Smallest standard deviation of EDiT's norms, as a share of their average: a steady norm must not exclude the next."""

Gram = Float64[Tensor, "tensors islands islands"]
Weights = Float64[Tensor, " islands"]
Coefficients = Float64[Tensor, "tensors islands"]


def gram(deltas: Sequence[Float32[Tensor, " values"]], cuts: Sequence[tuple[int, int, int]], tensors: int) -> Gram:
    """Inner products of the islands' values, per tensor.

    Args:
        deltas: one flat buffer per island; a buffer that is not finite gives entries that are not.
        cuts: (tensor, start, stop): which part of the buffers belongs to which tensor.
        tensors: number of tensors; those without a cut get zeros.
    """
    products = torch.zeros(tensors, len(deltas), len(deltas), dtype=torch.float64)
    for tensor, start, stop in cuts:
        part = torch.stack([d[start:stop] for d in deltas]).to(torch.float64)
        products[tensor] += (part @ part.T).cpu()
    return products


def combine(
    deltas: Sequence[Float32[Tensor, " values"]], cuts: Sequence[tuple[int, int, int]], coefficients: Coefficients
) -> Float32[Tensor, " values"]:
    """sum_i c_i d_i per tensor, in float32 and in the order of the islands. Islands with c_i = 0 may hold anything."""
    merged = torch.zeros_like(deltas[0])
    for tensor, start, stop in cuts:
        for delta, c in zip(deltas, coefficients[tensor].tolist()):
            if c != 0.0:
                merged[start:stop].add_(delta[start:stop], alpha=c)
    return merged


def norms(products: Gram) -> Float64[Tensor, "tensors islands"]:
    """Lengths of the islands' pseudo-gradients, per tensor."""
    return products.diagonal(dim1=-2, dim2=-1).sqrt()


def mean(products: Gram, weights: Weights) -> Coefficients:
    """c_i = w_i / sum w over the islands that take part; all zero if none does."""
    total = weights.sum()
    share = weights / total if total > 0 else torch.zeros_like(weights)
    return share.expand(products.shape[0], -1).clone()


def radial(products: Gram, weights: Weights, plain: Bool[Tensor, " tensors"]) -> Coefficients:
    """Radial-directional averaging: mean length times mean direction (Decoupled DiLoCo, 2604.21428).

    With u_i = d_i / |d_i|: c_i = L w_i / (|d_i| |sum_j w_j u_j|), L = sum_j w_j |d_j| / sum_j w_j. The length does not
    shrink as 1 / sqrt(islands) for orthogonal pseudo-gradients, as the mean's does. Zero vectors have no direction
    but count in L; where directions cancel, and for the `plain` tensors (embeddings), it is the mean.
    """
    average = mean(products, weights)
    lengths = norms(products)
    inverse = torch.where(lengths > 0, 1 / lengths, 0.0)
    inverse = torch.where(weights > 0, inverse, 0.0)  # an island that is out may hold infinities
    pull = weights * inverse
    inside = torch.where((weights > 0)[:, None] & (weights > 0), products, 0.0)
    length = torch.einsum("ti,tij,tj->t", pull, inside, pull).clamp(min=0.0).sqrt()
    radius = (average * torch.where(weights > 0, lengths, 0.0)).sum(-1)
    usable = (length > CANCELLED * weights.sum()) & ~plain
    scale = torch.where(usable, radius / torch.where(usable, length, 1.0), 0.0)
    return torch.where(usable[:, None], scale[:, None] * pull, average)


def clip(products: Gram, coefficients: Coefficients, longest: float) -> Coefficients:
    """Coefficients scaled down where the merged pseudo-gradient of a tensor would be longer than `longest`."""
    used = coefficients != 0
    inside = torch.where(used[:, :, None] & used[:, None, :], products, 0.0)
    length = torch.einsum("ti,tij,tj->t", coefficients, inside, coefficients).clamp(min=0.0).sqrt()
    return coefficients * torch.clamp(longest / length.clamp(min=1e-300), max=1.0)[:, None]


def trusted(
    products: Gram, weights: Weights, max_norm_ratio: float | None, min_cosine: float | None
) -> Float64[Tensor, " islands"]:
    """The weights, with 0 for islands whose pseudo-gradient (over all tensors) cannot be trusted.

    Left out: one that is not finite; one longer than `max_norm_ratio` times the median of the islands that are left;
    one whose cosine to the sum of the others left is below `min_cosine` (only where three are left: of two that
    disagree nobody can say which is wrong).
    """
    whole = products.sum(0)
    weights = torch.where(whole.diagonal().isfinite(), weights, 0.0)
    if max_norm_ratio is not None and bool((weights > 0).any()):
        lengths = whole.diagonal().sqrt()
        typical = lengths[weights > 0].quantile(0.5)
        weights = torch.where(lengths <= max_norm_ratio * typical, weights, 0.0)
    left = (weights > 0).nonzero().flatten()
    if min_cosine is not None and len(left) >= 3:
        among = whole[left][:, left]
        own = among.diagonal()
        to_others = among.sum(1) - own
        others = (among.sum() - 2 * among.sum(1) + own).clamp(min=0.0).sqrt()
        bound = own.sqrt() * others
        weights = weights.clone()
        weights[left[to_others < min_cosine * bound]] = 0.0
    return weights


Norms = Mapping[str, Any]
"""EDiT's memory of norms: "average" and "variance" Float64[tensors islands], "rounds" int."""


def penalty(
    products: Gram, weights: Weights, memory: Norms | None, threshold: float, decay: float, warmup: int
) -> tuple[Coefficients, Norms]:
    """EDiT's pseudo-gradient penalty (2412.07210, section 3.3), per tensor and island.

    An island whose norm lies more than `threshold` standard deviations above its own moving average is left out; the
    others are weighted by softmax(-norm). If all are left out the tensor is rolled back to its anchor. A norm that was
    left out enters the average as the largest norm that would have been accepted: if it did not enter at all, a lasting
    change of scale would exclude every island for ever.

    Returns the coefficients and the memory for the next round (None at first); the one given is left as it is.
    """
    lengths = norms(products)
    if memory is None:
        memory = {"average": torch.zeros_like(lengths), "variance": torch.zeros_like(lengths), "rounds": 0}
    average, variance, rounds = memory["average"], memory["variance"], memory["rounds"]
    ceiling = average + threshold * torch.maximum(variance.sqrt(), SMALLEST_DEVIATION * average)
    heard = weights > 0
    sane = lengths.isfinite() & heard
    if rounds >= warmup:
        sane &= (lengths <= ceiling) | (average == 0)
    gap = torch.where(sane, lengths, ceiling) - average
    step = heard.to(torch.float64) * (decay if rounds else 1.0)
    average = average + step * gap
    variance = (1 - step) * (variance + step * gap * gap)
    shortest = torch.where(sane, lengths, torch.inf).min(-1, keepdim=True).values
    raw = torch.where(sane, weights * torch.exp(-(torch.where(sane, lengths, shortest) - shortest)), 0.0)
    total = raw.sum(-1, keepdim=True)
    coefficients = torch.where(total > 0, raw / torch.where(total > 0, total, 1.0), 0.0)
    return coefficients, {"average": average, "variance": variance, "rounds": rounds + 1}


def needs_gram(c: MergeConfig) -> bool:
    """Whether the islands' weights alone do not suffice for `decide`."""
    return c.rule != "mean" or c.clip is not None or c.max_norm_ratio is not None or c.min_cosine is not None


def decide(
    c: MergeConfig, products: Gram, weights: Weights, plain: Bool[Tensor, " tensors"], memory: Norms | None
) -> tuple[Coefficients, Norms | None]:
    """The whole decision of one exchange: who is trusted, what the rule makes of them, how long it may be.

    Args:
        c: the options; `rule` mean, radial or edit.
        products: the Gram matrices; where `needs_gram` is False they may hold anything.
        weights: 0 for an island that does not take part.
        plain: tensors for which radial merging falls back to the mean.
        memory: EDiT's memory of the fragment's norms.

    Returns the coefficients, all zero for a tensor that is rolled back, and the new memory.
    """
    assert c.rule != "pairs", "pairs are merged by their own exchange"
    if needs_gram(c):
        weights = trusted(products, weights, c.max_norm_ratio, c.min_cosine)
    if c.rule == "edit":
        coefficients, memory = penalty(products, weights, memory, c.z_threshold, c.z_decay, c.z_warmup)
    elif c.rule == "radial":
        coefficients = radial(products, weights, plain)
    else:
        coefficients = mean(products, weights)
    return (coefficients if c.clip is None else clip(products, coefficients, c.clip)), memory


def pair_of(island: int, round_number: int, islands: int, seed: int) -> int:
    """The partner of an island in a round of NoLoCo (2506.10911); itself if it is the odd one out.

    Islands are put in an order that is a function of (seed, round) and paired off, so all islands know all pairs
    without talking, and a resume needs no generator state.
    """
    if not 0 <= island < islands:
        raise ValueError(f"island is {island}; it must lie in [0, {islands})")
    order = hash_counters(seed, round_number, torch.arange(islands)).argsort().tolist()
    place = order.index(island) ^ 1
    return order[place] if place < islands else island
