"""Rows handed out as batches: `Data`, its endless training stream, its validation batches, and the position to resume.

Read first: `data.py`, for the order of the rows and how to resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jaxtyping import Int64
from torch import Tensor

from mdlm.data_encode import run_workers
from mdlm.data_examples import ExampleRows, Supervision
from mdlm.data_pack import Batch, PackedRows, Row, Tokens, filler_row, make_batch
from mdlm.data_source import DataConfig
from mdlm.data_stream import Cursor, Lane, LaneRows, LaneState, check_workers

_PREFETCHED_ROWS = 64


def count_bytes(batch: Batch, table: Int64[Tensor, " vocab"]) -> int:
    """UTF-8 bytes of the tokens of a batch that count (`maskable`), by a `token_bytes` table."""
    return int(table[batch.input_ids[batch.maskable].to(table.device)].sum())


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The `state_dict`s of all processes at one step as one, with which any number of processes can go on."""
    if not states or any((s["row"], s["fingerprint"]) != (states[0]["row"], states[0]["fingerprint"]) for s in states):
        raise ValueError("states to merge must be of the same data at the same row, and at least one")
    lanes: dict[str, Any] = {}
    for state in states:
        for lane, position in state["lanes"].items():
            if lane not in lanes or position[0] > lanes[lane][0]:
                lanes[lane] = position
    return {**states[0], "lanes": lanes}


class BatchStream:
    """Endless iterator of training batches of one process; `row` is the global row at which the next batch begins."""

    def __init__(
        self, data: Data, batch_size: int, row: int, rank: int, world: int, global_batch: int | None = None
    ) -> None:
        self.row = row
        self._global_batch = batch_size * world if global_batch is None else global_batch
        self._data, self._batch_size, self._rank, self._world = data, batch_size, rank, world

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Batch:
        numbers = range(self.row + self._rank, self.row + self._rank + self._batch_size * self._world, self._world)
        rows = [self._row(number) for number in numbers]
        self.row += self._batch_size * self._world
        return self._data.make_batch(rows, numbers)

    def _row(self, number: int) -> Row:
        assert isinstance(self._data.train, PackedRows)
        return self._data.train.row(number, self._global_batch)

    def state_dict(self) -> dict[str, Any]:
        """Position of the next batch, fit for JSON: {"row", "fingerprint", "lanes"}; no lanes unless streaming."""
        return {"row": self.row, "fingerprint": self._data.fingerprint, "lanes": {}}

    def close(self) -> None:
        """Stop worker processes and close files; the stream cannot be read afterwards."""


class _LaneStream(BatchStream):
    def __init__(
        self, data: Data, batch_size: int, row: int, rank: int, world: int, states: dict[int, LaneState]
    ) -> None:
        super().__init__(data, batch_size, row, rank, world)
        assert isinstance(data.train, Lane)
        workers = data.config.workers
        check_workers(workers, data.config.lanes, world)
        self._states = dict(states)
        self._items = run_workers(LaneRows(data.train, row, rank, world, states), workers, _PREFETCHED_ROWS)

    def _row(self, number: int) -> Row:
        item = next(self._items)
        if isinstance(item, Exception):
            self.close()  # at once: left to the garbage collector, worker processes are slow to end
            raise item
        row, lane, state = item
        assert lane == number % self._data.config.lanes, "workers out of turn"
        self._states[lane] = state
        return row

    def state_dict(self) -> dict[str, Any]:
        lanes = {str(lane): [state.row, list(state.block)] for lane, state in sorted(self._states.items())}
        return {**super().state_dict(), "lanes": lanes}

    def close(self) -> None:
        self._items = iter(())


@dataclass(frozen=True)
class Report:
    """What was read. Counts of the training text are None when it is streamed."""

    source: str
    documents: int | None
    blank: int
    tokens: int | None
    rows_per_epoch: int | None
    cut: int
    validation_documents: int
    validation_tokens: int
    supervision: Supervision | None = None
    """What is learnt from examples, where records are not plain text."""

    def __str__(self) -> str:
        train = (
            "training text is streamed"
            if self.documents is None
            else f"{self.documents} documents, {self.tokens} tokens, {self.rows_per_epoch} rows per epoch"
        )
        blank = f"; {self.blank} documents of whitespace alone were left out" if self.blank else ""
        cut = f"; {self.cut} documents are longer than a row and cut" if self.cut else ""
        held = f"{self.validation_documents} documents, {self.validation_tokens} tokens"
        return f"{self.source}: {train}; validation {held}{blank}{cut}" + (
            "" if self.supervision is None else f"\n{self.supervision}"
        )


