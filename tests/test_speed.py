"""The benchmark of the training step: what it measures is what it says, at toy size (no figure decides a test)."""

from __future__ import annotations

import json

import pytest
import torch

from mdlm.eval.speed import _config, _documents, _Ours, _Plain, main, memory

SIZES = ["--vocab=128", "--layers=1", "--width=64", "--batch=2", "--seq=64", "--compile=false"]


def test_packed_rows_hold_documents_of_mixed_length() -> None:
    places = _documents(64, 256, torch.Generator().manual_seed(0))
    starts = places == 0
    assert bool(starts[:, 0].all())
    assert bool(((places[:, 1:] == places[:, :-1] + 1) | starts[:, 1:]).all())
    lengths = torch.cat([row.nonzero()[:, 0].diff() for row in starts])
    assert 8 <= int(lengths.min()) < 16
    assert 64 < int(lengths.max()) <= 128
    short = float((lengths < 32).float().mean())
    assert 0.3 < short < 0.7, "lengths are spread over the logarithm: half of them lie below the middle, 32"


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_both_candidates_train_the_same_model_on_the_same_rows(packed: bool) -> None:
    """The loss of the two, over the same tokens, is one number in expectation: near log V before training."""
    losses = []
    for bench in (_Plain, _Ours):
        made = bench(_config(128, 1, 64, 64), 16, 64, False, packed)
        losses.append(sum(float(made.loss(number).detach()) for number in range(8)) / 8)
    assert losses[0] == pytest.approx(losses[1], rel=0.15)
    assert losses[1] == pytest.approx(4.85, rel=0.15)


def test_the_command_prints_one_line_with_time_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    held = torch.ones(2**30, dtype=torch.uint8)
    assert main(["train-step", *SIZES, "--rounds=1", "--burst=1", "--packed=true", "--memory=true"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["packed"]
    assert set(line["peak_bytes"]) == {"plain", "ours"}
    assert min(line["peak_bytes"].values()) > 2**27, "the interpreter and torch are in it"
    assert max(line["peak_bytes"].values()) < len(held), "and what the parent holds is not"
    assert line["ratio"] > 0
    assert line["machine"]["cpus"] >= 1


def test_an_unknown_candidate_is_named() -> None:
    with pytest.raises(ValueError, match="'fast'; choose one of: plain, ours"):
        memory("fast")
