"""Checkpoints are complete or absent, whatever interrupts the writer; damaged ones are refused; others' are kept."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM

from mdlm import checkpoint as ck
from mdlm.config import MDLMConfig
from mdlm.modeling import MDLMForMaskedLM
from mdlm.tokenization import train_bpe
from mdlm.training.state import named_weights


def write(run: Path, step: int, value: float = 0.0) -> Path:
    partial = ck.begin_checkpoint(run, step)
    ck.write_tensors(partial / "model.safetensors", {"w": torch.full((100,), value)})
    ck.write_tensors(partial / ck.STATE_FOLDER / "optimizer.safetensors", {"w/m": torch.full((50,), value)})
    return ck.commit_checkpoint(partial, {"step": step})


class Killed(BaseException):
    """Stands for the process dying: no handler catches it."""


def test_a_crash_at_any_moment_leaves_the_old_checkpoint_and_all_or_nothing_of_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that touches the disk in turn is the last one that the writer makes."""
    calls = 0
    last_call: int | None = None

    def counted(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == last_call:
                raise Killed
            return function(*args, **kwargs)

        return wrapper

    for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "write_text"), (Path, "mkdir"), (ck, "save_file")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    for moment in range(1, 1000):
        run = tmp_path / f"run{moment}"
        run.mkdir()
        write(run, 1, 1.0)
        calls, last_call = 0, moment
        try:
            write(run, 2, 2.0)
            died = False
        except Killed:
            died = True
        last_call = None
        found = ck.list_checkpoints(run)
        assert [ck.step_of(path) for path in found] in ([1], [1, 2])
        for path in found:
            assert ck.read_state(path)["step"] == ck.step_of(path)
            assert ck.read_tensors(path / "model.safetensors")["w"].eq(ck.step_of(path)).all()
        if not died:
            break
        ck.clean_leftovers(run)
        assert sorted(p.name for p in run.iterdir()) == [path.name for path in found]
        if len(found) == 1:
            write(run, 2, 2.0)
    assert moment > 10, "the crash was tried at too few moments"
    assert not died


def test_everything_is_on_disk_before_the_name_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recording_fsync(handle: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def recording_rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "rename", recording_rename)
    run = tmp_path / "run"
    run.mkdir()
    write(run, 3)
    partial = run / ".checkpoint-3.partial"
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert set(before) == {
        str(path)
        for path in (
            partial,
            partial / "model.safetensors",
            partial / "train_state",
            partial / "train_state/state.json",
            partial / "train_state/optimizer.safetensors",
        )
    }
    assert after == [str(run)]


def test_an_exception_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def fails() -> None:
        with ck.new_checkpoint(tmp_path, 5, {"step": 5}) as partial:
            (partial / "half").write_text("x")
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert list(tmp_path.iterdir()) == []
    with ck.new_checkpoint(tmp_path, 5, {"step": 5}) as partial:
        (partial / "whole").write_text("x")
    assert ck.read_state(tmp_path / "checkpoint-5")["step"] == 5
    with pytest.raises(ValueError, match="exists already"), ck.new_checkpoint(tmp_path, 5, {"step": 5}):
        pass
    assert (tmp_path / "checkpoint-5" / "whole").read_text() == "x"


def test_only_own_checkpoints_are_listed_and_pruned(tmp_path: Path) -> None:
    for step in (9, 10, 100, 20):
        write(tmp_path, step)
    (tmp_path / "checkpoint-7").mkdir()  # a folder of somebody else: no train_state
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-1").write_text("a file")
    (tmp_path / "notes").mkdir()
    assert [ck.step_of(path) for path in ck.list_checkpoints(tmp_path)] == [9, 10, 20, 100]
    assert [ck.step_of(path) for path in ck.prune_checkpoints(tmp_path, 2)] == [9, 10]
    assert ck.prune_checkpoints(tmp_path, 1) == [tmp_path / "checkpoint-20"]
    assert ck.prune_checkpoints(tmp_path, 1) == []
    names = {"checkpoint-7", "checkpoint-best", "checkpoint-1", "notes", "checkpoint-100"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert ck.clean_leftovers(tmp_path) == []
    assert ck.list_checkpoints(tmp_path / "nowhere") == []


def test_an_interrupted_deletion_is_finished_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)

    def dies(path: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ck.shutil, "rmtree", dies)
        with pytest.raises(Killed):
            ck.prune_checkpoints(tmp_path, 1)
    assert [path.name for path in ck.list_checkpoints(tmp_path)] == ["checkpoint-2"]
    assert len(ck.clean_leftovers(tmp_path)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_resume_finds_the_newest_or_says_what_is_wrong(tmp_path: Path) -> None:
    assert ck.resolve_resume(tmp_path, "none") is None
    assert ck.resolve_resume(tmp_path / "new", "auto") is None
    write(tmp_path, 9)
    write(tmp_path, 10)
    assert ck.resolve_resume(tmp_path, "auto") == tmp_path / "checkpoint-10"
    assert ck.resolve_resume(tmp_path, str(tmp_path / "checkpoint-9")) == tmp_path / "checkpoint-9"
    with pytest.raises(ValueError, match=r"--resume .*no such folder"):
        ck.resolve_resume(tmp_path, str(tmp_path / "checkpoint-11"))
    with pytest.raises(ValueError, match=r"--resume .*did you mean .*checkpoint-10"):
        ck.resolve_resume(tmp_path, str(tmp_path))
    (tmp_path / "weights").mkdir()
    with pytest.raises(ValueError, match=r"--model\.init_from"):
        ck.resolve_resume(tmp_path, str(tmp_path / "weights"))


def test_damaged_checkpoints_are_refused_naming_the_file(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 1)
    assert set(ck.read_state(checkpoint)["files"]) == {"model.safetensors", "train_state/optimizer.safetensors"}
    file = checkpoint / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors has \d+ bytes instead of"):
        ck.read_state(checkpoint)
    file.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        ck.read_state(checkpoint)
    file.write_bytes(content)
    state = checkpoint / "train_state" / "state.json"
    newer = json.loads(state.read_text()) | {"format": ck.FORMAT + 1}
    state.write_text(json.dumps(newer))
    with pytest.raises(ValueError, match="update mdlm"):
        ck.read_state(checkpoint)
    state.write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        ck.read_state(checkpoint)


def test_no_pickle_is_loaded(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, (f"touch {tmp_path}/exploded",)

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="safetensors only"):
        ck.read_model_weights(tmp_path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_is_a_plain_model_folder(tmp_path: Path, tiny_config: MDLMConfig, tied: bool) -> None:
    config = MDLMConfig(**{**tiny_config.to_dict(), "tie_word_embeddings": tied})
    model = MDLMForMaskedLM(config).eval()
    tokenizer = train_bpe(["some text to train on " * 3], 259)
    with ck.new_checkpoint(tmp_path, 1, {"step": 1}) as partial:
        ck.write_model(partial, model.config, {n: w.detach() for n, w in named_weights(model).items()}, tokenizer)
    folder = tmp_path / "checkpoint-1"
    loaded = AutoModelForMaskedLM.from_pretrained(folder).eval()
    assert type(loaded) is MDLMForMaskedLM
    tokens = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied
    assert ck.read_model_weights(folder).keys() == named_weights(model).keys()
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == config.eos_token_id
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["MDLMForMaskedLM"]
    assert (folder / "tokenizer.json").is_file()


def test_provenance_names_versions_and_commit(tmp_path: Path) -> None:
    found = ck.provenance()
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["mdlm-torch"]
    assert json.loads(json.dumps(found)) == found
    assert ck.git_commit(tmp_path) is None
