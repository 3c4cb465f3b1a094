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
FARTHEST = 1e4
"""Difference of two log-probabilities, the second of which is -inf, in nats."""


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
    """Sum of each row without NaN, in parts of `PIECE`: a sum over one long row alone would be split among threads."""
    vocab = values.shape[-1]
    whole = vocab - vocab % PIECE
    parts = values[:, :whole].unflatten(-1, (-1, PIECE)).nansum(dim=-1)
    if whole < vocab:
        parts = torch.cat([parts, values[:, whole:].nansum(dim=-1, keepdim=True)], dim=-1)
    return parts.sum(dim=-1)


def entropies(
    log_probs: Float[Tensor, "rows vocab"], index: Int64[Tensor, " picked"] | None = None
) -> Float[Tensor, " _"]:
    """Entropy of each row (or of those in `index`) in nats; 0, not NaN, where one token has all the mass."""

    def measure(block: Float[Tensor, "block vocab"]) -> Float[Tensor, " block"]:
        # Softmax of log-probabilities is exp by a faster routine; NaN: no mass.
        return row_sum(block.softmax(dim=-1).mul_(block))

    return per_row(log_probs, measure, index).neg_()


def divergences(
    first: Float[Tensor, "_ vocab"],
    second: Float[Tensor, "_ vocab"],
    first_rows: Int64[Tensor, " rows"],
    second_rows: Int64[Tensor, " rows"],
) -> Float[Tensor, " rows"]:
    """KL(first || second) in nats of two laws each, 0 or more. A token to which only the first gives mass counts
    `FARTHEST` nats times that mass, not infinitely many."""
    out = first.new_empty(len(first_rows))
    left, right = _numbers(first_rows), _numbers(second_rows)
    for block in row_blocks(first, len(out)):
        law, other = _rows(first, left, block), _rows(second, right, block)
        # NaN: both have no mass, or the first has none; infinite: only the second has none.
        terms = (law - other).mul_(law.softmax(dim=-1))
        out[block] = row_sum(terms)
    far = out.isinf().nonzero()[:, 0]
    if len(far):
        law, other = first.index_select(0, first_rows[far]), second.index_select(0, second_rows[far])
        terms = (law - other).clamp_(max=FARTHEST).mul_(law.softmax(dim=-1))
        out[far] = row_sum(terms)
    return out.clamp_(min=0)


def _numbers(index: Int64[Tensor, " rows"]) -> Int64[Tensor, " rows"] | list[int]:
    """On a CPU as a list, so that rows that follow one another are seen to do so."""
    return index.tolist() if index.device.type == "cpu" else index


def _rows(
    values: Float[Tensor, "_ vocab"], numbers: Int64[Tensor, " rows"] | list[int], block: slice
) -> Float[Tensor, "block vocab"]:
    """The rows with these numbers, without a copy where they follow one another, as most do."""
    if isinstance(numbers, Tensor):
        return values.index_select(0, numbers[block])
    picked = numbers[block]
    first, end = picked[0], picked[0] + len(picked)
    if picked == list(range(first, end)):
        return values[first:end]
    return values.index_select(0, torch.tensor(picked))


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
