"""The benchmark commands at toy size: what they measure is what they say, what they make of it is right."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections import Counter
from fractions import Fraction
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mdlm.config import MDLMConfig
from mdlm.eval.speed_sampling import plain_step
from mdlm.modeling import MDLMForMaskedLM
from mdlm.readers import Document, TextSource
from mdlm.tokenization import num_tokens, padded_vocab_size, train_bpe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import lines
import page
import sampler_speed
import sampling
import scaling
from text_quality import NGram, distinct_share, parsed_share


def witten_bell(text: list[int], vocab: int, history: tuple[int, ...], word: int) -> Fraction:
    """The formula of `NGram`, counted by hand for one token."""
    longer = len(history)
    lower = witten_bell(text, vocab, history[1:], word) if longer else Fraction(1, vocab)
    runs = Counter(tuple(text[i : i + longer + 1]) for i in range(len(text) - longer))
    behind = {run[-1]: count for run, count in runs.items() if run[:-1] == history}
    if not behind:
        return lower
    return (behind.get(word, 0) + len(behind) * lower) / (sum(behind.values()) + len(behind))


TEXT = [0, 1, 2, 0, 1, 3, 0, 1, 2, 2]


def test_the_ngram_model_is_witten_bells() -> None:
    model = NGram(np.array(TEXT), vocab=5)
    # behind (0, 1): 2 twice, 3 once; behind (1): the same; unigrams: 0 and 1 and 2 three times, 3 once; 5 ids
    unigram = (3 + 4 * Fraction(1, 5)) / (10 + 4)
    by_hand = (2 + 2 * (2 + 2 * unigram) / (3 + 2)) / (3 + 2)
    assert witten_bell(TEXT, 5, (0, 1), 2) == by_hand
    rows = np.array(list(product(range(5), repeat=4)))
    nats = model.nats(rows, start=2)
    assert nats.shape == (625, 2)
    for row, found in zip(rows.tolist(), nats):
        for place in (2, 3):
            expected = witten_bell(TEXT, 5, tuple(row[place - 2 : place]), row[place])
            assert math.exp(-found[place - 2]) == pytest.approx(float(expected), rel=1e-12)
    total = np.exp(-nats[:, 1]).reshape(5, 5, 5, 5).sum(axis=-1)
    assert total == pytest.approx(np.ones((5, 5, 5)))


def test_the_ngram_model_refuses_what_it_cannot_count() -> None:
    with pytest.raises(ValueError, match="63 bits"):
        NGram(np.array(TEXT), vocab=2**21)
    with pytest.raises(ValueError, match=r"ids of 0 \.\. 2"):
        NGram(np.array(TEXT), vocab=3)
    with pytest.raises(ValueError, match="needs 2 tokens before it"):
        NGram(np.array(TEXT), vocab=5).nats(np.array([TEXT]), start=1)


@pytest.mark.parametrize(
    ("prompt", "text", "share"),
    [
        ("def f(x):\n", "    return x\n\ndef g():\n    pass\n    y = (", 1.0),  # the cut line does not count
        ("def f(a", "):\n    return a\n\nx", 1.0),  # the line that the prompt began is completed here
        ("def f(a", "):\nx", 0.0),  # no body yet
        ("def f():\n", "    a = 1\n    b = (\n    c\n    d = 1\n", 0.25),  # the bracket is never closed
        ("def f():\n", "    a = 1\n    b = = 2\n    c = 3\n    d = 4\n    e = 5\n", 0.2),
        ("def f():\n", "    return 1  # no line ends", 0.0),
        ("class A:\n    def f(self):\n        pass\n", "   x = 1\n", 0.0),  # indentation that fits nothing
        ("x = 1\n", "y = 'a\\d'\nz = \x00\n", 0.5),  # a warning, and a null byte
        ("x = 1\n", "(" * 300 + "\n", 0.0),
    ],
)
def test_lines_count_up_to_where_the_syntax_ends(prompt: str, text: str, share: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parsed_share(prompt, text) == share


def test_distinct_share_counts_runs_once() -> None:
    assert distinct_share([7] * 6) == pytest.approx(1 / 3)
    assert distinct_share([1, 2, 1, 2, 1, 2]) == pytest.approx(2 / 3)
    assert distinct_share([1, 2, 3, 4, 5]) == 1.0
    with pytest.raises(ValueError, match="3 tokens hold no run of 4"):
        distinct_share([1, 2, 3])


def test_a_loss_is_the_change_for_the_worse_with_the_error_of_the_paired_differences() -> None:
    assert sampling.loss([2.0, 3.0], [1.0, 1.0], better=-1) == pytest.approx((150.0, 50.0))
    assert sampling.loss([0.8, 1.0], [1.0, 1.0], better=1) == pytest.approx((10.0, 10.0))
    assert sampling.loss([2.0], [4.0], better=-1)[0] == -50.0
    assert all(math.isnan(value) for value in sampling.loss([1.0, 1.0], [0.0, 0.0], better=1))


def _line(strategy: str, ratio: float, nats: float, syntax: float, distinct: float, **more: Any) -> dict[str, Any]:
    qualities = {"nats": [nats] * 2, "syntax": [syntax] * 2, "distinct_4": [distinct] * 2}
    rates = {name: {"1": ratio, "16": 1.0} for name in ("ratio", "tokens_per_s")}
    task = {"prompts": 2, "prompt_tokens": 64, "new_tokens": 128, "temperature": 0.0, "batch": 16}
    facts = {"model": "m", "parameters": 7e6, "weights": "w", "task": task, "machine": lines.machine()}
    candidate = {"strategy": strategy, "knobs": {}, "cache": "dual"}
    return {**facts, **candidate, **qualities, **rates, "tokens_per_forward": 2.0, **more}


PLAIN = _line(sampling.PLAIN, 1.0, 4.0, 0.8, 0.9)


@pytest.mark.parametrize(
    ("line", "batches"),
    [
        (_line("good", 4.0, 4.05, 0.79, 0.89), ["1"]),
        (_line("better", 9.0, 2.0, 1.0, 1.0), ["1"]),
        (_line("slow", 3.9, 4.0, 0.8, 0.9), []),
        (_line("unlikely", 4.0, 4.09, 0.8, 0.9), []),
        (_line("broken", 4.0, 4.0, 0.78, 0.9), []),
        (_line("repetitive", 9.0, 1.0, 1.0, 0.5), []),
        (_line("of other weights", 9.0, 4.0, 0.8, 0.9, weights="v"), []),
    ],
    ids=lambda value: value["strategy"] if isinstance(value, dict) else "",
)
def test_the_target_is_speed_at_no_loss_of_any_quality(line: dict[str, Any], batches: list[str]) -> None:
    assert sampling.reached(line, [PLAIN, line]) == batches
    assert sampling.reached(PLAIN, [PLAIN]) == []


def test_the_plain_loop_draws_from_the_tempered_law() -> None:
    logits = torch.tensor([9.0, 0.0, 1.0, 2.0])

    class Fixed:
        config = SimpleNamespace(mask_token_id=0)

        def __call__(self, canvas: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=logits.expand(*canvas.shape, 4).clone())

    torch.manual_seed(0)
    count = 4000
    drawn = plain_step(Fixed(), torch.zeros(count, 1, dtype=torch.int64), end=1, temperature=2.0)  # type: ignore[arg-type]
    expected = (logits[1:] / 2).softmax(-1)
    error = (expected * (1 - expected) / count).sqrt()
    found = torch.bincount(drawn[:, 0], minlength=4)[1:] / count
    assert bool(((found - expected).abs() < 4 * error).all())


CODE = '''import sys


def add(first, second):
    """The sum of both."""
    total = first + second
    return total


@decorated
class Thing:
    name = "thing"

    def show(self):
        print(self.name, add(1, 2))
'''


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights and a tokenizer of code."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = train_bpe([CODE] * 4, vocab_size=290)
    torch.manual_seed(0)
    config = MDLMConfig(
        vocab_size=padded_vocab_size(tokenizer),
        num_tokens=num_tokens(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        mask_token_id=tokenizer.mask_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    MDLMForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small text in place of the built-in corpus, one file of it held out."""
    documents = (
        Document(CODE, "held.py", 0, side="validation"),
        Document(CODE * 3, "other.py", 1, side="train"),
        Document("def topic(): pass\n" * 20, "topics.py#help", 2, side="validation"),
    )
    monkeypatch.setattr(sampling, "builtin_source", lambda: TextSource(documents))
    monkeypatch.setattr(sampling, "training_texts", lambda config: iter([CODE * 3]))


