"""Which token is written at a position: greedy, or drawn from the tempered and truncated marginal.

One uniform number per position is inverted through the cumulative distribution in float64. A Gumbel race needs a number
per token, and in float32 cannot reach the tail: tokens below about 2^-24 are then never drawn. Read next: `select.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from torch.nn import functional as F

from mdlm.passes import largest, row_blocks

LEAST_TEMPERATURE = 1e-6
"""Below it, and above its inverse, logits over temperature leave the range of float32."""
PIECE = 256
"""Tokens per piece of the vocabulary when a token is drawn."""


@dataclass(frozen=True)
class Draw:
    """How tokens are drawn, and when.

    With `before_select` a token is drawn at every candidate first and positions are ranked knowing it, as LLaDA,
    MaskGIT, Dream and SDAR do. At temperatures above 0 that samples from another distribution than the model's, even
    one token a step: it prefers positions whose draw came out likely (Hayakawa et al., 2510.04525). Positions chosen
    first, tokens drawn afterwards, is exact with one token a step.

    Raises ValueError for values out of range.
    """

    temperature: float = 0.0
    """0: the most probable token; else logits are divided by this."""
    top_p: float | None = None
    """Keep the smallest set of most probable tokens whose mass reaches this, in (0, 1]; the crossing token stays."""
    top_k: int | None = None
    """Keep so many most probable tokens."""
    min_p: float | None = None
    """Keep tokens at least this fraction as probable as the most probable one, in [0, 1]."""
    before_select: bool = False

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature <= 1 / LEAST_TEMPERATURE):
            raise ValueError(
                f"temperature is {self.temperature}; it must be 0 (greedy) or lie between {LEAST_TEMPERATURE:g} and "
                f"{1 / LEAST_TEMPERATURE:g}"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie in (0, 1]")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be 1 or more")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must lie in [0, 1]")

    def __call__(
        self, log_probs: Float[Tensor, "rows vocab"], uniform: Float64[Tensor, " rows"]
    ) -> Int64[Tensor, " rows"]:
        """One token per row. `uniform` decides it; equal maxima at temperature 0: the lowest id."""
        if self.temperature == 0:
            return largest(log_probs)[1]
        piece, rest = torch.empty_like(uniform, dtype=torch.int64), torch.empty_like(uniform)
        inside = log_probs.new_empty(len(uniform), PIECE)
        for block in row_blocks(log_probs, len(uniform)):
            probs = truncated_probs(log_probs[block], self)
            piece[block], rest[block], inside[block] = chosen_piece(probs, uniform[block])
        token = within_piece(piece, rest, inside, log_probs.shape[-1])
        broken = inside[:, 0].isnan()
        if bool(broken.any()):  # a NaN anywhere in a row; whoever writes the token that has it sees it
            token = torch.where(broken, log_probs.argmax(dim=-1), token)
        return token


def truncated_probs(log_probs: Float[Tensor, "rows vocab"], draw: Draw) -> Float[Tensor, "rows vocab"]:
    """Probabilities (up to a factor per row) after temperature, then top-k, then top-p, then min-p; NaN where a row
    holds one."""
    tempered = log_probs if draw.temperature == 1 else log_probs / draw.temperature
    if draw.top_k is not None and draw.top_k < tempered.shape[-1]:
        order = tempered.argsort(dim=-1, descending=True, stable=True)
        tempered = tempered.scatter(-1, order[:, draw.top_k :], -torch.inf)
    probs = tempered.softmax(dim=-1)
    if draw.top_p is not None and draw.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
        beyond = before >= draw.top_p * ordered.sum(dim=-1, keepdim=True, dtype=torch.float64)
        beyond[:, 0] = False
        probs = probs.scatter(-1, order, ordered.masked_fill(beyond, 0.0))
    if draw.min_p is not None:
        probs = probs.masked_fill(probs < draw.min_p * probs.amax(dim=-1, keepdim=True), 0.0)
    return probs


def invert_cdf(probs: Float[Tensor, "rows vocab"], uniform: Float64[Tensor, " rows"]) -> Int64[Tensor, " rows"]:
    """The token at which the cumulative sum of `probs` passes `uniform` times its total; never one without mass. Where
    `probs` hold NaN: any.

    In two levels, the piece of the vocabulary first: one cheap pass over everything, float64 sums within one piece.
    """
    return within_piece(*chosen_piece(probs, uniform), probs.shape[-1])


def chosen_piece(
    probs: Float[Tensor, "rows vocab"], uniform: Float64[Tensor, " rows"]
) -> tuple[Int64[Tensor, " rows"], Float64[Tensor, " rows"], Float[Tensor, "rows piece"]]:
    """Number of the piece in which the cumulative sum passes, how far into it, and its probabilities."""
    padded = probs if probs.shape[-1] % PIECE == 0 else F.pad(probs, (0, -probs.shape[-1] % PIECE))
    pieces = padded.unflatten(-1, (-1, PIECE))
    piece, rest = _passed(pieces.sum(dim=-1).double(), uniform)
    return piece, rest, pieces[torch.arange(len(piece), device=piece.device), piece]


def within_piece(
    piece: Int64[Tensor, " rows"],
    rest: Float64[Tensor, " rows"],
    inside: Float[Tensor, "rows piece"],
    vocab: int,
) -> Int64[Tensor, " rows"]:
    """The token, from what `chosen_piece` says."""
    return (piece * PIECE + _passed(inside.double(), rest)[0]).clamp(max=vocab - 1)


def _passed(
    mass: Float64[Tensor, "rows parts"], uniform: Float64[Tensor, " rows"]
) -> tuple[Int64[Tensor, " rows"], Float64[Tensor, " rows"]]:
    """The part in which `uniform` times the total lies, and how far into it, as a fraction of its mass."""
    cumulative = mass.cumsum(dim=-1)
    total = cumulative[:, -1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    part = torch.searchsorted(cumulative, target[:, None], right=True).clamp(max=mass.shape[-1] - 1)  # beyond it: NaN
    own = mass.gather(1, part)
    return part[:, 0], ((target[:, None] - (cumulative.gather(1, part) - own)) / own).clamp(0, 1)[:, 0]
