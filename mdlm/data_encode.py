"""Documents into token ids, in this process or in several, with the same result.

The tokens are held in memory; those of a map-style Hugging Face dataset stay where `datasets` caches them
(memory-mapped Arrow files, for a dataset that lies on disk). Documents of whitespace alone are left out and counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from mdlm.data_hf import DatasetSource
from mdlm.data_pack import Ints, Tokens, TokenStore
from mdlm.readers import Document, Source, check_text
from mdlm.tokenization import encode_texts

_GROUP_DOCUMENTS, _GROUP_CHARACTERS = 256, 1 << 20


def split_draw(document: Document) -> float:
    """Number in [0, 1) from a hash of the document's key, or of its text: below the fraction means held out.

    Equal texts fall on the same side, wherever they stand and in whatever order they are read.
    """
    if document.side is not None:
        return 0.0 if document.side == "validation" else 1.0
    key = document.text if document.key is None else document.key
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big") / 2.0**48


def is_blank(text: str) -> bool:
    """Whether a document says nothing: no character but whitespace."""
    return not text or text.isspace()


def all_documents(source: Source) -> Iterator[Document]:
    """Every document of a source, shard after shard."""
    for shard in range(source.num_shards):
        yield from source.read(shard)


def groups(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in lists that are worth one call of the tokenizer."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if len(group) == _GROUP_DOCUMENTS or size >= _GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def encode_documents(tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]) -> list[Tokens]:
    """Token ids of each document with the end token behind."""
    end = np.asarray([tokenizer.eos_token_id], dtype=np.int32)
    encoded = encode_texts(tokenizer, [d.text for d in documents], [d.where for d in documents])
    return [np.concatenate([ids, end]) for ids in encoded]


@dataclass(frozen=True)
class _Encoded:
    values: Tokens
    lengths: Ints
    text_bytes: Ints
    draw: np.ndarray
    blank: int


def _encode_group(tokenizer: PreTrainedTokenizerBase, group: list[Document]) -> _Encoded:
    kept = [d for d in group if not is_blank(d.text)]
    ids = encode_documents(tokenizer, kept)
    return _Encoded(
        np.concatenate([*ids, np.zeros(0, np.int32)]),
        np.asarray([len(x) for x in ids], dtype=np.int64),
        np.asarray([len(d.text.encode()) for d in kept], dtype=np.int64),
        np.asarray([split_draw(d) for d in kept], dtype=np.float64),
        len(group) - len(kept),
    )


class Groups(IterableDataset):
    """`encode` of one group of documents after another (it must be picklable).

    Worker w of n reads everything and encodes groups w, w + n, ...: a loader that takes turns restores the order.

    An error is an item like others: raised in a worker, its message would drown in the loader's.
    """

    def __init__(self, source: Source, encode: Callable[[list[Document]], Any]) -> None:
        self.source, self.encode = source, encode

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        try:
            for number, group in enumerate(groups(all_documents(self.source))):
                if number % workers == worker:
                    yield self.encode(group)
        except (ValueError, FileNotFoundError) as error:
            yield error


def encode_source(source: Source, tokenizer: PreTrainedTokenizerBase, workers: int = 0) -> tuple[TokenStore, int]:
    """Tokens of every document of `source`, and how many documents were blank. `workers` = 0: in this process."""
    if isinstance(source, DatasetSource):
        return encode_dataset(source, tokenizer, workers)
    parts: list[_Encoded] = []
    for part in run_workers(Groups(source, partial(_encode_group, tokenizer)), workers):
        if isinstance(part, Exception):
            raise part
        parts.append(part)
    lengths = np.concatenate([*(p.lengths for p in parts), np.zeros(0, np.int64)])
    store = TokenStore(
        values=(np.concatenate([*(p.values for p in parts), np.zeros(0, np.int32)]),),
        offsets=(np.concatenate([[0], np.cumsum(lengths)]),),
        text_bytes=np.concatenate([*(p.text_bytes for p in parts), np.zeros(0, np.int64)]),
        draw=np.concatenate([*(p.draw for p in parts), np.zeros(0)]),
    )
    return store, sum(p.blank for p in parts)


def encode_dataset(
    source: DatasetSource, tokenizer: PreTrainedTokenizerBase, workers: int = 0
) -> tuple[TokenStore, int]:
    """`encode_source` of a map-style Hugging Face dataset, by `Dataset.map`, which caches the result where it can."""
    from datasets import Features, List, Value

    assert isinstance(source.column, str), "records of several columns are encoded by data_examples"
    features = Features({"ids": List(Value("int32")), "text_bytes": Value("int64"), "draw": Value("float64")})
    dataset, column = source.dataset, source.column
    if len(dataset) == 0:
        return TokenStore((), (), np.zeros(0, np.int64), np.zeros(0)), 0
    folder = Path(dataset.cache_files[0]["filename"]).parent if dataset.cache_files else None
    with quiet_fork():
        mapped = (
            dataset.with_format(None)
            .select_columns([column])
            .map(
                _encode_rows,
                with_indices=True,
                batched=True,
                batch_size=_GROUP_DOCUMENTS,
                remove_columns=[column],
                features=features,
                num_proc=min(workers, len(dataset)) or None,
                keep_in_memory=folder is not None and not os.access(folder, os.W_OK),
                fn_kwargs={"tokenizer": tokenizer, "column": column, "name": source.name},
                desc="tokenise",
            )
        )
    chunks = mapped.data.column("ids").chunks
    store = TokenStore(
        values=tuple(c.values.to_numpy() for c in chunks),
        offsets=tuple(c.offsets.to_numpy() for c in chunks),
        text_bytes=mapped.data.column("text_bytes").to_numpy(),
        draw=mapped.data.column("draw").to_numpy(),
    )
    return store, dataset.num_rows - mapped.num_rows


def _encode_rows(
    batch: dict[str, list[Any]], indices: list[int], tokenizer: PreTrainedTokenizerBase, column: str, name: str
) -> dict[str, list[Any]]:
    places = [f"{name} row {i}" for i in indices]
    documents = [Document(check_text(t, w), w, i) for t, w, i in zip(batch[column], places, indices)]
    kept = [d for d in documents if not is_blank(d.text)]
    return {
        "ids": encode_documents(tokenizer, kept),
        "text_bytes": [len(d.text.encode()) for d in kept],
        "draw": [split_draw(d) for d in kept],
    }


def run_workers(dataset: IterableDataset, workers: int, prefetch: int = 2) -> Iterator[Any]:
    """Items of `dataset`, made in `workers` processes that take turns (0: here); leaves torch's generator alone."""
    loader: DataLoader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_it_is,
        prefetch_factor=prefetch if workers else None,
        generator=torch.Generator(),
        worker_init_fn=_heed_only_the_parent,
    )
    with quiet_fork():
        return iter(loader)


def _heed_only_the_parent(worker: int) -> None:
    """In a worker: leave Ctrl-C, and any SIGTERM that the parent did not send, to the parent.

    Both often go to the whole process group, and a trainer that then finishes its step still needs its data.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # without it (macOS) who sent a signal is not told, and SIGTERM ends the worker
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_told, args=(os.getppid(),), daemon=True).start()


def _end_when_told(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def _as_it_is(item: Any) -> Any:
    return item


@contextlib.contextmanager
def quiet_fork() -> Iterator[None]:
    """While processes are forked, tell the tokenizers library that they will encode with one thread each.

    Its thread pool does not survive a fork; without being told so beforehand it prints a warning per process.
    """
    name = "TOKENIZERS_PARALLELISM"
    if name in os.environ:
        yield
        return
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]