def test_prompts_begin_where_a_function_or_class_does(checkpoint: Path, corpus: None) -> None:
    from mdlm.load import load_model

    _, tokenizer = load_model(checkpoint)
    rows = sampling.pieces_of_code(tokenizer, 2, 12)
    texts = [tokenizer.decode(row) for row in rows]
    assert texts[0].startswith("def add(")
    assert texts[1].startswith("@decorated")
    assert all(text in CODE for text in texts)
    with pytest.raises(ValueError, match="only 2 pieces"):
        sampling.pieces_of_code(tokenizer, 3, 12)


TOY = ["--prompts=2", "--single=1", "--batch=2", "--prompt_tokens=6", "--new_tokens=8", "--block=4"]


def test_sampling_is_measured_once_reported_and_gone_on_with(
    checkpoint: Path, corpus: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [
        sampling.candidate(sampling.TEXT, ""),
        sampling.candidate(sampling.PLAIN, "none"),
        sampling.candidate("confidence", "none", block_length=4),
        sampling.candidate("threshold", "dual", threshold=0.0, block_length=4),
    ]
    monkeypatch.setattr(sampling, "CANDIDATES", chosen)
    path = tmp_path / "results" / "sampling.jsonl"
    command = [f"--file={path}", f"--model={checkpoint}", *TOY]
    assert sampling.main(command) == 0
    text, plain, one, all_at_once = lines.measured(path)
    assert text["distinct_4"] == [1.0, 1.0]
    for name in sampling.QUALITIES:
        assert one[name] == plain[name], "the same rule, token by token"
    assert (one["tokens_per_forward"], one["forwards"], one["tokens_fed"]) == (1.0, 8.0, 8.0 * 14)
    assert (all_at_once["tokens_per_forward"], all_at_once["forwards"]) == (4.0, 2.0)
    assert all_at_once["ratio"]["2"] == all_at_once["tokens_per_s"]["2"] / all_at_once["plain_tokens_per_s"]["2"]

    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    path.write_bytes(whole[: last + 40])  # as a killed process leaves it
    assert sampling.main(command) == 0
    again = path.read_bytes()
    assert again[:last] == whole[:last], "what was measured stays"
    assert [line["strategy"] for line in lines.measured(path)] == [one["strategy"] for one in chosen]
    assert sampling.main(command) == 0
    assert path.read_bytes() == again, "nothing was left to measure"

    capsys.readouterr()
    assert sampling.main([f"--file={path}", "--report"]) == 0
    table = capsys.readouterr().out.strip().split("\n")
    assert [line.split("|")[1].strip() for line in table[4:]] == [
        "held-out text", "plain loop", "confidence (block_length 4), cache none",
        "threshold (threshold 0.0, block_length 4), cache dual",
    ]  # fmt: skip
    assert len({line.count("|") for line in table[2:]}) == 1

    assert sampling.main([f"--file={path}", "--only", "fast", f"--model={checkpoint}"]) == 1
    assert "--only fast: not measured here" in capsys.readouterr().err
    assert sampling.main([f"--file={path}", f"--model={checkpoint}", "--new_tokens=9", "--block=4"]) == 1
    assert "new_tokens must be a multiple of block" in capsys.readouterr().err


def test_what_was_not_measured_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    answers = iter([{"skipped": "no time"}, {"failed": "error"}, {"value": 1}])
    for expected in (1, 2, 3, 3):
        lines.measure_missing(path, [{"case": 1}], lambda case: next(answers))
        assert len(lines.measured(path)) == expected
    assert lines.measured(path)[-1]["value"] == 1


def test_a_power_law_is_found() -> None:
    sizes = [128, 256, 512, 1024]
    fit = scaling.power_law(sizes, [3e-3 * n**1.7 for n in sizes])
    assert (fit["a"], fit["exponent"]) == pytest.approx((3e-3, 1.7))
    assert fit["residuals"] == pytest.approx([0.0] * 4, abs=1e-9)
    # by hand: logs (0, 1, 2) against (0, 1, 1) of base 2: slope 1/2, intercept 1/6
    fit = scaling.power_law([1, 2, 4], [1.0, 2.0, 2.0])
    assert fit["exponent"] == pytest.approx(0.5)
    assert fit["a"] == pytest.approx(2 ** (1 / 6))
    assert fit["residuals"] == pytest.approx([math.log(2) * left for left in (-1 / 6, 1 / 3, -1 / 6)])
    assert fit["last_exponent"] == 0.0
    with pytest.raises(ValueError, match="two or more positive sizes"):
        scaling.power_law([2, 2], [1.0, 1.0])


def test_growth_is_measured_at_each_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "LAYERS", 1)
    monkeypatch.setattr(scaling, "WIDTH", 64)
    cases = [
        {"measurement": "length", "sizes": [8, 16], "vocab": 64, "tokens": 32, "rounds": 1},
        {"measurement": "vocabulary", "sizes": [64, 128], "seq": 8, "tokens": 16, "rounds": 1},
    ]
    monkeypatch.setattr(scaling, "CASES", cases)
    path = tmp_path / "scaling.jsonl"
    assert scaling.main([f"--file={path}"]) == 0
    length, vocabulary = lines.measured(path)
    for line in (length, vocabulary):
        assert line["tokens_per_s"] == [line["tokens"] / s for s in line["seconds_per_step"]]
        assert line["exponent"] == pytest.approx(math.log2(line["seconds_per_step"][1] / line["seconds_per_step"][0]))
    capsys.readouterr()
    assert scaling.main([f"--file={path}", "--report"]) == 0
    assert f"n ^ **{length['exponent']:.2f}**" in capsys.readouterr().out
    line = {"measurement": "processes", "tokens_per_s": {"one": 1000.0, "two": 1650.0}, "ratio": 1.65}
    assert "| 2 | 1,650 | 1.65 |" in scaling.report([length, line])
    with pytest.raises(ValueError, match="32 tokens a step are no whole number of rows of 12"):
        scaling.growth({**cases[0], "sizes": [8, 12]})


