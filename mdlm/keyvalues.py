"""Stored keys and values: how a forward of some positions of a row attends to the others without computing them.

A `KeyValues` holds, for every layer, one key and one value per row and position. A forward that is given one feeds any
positions of each row (`position_ids` says which), writes their keys and values into the store, and lets them attend to
everything valid in it: what they just wrote and what stood there. Fed with all positions, that is the plain forward.
What stands there may be out of date, in which case the answer is approximate; when it is not is the business of
`samplers/cache.py`. Read next: `modeling.py`, whose forwards take `kv`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor
from torch.nn import functional as F


class Feeding(NamedTuple):
    """What one forward writes and reads."""

    kv: KeyValues
    fed: Int64[Tensor, " fed_tokens"] | None
    """Indices of the real tokens in the flattened batch; None: all."""
    places: Int64[Tensor, " fed_tokens"]
    """Where they are written, in the flattened (rows, positions)."""
    seq: int
    """Positions from here on are not attended to."""
    mask: Bool[Tensor, "batch 1 fed seq"] | None
    """Which of the positions before `seq` each fed token attends to; None: all."""

    def exchange(
        self,
        layer: int,
        key: Float[Tensor, "batch kv_heads fed dim"],
        value: Float[Tensor, "batch kv_heads fed dim"],
    ) -> tuple[Float[Tensor, "batch kv_heads positions dim"], Float[Tensor, "batch kv_heads positions dim"]]:
        """Write these keys and values of a layer; returns those of all positions."""
        kv = self.kv
        if layer == len(kv.layers):
            shape = (*kv.valid.shape, key.shape[1], key.shape[3])
            kv.layers.append((key.new_zeros(shape), value.new_zeros(shape)))
        stored = kv.layers[layer]
        for store, new in zip(stored, (key, value)):
            new = new.transpose(1, 2).flatten(0, 1)
            new = new if self.fed is None else new[self.fed]
            if kv.similarity is not None and store is stored[1]:
                alike = F.cosine_similarity(store.flatten(0, 1)[self.places].flatten(1), new.flatten(1), dim=-1)
                sums = kv.similarity.view(-1)
                sums[self.places] = alike.to(sums.dtype) + (sums[self.places] if layer else 0.0)
            store.flatten(0, 1).index_copy_(0, self.places, new)
        keys, values = (store[:, : self.seq] if kv.rows is None else store[kv.rows, : self.seq] for store in stored)
        return keys.transpose(1, 2), values.transpose(1, 2)


@dataclass
class KeyValues:
    """Keys and values of every layer for rows of up to `seq` positions. For inference: no gradient passes through.

    `layers` fills at the first forward, in the dtype of the model.
    """

    valid: Bool[Tensor, "rows seq"]
    """Which positions have been fed."""
    layers: list[tuple[Float[Tensor, "rows seq kv_heads dim"], Float[Tensor, "rows seq kv_heads dim"]]] = field(
        default_factory=list
    )
    rows: Int64[Tensor, " batch"] | None = None
    """Rows that the next forward feeds, see `of`; None: all."""
    similarity: Float64[Tensor, "rows seq"] | None = None
    """If given, each forward notes here, where it feeds, the cosine of the new and the stored values, summed over the
    layers: the lower, the more has changed since the position was fed before."""

    @staticmethod
    def empty(rows: int, seq: int, device: torch.device | str = "cpu") -> KeyValues:
        """A store that holds nothing yet."""
        return KeyValues(torch.zeros((rows, seq), dtype=torch.bool, device=device))

    def of(self, rows: Int64[Tensor, " batch"]) -> KeyValues:
        """The same store, for a forward of these rows only."""
        assert self.rows is None, "rows of rows"
        return KeyValues(self.valid, self.layers, rows, self.similarity)

    def keep(self, rows: Int64[Tensor, " batch"], seq: int | None = None) -> KeyValues:
        """A store of these rows and their first `seq` positions only."""
        layers = [(keys[rows, :seq], values[rows, :seq]) for keys, values in self.layers]
        similarity = None if self.similarity is None else self.similarity[rows, :seq].contiguous()
        return KeyValues(self.valid[rows, :seq], layers, similarity=similarity)

    def feeding(
        self,
        position_ids: Int[Tensor, "batch fed"],
        real: Bool[Tensor, "batch fed"] | None,
        block_size: int | None,
    ) -> Feeding:
        """Mark these positions as valid and say who attends to whom. Raises ValueError if they do not fit the store."""
        batch, seq = len(self.valid) if self.rows is None else len(self.rows), self.valid.shape[1]
        first, last = (int(bound) for bound in position_ids.aminmax())
        if position_ids.shape[0] != batch or first < 0 or last >= seq:
            raise ValueError(
                f"position_ids has shape {list(position_ids.shape)} and runs from {first} to {last}; the store has "
                f"{batch} rows of positions 0 .. {seq - 1}"
            )
        rows = torch.arange(batch, device=position_ids.device) if self.rows is None else self.rows
        places = (rows[:, None] * seq + position_ids).flatten()
        fed = None
        if real is not None and not bool(real.all()):
            fed = real.flatten().nonzero()[:, 0]
            places = places[fed]
        self.valid.view(-1)[places] = True
        if block_size is not None:  # later blocks are out of sight
            seq = min(seq, (last // block_size + 1) * block_size)
        mask = (self.valid[:, :seq] if self.rows is None else self.valid[self.rows, :seq])[:, None, None, :]
        if block_size is not None and first // block_size < last // block_size:
            key_block = torch.arange(seq, device=position_ids.device) // block_size
            mask = mask & ((position_ids // block_size)[:, None, :, None] >= key_block)
        unmasked = bool(mask.all())
        return Feeding(self, fed, places, seq, None if unmasked else mask.expand(-1, -1, position_ids.shape[1], -1))


def fed_predecessor(
    position_ids: Int[Tensor, "batch fed"], wanted: Bool[Tensor, "batch fed"] | None
) -> Int64[Tensor, "batch fed"]:
    """Index, among the fed tokens, of the one at the position before; position 0 has itself. Positions ascend.

    This is where a model with shifted logits keeps its prediction of a token. Raises ValueError if it was not fed for a
    `wanted` token (None: all).
    """
    index = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
    before = (index - 1).clamp(min=0)
    follows = position_ids.gather(1, before) == position_ids - 1
    missing = ~follows & (position_ids > 0)
    if wanted is not None:
        missing = missing & wanted
    if bool(missing.any()):
        raise ValueError(
            "the logits of this model are shifted: the prediction of a token is computed at the position before it, so "
            "feed that one too, directly before the token"
        )
    return torch.where(follows, before, index)
