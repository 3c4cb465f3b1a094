"""Hugging Face datasets: by hub name, saved to disk, or handed over as objects; map-style and streaming.

The text column must hold strings. Read next: `data_encode.py` (map-style), `data_stream.py` (streaming).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mdlm.readers import Column, Document, check_text, take_text

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_READ_ROWS = 64


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder was written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def load_saved(path: Path, split: str) -> Dataset:
    """A dataset saved to disk; of a saved `DatasetDict`, its `split`. ValueError where that is missing or broken."""
    from datasets import DatasetDict, load_from_disk

    if not is_saved_dataset(path):
        raise FileNotFoundError(f"{path}: no dataset written by save_to_disk (no state.json, no dataset_dict.json)")
    try:
        loaded = load_from_disk(str(path))
    except (OSError, KeyError, ValueError) as error:  # json.JSONDecodeError and pyarrow's errors are ValueErrors
        raise ValueError(f"{path}: the saved dataset cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(loaded, DatasetDict):
        return loaded
    if split not in loaded:
        raise ValueError(f"{path}: no split {split!r}; there are {', '.join(loaded)}")
    return loaded[split]


def load_hub(source: str, name: str | None, split: str, streaming: bool) -> Dataset | IterableDataset:
    """`datasets.load_dataset`, with one clear error where name, configuration, split or network are missing."""
    import datasets

    wanted = f"dataset {source!r} (configuration {name!r}, split {split!r})"
    try:
        return datasets.load_dataset(source, name, split=split, streaming=streaming)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{wanted} cannot be loaded: {error}") from error
    except OSError as error:
        raise FileNotFoundError(
            f"{wanted} is no local file or folder and cannot be had from the hub: {type(error).__name__}: {error}. "
            "Check the name and the network, or use source='builtin', which needs neither"
        ) from error


def check_column(dataset: Dataset | IterableDataset, name: str, column: Column) -> None:
    """ValueError unless `column` is there and, if it is one whose type is known, holds strings."""
    from datasets import Value

    names = dataset.column_names
    for wanted in (column,) if isinstance(column, str) else column:
        if names is not None and wanted not in names:
            raise ValueError(f"{name}: no column {wanted!r}; there are {', '.join(names) or 'none'}")
    if dataset.features is not None and isinstance(column, str):
        feature = dataset.features[column]
        if not (isinstance(feature, Value) and feature.dtype in ("string", "large_string")):
            raise ValueError(f"{name}: column {column!r} is {feature}; a string column is needed")


@dataclass(frozen=True)
class DatasetSource:
    """A map-style dataset as a source of one shard."""

    name: str
    dataset: Dataset
    column: Column
    num_shards: int = 1

    def read(self, shard: int, start: int = 0) -> Iterator[Document]:
        """The documents from row `start` on."""
        names = [self.column] if isinstance(self.column, str) else list(self.column)
        part = self.dataset.with_format(None).select_columns(names)
        for first in range(start, len(part), _READ_ROWS):
            block = part[first : first + _READ_ROWS]
            for number, values in enumerate(zip(*(block[name] for name in names)), first):
                where = f"{self.name} row {number}"
                yield Document(take_text(dict(zip(names, values)), self.column, where), where, number)


@dataclass(frozen=True)
class StreamSource:
    """A streaming dataset as a source: its shards (usually files) are read one by one, from any record on.

    Starting at record n of a shard reads and drops the n records before it; other shards are not touched.
    """

    name: str
    dataset: IterableDataset
    column: str

    @property
    def num_shards(self) -> int:
        """The number of shards of the dataset."""
        return self.dataset.num_shards

    def read(self, shard: int, start: int = 0) -> Iterator[Document]:
        """The documents of one shard from record `start` on."""
        part = self.dataset.with_format(None).shard(num_shards=self.num_shards, index=shard)
        number = start
        # not `for example in part`: inside a worker of a DataLoader that would split the shard once more
        for batch in (part.skip(start) if start else part).iter(batch_size=_READ_ROWS):
            if self.column not in batch:
                place = f"{self.name} shard {shard} row {number}"
                raise ValueError(f"{place}: no column {self.column!r}; there are {', '.join(batch) or 'none'}")
            for text in batch[self.column]:
                where = f"{self.name} shard {shard} row {number}"
                yield Document(check_text(text, where), where, number)
                number += 1
