"""The diffusion transformer of MDLM's and BD3-LM's own checkpoints (mdlm-owt, bd3lm-owt), as a `Denoiser`.

Its blocks are those of DiT (2212.09748): LayerNorm without bias, shifted, scaled and gated by a conditioning vector
(adaLN), GELU, fused query-key-value matrix, half-split rotary positions. The vector comes from the noise level, which
these checkpoints do not use (`time_conditioning` false: the level is 0), so it is constant; it is computed all the
same, from the stored weights. MDLM: 2406.07524; BD3-LM, which is block-causal: 2503.09573. Read next: `denoiser.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import MaskedLMOutput

from mdlm.denoiser import LogitsModelDenoiser
from mdlm.formats import COMMON_INERT
from mdlm.public_tokenizer import read_json
from mdlm.public_weights import scan_weights

FREQUENCY_WIDTH = 256
"""Width of the sinusoidal embedding of the noise level."""

_SIZES = ("vocab_size", "hidden_dim", "cond_dim", "n_blocks", "n_heads", "model_length")
_ONLY: dict[str, tuple[Any, ...]] = {"time_conditioning": (False,), "causal": (False,), "adaln": (True,)}
_INERT = {"dropout", "attn_backend", "cross_attn", "var_min", "sampling_eps_min", "sampling_eps_max"}
BUFFERS = frozenset({"backbone.rotary_emb.inv_freq", "sampling_eps_min", "sampling_eps_max"})
"""Stored tensors that are no parameters; they are not read."""


@dataclass(frozen=True)
class DiTShape:
    """What a checkpoint's `config.json` says."""

    vocab_size: int
    hidden_dim: int
    cond_dim: int
    n_blocks: int
    n_heads: int
    model_length: int
    block_size: int | None = None
    """Length of BD3-LM's blocks; None: every token sees all."""


