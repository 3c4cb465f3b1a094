"""Text in, packed `Batch`es out: which tokens stand in row `r` of the training stream, on any number of processes.

**Global order.** The training stream is one endless sequence of rows, numbered from 0. Row `r` holds the same tokens
for any number of processes, any gradient accumulation and any number of workers. Micro-batch `m` of process `rank` of
`world` holds rows `start_row + (m * batch_size + b) * world + rank`, b = 0, 1, ...: the processes share every block of
`world * batch_size` consecutive rows, and a global batch (accumulation included) is a block of consecutive rows too.
Nothing is repeated or dropped between processes.

**Resuming.** The position is one row number, `start_row`. Map-style data (all but `streaming`) get there at once.
Streaming data get there quickly with the `state_dict` of the stream (of all its processes, joined by `merge_states`),
and without it by reading everything again from the start: the rows are the same either way.

    data = open_data(config, tokenizer)
    stream = data.train_batches(batch_size, rank=rank, world=world)                      # or state=saved
    for step in range(steps):
        micro = [next(stream) for _ in range(accumulation)]
        ...
        saved = stream.state_dict()                                                      # {"row": ..., ...}, JSON

**Where things live**: `data_source` (what the config names), `readers`/`data_hf`/`corpus` (documents), `data_encode`
(tokens), `data_pack` (rows), `chat` and `data_examples` (tokens and rows of fine-tuning data), `data_stream` (rows of
streamed text), `data_batches` (batches). Read next:
`objective.py`, which noises a `Batch`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedTokenizerBase

from mdlm.chat import ExampleEncoder, chat_tokenizer
from mdlm.data_batches import BatchStream, Data, Report, count_bytes, merge_states
from mdlm.data_encode import all_documents, encode_documents, encode_source, is_blank, split_draw
from mdlm.data_examples import ExampleRows, encode_examples, supervision
from mdlm.data_pack import Batch, Ints, PackedRows, TokenStore
from mdlm.data_source import DataConfig, held_out, open_source, split_single_file, training_texts
from mdlm.data_stream import Lane
from mdlm.readers import Document, Source, TextSource
from mdlm.tokenization import bytes_are_exact, check_tokenizer, num_tokens, token_bytes

if TYPE_CHECKING:
    from mdlm.data_source import GivenText

__all__ = ["Batch", "BatchStream", "Data", "DataConfig", "count_bytes", "merge_states", "open_data", "training_texts"]

_STREAMED_VALIDATION_ROWS = 512


def open_data(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train: GivenText | None = None,
    validation: GivenText | None = None,
) -> Data:
    """Read and tokenise the text `config` names (streaming: only its validation text).

    Args:
        tokenizer: with mask, padding and end tokens (`prepare_tokenizer`).
        train, validation: text to use in place of what `config` names: a list of strings, or a Hugging Face dataset.

    Raises:
        ValueError, FileNotFoundError: for any fault of the text or the options, naming file and line or row.
    """
    check_tokenizer(tokenizer)
    fraction = config.holds_out if validation is None else 0.0
    source = split_single_file(open_source(config, train), fraction)
    elsewhere = validation is not None or config.validation_source is not None or config.validation_split is not None
    validation_text = open_source(config, validation, validation=True) if elsewhere else None
    if config.streaming:
        return _open_streaming(config, tokenizer, source, fraction, validation_text)
    if config.records != "text":
        return _open_examples(config, tokenizer, source, fraction, validation_text)

    store, blank = encode_source(source, tokenizer, config.workers)
    _require_text(store, blank, source.name)
    if fraction > 0 and len(store) == 1:
        raise ValueError(
            f"{source.name}: there is only one document, so none can be held out; give a validation_source, or set "
            "validation_fraction=0"
        )
    out = held_out(store.draw, fraction)
    documents = np.flatnonzero(~out)
    try:
        rows = PackedRows(store, documents, config.seq_len, config.packing, shuffle=config.shuffle, seed=config.seed)
    except ValueError as error:
        raise ValueError(f"{source.name}: {error}") from error
    if validation_text is not None:
        held = _validation_rows(config, tokenizer, validation_text, config.validation_rows)
    elif out.any():
        held = _pack_validation(config, store, np.flatnonzero(out), config.validation_rows)
    else:
        held = None
    cut = int((store.lengths[documents] > config.seq_len).sum()) if config.packing == "none" else 0
    report = Report(source.name, len(documents), blank, rows.tokens, rows.rows_per_epoch, cut, *_count(held))
    some = b"".join(store.tokens(int(d)).tobytes() for d in documents[:256])
    fingerprint = _fingerprint(config, tokenizer, store.lengths[documents].tobytes(), some)
    return _data(config, tokenizer, rows, held, report, fingerprint)


def _open_examples(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    source: Source,
    fraction: float,
    validation_text: Source | None,
) -> Data:
    tokenizer = chat_tokenizer(tokenizer, config.chat_template)
    encoder = ExampleEncoder(config, tokenizer, config.seq_len, config.seed)
    store, eos_padding, counts = encode_examples(source, encoder, config.workers)
    out = held_out(store.draw, fraction)
    if fraction > 0 and not out.any():
        raise ValueError(
            f"{source.name}: there is only one example, so none can be held out; give a validation_source, or set "
            "validation_fraction=0"
        )

    def rows(store: TokenStore, which: Ints, training: bool) -> ExampleRows:
        return ExampleRows(
            store,
            which,
            config.seq_len,
            config.packing,
            fill=config.pad_supervision if training else "none",
            eos_token_id=tokenizer.eos_token_id,
            shuffle=config.shuffle and training,
            seed=config.seed,
            limit=None if training else config.validation_rows,
        )

    train = rows(store, np.flatnonzero(~out), True)
    held = None
    if validation_text is not None:
        other, _, _ = encode_examples(validation_text, encoder, config.workers)
        held = rows(other, np.arange(len(other)), False)
    elif out.any():
        held = rows(store, np.flatnonzero(out), False)
    learnt = supervision(train, eos_padding, counts)
    report = Report(
        source.name, len(train.documents), 0, train.tokens, train.rows_per_epoch, 0, *_count(held), supervision=learnt
    )
    kept = json.dumps([config.pad_supervision, config.turns, config.eos_random, config.records])
    some = b"".join(store.tokens(int(d)).tobytes() for d in train.documents[:256])
    parts = (
        kept.encode(),
        store.lengths[train.documents].tobytes(),
        some,
        b"".join(s.tobytes() for s in store.supervised or ()),
    )
    return _data(config, tokenizer, train, held, report, _fingerprint(config, tokenizer, *parts))


def _open_streaming(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    source: Source,
    fraction: float,
    validation_text: Source | None,
) -> Data:
    limit = _STREAMED_VALIDATION_ROWS if config.validation_rows is None else config.validation_rows
    held = None
    if validation_text is not None:
        held = _validation_rows(
            config, tokenizer, _first_documents(config, tokenizer, validation_text, 1.0, limit), limit
        )
    elif fraction > 0:
        held = _validation_rows(config, tokenizer, _first_documents(config, tokenizer, source, fraction, limit), limit)
    lane = Lane(
        source,
        tokenizer,
        lane=0,
        lanes=config.lanes,
        seq_len=config.seq_len,
        packing=config.packing,
        shuffle=config.shuffle,
        seed=config.seed,
        block_rows=-(-config.shuffle_buffer // config.lanes),
        held_out=fraction,
    )
    report = Report(source.name, None, 0, None, None, 0, *_count(held))
    shape = json.dumps([source.num_shards, config.lanes, config.shuffle_buffer, fraction])
    return _data(config, tokenizer, lane, held, report, _fingerprint(config, tokenizer, shape.encode()))


def _first_documents(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, source: Source, below: float, rows: int
) -> TextSource:
    """Documents drawn below `below`, from the first on, until they fill `rows` rows or the text ends."""
    found: list[Document] = []
    filled = 0
    for document in all_documents(source):
        if is_blank(document.text) or split_draw(document) >= below:
            continue
        found.append(replace(document, side=None))
        tokens = len(encode_documents(tokenizer, [document])[0])
        filled += config.seq_len if config.packing == "none" else tokens
        if filled >= rows * config.seq_len:
            break
    if not found:
        raise ValueError(
            f"{source.name}: no document to validate on was found"
            + ("" if below == 1.0 else f"; raise validation_fraction={below}, or give a validation_source or _split")
        )
    return TextSource(tuple(found), name=source.name)


def _validation_rows(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, source: Source, limit: int | None
) -> PackedRows:
    store, blank = encode_source(source, tokenizer, 0 if config.streaming else config.workers)
    _require_text(store, blank, source.name)
    return _pack_validation(config, store, np.arange(len(store)), limit)


def _pack_validation(config: DataConfig, store: TokenStore, documents: Ints, limit: int | None) -> PackedRows:
    return PackedRows(store, documents, config.seq_len, config.packing, pad_tail=True, limit=limit)


def _require_text(store: TokenStore, blank: int, name: str) -> None:
    if len(store) == 0:
        reason = f"all {blank} documents are empty or only whitespace" if blank else "there are no documents"
        raise ValueError(f"{name}: no text to use: {reason}")


def _count(held: PackedRows | None) -> tuple[int, int]:
    return (0, 0) if held is None else (len(held.documents), held.tokens)


def _fingerprint(config: DataConfig, tokenizer: PreTrainedTokenizerBase, *parts: bytes) -> str:
    options = [
        config.seq_len,
        config.packing,
        config.shuffle,
        config.seed,
        num_tokens(tokenizer),
        tokenizer.eos_token_id,
    ]
    digest = hashlib.sha256(json.dumps(options).encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _data(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    train: PackedRows | Lane,
    held: PackedRows | None,
    report: Report,
    fingerprint: str,
) -> Data:
    return Data(
        config=config,
        train=train,
        validation=held,
        report=report,
        fingerprint=fingerprint,
        pad_token_id=tokenizer.pad_token_id,
        token_bytes=token_bytes(tokenizer),
        bytes_are_exact=bytes_are_exact(tokenizer),
    )
