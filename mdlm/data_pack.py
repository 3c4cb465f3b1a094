"""Tokenised documents cut into rows of a fixed length: `TokenStore`, `PackedRows`, `Batch`.

Every document carries an end token behind its last token. Documents are laid end to end and the line is cut every
`seq_len` tokens, so a row may begin and end inside a document:

    packing="stream"     the row is one stretch of text and attention runs across documents (how MDLM pre-trains)
    packing="documents"  `position_ids` restart where a document begins in the row; attention stays inside a document
    packing="none"       one document per row: cut at `seq_len` or padded

In training, what is left behind the last full row is dropped; in validation it becomes a padded row, so that every
token is evaluated once. For each epoch the documents are laid out anew in another order and the rows are shuffled: both
are permutations computed from (seed, epoch) alone. Read next: `data.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from mdlm.rng import hash_counters

Packing = Literal["stream", "documents", "none"]
Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]
_DOCUMENT_ORDER, ROW_ORDER = 1, 2  # purposes a permutation is keyed by


@dataclass(frozen=True)
class Batch:
    """Rows of clean tokens, ready to be noised.

    `maskable` says which positions may be noised (padding and prompts may not). `rows` are the global numbers of the
    rows in their stream: all randomness is keyed by them. `attention_mask` is True on real tokens; None = all real.
    `position_ids` restart at 0 where a packed document begins; None = every row is one document.
    """

    input_ids: Int64[Tensor, "batch seq"]
    maskable: Bool[Tensor, "batch seq"]
    rows: Int64[Tensor, " batch"]
    attention_mask: Bool[Tensor, "batch seq"] | None = None
    position_ids: Int64[Tensor, "batch seq"] | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch with every tensor on `device`."""
        optional = (self.attention_mask, self.position_ids)
        return Batch(
            self.input_ids.to(device, non_blocking=non_blocking),
            self.maskable.to(device, non_blocking=non_blocking),
            self.rows.to(device, non_blocking=non_blocking),
            *(None if x is None else x.to(device, non_blocking=non_blocking) for x in optional),
        )


@dataclass(frozen=True)
class Row:
    """At most `seq_len` tokens of one row and the places in it where documents begin (or go on: the first is 0).

    `supervised` says which tokens may be noised and count in the loss; None = all.
    """

    ids: Tokens
    starts: Ints
    supervised: npt.NDArray[np.bool_] | None = None

    @property
    def counted(self) -> Tokens:
        """The tokens that count."""
        return self.ids if self.supervised is None else self.ids[self.supervised]


_FILLER = Row(np.zeros(0, np.int32), np.zeros(0, np.int64))


def make_batch(rows: Sequence[Row], numbers: Sequence[int], seq_len: int, packing: Packing, pad_token_id: int) -> Batch:
    """Rows padded on the right to `seq_len` and stacked. An `attention_mask` is there only if something is padded.

    With packing "documents" the padding counts as one more document, so that real tokens never attend to it.
    """
    ids = np.full((len(rows), seq_len), pad_token_id, dtype=np.int64)
    real = np.zeros((len(rows), seq_len), dtype=bool)
    maskable = np.zeros((len(rows), seq_len), dtype=bool)
    positions = np.tile(np.arange(seq_len, dtype=np.int64), (len(rows), 1))
    for i, row in enumerate(rows):
        size = len(row.ids)
        ids[i, :size] = row.ids
        real[i, :size] = True
        maskable[i, :size] = True if row.supervised is None else row.supervised
        for start in (*row.starts, size):
            positions[i, start:] = np.arange(seq_len - start)
    padded = packing == "none" or not real.all()
    return Batch(
        input_ids=torch.from_numpy(ids),
        maskable=torch.from_numpy(maskable),
        rows=torch.tensor(numbers, dtype=torch.int64),
        attention_mask=torch.from_numpy(real) if padded else None,
        position_ids=torch.from_numpy(positions) if packing == "documents" else None,
    )


def filler_row() -> Row:
    """A row of padding alone: brings processes to the same number of batches and changes no result."""
    return _FILLER


def permutation(size: int, *key: int) -> Ints:
    """A permutation of range(size) that depends on the integers `key` and on nothing else."""
    return np.argsort(hash_counters(*key, torch.arange(size)).numpy(), kind="stable")


