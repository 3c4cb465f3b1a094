"""`MDLMForMaskedLM.from_pretrained` of a public checkpoint: a folder or hub name in a format of `formats.py`.

The configuration decides: is its model type our own, `transformers` loads as ever; is it a public one, the weights are
converted while they are read, as `mdlm convert` does, with all its checks. Files of a hub name are brought by
`huggingface_hub` into its cache; files with code are not among them. Read next: `convert.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig

from mdlm.convert import is_public, load_public
from mdlm.load import HUB_FILES
from mdlm.modeling import MDLMForMaskedLM

_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision")
_CONVERSION = ("mask_token_id", "add_mask_token", "shift_logits", "block_size")
_OWN = ("dtype", "torch_dtype", "device_map", "attn_implementation", "subfolder")


def load_if_public(name: str | Path, model_args: tuple[Any, ...], options: Mapping[str, Any]) -> MDLMForMaskedLM | None:
    """The converted model in evaluation mode; None if `name` is no checkpoint in a public format.

    Args:
        name: a folder, or the name of a repository on the hub.
        model_args, options: as `from_pretrained` was given them; see there.

    Raises ValueError for options that a public checkpoint cannot be loaded with, and as `convert.convert`.
    """
    local = Path(name).is_dir()
    subfolder = options.get("subfolder") or ""
    if not local and _hub_model_type(str(name), options) in (None, MDLMForMaskedLM.config_class.model_type):
        return None
    if local and not ((Path(name) / subfolder / "config.json").is_file() and is_public(Path(name) / subfolder)):
        return None
    allowed = {*_OWN, *_HUB, *_CONVERSION}
    strange = sorted(key for key, value in options.items() if key not in allowed and value is not None)
    if strange or model_args:
        raise ValueError(
            f"{name} is a public checkpoint, which is converted while it is loaded; {', '.join(strange) or 'a name'}"
            f" cannot be followed there (code in the folder is never run). Options: {', '.join(sorted(allowed))}; for "
            "others run `mdlm convert` first"
        )
    folder = Path(name)
    if not local:
        folder = Path(snapshot_download(str(name), allow_patterns=HUB_FILES, **_given(options, _HUB)))
    dtype, device = _dtype(options), _device(options.get("device_map"))
    said = _given(options, (*_CONVERSION, "attn_implementation"))
    model, _ = load_public(folder / subfolder, dtype, device, **said)
    return model


def _given(options: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: options[name] for name in names if options.get(name) is not None}


def _hub_model_type(name: str, options: Mapping[str, Any]) -> str | None:
    """The model type of a repository; None if its configuration cannot be had (`transformers` then says why)."""
    try:
        config, _ = PreTrainedConfig.get_config_dict(name, **_given(options, (*_HUB, "subfolder")))
    except (OSError, ValueError):
        return None
    return config.get("model_type")


def _dtype(options: Mapping[str, Any]) -> torch.dtype | None:
    value = options.get("dtype", options.get("torch_dtype"))
    if value is None or value == "auto" or isinstance(value, torch.dtype):
        return None if value == "auto" else value
    found = getattr(torch, str(value), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype is {value!r}; it must be a torch.dtype, its name, or 'auto' (as stored)")
    return found


def _device(device_map: Any) -> torch.device | str:
    if isinstance(device_map, Mapping):
        if list(device_map) != [""]:
            raise ValueError(f"device_map is {dict(device_map)}; a public checkpoint is loaded onto one device")
        device_map = device_map[""]
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        raise ValueError(f"device_map is {device_map!r}; a public checkpoint is loaded onto one device: name it")
    return "cpu" if device_map is None else torch.device(device_map)
