"""Rows of fine-tuning examples: whole examples, one or several to a row, and the end tokens that fill a row up.

    packing="none"        one example per row
    packing="documents"   several whole examples per row (best fit, longest first); each sees only itself

Which examples share a row is decided once, so an epoch has the same number of rows every time; each epoch gives the
rows another order. With `pad_supervision` `eos_to_batch` or `eos_to_length` a row goes on with end tokens that are
real: attended to and learnt. "Batch" is the global batch, a block of consecutive row numbers, so a row's length does
not depend on how that batch is split over processes and micro-batches. Read first: `chat.py`; next: `data_batches.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

import numpy as np

from mdlm.chat import Example, ExampleEncoder, PadSupervision
from mdlm.data_encode import Groups, is_blank, run_workers, split_draw
from mdlm.data_pack import ROW_ORDER, Ints, PackedRows, Packing, Row, TokenStore, permutation
from mdlm.readers import Document, Source


@dataclass(frozen=True)
class ExampleCounts:
    """What became of the records: how many there were, were cut, and were dropped for which reason."""

    records: int
    truncated: int
    dropped: dict[str, int]


@dataclass(frozen=True)
class Supervision:
    """What training learns from, counted before it starts. Shares are of the tokens in the loss, in one epoch."""

    examples: int
    tokens: int
    supervised: int
    eos_padding: int
    truncated: int
    dropped: dict[str, int]

    def __str__(self) -> str:
        learnt = self.supervised + self.eos_padding
        gone = "; ".join(f"{n} dropped ({why})" for why, n in sorted(self.dropped.items())) or "none dropped"
        return (
            f"supervision: {learnt} tokens in the loss per epoch, of which {self.eos_padding / max(learnt, 1):.1%} are "
            f"EOS padding; {self.examples} examples of {self.tokens / max(self.examples, 1):.1f} tokens on average, "
            f"{self.supervised / max(self.tokens, 1):.1%} of them answer; {gone}; {self.truncated} truncated"
        )


@dataclass(frozen=True)
class _Part:
    kept: list[tuple[Example, float]]
    truncated: int
    dropped: Counter[str]


def _encode(encoder: ExampleEncoder, group: list[Document]) -> _Part:
    usable = [d for d in group if not is_blank(d.text)]
    examples = encoder(usable)
    kept = [(e, split_draw(d)) for e, d in zip(examples, usable) if e.dropped is None]
    dropped = Counter(e.dropped for e in examples if e.dropped is not None)
    return _Part(kept, sum(e.truncated for e, _ in kept), dropped)


def encode_examples(
    source: Source, encoder: ExampleEncoder, workers: int = 0
) -> tuple[TokenStore, Ints, ExampleCounts]:
    """The examples of every record that can be used, each one's number of EOS behind its first, and what became of all.

    Raises ValueError naming the row of a bad record, or if no record is left.
    """
    parts: list[_Part] = []
    for part in run_workers(Groups(source, partial(_encode, encoder)), workers):
        if isinstance(part, Exception):
            raise part
        parts.append(part)
    kept = [pair for part in parts for pair in part.kept]
    dropped = sum((part.dropped for part in parts), Counter[str]())
    counts = ExampleCounts(len(kept) + dropped.total(), sum(p.truncated for p in parts), dict(dropped))
    if not kept:
        why = "; ".join(f"{n}: {reason}" for reason, n in sorted(dropped.items()))
        raise ValueError(
            f"{source.name}: no example is left of {counts.records} records"
            + (f" ({why}); raise seq_len or shorten the examples" if why else "; there are no records")
        )
    examples = [example for example, _ in kept]
    lengths = np.asarray([len(e.ids) for e in examples], dtype=np.int64)
    store = TokenStore(
        values=(np.concatenate([e.ids for e in examples]),),
        offsets=(np.concatenate([[0], np.cumsum(lengths)]),),
        text_bytes=np.asarray([e.text_bytes for e in examples], dtype=np.int64),
        draw=np.asarray([draw for _, draw in kept]),
        supervised=(np.concatenate([e.supervised for e in examples]),),
    )
    return store, np.asarray([e.eos_padding for e in examples], dtype=np.int64), counts


def best_fit(lengths: Ints, capacity: int) -> list[list[int]]:
    """Items into bins of `capacity`, longest first, each into the fullest bin that has room: indices of each bin.

    Raises ValueError for an item longer than `capacity`.
    """
    if len(lengths) and int(lengths.max()) > capacity:
        raise ValueError(f"an example has {int(lengths.max())} tokens, a row takes {capacity}")
    bins: list[list[int]] = []
    room: list[list[int]] = [[] for _ in range(capacity + 1)]
    any_room = np.zeros(capacity + 1, dtype=bool)
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        at = length + int(any_room[length:].argmax())
        if any_room[at]:
            number = room[at].pop()
            any_room[at] = bool(room[at])
            bins[number].append(item)
        else:
            at, number = capacity, len(bins)
            bins.append([item])
        room[at - length].append(number)
        any_room[at - length] = True
    return bins


class ExampleRows(PackedRows):
    """Rows of whole examples, numbered without end: row `r` lies in epoch `r // rows_per_epoch`.

    Args:
        documents: numbers of the examples to use.
        fill: `eos_to_batch` and `eos_to_length` go on with learnt end tokens; anything else fills nothing up.
        eos_token_id: what rows are filled up with.
        shuffle, seed, limit: as in `PackedRows`.
    """

    def __init__(
        self,
        store: TokenStore,
        documents: Ints,
        seq_len: int,
        packing: Packing,
        *,
        fill: PadSupervision,
        eos_token_id: int,
        shuffle: bool = False,
        seed: int = 0,
        limit: int | None = None,
    ) -> None:
        self.store, self.documents, self.seq_len, self.packing = store, documents, seq_len, packing
        self._fill, self._eos, self._shuffle, self._seed = fill, eos_token_id, shuffle, seed
        lengths = store.lengths[documents]
        self.tokens = int(lengths.sum())
        together = best_fit(lengths, seq_len) if packing == "documents" else [[i] for i in range(len(documents))]
        self._bins = [documents[items] for items in together]
        self._sizes = np.asarray([int(lengths[items].sum()) for items in together], dtype=np.int64)
        self._available = len(self._bins)
        self.rows_per_epoch = self._available if limit is None else min(limit, self._available)
        self._epoch = -1
        self._row_order: Ints = np.zeros(0, np.int64)
        self._block: tuple[int, int, int] | None = None

    def row(self, number: int, global_batch: int = 1) -> Row:
        """Row `number`, a pure function of the arguments here and at construction; see `fill` for `global_batch`."""
        length = self._target(number, global_batch)
        items = self._bins[self._bin(number)]
        ids = np.concatenate([self.store.tokens(int(d)) for d in items])
        supervised = np.concatenate([self.store.supervised_tokens(int(d)) for d in items])
        starts = np.cumsum([0, *self.store.lengths[items[:-1]]])
        more = max(0, length - len(ids))
        ids = np.concatenate([ids, np.full(more, self._eos, np.int32)])
        return Row(ids, starts, np.concatenate([supervised, np.ones(more, bool)]))

    def fill_tokens(self, global_batch: int) -> int:
        """How many end tokens fill up the rows of the first epoch."""
        if self._fill not in ("eos_to_batch", "eos_to_length"):
            return 0
        rows = range(self.rows_per_epoch)
        return sum(self._target(n, global_batch) - self._size(n) for n in rows)

    def _size(self, number: int) -> int:
        return int(self._sizes[self._bin(number)])

    def _target(self, number: int, global_batch: int) -> int:
        if self._fill == "eos_to_length":
            return self.seq_len
        if self._fill != "eos_to_batch":
            return 0
        block = number // global_batch
        if self._block is None or self._block[:2] != (block, global_batch):
            longest = max(self._size(n) for n in range(block * global_batch, (block + 1) * global_batch))
            self._block = (block, global_batch, longest)
        return self._block[2]

    def _bin(self, number: int) -> int:
        epoch, place = divmod(number, self.rows_per_epoch)
        self._lay_out(epoch if self._shuffle else 0)
        return int(self._row_order[place * self._available // self.rows_per_epoch])

    def _lay_out(self, epoch: int) -> None:
        if epoch != self._epoch:
            shuffled = self._shuffle
            self._row_order = (
                permutation(self._available, self._seed, epoch, ROW_ORDER) if shuffled else np.arange(self._available)
            )
            self._epoch = epoch


def supervision(rows: ExampleRows, eos_padding: Ints, counts: ExampleCounts) -> Supervision:
    """What one epoch of `rows` learns from, without what fills rows up (`fill_tokens`)."""
    supervised = sum(int(rows.store.supervised_tokens(int(d)).sum()) for d in rows.documents)
    padding = int(eos_padding[rows.documents].sum())
    return Supervision(
        examples=len(rows.documents),
        tokens=rows.tokens,
        supervised=supervised - padding,
        eos_padding=padding,
        truncated=counts.truncated,
        dropped=counts.dropped,
    )