def test_the_speed_of_the_sampler_is_measured_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = {"vocab": 64, "layers": 1, "width": 64, "prompt": 4, "new_tokens": 8, "block": 4, "rounds": 1}
    overhead = {"measurement": "overhead", **size, "steps": 2, "strategies": ["confidence", "eb"]}
    monkeypatch.setattr(sampler_speed, "CASES", [overhead, {"measurement": "tokens", **size, "batch": 2}])
    path = tmp_path / "speed.jsonl"
    assert sampler_speed.main([f"--file={path}"]) == 0
    first, second = lines.measured(path)
    for name, share in first["share"].items():
        network, outside = first["milliseconds (network, outside)"][name]
        assert share == pytest.approx(outside / (network + outside), abs=0.05)
    capsys.readouterr()
    assert sampler_speed.main([f"--file={path}", "--report"]) == 0
    text = capsys.readouterr().out
    assert f"| eb | {100 * first['share']['eb']:.1f} % |" in text
    assert f"| {second['ratio_to_plain']['dual']:.2f} |" in text
    good = {"share": {"a": 0.1, "b": 0.02}}, {"ratio_to_plain": {"none": 1.5, "prefix": 2.2, "dual": 3.0}}
    gain = {"batch_gain": {"none": 1.5, "prefix": 2.0, "dual": 2.0}}
    first, second = {**first, **good[0]}, {**second, **good[1], **gain}
    assert sampler_speed.reached([first, second]) == "overhead: yes, by every strategy; tokens/s: yes"
    first["share"]["b"], second["ratio_to_plain"]["prefix"], gain["batch_gain"]["none"] = 0.11, 2.1, 1.4
    assert sampler_speed.reached([first, second]) == "overhead: not by b; tokens/s: not with prefix, none x2"


def test_the_page_of_benchmarks_is_up_to_date() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(lines.RESULTS), "run `python benchmarks/page.py`"


def test_the_page_says_what_was_reached_and_what_was_not_measured(tmp_path: Path) -> None:
    empty = page.page(tmp_path)
    assert empty.count("Not measured: there is no") == len(page.SECTIONS)
    good, slow = _line("good", 4.2, 4.0, 0.8, 0.9), _line("slow", 3.0, 4.0, 0.8, 0.9)
    (tmp_path / "sampling.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (PLAIN, good, slow)))
    text = page.page(tmp_path)
    assert text.count("Not measured: there is no") == len(page.SECTIONS) - 1
    assert "batch 1: yes, by 1 of the candidates, best good, cache dual, 4.2 times; batch 16: no." in text
    commit = lines.machine()["git_commit"]
    assert commit is None or commit[:12] in text
    assert f"torch {torch.__version__}" in text
