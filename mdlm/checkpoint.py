"""Checkpoints on disk: complete or absent, never half written; and the training state inside them.

A run folder holds `checkpoint-<step>/`, each a plain Hugging Face folder (`config.json`, `*.safetensors`, tokenizer,
`generation_config.json`) that `from_pretrained` reads, plus `train_state/`:

    state.json          step, total steps, data position, resolved config, versions, git commit, manifest of all files
    optimizer.safetensors   optimizer state under "<parameter name>/<key>"
    model.safetensors   only with an EMA: the raw weights that training goes on from
    ...                 whatever else the trainer puts there

With an EMA the weights of the main folder are the **averaged** ones, since these are evaluated and published.

A checkpoint is written to `.checkpoint-<step>.partial`, every file and folder is fsynced, then it is renamed: a reader
sees all of it or nothing, also after a power cut. The manifest lists every file's size, so a copy that broke off half
way is refused too. Only JSON and safetensors are written and read: loading a checkpoint cannot run code. Read next:
`training/state.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from mdlm.generation import generation_defaults

STATE_FOLDER = "train_state"
STATE_FILE = "state.json"
FORMAT = 1
"""Version of the layout of `train_state/`; raised when an older reader would misread it."""

_NAME = re.compile(r"checkpoint-(\d+)")
_LEFTOVER = re.compile(r"\.checkpoint-\d+\.(partial|deleted)")


def checkpoint_path(run: Path, step: int) -> Path:
    """Where the checkpoint after `step` optimizer steps lies."""
    return run / f"checkpoint-{step}"


def step_of(checkpoint: Path) -> int:
    """The number in the folder's name. Raises ValueError for another kind of name."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not named checkpoint-<step>")
    return int(match[1])


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoints in `run` with a training state, by ascending step. Folders of others are left out."""
    if not run.is_dir():
        return []
    found = [
        path for path in run.iterdir() if _NAME.fullmatch(path.name) and (path / STATE_FOLDER / STATE_FILE).is_file()
    ]
    return sorted(found, key=step_of)


def resolve_resume(run: Path, resume: str) -> Path | None:
    """The checkpoint that `--resume` means: `none` -> None; `auto` -> the newest in `run`, None if there is none; PATH.

    Raises ValueError if PATH is not a complete checkpoint with a training state.
    """
    if resume == "none":
        return None
    if resume == "auto":
        checkpoints = list_checkpoints(run)
        return checkpoints[-1] if checkpoints else None
    path = Path(resume)
    if not path.is_dir():
        raise ValueError(f"--resume {resume}: there is no such folder; give auto, none or a checkpoint-<step> folder")
    if not (path / STATE_FOLDER / STATE_FILE).is_file():
        inside = list_checkpoints(path)
        hint = f"; did you mean {inside[-1]}?" if inside else "; to start from weights alone use --model.init_from"
        raise ValueError(f"--resume {resume}: the folder holds no {STATE_FOLDER}/{STATE_FILE}{hint}")
    return path


def clean_leftovers(run: Path) -> list[Path]:
    """Deletes what an interrupted save or deletion left in `run`; returns what it deleted."""
    leftovers = [path for path in run.iterdir() if _LEFTOVER.fullmatch(path.name)] if run.is_dir() else []
    for path in leftovers:
        shutil.rmtree(path)
    return leftovers


def delete_checkpoint(checkpoint: Path) -> None:
    """Deletes a checkpoint: renamed first, so that a reader never sees a part of it."""
    doomed = checkpoint.parent / f".{checkpoint.name}.deleted"
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def prune_checkpoints(run: Path, keep_last: int) -> list[Path]:
    """Deletes all but the newest `keep_last` (at least one) checkpoints of `run`; returns what it deleted."""
    assert keep_last >= 1, keep_last
    old = list_checkpoints(run)[:-keep_last]
    for checkpoint in old:
        delete_checkpoint(checkpoint)
    return old


def partial_path(run: Path, step: int) -> Path:
    """Where the checkpoint lies while it is written."""
    return run / f".checkpoint-{step}.partial"


def begin_checkpoint(run: Path, step: int) -> Path:
    """Makes the empty temporary folder to write the checkpoint into; finish it with `commit_checkpoint`."""
    partial = partial_path(run, step)
    if partial.exists():
        shutil.rmtree(partial)
    (partial / STATE_FOLDER).mkdir(parents=True)
    return partial


def commit_checkpoint(partial: Path, state: Mapping[str, Any]) -> Path:
    """Writes `state` (JSON-able) and the manifest, makes all of it durable, and gives the folder its final name.

    Raises ValueError if a checkpoint of that step exists already.
    """
    final = partial.parent / partial.name.removeprefix(".").removesuffix(".partial")
    if final.exists():
        raise ValueError(f"{final} exists already; it is not overwritten")
    files = {str(path.relative_to(partial)): path.stat().st_size for path in _files(partial)}
    _write_json(partial / STATE_FOLDER / STATE_FILE, {"format": FORMAT, **state, "files": files})
    for path in _files(partial):
        _fsync(path)
    for path in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
        _fsync(path)
    partial.rename(final)
    _fsync(final.parent)
    return final


@contextmanager
def new_checkpoint(run: Path, step: int, state: Mapping[str, Any]) -> Iterator[Path]:
    """One-process form of begin and commit: yields the temporary folder; an exception leaves nothing behind."""
    partial = begin_checkpoint(run, step)
    try:
        yield partial
        commit_checkpoint(partial, state)
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The content of `state.json`, after checking that every file of the manifest is there in full.

    Raises ValueError if the checkpoint is damaged, or written by a newer version of this package.
    """
    path = checkpoint / STATE_FOLDER / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); resume from another checkpoint") from error
    if state["format"] > FORMAT:
        raise ValueError(
            f"{path} has format {state['format']}, newer than {FORMAT}, which this mdlm reads: update mdlm"
        )
    for name, size in state["files"].items():
        file = checkpoint / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise ValueError(f"{checkpoint} is damaged: {name} {what}; copy it again or resume from another checkpoint")
    return dict(state)


