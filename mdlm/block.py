"""What has a noise level of its own: a row of a batch, or in block diffusion each block of a row.

Block diffusion (BD3-LM, arXiv 2503.09573, eq. 8) factorises a text over blocks from left to right and gives each block
a diffusion of its own, under the clean blocks before it:

    -log p(x) <= sum over blocks b of E over t of weight(t) * -log p(x_i | x_t of block b, x before b), i in M

So to the forward process a block is what a row is without blocks. `units_of` hands both out alike, as the rows of a
narrow batch with numbers of their own; whoever noises them need not know which they are. `block_size` 1 is a causal
model, whose every token is masked under its clean past; a block as long as the row is MDLM, with the same noise.

Blocks are counted from the start of each document, prompt included, as SDAR (arXiv 2510.06303) and Fast-dLLM v2
(2509.26328) do and as samplers with `Blocks(align="row")` write: the block in which a prompt ends holds clean tokens
beside the first ones to write. What may not be noised is no reason for another block. Read next: `objective.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from mdlm.attention import document_ids, token_positions

if TYPE_CHECKING:
    from mdlm.data import Batch

_MANY = 1 << 24  # steps that no run makes


@dataclass(frozen=True)
class Units:
    """The rows or the blocks of a batch, each padded on the right to one width."""

    input_ids: Int64[Tensor, "units width"]
    maskable: Bool[Tensor, "units width"]
    numbers: Int64[Tensor, " units"]
    """Of unit j of global row r: r * per_row + j; beyond `per_row`, some number that no other unit has."""
    per_row: int
    """Blocks that a row of one document has; 1 for rows. Rows of short documents may hold more, padded ones fewer."""
    shape: tuple[int, int]
    """Of the batch."""
    place: Int64[Tensor, "units width"] | None = None
    """Where in the flattened batch each token of a unit stands; None: the units are the rows."""
    inside: Bool[Tensor, "units width"] | None = None
    """False where a unit is padded."""

    def per_token(self, values: Tensor, views: int = 1) -> Tensor:
        """From `[views * units, width]` to `[views * batch, seq]`; 0 or False where there is no unit."""
        if self.place is None or self.inside is None:
            return values
        batch, seq = self.shape
        out = values.new_zeros(views, batch * seq)
        out[:, self.place[self.inside]] = values.view(views, *self.place.shape)[:, self.inside]
        return out.view(views * batch, seq)

    def per_unit(self, values: Int[Tensor, "batch seq"]) -> Tensor:
        """From `[batch, seq]` to `[units, width]`; 0 or False where a unit is padded."""
        if self.place is None or self.inside is None:
            return values
        return values.flatten()[self.place] * self.inside


def units_of(batch: Batch, block_size: int | None, group: int) -> Units:
    """The rows of `batch` (`block_size` None) or its blocks.

    `group` rows have their noise levels drawn together (a global batch): with group * per_row as the global batch of
    `schedule.draw_times` the units' times are. Each number, so each draw, is a function of the row's number and of what
    is in the row, whoever else is in the batch.
    """
    ids, shape = batch.input_ids, (batch.input_ids.shape[0], batch.input_ids.shape[1])
    if block_size is None:
        return Units(ids, batch.maskable, batch.rows, 1, shape)
    seq = shape[1]
    device = ids.device
    positions = token_positions(ids, batch.attention_mask, batch.position_ids).expand_as(ids)
    documents = document_ids(batch.attention_mask, batch.position_ids)
    document = torch.zeros_like(ids) if documents is None else documents
    token = (document >= 0).flatten().nonzero()[:, 0]
    blocks = (positions // block_size).flatten()[token]
    parts = (token // seq, document.flatten()[token], blocks)
    begins = torch.ones_like(token, dtype=torch.bool)
    begins[1:] = torch.stack([part[1:] != part[:-1] for part in parts]).any(dim=0)
    first, unit = begins.nonzero()[:, 0], begins.cumsum(dim=0) - 1
    row = token[first] // seq
    width, per_row = min(block_size, seq), -(-seq // block_size)

    place = torch.zeros(len(first), width, dtype=torch.int64, device=device)
    inside = torch.zeros(len(first), width, dtype=torch.bool, device=device)
    slot = torch.arange(len(token), device=device) - first[unit]
    place[unit, slot], inside[unit, slot] = token, True
    index = torch.arange(len(first), device=device)
    index = index - torch.searchsorted(row, row)  # in its row
    # what is beyond per_row is stratified as if it were rows of a step far away
    numbers = (batch.rows[row] + index // per_row * (_MANY * group)) * per_row + index % per_row
    units = Units(ids, batch.maskable, numbers, per_row, shape, place, inside)
    return Units(units.per_unit(ids), units.per_unit(batch.maskable), numbers, per_row, shape, place, inside)
