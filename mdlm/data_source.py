"""Which text: `DataConfig`, and the source of documents it names. Read next: `readers.py`, `data_hf.py`, `data.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from mdlm.chat import ExampleConfig, record_text
from mdlm.corpus import builtin_source
from mdlm.data_encode import all_documents, is_blank, split_draw
from mdlm.data_hf import DatasetSource, StreamSource, check_column, is_saved_dataset, load_hub, load_saved
from mdlm.data_pack import Packing
from mdlm.readers import READERS, SUFFIXES, Column, Document, FileSource, Source, TextSource, find_files

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    GivenText: TypeAlias = list[Any] | tuple[Any, ...] | Dataset | IterableDataset

Format = Literal["auto", "text", "lines", "jsonl", "parquet", "saved", "hub"]
_FORMATS = ("auto", *READERS, "saved", "hub")


@dataclass(frozen=True)
class DataConfig(ExampleConfig):
    """Where the text comes from and how it is cut into rows; for fine-tuning, what a record is (`ExampleConfig`)."""

    source: str = "builtin"
    """`builtin` (the standard library of this Python), a file, a folder, a glob, a folder written by `save_to_disk`, or
    the name of a hub dataset. A local file or folder goes before a hub dataset of its name; `./builtin` is a folder."""
    format: Format = "auto"
    """`text` (a file is a document), `lines` (a line is a document), `jsonl`, `parquet`, `saved` (by `save_to_disk`),
    `hub`; `auto` goes by what lies there and by the file endings."""
    text_column: str = "text"
    """Key or column that holds the text (JSON lines, parquet, Hugging Face datasets)."""
    name: str | None = None
    """Configuration ("subset") of a hub dataset."""
    split: str = "train"
    """Split to train on (hub datasets, and saved datasets that have splits)."""
    validation_source: str | None = None
    """Text to validate on, named like `source`; None = the same source: `validation_split`, or documents held out."""
    validation_split: str | None = None
    """Split to validate on; None = `split` of `validation_source`, or documents held out."""
    validation_fraction: float = 0.05
    """Share of the documents that is held out, chosen by a hash of the text (built-in corpus: of the file's path);
    of a single text file, its tail. At least one document, if above 0. Unused with a validation source or split."""
    validation_rows: int | None = None
    """At most so many validation rows, spread evenly over all; None = all (streaming: the first 512)."""
    streaming: bool = False
    """Read and tokenise on the way instead of beforehand: for text too large for that. See `data_stream`."""
    seq_len: int = 256
    packing: Packing = "stream"
    """`stream`: attention runs across the documents of a row, as MDLM pre-trains; `documents`: it stays inside one;
    `none`: one document per row, cut or padded."""
    shuffle: bool = True
    seed: int = 0
    shuffle_buffer: int = 1024
    """Streaming only: rows that are shuffled among each other."""
    lanes: int = 8
    """Streaming only: independent streams laid together. Part of the order of the data; see `data_stream`."""
    workers: int = 0
    """Processes that tokenise beside the main one (beforehand, or streaming). Never changes the rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed: dict[str, tuple[Any, ...]] = {"format": _FORMATS, "packing": ("stream", "documents", "none")}
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise ValueError(f"{field}={getattr(self, field)!r}: choose one of {', '.join(values)}")
        least = {"seq_len": 2, "shuffle_buffer": 1, "lanes": 1, "workers": 0, "validation_rows": 1}
        for field, minimum in least.items():
            value = getattr(self, field)
            if value is not None and value < minimum:
                raise ValueError(f"{field}={value}: at least {minimum} is needed")
        if not 0 <= self.validation_fraction <= 0.5:
            raise ValueError(f"validation_fraction={self.validation_fraction}: a share from 0 to 0.5 is needed")
        if not self.source:
            raise ValueError("source is empty: name a file, folder, glob or dataset, or 'builtin'")
        if self.records != "text":
            self._check_records()

    def _check_records(self) -> None:
        if self.packing == "stream":
            raise ValueError(
                f"records={self.records!r} with packing='stream' would let examples see each other and cut them: use "
                "packing='none' (one example per row) or 'documents' (several whole ones)"
            )
        if self.packing != "none" and self.pad_supervision in ("eos_to_batch", "eos_to_length"):
            raise ValueError(
                f"pad_supervision={self.pad_supervision!r} fills a row up behind its one example: use packing='none'; "
                "packed rows go with 'eos_one' or 'none'"
            )
        if self.streaming:
            raise ValueError(f"records={self.records!r} are read before training: set streaming=false")
        if self.format in ("text", "lines") or (self.source == "builtin" and self.format == "auto"):
            raise ValueError(
                f"records={self.records!r} have keys or columns, which plain text has not: the source must be JSON "
                f"lines, parquet or a dataset; got source={self.source!r}, format={self.format!r}"
            )

    @property
    def column(self) -> Column:
        """What a reader must take from a record."""
        return self.text_column if self.records == "text" else self.record_columns

    @property
    def holds_out(self) -> float:
        """Share of the training source that is held out: 0 if the validation text comes from elsewhere."""
        return self.validation_fraction if self.validation_source is None and self.validation_split is None else 0.0


def open_source(config: DataConfig, given: GivenText | None = None, *, validation: bool = False) -> Source:
    """The documents of `given`, or of what `config` names for training or for validation.

    Raises ValueError and FileNotFoundError as the readers do, and for a streaming dataset without `config.streaming`.
    """
    name, split = config.source, config.split
    if validation:
        name = name if config.validation_source is None else config.validation_source
        split = split if config.validation_split is None else config.validation_split
    if given is None:
        dataset = _named(config, name, split)
    else:
        name, dataset = "dataset", given
    if isinstance(dataset, list | tuple):
        return TextSource.of(dataset, column=config.column)
    if isinstance(dataset, FileSource | TextSource):
        return dataset
    return _from_dataset(config, dataset, f"{name}[{split}]" if given is None else name)


def _named(config: DataConfig, name: str, split: str) -> FileSource | TextSource | Dataset | IterableDataset:
    path = Path(name).expanduser()
    if config.format == "auto" and name == "builtin":
        return builtin_source()
    if config.format == "saved" or (config.format == "auto" and is_saved_dataset(path)):
        return load_saved(path, split)
    if config.format == "hub" or (config.format == "auto" and not path.exists() and not _looks_local(name)):
        return load_hub(name, config.name, split, config.streaming)
    paths, format = find_files(name, config.format)
    if config.records != "text" and format not in ("jsonl", "parquet"):
        raise ValueError(
            f"{name}: records={config.records!r} need JSON lines, parquet or a dataset; the files are {format}"
        )
    return FileSource(name, paths, format, config.column)


def _looks_local(name: str) -> bool:
    """Whether a name that is not there can only have meant a file: `a/b/c`, `*.txt`, `./x`, `x.jsonl`."""
    suffix = Path(name.removesuffix(".gz")).suffix.lower()
    endings = {s for group in SUFFIXES.values() for s in group}
    return name.count("/") > 1 or name[0] in "./~" or any(c in name for c in "*?[\\") or suffix in endings


def _from_dataset(config: DataConfig, dataset: Any, name: str) -> Source:
    from datasets import Dataset, IterableDataset

    if not isinstance(dataset, Dataset | IterableDataset):
        raise ValueError(
            f"{name}: needs a list of strings, a datasets.Dataset or an IterableDataset, not {type(dataset).__name__}"
            + ("; choose one of its splits" if isinstance(dataset, dict) else "")
        )
    check_column(dataset, name, config.column)
    if isinstance(dataset, Dataset):
        if not config.streaming:
            return DatasetSource(name, dataset, config.column)
        if len(dataset) == 0:
            raise ValueError(f"{name}: the dataset is empty")
        dataset = dataset.to_iterable_dataset(num_shards=min(config.lanes, len(dataset)))
    elif not config.streaming:
        raise ValueError(f"{name}: this is a streaming dataset; set streaming=true, or load it without streaming")
    return StreamSource(name, dataset, config.text_column)


def split_single_file(source: Source, fraction: float) -> Source:
    """A source of one text file as two documents: its tail, from the next line on, is for validation."""
    if not (isinstance(source, FileSource) and source.format == "text" and source.num_shards == 1 and fraction > 0):
        return source
    document = next(source.read(0))
    text = document.text
    cut = len(text) - int(len(text) * fraction)
    line = text.find("\n", cut)
    cut = cut if line < 0 or line + 1 >= len(text) else line + 1
    head = Document(text[:cut], document.where, 0, side="train")
    tail = Document(text[cut:], f"{document.where} (tail)", 1, side="validation")
    return TextSource((head, tail), name=source.name)


def held_out(draws: npt.NDArray[np.float64], fraction: float) -> npt.NDArray[np.bool_]:
    """Which documents are held out: those drawn below `fraction`. Where that takes none or all, one is moved over."""
    chosen = draws < fraction
    if fraction > 0 and len(draws) > 1:
        chosen[np.argmin(draws)] = True
        chosen[np.argmax(draws)] = False
    return chosen


def training_texts(
    config: DataConfig, *, train: GivenText | None = None, validation: GivenText | None = None
) -> Iterator[str]:
    """The training documents as text, without those held out: what a tokenizer may be trained on.

    `train` and `validation` are what `open_data` will be given, if anything. Streaming reads as far as it is asked to.
    """
    fraction = config.holds_out if validation is None else 0.0
    source = split_single_file(open_source(config, train), fraction)
    if config.streaming:
        for document in all_documents(source):
            if not is_blank(document.text) and split_draw(document) >= fraction:
                yield document.text
        return
    draws = np.asarray([split_draw(d) for d in all_documents(source) if not is_blank(d.text)])
    out = iter(held_out(draws, fraction))
    for document in all_documents(source):
        if not is_blank(document.text) and not next(out):
            yield document.text if config.records == "text" else record_text(document)
