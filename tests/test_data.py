"""Rows: every token once, one order for any number of processes, exact positions; map-style sources end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from mdlm.data import Batch, BatchStream, Data, DataConfig, count_bytes, merge_states, open_data, training_texts
from mdlm.data_pack import PackedRows, TokenStore, make_batch, permutation
from mdlm.data_source import held_out
from mdlm.tokenization import encode_texts, token_bytes, train_bpe

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than a small machine has
TEXTS = [f"Document {i} says {'word ' * (i % 7)}and ends: é{i}\n" for i in range(40)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_bpe(TEXTS, 280)


def numbered_store(lengths: list[int]) -> TokenStore:
    """Documents of distinct tokens: 1000 d, 1000 d + 1, ...; in two chunks, the second cut out of a longer array."""
    documents = [np.arange(n, dtype=np.int32) + 1000 * d for d, n in enumerate(lengths)]
    half = len(lengths) // 2
    chunks = [documents[:half], documents[half:]]
    offsets = [np.concatenate([[0], np.cumsum([len(d) for d in c])]).astype(np.int64) for c in chunks]
    values = [np.concatenate([*c, np.zeros(0, np.int32)]) for c in chunks]
    return TokenStore(
        (values[0], np.concatenate([np.full(3, -7, np.int32), values[1]])),
        (offsets[0], offsets[1] + 3),
        np.asarray(lengths),
        np.zeros(len(lengths)),
    )


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@given(lengths=LENGTHS, seq_len=st.integers(2, 12))
@settings(max_examples=100)
def test_rows_end_to_end_are_the_documents_end_to_end(lengths, seq_len):
    store = numbered_store(lengths)
    line = [1000 * d + i for d, n in enumerate(lengths) for i in range(n)]
    kept = PackedRows(store, np.arange(len(lengths)), seq_len, "stream", pad_tail=True)
    rows = [kept.row(r) for r in range(kept.rows_per_epoch)]
    assert [t for row in rows for t in row.ids.tolist()] == line
    assert all(len(row.ids) == seq_len for row in rows[:-1])
    if len(line) < seq_len:
        with pytest.raises(ValueError, match=f"hold {len(line)} tokens, and one row takes {seq_len}"):
            PackedRows(store, np.arange(len(lengths)), seq_len, "stream")
        return
    dropped = PackedRows(store, np.arange(len(lengths)), seq_len, "stream")
    rows = [dropped.row(r) for r in range(dropped.rows_per_epoch)]
    assert [t for row in rows for t in row.ids.tolist()] == line[: len(line) // seq_len * seq_len]


@given(lengths=LENGTHS, seq_len=st.integers(2, 12), seed=st.integers(0, 5))
@settings(max_examples=100)
def test_shuffled_epochs_hold_every_token_once_and_differ(lengths, seq_len, seed):
    store = numbered_store(lengths)
    rows = PackedRows(store, np.arange(len(lengths)), seq_len, "documents", pad_tail=True, shuffle=True, seed=seed)
    everything = Counter(1000 * d + i for d, n in enumerate(lengths) for i in range(n))
    for epoch in range(3):
        taken = [rows.row(epoch * rows.rows_per_epoch + r) for r in range(rows.rows_per_epoch)]
        assert Counter(t for row in taken for t in row.ids.tolist()) == everything
        for row in taken:
            ids = row.ids.tolist()
            starts = [0, *(i for i in range(1, len(ids)) if ids[i] != ids[i - 1] + 1)]
            assert row.starts.tolist() == starts, "documents stay whole inside a row and are marked where they begin"
    trained = (
        PackedRows(store, np.arange(len(lengths)), 2, "stream", shuffle=True, seed=seed) if sum(lengths) > 1 else None
    )
    if trained is not None:
        tokens = Counter(t for r in range(trained.rows_per_epoch) for t in trained.row(r).ids.tolist())
        assert tokens <= everything
        assert sum(lengths) - tokens.total() < 2


def test_epochs_are_permutations_of_seed_and_epoch_alone():
    store = numbered_store([55, 45] * 10)

    def epoch(seed: int, number: int) -> list[list[int]]:
        rows = PackedRows(store, np.arange(20), 10, "stream", shuffle=True, seed=seed)
        return [rows.row(number * 100 + r).ids.tolist() for r in range(100)]

    assert epoch(3, 1) == epoch(3, 1)
    orders = [epoch(3, 0), epoch(3, 1), epoch(3, 2), epoch(4, 0)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    neighbours = [sorted(order) for order in orders]  # apart from the order of the rows, documents meet others in them
    assert all(a != b for i, a in enumerate(neighbours) for b in neighbours[:i])
    alone = numbered_store([1000])  # one document: only the order of the rows can change
    single = [PackedRows(alone, np.arange(1), 10, "stream", shuffle=True, seed=seed) for seed in (3, 4)]
    rows = [[r.row(e * 100 + i).ids.tolist() for i in range(100)] for r in single for e in range(2)]
    assert all(a != b for i, a in enumerate(rows) for b in rows[:i])
    plain = PackedRows(store, np.arange(20), 10, "stream")
    assert [plain.row(r).ids.tolist() for r in range(100)] == [plain.row(100 + r).ids.tolist() for r in range(100)]
    assert sorted(permutation(1000, 5).tolist()) == list(range(1000))
    moved = np.abs(permutation(1000, 5) - np.arange(1000)).mean()
    assert 250 < moved < 420, "a uniform permutation of n moves an item by n/3 in the mean"


def test_a_limit_spreads_rows_evenly():
    store = numbered_store([10] * 10)
    rows = PackedRows(store, np.arange(10), 10, "stream", pad_tail=True, limit=4)
    assert [int(rows.row(r).ids[0]) for r in range(rows.rows_per_epoch)] == [0, 2000, 5000, 7000]
    assert PackedRows(store, np.arange(10), 10, "stream", limit=99).rows_per_epoch == 10


def test_batches_of_each_packing():
    store = numbered_store([3, 2, 6])
    documents = np.arange(3)

    def batch(packing: str) -> Batch:
        rows = PackedRows(store, documents, 4, packing, pad_tail=True)
        numbers = range(rows.rows_per_epoch)
        return make_batch([rows.row(r) for r in numbers], numbers, 4, packing, pad_token_id=9)

    stream = batch("stream")
    assert stream.input_ids.tolist() == [[0, 1, 2, 1000], [1001, 2000, 2001, 2002], [2003, 2004, 2005, 9]]
    assert stream.maskable.tolist() == [[True] * 4, [True] * 4, [True, True, True, False]]
    assert torch.equal(stream.attention_mask, stream.maskable)
    assert stream.position_ids is None
    assert stream.rows.tolist() == [0, 1, 2]
    packed = batch("documents")
    assert packed.position_ids.tolist() == [[0, 1, 2, 0], [0, 0, 1, 2], [0, 1, 2, 0]]
    single = batch("none")
    assert single.input_ids.tolist() == [[0, 1, 2, 9], [1000, 1001, 9, 9], [2000, 2001, 2002, 2003]]
    assert single.attention_mask.tolist() == [[True] * 3 + [False], [True, True, False, False], [True] * 4]
    assert single.position_ids is None
    full = make_batch([PackedRows(store, documents, 4, "stream").row(0)], [5], 4, "stream", 9)
    assert full.attention_mask is None
    moved = stream.to("meta")
    assert {t.device.type for t in (moved.input_ids, moved.maskable, moved.rows, moved.attention_mask)} == {"meta"}
    assert moved.position_ids is None


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


@given(
    world=st.integers(1, 5),
    batch_size=st.integers(1, 4),
    start=st.integers(0, 200),
    packing=st.sampled_from(["stream", "none"]),
)
@settings(max_examples=40, deadline=None)
def test_processes_share_the_rows_without_repeats_or_drops(tokenizer, world, batch_size, start, packing):
    data = opened(tokenizer, packing=packing)
    block = world * batch_size
    alone = by_row(take(data.train_batches(1, start_row=start), 3 * block))
    shared = [
        b
        for rank in range(world)
        for b in take(data.train_batches(batch_size, start_row=start, rank=rank, world=world), 3)
    ]
    assert by_row(shared) == alone
    assert sorted(alone) == list(range(start, start + 3 * block))
    for micro in range(3):  # one micro-batch of all processes is a block of consecutive rows
        numbers = sorted(n for rank in range(world) for n in shared[rank * 3 + micro].rows.tolist())
        assert numbers == list(range(start + micro * block, start + (micro + 1) * block))


@given(before=st.integers(0, 30), batch_size=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_resuming_at_a_row_goes_on_exactly(tokenizer, before, batch_size):
    data = opened(tokenizer, packing="documents")
    stream = data.train_batches(batch_size)
    take(stream, before)
    assert stream.row == before * batch_size
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = opened(tokenizer, packing="documents").train_batches(batch_size, state=state)
    for expected, got in zip(take(stream, 4), take(resumed, 4)):
        assert torch.equal(expected.input_ids, got.input_ids)
        assert torch.equal(expected.rows, got.rows)
        assert torch.equal(expected.position_ids, got.position_ids)


def test_a_position_in_other_data_is_refused(tokenizer):
    state = opened(tokenizer).train_batches(2).state_dict()
    for options in ({"seed": 1}, {"packing": "none"}, {"shuffle": False}, {"validation_fraction": 0.3}):
        with pytest.raises(ValueError, match="the saved position belongs to other data"):
            opened(tokenizer, **options).train_batches(2, state=state)
    with pytest.raises(ValueError, match="start_row=-1"):
        opened(tokenizer).train_batches(2, start_row=-1)
    with pytest.raises(ValueError, match="rank=2, world=2"):
        opened(tokenizer).train_batches(2, rank=2, world=2)
    other = opened(tokenizer, seed=1).train_batches(2).state_dict()
    with pytest.raises(ValueError, match="states to merge"):
        merge_states([state, other])
    assert merge_states([state, state]) == state
    far, near = ({**state, "lanes": {"0": [n, [0, 0, n, 0]], str(n): [1, [0, 0, 1, 0]]}} for n in (9, 4))
    both = {"0": [9, [0, 0, 9, 0]], "4": [1, [0, 0, 1, 0]], "9": [1, [0, 0, 1, 0]]}
    assert merge_states([far, near])["lanes"] == merge_states([near, far])["lanes"] == both


@pytest.mark.parametrize(("world", "batch_size"), [(1, 1), (1, 7), (3, 2), (4, 50)])
def test_validation_covers_every_token_once_with_equal_batches(tokenizer, world, batch_size):
    data = opened(tokenizer, validation_fraction=0.3)
    per_rank = [list(data.validation_batches(batch_size, rank=r, world=world)) for r in range(world)]
    assert len({len(batches) for batches in per_rank}) == 1
    batches = [b for batches in per_rank for b in batches]
    assert {tuple(b.input_ids.shape) for b in batches} == {(batch_size, 16)}
    by_number = sorted(
        (n, ids[m].tolist()) for b in batches for n, ids, m in zip(b.rows.tolist(), b.input_ids, b.maskable)
    )
    assert [n for n, _ in by_number] == list(range(len(by_number)))
    tokens = [t for _, ids in by_number for t in ids]
    assert tokenizer.decode(tokens) == "".join(t + "<|eos|>" for t in held_out_texts(data))
    assert data.validation_tokens == len(tokens)
    table = token_bytes(tokenizer)
    assert sum(count_bytes(b, table) for b in batches) == data.validation_bytes
    assert data.validation_bytes == sum(len(t.encode()) for t in held_out_texts(data))


def held_out_texts(data: Data) -> list[str]:
    trained = set(training_texts(data.config, train=TEXTS))
    assert 0 < len(trained) < len(TEXTS)
    return [t for t in TEXTS if t not in trained]


def test_holding_out_leaves_both_sides_something():
    draws = np.asarray([0.3, 0.1, 0.2])
    assert held_out(draws, 0.25).tolist() == [False, True, True]
    assert held_out(draws, 0.05).tolist() == [False, True, False]
    assert held_out(draws, 0.5).tolist() == [False, True, True]
    assert held_out(draws, 0.0).tolist() == [False, False, False]
    assert held_out(np.asarray([0.1]), 0.5).tolist() == [True]


def test_training_and_validation_share_no_document_and_lose_none(tokenizer):
    data = opened(tokenizer, validation_fraction=0.3, shuffle=False, packing="none", validation_rows=None)
    long = open_data(
        DataConfig(source="given", seq_len=200, packing="none", shuffle=False, validation_fraction=0.3),
        tokenizer,
        train=TEXTS,
    )
    assert data.report.cut > 0
    assert long.report.cut == 0
    trained = [tokenizer.decode(b.input_ids[b.maskable]) for b in take(long.train_batches(1), long.rows_per_epoch)]
    validated = [tokenizer.decode(b.input_ids[b.maskable]) for b in long.validation_batches(1)]
    assert sorted(trained + validated) == sorted(t + "<|eos|>" for t in TEXTS)
    assert trained == [t + "<|eos|>" for t in training_texts(long.config, train=TEXTS)]
    limited = opened(tokenizer, validation_fraction=0.3, validation_rows=3)
    assert sum(int(b.maskable.any(1).sum()) for b in limited.validation_batches(2)) == 3
    assert 0 < limited.validation_bytes < data.validation_bytes + 16 * 8


def test_bytes_of_an_inexact_tokenizer_come_from_the_text(tokenizer):
    from tokenizers import normalizers

    other = train_bpe(TEXTS, 280)
    other.backend_tokenizer.normalizer = normalizers.NFD()  # é becomes two characters: the table over-counts
    data = opened(other, validation_fraction=0.3)
    assert not data.bytes_are_exact
    assert data.validation_bytes == sum(len(t.encode()) for t in held_out_texts(data))
    part = opened(other, validation_fraction=0.3, validation_rows=4)
    share = part.validation_tokens / data.validation_tokens
    assert part.validation_bytes == pytest.approx(share * data.validation_bytes, rel=0.25)


# --- sources ---------------------------------------------------------------------------------------------------------


def first_epoch(data: Data) -> dict[int, list[int]]:
    assert data.rows_per_epoch is not None
    return by_row(take(data.train_batches(1), data.rows_per_epoch))


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """The same documents in every kind of place a source can name."""
    root = tmp_path_factory.mktemp("places")
    half = len(TEXTS) // 2
    for folder in ("text", "jsonl", "parquet"):
        (root / folder).mkdir()
    for i, text in enumerate(TEXTS):
        (root / "text" / f"{i:02}.txt").write_text(text)
    for part, texts in enumerate((TEXTS[:half], TEXTS[half:])):
        lines = "".join(json.dumps({"id": 1, "body": t}) + "\n" for t in texts)
        (root / "jsonl" / f"{part}.jsonl").write_text(lines)
        pq.write_table(pa.table({"body": texts}), root / "parquet" / f"{part}.parquet", row_group_size=7)
    dataset = datasets.Dataset.from_dict({"body": TEXTS, "id": list(range(len(TEXTS)))})
    dataset.save_to_disk(root / "saved", num_shards=3)
    datasets.DatasetDict({"train": dataset, "test": dataset.select([0, 1])}).save_to_disk(root / "splits")
    names = {
        "text": "text",
        "glob": "jsonl/*.jsonl",
        "jsonl": "jsonl",
        "parquet": "parquet",
        "saved": "saved",
        "splits": "splits",
    }
    return {kind: str(root / name) for kind, name in names.items()}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["text", "glob", "jsonl", "parquet", "saved", "splits"])
def test_every_source_and_any_number_of_workers_give_the_same_rows(tokenizer, places, kind, workers, monkeypatch):
    monkeypatch.setattr("mdlm.data_encode._GROUP_DOCUMENTS", 3)
    data = open_data(DataConfig(source=places[kind], text_column="body", seq_len=16, workers=workers), tokenizer)
    expected = opened(tokenizer)
    assert first_epoch(data) == first_epoch(expected)
    assert data.validation_bytes == expected.validation_bytes
    assert data.fingerprint == expected.fingerprint, "the same rows, so a position in them may be taken over"
    assert list(training_texts(data.config)) == list(training_texts(expected.config, train=TEXTS))
    assert "TOKENIZERS_PARALLELISM" not in __import__("os").environ


def test_datasets_handed_over_and_validation_from_elsewhere(tokenizer, places):
    dataset = datasets.Dataset.from_dict({"body": TEXTS}).select(range(len(TEXTS) - 1, -1, -1))  # an index mapping
    config = DataConfig(source="given", text_column="body", seq_len=16)
    data = open_data(config, tokenizer, train=dataset, validation=TEXTS[:3])
    assert data.report.documents == len(TEXTS)
    assert data.validation_bytes == sum(len(t.encode()) for t in TEXTS[:3])
    assert len(list(training_texts(config, train=dataset, validation=TEXTS[:3]))) == len(TEXTS)
    split = open_data(
        DataConfig(source=places["splits"], text_column="body", validation_split="test", seq_len=16), tokenizer
    )
    assert split.report.documents == len(TEXTS)
    assert split.validation_bytes == sum(len(t.encode()) for t in TEXTS[:2])
    config = DataConfig(
        source=places["jsonl"], validation_source=places["jsonl"] + "/1.jsonl", text_column="body", seq_len=16
    )
    assert open_data(config, tokenizer).report.validation_documents == len(TEXTS) // 2
    none = opened(tokenizer, validation_fraction=0.0)
    assert none.validation is None
    assert none.report.documents == len(TEXTS)
    with pytest.raises(ValueError, match="there is no validation text: set validation_fraction"):
        next(none.validation_batches(1))


def test_tokens_of_a_saved_dataset_are_cached_by_datasets_and_mapped_from_disk(tokenizer, tmp_path, monkeypatch):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    config = DataConfig(source=str(tmp_path / "saved"), seq_len=16)
    first = first_epoch(open_data(config, tokenizer))
    assert list((tmp_path / "saved").glob("cache-*.arrow")), "datasets keeps the tokens beside the data"

    def again(*_: object) -> None:
        raise AssertionError("tokenised twice")

    monkeypatch.setattr("mdlm.data_encode.encode_documents", again)
    assert first_epoch(open_data(config, tokenizer)) == first
    monkeypatch.undo()
    other = train_bpe(TEXTS, 270)
    assert first_epoch(open_data(config, other)) == first_epoch(open_data(DataConfig(seq_len=16), other, train=TEXTS))
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "read-only")
    monkeypatch.setattr("os.access", lambda *_: False)
    assert first_epoch(open_data(DataConfig(source=str(tmp_path / "read-only"), seq_len=16), tokenizer)) == first
    assert not list((tmp_path / "read-only").glob("cache-*.arrow"))


def test_a_single_text_file_gives_its_tail(tokenizer, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(TEXTS))
    config = DataConfig(source=str(path), seq_len=16, shuffle=False, validation_fraction=0.25)
    data = open_data(config, tokenizer)
    (train,) = training_texts(config)
    validated = [t for b in data.validation_batches(4) for t in b.input_ids[b.maskable].tolist()]
    assert train + tokenizer.decode(validated) == "".join(TEXTS) + "<|eos|>"
    assert train.endswith("\n")
    assert len(train) == pytest.approx(0.75 * len("".join(TEXTS)), abs=60)
    tokens = [t for b in take(data.train_batches(1), data.rows_per_epoch) for t in b.input_ids[0].tolist()]
    assert tokenizer.decode(tokens) in train + "<|eos|>"


def test_blank_documents_are_left_out_and_counted(tokenizer):
    data = open_data(DataConfig(source="given", seq_len=16), tokenizer, train=[*TEXTS, "", " \n\t ", "\u3000"])
    assert data.report.blank == 3
    assert "3 documents of whitespace alone were left out" in str(data.report)
    assert first_epoch(data) == first_epoch(opened(tokenizer))
    mixed = ["", *(t for text in TEXTS for t in (text, "\n"))]
    assert list(training_texts(data.config, train=mixed)) == list(training_texts(data.config, train=TEXTS))
    dataset = datasets.Dataset.from_dict({"text": [*TEXTS, "", " \n\t ", "\u3000"]})
    assert open_data(DataConfig(source="given", seq_len=16), tokenizer, train=dataset).report.blank == 3


def test_the_built_in_corpus_end_to_end(tokenizer):
    data = open_data(DataConfig(seq_len=64), tokenizer)
    batch = next(data.train_batches(4))
    assert batch.input_ids.shape == (4, 64)
    assert int(batch.input_ids.max()) < len(tokenizer)
    assert not (batch.input_ids == tokenizer.mask_token_id).any()
    held = sum(int(data.validation.store.text_bytes[d]) for d in data.validation.documents)
    assert data.bytes_are_exact
    assert data.validation_bytes == held
    assert 200_000 < held < 1_500_000


@pytest.mark.parametrize("workers", [0, 2])
def test_faults_of_a_dataset_are_named(tokenizer, workers):
    def opening(columns: dict[str, list[object]], **options: object) -> Data:
        config = DataConfig(source="given", seq_len=16, workers=workers, **options)
        return open_data(config, tokenizer, train=datasets.Dataset.from_dict(columns))

    with pytest.raises(ValueError, match="dataset: no column 'text'; there are body, id"):
        opening({"body": ["a"], "id": [1]})
    with pytest.raises(ValueError, match=r"dataset: column 'text' is Value.*int64.*; a string column is needed"):
        opening({"text": [1]})
    with pytest.raises(ValueError, match=r"dataset: column 'text' is List\(.*; a string column is needed"):
        opening({"text": [["a"]]})
    with pytest.raises(ValueError, match="dataset row 1: the text is None of type NoneType"):
        opening({"text": ["a", None, "b"]})
    with pytest.raises(ValueError, match="dataset: no text to use: there are no documents"):
        open_data(DataConfig(), tokenizer, train=datasets.Dataset.from_dict({"text": ["a"]}).select([]))
    with pytest.raises(ValueError, match="all 2 documents are empty or only whitespace"):
        opening({"text": [" ", "\n"]})


@pytest.mark.parametrize("workers", [0, 2])
def test_faults_of_files_are_named_from_worker_processes_too(tokenizer, tmp_path, workers):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"^\S*x\.jsonl:2: not valid JSON"):
        open_data(DataConfig(source=str(path), workers=workers), tokenizer)


@pytest.mark.parametrize(
    ("options", "texts", "message"),
    [
        ({}, ["short", "texts"], r"one row takes 16: give more text, a smaller seq_len, or packing='none'"),
        ({}, [], "no text to use: there are no documents"),
        ({}, ["", " "], "all 2 documents are empty or only whitespace"),
        ({}, ["only one document, of many tokens indeed"], "only one document, so none can be held out"),
        ({}, 7, "needs a list of strings, a datasets.Dataset or an IterableDataset, not int"),
        ({}, {"train": 1}, "not dict; choose one of its splits"),
    ],
)
def test_text_that_gives_no_rows_is_refused(tokenizer, options, texts, message):
    with pytest.raises(ValueError, match=message):
        open_data(DataConfig(source="given", seq_len=16, **options), tokenizer, train=texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "csv"}, "format='csv': choose one of auto, text, lines, jsonl, parquet, saved, hub"),
        ({"packing": "documetns"}, "packing='documetns': choose one of stream, documents, none"),
        ({"seq_len": 1}, "seq_len=1: at least 2"),
        ({"workers": -1}, "workers=-1: at least 0"),
        ({"lanes": 0}, "lanes=0: at least 1"),
        ({"validation_rows": 0}, "validation_rows=0: at least 1"),
        ({"validation_fraction": 0.6}, "validation_fraction=0.6: a share from 0 to 0.5"),
        ({"source": ""}, "source is empty"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**options)


def test_names_that_lead_nowhere(tokenizer, tmp_path, places, monkeypatch):
    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'org/name' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        FileNotFoundError, match=r"dataset 'org/name' .* is no local file or folder and cannot be had from"
    ):
        open_data(DataConfig(source="org/name"), tokenizer)
    for name in ("no/such/file", "./nothing", "nothing.jsonl", "nothing*", str(tmp_path / "x.parquet")):
        with pytest.raises(FileNotFoundError, match="no such file or folder"):
            open_data(DataConfig(source=name), tokenizer)
    with pytest.raises(FileNotFoundError, match="no dataset written by save_to_disk"):
        open_data(DataConfig(source=str(tmp_path), format="saved"), tokenizer)
    with pytest.raises(ValueError, match="no split 'dev'; there are train, test"):
        open_data(DataConfig(source=places["splits"], split="dev"), tokenizer)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ValueError, match="the saved dataset cannot be read"):
        open_data(DataConfig(source=str(tmp_path)), tokenizer)

    def unknown(*_: object, **__: object) -> None:
        raise ValueError("Unknown split \"trian\". Should be one of ['train'].")

    monkeypatch.setattr(datasets, "load_dataset", unknown)
    with pytest.raises(ValueError, match=r"split 'trian'\) cannot be loaded: Unknown split \"trian\""):
        open_data(DataConfig(source="org/name", split="trian"), tokenizer)


def test_hub_datasets_are_asked_for_by_name(tokenizer, monkeypatch):
    asked = []

    def load(*args: object, **kwargs: object) -> datasets.Dataset:
        asked.append((args, kwargs))
        return datasets.Dataset.from_dict({"text": TEXTS})

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = open_data(DataConfig(source="org/name", name="small", validation_split="dev", seq_len=16), tokenizer)
    assert asked == [
        (("org/name", "small"), {"split": "train", "streaming": False}),
        (("org/name", "small"), {"split": "dev", "streaming": False}),
    ]
    assert data.report.documents == data.report.validation_documents == len(TEXTS)
    assert data.report.source == "org/name[train]"


def test_the_tokenizer_must_be_prepared(tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, mask_token="<|mask|>")
    with pytest.raises(ValueError, match="the tokenizer has no pad and no eos token"):
        open_data(DataConfig(source="given"), bare, train=TEXTS)


def test_opening_data_leaves_torch_randomness_alone(tokenizer):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    data = opened(tokenizer, workers=2)
    next(data.train_batches(2))
    assert torch.equal(torch.rand(3), expected)


SCRIPT = """
import json, sys
from mdlm.data import DataConfig, open_data
from mdlm.tokenization import load_tokenizer
rank, world, source, tokenizer = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
config = DataConfig(source=source, text_column="body", seq_len=16)
stream = open_data(config, load_tokenizer(tokenizer)).train_batches(2, rank=rank, world=world)
batches = [next(stream) for _ in range(5)]
print(json.dumps([[n, ids] for b in batches for n, ids in zip(b.rows.tolist(), b.input_ids.tolist())]))
"""


def test_two_real_processes_share_one_stream(tokenizer, places, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    started = [
        subprocess.Popen([*command, str(rank), "2", places["jsonl"], str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    rows = {n: ids for process in started for n, ids in json.loads(process.communicate()[0])}
    assert rows == {k: v for k, v in first_epoch(opened(tokenizer)).items() if k < 20}
    assert len(rows) == 20


def test_importing_the_data_module_does_not_import_datasets():
    code = "import sys, mdlm.data; assert not {'datasets', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


def test_encoded_documents_of_the_stream_are_those_of_the_tokenizer(tokenizer):
    data = opened(tokenizer, shuffle=False, validation_fraction=0.0)
    line = [t for ids in encode_texts(tokenizer, TEXTS) for t in [*ids.tolist(), tokenizer.eos_token_id]]
    rows = take(data.train_batches(1), data.rows_per_epoch)
    assert [t for b in rows for t in b.input_ids[0].tolist()] == line[: len(line) // 16 * 16]
