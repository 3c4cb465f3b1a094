"""Passes over the vocabulary that make no more arrays of its size: largest value, entropy, divergence.

A sampler sees `[rows, vocab]` predictions, at 32768 tokens four megabytes for every 32 rows. One more array of that
size can cost more than the arithmetic that fills it, because it leaves the processor's cache and asks the system for
fresh memory. So on a CPU rows are worked off in blocks of about `BLOCK` numbers. Every result is one of its row alone:
a row is summed in the same parts however many rows there are and however many threads run. Read next: `denoiser.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int64
from torch import Tensor

BLOCK = 1 << 18
"""Numbers per block: one megabyte in float32."""
PART = 64
"""Columns per part in `largest`."""
PIECE = 256
"""Columns per part in `row_sum`."""
LOWEST = -1e4
"""Stands for a log-probability of -inf where it is multiplied by its probability, 0."""
FARTHEST = 1e4
"""Difference of two log-probabilities, one of which is -inf, in nats."""


def row_blocks(values: Float[Tensor, "_ vocab"], rows: int) -> Iterator[slice]:
    """The numbers 0 .. `rows` - 1 in blocks, of about `BLOCK` numbers of rows as long as those of `values`, or, where a
    call costs more than memory (not on a CPU), in one."""
    size = max(1, BLOCK // max(1, values.shape[-1])) if values.device.type == "cpu" else max(1, rows)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def per_row(
    values: Float[Tensor, "rows vocab"],
    measure: Callable[[Float[Tensor, "block vocab"]], Float[Tensor, " block"]],
    index: Int64[Tensor, " picked"] | None = None,
) -> Float[Tensor, " _"]:
    """`measure` of each row, or of the rows in `index`, block by block."""
    rows = len(values) if index is None else len(index)
    out = values.new_empty(rows)
    for block in row_blocks(values, rows):
        out[block] = measure(values[block] if index is None else values.index_select(0, index[block]))
    return out


def row_sum(values: Float[Tensor, "rows vocab"]) -> Float[Tensor, " rows"]:
    """Sum of each row, in parts of `PIECE`: a sum over one long row alone would be split among threads."""
    vocab = values.shape[-1]
    whole = vocab - vocab % PIECE
    parts = values[:, :whole].unflatten(-1, (-1, PIECE)).sum(dim=-1)
    if whole < vocab:
        parts = torch.cat([parts, values[:, whole:].sum(dim=-1, keepdim=True)], dim=-1)
    return parts.sum(dim=-1)


def entropies(
    log_probs: Float[Tensor, "rows vocab"], index: Int64[Tensor, " picked"] | None = None
) -> Float[Tensor, " _"]:
    """Entropy of each row (or of those in `index`) in nats; 0, not NaN, where one token has all the mass."""

    def measure(block: Float[Tensor, "block vocab"]) -> Float[Tensor, " block"]:
        finite = block.clamp(min=LOWEST)
        return row_sum(finite.softmax(dim=-1).mul_(finite))  # of log-probabilities: exp, by the faster routine

    return per_row(log_probs, measure, index).neg_()


def divergences(
    first: Float[Tensor, "_ vocab"],
    second: Float[Tensor, "_ vocab"],
    first_rows: Int64[Tensor, " rows"],
    second_rows: Int64[Tensor, " rows"],
) -> Float[Tensor, " rows"]:
    """KL(first || second) in nats of two laws each, 0 or more. A token to which the second gives less than
    e^-`FARTHEST` of what the first does counts so many nats, not infinitely many."""
    out = first.new_empty(len(first_rows))
    for block in row_blocks(first, len(out)):
        law, other = _rows(first, first_rows[block]), _rows(second, second_rows[block])
        finite = law.clamp(min=LOWEST)  # so that no difference is one of two infinite numbers
        difference = finite.sub_(other).clamp_(max=FARTHEST)
        out[block] = row_sum(difference.mul_(law.softmax(dim=-1)))
    return out.clamp_(min=0)


def _rows(values: Float[Tensor, "_ vocab"], index: Int64[Tensor, " picked"]) -> Float[Tensor, "picked vocab"]:
    """The rows in `index`; on a CPU without a copy where they follow one another, as most do."""
    if values.device.type == "cpu":
        numbers = index.tolist()
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return values[numbers[0] : numbers[0] + len(numbers)]
    return values.index_select(0, index)


def largest(values: Float[Tensor, "rows vocab"]) -> tuple[Float[Tensor, " rows"], Int64[Tensor, " rows"]]:
    """`values.max(dim=-1)`, the lowest index of equal ones: the largest of each part first, then the place within the
    best part. The maximum alone is several times faster than the maximum with its index over a long axis."""
    vocab = values.shape[-1]
    whole = vocab - vocab % PART
    tops = values[:, :whole].unflatten(-1, (-1, PART)).amax(dim=-1)
    if whole < vocab:
        tops = torch.cat([tops, values[:, whole:].amax(dim=-1, keepdim=True)], dim=-1)
    value, part = tops.max(dim=-1)
    columns = (part[:, None] * PART + torch.arange(PART, device=values.device)).clamp(max=vocab - 1)
    place = values.gather(-1, columns).argmax(dim=-1, keepdim=True)
    return value, columns.gather(-1, place)[:, 0]
