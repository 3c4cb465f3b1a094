"""`mdlm convert SRC DST [--to FORMAT]`: public checkpoints into `MDLMForMaskedLM` and back, bit by bit.

A folder is opened (`open_checkpoint`), which reads its configuration by the tables of `formats.py` and checks all its
tensors by their headers before anything is written; then it is written in another format, one tensor at a time, or
loaded as a model (`load_public`). The new folder is complete or absent. Beside a model of ours that came from a public
folder lies `public.json` with that folder's configuration, so that the way back restores every key our model has no
use for. Code in a checkpoint folder is never run and not copied. Read next: `formats.py`, `public_config.py`,
`public_weights.py`, `public_tokenizer.py`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from mdlm.command import run_command
from mdlm.config import MDLMConfig
from mdlm.formats import FORMATS, Format
from mdlm.load import load_tokenizer, model_folder
from mdlm.modeling import MDLMForMaskedLM
from mdlm.public_config import format_of, options_of, read_config, unsaid_keys, write_config
from mdlm.public_tokenizer import (
    PublicTokenizer,
    add_mask,
    open_public_tokenizer,
    read_json,
    settle_special_tokens,
    tokenizer_files,
    write_json,
)
from mdlm.public_weights import (
    MAX_FILE_BYTES,
    Stored,
    match_weights,
    public_name,
    scan_weights,
    write_weights,
)
from mdlm.tokenization import check_vocab, num_tokens, prepare_tokenizer

PROG = "mdlm convert"
OURS = "mdlm"
ORIGIN_FILE = "public.json"
"""What a converted folder keeps of the public one: its format, configuration, generation and tokenizer settings."""


@dataclass
class Checkpoint:
    """An opened folder: everything checked, no tensor read yet."""

    folder: Path
    fmt: Format | None
    """None: our own."""
    config: MDLMConfig
    weights: dict[str, Stored]
    """By our names."""
    tokenizer: PublicTokenizer | None = None
    origin: dict[str, Any] | None = None
    """Content of `ORIGIN_FILE`."""
    notes: list[str] = field(default_factory=list)

    @property
    def plan(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of every tensor that `read` gives, by our names."""
        rows = self.config.vocab_size
        return {
            name: ((rows, *found.shape[1:]) if name in _BY_TOKEN else found.shape, found.dtype)
            for name, found in self.weights.items()
        }

    def read(self, name: str) -> Tensor:
        """One tensor by our name; new rows of embedding and head are the mean of the others.

        Raises ValueError where it holds NaN or infinity.
        """
        tensor = self.weights[name].read()
        if not bool(tensor.isfinite().all()):
            broken = int((~tensor.isfinite()).sum())
            raise ValueError(
                f"{self.folder}: {self.weights[name].name} holds {broken} values that are NaN or infinite; "
                "these weights are broken"
            )
        missing = self.config.vocab_size - len(tensor) if name in _BY_TOKEN else 0
        if missing:
            mean = tensor.to(torch.float64).mean(dim=0, keepdim=True).to(tensor.dtype)
            tensor = torch.cat((tensor, mean.expand(missing, -1)))
        return tensor


_BY_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")


def is_public(folder: Path) -> bool:
    """Whether `folder/config.json` is of a model type other than our own."""
    public = read_json(folder / "config.json")
    return public.get("model_type") != OURS or "cond_dim" in public