@dataclass(frozen=True, eq=False)
class Data:
    """Training and validation rows; made by `open_data`.

    `train` is all rows by number, or, when streaming, the pattern of its lanes. `validation` is None if none was asked
    for. `fingerprint` changes with anything that changes the training rows.
    """

    config: DataConfig
    train: PackedRows | Lane
    validation: PackedRows | None
    report: Report
    fingerprint: str
    pad_token_id: int
    token_bytes: Int64[Tensor, " vocab"] = field(repr=False)
    bytes_are_exact: bool

    def report_for(self, global_batch: int) -> Report:
        """`report` for training in global batches of so many rows, which end tokens may fill up."""
        if self.report.supervision is None or not isinstance(self.train, ExampleRows):
            return self.report
        filled = self.report.supervision.eos_padding + self.train.fill_tokens(global_batch)
        return replace(self.report, supervision=replace(self.report.supervision, eos_padding=filled))

    @property
    def rows_per_epoch(self) -> int | None:
        """Training rows in one pass over the text; None when streaming."""
        return self.report.rows_per_epoch

    def make_batch(self, rows: Sequence[Row], numbers: Sequence[int]) -> Batch:
        """Rows stacked to a batch as the configuration has it."""
        return make_batch(rows, numbers, self.config.seq_len, self.config.packing, self.pad_token_id)

    def train_batches(
        self,
        batch_size: int,
        *,
        start_row: int | None = None,
        rank: int = 0,
        world: int = 1,
        state: dict[str, Any] | None = None,
        global_batch: int | None = None,
    ) -> BatchStream:
        """Endless micro-batches for process `rank` of `world`, from row `start_row` (None: of `state`, or 0) on.

        `global_batch`: rows of an optimizer step (None: batch_size * world), which `pad_supervision=eos_to_batch` fills
        up to the longest of them.
        Raises ValueError for a state that other data left, and while streaming wherever the text is at fault.
        """
        _check_split(batch_size, rank, world)
        if state is not None and state["fingerprint"] != self.fingerprint:
            raise ValueError(
                "the saved position belongs to other data: the source, the tokenizer or an option that decides the "
                "rows (seq_len, packing, shuffle, seed, lanes, shuffle_buffer, validation_*) has changed; restore "
                "them, or start without the position"
            )
        if start_row is None:
            start_row = 0 if state is None else state["row"]
        if start_row < 0:
            raise ValueError(f"start_row={start_row} must not be negative")
        if isinstance(self.train, PackedRows):
            return BatchStream(self, batch_size, start_row, rank, world, global_batch)
        saved = {} if state is None else state["lanes"]
        states = {int(lane): LaneState(row, Cursor(*block)) for lane, (row, block) in saved.items()}
        return _LaneStream(self, batch_size, start_row, rank, world, states)

    def validation_batches(self, batch_size: int, *, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Every validation row once over all processes, in a fixed order, numbered from 0.

        All processes get equally many batches of `batch_size` rows: the last are filled up with rows of padding, in
        which nothing is maskable. Raises ValueError if there is no validation text.
        """
        rows = self._validation_rows()
        _check_split(batch_size, rank, world)
        block = batch_size * world
        for start in range(rank, -(-rows.rows_per_epoch // block) * block, block):
            numbers = range(start, start + block, world)
            yield self.make_batch([rows.row(n) if n < rows.rows_per_epoch else filler_row() for n in numbers], numbers)

    @cached_property
    def validation_tokens(self) -> int:
        """Tokens that `validation_batches` evaluates, end tokens included (of examples: those of the answers)."""
        rows = self._validation_rows()
        return sum(len(rows.row(r).counted) for r in range(rows.rows_per_epoch))

    @cached_property
    def validation_bytes(self) -> float:
        """UTF-8 bytes of the tokens that `validation_batches` evaluates: what bits per byte divide by.

        Exact if `bytes_are_exact`, or if all validation text is evaluated; else the bytes of the whole text times the
        share that the `token_bytes` of the evaluated tokens have.
        """
        rows = self._validation_rows()
        evaluated = sum(self._table_sum(rows.row(r).counted) for r in range(rows.rows_per_epoch))
        if self.bytes_are_exact:
            return float(evaluated)
        whole = sum(
            self._table_sum(rows.store.tokens(int(d))[rows.store.supervised_tokens(int(d))]) for d in rows.documents
        )
        text_bytes = int(rows.store.text_bytes[rows.documents].sum())
        return float(text_bytes if evaluated == whole else text_bytes * evaluated / whole)

    def _table_sum(self, ids: Tokens) -> int:
        return int(self.token_bytes.numpy()[ids].sum())

    def _validation_rows(self) -> PackedRows:
        if self.validation is None:
            raise ValueError(
                "there is no validation text: set validation_fraction above 0, validation_split or validation_source"
            )
        return self.validation


def _check_split(batch_size: int, rank: int, world: int) -> None:
    if batch_size < 1 or world < 1 or not 0 <= rank < world:
        raise ValueError(
            f"batch_size={batch_size}, rank={rank}, world={world}: need batch_size >= 1, 0 <= rank < world"
        )