class _Norm(nn.Module):
    """LayerNorm with a weight and no bias, in float32 or better."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        return (F.layer_norm(x.to(wide), x.shape[-1:]) * self.weight.to(wide)).to(x.dtype)


class _Embedding(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(rows, width))


class _NoiseLevel(nn.Module):
    """Sinusoids of the noise level through a two-layer perceptron."""

    def __init__(self, cond_dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCY_WIDTH, cond_dim), nn.SiLU(), nn.Linear(cond_dim, cond_dim))

    def forward(self, level: Float[Tensor, " batch"]) -> Float[Tensor, "batch cond"]:
        half = FREQUENCY_WIDTH // 2
        frequency = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=level.device) / half)
        angle = level[:, None].float() * frequency
        return self.mlp(torch.cat((angle.cos(), angle.sin()), dim=-1).to(level.dtype))


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


class _Block(nn.Module):
    def __init__(self, shape: DiTShape) -> None:
        super().__init__()
        width = shape.hidden_dim
        self.heads = shape.n_heads
        self.norm1, self.norm2 = _Norm(width), _Norm(width)
        self.attn_qkv = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.adaLN_modulation = nn.Linear(shape.cond_dim, 6 * width)

    def forward(
        self,
        x: Float[Tensor, "batch seq width"],
        condition: Float[Tensor, "batch cond"],
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None,
    ) -> Float[Tensor, "batch seq width"]:
        shift, scale, gate, shift2, scale2, gate2 = self.adaLN_modulation(condition)[:, None].chunk(6, dim=-1)
        batch, seq, width = x.shape
        qkv = self.attn_qkv(_modulate(self.norm1(x), shift, scale)).view(batch, seq, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(_rotate(query, *rotation), _rotate(key, *rotation), value, mask)
        x = x + gate * self.attn_out(out.transpose(1, 2).reshape(batch, seq, width))
        return x + gate2 * self.mlp(_modulate(self.norm2(x), shift2, scale2))


def _rotate(x: Float[Tensor, "batch heads seq dim"], cos: Tensor, sin: Tensor) -> Float[Tensor, "batch heads seq dim"]:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class _Output(nn.Module):
    def __init__(self, shape: DiTShape) -> None:
        super().__init__()
        self.norm_final = _Norm(shape.hidden_dim)
        self.linear = nn.Linear(shape.hidden_dim, shape.vocab_size)
        self.adaLN_modulation = nn.Linear(shape.cond_dim, 2 * shape.hidden_dim)


class _Backbone(nn.Module):
    def __init__(self, shape: DiTShape) -> None:
        super().__init__()
        self.vocab_embed = _Embedding(shape.vocab_size, shape.hidden_dim)
        self.sigma_map = _NoiseLevel(shape.cond_dim)
        self.blocks = nn.ModuleList([_Block(shape) for _ in range(shape.n_blocks)])
        self.output_layer = _Output(shape)


class DiT(nn.Module):
    """Token ids to raw logits; parameters are named as in the public checkpoints. One document per row, no padding."""

    def __init__(self, shape: DiTShape) -> None:
        super().__init__()
        self.shape = shape
        self.backbone = _Backbone(shape)

    def forward(self, input_ids: Int[Tensor, "batch seq"]) -> MaskedLMOutput:
        """Logits `[batch, seq, vocab]`; those at i predict token i. Raises ValueError beyond `model_length` tokens."""
        shape, backbone = self.shape, self.backbone
        seq, device = input_ids.shape[1], input_ids.device
        if seq > shape.model_length:
            raise ValueError(f"the sequence is {seq} tokens long, this model takes model_length={shape.model_length}")
        x = backbone.vocab_embed.embedding[input_ids]
        condition = F.silu(backbone.sigma_map(x.new_zeros(len(x))))
        wide = torch.promote_types(x.dtype, torch.float32)
        dim = shape.hidden_dim // shape.n_heads
        frequency = 10000.0 ** (-torch.arange(0, dim, 2, dtype=wide, device=device) / dim)
        positions = torch.arange(seq, device=device)
        angle = positions[:, None].to(wide) * frequency
        mask = None
        if shape.block_size is not None:
            blocks = positions // shape.block_size
            mask = blocks[:, None] >= blocks[None, :]
        for block in backbone.blocks:
            x = block(x, condition, (angle.cos(), angle.sin()), mask)
        last = backbone.output_layer
        shift, scale = last.adaLN_modulation(condition)[:, None].chunk(2, dim=-1)
        return MaskedLMOutput(logits=last.linear(_modulate(last.norm_final(x), shift, scale)))


def read_shape(public: dict[str, Any], place: str) -> DiTShape:
    """The shape a `config.json` describes. Raises ValueError listing missing keys, unknown ones and other variants."""
    blocks = public.get("model_type") == "bd3lm"
    wanted = (*_SIZES, "block_size") if blocks else _SIZES
    problems = [f"{name} is missing" for name in wanted if not isinstance(public.get(name), int)]
    known = {*wanted, *_ONLY, *_INERT, *COMMON_INERT}
    problems += [f"{name}={public[name]!r} is not a key known here" for name in sorted(set(public) - known)]
    for name, allowed in _ONLY.items():
        if public.get(name, allowed[0]) not in allowed:
            problems.append(f"{name}={public[name]!r}: only {name}={allowed[0]!r} can be hosted")
    if problems:
        raise ValueError(f"{place}:\n  " + "\n  ".join(problems))
    return DiTShape(**{name: public[name] for name in wanted})


def load_dit(
    path: str | Path,
    mask_token_id: int,
    num_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> LogitsModelDenoiser:
    """A checkpoint of MDLM or BD3-LM, in safetensors, as a `Denoiser`; its folder holds no tokenizer.

    Args:
        path: folder with `config.json` and the weights under `backbone.` names; for a Lightning `.ckpt` see
            `lightning.load_lightning`.
        mask_token_id: the absorbing state, which config.json does not name; with GPT-2's tokenizer 50257.
        num_tokens: ids 0 .. num_tokens - 1 exist; None: `vocab_size`.
        dtype: precision of the weights; None: as stored.
        device: where to.

    Raises:
        ValueError: what `read_shape` refuses; tensors missing, unknown, or of a wrong shape, all of them listed.
    """
    folder = Path(path)
    public = read_json(folder / "config.json")
    stored = scan_weights(folder)
    return build_dit(
        read_shape(public, str(folder / "config.json")),
        {name: found.shape for name, found in stored.items()},
        lambda name: stored[name].read(),
        str(folder),
        mask_token_id,
        num_tokens,
        dtype,
        device,
    )


def build_dit(
    shape: DiTShape,
    stored: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    place: str,
    mask_token_id: int,
    num_tokens: int | None,
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> LogitsModelDenoiser:
    """A DiT of `shape` with the tensors that `read` gives by name. `stored`: name -> shape of what there is; `place`:
    where, for messages; the rest as in `load_dit`. Raises ValueError as that does."""
    with torch.device("meta"):
        model = DiT(shape)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    problems = [f"{name} {list(size)} is missing" for name, size in expected.items() if name not in stored]
    problems += [f"{name} is not a tensor of this format" for name in sorted(set(stored) - set(expected) - BUFFERS)]
    problems += [
        f"{name} has shape {list(stored[name])}; the configuration says {list(size)}"
        for name, size in expected.items()
        if name in stored and stored[name] != size
    ]
    if problems:
        raise ValueError(f"the weights of {place} do not fit its configuration:\n  " + "\n  ".join(problems))
    for name in expected:
        tensor = read(name)
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{place}: {name} holds NaN or infinity; these weights are broken")
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor.to(device=device, dtype=dtype or tensor.dtype)))
    tokens = shape.vocab_size if num_tokens is None else num_tokens
    if not 0 < tokens <= shape.vocab_size:
        raise ValueError(f"num_tokens is {tokens}; the checkpoint has {shape.vocab_size} rows")
    return LogitsModelDenoiser(model.eval(), mask_token_id, tokens, mask_style="none")
