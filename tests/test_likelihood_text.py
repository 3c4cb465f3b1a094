"""From documents to windows: against plain Python, against training's own rows, detokenizers by hand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import write_texts

from mdlm.data import DataConfig, open_data
from mdlm.eval import likelihood_text
from mdlm.eval.likelihood_detokenize import DETOKENIZERS
from mdlm.eval.likelihood_text import EvaluationRows, TextProtocol, open_rows
from mdlm.readers import Document
from mdlm.tokenization import train_bpe

LINES = ["the cat sat on a mat", "and", "saw one dog run to the red house while it was raining", "it was", "a dog " * 9]
TOKENIZER = train_bpe([*LINES, "the dog sat on the red mat"], 270)
TOKENIZER.add_special_tokens({"bos_token": "<|bos|>"})
BOS, EOS, PAD = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("\n".join([*LINES[:2], "   ", *LINES[2:]]) + "\n")
    return path


def flat(parts: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(parts))


def opened(file: Path, **options: Any) -> EvaluationRows:
    config = DataConfig(source=str(file), format="lines", workers=0)
    return open_rows(config, TOKENIZER, TextProtocol(**options), whole=True)


def reference(options: dict[str, Any]) -> list[tuple[list[int], list[bool], list[int]]]:
    """Windows written down with plain lists: tokens, which count, where documents begin."""
    p = {"packing": "stream", "seq_len": 12, "stride": None, "bos": "none", "eos": "none", "document_eos": True}
    p.update(options)
    docs = [TOKENIZER(line, add_special_tokens=False)["input_ids"] for line in LINES]
    docs = [[*doc, EOS] if p["document_eos"] else doc for doc in docs]
    body = p["seq_len"] - (p["bos"] != "none") - (p["eos"] != "none")
    texts = docs if p["packing"] == "none" else [flat(docs)]
    begin = set(itertools.accumulate([0, *map(len, docs)]))
    out = []
    for text in texts:
        ends = [min(body, len(text))]
        while ends[-1] < len(text) and not (p["packing"] == "none" and p["stride"] is None):
            ends.append(min(ends[-1] + (p["stride"] or body), len(text)))
        for number, end in enumerate(ends):
            # A later window ends `stride` further on; what it repeats is what the one before has counted.
            full = body + number * (p["stride"] or body)
            low = full - body
            ids = text[low:end]
            new = [i >= (ends[number - 1] if number else 0) for i in range(low, end)]
            starts = [0] + [
                i - low + (p["bos"] != "none") for i in range(low + 1, end) if i in begin and p["packing"] != "none"
            ]
            if p["bos"] != "none":
                ids, new = [BOS, *ids], [p["bos"] == "scored", *new]
            if p["eos"] != "none":
                ids, new = [*ids, EOS], [*new, p["eos"] == "scored"]
            out.append((ids, new, starts))
    return out


PROTOCOLS: dict[str, dict[str, Any]] = {
    "wrapped": {},
    "wrapped as MDLM does": {"bos": "scored", "eos": "scored"},
    "wrapped as BD3-LM does": {"document_eos": False},
    "start given": {"bos": "given", "packing": "documents"},
    "overlapping": {"stride": 5},
    "overlapping by one": {"stride": 1, "bos": "given"},
    "overlapping documents": {"stride": 4, "packing": "documents", "eos": "given"},
    "padded": {"packing": "none"},
    "padded as MDLM does LM1B": {"packing": "none", "document_eos": False, "bos": "scored", "eos": "scored"},
    "padded in further windows": {"packing": "none", "stride": 12},
    "padded overlapping": {"packing": "none", "stride": 3, "bos": "given"},
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_windows_are_those_of_plain_lists(file: Path, name: str) -> None:
    rows = opened(file, seq_len=12, **PROTOCOLS[name])
    expected = reference(PROTOCOLS[name])
    got = list(rows.rows())
    assert [number for number, _ in got] == list(range(rows.count))
    assert rows.count == len(expected)
    for (_, row), (ids, new, starts) in zip(got, expected):
        assert row.ids.tolist() == ids
        assert (row.supervised.tolist() if row.supervised is not None else [True] * len(ids)) == new
        assert row.starts.tolist() == starts


@pytest.mark.parametrize("options", [{}, {"stride": 5}, {"packing": "documents", "stride": 2}], ids=["a", "b", "c"])
def test_every_token_counts_exactly_once(file: Path, options: dict[str, Any]) -> None:
    rows = opened(file, seq_len=12, **options)
    counted = [token for _, row in rows.rows() for token in row.counted.tolist()]
    assert counted == flat(TOKENIZER(line, add_special_tokens=False)["input_ids"] + [EOS] for line in LINES)
    batches = list(rows.batches(4))
    assert sum(int(batch.maskable.sum()) for batch in batches) == len(counted)
    size = sum(int((rows.token_bytes[b.input_ids] * b.maskable).sum()) for b in batches)
    assert size == sum(len(line.encode()) for line in LINES)
    assert {b.input_ids.shape for b in batches} == {(4, 12)}


def test_padded_documents_are_cut_and_counted(file: Path) -> None:
    rows = opened(file, seq_len=12, packing="none")
    lengths = [len(TOKENIZER(line, add_special_tokens=False)["input_ids"]) + 1 for line in LINES]
    assert rows.report["cut_documents"] == sum(length > 12 for length in lengths) > 0
    assert rows.count == len(LINES)
    batch = next(rows.batches(8))
    assert batch.attention_mask is not None
    assert batch.attention_mask.sum(1).tolist() == [min(length, 12) for length in lengths] + [0] * 3


def test_processes_share_the_batches_and_finished_rows_are_left_out(file: Path) -> None:
    rows = opened(file, seq_len=6, stride=2)
    whole = [b.rows.tolist() for b in rows.batches(3)]
    shared = [[b.rows.tolist() for b in rows.batches(3, rank, 2)] for rank in range(2)]
    assert sorted(flat(shared)) == whole
    assert abs(len(shared[0]) - len(shared[1])) <= 1
    left = [b.rows.tolist() for b in rows.batches(3, done={*whole[0], *whole[2]})]
    assert left == [whole[1], *whole[3:]]


def test_some_rows_are_spread_evenly(file: Path) -> None:
    every = [row.ids.tolist() for _, row in opened(file, seq_len=6).rows()]
    some = opened(file, seq_len=6, rows=4)
    assert [row.ids.tolist() for _, row in some.rows()] == [every[i * len(every) // 4] for i in range(4)]
    assert opened(file, seq_len=6, rows=10_000).count == len(every)


@pytest.mark.parametrize("packing", ["stream", "documents", "none"])
@pytest.mark.parametrize("limit", [None, 5])
def test_held_out_text_is_cut_as_training_cuts_it(tmp_path: Path, packing: Any, limit: int | None) -> None:
    config = DataConfig(
        source=str(write_texts(tmp_path)), seq_len=24, packing=packing, validation_fraction=0.4, validation_rows=limit
    )
    expected = list(open_data(config, TOKENIZER).validation_batches(4))
    protocol = TextProtocol(packing=packing, seq_len=24, rows=limit)
    rows = open_rows(config, TOKENIZER, protocol, whole=False)
    got = list(rows.batches(4))
    assert len(got) == len(expected) > 1
    for ours, theirs in zip(got, expected):
        for name in ("input_ids", "maskable", "attention_mask", "position_ids"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert (a is None and b is None) or torch.equal(a, b), name
        assert torch.equal(ours.rows, theirs.rows)


def test_text_is_read_as_it_is_evaluated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Symptom: evaluating a large data set runs out of memory because all of it is tokenised first."""
    read = [0]

    class Endless:
        name, num_shards = "many", 1

        def read(self, shard: int, start: int = 0) -> Iterator[Document]:
            for number in range(3000):
                read[0] += 1
                yield Document(LINES[number % len(LINES)], f"line {number}", number)

    monkeypatch.setattr(likelihood_text, "open_source", lambda config: Endless())
    rows = open_rows(DataConfig(), TOKENIZER, TextProtocol(seq_len=12), whole=True)
    assert read[0] == 3000  # counted once, nothing kept
    batches = rows.batches(2)
    next(batches)
    assert read[0] < 3000 + 600
    assert 1 + sum(1 for _ in batches) == -(-rows.count // 2)
    assert rows.report["documents"] == 3000


def test_text_of_another_detokenizer_is_another_text(file: Path) -> None:
    plain, changed = opened(file, seq_len=12), opened(file, seq_len=12, detokenizer="lambada")
    assert plain.fingerprint != changed.fingerprint
    (_, row) = next(iter(changed.rows()))
    assert TOKENIZER.decode(row.ids).startswith("\nthe cat")
    assert plain.fingerprint == opened(file, seq_len=12).fingerprint


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("none", " a @-@ b ", " a @-@ b "),
        ("wikitext", " = = Early life = = \n A well @-@ known , 1 @,@ 000 m ( 3 @.@ 5 ft ) .", None),
        ("wikitext", "the boys ' \" big \" house ; 5 ° C [ x ] { y } is John 's", None),
        ("ptb", "he does n't own N N shares of the company 's $ N \\/ <unk>", None),
        ("lm1b", 'see http : / / a.b / c ? yes , it \'s " good " ( very ) for $ 5 .', None),
        ("lm1b", "we won ! who ?", None),
        ("lambada", "  “Yes,” he said.\n", '\n"Yes," he said.'),
    ],
)
def test_detokenizers_by_hand(name: str, text: str, expected: str | None) -> None:
    by_hand = {
        " = = Early life = = \n A well @-@ known , 1 @,@ 000 m ( 3 @.@ 5 ft ) .": (
            " == Early life ==\nA well-known, 1,000 m (3.5 ft) ."
        ),
        "the boys ' \" big \" house ; 5 ° C [ x ] { y } is John 's": (
            # "boys '" closes up, and the quote it leaves pairs with the one before the last s
            "the boys'\"big\" house; 5°C [x] {y} is John's"
        ),
        "he does n't own N N shares of the company 's $ N \\/ <unk>": (
            "he doesn't own 1 1 shares of the company's $1 / ?"
        ),
        'see http : / / a.b / c ? yes , it \'s " good " ( very ) for $ 5 .': (
            'see http://a.b/c? yes, it\'s "good" (very) for $5.'
        ),
        "we won ! who ?": "we won! who?",
    }
    assert DETOKENIZERS[name](text) == (by_hand[text] if expected is None else expected)


