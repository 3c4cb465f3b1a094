"""What the evaluation harness runs on: the model with its adapter, the processes, the device of each.

`accelerate launch` and `torchrun` say in the environment which process this is. The harness passes answers around,
never gradients, so one gloo group on the CPU serves every device. Read next: `harness.py`.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from mdlm.adapter import ADAPTER_FOLDER, merge_into
from mdlm.load import DTYPES, load_model, model_folder
from mdlm.modeling import MDLMForMaskedLM


def join_processes() -> tuple[int, int]:
    """Rank and number of the processes that were launched together, after they have met."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(days=7))  # one may have hours more to do than another
    return dist.get_rank(), dist.get_world_size()


def own_device(device: str) -> str:
    """`device`, but of several processes that are to use GPUs (`auto`, `cuda`) each takes its own."""
    if device in ("auto", "cuda") and torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        return f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
    return device


def load_with_adapter(
    pretrained: str, peft: str | None, dtype: str, device: str
) -> tuple[MDLMForMaskedLM, PreTrainedTokenizerBase]:
    """`load_model`, with the adapter `peft` of our training added to it in float32.

    Raises ValueError for a `peft` that is no such adapter, or one of another base.
    """
    if peft is None:
        return load_model(pretrained, dtype, device)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    model, tokenizer = load_model(pretrained, device="cpu")
    merge_into(model, _adapter_folder(Path(peft)), pretrained)
    target = load_device(device)
    torch.nn.Module.to(model, target, DTYPES[dtype])
    return model.eval(), tokenizer


def load_device(device: str) -> torch.device:
    """`auto` is a GPU if there is one. Raises ValueError for a device that is not there."""
    try:
        return torch.empty(0, device=_chosen(device)).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device is {device!r}: {error}") from error


def _chosen(device: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def _adapter_folder(path: Path) -> Path:
    """The adapter that `path` means: itself, that of a checkpoint, or that of a run's newest checkpoint."""
    inside = path
    if not (path / "base.json").is_file():
        inside = (path if (path / ADAPTER_FOLDER).is_dir() else model_folder(path)) / ADAPTER_FOLDER
    if not (inside / "base.json").is_file():
        raise ValueError(
            f"peft is {path}, which holds no adapter of our training (a folder with base.json); merge others into "
            "their base with peft's own merge_and_unload, and give the result as pretrained"
        )
    return inside
