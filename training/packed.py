"""A state of nested lists, dicts, numbers and tensors as one safetensors file, which cannot run code when read.

Tensors go in as they are, the rest as JSON beside them. Read next: `islands.py`, whose state it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def write(path: Path, state: Any) -> None:
    """Writes `state`: None, numbers, strings, tensors, and lists, tuples and dicts of them (keys: numbers, strings)."""
    tensors: dict[str, Tensor] = {}
    skeleton = _pack(state, tensors)
    save_file(tensors, path, metadata={"format": "pt", "state": json.dumps(skeleton)})


def read(path: Path) -> Any:
    """What `write` was given; tuples come back as lists."""
    with safe_open(path, framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a handle, not a dict
        return _unpack(json.loads(file.metadata()["state"]), tensors)


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[_pack(k, tensors), _pack(v, tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [_pack(v, tensors) for v in value]}
    assert value is None or isinstance(value, (bool, int, float, str)), type(value)
    return {"value": value}


def _unpack(packed: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    ((kind, value),) = packed.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {_unpack(k, tensors): _unpack(v, tensors) for k, v in value}
    return [_unpack(v, tensors) for v in value] if kind == "list" else value