def write_model(
    folder: Path,
    config: PreTrainedConfig,
    weights: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None,
    architecture: str = "MDLMForMaskedLM",
) -> None:
    """Writes a plain Hugging Face model folder: config, weights (files of at most 5 GB), generation ids, tokenizer.

    Without any `weights` (those of an adapter lie elsewhere) the rest.
    """
    config.architectures = [architecture]
    if weights:
        config.dtype = next(iter(weights.values())).dtype
    config.save_pretrained(folder)
    generation_defaults(config).save_pretrained(folder)
    if weights:
        save_torch_state_dict(dict(weights), folder, max_shard_size="5GB")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors by name to one safetensors file. No two may share memory."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads a file of `write_tensors` onto the CPU."""
    with safe_open(path, framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a handle, not a dict


def read_model_weights(folder: Path) -> dict[str, Tensor]:
    """All weights of a Hugging Face folder, from one or several safetensors files, onto the CPU.

    Raises ValueError if the folder has no safetensors file.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no .safetensors file; mdlm reads weights from safetensors only")
    return {name: tensor for file in files for name, tensor in read_tensors(file).items()}


def provenance() -> dict[str, Any]:
    """Package versions and, where this package runs from a git checkout, its commit: stored with every result."""
    packages = ("mdlm-torch", "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "numpy")
    versions: dict[str, str | None] = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {"versions": versions, "git_commit": git_commit(Path(__file__).parent)}


def git_commit(folder: Path) -> str | None:
    """The commit of the git tree that tracks `folder`, with `+changes` if files differ from it; None if none does."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if not git("ls-files", "."):  # an environment inside somebody else's repository
            return None
        return git("describe", "--always", "--abbrev=40", "--dirty=+changes", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
