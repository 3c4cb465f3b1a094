"""Weights in 4 or 8 bits under an adapter (QLoRA), by `bitsandbytes`.

nf4: blocks of 64 weights, each stored as one of 16 quantiles of a normal distribution times the block's largest value,
these values in 8 bits themselves (2305.14314). int8: each row over its largest value, the inputs rounded alike
(2208.07339, without its outlier columns, which depend on the batch). Only the linear layers of the blocks are stored
so, and frozen; the other weights are float32. On a CPU it works too, slowly. Read next: `adapter.py`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mdlm.modeling import MDLMForMaskedLM

Quantization = Literal["nf4", "int8"]


def _bitsandbytes(kind: str) -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ValueError(
            f"quantize={kind} needs the package bitsandbytes ({error}): pip install 'mdlm-torch[qlora]'"
        ) from error
    return bitsandbytes


def quantized_layers(model: MDLMForMaskedLM) -> dict[str, nn.Linear]:
    """The layers that `quantize` stores in few bits, by name: every linear layer of the blocks."""
    return {name: module for name, module in model.model.layers.named_modules() if isinstance(module, nn.Linear)}


def quantize(model: MDLMForMaskedLM, kind: Quantization, compute: torch.dtype) -> None:
    """Replaces `quantized_layers` in place; all other weights become float32. `compute`: what products are made in.

    Happens on the CPU, so that the stored values do not depend on the device; a later `model.to(device)` moves them.
    Raises ValueError without `bitsandbytes`.
    """
    library = _bitsandbytes(kind)
    for name, module in quantized_layers(model).items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.model.layers.get_submodule(owner), leaf, _quantized(library, module, kind, compute))
    stored = {id(module.weight) for module in quantized_layers(model).values()}
    for parameter in model.parameters():
        if id(parameter) not in stored:
            parameter.data = parameter.data.float()


def _quantized(library: Any, module: nn.Linear, kind: Quantization, compute: torch.dtype) -> nn.Linear:
    sizes = (module.in_features, module.out_features, module.bias is not None)
    weight = module.weight.data.float()
    if kind == "nf4":
        with torch.device("meta"):
            new = library.nn.Linear4bit(*sizes, compute_dtype=compute, quant_type=kind)
        new.weight = library.nn.Params4bit(weight, requires_grad=False, quant_type=kind, module=new)
        new.support_avx512bf16_for_cpu = False  # it would repack the weights in evaluation, which training cannot read
    else:
        with torch.device("meta"):
            new = library.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=0.0)
        new.weight = library.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    new.bias = module.bias
    quantized: nn.Linear = new.to("cpu")
    return quantized


def rounded(weight: Float[Tensor, "rows columns"], kind: Quantization) -> Float[Tensor, "rows columns"]:
    """What the quantised layer makes of a matrix: stored in few bits and read again; float32.

    Raises ValueError without `bitsandbytes`.
    """
    functional = _bitsandbytes(kind).functional
    if kind == "nf4":
        stored, state = functional.quantize_4bit(weight.float(), quant_type="nf4", compress_statistics=True)
        return functional.dequantize_4bit(stored, state)
    codes, largest, _ = functional.int8_vectorwise_quant(weight.half())
    return codes.float() * (largest.float()[:, None] / 127.0)
