"""Long evaluations: stopped and taken up again, refused under another protocol, shared by real processes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_runs import WORDS

from mdlm.config import MDLMConfig
from mdlm.data import DataConfig
from mdlm.denoiser import FunctionDenoiser, ModelDenoiser
from mdlm.eval import __main__ as command
from mdlm.eval.likelihood import Likelihood, NelboProtocol
from mdlm.eval.likelihood_run import evaluate_rows, launched_processes, own_file, weights_digest
from mdlm.eval.likelihood_text import EvaluationRows, TextProtocol, open_rows
from mdlm.modeling import MDLMForMaskedLM
from mdlm.schedule import SCHEDULES, TIME_SAMPLING
from mdlm.tokenization import num_tokens, train_bpe

LINES = [" ".join(WORDS[i % 17 : i % 17 + 2 + i % 11]) for i in range(50)]
TOKENIZER = train_bpe(LINES, 280)
LAUNCH = [
    sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
    "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0", "-m", "mdlm.eval",
]  # fmt: skip


def tiny_model() -> MDLMForMaskedLM:
    torch.manual_seed(0)
    tokens = num_tokens(TOKENIZER)
    config = MDLMConfig(
        vocab_size=-(-tokens // 64) * 64,
        num_tokens=tokens,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        initializer_range=0.3,
        mask_token_id=TOKENIZER.mask_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
        eos_token_id=TOKENIZER.eos_token_id,
    )
    return MDLMForMaskedLM(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a training state, and a text beside it."""
    path = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    (path / "text.txt").write_text("\n".join(LINES))
    return path


@pytest.fixture(scope="module")
def text(folder: Path) -> EvaluationRows:
    config = DataConfig(source=str(folder / "text.txt"), format="lines")
    return open_rows(config, TOKENIZER, TextProtocol(seq_len=16), whole=True)


class Stopping(ModelDenoiser):
    """Interrupted at its n-th forward."""

    left = 10**9

    def __call__(self, tokens: Tensor, **options: Any) -> Tensor:
        Stopping.left -= 1
        if Stopping.left < 0:
            raise KeyboardInterrupt
        return super().__call__(tokens, **options)


def evaluated(text: EvaluationRows, path: Path | None = None, **options: Any) -> tuple[Likelihood, float | None]:
    protocol = NelboProtocol(samples=2, seed=3)
    defaults = {"batch": 4, "identity": {"protocol": 1, "text": "a"}, "progress": path}
    return evaluate_rows(Stopping(tiny_model()), text, protocol, **{**defaults, **options})


