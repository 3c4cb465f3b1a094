"""Generative perplexity and what stands beside it, against values worked out by hand."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from mdlm.eval import __main__ as command
from mdlm.eval.generative import judge_texts, load_judge, read_texts, text_metrics

WORDS = ["<s>", "a", "b", "c", "d", "<unk>"]


def word_tokenizer(bos: bool = True) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>" if bos else None, unk_token="<unk>")


def tiny_judge(vocab: int = len(WORDS), context: int = 64) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=context,
        initializer_range=1.0,
        bos_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def nats_of(judge: PreTrainedModel, ids: list[int]) -> list[float]:
    """-log p of each token after the first, one prefix at a time, in plain float64."""
    out = []
    for i in range(1, len(ids)):
        with torch.no_grad():
            logits = judge(input_ids=torch.tensor([ids[:i]])).logits[0, -1].double().tolist()
        total = math.log(sum(math.exp(value) for value in logits))
        out.append(total - logits[ids[i]])
    return out


def test_metrics_of_token_sequences_by_hand() -> None:
    metrics = text_metrics([[1, 1, 1, 1, 1, 1], [1, 2, 3, 4], [1, 2, 3, 4], []])
    assert (metrics.texts, metrics.empty, metrics.shortest, metrics.longest) == (4, 1, 4, 6)
    assert metrics.length == pytest.approx(14 / 3)
    assert metrics.unigram_entropy == pytest.approx(2 * math.log(4) / 3)  # 0 for the first text
    assert metrics.distinct_1 == pytest.approx(4 / 14)
    assert metrics.distinct_2 == pytest.approx(4 / 11)
    assert metrics.distinct_3 == pytest.approx(3 / 8)
    assert metrics.distinct_4 == pytest.approx(2 / 5)
    assert metrics.repetition_4 == pytest.approx((2 / 3) / 3)  # two of three 4-grams of the first text came before
    assert metrics.duplicates == pytest.approx(1 / 3)


def test_metrics_without_long_texts_are_not_made_up() -> None:
    metrics = text_metrics([[1, 2]])
    assert metrics.distinct_2 == 1.0
    assert math.isnan(metrics.distinct_3)
    assert math.isnan(metrics.repetition_4)


def test_a_judge_that_knows_nothing_gives_the_size_of_its_vocabulary() -> None:
    judge = tiny_judge()
    torch.nn.init.zeros_(judge.lm_head.weight)
    result = judge_texts(judge, word_tokenizer(), ["a b c", "d"])
    assert result.perplexity == pytest.approx(len(WORDS), rel=1e-6)
    assert result.scored_tokens == 4
    assert result.first_token_scored


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_perplexity_equals_the_chain_rule_token_by_token(bos: bool, batch: int) -> None:
    judge, start = tiny_judge(), [0] if bos else []
    texts = ["a b c d", "b b", "c a d a", "d"]
    rows = [start + [WORDS.index(word) for word in text.split()] for text in texts]
    each = [nats_of(judge, row) for row in rows]
    flat = [value for row in each for value in row]
    result = judge_texts(judge, word_tokenizer(bos), texts, batch=batch)
    assert result.scored_tokens == len(flat) == (11 if bos else 7)
    assert result.nats_per_token == pytest.approx(sum(flat) / len(flat), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(sum(flat) / len(flat)), rel=1e-5)
    assert result.first_token_scored is bos
    mean = sum(flat) / len(flat)
    kept = [row for row in each if row]
    spread = sum((sum(row) - mean * len(row)) ** 2 for row in kept) * len(kept) / (len(kept) - 1)
    assert result.standard_error == pytest.approx(math.sqrt(spread) / len(flat), rel=1e-4)


def test_long_texts_are_scored_in_pieces_that_do_not_see_each_other() -> None:
    judge = tiny_judge(context=4)
    result = judge_texts(judge, word_tokenizer(), ["a b c d a"])
    parts = nats_of(judge, [0, 1, 2, 3]) + nats_of(judge, [0, 4, 1])
    assert result.windows == 2
    assert result.nats_per_token == pytest.approx(sum(parts) / 5, rel=1e-5)


def test_repetition_can_look_good_to_the_judge_but_not_beside_its_metrics() -> None:
    """The reason why perplexity never comes alone."""
    judge = tiny_judge()
    likely = judge_texts(judge, word_tokenizer(), ["a " * 20])
    varied = judge_texts(judge, word_tokenizer(), ["a b c d b a d c " * 3])
    assert likely.metrics.unigram_entropy == 0.0
    assert likely.metrics.repetition_4 > varied.metrics.repetition_4
    assert varied.metrics.unigram_entropy == pytest.approx(math.log(4))


@pytest.fixture(scope="module")
def judge_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    tiny_judge().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_command_prints_perplexity_with_everything_beside_it(
    judge_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "samples.jsonl", [{"text": "a b c d", "dtype": "bfloat16"}, {"text": "d c b a b"}])
    results = tmp_path / "new" / "results.jsonl"
    arguments = ["text", "--file", file, "--judge", str(judge_folder), "--results", str(results)]
    assert command.main(arguments) == 0
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert json.loads(results.read_text()) == record
    expected = judge_texts(*load_judge(str(judge_folder), "float32", "cpu"), ["a b c d", "d c b a b"])
    assert record["perplexity"] == pytest.approx(expected.perplexity)
    assert record["sampling_dtype"] == "bfloat16"
    assert record["judge_dtype"] == "float32"
    assert {"versions", "git_commit"} <= set(record)
    for shown in ("perplexity", "unigram entropy", "distinct-4", "repetition-4", "tokens", "bfloat16"):
        assert shown in printed.err
    assert command.main([*arguments, "--sampling_dtype", "float64"]) == 0
    assert json.loads(capsys.readouterr().out)["sampling_dtype"] == "float64"


@pytest.mark.parametrize(
    ("rows", "extra", "message"),
    [
        ([], [], "no samples"),
        ([{"text": ""}], [], "none of which holds a token"),
        ([{"answer": "a"}], [], "no text under 'text' .it has: answer."),
        ([{"text": "a b"}], ["--judge", "/nowhere"], "no causal language model"),
        ([{"text": "a b"}], ["--batch", "0"], "--batch"),
        ([{"text": "a b"}], ["--dtype", "int8"], "--dtype"),
        ([{"text": "a b"}], ["--max_length", "2"], "at least 3"),
    ],
)
def test_bad_input_is_one_line_on_stderr(
    judge_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: Any, extra: list[str], message: str
) -> None:
    file = write(tmp_path / "samples.jsonl", rows)
    assert command.main(["text", "--file", file, "--judge", str(judge_folder), *extra]) == 1
    error = capsys.readouterr().err.splitlines()[-1]  # transformers may have shown its progress before
    assert error.startswith("mdlm eval text: ")
    assert re.search(message, error)


def test_bad_calls_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="another model's tokenizer"):
        judge_texts(tiny_judge(vocab=3), word_tokenizer(), ["a d"])
    with pytest.raises(ValueError, match="no token can be scored"):
        judge_texts(tiny_judge(), word_tokenizer(bos=False), ["a", "b"])
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a"}\n{"text": ')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_texts(broken)
    assert command.main(["text"]) == 1
    assert "--file" in capsys.readouterr().err


def test_a_judge_without_its_tokenizer_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers makes an empty tokenizer for some families: every text then has no token."""
    tiny_judge().save_pretrained(tmp_path / "judge")
    file = write(tmp_path / "samples.jsonl", [{"text": "a b"}])
    assert command.main(["text", "--file", file, "--judge", str(tmp_path / "judge")]) == 1
    assert "tokenizer" in capsys.readouterr().err.splitlines()[-1]