def test_scientific_papers_are_wikitext_then_lm1b() -> None:
    text = "a @-@ b , c / d ? e"
    assert DETOKENIZERS["scientific_papers"](text) == "a-b, c/d? e"
    assert DETOKENIZERS["scientific_papers"](text) == DETOKENIZERS["lm1b"](DETOKENIZERS["wikitext"](text))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 4000}, "less than one window of 4000"),
        ({"stride": 13}, r"lie in 1\.\.12"),
        ({"stride": 0}, "stride is 0"),
        ({"stride": 12, "bos": "given"}, r"lie in 1\.\.11"),
        ({"packing": "none", "eos": "scored"}, "two end tokens"),
        ({"detokenizer": "wikitex"}, "did you mean 'wikitext'"),
        ({"bos": "yes"}, "unknown bos"),
        ({"packing": "wrap"}, "unknown packing"),
        ({"rows": 0}, "at least one window"),
        ({"seq_len": 1, "bos": "given"}, "no room for text"),
    ],
    ids=[
        "short",
        "long-stride",
        "zero-stride",
        "stride-bos",
        "two-ends",
        "detokenizer",
        "bos",
        "packing",
        "rows",
        "room",
    ],
)
def test_bad_input_is_named(file: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opened(file, **{"seq_len": 12, **options})


def test_a_tokenizer_without_start_token_is_named(file: Path) -> None:
    config = DataConfig(source=str(file), format="lines")
    with pytest.raises(ValueError, match="no start token"):
        open_rows(config, train_bpe(LINES, 270), TextProtocol(seq_len=12, bos="given"), whole=True)
    blank = file.with_name("blank.txt")
    blank.write_text(" \n\n")
    with pytest.raises(ValueError, match="no text to evaluate"):
        open_rows(dataclasses.replace(config, source=str(blank)), TOKENIZER, TextProtocol(seq_len=12), whole=True)