def test_an_interrupted_evaluation_goes_on_to_the_same_number(text: EvaluationRows, tmp_path: Path) -> None:
    whole = evaluated(text)
    path = tmp_path / "deep" / "rows.jsonl"
    Stopping.left = 7  # in the fourth batch, after three whole ones
    with pytest.raises(KeyboardInterrupt):
        evaluated(text, path)
    Stopping.left = 10**9
    lines = path.read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["identity", "rows", "rows", "rows"]
    with path.open("a") as file:
        file.write('{"kind": "rows", "rows": [12, 13')  # stopped while writing
    with pytest.raises(ValueError, match="--resume true"):
        evaluated(text, path)
    before = Stopping.left
    assert evaluated(text, path, resume=True) == whole  # in every bit
    batches = -(-text.count // 4)
    assert before - Stopping.left == 2 * (batches - 3)
    assert evaluated(text, path, resume=True) == whole
    assert before - Stopping.left == 2 * (batches - 3)  # all was there
    result, unigram = whole
    assert result.sequences == text.count
    assert unigram is not None
    assert unigram > 0


def test_ctrl_c_is_one_line_that_says_how_to_go_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = evaluate(folder, "--seq_len=16", "--batch=4", f"--progress={tmp_path / 'rows.jsonl'}")
    monkeypatch.setattr(command, "ModelDenoiser", Stopping)
    monkeypatch.setattr(Stopping, "left", 2)
    assert command.main(options) == 130
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("mdlm eval: interrupted")
    assert "--resume true" in printed.err
    assert len(printed.err.splitlines()) == 1
    monkeypatch.setattr(Stopping, "left", 10**9)
    assert command.main([*options, "--resume=true"]) == 0


def test_another_batch_size_goes_on_up_to_rounding(text: EvaluationRows, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    Stopping.left = 4
    with pytest.raises(KeyboardInterrupt):
        evaluated(text, path)
    Stopping.left = 10**9
    got, _ = evaluated(text, path, resume=True, batch=7)
    assert got.nats_per_token == pytest.approx(evaluated(text)[0].nats_per_token, rel=1e-6)


def test_a_file_of_another_protocol_is_refused_and_named(text: EvaluationRows, tmp_path: Path) -> None:
    """Symptom: an evaluation goes on with half of its rows under another seed, and nobody sees it."""
    path = tmp_path / "rows.jsonl"
    evaluated(text, path)
    with pytest.raises(ValueError, match="written under another protocol; give another --progress"):
        evaluated(text, path, resume=True, identity={"protocol": 2, "text": "a"})
    with pytest.raises(ValueError, match="another protocol and text"):
        evaluated(text, path, resume=True, identity={"protocol": 2, "text": "b"})
    with pytest.raises(ValueError, match="needs the file"):
        evaluated(text, resume=True)
    with pytest.raises(ValueError, match="batch is 0"):
        evaluated(text, batch=0)
    path.write_text("no JSON\n")
    with pytest.raises(ValueError, match="was not written by an evaluation"):
        evaluated(text, path, resume=True)


def test_weights_that_differ_in_one_value_have_another_digest() -> None:
    one, two = tiny_model(), tiny_model()
    assert weights_digest(one) == weights_digest(two)
    with torch.no_grad():
        list(two.parameters())[3].view(-1)[-1] += 1e-3
    assert weights_digest(one) != weights_digest(two)


def test_without_a_launcher_there_is_one_process() -> None:
    with launched_processes() as (rank, world):
        assert (rank, world) == (0, 1)


@pytest.mark.parametrize("masking", ["count", "independent"])
@pytest.mark.parametrize("sampling", TIME_SAMPLING)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_constant_logits_give_log_v_for_every_estimator(
    text: EvaluationRows, schedule: str, sampling: Any, masking: Any
) -> None:
    """Symptom: losses of public code on the same constant logits range from 4.8 to 22.6 for log V = 4.85."""
    size = num_tokens(TOKENIZER)
    flat = FunctionDenoiser(
        lambda tokens: torch.zeros(*tokens.shape, size), TOKENIZER.mask_token_id, size, ragged_ok=True
    )
    protocol = NelboProtocol(schedule=schedule, sampling=sampling, masking=masking, samples=32)
    result, _ = evaluate_rows(flat, text, protocol, 64, identity={})
    assert result.standard_error is not None
    if masking == "count" and schedule == "linear":
        assert result.nats_per_token == pytest.approx(math.log(size - 1), rel=1e-6)
    assert abs(result.nats_per_token - math.log(size - 1)) <= 4 * result.standard_error + 1e-6
    assert result.standard_error < 0.2


def evaluate(folder: Path, *options: str) -> list[str]:
    return [str(folder), f"--data={folder / 'text.txt'}", "--format=lines", "--seq_len=16", "--batch=4", *options]


def test_two_launched_processes_report_the_number_of_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real launch; its files are then taken up by one process, with some batches lost."""
    assert command.main(evaluate(folder, "--samples=2")) == 0
    one = json.loads(capsys.readouterr().out)
    progress = tmp_path / "rows.jsonl"
    launched = subprocess.run(
        [*LAUNCH, *evaluate(folder, "--samples=2", f"--progress={progress}", f"--results={tmp_path / 'out.jsonl'}")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert launched.returncode == 0, launched.stderr
    (line,) = (line for line in launched.stdout.splitlines() if line.startswith("{"))
    two = json.loads(line)
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [two]
    same = [key for key in one if key not in ("processes", "tokens_per_second", "git_commit")]
    assert {key: two[key] for key in same} == {key: one[key] for key in same}
    assert two["processes"] == 2

    other = own_file(progress, 1)
    kept = other.read_text().splitlines(keepends=True)
    assert len(kept) > 3
    other.write_text("".join(kept[:-2]))
    assert command.main(evaluate(folder, "--samples=2", f"--progress={progress}", "--resume=true")) == 0
    again = json.loads(capsys.readouterr().out)
    assert {key: again[key] for key in same} == {key: one[key] for key in same}


def test_protocols_are_part_of_the_result_and_change_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """27.04 and 31.78 are one model under padding and wrapping."""
    given = {
        "wrapped": [],
        "padded": ["--packing=none"],
        "ends": ["--eos=scored"],
        "bare": ["--document_eos=false"],
        "stride": ["--stride=4"],
        "words": ["--detokenizer=lambada"],
    }
    records = {}
    for name, options in given.items():
        assert command.main(evaluate(folder, *options)) == 0
        records[name] = json.loads(capsys.readouterr().out)
    fields = records["wrapped"]["text_protocol"]
    assert set(fields) == {"packing", "seq_len", "stride", "bos", "eos", "document_eos", "detokenizer", "rows"}
    assert {"schedule", "sampling", "masking", "samples", "eps", "seed", "context_length", "precision", "dtype"} <= set(
        records["wrapped"]
    )
    assert len({json.dumps(record["text_protocol"]) for record in records.values()}) == len(given)
    assert len({record["nats_per_token"] for record in records.values()}) == len(given)
    assert records["stride"]["tokens"] == records["wrapped"]["tokens"]
    assert records["bare"]["tokens"] == records["wrapped"]["tokens"] - len(LINES)
    assert records["stride"]["nfe"] > 2 * records["wrapped"]["nfe"]
    assert records["wrapped"]["bytes"] == sum(len(line.encode()) for line in LINES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--samples=0"], "at least 1"),
        (["--seq_len=32", "--rows=0"], "at least one window"),
        (["--masking=exact"], "exact"),
        (["--bos=scored"], "no start token"),
        (["--resume=true"], "give --progress"),
        (["--steps=4"], "masking='independent'"),
    ],
    ids=["samples", "rows", "masking", "bos", "resume", "steps"],
)
def test_bad_input_is_one_line_on_stderr(
    folder: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = command.main(evaluate(folder, *options))
    except SystemExit as error:  # what the command line itself cannot read
        status = int(error.code or 0)
    assert status in (1, 2)
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


def test_text_shorter_than_a_window_and_folders_that_are_no_checkpoint(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("the cat")
    assert command.main([str(folder), f"--data={tmp_path / 'short.txt'}", "--seq_len=16"]) == 1
    assert "less than one window of 16" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "bert", "vocab_size": 9}')
    for wrong, message in ((tmp_path / "nothing", "no such folder"), (tmp_path, "bert")):
        assert command.main([str(wrong), f"--data={folder / 'text.txt'}"]) == 1
        assert message in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert command.main([str(tmp_path), f"--data={folder / 'text.txt'}"]) == 1
    assert str(tmp_path) in capsys.readouterr().err
