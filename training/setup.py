"""What happens before the first step: the accelerator, the checks, and the parts of a run put together.

Everything a user can get wrong is found here, before anything is trained or deleted. Read next: `loop.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, broadcast_object_list
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from mdlm import checkpoint as ck
from mdlm.adapter import attach, freeze, has_adapter
from mdlm.chat import chat_tokenizer
from mdlm.config import MDLMConfig
from mdlm.convert import is_public, load_public, open_checkpoint
from mdlm.data import BatchStream, Data, open_data, training_texts
from mdlm.load import check_finite, model_folder
from mdlm.modeling import MDLMForMaskedLM
from mdlm.objective import Objective
from mdlm.tokenization import (
    check_vocab,
    load_tokenizer,
    num_tokens,
    open_tokenizer,
    padded_vocab_size,
    prepare_tokenizer,
)
from mdlm.training import zero
from mdlm.training.config import TrainConfig
from mdlm.training.drift import SpectralDrift
from mdlm.training.ema import EMA
from mdlm.training.metrics import check_tracker
from mdlm.training.optim import build_optimizer

_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


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
    drift: SpectralDrift | None = None
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

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> Tensor:
        """Sum (or largest value) of `tensor`, changed in place, over the processes that share the global batch."""
        if self.accelerator.num_processes > 1:
            op = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
            torch.distributed.all_reduce(tensor, op)
        return tensor

    @property
    def micro_batch(self) -> int:
        """Rows per process and forward."""
        return self.config.train.global_batch // (self.accelerator.num_processes * self.accumulation)


def start_accelerator(config: TrainConfig) -> Accelerator:
    """The `Accelerator` of this process. Raises ValueError if launcher and configuration contradict each other."""
    if "ACCELERATE_DYNAMO_BACKEND" in os.environ and os.environ["ACCELERATE_DYNAMO_BACKEND"].upper() != "NO":
        raise ValueError("accelerate's dynamo_backend would change the names of the weights; use --train.compile true")
    precision = _PRECISION[config.train.precision]
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked not in ("no", precision):
        raise ValueError(
            f"accelerate was configured for mixed precision {asked}, the run for --train.precision "
            f"{config.train.precision}; make them agree"
        )
    cpu = not torch.accelerator.is_available()
    if precision == "fp16" and cpu:
        raise ValueError("--train.precision fp16 needs a GPU; use bf16 or fp32 on the CPU")
    check_tracker(config.tracker)
    accelerator = Accelerator(
        mixed_precision=precision,
        cpu=cpu,
        log_with=None if config.tracker == "none" else config.tracker,
        project_dir=config.output_dir,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)],
    )
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"accelerate was configured for {accelerator.gradient_accumulation_steps} gradient accumulation steps; "
            "leave it at 1 and set --train.micro_batch, from which the accumulation follows"
        )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise ValueError(
            f"{launched} processes were launched, but accelerate sees {accelerator.num_processes}: each would train "
            "alone; check the accelerate configuration (accelerate env)"
        )
    kind = accelerator.distributed_type
    if os.environ.get("ACCELERATE_USE_FSDP", "false") == "true" and kind != DistributedType.FSDP:
        raise ValueError("accelerate was configured for FSDP, which it does on GPUs only; train with DDP instead")
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("FSDP version 1 is not supported: its flattened weights have no names; set fsdp_version: 2")
    if kind in (DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise ValueError(f"{kind.value} is not supported; use DDP, FSDP2 or DeepSpeed")
    return accelerator


def check_output(config: TrainConfig) -> Path | None:
    """The checkpoint to resume from, after checking that nothing in the output folder would be lost.

    Raises ValueError if the folder cannot be written to, or holds checkpoints that the run would have to delete.
    """
    folder = Path(config.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file; give a folder")
    ancestor = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise ValueError(f"--output_dir {folder} cannot be written to (no permission for {ancestor})")
    resume = ck.resolve_resume(folder, config.resume)
    in_the_way = ck.list_checkpoints(folder)
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


def clear_output(run: Run) -> None:
    """Makes the output folder; deletes leftovers of interrupted saves and, with --overwrite, checkpoints in the way.

    Called when nothing but the training itself can fail any more.
    """
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        folder = Path(run.config.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        ck.clean_leftovers(folder)
        for path in ck.list_checkpoints(folder) if run.config.overwrite else []:
            if run.resumed_from is None or ck.step_of(path) > run.step:
                ck.delete_checkpoint(path)
    run.accelerator.wait_for_everyone()


def make_tokenizer(config: TrainConfig, resume: Path | None, accelerator: Accelerator) -> PreTrainedTokenizerBase:
    """The tokenizer configured; else the checkpoint's or that of `init_from`; else one that the main process trains."""
    if config.tokenizer.path is not None:
        return load_tokenizer(config.tokenizer.path)
    source = initial_folder(config) if resume is None else resume
    if source is not None:
        return load_tokenizer(source) if not _is_public(source) else _public_tokenizer(source)
    trained: list[PreTrainedTokenizerBase | None] = [None]
    if accelerator.is_main_process:
        data = dataclasses.replace(config.data, seed=config.seed)
        trained = [open_tokenizer(config.tokenizer, lambda: training_texts(data))]
    broadcast_object_list(trained)
    assert trained[0] is not None
    return trained[0]


