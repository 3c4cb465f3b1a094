"""LoRA adapters through `peft`: attach, save, load, merge (`mdlm merge`); and freezing weights by name.

LoRA (Hu et al., arXiv 2106.09685): the weight W of a linear layer stays as it is and W + (alpha / r) B A is used, A
with r rows, B with r columns; B starts at 0. Only A and B are trained and saved. A checkpoint of such a run has no
`model.safetensors` but `adapter/`, a folder that `peft.PeftModel.from_pretrained(base, folder)` loads too. `base.json`
in it says which base it belongs to, by a hash over samples of every tensor: adapters of another base are refused.

QLoRA (2305.14314): the same over a base in few bits (`quantize.py`). `load_model` (and so sampling and evaluation) adds
the adapter to its base in float32, rounded as it was in training, and gives a plain model. `peft` is imported here
only, when an adapter is attached. Read next: `load.py`, `training/setup.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mdlm.checkpoint import read_tensors, write_tensors
from mdlm.command import run_command
from mdlm.modeling import MDLMForMaskedLM
from mdlm.quantize import Quantization, quantize, quantized_layers, rounded

ADAPTER_FOLDER = "adapter"
_WEIGHTS, _CONFIG, _BASE = "adapter_model.safetensors", "adapter_config.json", "base.json"
_PEFT_PREFIX, _NAME = "base_model.model.", ".default"
_SAMPLES = 512
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Every linear layer of the blocks, as QLoRA (arXiv 2305.14314) recommends."""


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA: train small matrices beside the weights of `model.init_from`, which stay as they are."""

    r: int | None = None
    """Rank; null: no adapter, all weights are trained."""
    alpha: float | None = None
    """The adapter counts alpha / r; null: 2 r."""
    dropout: float = 0.0
    """Dropout in front of the adapter, in [0, 1). Its draws depend on step, micro-batch and process: a resumed run
    repeats them, another split into micro-batches does not."""
    targets: tuple[str, ...] = TARGETS
    """Linear layers that get one, by the last part of their name; those of the default that a model has not got (the
    gate of an MLP with GELU) are left out."""

    quantize: Quantization | None = None
    """The base's layers in few bits (QLoRA): nf4 or int8, by bitsandbytes; null: as they are."""

    def __post_init__(self) -> None:
        if self.r is None and (self.alpha, self.dropout, self.targets, self.quantize) != (None, 0.0, TARGETS, None):
            raise ValueError(
                "lora.alpha, lora.dropout, lora.targets and lora.quantize have no effect without lora.r; set it, e.g. "
                "to 16"
            )
        if self.r is not None and self.r < 1:
            raise ValueError(f"lora.r is {self.r}; it must be 1 or more, or null for no adapter")
        if self.alpha is not None and self.alpha <= 0:
            raise ValueError(f"lora.alpha is {self.alpha}; it must be positive")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"lora.dropout is {self.dropout}; it must lie in [0, 1)")
        if not self.targets:
            raise ValueError(f"lora.targets is empty; name layers, e.g. {', '.join(TARGETS)}")

    def describe(self) -> dict[str, Any] | None:
        """What a resumed run must share; None without adapter."""
        if self.r is None:
            return None
        told = {**asdict(self), "targets": list(self.targets)}
        return {name: value for name, value in told.items() if name != "quantize" or value is not None}


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ValueError(f"adapters need the package peft ({error}): pip install 'mdlm-torch[peft]'") from error
    return peft


def base_hash(model: nn.Module) -> str:
    """A hash of names, shapes and up to 512 evenly spaced values (as float32) of every weight, without adapters.

    It tells checkpoints apart; it is no proof against one made to deceive. Precision does not matter as long as the
    weights are those that are stored.
    """
    digest = hashlib.sha256()
    weights = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items()}
    for name, value in sorted(weights.items()):
        if "lora_" in name:
            continue
        flat = value.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].to("cpu", torch.float32).contiguous()
        digest.update(f"{name} {tuple(value.shape)}".encode())
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def attach(model: MDLMForMaskedLM, config: AdapterConfig, compute: torch.dtype = torch.float32) -> str:
    """Freezes `model` and puts a fresh adapter beside the layers `config` names, in place; B = 0, so nothing changes
    but what `config.quantize` rounds, whose products are made in `compute`. Returns `base_hash` of the model given.

    A is drawn from torch's generator. Raises ValueError without `peft`, without `bitsandbytes` where it is needed, or
    if a target names no linear layer.
    """
    assert config.r is not None, "no adapter is configured"
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    strange = [target for target in config.targets if target not in linear]
    if strange and config.targets != TARGETS:
        raise ValueError(f"lora.targets names {', '.join(strange)}; linear layers are {', '.join(sorted(linear))}")
    peft = _peft()
    options = peft.LoraConfig(
        r=config.r,
        lora_alpha=2 * config.r if config.alpha is None else config.alpha,
        lora_dropout=config.dropout,
        target_modules=[target for target in config.targets if target in linear],
        bias="none",
    )
    digest = base_hash(model)
    if config.quantize is not None:
        quantize(model, config.quantize, compute)
    model.requires_grad_(False)
    told = f"is_loaded_in_{8 if config.quantize == 'int8' else 4}bit"  # where peft looks for quantised layers
    setattr(model, told, config.quantize is not None)
    peft.inject_adapter_in_model(options, model)
    delattr(model, told)
    return digest