def open_checkpoint(
    path: str | Path,
    mask_token_id: int | None = None,
    add_mask_token: bool = False,
    shift_logits: bool | None = None,
    block_size: int | None = None,
) -> Checkpoint:
    """Read and check a folder of any format; see `convert` for the arguments and errors."""
    folder = model_folder(path)
    said = {"mask_token_id": mask_token_id, "shift_logits": shift_logits, "block_size": block_size}
    if not is_public(folder):
        given = [name for name, value in said.items() if value is not None] + ["add_mask_token"] * add_mask_token
        if given:
            raise ValueError(f"{folder} is a checkpoint of ours, whose config.json says {', '.join(given)} already")
        config = MDLMConfig.from_pretrained(folder)
        origin = read_json(folder / ORIGIN_FILE) if (folder / ORIGIN_FILE).is_file() else None
        return Checkpoint(folder, None, config, match_weights(None, config, scan_weights(folder)), None, origin)
    public = read_json(folder / "config.json")
    place = str(folder / "config.json")
    fmt = format_of(public, place)
    tokenizer = open_public_tokenizer(folder, fmt)
    if mask_token_id is None and not add_mask_token:
        said["mask_token_id"] = _known_mask(fmt, public, tokenizer, folder)
    stored = read_config(fmt, public, said, place)
    weights = match_weights(fmt, stored, scan_weights(folder))
    if add_mask_token and stored.mask_token_id is not None:
        raise ValueError(f"{place} says mask_token_id={stored.mask_token_id} already; leave --add_mask_token out")
    options = options_of(stored)
    notes: list[str] = []
    if tokenizer is not None:
        if add_mask_token:
            options["mask_token_id"] = add_mask(tokenizer, str(folder))
        names = ("mask_token_id", "eos_token_id", "pad_token_id", "bos_token_id")
        settled = settle_special_tokens(tokenizer, {name: options[name] for name in names}, str(folder))
        notes += [
            f"{name}: {settled[name]} (the tokenizer's) instead of {options[name]} (config.json's)"
            for name in names
            if options[name] not in (None, settled[name])
        ]
        options |= settled
        options["num_tokens"] = num_tokens(tokenizer.tokenizer)
        if options["num_tokens"] > options["vocab_size"]:
            if not add_mask_token:
                raise ValueError(
                    f"{folder}: the tokenizer has {options['num_tokens']} tokens, the embedding "
                    f"{options['vocab_size']} rows; this is the tokenizer of another model"
                )
            options["vocab_size"] = -(-options["num_tokens"] // 64) * 64
    elif add_mask_token:
        raise ValueError(f"{folder} holds no tokenizer that a mask token could be added to")
    else:
        notes.append(f"{folder} holds no tokenizer; put one beside the converted model")
    if options["vocab_size"] > stored.vocab_size:
        notes.append(f"the embedding grew from {stored.vocab_size} to {options['vocab_size']} rows")
    config = MDLMConfig(**options)
    generation = folder / "generation_config.json"
    origin = {
        "format": fmt.model_type,
        "config": public,
        "options": options_of(config),
        "generation_config": read_json(generation) if generation.is_file() else None,
        "tokenizer_config": None,
        "dtype": _dtype_name(weights),
    }
    if tokenizer is not None and tokenizer.changes and not tokenizer.grown:
        origin["tokenizer_config"] = {"was": tokenizer.settings, "became": tokenizer.new_settings()}
    return Checkpoint(folder, fmt, config, weights, tokenizer, origin, notes)


def _known_mask(fmt: Format, public: dict[str, Any], tokenizer: PublicTokenizer | None, folder: Path) -> int | None:
    """The mask id by the configuration, else by the tokenizer. Raises ValueError if nobody knows it."""
    own = None if tokenizer is None else tokenizer.tokenizer.mask_token_id
    if fmt.causal:
        has = "" if own is None else f" (its tokenizer has the mask token {own})"
        raise ValueError(
            f"{folder} is a causal model ({fmt.about}), which has no mask token{has}: name one of its special tokens "
            "with --mask_token_id ID, or add one with --add_mask_token true. Adapt the result by training; "
            "--shift_logits and --block_size say how it shall predict"
        )
    if "mask_token_id" in fmt.keys and public.get("mask_token_id") is not None:
        return None
    if own is None:
        raise ValueError(
            f"{folder}: neither config.json nor the tokenizer names the mask token; say its id with --mask_token_id"
        )
    return int(own)


def _dtype_name(weights: dict[str, Stored]) -> str:
    return str(weights["model.embed_tokens.weight"].dtype).removeprefix("torch.")


def load_public(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    attn_implementation: str = "sdpa",
    mask_token_id: int | None = None,
    add_mask_token: bool = False,
    shift_logits: bool | None = None,
    block_size: int | None = None,
) -> tuple[MDLMForMaskedLM, PreTrainedTokenizerBase | None]:
    """A public folder as our model, in evaluation mode, and its tokenizer (None if the folder has none).

    Holds the weights and one tensor more, never two copies.

    Args:
        path: a folder in a format of `formats.FORMATS`.
        dtype: precision of the weights; None: as stored.
        device: where to.
        attn_implementation: as `from_pretrained`.
        mask_token_id, add_mask_token, shift_logits, block_size: see `convert`.

    Raises ValueError as `convert`.
    """
    opened = open_checkpoint(path, mask_token_id, add_mask_token, shift_logits, block_size)
    with torch.device("meta"):
        model = MDLMForMaskedLM._from_config(opened.config, attn_implementation=attn_implementation)
    for name in opened.weights:
        tensor = opened.read(name)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor.to(device=device, dtype=dtype or tensor.dtype)))
    model.tie_weights()
    assert not any(tensor.is_meta for tensor in model.state_dict().values()), "a tensor was not loaded"
    model.config.dtype = model.dtype
    tokenizer = None if opened.tokenizer is None else prepare_tokenizer(opened.tokenizer.tokenizer)
    if tokenizer is not None:
        check_vocab(tokenizer, opened.config)
    return model.eval(), tokenizer


