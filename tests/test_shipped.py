"""The model that comes with the package: it is there, is what its card says, and every command takes it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from training_runs import fresh_accelerate, write_texts

import mdlm
from mdlm import MDLMForMaskedLM, corpus, shipped
from mdlm.checkpoint import read_state
from mdlm.eval.__main__ import evaluate
from mdlm.load import load_model, model_folder
from mdlm.samplers.__main__ import main as sample
from mdlm.training.config import parse_config
from mdlm.training.loop import train

NAME = "python-8m"


def test_every_model_is_small_complete_and_says_what_it_was_trained_on() -> None:
    assert NAME in shipped.names()
    for name in shipped.names():
        folder = mdlm.builtin(name)
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) <= 20_000_000
        state = read_state(folder)  # which compares the size of every file
        assert state["config"]["data"]["source"] == "builtin"
        listed = json.loads((folder / shipped.CORPUS_FILE).read_text())
        assert len(listed["files"]) == listed["documents"]
        assert not any(str(Path.home()) in path.read_text(errors="ignore") for path in files)


def test_the_model_is_loaded_by_name_and_by_folder() -> None:
    folder = mdlm.builtin(NAME)
    assert model_folder(f"builtin:{NAME}") == folder
    model = MDLMForMaskedLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert sum(weight.numel() for weight in model.parameters()) <= 8_000_000
    named, tokenizer = load_model(f"builtin:{NAME}", dtype="bfloat16")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), named.parameters(), strict=True))
    assert tokenizer.mask_token_id == model.config.mask_token_id


@pytest.mark.parametrize("name", ["builtin:python-9m", "builtin:", "builtin:../python-8m"])
def test_an_unknown_name_is_answered_with_those_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=r"there is no built-in model '.*'; there are: .*python-8m"):
        load_model(name)


def test_the_card_says_what_was_measured_and_it_is_so_again() -> None:
    folder = mdlm.builtin(NAME)
    figures = json.loads((folder / "figures.json").read_text())
    card = (folder / "README.md").read_text()
    for name in ("bits_per_byte", "trigram", "unigram"):
        assert f"{figures[name]:.3f}" in card
    assert figures["bits_per_byte"] < figures["trigram"] < figures["unigram"]
    if shipped.corpus_difference(folder) is not None:
        pytest.skip("this interpreter's library is not the one that the figures are of")
    record = evaluate(f"builtin:{NAME}", rows=48)
    assert record is not None
    assert record["corpus_difference"] is None
    error = record["standard_error"] * record["tokens"] / record["bytes"] / math.log(2)
    assert record["bits_per_byte"] == pytest.approx(figures["bits_per_byte"], abs=4 * error)


def test_another_library_is_told_apart(tmp_path: Path) -> None:
    assert shipped.corpus_difference(tmp_path) is None
    listed = corpus.manifest()
    (tmp_path / shipped.CORPUS_FILE).write_text(json.dumps(listed))
    assert shipped.corpus_difference(tmp_path) is None
    listed["python"], listed["sha256"] = "CPython 3.0.0", "0"
    listed["files"][0]["sha256"] = "changed"
    listed["files"] = listed["files"][:-1]
    (tmp_path / shipped.CORPUS_FILE).write_text(json.dumps(listed))
    said = shipped.corpus_difference(tmp_path)
    assert said is not None
    assert said.startswith("the model was trained on the library of CPython 3.0.0")
    count = len(corpus.builtin_source().documents)
    assert f"{count - 2} of its {count} documents are the same" in said


def test_the_sample_command_takes_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"builtin:{NAME}", "--prompt=def ", "--max_new_tokens=8"]
    assert sample(arguments) == 0
    first = capsys.readouterr().out
    assert first.startswith("--- 0\ndef ")
    assert sample(arguments) == 0
    assert capsys.readouterr().out == first


def test_training_goes_on_from_it(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    options = {
        "model.init_from": f"builtin:{NAME}", "data.source": texts, "data.seq_len": 32, "train.steps": 2,
        "train.global_batch": 2, "train.precision": "fp32", "train.measure_peak": "false", "data.validation_rows": 2,
    }  # fmt: skip
    with fresh_accelerate():
        train(parse_config([f"--output_dir={tmp_path / 'run'}", *(f"--{n}={v}" for n, v in options.items())]))
    before, _ = load_model(f"builtin:{NAME}")
    after, _ = load_model(tmp_path / "run")
    assert after.config == before.config
    assert not torch.equal(after.model.embed_tokens.weight, before.model.embed_tokens.weight)
