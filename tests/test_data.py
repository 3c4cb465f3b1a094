"""Rows: every token once, one global order for any number of processes, exact positions, exact byte counts."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from text_rows import TEXTS, by_row, held_out_texts, opened, small_bpe, take
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from mdlm.data import Batch, DataConfig, count_bytes, merge_states, open_data, training_texts
from mdlm.data_pack import PackedRows, TokenStore, make_batch, permutation
from mdlm.data_source import held_out
from mdlm.tokenization import token_bytes, train_bpe

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than a small machine has


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return small_bpe()


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
    other = train_bpe(TEXTS, 280)
    other.backend_tokenizer.normalizer = normalizers.NFD()  # é becomes two characters: the table over-counts
    data = opened(other, validation_fraction=0.3)
    assert not data.bytes_are_exact
    assert data.validation_bytes == sum(len(t.encode()) for t in held_out_texts(data))
    part = opened(other, validation_fraction=0.3, validation_rows=4)
    share = part.validation_tokens / data.validation_tokens
    assert part.validation_bytes == pytest.approx(share * data.validation_bytes, rel=0.25)