def adapter_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a model's tensors that belong to its adapter."""
    return {name: tensor for name, tensor in weights.items() if "lora_" in name}


def save_adapter(
    folder: Path, weights: Mapping[str, Tensor], config: AdapterConfig, base: str, base_digest: str
) -> None:
    """Writes `folder` in peft's format, and `base.json`. `weights`: by the model's names; `base`: the base's path."""
    assert config.r is not None
    base = str(Path(base).resolve()) if Path(base).exists() else base
    folder.mkdir()
    options = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "r": config.r,
        "lora_alpha": 2 * config.r if config.alpha is None else config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": list(config.targets),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / _CONFIG).write_text(json.dumps(options, indent=1) + "\n", encoding="utf-8")
    (folder / _BASE).write_text(
        json.dumps({"path": base, "hash": base_digest, "quantize": config.quantize}) + "\n", encoding="utf-8"
    )
    write_tensors(
        folder / _WEIGHTS, {_PEFT_PREFIX + name.replace(_NAME, ""): tensor for name, tensor in weights.items()}
    )


def has_adapter(folder: Path) -> bool:
    """Whether `folder` is a checkpoint that holds an adapter in place of weights."""
    return (folder / ADAPTER_FOLDER / _CONFIG).is_file() and not any(folder.glob("*.safetensors"))


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter folder by the names of a model it is attached to."""
    stored = read_tensors(folder / _WEIGHTS)
    return {
        name.removeprefix(_PEFT_PREFIX)
        .replace("lora_A.", f"lora_A{_NAME}.")
        .replace("lora_B.", f"lora_B{_NAME}."): value
        for name, value in stored.items()
    }


def adapter_base(folder: Path) -> str:
    """Path of the base an adapter folder was made on."""
    return str(json.loads((folder / _BASE).read_text(encoding="utf-8"))["path"])


def check_base(digest: str, folder: Path, base: str) -> None:
    """ValueError unless `digest`, the hash of `base`, is of the base that the adapter in `folder` was trained on."""
    made_on = json.loads((folder / _BASE).read_text(encoding="utf-8"))
    if digest != made_on["hash"]:
        raise ValueError(
            f"{folder} is an adapter of another base: it was trained on {made_on['path']} as it was then, and the "
            f"weights in {base} are others; give back that base"
        )


def merge_into(model: MDLMForMaskedLM, folder: Path, base: str) -> None:
    """Adds the adapter in `folder` to the weights of `model`, in place: W + (alpha / r) B A, in the model's precision.

    W is what the adapter was trained beside: of a quantised base the rounded weights. Raises ValueError for another
    base, or tensors that do not fit.
    """
    check_base(base_hash(model), folder, base)
    kind = json.loads((folder / _BASE).read_text(encoding="utf-8")).get("quantize")
    if kind is not None:
        for quantised in quantized_layers(model).values():
            quantised.weight.data.copy_(rounded(quantised.weight.data, kind))
    options = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    tensors = read_adapter(folder)
    scale = options["lora_alpha"] / options["r"]
    layers = sorted({name.partition(".lora_")[0] for name in tensors})
    with torch.no_grad():
        for layer in layers:
            a, b = (tensors.get(f"{layer}.lora_{x}{_NAME}.weight") for x in "AB")
            module = dict(model.named_modules()).get(layer)
            if a is None or b is None or not isinstance(module, nn.Linear):
                raise ValueError(
                    f"{folder}: the adapter's {layer} fits no linear layer of {base}, or a half is missing"
                )
            weight = module.weight
            if b.shape[0] != weight.shape[0] or a.shape[1] != weight.shape[1]:
                raise ValueError(f"{folder}: {layer} has shape {tuple(weight.shape)}, the adapter another")
            weight.add_((b.to(weight) @ a.to(weight)) * scale)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Takes the weights whose names match one of the shell patterns (`model.layers.0.*`) out of training.

    Raises ValueError for a pattern that matches none.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"--train.freeze: no weight matches {pattern!r}; names are like {names[0]}, {names[len(names) // 2]}, "
                f"{names[-1]}"
            )
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)


def merge(checkpoint: str, output: str, dtype: str = "float32") -> None:
    """Write the model that a checkpoint with an adapter stands for as a plain model folder.

    Args:
        checkpoint: a checkpoint of a LoRA run, or the run's folder.
        output: folder to make.
        dtype: precision of the weights: float32, bfloat16, float16.
    """
    from mdlm.load import load_model, model_folder

    target = Path(output)
    if target.exists():
        raise ValueError(f"{output} exists already; it is not overwritten")
    if not has_adapter(model_folder(checkpoint)):
        raise ValueError(f"{checkpoint} holds no {ADAPTER_FOLDER}/ in place of weights: there is nothing to merge")
    model, tokenizer = load_model(checkpoint, dtype=dtype, device="cpu")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main(argv: list[str] | None = None) -> int:
    """Entry of `mdlm merge`."""
    return run_command(merge, argv, prog="mdlm merge")
