"""Public architectures from their published definitions, in float64: LLaDA (OLMo blocks) and the Llama/Qwen decoders.

Works on a checkpoint's own names and its own `config.json`, with loops over heads and rotations as products of complex
numbers. Shares no code with the product. `conventions` says how each family attends and predicts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def conventions(public: dict[str, Any]) -> tuple[bool, int | None]:
    """(logits shifted, block size or None) of a public diffusion model."""
    return {
        "llada": (False, None),
        "Dream": (True, None),
        "sdar": (False, public.get("block_size")),
        "Fast_dLLM_Qwen": (True, public.get("bd_size")),
        "a2d-llama": (False, None),
        "a2d-qwen2": (False, None),
        "a2d-qwen3": (False, None),
    }[public["model_type"]]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def frequencies(
    theta: float, dim: int, scaling: dict[str, Any] | None = None, longest: int = 0
) -> tuple[Tensor, float]:
    """Angle per position of each pair, and the factor on cosine and sine (yarn)."""
    base = torch.tensor([theta ** (-2.0 * j / dim) for j in range(dim // 2)], dtype=torch.float64)
    kind = "default" if scaling is None else scaling.get("rope_type", scaling.get("type"))
    if kind == "default":
        return base, 1.0
    assert scaling is not None
    factor = scaling["factor"]
    if kind == "linear":
        return base / factor, 1.0
    original = scaling.get("original_max_position_embeddings", longest)
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        new = []
        for f in base.tolist():
            turns = original * f / (2 * math.pi)
            if turns < low:
                new.append(f / factor)
            elif turns > high:
                new.append(f)
            else:
                smooth = (turns - low) / (high - low)
                new.append((1 - smooth) * f / factor + smooth * f)
        return torch.tensor(new, dtype=torch.float64), 1.0
    assert kind == "yarn"

    def pair_with(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_with(scaling.get("beta_fast", 32))), 0)
    last = min(math.ceil(pair_with(scaling.get("beta_slow", 1))), dim - 1)
    new = []
    for j, f in enumerate(base.tolist()):
        ramp = min(max((j - first) / max(last - first, 0.001), 0.0), 1.0)
        new.append(f / factor * ramp + f * (1 - ramp))
    return torch.tensor(new, dtype=torch.float64), scaling.get("attention_factor") or 0.1 * math.log(factor) + 1.0


def turn(x: Tensor, positions: Tensor, frequency: Tensor, scale: float) -> Tensor:
    """x [seq, dim]: the complex numbers x[j] + i x[j + dim/2], turned by position * frequency[j]."""
    half = x.shape[-1] // 2
    angle = positions[:, None].double() * frequency
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.full_like(angle, scale), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    kv_heads: int,
    positions: Tensor,
    sees: Tensor,
    rope: tuple[Tensor, float],
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """q [seq, heads * dim], k and v [seq, kv_heads * dim]; query head h reads key head h // (heads / kv_heads)."""
    dim = q.shape[-1] // heads
    out = []
    for head in range(heads):
        shared = head // (heads // kv_heads)
        qh = q[:, head * dim : (head + 1) * dim]
        kh, vh = (t[:, shared * dim : (shared + 1) * dim] for t in (k, v))
        if norms is not None:
            qh, kh = rms(qh, norms[0], norms[2]), rms(kh, norms[1], norms[2])
        qh, kh = turn(qh, positions, *rope), turn(kh, positions, *rope)
        scores = (qh @ kh.T / math.sqrt(dim)).masked_fill(~sees, -math.inf)
        weights = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
        out.append(weights / weights.sum(-1, keepdim=True) @ vh)
    return torch.cat(out, dim=-1)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def llada_row(public: dict[str, Any], w: Weights, ids: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
    """Logits [seq, rows] of one row without padding, LLaDA's names."""
    heads, eps = public["n_heads"], public["rms_norm_eps"]
    rope = frequencies(public["rope_theta"], public["d_model"] // heads)
    x = w["model.transformer.wte.weight"][ids]
    for n in range(public["n_layers"]):
        at = f"model.transformer.blocks.{n}."
        h = rms(x, w[at + "attn_norm.weight"], eps)
        q, k, v = (
            h @ w[f"{at}{name}_proj.weight"].T + w.get(f"{at}{name}_proj.bias", torch.zeros((), dtype=torch.float64))
            for name in "qkv"
        )
        h = attention(q, k, v, heads, public["n_kv_heads"], positions, sees, rope)
        x = x + h @ w[at + "attn_out.weight"].T
        h = rms(x, w[at + "ff_norm.weight"], eps)
        h = silu(h @ w[at + "ff_proj.weight"].T) * (h @ w[at + "up_proj.weight"].T)
        x = x + h @ w[at + "ff_out.weight"].T
    x = rms(x, w["model.transformer.ln_f.weight"], eps)
    head = "model.transformer.wte.weight" if public["weight_tying"] else "model.transformer.ff_out.weight"
    return x @ w[head].T


def decoder_row(public: dict[str, Any], w: Weights, ids: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
    """Logits [seq, rows] of one row without padding: Llama, Qwen2 (biases on q, k, v), Qwen3 (norms on q, k)."""
    heads, eps = public["num_attention_heads"], public["rms_norm_eps"]
    dim = public.get("head_dim") or public["hidden_size"] // heads
    scaling = public.get("rope_parameters") or public.get("rope_scaling")
    theta = public["rope_theta"] if "rope_theta" in public else public["rope_parameters"]["rope_theta"]
    rope = frequencies(theta, dim, scaling, public["max_position_embeddings"])
    qwen2 = public["model_type"] in ("Dream", "Fast_dLLM_Qwen", "a2d-qwen2", "qwen2")
    qwen3 = public["model_type"] in ("sdar", "a2d-qwen3", "qwen3")
    x = w["model.embed_tokens.weight"][ids]
    for n in range(public["num_hidden_layers"]):
        at = f"model.layers.{n}."
        h = rms(x, w[at + "input_layernorm.weight"], eps)
        q, k, v = (h @ w[f"{at}self_attn.{name}_proj.weight"].T for name in "qkv")
        if qwen2:
            q, k, v = (t + w[f"{at}self_attn.{name}_proj.bias"] for t, name in zip((q, k, v), "qkv"))
        norms = None
        if qwen3:
            norms = (w[at + "self_attn.q_norm.weight"], w[at + "self_attn.k_norm.weight"], eps)
        h = attention(q, k, v, heads, public["num_key_value_heads"], positions, sees, rope, norms)
        x = x + h @ w[at + "self_attn.o_proj.weight"].T
        h = rms(x, w[at + "post_attention_layernorm.weight"], eps)
        h = silu(h @ w[at + "mlp.gate_proj.weight"].T) * (h @ w[at + "mlp.up_proj.weight"].T)
        x = x + h @ w[at + "mlp.down_proj.weight"].T
    x = rms(x, w["model.norm.weight"], eps)
    return x @ w["model.embed_tokens.weight" if public["tie_word_embeddings"] else "lm_head.weight"].T


def logits(
    public: dict[str, Any],
    weights: Weights,
    ids: Tensor,
    real: Tensor,
    shift: bool | None = None,
    block_size: int | None = None,
) -> Tensor:
    """[batch, seq, rows], aligned (the logits at i predict token i); NaN on padding.

    `shift` and `block_size` are the format's own unless `shift` is given. Rows are computed alone, without padding.
    """
    if shift is None:
        shift, block_size = conventions(public)
    w = {name: tensor.double() for name, tensor in weights.items()}
    row = llada_row if public["model_type"] == "llada" else decoder_row
    out = []
    for tokens, kept in zip(ids, real):
        count = int(kept.sum())
        positions = torch.arange(count)
        blocks = positions // (count if block_size is None else block_size)
        raw = row(public, w, tokens[kept], positions, blocks[:, None] >= blocks[None, :])
        if shift:
            raw = torch.cat((raw[:1], raw[:-1]))
        full = torch.full((len(tokens), raw.shape[1]), math.nan, dtype=torch.float64)
        full[kept] = raw
        out.append(full)
    return torch.stack(out)
