"""Text in, packed `Batch`es out: which tokens stand in row `r` of the training stream, on any number of processes.

**Global order.** The training stream is one endless sequence of rows, numbered from 0. Row `r` holds the same tokens
for any number of processes, any gradient accumulation and any number of workers; process `rank` of `world` takes rows
`start_row + j * world + rank`, j = 0, 1, ..., so that micro-batch `m` of all processes together is the block of
`world * batch_size` consecutive rows after `start_row + m * world * batch_size`. Nothing is repeated or dropped between
processes, and the position to resume from is one row number.

Read next: `objective.py`, which noises a `Batch`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

Packing = Literal["stream", "documents", "none"]
Format = Literal["auto", "text", "lines", "jsonl", "parquet", "saved", "hub"]


@dataclass(frozen=True)
class Batch:
    """Rows of clean tokens, ready to be noised.

    `maskable` says which positions may be noised (padding and prompts may not). `rows` are the global numbers of the
    rows in their stream: all randomness is keyed by them. `attention_mask` is True on real tokens; None = all real.
    `position_ids` restart at 0 where a packed document begins; None = every row is one document.
    """

    input_ids: Int64[Tensor, "batch seq"]
    maskable: Bool[Tensor, "batch seq"]
    rows: Int64[Tensor, "batch"]
    attention_mask: Bool[Tensor, "batch seq"] | None = None
    position_ids: Int64[Tensor, "batch seq"] | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch with every tensor on `device`."""

        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device, non_blocking=non_blocking)

        return Batch(
            self.input_ids.to(device, non_blocking=non_blocking),
            self.maskable.to(device, non_blocking=non_blocking),
            self.rows.to(device, non_blocking=non_blocking),
            move(self.attention_mask),
            move(self.position_ids),
        )


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it is cut into rows."""

    source: str = "builtin"
    """`builtin`, a file, a folder, a glob, a folder written by `Dataset.save_to_disk`, or the name of a hub dataset."""
    format: Format = "auto"
    text_column: str = "text"
    name: str | None = None
    """Configuration ("subset") of a hub dataset."""
    split: str = "train"
    validation_source: str | None = None
    validation_split: str | None = None
    validation_fraction: float = 0.05
    validation_rows: int | None = None
    streaming: bool = False
    seq_len: int = 256
    packing: Packing = "stream"
    shuffle: bool = True
    seed: int = 0
    shuffle_buffer: int = 1024
    lanes: int = 8
    workers: int = 0


class BatchStream:
    """Endless iterator of training batches of one process; `row` is the global row at which the next batch starts."""

    row: int

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Batch:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """JSON-able position of the next batch: {"row": ...} and, when streaming, where each lane stands."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop worker processes."""


class Data:
    """Training and validation rows of one source; made by `open_data`."""

    config: DataConfig
    report: str
    fingerprint: str
    validation_tokens: int
    validation_bytes: int
    rows_per_epoch: int | None

    def train_batches(
        self, batch_size: int, *, start_row: int = 0, rank: int = 0, world: int = 1, state: dict[str, Any] | None = None
    ) -> BatchStream:
        """Endless micro-batches for process `rank` of `world`, from global row `start_row` on."""
        raise NotImplementedError

    def validation_batches(self, batch_size: int, *, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Every validation token once over all processes; the same number of batches of the same shape on each."""
        raise NotImplementedError


def open_data(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Data:
    """Read, tokenise (map-style) or prepare to stream the text `config` names."""
    raise NotImplementedError


def training_texts(config: DataConfig) -> Iterator[str]:
    """The training documents as text, without those held out: what a tokenizer may be trained on."""
    raise NotImplementedError
