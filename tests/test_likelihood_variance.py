"""The table of the estimators' noise: all unbiased, spreads known in closed form, the command's files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from mdlm.denoiser import FunctionDenoiser
from mdlm.eval import __main__ as command
from mdlm.eval import sources_zoo as zoo
from mdlm.eval.likelihood_variance import ESTIMATORS, ORDER, as_markdown, spreads


def test_every_estimator_is_unbiased_and_strata_and_counts_help() -> None:
    source = zoo.markov(8, vocab=4)
    records = list(spreads(source, source, [1, 8], 24, 60, seed=1))
    assert {record["estimator"] for record in records} == {*ESTIMATORS, ORDER}
    for record in records:
        assert record["bias_error"] is not None
        assert abs(record["bias"]) < 4 * record["bias_error"] + 1e-9, record
    spread = {(record["estimator"], record["nfe"]): record["spread"] for record in records}
    assert (ORDER, 1) not in spread
    assert spread[ORDER, 8] < 1e-9  # an exact denoiser's conditionals give the likelihood in any order
    for name in ESTIMATORS:
        assert spread[name, 8] < 0.6 * spread[name, 1]
    assert spread["free counts", 8] < 0.8 * spread["free times, independent masks", 8]
    assert spread["evenly spread counts", 8] < 0.95 * spread["free counts", 8]


def test_spreads_of_constant_logits_are_those_of_the_masks_alone() -> None:
    """Tokens at time t cost log V * K / (n t), K binomial (one mask at least, paid for): variance by integration."""
    n, vocab = 6, 5
    source = zoo.markov(n, vocab=vocab)
    flat = FunctionDenoiser(lambda tokens: torch.zeros(*tokens.shape, vocab + 1), vocab, vocab + 1)
    second, grid = 0.0, 4000
    for i in range(grid):
        t = (i + 0.5) / grid
        for k in range(1, n + 1):
            p = math.comb(n, k) * t**k * (1 - t) ** (n - k)
            weight = k / (n * t)
            if k == 1:  # the empty draw is moved here, with importance n t / (n t + 1 - t)
                p, weight = p + (1 - t) ** n, weight * n * t / (n * t + 1 - t)
            second += p * weight**2 / grid
    expected = math.log(vocab) * math.sqrt(second - 1)
    found = {record["estimator"]: record for record in spreads(source, flat, [1], 50, 100, seed=2)}
    assert found["free times, independent masks"]["spread"] == pytest.approx(expected, rel=0.1)
    for name in ("free counts", "stratified counts", "evenly spread counts"):
        assert found[name]["spread"] < 1e-6
    assert found["free counts"]["bias"] is None


def test_the_command_writes_records_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--sources=[markov, parity]", "--length=6", "--nfe=[1, 6]", "--sequences=4", "--repeats=3"]
    assert command.main(["variance", *options, f"--output={tmp_path / 'out'}"]) == 0
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "out" / "variance.jsonl").read_text().splitlines()]
    assert {"git_commit", "versions", "seed"} <= set(lines[0])
    assert len(lines) == 1 + 2 * (2 * len(ESTIMATORS) + 1)
    table = (tmp_path / "out" / "variance.md").read_text()
    assert table.strip() == printed.strip()
    assert table.count("###") == 2
    assert f"| {ORDER} | – | **0.000** |" in table
    records = [
        {"source": "a", "model": "m", "length": 2, "estimator": e, "nfe": 1, "spread": s}
        for e, s in (("x", 1.0), ("y", 0.5))
    ]
    assert "a trained model" in as_markdown(records)
    assert "| y | **0.500** |" in as_markdown(records)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nfe=[0]"], "1 or more"),
        (["--repeats=1"], "2 or more repeats"),
        (["--sequences=0"], "1 or more"),
        (["--sources=[]"], "needs a source"),
        (["--sources=[markof]"], "did you mean 'markov'"),
        (["--model=x"], "one source, got 3"),
    ],
    ids=["nfe", "repeats", "sequences", "none", "name", "model"],
)
def test_bad_input_is_one_line_on_stderr(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["variance", *options]) == 1
    assert message in capsys.readouterr().err
