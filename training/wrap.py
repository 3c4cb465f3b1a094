"""How the model is wrapped for its processes: accelerate's DDP, FSDP2 or DeepSpeed; with islands, DDP or FSDP2 within.

`Accelerator.prepare` always joins the whole launch, so where one launch holds several islands only its precision and
its optimizer wrapper are used here, and DDP or FSDP2 are set over the island's processes. (A two-dimensional mesh with
`set_requires_all_reduce(False)` is no way: it is meant for accumulation, and never writes a gradient.)
Read next: `setup.py`.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from mdlm.modeling import MDLMForMaskedLM
from mdlm.training import zero
from mdlm.training.config import TrainConfig
from mdlm.training.metrics import check_tracker
from mdlm.training.optim import build_optimizer
from mdlm.training.team import Team

_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


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
    if kind == DistributedType.DEEPSPEED and config.outer.preset != "none":
        raise ValueError(f"--outer.preset {config.outer.preset} does not work with DeepSpeed; use DDP or FSDP2")
    return accelerator


def prepare(
    config: TrainConfig, accelerator: Accelerator, core: MDLMForMaskedLM, island: Team | None
) -> tuple[nn.Module, Any]:
    """The wrapped model and optimizer. Compilation is in place, so no name in the state dict changes.

    `island`: this process's team, where the launch holds several.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        zero.configure(config, accelerator)
    if config.lora.r is not None and accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        raise ValueError(f"--lora.r does not work with {accelerator.distributed_type.value} yet; train with DDP")
    if config.train.compile:
        sharded = accelerator.distributed_type == DistributedType.FSDP  # whose hooks sit between the layers
        for part in core.model.layers if sharded else (core.model,):
            part.compile(dynamic=False)
    if island is not None:
        return _within_island(config, accelerator, core, island)
    model, optimizer = accelerator.prepare(core, build_optimizer(core, config.optim))
    return model, optimizer


def _within_island(
    config: TrainConfig, accelerator: Accelerator, core: MDLMForMaskedLM, island: Team
) -> tuple[nn.Module, Any]:
    model: nn.Module = accelerator.prepare_model(core, evaluation_mode=True)  # precision alone
    if accelerator.distributed_type == DistributedType.FSDP:
        accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False  # which would broadcast over the launch
        assert island.group is not None
        mesh = DeviceMesh.from_group(island.group, accelerator.device.type, mesh_dim_names=("inner",))
        model = fsdp2_prepare_model(
            SimpleNamespace(  # what it reads of an Accelerator, with the island's mesh in place of the launch's
                state=accelerator.state,
                torch_device_mesh=mesh,
                parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
                mixed_precision=accelerator.mixed_precision,
                is_main_process=accelerator.is_main_process,
                device=accelerator.device,
            ),
            model,
        )
    elif island.size > 1:
        devices = None if accelerator.device.type == "cpu" else [accelerator.device]
        model = DistributedDataParallel(
            model,
            device_ids=devices,
            process_group=island.group,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )
    return model, accelerator.prepare_optimizer(build_optimizer(core, config.optim))