def convert(
    source: str,
    target: str,
    to: str = OURS,
    mask_token_id: int | None = None,
    add_mask_token: bool = False,
    shift_logits: bool | None = None,
    block_size: int | None = None,
    like: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[str]:
    """Write a checkpoint in another format: public ones as `MDLMForMaskedLM` and back. Weights keep every bit.

    Args:
        source: folder of a public model (LLaDA, Dream, SDAR, TraDo, Fast-dLLM v2, dllm A2D; causal Llama, Qwen2,
            Qwen3, GPT-2), a checkpoint of ours or a run of ours.
        target: folder to make; it must not exist.
        to: `mdlm`, or one of llada, dream, sdar, fast_dllm, a2d-llama, a2d-qwen2, a2d-qwen3.
        mask_token_id: the mask token, where the source does not name it; a special token of its tokenizer.
        add_mask_token: add a token `<|mask|>` to a causal model; its rows are the mean of the others.
        shift_logits: whether the head at i predicts token i + 1, where the source does not say it (A2D models: false;
            causal models: true).
        block_size: blocks of a block-causal model, where the source does not say it.
        like: a public folder whose configuration is taken for everything our model does not have, when writing a
            public format.
        max_file_bytes: size of the weight files.

    Returns:
        Lines for the user: what was made, and what to know about it.

    Raises:
        ValueError: an unknown format; a feature our model does not have; keys or tensors that are unknown, missing or
            of a wrong shape (all are listed); files that are missing or cut off; NaN weights; a mask that is not a
            special token; a target that exists, or a format that cannot say what the model is.
    """
    if to != OURS and (to not in FORMATS or FORMATS[to].causal):
        allowed = ", ".join([OURS, *(name for name, entry in FORMATS.items() if not entry.causal)])
        raise ValueError(f"--to {to}: it must be one of {allowed}")
    opened = open_checkpoint(source, mask_token_id, add_mask_token, shift_logits, block_size)
    notes = list(opened.notes)
    with new_folder(Path(target)) as folder:
        if to == OURS:
            names = {name: name for name in opened.weights}
            _write_ours(opened, folder)
        else:
            fmt = FORMATS[to]
            names, lines = _write_public(opened, fmt, folder, like)
            notes += lines
        back = {there: ours for ours, there in names.items()}
        plan = {names[ours]: entry for ours, entry in opened.plan.items()}
        write_weights(folder, plan, lambda name: opened.read(back[name]), max_file_bytes)
        if to == OURS and (opened.tokenizer is not None or opened.fmt is None):
            check_vocab(load_tokenizer(folder), opened.config)
    kind = OURS if opened.fmt is None else opened.fmt.model_type
    return [f"{target}: {len(opened.weights)} tensors, {kind} -> {to}", *notes]


def _write_ours(opened: Checkpoint, folder: Path) -> None:
    config = MDLMConfig(**options_of(opened.config))
    config.architectures = ["MDLMForMaskedLM"]
    config.dtype = opened.weights["model.embed_tokens.weight"].dtype
    config.save_pretrained(folder)
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(folder)
    if opened.origin is not None:
        write_json(folder / ORIGIN_FILE, opened.origin)
    _write_tokenizer(opened, folder)


def _write_public(opened: Checkpoint, fmt: Format, folder: Path, like: str | None) -> tuple[dict[str, str], list[str]]:
    """Everything but the weights; returns our tensor names -> public ones, and lines for the user."""
    origin = opened.origin if opened.origin is not None and opened.origin["format"] == fmt.model_type else None
    base: dict[str, Any] = {"architectures": [fmt.architecture], "model_type": fmt.model_type, **fmt.template}
    before, dtype = None, base.get("torch_dtype")
    if like is not None:
        base = read_json(model_folder(like) / "config.json")
        if format_of(base, like) is not fmt:
            raise ValueError(f"--like {like} is a {base.get('model_type')} checkpoint; --to asks for {fmt.model_type}")
        dtype = base.get("dtype", base.get("torch_dtype"))
    elif origin is not None:
        base, dtype = origin["config"], origin["dtype"]
        before = MDLMConfig(**origin["options"])
    public = write_config(fmt, opened.config, base, before)
    if _dtype_name(opened.weights) != dtype:
        public["dtype" if "dtype" in public else "torch_dtype"] = _dtype_name(opened.weights)
    write_json(folder / "config.json", public)
    if origin is not None and origin["generation_config"] is not None:
        write_json(folder / "generation_config.json", origin["generation_config"])
    _write_tokenizer(opened, folder)
    patched = None if origin is None else origin["tokenizer_config"]
    settings = folder / "tokenizer_config.json"
    if patched is not None and settings.is_file() and read_json(settings) == patched["became"]:
        write_json(settings, patched["was"])
    named = {name: public_name(fmt, name) for name in opened.weights}
    absent = [name for name, there in named.items() if there is None]
    if absent:
        raise ValueError(f"the format {fmt.model_type} has no place for the tensors {', '.join(absent)}")
    usual: dict[str, Any] = {**dict.fromkeys(unsaid_keys(fmt, public)), **fmt.said}
    notes = [
        f"not stored in this folder's config.json, say it when reading: {name}={getattr(opened.config, name)}"
        for name, value in usual.items()
        if getattr(opened.config, name) != value and name != "mask_token_id"
    ]
    if "auto_map" in public:
        notes.append("config.json names code files (auto_map); copy the *.py files of the original folder beside it")
    return {name: there for name, there in named.items() if there is not None}, notes


def _write_tokenizer(opened: Checkpoint, folder: Path) -> None:
    if opened.tokenizer is not None:
        opened.tokenizer.write(folder)
        return
    for name, content in (tokenizer_files(opened.folder) if opened.fmt is None else {}).items():
        (folder / name).write_bytes(content)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yields a temporary folder that becomes `target`, durable and all at once; an exception leaves nothing behind.

    Raises ValueError if `target` exists.
    """
    if target.exists() or target.is_symlink():
        raise ValueError(f"{target} exists already; it is not overwritten: give another folder, or remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.partial"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        yield partial
        for path in (*sorted(partial.iterdir()), partial):
            _durable(path)
        partial.rename(target)
        _durable(target.parent)
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def _durable(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def main(argv: list[str] | None = None) -> int:
    """Entry of `mdlm convert`; returns the exit status."""
    return run_command(convert, argv, PROG, report=list)


if __name__ == "__main__":
    sys.exit(main())
