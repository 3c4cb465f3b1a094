"""Spectral drift: what it measures, that runs report it at their steps, and that a resumed run reports the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_tools import make_model
from safetensors.torch import load_file
from training_runs import assert_same, configure, fresh_accelerate, records, write_texts

from mdlm.training.drift import DriftConfig, SpectralDrift, proportions, sampled_matrices
from mdlm.training.loop import train

OPTIONS: dict[str, Any] = {
    "drift__every": 2, "drift__matrices": 3, "checkpoint__every": 2, "checkpoint__keep_last": 9, "train__steps": 6,
}  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"), documents=6)


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    with fresh_accelerate():
        yield


@pytest.fixture(scope="module")
def watched(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with fresh_accelerate():
        checkpoint = train(configure(texts, tmp_path_factory.mktemp("drift") / "run", **OPTIONS))
    assert checkpoint is not None
    return checkpoint.parent


def rotation(size: int, seed: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(seed)))[0]


def test_proportions_know_no_scale_and_no_direction() -> None:
    values = torch.tensor([4.0, 3.0, 2.0, 1.0])
    matrix = rotation(4, 0) @ torch.diag(values) @ rotation(4, 1)
    torch.testing.assert_close(proportions(matrix), values / 10)
    torch.testing.assert_close(proportions(-7 * matrix.T), values / 10)
    assert torch.equal(proportions(torch.zeros(3, 2)), torch.zeros(2))
    assert proportions(matrix.bfloat16()).dtype == torch.float32


def test_the_drift_of_a_known_change() -> None:
    model = make_model()
    drift = SpectralDrift(model, DriftConfig(every=1, matrices=1), main=True)
    ((name, matrix),) = sampled_matrices(model, 1).items()
    spectra = [torch.full((16,), 1.0), torch.arange(1.0, 17.0)]
    for step, values in enumerate(spectra, 1):
        with torch.no_grad():
            matrix.copy_(rotation(16, step) @ torch.diag(values))
        measured = drift.measure(10 * step)
    # uniform 1/16 to k / 136
    expected = sum(abs(k / 136 - 1 / 16) for k in range(1, 17))
    assert measured["drift"] == pytest.approx(expected, rel=1e-4)
    assert measured["largest"] == measured["matrices"][name] == measured["drift"]
    assert measured["since_steps"] == 10


def test_the_sample_is_spread_over_trained_matrices_without_embedding_and_head() -> None:
    model = make_model(tie_word_embeddings=False)
    every = list(sampled_matrices(model, 99))
    assert len(every) == 2 * 7
    assert all("_proj" in name for name in every)
    few = list(sampled_matrices(model, 3))
    assert few[0] == every[0]
    assert few[-1] == every[-1]
    assert len(few) == 3
    model.model.layers[0].requires_grad_(False)
    assert all(".layers.1." in name for name in sampled_matrices(model, 99))
    with pytest.raises(ValueError, match="no matrix of the model is trained"):
        SpectralDrift(model.requires_grad_(False), DriftConfig(every=1), main=True)


def test_a_run_reports_what_its_checkpoints_show(watched: Path) -> None:
    lines = records(watched, "drift")
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert [line["since_steps"] for line in lines] == [2, 2, 2]
    weights = {step: load_file(watched / f"checkpoint-{step}" / "model.safetensors") for step in (2, 4, 6)}
    for before, line in zip((2, 4), lines[1:]):
        assert len(line["matrices"]) == 3
        for name, value in line["matrices"].items():
            a, b = (np.linalg.svd(weights[s][name].double().numpy(), compute_uv=False) for s in (before, before + 2))
            assert value == pytest.approx(np.abs(b / b.sum() - a / a.sum()).sum(), rel=1e-3, abs=1e-5)
            assert value > 0


def test_a_resumed_run_reports_the_same(watched: Path, texts: Path, tmp_path: Path) -> None:
    again = train(configure(texts, tmp_path / "run", resume=watched / "checkpoint-2", **OPTIONS))
    assert again is not None
    assert_same(watched / "checkpoint-6", again)
    assert records(again.parent, "drift") == records(watched, "drift")[1:]


def test_watching_changes_nothing_and_may_begin_later(watched: Path, texts: Path, tmp_path: Path) -> None:
    unwatched = train(configure(texts, tmp_path / "run", **{**OPTIONS, "drift__every": 0, "train__steps": 6}))
    assert unwatched is not None
    assert records(unwatched.parent, "drift") == []
    plain, seen = (load_file(p / "model.safetensors") for p in (unwatched, watched / "checkpoint-6"))
    assert all(torch.equal(plain[name], seen[name]) for name in seen)
    with fresh_accelerate():
        later = train(configure(texts, tmp_path / "later", resume=unwatched.parent / "checkpoint-4", **OPTIONS))
    assert later is not None
    assert records(later.parent, "drift") == records(watched, "drift")[2:]


@pytest.mark.parametrize("option", [{"every": -1}, {"matrices": 0}], ids=["every", "matrices"])
def test_bad_options_name_the_flag(option: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"--drift.{next(iter(option))} is"):
        DriftConfig(**option)
