"""Streamed rows: the same for any number of processes and workers, resumed exactly, nothing lost between epochs."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from text_rows import TEXTS, small_bpe
from transformers import PreTrainedTokenizerFast

from mdlm.data import Batch, Data, DataConfig, merge_states, open_data, training_texts
from mdlm.data_stream import Lane, LaneState, check_workers
from mdlm.readers import Document

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than a small machine has


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return small_bpe()


@dataclass(frozen=True)
class Shards:
    """A source of given shards that notes what is read of it."""

    shards: tuple[tuple[str, ...], ...]
    name: str = "shards"
    seen: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def read(self, shard: int, start: int = 0) -> Iterator[Document]:
        for i in range(start, len(self.shards[shard])):
            self.seen.append((shard, i))
            yield Document(self.shards[shard][i], f"shard {shard} row {i}", i)


def make_lane(source: Shards, tokenizer: PreTrainedTokenizerFast, **options: object) -> Lane:
    defaults = {"lane": 0, "lanes": 1, "seq_len": 7, "packing": "stream", "shuffle": False, "seed": 3}
    return Lane(source, tokenizer, **{**defaults, "block_rows": 4, "held_out": 0.0, **options})


DOCUMENT = st.text("ab ", max_size=12)
SHARDS = st.lists(st.lists(DOCUMENT, max_size=4).map(tuple), min_size=1, max_size=4).map(tuple)


@given(shards=SHARDS, seq_len=st.integers(2, 9), lanes=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_the_rows_of_a_lane_are_its_documents_again_and_again(tokenizer, shards, seq_len, lanes):
    everything: list[str] = []
    for number in range(lanes):
        lane = make_lane(Shards(shards), tokenizer, lane=number, lanes=lanes, seq_len=seq_len)
        if len(shards) >= lanes:
            mine = [t for s in shards[number::lanes] for t in s if t.strip()]
        else:
            mine = [
                t
                for s, texts in enumerate(shards)
                for i, t in enumerate(texts)
                if t.strip() and (i + s) % lanes == number
            ]
        everything += mine
        if not mine:
            with pytest.raises(ValueError, match=f"lane {number} of {lanes} found no document with text"):
                next(lane.rows(LaneState()))
            continue
        epoch = "".join(t + "<|eos|>" for t in mine)
        rows = [row for row, _ in islice(lane.rows(LaneState()), 12)]
        assert all(len(row.ids) == seq_len for row in rows)
        text = tokenizer.decode([t for row in rows for t in row.ids.tolist()])
        assert (epoch * (len(text) // len(epoch) + 1)).startswith(text), "an epoch goes on where the last one ended"
    assert sorted(everything) == sorted(t for s in shards for t in s if t.strip())


@given(
    shards=SHARDS,
    packing=st.sampled_from(["stream", "documents", "none"]),
    shuffle=st.booleans(),
    before=st.integers(0, 20),
)
@settings(max_examples=60, deadline=None)
def test_a_lane_resumes_at_any_row(tokenizer, shards, packing, shuffle, before):
    if not any(t.strip() for s in shards for t in s):
        return
    lane = make_lane(Shards(shards), tokenizer, packing=packing, shuffle=shuffle)
    state = LaneState()
    rows = lane.rows(state)
    for _ in range(before):
        _, state = next(rows)
    for (expected, after), (got, after_too) in zip(islice(rows, 9), lane.rows(state)):
        assert expected.ids.tolist() == got.ids.tolist()
        assert expected.starts.tolist() == got.starts.tolist()
        assert after == after_too


def test_shuffling_permutes_blocks_and_shards_by_seed_and_epoch(tokenizer):
    shards = tuple((f"a{i}", f"b{i}", f"c{i}") for i in range(4))
    plain = make_lane(Shards(shards), tokenizer, packing="none")
    in_order = [tokenizer.decode(r.ids) for r, _ in islice(plain.rows(LaneState()), 12)]
    assert in_order == [t + "<|eos|>" for s in shards for t in s]

    def texts(count: int, source: tuple[tuple[str, ...], ...], **options: object) -> list[str]:
        lane = make_lane(Shards(source), tokenizer, packing="none", shuffle=True, **options)
        return [tokenizer.decode(row.ids) for row, _ in islice(lane.rows(LaneState()), count)]

    def differ(orders: list[list[str]]) -> bool:
        return all(a != b for i, a in enumerate(orders) for b in orders[:i])

    by_shard = [texts(36, shards, block_rows=1, seed=seed)[i : i + 12] for seed in (3, 4) for i in (0, 12, 24)]
    assert all(sorted(epoch) == sorted(in_order) for epoch in by_shard)
    assert all([t[0] for t in epoch] == ["a", "b", "c"] * 4 for epoch in by_shard), "a shard is read in its order"
    assert differ([by_shard[i] for i in (0, 1, 3)]), "the order of shards changes with epoch and seed"

    one = (tuple(f"x{i:02}" for i in range(40)),)
    blocks = [texts(40, one, block_rows=20, seed=seed)[i : i + 20] for seed in (3, 4) for i in (0, 20)]
    assert [sorted(block) for block in blocks] == [[f"x{i:02}<|eos|>" for i in range(j, j + 20)] for j in (0, 20)] * 2
    places = [[int(t[1:3]) % 20 for t in block] for block in blocks]
    lane = texts(20, one * 2, block_rows=20, lane=1, lanes=2)
    assert differ([*places, [int(t[1:3]) for t in lane]]), "the order in a block changes with block, seed and lane"


def test_resuming_from_a_state_reads_one_block_again_and_no_more(tokenizer):
    shards = tuple(tuple(f"shard {s} document {i} with some words" for i in range(20)) for s in range(4))
    source = Shards(shards)
    lane = make_lane(source, tokenizer, seq_len=20, shuffle=True)
    rows = lane.rows(LaneState())
    state = LaneState()
    for _ in range(50):
        _, state = next(rows)
    source.seen.clear()
    next(lane.rows(state))
    assert len(source.seen) <= 32 + 20, "one group of documents, and the rest of nothing"
    assert source.seen[0][1] == state.block.record


def streaming(tokenizer: PreTrainedTokenizerFast, source: object = None, **options: object) -> Data:
    config = DataConfig(source="given", streaming=True, seq_len=16, lanes=4, shuffle_buffer=12, validation_fraction=0.2)
    return open_data(replace(config, **options), tokenizer, train=TEXTS if source is None else source)


def take(data: Data, batch_size: int, count: int, **where: object) -> tuple[list[Batch], dict]:
    stream = data.train_batches(batch_size, **where)
    batches = [next(stream) for _ in range(count)]
    state = json.loads(json.dumps(stream.state_dict()))
    stream.close()
    return batches, state


def by_row(batches: list[Batch]) -> dict[int, tuple]:
    rows: dict[int, tuple] = {}
    for batch in batches:
        positions = batch.input_ids if batch.position_ids is None else batch.position_ids
        for number, *row in zip(
            batch.rows.tolist(), batch.input_ids.tolist(), positions.tolist(), batch.maskable.tolist()
        ):
            assert number not in rows, f"row {number} came twice"
            rows[number] = tuple(map(tuple, row))
    return rows


@pytest.mark.parametrize("packing", ["stream", "documents", "none"])
@pytest.mark.parametrize(
    ("world", "batch_size", "workers"),
    [(1, 6, 0), (2, 3, 0), (3, 2, 0), (1, 4, 2), (1, 3, 4), (2, 3, 2), (3, 2, 4), (4, 1, 1)],
)
def test_rows_do_not_depend_on_processes_or_workers(tokenizer, world, batch_size, workers, packing):
    count = 5
    alone, _ = take(streaming(tokenizer, packing=packing), 1, count * batch_size * world)
    data = streaming(tokenizer, packing=packing, workers=workers)
    shared = [b for rank in range(world) for b in take(data, batch_size, count, rank=rank, world=world)[0]]
    assert by_row(shared) == by_row(alone)
    assert len(by_row(alone)) == count * batch_size * world


@pytest.mark.parametrize(
    ("world", "workers", "world_after", "workers_after"), [(1, 0, 1, 2), (1, 2, 2, 0), (2, 2, 3, 0), (3, 0, 1, 4)]
)
def test_resuming_is_exact_with_a_state_of_any_processes_and_without_one(
    tokenizer, world, workers, world_after, workers_after
):
    expected = by_row(take(streaming(tokenizer), 1, 60)[0])
    before = streaming(tokenizer, workers=workers)
    states = [take(before, 2, 12 // (2 * world) + 1, rank=rank, world=world)[1] for rank in range(world)]
    merged = merge_states(states)
    row = merged["row"]
    after = streaming(tokenizer, workers=workers_after)
    count = -(-24 // world_after) // 2
    for state, start in ((merged, None), (None, row), (states[0], None), (merged, row + 5), (merged, row - 4)):
        begin = row if start is None else start
        got = by_row(
            [
                b
                for rank in range(world_after)
                for b in take(after, 2, count, rank=rank, world=world_after, state=state, start_row=start)[0]
            ]
        )
        assert got == {n: expected[n] for n in range(begin, begin + 2 * count * world_after)}


def test_documents_held_out_are_validated_and_never_trained_on(tokenizer):
    data = streaming(
        tokenizer, validation_fraction=0.3, packing="none", seq_len=200, validation_rows=100, shuffle_buffer=1
    )
    trained = {tokenizer.decode(b.input_ids[b.maskable]) for b in take(data, 1, 200)[0]}
    validated = [tokenizer.decode(b.input_ids[b.maskable]) for b in data.validation_batches(1)]
    assert not trained & set(validated)
    assert sorted([*trained, *validated]) == sorted(t + "<|eos|>" for t in TEXTS)
    assert trained == {t + "<|eos|>" for t in training_texts(data.config, train=TEXTS)}
    whole = open_data(replace(data.config, streaming=False), tokenizer, train=TEXTS)
    assert [tokenizer.decode(b.input_ids[b.maskable]) for b in whole.validation_batches(1)] == validated
    assert data.report.documents is None
    assert "training text is streamed" in str(data.report)
    few = streaming(tokenizer, validation_fraction=0.3, validation_rows=2)
    assert few.validation.rows_per_epoch == 2
    assert few.validation_tokens == 32


def test_blank_documents_change_nothing_but_the_order_of_lanes(tokenizer):
    texts = [t for text in TEXTS for t in (text, " \n", "")]
    data = streaming(tokenizer, texts, lanes=1, shuffle=False)
    assert by_row(take(data, 1, 30)[0]) == by_row(take(streaming(tokenizer, lanes=1, shuffle=False), 1, 30)[0])


@pytest.fixture(scope="module")
def hf_streams(tmp_path_factory) -> dict[str, object]:
    root = tmp_path_factory.mktemp("hf")
    parts = [TEXTS[i::5] for i in range(5)]
    for i, part in enumerate(parts):
        (root / f"{i}.jsonl").write_text("".join(json.dumps({"text": t, "id": i}) + "\n" for t in part))
    files = sorted(str(p) for p in root.glob("*.jsonl"))
    dataset = datasets.Dataset.from_dict({"text": TEXTS})
    dataset.save_to_disk(root / "saved")
    return {
        "loaded": datasets.load_dataset(
            "json", data_files=files, split="train", streaming=True, cache_dir=str(root / "cache")
        ),
        "converted": dataset.to_iterable_dataset(num_shards=7),
        "one shard": dataset.to_iterable_dataset(num_shards=1),
        "map-style": dataset,
        "saved": str(root / "saved"),
        "files": str(root / "*.jsonl"),
        "mapped": dataset.to_iterable_dataset(num_shards=4).map(str_upper),
    }


def str_upper(example: dict[str, str]) -> dict[str, str]:
    return {"text": example["text"].upper()}


KINDS = ["loaded", "converted", "one shard", "map-style", "saved", "files", "mapped"]


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_datasets_shard_and_resume(tokenizer, hf_streams, kind):
    source = hf_streams[kind]
    config = DataConfig(streaming=True, seq_len=16, lanes=4, shuffle_buffer=8, validation_fraction=0.0)
    given = None if isinstance(source, str) else source
    config = replace(config, source=source if given is None else "given")

    def opened(**options: object) -> Data:
        return open_data(replace(config, **options), tokenizer, train=given)

    alone = by_row(take(opened(), 1, 48)[0])
    shared = [take(opened(workers=2), 3, 4, rank=rank, world=2) for rank in range(2)]
    assert by_row([b for batches, _ in shared for b in batches]) == {n: alone[n] for n in range(24)}
    resumed = take(opened(), 4, 6, state=merge_states([state for _, state in shared]))[0]
    assert by_row(resumed) == {n: alone[n] for n in range(24, 48)}
    single = open_data(replace(config, packing="none", seq_len=200, shuffle_buffer=1), tokenizer, train=given)
    texts = {tokenizer.decode(b.input_ids[b.maskable]).removesuffix("<|eos|>") for b in take(single, 1, 200)[0]}
    assert texts == ({t.upper() for t in TEXTS} if kind == "mapped" else set(TEXTS))


@pytest.mark.parametrize("workers", [0, 2])
def test_faults_met_on_the_way_are_named(tokenizer, tmp_path, workers):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "one document of some length"}\n' * 3 + '{"text": 5}\n')
    config = DataConfig(source=str(path), streaming=True, lanes=2, seq_len=16, workers=workers, validation_fraction=0.0)
    with pytest.raises(ValueError, match=r"^\S*x\.jsonl:4: the text is 5 of type int"):
        take(open_data(config, tokenizer), 1, 100)

    stream = datasets.Dataset.from_dict({"text": ["a", "b", None]}).to_iterable_dataset()
    data = streaming(tokenizer, stream, lanes=1, validation_fraction=0.0, workers=workers and 1)
    with pytest.raises(ValueError, match=r"^dataset shard 0 row 2: the text is None"):
        take(data, 1, 100)


def test_a_lane_without_documents_is_refused(tokenizer):
    data = streaming(tokenizer, TEXTS[:3], validation_fraction=0.0)
    with pytest.raises(ValueError, match="texts: lane 3 of 4 found no document with text to train on; set lanes to"):
        take(data, 1, 4)
    data = streaming(tokenizer, TEXTS[:1], validation_fraction=0.0, lanes=1)
    assert tokenizer.decode(take(data, 1, 1)[0][0].input_ids[0]) in (TEXTS[0] + "<|eos|>") * 3


def test_streams_that_cannot_be_opened(tokenizer):
    stream = datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()
    with pytest.raises(ValueError, match="dataset: this is a streaming dataset; set streaming=true"):
        streaming(tokenizer, stream, streaming=False)
    with pytest.raises(ValueError, match="dataset: no column 'body'; there are text"):
        streaming(tokenizer, stream, text_column="body")
    with pytest.raises(ValueError, match="dataset: the dataset is empty"):
        streaming(tokenizer, datasets.Dataset.from_dict({"text": TEXTS}).select([]))
    with pytest.raises(
        ValueError, match=r"texts: no document to validate on was found; raise validation_fraction=1e-09"
    ):
        streaming(tokenizer, validation_fraction=1e-9)
    with pytest.raises(ValueError, match=r"no document to validate on was found$"):
        open_data(DataConfig(source="given", streaming=True), tokenizer, train=TEXTS, validation=[" "])


def test_columns_that_only_show_on_the_way_are_checked(tokenizer):
    def examples() -> Iterator[dict[str, str]]:
        yield {"body": "a", "id": "b"}

    stream = datasets.IterableDataset.from_generator(examples)
    data = streaming(tokenizer, stream, lanes=1, validation_fraction=0.0)
    with pytest.raises(ValueError, match="dataset shard 0 row 0: no column 'text'; there are body, id"):
        take(data, 1, 1)


def test_workers_must_share_the_lanes_evenly(tokenizer):
    check_workers(4, 8, 2)
    check_workers(0, 7, 3)
    with pytest.raises(
        ValueError,
        match=r"workers=3 does not fit: with lanes=8 and 2 processes each process has 4 lanes, .* by 1 or 2 or 4",
    ):
        check_workers(3, 8, 2)
    with pytest.raises(ValueError, match="workers=3 does not fit"):
        streaming(tokenizer, workers=3).train_batches(1)


def test_streaming_leaves_torch_randomness_alone(tokenizer):
    torch.manual_seed(1)
    expected = torch.rand(3)
    for workers in (0, 2):
        torch.manual_seed(1)
        take(streaming(tokenizer, workers=workers), 1, 2)
        assert torch.equal(torch.rand(3), expected)


def test_a_streaming_position_in_other_data_is_refused(tokenizer):
    state = take(streaming(tokenizer), 1, 2)[1]
    for options in ({"lanes": 2}, {"shuffle_buffer": 40}, {"seed": 2}, {"validation_fraction": 0.3}):
        with pytest.raises(ValueError, match="the saved position belongs to other data"):
            streaming(tokenizer, **options).train_batches(1, state=state)


def test_workers_leave_signals_from_others_to_the_trainer(tokenizer):
    expected = by_row(take(streaming(tokenizer), 1, 400)[0])
    stream = streaming(tokenizer, workers=2).train_batches(4)
    first = [next(stream)]
    workers = [str(worker.pid) for worker in multiprocessing.active_children()]
    assert len(workers) == 2
    for name in ("INT", "TERM"):
        subprocess.run(["bash", "-c", f"kill -{name} {' '.join(workers)}"], check=True)
    rest = [next(stream) for _ in range(99)]  # more than was made before the signals
    assert by_row([*first, *rest]) == expected
    stream.close()
    assert not multiprocessing.active_children()


def test_a_program_ends_though_its_stream_is_open(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    code = f"""
from mdlm.data import DataConfig, open_data
from mdlm.tokenization import load_tokenizer
config = DataConfig(source="given", streaming=True, seq_len=16, lanes=2, workers=2, validation_fraction=0.0)
stream = open_data(config, load_tokenizer({str(tmp_path)!r}), train=["some text of a document"] * 9).train_batches(2)
next(stream)
raise SystemExit(7)
"""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore:This DataLoader", "-c", code], timeout=60, capture_output=True
    )
    assert (ended.returncode, ended.stderr) == (7, b"")
