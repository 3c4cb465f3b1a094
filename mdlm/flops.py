"""How much arithmetic a training step needs and how much the machine can do: the two numbers behind MFU.

MFU (model FLOPs utilisation; Chowdhery et al., PaLM, 2204.02311, appendix B) = FLOPs the model's formula needs per
second / peak FLOP/s. The peak is measured here, with the machine's own matmul in the same precision: printed peaks do
not exist for most CPUs, and what a shared machine gives swings. Only ratios within one run mean something.
"""

from __future__ import annotations

import time

import torch

from mdlm.config import MDLMConfig


def forward_flops_per_token(config: MDLMConfig, seq_len: float, head_share: float = 1.0) -> float:
    """FLOPs (multiply and add counted apart) of one forward, per token.

    Args:
        config: sizes of the model.
        seq_len: keys each query attends to.
        head_share: share of the positions whose logits are computed (the masked ones in training).
    """
    width, heads, kv, dim = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    projections = width * dim * (2 * heads + 2 * kv)
    mlp = (3 if config.mlp == "swiglu" else 2) * width * config.intermediate_size
    attention = 2 * heads * dim * seq_len
    head = head_share * width * config.vocab_size
    return 2.0 * (config.num_hidden_layers * (projections + mlp + attention) + head)


def train_flops_per_token(config: MDLMConfig, seq_len: int, head_share: float = 1.0) -> float:
    """FLOPs of forward and backward, per token of text: the backward costs twice the forward.

    Block diffusion feeds each token twice, noised and clean, and either attends to (seq_len + block) / 2 on average.
    """
    if config.block_size is None:
        return 3.0 * forward_flops_per_token(config, seq_len, head_share)
    keys = (seq_len + min(config.block_size, seq_len)) / 2.0
    return 6.0 * forward_flops_per_token(config, keys, head_share / 2.0)


def matmul_peak(device: torch.device, dtype: torch.dtype, size: int = 2048, repeats: int = 8) -> float:
    """FLOP/s of the fastest of `repeats` square matmuls in `dtype` on `device`, with torch's current threads."""
    a = torch.randn(size, size, device=device).to(dtype)
    best = float("inf")
    for _ in range(repeats + 2):  # the first two warm up the kernels
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best
