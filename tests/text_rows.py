"""Documents, a tokenizer for them, and ways to take rows apart: shared by the tests of the data pipeline."""

from __future__ import annotations

from functools import cache

from transformers import PreTrainedTokenizerFast

from mdlm.data import Batch, BatchStream, Data, DataConfig, open_data, training_texts
from mdlm.tokenization import train_bpe

TEXTS = [f"Document {i} says {'word ' * (i % 7)}and ends: é{i}\n" for i in range(40)]


@cache
def small_bpe() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 280 tokens, trained on `TEXTS`."""
    return train_bpe(TEXTS, 280)


def take(stream: BatchStream, count: int) -> list[Batch]:
    return [next(stream) for _ in range(count)]


def by_row(batches: list[Batch]) -> dict[int, list[int]]:
    """Row number -> tokens; a row that comes twice is an error."""
    rows: dict[int, list[int]] = {}
    for batch in batches:
        for number, ids in zip(batch.rows.tolist(), batch.input_ids.tolist()):
            assert number not in rows, f"row {number} came twice"
            rows[number] = ids
    return rows


def opened(tokenizer: PreTrainedTokenizerFast, **options: object) -> Data:
    return open_data(DataConfig(source="given", seq_len=16, **options), tokenizer, train=TEXTS)


def first_epoch(data: Data) -> dict[int, list[int]]:
    assert data.rows_per_epoch is not None
    return by_row(take(data.train_batches(1), data.rows_per_epoch))


def held_out_texts(data: Data) -> list[str]:
    trained = set(training_texts(data.config, train=TEXTS))
    assert 0 < len(trained) < len(TEXTS)
    return [t for t in TEXTS if t not in trained]
