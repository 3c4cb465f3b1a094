"""The depth study's command runs and writes its lines and plots."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from training_runs import fresh_accelerate, write_texts

SCRIPT = Path(__file__).resolve().parent.parent / "docs" / "studies" / "depth.py"


def test_the_depth_study_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = write_texts(tmp_path / "texts", documents=6)
    flags = {
        "data.source": texts, "data.seq_len": 16, "data.validation_rows": 4, "tokenizer.vocab_size": 270,
        "model.hidden_size": 16, "model.num_hidden_layers": 2, "train.steps": 4, "train.log_every": 2,
        "validation.every": 4,
    }  # fmt: skip
    own = [
        "--output",
        str(tmp_path / "out"),
        "--variants",
        "span",
        "post, sdd",
        "--rates",
        "0.01",
        "--depths",
        "2",
        "3",
    ]
    monkeypatch.setattr(sys, "argv", ["depth.py", *own, *(f"--{name}={value}" for name, value in flags.items())])
    with fresh_accelerate():
        runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = [json.loads(line) for line in (tmp_path / "out" / "depth.jsonl").read_text().splitlines()]
    assert [line["layers"] for line in lines if line["kind"] == "start"] == [2, 3] * 2
    assert [(line["variant"], line["step"]) for line in lines if line["kind"] == "train"] == [
        ("span", 2), ("span", 4), ("post, sdd", 2), ("post, sdd", 4),
    ]  # fmt: skip
    assert [line["variant"] for line in lines if line["kind"] == "validation"] == ["span", "post, sdd"]
    assert len(list((tmp_path / "out").glob("*.svg"))) == 3
