"""GPT-2 from its equations, in float64, one row at a time: learned positions, LayerNorm, GELU (tanh), fused attention.

Takes the tensors under their public names. Shares no code with the product and uses no torch. `causal` False: every
token sees its whole row, as after adaptation to diffusion.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


def _norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    centred = x - sum(x) / len(x)
    return centred / math.sqrt(sum(centred**2) / len(x) + eps) * weight + bias


def _gelu(x: Array) -> Array:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel, 1606.08415)."""
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def logits(weights: dict[str, Array], layers: int, heads: int, tokens: list[int], eps: float, causal: bool) -> Array:
    """`[seq, vocab]`: row i is what the head says at position i, about token i + 1 in the original."""
    w = {name.removeprefix("transformer."): value for name, value in weights.items()}
    stream = [w["wte.weight"][token] + w["wpe.weight"][place] for place, token in enumerate(tokens)]
    width = len(stream[0])
    dim = width // heads
    for layer in range(layers):
        at = f"h.{layer}."
        queries, keys, values = [], [], []
        for x in stream:
            y = _norm(x, w[at + "ln_1.weight"], w[at + "ln_1.bias"], eps)
            fused = y @ w[at + "attn.c_attn.weight"] + w[at + "attn.c_attn.bias"]
            queries.append(fused[:width].reshape(heads, dim))
            keys.append(fused[width : 2 * width].reshape(heads, dim))
            values.append(fused[2 * width :].reshape(heads, dim))
        after = []
        for i, x in enumerate(stream):
            seen = range(i + 1) if causal else range(len(stream))
            mixed = np.zeros((heads, dim))
            for head in range(heads):
                scores = [float(queries[i][head] @ keys[j][head]) / math.sqrt(dim) for j in seen]
                shares = [math.exp(score - max(scores)) for score in scores]
                for j, share in zip(seen, shares):
                    mixed[head] += share / sum(shares) * values[j][head]
            x = x + mixed.reshape(-1) @ w[at + "attn.c_proj.weight"] + w[at + "attn.c_proj.bias"]
            y = _norm(x, w[at + "ln_2.weight"], w[at + "ln_2.bias"], eps)
            inner = _gelu(y @ w[at + "mlp.c_fc.weight"] + w[at + "mlp.c_fc.bias"])
            after.append(x + inner @ w[at + "mlp.c_proj.weight"] + w[at + "mlp.c_proj.bias"])
        stream = after
    head = w.get("lm_head.weight", w["wte.weight"])
    return np.stack([head @ _norm(x, w["ln_f.weight"], w["ln_f.bias"], eps) for x in stream])
