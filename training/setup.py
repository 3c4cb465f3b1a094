"""What happens before the first step: the accelerator, the checks, and the parts of a run put together.

Everything a user can get wrong is found here, before anything is trained or deleted. Read next: `loop.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from mdlm import checkpoint as ck
from mdlm.chat import chat_tokenizer
from mdlm.data import BatchStream, Data, open_data
from mdlm.head_loss import fuses
from mdlm.modeling import MDLMForMaskedLM
from mdlm.objective import Objective
from mdlm.training import zero
from mdlm.training.config import TrainConfig, as_dict
from mdlm.training.drift import SpectralDrift
from mdlm.training.ema import EMA
from mdlm.training.initial import make_model, make_tokenizer
from mdlm.training.islands import Outer, make_outer
from mdlm.training.links import Links, connect
from mdlm.training.team import Team
from mdlm.training.wrap import prepare, start_accelerator


class StatePart(Protocol):
    """Something with a state of its own on every process, which a checkpoint must hold. Names its files itself."""

    def save(self, folder: Path) -> None:
        """Writes this process's files below `folder`, the `train_state/` of a checkpoint in the making."""

    def load(self, folder: Path) -> None:
        """Reads them back. Raises ValueError if they are not there."""


@dataclass
class Run:
    """A training run in progress: what one step reads and changes."""

    config: TrainConfig
    accelerator: Accelerator
    links: Links
    """This process's place among islands; without them one island, of all processes."""
    tokenizer: PreTrainedTokenizerBase
    data: Data
    core: MDLMForMaskedLM
    """The model itself: its parameters have the names that are saved."""
    model: nn.Module
    """The model as accelerate wrapped it (DDP, FSDP2, DeepSpeed): what the loss calls."""
    optimizer: Any
    """accelerate's wrapper of the optimizer."""
    ema: EMA | None
    objective: Objective
    accumulation: int
    """Micro-batches per process and step."""
    total_steps: int
    """Length of the run; what learning rate and corruption warm-up are fractions of."""
    step: int = 0
    """Optimizer steps made, skipped ones included: the schedules and the data count these."""
    skipped_steps: int = 0
    bad_in_a_row: int = 0
    stream: BatchStream | None = None
    position: dict[str, Any] | None = None
    """Where the stream of the checkpoint stood; None: at the beginning."""
    resumed_from: Path | None = None
    base: str | None = None
    """`adapter.base_hash` of the model that the adapter is trained beside; None without adapter."""
    drift: SpectralDrift | None = None
    outer: Outer | None = None
    """The low-communication outer step (`--outer.preset`)."""
    parts: list[StatePart] = field(default_factory=list)
    """Saved and loaded with the run, by every process."""
    unlogged: list[Tensor] = field(default_factory=list)
    """Per step since the last line of metrics: this process's part of (loss, masked nll, masked tokens)."""

    @property
    def raw_optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer inside accelerate's wrapper."""
        return self.optimizer.optimizer

    @property
    def uses_deepspeed(self) -> bool:
        """Whether accelerate trains through DeepSpeed (`zero.py`)."""
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    @property
    def team(self) -> Team:
        """The processes that share each step."""
        return self.links.team

    def published(self) -> AbstractContextManager[None]:
        """Context in which `core` holds the weights to publish: the average, or the anchors of the outer step."""
        if self.outer is not None:
            published: AbstractContextManager[None] = self.outer.published(self.ema)
            return published
        return nullcontext() if self.ema is None else self.ema.swapped_in(self.core)

    @property
    def micro_batch(self) -> int:
        """Rows per process and forward."""
        return self.config.train.global_batch // (self.links.world * self.accumulation)


