"""Which tokens a likelihood is of: documents cut into windows under a stated protocol, read as a stream.

Published perplexities of one model differ by what stands here: LM1B padded gives 27.04 and wrapped 31.78 (MDLM and
BD3-LM papers). So every choice is a field of `TextProtocol`, which is part of the result. Documents are tokenised on
the way, twice: a first pass counts tokens, bytes and windows and fingerprints the text, the second evaluates. Memory
does not grow with the text. Read next: `likelihood_run.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float64, Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mdlm.data import Batch, Data
from mdlm.data_encode import all_documents, groups, is_blank, split_draw
from mdlm.data_pack import PackedRows, Packing, Row, Tokens, make_batch
from mdlm.data_source import DataConfig, held_out, open_source, split_single_file
from mdlm.eval.likelihood import token_counts, unigram_log_probs
from mdlm.eval.likelihood_detokenize import DETOKENIZERS
from mdlm.readers import Document
from mdlm.schedule import unknown_name
from mdlm.tokenization import bytes_are_exact, encode_texts, num_tokens, token_bytes

Edge = Literal["none", "given", "scored"]
Documents = Callable[[], Iterator[Document]]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class TextProtocol:
    """How text becomes windows of tokens, and which of them count."""

    packing: Packing = "stream"
    """`stream`: documents joined and wrapped, attention across them; `documents`: the same, attention inside each;
    `none`: one document per window, padded."""
    seq_len: int = 256
    """Tokens of a window, `bos` and `eos` included."""
    stride: int | None = None
    """New tokens per further window, whose first tokens are given as context. None: windows do not overlap, and with
    packing `none` a document is cut at its first window; with a stride it goes on in further ones."""
    bos: Edge = "none"
    """Start token before every window: `none`, `given` (never masked nor counted) or `scored`."""
    eos: Edge = "none"
    """End token behind every window, likewise."""
    document_eos: bool = True
    """End token behind every document, counted as one of its tokens."""
    detokenizer: str = "none"
    """Applied to every document before it is tokenised (`likelihood_detokenize.DETOKENIZERS`)."""
    rows: int | None = None
    """So many windows, spread evenly over all; None: all."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("packing", self.packing, ("stream", "documents", "none")),
            ("bos", self.bos, ("none", "given", "scored")),
            ("eos", self.eos, ("none", "given", "scored")),
            ("detokenizer", self.detokenizer, DETOKENIZERS),
        ):
            if value not in allowed:
                raise unknown_name(name, value, allowed)
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows is {self.rows}: at least one window must be evaluated")
        if self.body < 1:
            raise ValueError(f"seq_len={self.seq_len} leaves no room for text beside bos={self.bos} and eos={self.eos}")
        if self.stride is not None and not 1 <= self.stride <= self.body:
            raise ValueError(
                f"stride is {self.stride}; it must lie in 1..{self.body}, the tokens of a window without bos and eos"
            )
        if self.packing == "none" and self.document_eos and self.eos != "none":
            raise ValueError("packing none would put two end tokens behind a document: set document_eos to false")

    @property
    def body(self) -> int:
        """Tokens of text in a full window."""
        return self.seq_len - (self.bos != "none") - (self.eos != "none")

    @property
    def step(self) -> int:
        """New tokens per further window."""
        return self.body if self.stride is None else self.stride

    def windows(self, tokens: int) -> int:
        """How many windows a text (packing none: a document) of so many tokens has."""
        if self.packing == "none" and self.stride is None:
            return 1
        return 1 + max(0, -(-(tokens - self.body) // self.step))


@dataclass(frozen=True)
class EvaluationRows:
    """Rows to evaluate, made anew at every pass, and what is known of all of them."""

    name: str
    count: int
    rows: Callable[[], Iterator[tuple[int, Row]]]
    """Numbered from 0."""
    seq_len: int
    packing: Packing
    pad_token_id: int
    token_bytes: Int64[Tensor, "vocab"]
    bytes_are_exact: bool
    scale: float
    """Bytes of the text over bytes by the table; 1 where the table is exact."""
    unigram: Float64[Tensor, "vocab"] | None
    """Log-probabilities, nats, of the reference text's token frequencies, plus one each."""
    fingerprint: str
    """Of the text and its tokens."""
    report: dict[str, Any]

    def batches(self, size: int, rank: int = 0, world: int = 1, done: Container[int] = ()) -> Iterator[Batch]:
        """Rows that are not `done`, `size` at a time; every `world`-th batch from the `rank`-th on.

        The last batch is filled up with rows of padding, so that all have one shape.
        """
        pending: list[tuple[int, Row]] = []
        turn = 0
        nothing = Row(np.zeros(0, np.int32), np.zeros(0, np.int64))

        def batch() -> Batch:
            filled = pending + [(self.count + i, nothing) for i in range(size - len(pending))]
            return make_batch(
                [row for _, row in filled], [n for n, _ in filled], self.seq_len, self.packing, self.pad_token_id
            )

        for number, row in self.rows():
            if number in done:
                continue
            pending.append((number, row))
            if len(pending) == size:
                if turn % world == rank:
                    yield batch()
                pending, turn = [], turn + 1
        if pending and turn % world == rank:
            yield batch()


def open_rows(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, protocol: TextProtocol, whole: bool
) -> EvaluationRows:
    """Rows of `config.source` in full (`whole`), or of what training under `config` held out.

    The reference of the unigram baseline is the training text; with `whole`, the text itself. Raises ValueError where
    there is no text, or with `whole` less than a window (except packing `none`, which pads).
    """
    evaluated, reference, name = _documents(config, whole)
    end, start = tokenizer.eos_token_id, tokenizer.bos_token_id
    start = tokenizer.cls_token_id if start is None else start
    if protocol.bos != "none" and start is None:
        raise ValueError(f"bos is {protocol.bos!r}, but the tokenizer has no start token: set it to none")
    detokenize = DETOKENIZERS[protocol.detokenizer]
    table = token_bytes(tokenizer)
    exact = bytes_are_exact(tokenizer)

    def encoded(documents: Documents, change: Callable[[str], str]) -> Iterator[tuple[Tokens, int]]:
        for group in groups(document for document in documents() if not is_blank(document.text)):
            texts = [change(document.text) for document in group]
            for text, ids in zip(texts, encode_texts(tokenizer, texts, [document.where for document in group])):
                tail = [end] if protocol.document_eos else []
                ids = np.concatenate([ids, np.asarray(tail, dtype=np.int32)])
                if len(ids):
                    yield ids, len(text.encode())

    documents = tokens = text_bytes = by_table = available = cut = 0
    vocab = num_tokens(tokenizer)
    counts = torch.zeros(vocab, dtype=torch.int64)
    digest = hashlib.sha256()
    for ids, size in encoded(evaluated, detokenize):
        documents, tokens, text_bytes = documents + 1, tokens + len(ids), text_bytes + size
        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
        by_table += int(table.numpy()[ids].sum())
        if reference is evaluated:
            counts += token_counts(torch.from_numpy(ids), vocab)
        if protocol.packing == "none":
            available += protocol.windows(len(ids))
            cut += protocol.stride is None and len(ids) > protocol.body
    if not documents:
        raise ValueError(f"{name}: no text to evaluate: there are no documents, or all are empty or only whitespace")
    if protocol.packing != "none":
        if whole and tokens < protocol.body:
            raise ValueError(
                f"{name}: {documents} documents hold {tokens} tokens, less than one window of {protocol.body}: give "
                "more text, a smaller seq_len, or packing none, which pads"
            )
        available = protocol.windows(tokens)
    if reference is not evaluated:
        for ids, _ in encoded(reference, lambda text: text):
            counts += token_counts(torch.from_numpy(ids), vocab)
    count = available if protocol.rows is None else min(protocol.rows, available)

    def rows() -> Iterator[tuple[int, Row]]:
        pieces = (ids for ids, _ in encoded(evaluated, detokenize))
        number = 0
        for place, (ids, begins, scored) in enumerate(_cut(pieces, protocol)):
            if number < count and place == number * available // count:
                yield number, _framed(ids, begins, scored, protocol, start, end)
                number += 1

    return EvaluationRows(
        name=name,
        count=count,
        rows=rows,
        seq_len=protocol.seq_len,
        packing=protocol.packing,
        pad_token_id=tokenizer.pad_token_id,
        token_bytes=table,
        bytes_are_exact=exact,
        scale=1.0 if exact or not by_table else text_bytes / by_table,
        unigram=unigram_log_probs(counts),
        fingerprint=digest.hexdigest()[:16],
        report={"documents": documents, "tokens": tokens, "windows": available, "cut_documents": cut},
    )


def held_out_rows(data: Data) -> EvaluationRows:
    """The validation rows of a run as training makes them: for examples of chats, and text that was streamed."""
    held = data.validation
    if held is None:
        raise ValueError("the run held no text out: give --data")
    table = data.token_bytes.numpy()
    evaluated = sum(int(table[held.row(n).counted].sum()) for n in range(held.rows_per_epoch))
    unigram = None
    if isinstance(data.train, PackedRows):
        train = data.train
        learnt = (torch.from_numpy(train.row(n).counted) for n in range(train.rows_per_epoch))
        unigram = unigram_log_probs(token_counts(learnt, len(table)))
    digest = hashlib.sha256()
    for n in range(held.rows_per_epoch):
        digest.update(held.row(n).ids.tobytes())
    return EvaluationRows(
        name=data.report.source,
        count=held.rows_per_epoch,
        rows=lambda: ((n, held.row(n)) for n in range(held.rows_per_epoch)),
        seq_len=data.config.seq_len,
        packing=data.config.packing,
        pad_token_id=data.pad_token_id,
        token_bytes=data.token_bytes,
        bytes_are_exact=data.bytes_are_exact,
        scale=1.0 if data.bytes_are_exact or not evaluated else data.validation_bytes / evaluated,
        unigram=unigram,
        fingerprint=digest.hexdigest()[:16],
        report={"documents": len(held.documents), "tokens": held.tokens, "windows": held.rows_per_epoch},
    )


def _documents(config: DataConfig, whole: bool) -> tuple[Documents, Documents, str]:
    """Documents to evaluate, those of the reference, and the name of the source."""
    fraction = 0.0 if whole else config.holds_out
    source = split_single_file(open_source(config), fraction)

    def everything() -> Iterator[Document]:
        return all_documents(source)

    if whole:
        return everything, everything, source.name
    if fraction == 0:
        if config.validation_source is None and config.validation_split is None:
            raise ValueError("the run held no text out: give --data")
        other = open_source(config, validation=True)
        return lambda: all_documents(other), everything, other.name
    draws = np.asarray([split_draw(d) for d in everything() if not is_blank(d.text)])
    out = held_out(draws, fraction)

    def chosen(held: bool) -> Iterator[Document]:
        kept = iter(out)
        return (d for d in everything() if not is_blank(d.text) and bool(next(kept)) == held)

    return lambda: chosen(True), lambda: chosen(False), source.name


def _cut(documents: Iterator[Tokens], protocol: TextProtocol) -> Iterator[tuple[Tokens, Flags, Flags]]:
    """Windows without bos and eos: tokens, where documents begin, and which tokens count here for the first time."""
    body, step = protocol.body, protocol.step
    if protocol.packing == "none":
        for ids in documents:
            pieces = iter([ids[:body] if protocol.stride is None else ids])
            yield from _sliding(pieces, body, step)
    else:
        yield from _sliding(documents, body, step)


def _sliding(pieces: Iterator[Tokens], body: int, step: int) -> Iterator[tuple[Tokens, Flags, Flags]]:
    ids, begins, old = np.zeros(0, np.int32), np.zeros(0, bool), 0
    for piece in pieces:
        first = np.zeros(len(piece), bool)
        first[:1] = True
        ids, begins = np.concatenate([ids, piece]), np.concatenate([begins, first])
        at = 0
        while len(ids) - at >= body:
            yield ids[at : at + body], begins[at : at + body], np.arange(body) >= old
            at, old = at + step, body - step
        ids, begins = ids[at:], begins[at:]
    if len(ids) > old:
        yield ids, begins, np.arange(len(ids)) >= old


def _framed(ids: Tokens, begins: Flags, scored: Flags, protocol: TextProtocol, start: int | None, end: int) -> Row:
    """A window with its bos and eos. Where it begins inside a document, that is the beginning of a piece too."""
    front, back = protocol.bos != "none", protocol.eos != "none"
    ids = np.concatenate([[start] if front else [], ids, [end] if back else []]).astype(np.int32)
    inner = begins.copy()
    inner[:1] = not front
    begins = np.concatenate([[True] if front else [], inner, [False] if back else []]).astype(bool)
    scored = np.concatenate(
        [[protocol.bos == "scored"] if front else [], scored, [protocol.eos == "scored"] if back else []]
    ).astype(bool)
    starts = np.flatnonzero(begins) if protocol.packing != "none" else np.zeros(1, np.int64)
    return Row(ids, starts, None if scored.all() else scored)