def initial_folder(config: TrainConfig) -> str | None:
    """What `init_from` means: the folder, of a run its newest checkpoint; None without it."""
    source = config.model.init_from
    return str(model_folder(source)) if source is not None and Path(source).is_dir() else source


def _is_public(source: str | Path) -> bool:
    return (Path(source) / "config.json").is_file() and is_public(Path(source))


def _public_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    opened = open_checkpoint(source).tokenizer
    if opened is None:
        raise ValueError(f"--model.init_from {source}: the folder holds no tokenizer")
    return prepare_tokenizer(opened.tokenizer)


def _stored_model(config: TrainConfig, source: str | Path) -> MDLMForMaskedLM:
    """The model in a folder, ours or public, in float32. Raises ValueError for weights that are not finite."""
    attention = config.model.attn_implementation
    if has_adapter(Path(source)):
        raise ValueError(f"--model.init_from {source} holds an adapter, not a model: make one of it with `mdlm merge`")
    if _is_public(source):
        model, _ = load_public(source, torch.float32, attn_implementation=attention)
    else:
        model = MDLMForMaskedLM.from_pretrained(source, dtype=torch.float32, attn_implementation=attention)
    check_finite(model, source)
    return model.train()


def make_model(config: TrainConfig, resume: Path | None, tokenizer: PreTrainedTokenizerBase) -> MDLMForMaskedLM:
    """The model with its initial weights, the same on every process. Raises ValueError where sizes do not fit."""
    torch.manual_seed(config.seed)
    options = config.model
    initial = initial_folder(config)
    if initial is not None:
        model = _stored_model(config, initial if resume is None or config.lora.r is not None else resume)
    else:
        sizes = MDLMConfig(
            vocab_size=padded_vocab_size(tokenizer),
            num_tokens=num_tokens(tokenizer),
            max_position_embeddings=options.max_position_embeddings or config.data.seq_len,
            mask_token_id=tokenizer.mask_token_id,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.bos_token_id,
            **options.architecture(),
        )
        model = MDLMForMaskedLM._from_config(sizes, attn_implementation=options.attn_implementation)
    if config.data.seq_len > model.config.max_position_embeddings:
        raise ValueError(
            f"--data.seq_len {config.data.seq_len} is longer than the model's max_position_embeddings "
            f"({model.config.max_position_embeddings}); lower it"
        )
    check_vocab(tokenizer, model.config)
    if model.config.mask_token_id is None:
        raise ValueError(f"--model.init_from {options.init_from}: its config.json has no mask_token_id; set it there")
    if config.lora.r is not None:
        attach(model, config.lora)
    freeze(model, config.train.freeze)
    if options.gradient_checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the new name of the method is younger than transformers 5
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


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
        "the number of processes of DeepSpeed": accelerator.num_processes if deepspeed else None,
    }


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
    )


def prepare(config: TrainConfig, accelerator: Accelerator, core: MDLMForMaskedLM) -> tuple[nn.Module, Any]:
    """The wrapped model and optimizer. Compilation is in place, so no name in the state dict changes."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        zero.configure(config, accelerator)
    if config.lora.r is not None and accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        raise ValueError(f"--lora.r does not work with {accelerator.distributed_type.value} yet; train with DDP")
    if config.train.compile:
        sharded = accelerator.distributed_type == DistributedType.FSDP  # whose hooks sit between the layers
        for part in core.model.layers if sharded else (core.model,):
            part.compile(dynamic=False)
    model, optimizer = accelerator.prepare(core, build_optimizer(core, config.optim))
    return model, optimizer


def set_up(config: TrainConfig) -> Run:
    """Checks everything and builds the run, at step 0 with its initial weights. Raises ValueError naming the flag."""
    accelerator = start_accelerator(config)
    resume = check_output(config)
    accumulation = config.train.accumulation(accelerator.num_processes)
    tokenizer = chat_tokenizer(make_tokenizer(config, resume, accelerator), config.data.chat_template)
    core = make_model(config, resume, tokenizer)
    data = open_data(dataclasses.replace(config.data, seed=config.seed), tokenizer)
    if config.validation.every and data.validation is None:
        raise ValueError(
            f"--validation.every is {config.validation.every}, but there is no validation text: set "
            "--data.validation_fraction or --data.validation_source, or --validation.every 0"
        )
    model, optimizer = prepare(config, accelerator, core)
    steps = config.train.steps or 0
    run = Run(
        config=config,
        accelerator=accelerator,
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
    )
    if run.uses_deepspeed:
        run.parts.append(zero.ZeroState(model))
    if config.drift.every:
        run.drift = SpectralDrift(core, config.drift, accelerator.is_main_process)
        run.parts.append(run.drift)
    return run