def check_output(config: TrainConfig, links: Links) -> Path | None:
    """The checkpoint to resume from, after checking that nothing in the output folder would be lost.

    With islands `--resume auto` is the newest that all of them have. Raises ValueError if the folder cannot be written
    to, or holds checkpoints that the run would have to delete.
    """
    folder = Path(config.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file; give a folder")
    ancestor = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise ValueError(f"--output_dir {folder} cannot be written to (no permission for {ancestor})")
    resume = resolve(config, links)
    in_the_way = ck.list_checkpoints(folder)
    if links.islands > 1 and config.resume == "auto" and not config.outer.new_islands:
        return resume
    if resume is not None:
        done = ck.read_state(resume)["step"]
        in_the_way = [path for path in in_the_way if ck.step_of(path) > done]
    if in_the_way and not config.overwrite:
        advice = "--resume auto goes on from the newest, " if resume is None else ""
        raise ValueError(
            f"--output_dir {folder} holds checkpoints that this run would replace ({in_the_way[-1].name}); {advice}"
            "--overwrite deletes them, or give another folder"
        )
    return resume


def island_folder(folder: Path, island: int) -> Path:
    """Where an island writes: island 0 into the output folder itself, the others below it."""
    return folder / f"island-{island}" if island else folder


def resolve(config: TrainConfig, links: Links) -> Path | None:
    """The checkpoint of this island that `--resume` means."""
    folder, asked = Path(config.output_dir), config.resume
    if links.control is None or asked == "none":
        return ck.resolve_resume(folder, asked)
    if config.outer.new_islands:
        return ck.resolve_resume(folder.parent if links.island and asked == "auto" else folder, asked)
    if asked != "auto":
        path = Path(asked)
        return ck.resolve_resume(folder, str(island_folder(path.parent, links.island) / path.name))
    everybody = [set(steps) for steps in links.control.gather([ck.step_of(c) for c in ck.list_checkpoints(folder)])]
    common = set.intersection(*everybody)
    if not common and any(everybody):
        raise ValueError(
            f"--resume auto: no checkpoint is there for all islands; they have {[sorted(steps) for steps in everybody]}"
        )
    return ck.checkpoint_path(folder, max(common)) if common else None


def clear_output(run: Run) -> None:
    """Makes the output folder; deletes leftovers of interrupted saves and, with --overwrite, checkpoints in the way.

    Called when nothing but the training itself can fail any more.
    """
    run.team.barrier()
    if run.team.is_main:
        folder = Path(run.config.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        ck.clean_leftovers(folder)
        ahead = run.links.islands > 1 and run.config.resume == "auto"  # of what all islands have saved
        for path in ck.list_checkpoints(folder) if run.config.overwrite or ahead else []:
            if run.resumed_from is None or ck.step_of(path) > run.step:
                ck.delete_checkpoint(path)
    run.team.barrier()


def fingerprint(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator) -> dict[str, Any]:
    """What a resumed run must share with the one it continues, or its steps would not be the same steps.

    The data has a fingerprint of its own, which it checks itself.
    """
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    return {
        "the tokenizer": hashlib.sha256(vocabulary).hexdigest()[:16],
        "--tokenizer.vocab_size": config.tokenizer.vocab_size,
        "--data.seq_len": config.data.seq_len,
        "--train.global_batch": config.train.global_batch,
        "--seed": config.seed,
        "--optim.name": config.optim.name,
        "--lora": config.lora.describe(),
        "--train.freeze": list(config.train.freeze) or None,
        "an EMA (--train.ema)": config.train.ema is not None,
        "an outer step (--outer.preset)": config.outer.preset != "none" or None,
        "the number of processes of DeepSpeed": accelerator.num_processes if deepspeed else None,
    }


def shared_facts(run: Run) -> dict[str, Any]:
    """What all islands must have in common, in a form that can be sent."""
    options = as_dict(run.config)
    per_launch = {"rendezvous", "island", "timeout"}
    outer = {key: value for key, value in options["outer"].items() if key not in per_launch}
    loop = {key: value for key, value in options["train"].items() if key not in ("micro_batch", "measure_peak")}
    common = {name: options[name] for name in ("seed", "objective", "optim", "lr_schedule", "validation", "checkpoint")}
    facts = fingerprint(run.config, run.tokenizer, run.accelerator)
    return {**common, "outer": outer, "train": loop, **facts, "the step": run.step, "the length": run.total_steps}


def build_objective(config: TrainConfig, model: MDLMForMaskedLM, total_steps: int) -> Objective:
    """The loss of a run of `total_steps`, on which the length of the corruption warm-up may depend."""
    assert model.config.mask_token_id is not None, "checked when the model was made"
    warmup = config.objective.warmup_steps or round(config.train.corruption_warmup * total_steps)
    return dataclasses.replace(config.objective, warmup_steps=warmup).build(
        global_batch=config.train.global_batch,
        seed=config.seed,
        mask_token_id=model.config.mask_token_id,
        num_tokens=model.config.num_tokens,
        block_size=model.config.block_size,
        fused_head=fuses(model.lm_head),
    )


def set_up(config: TrainConfig) -> Run:
    """Checks everything and builds the run, at step 0 with its initial weights. Raises ValueError naming the flag."""
    accelerator = start_accelerator(config)
    links = connect(config.outer, accelerator)
    if links.island:
        config = dataclasses.replace(config, output_dir=str(island_folder(Path(config.output_dir), links.island)))
    resume = check_output(config, links)
    accumulation = config.train.accumulation(links.world)
    tokenizer = chat_tokenizer(make_tokenizer(config, resume, links.team), config.data.chat_template)
    core, base = make_model(config, resume, tokenizer)
    data = open_data(dataclasses.replace(config.data, seed=config.seed), tokenizer)
    wanted = config.validation
    if (wanted.every or wanted.at_start) and data.validation is None:
        raise ValueError(
            f"--validation.every is {wanted.every}, --validation.at_start {str(wanted.at_start).lower()}, but there is "
            "no validation text: set --data.validation_fraction or --data.validation_source, or 0 and false"
        )
    model, optimizer = prepare(config, accelerator, core, links.team if links.split else None)
    steps = config.train.steps or 0
    run = Run(
        config=config,
        accelerator=accelerator,
        links=links,
        tokenizer=tokenizer,
        data=data,
        core=core,
        model=model,
        optimizer=optimizer,
        ema=None if config.train.ema is None else EMA(core, config.train.ema),
        objective=build_objective(config, core, steps),
        accumulation=accumulation,
        total_steps=steps,
        resumed_from=resume,
        base=base,
    )
    if run.uses_deepspeed:
        run.parts.append(zero.ZeroState(model))
    if config.drift.every:
        run.drift = SpectralDrift(core, config.drift, links.team.is_main)
        run.parts.append(run.drift)
    if config.outer.preset != "none":
        sharded = accelerator.distributed_type == DistributedType.FSDP
        run.outer = make_outer(core, model, run.raw_optimizer, config.outer, links, sharded)
        run.parts.append(run.outer)
        run.outer.attach(run)
    return run
