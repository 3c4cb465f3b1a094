"""DeepSpeed (ZeRO): what differs from every other way to train, in one place.

The engine clips and steps inside the last backward, and it alone can store its sharded optimizer. So with DeepSpeed
(a) a gradient that is not finite has been applied when it is seen, and training stops at once; (b) `train_state/` holds
DeepSpeed's own files, **which it reads with pickle**: resume only from checkpoints you trust; (c) a resume needs the
same number of processes and a file system that all of them see. FSDP2 has none of these limits.
Read next: `snapshot.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from mdlm.training.config import TrainConfig

_FOLDER, _TAG = "deepspeed", "state"


def configure(config: TrainConfig, accelerator: Accelerator) -> None:
    """Tells DeepSpeed what the run's own options say. Raises ValueError for options it cannot follow."""
    refused = {
        "--optim.name muon": (config.optim.name == "muon", "ZeRO flattens the matrices that Muon needs"),
        "--train.ema": (config.train.ema is not None, "ZeRO keeps the float32 weights in pieces of its own"),
        "--train.compile": (config.train.compile, "ZeRO's hooks sit inside the compiled code"),
        "--train.max_seconds": (config.train.max_seconds is not None, "the probe's steps could not be undone"),
        "--drift.every": (bool(config.drift.every), "ZeRO holds matrices in pieces of its own"),
    }
    for flag, (given, reason) in refused.items():
        if given:
            raise ValueError(f"{flag} does not work with DeepSpeed ({reason}); leave it out, or use FSDP2")
    options = accelerator.state.deepspeed_plugin.deepspeed_config
    processes = accelerator.num_processes
    options["train_micro_batch_size_per_gpu"] = config.train.global_batch // (
        processes * config.train.accumulation(processes)
    )
    options["gradient_accumulation_steps"] = 1  # the loss is divided here, and accelerate says which backward is last
    options["gradient_clipping"] = config.optim.clip_norm or 0.0


def gather_weights(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """The float32 weights by name, on the CPU, where `keep` is true; every process must call it."""
    from deepspeed.utils import safe_get_full_fp32_param

    whole = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
    return {name: tensor.detach().cpu().clone() for name, tensor in whole.items()} if keep else {}


class ZeroState:
    """DeepSpeed's part of a checkpoint: a `StatePart` of `snapshot.py`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def save(self, folder: Path) -> None:
        """Every process writes its shard below `folder`."""
        self._engine.save_checkpoint(str(folder / _FOLDER), tag=_TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        """Every process reads its shard. Raises ValueError if there is none."""
        path, _ = self._engine.load_checkpoint(str(folder / _FOLDER), tag=_TAG)
        if path is None:
            raise ValueError(f"--resume: {folder} holds no state of DeepSpeed; it was made without it")
