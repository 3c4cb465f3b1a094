"""`mdlm eval` of examples: only answers count, and a file gives what the validation of a run gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_sft import RUN, pairs
from training_runs import configure, fresh_accelerate, records, write_texts

from mdlm.eval.__main__ import evaluate, main
from mdlm.training.loop import train

ROWS = pairs(12)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "held.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    return path


@pytest.fixture(scope="module")
def tuned(held: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("data") / "train.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in pairs(40)))
    options = {**RUN, "data__validation_source": held, "validation__every": 6}
    with fresh_accelerate():
        checkpoint = train(configure(data, tmp_path_factory.mktemp("run") / "run", **options))
    assert checkpoint is not None
    return checkpoint


def result(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    assert main([str(a) for a in arguments]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return record


def test_a_file_of_examples_is_evaluated_as_training_validates(
    tuned: Path, held: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (validated,) = records(tuned.parent, "validation")
    given = result(capsys, tuned, "--data", held, "--records", "completion")
    assert given["nats_per_token"] == pytest.approx(validated["nats_per_token"], rel=1e-5)
    assert given["tokens"] == validated["tokens"]
    assert given["data"]["records"] == "completion"
    words = sum(len(row["completion"].encode()) for row in ROWS)
    assert given["bytes"] == pytest.approx(words, rel=1e-6), "the prompt has no part in it"
    assert given["nats_per_token"] == result(capsys, tuned)["nats_per_token"]


def test_plain_text_is_evaluated_on_a_tuned_checkpoint(
    tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_texts(tmp_path / "texts", documents=4)
    given = result(capsys, tuned, "--data", tmp_path / "texts", "--packing", "stream")
    assert given["data"]["records"] == "text"
    assert given["tokens"] > 100


def test_examples_are_evaluated_on_a_checkpoint_of_plain_text(
    held: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_texts(tmp_path / "texts", documents=4)
    with fresh_accelerate():
        checkpoint = train(configure(texts, tmp_path / "run", train__steps=2, data__seq_len=64))
    given = result(capsys, checkpoint, "--data", held, "--records", "completion")
    assert given["data"]["packing"] == "none"
    words = sum(len(row["completion"].encode()) for row in ROWS)
    assert given["bytes"] == pytest.approx(words, rel=1e-6)
    chats = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps(row) for row in chats * 4))
    with pytest.raises(ValueError, match="chat_template"):  # this tokenizer has none
        evaluate(str(checkpoint), data=str(tmp_path / "chats.jsonl"), records="messages")


def test_what_does_not_go_together_is_refused(tuned: Path, held: Path) -> None:
    with pytest.raises(ValueError, match="--records completion says what --data holds"):
        evaluate(str(tuned), records="completion")
    with pytest.raises(ValueError, match="are for plain text, not for examples"):
        evaluate(str(tuned), data=str(held), records="completion", stride=4)
