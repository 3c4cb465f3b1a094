"""Samples while training: they are made, change nothing, and are checked before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from training_runs import assert_same, configure, fresh_accelerate, records, write_texts

from mdlm.training.loop import start, train


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    with fresh_accelerate():
        yield


def test_previews_follow_their_prompts_and_leave_no_trace(texts: Path, tmp_path: Path) -> None:
    options = {"train__ema": 0.9, "train__steps": 6}
    quiet = train(configure(texts, tmp_path / "quiet", **options))
    with fresh_accelerate():
        previews = {"preview__every": 2, "preview__prompts": "['the cat', '']", "preview__length": 8}
        shown = train(configure(texts, tmp_path / "shown", **options, **previews))
    assert quiet is not None
    assert shown is not None
    assert_same(quiet, shown)
    made = records(tmp_path / "shown", "preview")
    assert [line["step"] for line in made] == [2, 2, 4, 4, 6, 6]
    assert [line["text"].startswith("the cat") for line in made] == [True, False] * 3
    assert all(len(line["text"]) > len("the cat") for line in made[::2])
    assert len({line["text"] for line in made}) > 3, "the model changes, and so does what it writes"


def test_a_preview_that_does_not_fit_is_refused_before_the_first_step(texts: Path, tmp_path: Path) -> None:
    options = {"preview__every": 1, "preview__prompts": "['the cat sat on a mat']", "preview__length": 20}
    with pytest.raises(ValueError, match=r"--preview.length 20 after a prompt of .* longer than the model takes, 24"):
        start(configure(texts, tmp_path / "run", **options))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
