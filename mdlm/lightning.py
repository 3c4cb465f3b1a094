"""Lightning checkpoints (`.ckpt`) of MDLM's and BD3-LM's training code, with their averaged weights, as a `Denoiser`.

Such a file is a pickle. It is read by torch's restricted reader, which builds tensors and plain containers only; every
other object in it (the configuration, the tokenizer) becomes an empty one, and no code of it runs. The average of the
weights, which the papers evaluate, is a list without names in the order of the model's parameters: that of the named
weights beside it, buffers left out. Read next: `dit.py`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdlm.denoiser import LogitsModelDenoiser
from mdlm.dit import BUFFERS, DiTShape, build_dit

_COMPILED = "backbone._orig_mod."


class _Empty:
    """Stands for an object that is not read."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def load_lightning(
    path: str | Path,
    mask_token_id: int,
    n_heads: int,
    model_length: int,
    block_size: int | None = None,
    ema: bool = True,
    num_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> LogitsModelDenoiser:
    """The model of a Lightning checkpoint, as `dit.load_dit`.

    Args:
        path: the `.ckpt` file.
        mask_token_id: the absorbing state; with GPT-2's tokenizer 50257.
        n_heads: attention heads, which the tensors do not show; 12 for mdlm-owt.
        model_length: longest row in tokens; 1024 for mdlm-owt.
        block_size: length of BD3-LM's blocks; None: MDLM.
        ema: the averaged weights; False: those of the last step.
        num_tokens, dtype, device: see `load_dit`.

    Raises:
        ValueError: a file that is no such checkpoint, or cut off; no average, or one that does not fit the weights in
            number or shapes; what `load_dit` refuses.
    """
    content = _read(Path(path))
    weights = {
        name.replace(_COMPILED, "backbone."): tensor
        for name, tensor in content["state_dict"].items()
        if isinstance(tensor, Tensor)
    }
    if ema:
        weights = _averaged(content, weights, str(path))
    return build_dit(
        _shape(weights, n_heads, model_length, block_size, str(path)),
        {name: tuple(tensor.shape) for name, tensor in weights.items()},
        weights.__getitem__,
        str(path),
        mask_token_id,
        num_tokens,
        dtype,
        device,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        others = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([(_Empty, name) for name in others]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} cannot be read as a Lightning checkpoint: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(f"{path} holds no state_dict: it is no Lightning checkpoint")
    return content


def _averaged(content: dict[str, Any], weights: dict[str, Tensor], place: str) -> dict[str, Tensor]:
    average = content.get("ema")
    values = average.get("shadow_params") if isinstance(average, dict) else None
    if not isinstance(values, list):
        raise ValueError(f"{place} holds no averaged weights (ema.shadow_params); take the last step's with ema=False")
    names = [name for name in weights if name not in BUFFERS]
    if len(values) != len(names):
        raise ValueError(f"{place}: {len(values)} averaged tensors for {len(names)} weights; another model's average")
    wrong = [
        f"{name} {list(weights[name].shape)} would be {list(value.shape)}"
        for name, value in zip(names, values)
        if value.shape != weights[name].shape
    ]
    if wrong:
        raise ValueError(f"{place}: the averaged weights are in another order:\n  " + "\n  ".join(wrong))
    return dict(zip(names, values))


def _shape(weights: dict[str, Tensor], n_heads: int, model_length: int, block_size: int | None, place: str) -> DiTShape:
    embedding, level = (weights.get(f"backbone.{name}") for name in ("vocab_embed.embedding", "sigma_map.mlp.2.weight"))
    if embedding is None or level is None or embedding.dim() != 2:
        raise ValueError(
            f"{place} is no checkpoint of a DiT: there is no backbone.vocab_embed.embedding, or no sigma_map"
        )
    rows, width = embedding.shape
    if n_heads < 1 or width % n_heads:
        raise ValueError(f"n_heads is {n_heads}; it must divide the width {width}")
    blocks = {name.split(".")[2] for name in weights if name.startswith("backbone.blocks.")}
    return DiTShape(rows, width, len(level), len(blocks), n_heads, model_length, block_size)
