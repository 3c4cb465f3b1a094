"""Where text comes from: every kind of source gives the same rows, and every fault of one is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from text_rows import TEXTS, first_epoch, opened, small_bpe, take
from transformers import PreTrainedTokenizerFast

from mdlm.data import Data, DataConfig, open_data, training_texts
from mdlm.tokenization import encode_texts, train_bpe

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than a small machine has


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return small_bpe()


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
    assert "TOKENIZERS_PARALLELISM" not in os.environ


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
