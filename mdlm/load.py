"""From a path on the command line to a model and its tokenizer: a checkpoint folder, or a run that holds some."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from mdlm.adapter import ADAPTER_FOLDER, adapter_base, has_adapter, merge_into
from mdlm.checkpoint import list_checkpoints
from mdlm.modeling import MDLMForMaskedLM
from mdlm.remote import load_remote as load_remote
from mdlm.shipped import resolve
from mdlm.tokenization import check_vocab, load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
"""What is fetched of a hub repository; files with code are not among it."""


def hub_folder(name: str, *, download: bool) -> Path | None:
    """The folder in `huggingface_hub`'s cache of the repository `name`; None if it cannot be had.

    `download` False: only what is in the cache already, so that a mistyped path asks no network.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=not download))
    except (OSError, ValueError):  # no such repository or no connection; no name of a repository
        return None


def model_folder(path: str | Path) -> Path:
    """The folder with `config.json` that `path` means: itself, the newest checkpoint of a run, a model of the package
    (`builtin:python-8m`), or the hub model of that name, if it was downloaded before (by `--model.init_from NAME`,
    `from_pretrained` or `hf download`).

    Raises ValueError where there is none of them.
    """
    folder = resolve(path)
    if (folder / "config.json").is_file():
        return folder
    checkpoints = list_checkpoints(folder)
    if checkpoints:
        return checkpoints[-1]
    if not folder.exists():
        cached = hub_folder(str(path), download=False)
        if cached is not None and (cached / "config.json").is_file():
            return cached
        raise ValueError(
            f"{path}: there is no such folder; give a checkpoint, the output_dir of a training run, or the name of a "
            "hub model after `hf download NAME`"
        )
    raise ValueError(f"{path} is not a checkpoint (no config.json in it) nor a run (no checkpoint-<step>/ in it)")


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Within the block `transformers` draws no progress bars."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def check_finite(model: MDLMForMaskedLM, source: str | Path) -> None:
    """Raises ValueError if a weight that was read from `source` is NaN or infinite."""
    broken = [name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())]
    if broken:
        raise ValueError(f"{source}: {len(broken)} weights are not finite, the first is {broken[0]}; give another copy")


def load_model(
    path: str | Path, dtype: str = "float32", device: str = "auto"
) -> tuple[MDLMForMaskedLM, PreTrainedTokenizerBase]:
    """Model in evaluation mode and tokenizer of a checkpoint folder or run.

    Args:
        path: see `model_folder`.
        dtype: precision of the weights, a key of `DTYPES`.
        device: `auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:1`, ...

    A folder in a public format (LLaDA, Dream, ...: `mdlm/formats.py`) is converted while it is loaded. An adapter is
    merged into its base (`mdlm/adapter.py`).

    Raises ValueError for a folder that is no checkpoint or holds not exactly the model's weights, an unknown dtype, a
    tokenizer that does not fit the model.
    """
    from mdlm.convert import is_public, load_public, open_checkpoint

    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    folder = model_folder(path)
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if is_public(folder):
        converted, own = load_public(folder, DTYPES[dtype], chosen)
        return converted, load_tokenizer(folder) if own is None else own  # which says that there is none
    tokenizer = load_tokenizer(folder)
    if has_adapter(folder):
        base = adapter_base(folder / ADAPTER_FOLDER)
        model, _ = load_model(base, device="cpu")
        merge_into(model, folder / ADAPTER_FOLDER, base)
        torch.nn.Module.to(model, DTYPES[dtype])
    else:
        open_checkpoint(folder)  # transformers would draw missing weights at random
        with without_progress_bars():
            model = MDLMForMaskedLM.from_pretrained(folder, dtype=DTYPES[dtype])
    check_vocab(tokenizer, model.config)
    try:
        model.to(torch.device(chosen))  # type: ignore[arg-type]
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device is {device!r}: {error}") from error
    check_finite(model, path)
    return model.eval(), tokenizer
