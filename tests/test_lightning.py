"""Lightning checkpoints of MDLM and BD3-LM: the average maps by order, no code of the file runs, damage is an error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_dit import CONFIGS, HEADS, MASK, ROWS, make_dit
from torch import Tensor

from mdlm.dit import load_dit
from mdlm.lightning import load_lightning

BLOCK = ("norm1.weight", "attn_qkv.weight", "attn_out.weight", "norm2.weight", "mlp.0.weight", "mlp.0.bias",
         "mlp.2.weight", "mlp.2.bias", "adaLN_modulation.weight", "adaLN_modulation.bias")  # fmt: skip
ORDER = [
    "vocab_embed.embedding", *(f"sigma_map.mlp.{n}.{leaf}" for n in (0, 2) for leaf in ("weight", "bias")),
    *(f"blocks.{n}.{leaf}" for n in range(2) for leaf in BLOCK), "output_layer.norm_final.weight",
    *(f"output_layer.{part}.{leaf}" for part in ("linear", "adaLN_modulation") for leaf in ("weight", "bias")),
]  # fmt: skip
"""The parameters of the published model in the order of its `parameters()`, written out by hand."""


class Hyper:
    """Something a checkpoint of the training code holds besides tensors; its class is unknown to a reader."""

    def __init__(self) -> None:
        self.lr = 3e-4


def make(target: str) -> None:
    """What a hostile file may call."""
    Path(target).mkdir()


class Evil:
    """A pickle that calls `function` when it is read by `pickle`."""

    def __init__(self, function: Any, target: Path) -> None:
        self.function, self.target = function, target

    def __reduce__(self) -> Any:
        return self.function, (str(self.target),)


def make_ckpt(path: Path, weights: dict[str, Tensor], prefix: str = "backbone.", **changes: Any) -> list[Tensor]:
    """A file as Lightning writes it: raw weights with a buffer among them, averaged ones as a list of other values."""
    state = {}
    for name in ORDER:
        if name == "blocks.0.norm1.weight":
            state[f"{prefix}rotary_emb.inv_freq"] = weights["backbone.rotary_emb.inv_freq"]
        state[prefix + name] = weights[f"backbone.{name}"]
    shadow = [weights[f"backbone.{name}"] + 0.01 * (n + 1) for n, name in enumerate(ORDER)]
    content = {
        "epoch": 3, "global_step": 1000, "pytorch-lightning_version": "2.2.1", "state_dict": state,
        "ema": {"decay": 0.9999, "num_updates": 10, "shadow_params": shadow},
        "optimizer_states": [], "hyper_parameters": {"config": Hyper()}, **changes,
    }  # fmt: skip
    torch.save(content, path)
    return shadow


def sizes(name: str) -> dict[str, Any]:
    return {"n_heads": HEADS, "model_length": 32, "block_size": CONFIGS[name].get("block_size")}


IDS = torch.randint(0, ROWS, (2, 11), generator=torch.Generator().manual_seed(1))
IDS[:, ::3] = MASK


@pytest.mark.parametrize("prefix", ["backbone.", "backbone._orig_mod."], ids=["plain", "compiled"])
@pytest.mark.parametrize("name", CONFIGS)
def test_raw_and_averaged_weights_are_those_of_the_folder(name: str, prefix: str, tmp_path: Path) -> None:
    weights = make_dit(tmp_path / "raw", name)
    shadow = make_ckpt(tmp_path / "last.ckpt", weights, prefix)
    raw = load_lightning(tmp_path / "last.ckpt", MASK, ema=False, **sizes(name))
    assert torch.equal(raw(IDS), load_dit(tmp_path / "raw", MASK)(IDS))
    averaged = load_lightning(tmp_path / "last.ckpt", MASK, dtype=torch.float64, **sizes(name))
    held = dict(averaged.model.named_parameters())
    assert len(held) == len(ORDER)
    for entry, value in zip(ORDER, shadow):
        assert torch.equal(held[f"backbone.{entry}"].float(), value), entry
    assert not torch.allclose(averaged(IDS).float(), raw(IDS), atol=1e-3)


def test_no_code_of_the_file_runs(tmp_path: Path) -> None:
    weights, made = make_dit(tmp_path / "raw", "mdlm"), tmp_path / "made"
    path = tmp_path / "last.ckpt"
    make_ckpt(path, weights, hyper_parameters={"config": Evil(make, made), "more": Hyper()})
    load_lightning(path, MASK, **sizes("mdlm"))
    make_ckpt(path, weights, hyper_parameters={"config": Evil(os.mkdir, made)})
    with pytest.raises(ValueError, match="cannot be read as a Lightning checkpoint"):  # torch blocks such modules
        load_lightning(path, MASK, **sizes("mdlm"))
    assert not made.exists()
    torch.load(path, weights_only=False)
    assert made.exists(), "the file is as hostile as it should be"


@pytest.mark.parametrize("case", ["none", "short", "order", "no state", "cut", "text", "heads", "missing", "broken"])
def test_what_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    weights = make_dit(tmp_path / "raw", "mdlm")
    path, options = tmp_path / "last.ckpt", sizes("mdlm")
    shadow = make_ckpt(path, weights)
    message = {
        "none": "holds no averaged weights .*ema=False",
        "short": "29 averaged tensors for 30 weights",
        "order": r"in another order:\n.*norm1\.weight \[24\] would be",
        "no state": "holds no state_dict",
        "cut": "cannot be read as a Lightning checkpoint",
        "text": "cannot be read as a Lightning checkpoint",
        "heads": "n_heads is 5; it must divide the width 24",
        "missing": "is no checkpoint of a DiT",
        "broken": r"linear\.bias holds NaN or infinity",
    }[case]
    assert len(ORDER) == 30
    if case == "none":
        make_ckpt(path, weights, ema=None)
    elif case == "short":
        make_ckpt(path, weights, ema={"shadow_params": shadow[:-1]})
    elif case == "order":
        swapped = [*shadow[:5], shadow[6], shadow[5], *shadow[7:]]
        make_ckpt(path, weights, ema={"shadow_params": swapped})
    elif case == "no state":
        torch.save({"model": weights}, path)
    elif case == "cut":
        path.write_bytes(path.read_bytes()[:2000])
    elif case == "text":
        path.write_text("hello")
    elif case == "heads":
        options["n_heads"] = 5
    elif case == "missing":
        make_ckpt(path, weights, state_dict={"net.weight": torch.zeros(2)}, ema={"shadow_params": [torch.zeros(2)]})
    else:
        shadow[ORDER.index("output_layer.linear.bias")][0] = torch.nan
        make_ckpt(path, weights, ema={"shadow_params": shadow})
    with pytest.raises(ValueError, match=message):
        load_lightning(path, MASK, **options)
