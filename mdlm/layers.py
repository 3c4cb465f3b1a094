"""The blocks of the transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU, the layer.

RMSNorm: 1910.07467. Rotary positions in the half-split layout: 2104.09864. Grouped-query attention: 2305.13245. SwiGLU:
2002.05202. Parameter names are those of Qwen2/Qwen3, so converting such a model renames nothing. Norms, rotations and
the softmax are computed in float32 whatever the weights are. There is no dropout: masking is the noise. Read next:
`modeling.py`, which stacks them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mdlm.attention import FlashPlan, eager_attention
from mdlm.config import MDLMConfig
from mdlm.keyvalues import Feeding

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class MDLMRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 or better; returns the dtype of x."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class ResidualOutput(nn.Linear):
    """A projection that writes into the residual stream. Its initial weights are smaller, so that the sum of all
    branches has the same scale at any depth (GPT-2)."""


def rotary_angles(
    config: MDLMConfig, positions: Int[Tensor, "rows seq"]
) -> tuple[Float[Tensor, "rows 1 seq dim"], Float[Tensor, "rows 1 seq dim"]]:
    """Cosine and sine of position * frequency, float32. Not a buffer: `model.half()` would round the frequencies."""
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        pair = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device)
        frequency, scale = config.rope_theta ** (-pair / config.head_dim), 1.0
    else:
        frequency, scale = ROPE_INIT_FUNCTIONS[rope_type](config, positions.device)
    angle = positions[:, None, :, None].float() * frequency.float()
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos() * scale, angle.sin() * scale


def rotate(
    x: Float[Tensor, "batch heads seq dim"],
    cos: Float[Tensor, "rows 1 seq dim"],
    sin: Float[Tensor, "rows 1 seq dim"],
) -> Float[Tensor, "batch heads seq dim"]:
    """Turn the pairs (j, j + dim/2) of each head by their angle, in float32 or better; returns the dtype of x."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)  # the float32 angles widen the products


class MDLMAttention(nn.Module):
    """Grouped-query self-attention without causal order; the mask decides who sees whom."""

    is_causal = False  # read by the attention functions of `transformers`

    def __init__(self, config: MDLMConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.config = config  # its `_attn_implementation` may be switched later
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=config.qkv_bias)
        self.o_proj = ResidualOutput(query_width, config.hidden_size, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.q_norm = MDLMRMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = MDLMRMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self,
        hidden: Float[Tensor, "batch seq width"],
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | BlockMask | None,
        flash: FlashPlan | None,
        feeding: Feeding | None = None,
    ) -> tuple[Float[Tensor, "batch seq width"], Float[Tensor, "batch heads seq keys"] | None]:
        batch, seq, _ = hidden.shape
        by_head = (batch, seq, -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden).view(by_head)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden).view(by_head)).transpose(1, 2)
        value = self.v_proj(hidden).view(by_head).transpose(1, 2)
        query, key = rotate(query, *rotation), rotate(key, *rotation)
        if feeding is not None:
            key, value = feeding.exchange(self.layer, key, value)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        lengths: dict[str, Any] = {}
        if flash is not None:
            lengths = {
                "cu_seq_lens_q": flash.cu_seq_lens,
                "cu_seq_lens_k": flash.cu_seq_lens,
                "max_length_q": flash.max_length,
                "max_length_k": flash.max_length,
            }
        out, weights = attend(self, query, key, value, mask, dropout=0.0, scaling=self.head_dim**-0.5, **lengths)
        return self.o_proj(out.reshape(batch, seq, -1)), weights


class MDLMMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: MDLMConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = ResidualOutput(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "batch seq width"]) -> Float[Tensor, "batch seq width"]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MDLMLayer(GradientCheckpointingLayer):
    """One transformer block. Where norms and residual sums sit (`norm_placement`) is decided in `forward` and nowhere
    else; `pre` normalises the input of each branch."""

    def __init__(self, config: MDLMConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = MDLMRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MDLMAttention(config, layer)
        self.post_attention_layernorm = MDLMRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MDLMMLP(config)

    def forward(
        self,
        hidden: Float[Tensor, "batch seq width"],
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | BlockMask | None,
        flash: FlashPlan | None,
        feeding: Feeding | None = None,
    ) -> tuple[Float[Tensor, "batch seq width"], Float[Tensor, "batch heads seq keys"] | None]:
        attended, weights = self.self_attn(self.input_layernorm(hidden), rotation, mask, flash, feeding)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), weights
