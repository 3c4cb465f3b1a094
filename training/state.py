"""Weights and optimizer state by parameter name: whole tensors, however the processes hold them.

What is saved does not depend on the number of processes: FSDP2's shards are gathered one tensor at a time onto the
main process, and cut again on loading. Plain and DDP models are saved as they are. All functions here must be called by
every process, since gathering is a joint operation. Read next: `loop.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mdlm.training.optim import shard_like


def gather(tensor: Tensor, keep: bool) -> Tensor | None:
    """The whole tensor, detached, on the CPU, where `keep` is true (the main process); None elsewhere."""
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    return whole.cpu() if keep else None


def gather_all(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """`gather` of each; empty where `keep` is false."""
    gathered = {name: gather(tensor, keep) for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in gathered.items() if tensor is not None}


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """What a model is made of: parameters (tied ones once) and saved buffers, by name."""
    saved = set(model.state_dict().keys())
    return {
        **dict(model.named_parameters()),
        **{name: buffer for name, buffer in model.named_buffers() if name in saved},
    }


def named_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors under "<parameter name>/<key>", as each process holds them."""
    return {
        f"{name}/{key}": value
        for name, p in model.named_parameters()
        if p in optimizer.state
        for key, value in optimizer.state[p].items()
    }


def shard_all(whole: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on the device, in the precision and with the sharding of those of the same name in `like`."""
    return {
        name: shard_like(whole[name].to(device=other.device, dtype=other.dtype), other) for name, other in like.items()
    }


@torch.no_grad()
def restore_weights(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], source: str) -> None:
    """Copies whole tensors into those of a model. Raises ValueError if names or shapes differ, naming `source`."""
    check_same_shapes(own, weights, source)
    for name, value in shard_all(weights, own).items():
        own[name].copy_(value)


@torch.no_grad()
def restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor], source: str
) -> None:
    """Replaces the optimizer's state by whole tensors. Raises ValueError if they belong to other parameters."""
    parameters = dict(model.named_parameters())
    strangers = sorted({key.rpartition("/")[0] for key in state} - parameters.keys())
    if strangers:
        raise ValueError(f"{source} holds state of parameters that this model has not: {_some(strangers)}")
    optimizer.state.clear()
    for full_name, value in state.items():
        name, _, key = full_name.rpartition("/")
        p = parameters[name]
        value = value.to(p.device)
        if value.ndim:  # a step counter is one number for all shards
            if value.shape != p.shape:
                raise ValueError(f"{source}: {full_name} has shape {tuple(value.shape)}, expected {tuple(p.shape)}")
            value = shard_like(value, p)
        optimizer.state[p][key] = value


def check_same_shapes(own: Mapping[str, Tensor], given: Mapping[str, Tensor], source: str) -> None:
    """Raises ValueError that lists what `given` lacks, has too much, or has in another shape."""
    missing, extra = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    other = [
        f"{name} {tuple(given[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own
        if name in given and own[name].shape != given[name].shape
    ]
    problems = [
        f"{what}: {_some(names)}"
        for what, names in (("missing", missing), ("not in this model", extra), ("of another shape", other))
        if names
    ]
    if problems:
        raise ValueError(f"{source} does not fit this model's architecture; " + "; ".join(problems))


def _some(names: list[str], count: int = 3) -> str:
    rest = len(names) - count
    return ", ".join(names[:count]) + (f" and {rest} more" if rest > 0 else "")
