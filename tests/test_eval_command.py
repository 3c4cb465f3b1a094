"""`mdlm eval` and `mdlm demo`: what a run held out is measured; the commands of the demonstration exist."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import configure, fresh_accelerate, records, write_texts

from mdlm.config import MDLMConfig
from mdlm.eval import __main__ as command
from mdlm.load import load_model, model_folder
from mdlm.modeling import MDLMForMaskedLM
from mdlm.samplers.__main__ import chosen_strategy, parse
from mdlm.training import demo as demonstration
from mdlm.training.config import parse_config
from mdlm.training.loop import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = write_texts(tmp_path_factory.mktemp("texts"))
    output = tmp_path_factory.mktemp("run")
    options = {"train__ema": 0.9, "validation__every": 8, "checkpoint__every": 4, "train__steps": 8}
    with fresh_accelerate():
        train(configure(texts, output, **options))
    return output


def lines(capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, Any]], str]:
    printed = capsys.readouterr()
    return [json.loads(line) for line in printed.out.splitlines()], printed.err


def test_it_measures_what_the_run_measured(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(run)]) == 0
    (record,), summary = lines(capsys)
    (validated,) = records(run, "validation")
    for name in ("nats_per_token", "bits_per_byte", "standard_error", "perplexity_bound"):
        assert record[name] == pytest.approx(validated[name], rel=1e-5), name
    assert record["step"] == 8
    assert record["unigram_bits_per_byte"] > 0
    assert {"schedule", "masking", "samples", "seed", "versions", "git_commit", "data", "text", "device"} <= set(record)
    assert f"{record['bits_per_byte']:.3f}" in summary
    assert "±" in summary
    assert "unigram" in summary


def test_batches_do_not_matter_seeds_and_rows_do(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "deep" / "results.jsonl"
    for options in (["--batch=3"], ["--batch=16"], ["--seed=5"], ["--rows=2"]):
        assert command.main([str(run), f"--results={results}", *options]) == 0
    printed, _ = lines(capsys)
    stored = [json.loads(line) for line in results.read_text().splitlines()]
    assert stored == printed
    one, two, other_seed, fewer = printed
    assert one["nats_per_token"] == pytest.approx(two["nats_per_token"], rel=1e-6)
    assert other_seed["nats_per_token"] != one["nats_per_token"]
    assert fewer["tokens"] < one["tokens"]


def test_other_text_can_be_evaluated(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on a mat and saw one dog run to the red house " * 3)
    (tmp_path / "b.jsonl").write_text('{"body": "the dog sat on a mat"}\n{"body": "one cat"}\n')
    for name, extra in (("a.txt", []), ("b.jsonl", ["--text_column=body", "--packing=none"])):
        assert command.main([str(run), f"--data={tmp_path / name}", *extra]) == 0
        (record,), _ = lines(capsys)
        assert record["data"]["source"] == str(tmp_path / name)
        assert record["tokens"] > 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seq_len=1000"], "--seq_len 1000 is longer than the model accepts"),
        (["--data=no/such/file.txt"], "no/such/file.txt"),
        (["--schedule=quadratic"], "quadratic"),
        (["--dtype=float8"], "dtype is 'float8'"),
    ],
)
def test_wrong_values_end_with_one_line(
    run: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([str(run), *options]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err


def test_a_folder_without_a_training_state_needs_data(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model_folder(run), bare)
    shutil.rmtree(bare / "train_state")
    assert command.main([str(bare)]) == 1
    assert "give --data" in capsys.readouterr().err


def test_paths_mean_a_checkpoint_or_the_newest_of_a_run(run: Path, tmp_path: Path) -> None:
    assert model_folder(run).name == "checkpoint-8"
    assert model_folder(run / "checkpoint-4") == run / "checkpoint-4"
    with pytest.raises(ValueError, match="there is no such folder"):
        model_folder(tmp_path / "nothing")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        model_folder(tmp_path)
    model, tokenizer = load_model(run, dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert tokenizer.mask_token_id == model.config.mask_token_id


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(run: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(model_folder(run), wrong)
    ids = {"num_attention_heads": 4, "mask_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    small = MDLMForMaskedLM(MDLMConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, **ids))
    small.save_pretrained(wrong)
    with pytest.raises(ValueError, match=r"vocabulary|tokenizer"):
        load_model(wrong)


@pytest.mark.parametrize("from_scratch", [False, True])
def test_the_demonstration_runs_commands_that_exist(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, from_scratch: bool
) -> None:
    ran: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(demonstration, "_run", lambda command, main, arguments: ran.append((command, list(arguments))))
    monkeypatch.setattr(demonstration, "before_and_after", lambda metrics: "")
    demonstration.demo(output_dir=str(tmp_path / "demo"), from_scratch=from_scratch)
    demonstration.demo(output_dir=str(tmp_path / "demo"), from_scratch=from_scratch, fresh=True)
    expected = ["train", "eval", "sample", "sample"] if from_scratch else ["sample", "train", "sample", "sample"]
    assert [name for name, _ in ran] == expected * 2
    trained = [parse_config(arguments) for name, arguments in ran if name == "train"]
    assert [config.output_dir for config in trained] == [str(tmp_path / "demo")] * 2
    assert trained[0].resume == "auto"
    assert trained[1].overwrite
    assert all(config.validation.at_start != from_scratch for config in trained)
    samples = [parse(arguments, chosen_strategy(arguments))[0] for name, arguments in ran if name == "sample"]
    assert samples[-1].show
    assert samples[-1].checkpoint == str(tmp_path / "demo")
    assert (samples[0].checkpoint == "builtin:python-8m") != from_scratch


def test_the_demonstration_refuses_a_folder_before_anything_takes_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demonstration.main(["--folder", str(tmp_path), "--output_dir", str(tmp_path / "demo")]) == 1
    assert "holds no text" in capsys.readouterr().err
    assert demonstration.main(["--folder", str(tmp_path), "--from_scratch", "true"]) == 1
    assert "is for fine-tuning" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_before_and_after_compares_the_first_validation_with_the_last(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    lines = [
        {
            "kind": "validation",
            "step": step,
            "bits_per_byte": bits,
            "nats_per_token": 1.0,
            "standard_error": 0.1,
            "tokens": 7,
        }
        for step, bits in ((0, 1.5), (10, 3.0), (20, 1.25))
    ]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in [{"kind": "start"}, *lines]))
    text = demonstration.before_and_after(metrics)
    assert "before, step 0: 1.500" in text
    assert "after,  step 20: 1.250" in text
    assert text.endswith("change: -0.250 bits/byte")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on loading its compiler
def test_the_demonstration_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fresh_accelerate():
        demonstration.demo(output_dir=str(tmp_path / "demo"), max_seconds=60, tokens=16)
    out = capsys.readouterr().out
    assert "tokens/forward" in out
    assert float(out.split("change: ")[1].split()[0]) < 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_demonstration_from_scratch_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fresh_accelerate():
        demonstration.demo(output_dir=str(tmp_path / "demo"), max_seconds=60, tokens=16, from_scratch=True)
    assert "tokens/forward" in capsys.readouterr().out
    assert (tmp_path / "demo" / "results.jsonl").read_text().count("\n") == 1
