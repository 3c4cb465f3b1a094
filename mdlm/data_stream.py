"""Streaming: rows of text too large to tokenise beforehand, in an order that no number of processes or workers changes.

The stream is `lanes` independent streams laid together: row `r` is the next row of lane `r % lanes`. A lane reads its
own shards of the source (shard i belongs to lane `i % lanes`) or, where there are fewer shards than lanes, every
`lanes`-th record of all of them. It goes through its documents again and again, with its shards in another order in
every epoch, and what is left of one epoch joins the next: nothing is dropped. A process only tokenises the lanes its
rows lie in, so `lanes` should be a multiple of processes times workers. A lane without any document is an error.

Shuffling: each lane collects blocks of `shuffle_buffer / lanes` rows and permutes each by a hash of (seed, lane, block
number).

Position: a lane stands at the number of its next row and, for the block that row is in, the epoch, shard, record and
token where the block begins. With it, resuming reads one block again; without it, everything from the start is read and
tokenised again, to the same rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from mdlm.data_encode import encode_documents, is_blank, split_draw
from mdlm.data_pack import Packing, Row, Tokens, permutation
from mdlm.readers import Document, Source

_SHARD_ORDER, _BLOCK_ORDER = 3, 4  # purposes a permutation is keyed by
_GROUP_DOCUMENTS, _GROUP_CHARACTERS = 32, 1 << 18


class Cursor(NamedTuple):
    """A token of a lane's endless text: its epoch, the place of its shard in the epoch's order, record, and token."""

    epoch: int = 0
    shard: int = 0
    record: int = 0
    token: int = 0


class LaneState(NamedTuple):
    """Where a lane stands: the number of its next row, and where the block that row belongs to begins."""

    row: int = 0
    block: Cursor = Cursor()


@dataclass(frozen=True)
class Lane:
    """One of `lanes` streams; `rows(state)` yields its rows for ever, each with the state after it.

    `held_out`: documents whose `split_draw` is below it belong to validation and are passed over.
    """

    source: Source
    tokenizer: PreTrainedTokenizerBase
    lane: int
    lanes: int
    seq_len: int
    packing: Packing
    shuffle: bool
    seed: int
    block_rows: int
    held_out: float

    def rows(self, state: LaneState) -> Iterator[tuple[Row, LaneState]]:
        """Rows from `state` on; raises ValueError where the lane has no document."""
        size = self.block_rows if self.shuffle else 1
        number, skip = divmod(state.row, size)
        begin = state.block
        windows = self._windows(begin)
        while True:
            block = list(islice(windows, size))
            order = permutation(size, self.seed, self.lane, number, _BLOCK_ORDER) if size > 1 else np.zeros(1, np.int64)
            after = block[-1][1]
            for i in range(skip, size):
                done = number * size + i + 1
                yield block[int(order[i])][0], LaneState(done, after if i + 1 == size else begin)
            number, skip, begin = number + 1, 0, after

    def _windows(self, start: Cursor) -> Iterator[tuple[Row, Cursor]]:
        """Rows in reading order, each with the place where the next one begins."""
        pending: deque[tuple[Tokens, Cursor]] = deque()
        ready = 0
        for ids, cursor in self._encoded(start._replace(token=0)):
            ids = ids[start.token :] if cursor[:3] == start[:3] else ids
            cursor = start if cursor[:3] == start[:3] else cursor
            if self.packing == "none":
                yield Row(ids[: self.seq_len], np.zeros(1, np.int64)), _behind(cursor)
                continue
            pending.append((ids, cursor))
            ready += len(ids)
            while ready >= self.seq_len:
                ready -= self.seq_len
                yield self._take(pending)

    def _take(self, pending: deque[tuple[Tokens, Cursor]]) -> tuple[Row, Cursor]:
        pieces, starts, filled = [], [], 0
        after = Cursor()
        while filled < self.seq_len:
            ids, cursor = pending.popleft()
            piece = ids[: self.seq_len - filled]
            pieces.append(piece)
            starts.append(filled)
            filled += len(piece)
            if len(piece) < len(ids):
                after = cursor._replace(token=cursor.token + len(piece))
                pending.appendleft((ids[len(piece) :], after))
            else:
                after = _behind(cursor)
        return Row(np.concatenate(pieces), np.asarray(starts)), after

    def _encoded(self, start: Cursor) -> Iterator[tuple[Tokens, Cursor]]:
        group: list[tuple[Document, Cursor]] = []
        size = 0
        for document, cursor in self._documents(start):
            group.append((document, cursor))
            size += len(document.text)
            if len(group) == _GROUP_DOCUMENTS or size >= _GROUP_CHARACTERS:
                encoded = encode_documents(self.tokenizer, [d for d, _ in group])
                yield from zip(encoded, (c for _, c in group))
                group, size = [], 0

    def _documents(self, start: Cursor) -> Iterator[tuple[Document, Cursor]]:
        shards = np.arange(self.source.num_shards)
        by_shard = len(shards) >= self.lanes
        shards = shards[self.lane :: self.lanes] if by_shard else shards
        epoch, first, record = start.epoch, start.shard, start.record
        while True:
            found = 0
            order = shards[permutation(len(shards), self.seed, epoch, _SHARD_ORDER)] if self.shuffle else shards
            for place in range(first, len(order)):
                shard = int(order[place])
                for document in self.source.read(shard, record):
                    mine = by_shard or (document.record + shard) % self.lanes == self.lane
                    if mine and not is_blank(document.text) and split_draw(document) >= self.held_out:
                        found += 1
                        yield document, Cursor(epoch, place, document.record)
                record = 0
            if not found and (first, start.record) == (0, 0):
                raise ValueError(
                    f"{self.source.name}: lane {self.lane} of {self.lanes} found no document with text to train on; "
                    "set lanes to a smaller number (1 always works where there is any), or do not stream"
                )
            epoch, first = epoch + 1, 0
            start = Cursor(epoch)


def _behind(cursor: Cursor) -> Cursor:
    return cursor._replace(record=cursor.record + 1, token=0)


@dataclass(frozen=True)
class LaneRows(IterableDataset):
    """Rows `start_row + rank + j * world`, j = 0, 1, ..., each with its lane and the lane's state after it.

    Under a `DataLoader` with n workers, worker w makes those with j % n == w, so that taking turns gives their order.
    """

    lane: Lane
    start_row: int
    rank: int
    world: int
    states: dict[int, LaneState]

    def __iter__(self) -> Iterator[tuple[Row, int, LaneState] | Exception]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        number = self.start_row + self.rank + worker * self.world
        lanes = self.lane.lanes
        open_lanes: dict[int, tuple[Iterator[tuple[Row, LaneState]], int]] = {}
        try:
            while True:
                lane, wanted = number % lanes, number // lanes
                if lane not in open_lanes:
                    state = self.states.get(lane, LaneState())
                    state = state if state.row <= wanted else LaneState()
                    open_lanes[lane] = replace(self.lane, lane=lane).rows(state), state.row
                rows, at = open_lanes[lane]
                row, state = next(islice(rows, wanted - at, None))
                open_lanes[lane] = rows, wanted + 1
                yield row, lane, state
                number += self.world * workers
        except (ValueError, FileNotFoundError) as error:
            yield error


def check_workers(workers: int, lanes: int, world: int) -> None:
    """ValueError unless `workers` processes can each serve lanes of their own."""
    cycle = lanes // math.gcd(lanes, world)
    if workers and cycle % workers:
        fit = [n for n in range(1, cycle + 1) if cycle % n == 0]
        raise ValueError(
            f"workers={workers} does not fit: with lanes={lanes} and {world} processes each process has {cycle} lanes, "
            f"to be shared evenly by {' or '.join(map(str, fit))} workers; workers never changes the rows, lanes does"
        )
