"""Tiny training runs for the tests: text, options, and what two checkpoints must have in common."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

from mdlm.rng import counter_uniform
from mdlm.training.config import TrainConfig, parse_config

TEXT = "the cat sat on a mat and saw one dog run to the red house while it was raining"
WORDS = TEXT.split()


def write_texts(folder: Path, documents: int = 24) -> Path:
    """Text files of uneven length with some structure to learn: word i is often followed by word i + 1."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        draws = counter_uniform(number, torch.arange(2 * (40 + 15 * number))).view(-1, 2).tolist()
        word, words = 0, []
        for jump, where in draws:
            word = int(where * len(WORDS)) if jump < 0.2 else (word + 1) % len(WORDS)
            words.append(WORDS[word])
        (folder / f"{number:02}.txt").write_text(" ".join(words))
    return folder


DEFAULTS = {
    "data.seq_len": 24,
    "tokenizer.vocab_size": 270,
    "model.hidden_size": 32,
    "model.num_hidden_layers": 2,
    "train.precision": "fp32",
    "train.global_batch": 8,
    "train.steps": 8,
    "train.log_every": 1,
    "train.measure_peak": "false",
    "optim.lr": 3e-3,
    "lr_schedule.warmup_steps": 2,
    "validation.every": 0,
    "checkpoint.every": 0,
}


def arguments(texts: Path, output: Path, **options: Any) -> list[str]:
    """The command line of a tiny run; dots of option names are written as double underscores."""
    given = {name.replace("__", "."): value for name, value in options.items()}
    merged = {"output_dir": output, "data.source": texts, **DEFAULTS, **given}
    return [f"--{name}={'null' if value is None else value}" for name, value in merged.items()]


def configure(texts: Path, output: Path, **options: Any) -> TrainConfig:
    """The configuration of `arguments`."""
    return parse_config(arguments(texts, output, **options))


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its state for the life of a process; here each run gets its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by file and name."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    assert files
    return {f"{file.relative_to(checkpoint)}:{k}": t for file in files for k, t in load_file(file).items()}


def state(checkpoint: Path) -> dict[str, Any]:
    """The content of state.json without what names the run rather than its state."""
    content = json.loads((checkpoint / "train_state" / "state.json").read_text())
    return {k: v for k, v in content.items() if k not in ("config", "files", "versions", "git_commit")}


def assert_same(one: Path, other: Path, tolerance: float = 0.0) -> None:
    """The checkpoints agree in every tensor (to `tolerance`; 0: in every bit) and in every number of the state."""
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys()
    for name in a:
        if tolerance:
            assert (a[name] - b[name]).abs().max() <= tolerance, name
        else:
            assert torch.equal(a[name], b[name]), name
    assert state(one) == state(other)


def records(output: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of one kind."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]