@dataclass(frozen=True)
class TokenStore:
    """Token ids of many documents, each with its end token, in a few flat arrays that may be memory-mapped.

    Document `d` of chunk `c` is `values[c][offsets[c][d] : offsets[c][d + 1]]`. Per document: `text_bytes`, the UTF-8
    bytes of its text, and `draw`, a number in [0, 1) that says on which side of the validation split it falls.
    `supervised` lies beside `values` and says which tokens count; None = all.
    """

    values: tuple[Tokens, ...]
    offsets: tuple[Ints, ...]
    text_bytes: Ints
    draw: npt.NDArray[np.float64]
    supervised: tuple[npt.NDArray[np.bool_], ...] | None = None
    lengths: Ints = field(init=False)
    first: Ints = field(init=False)

    def __post_init__(self) -> None:
        lengths = [np.diff(o).astype(np.int64) for o in self.offsets]
        object.__setattr__(self, "lengths", np.concatenate([*lengths, np.zeros(0, np.int64)]))
        object.__setattr__(self, "first", np.cumsum([0, *(len(n) for n in lengths)]))

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> Tokens:
        """Tokens `start` to `stop` of a document."""
        chunk, low, high = self._place(document)
        return self.values[chunk][low:high][start:stop]

    def supervised_tokens(self, document: int) -> npt.NDArray[np.bool_]:
        """Which tokens of a document count."""
        chunk, low, high = self._place(document)
        return np.ones(high - low, bool) if self.supervised is None else self.supervised[chunk][low:high]

    def _place(self, document: int) -> tuple[int, int, int]:
        chunk = int(np.searchsorted(self.first, document, side="right")) - 1
        low, high = self.offsets[chunk][document - self.first[chunk] :][:2]
        return chunk, int(low), int(high)


class PackedRows:
    """The rows of some documents of a store, numbered without end: row `r` lies in epoch `r // rows_per_epoch`.

    Args:
        documents: numbers of the documents to use, in the order to use them.
        pad_tail: keep the last, shorter row of an epoch (validation) instead of dropping it (training).
        shuffle: another order of documents and rows in every epoch; otherwise every epoch is the same.
        limit: at most this many rows per epoch, spread evenly over all there are.

    Raises:
        ValueError: if the documents do not fill one row.
    """

    def __init__(
        self,
        store: TokenStore,
        documents: Ints,
        seq_len: int,
        packing: Packing,
        *,
        pad_tail: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        limit: int | None = None,
    ) -> None:
        self.store, self.documents, self.seq_len, self.packing = store, documents, seq_len, packing
        self._shuffle, self._seed = shuffle, seed
        self.tokens = int(store.lengths[documents].sum())
        if packing == "none":
            self._available = len(documents)
        else:
            self._available = (self.tokens + (seq_len - 1 if pad_tail else 0)) // seq_len
        if self._available == 0:
            raise ValueError(
                f"{len(documents)} documents hold {self.tokens} tokens, and one row takes {seq_len}: give more text, "
                "a smaller seq_len, or packing='none', which pads"
            )
        self.rows_per_epoch = self._available if limit is None else min(limit, self._available)
        self._epoch = -1
        self._order, self._ends, self._row_order = self.documents, np.zeros(0, np.int64), np.zeros(0, np.int64)

    def row(self, number: int, global_batch: int = 1) -> Row:
        """Row `number` of the endless sequence; a pure function of the arguments the object was made with.

        `global_batch` makes no difference here, but to the rows of `data_examples.ExampleRows`.
        """
        epoch, place = divmod(number, self.rows_per_epoch)
        self._lay_out(epoch if self._shuffle else 0)
        place = int(self._row_order[place * self._available // self.rows_per_epoch])
        if self.packing == "none":
            return Row(self.store.tokens(int(self._order[place]), 0, self.seq_len), np.zeros(1, np.int64))
        start, stop = place * self.seq_len, min((place + 1) * self.seq_len, self.tokens)
        pieces, starts = [], []
        at = start
        index = int(np.searchsorted(self._ends, start, side="right"))
        while at < stop:
            document, end = int(self._order[index]), int(self._ends[index])
            begin = end - int(self.store.lengths[document])
            pieces.append(self.store.tokens(document, at - begin, min(stop, end) - begin))
            starts.append(at - start)
            at, index = end, index + 1
        return Row(np.concatenate(pieces), np.asarray(starts))

    def _lay_out(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        if self._shuffle:
            self._order = self.documents[permutation(len(self.documents), self._seed, epoch, _DOCUMENT_ORDER)]
            self._row_order = permutation(self._available, self._seed, epoch, ROW_ORDER)
        else:
            self._row_order = np.arange(self._available)
        self._ends = np.cumsum(self.store.lengths[self._order])
        self._epoch = epoch
