"""The blocks of the transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU, the layer.

RMSNorm: 1910.07467. Rotary positions in the half-split layout: 2104.09864. Grouped-query attention: 2305.13245. SwiGLU:
2002.05202. Parameter names are those of Qwen2/Qwen3, so converting such a model renames nothing. Norms, rotations and
the softmax are computed in float32 whatever the weights are. There is no dropout: masking is the noise. LayerNorm,
learned positions, an MLP with GELU and biases everywhere are there as options, for models that come from GPT-2.

Two options keep deep models stable. Where norms and residual sums sit (`norm_placement`) is decided in `MDLMLayer`, how
large the initial weights then are in `branch_gain`. `linear="sdd"` (scale-distribution decoupling, 2502.15499) makes
every projection y = alpha * V x / RMS(V x): a linear layer and an RMSNorm of its output, so that optimizers and
adapters meet V as the matrix it is. Read next: `modeling.py`, which stacks the layers.
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


class MDLMLayerNorm(nn.LayerNorm):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis, in float32 or better; dtype of x."""

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = self.weight.to(wide), self.bias.to(wide)
        return F.layer_norm(x.to(wide), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


def stream_norm(config: MDLMConfig) -> nn.Module:
    """The norm of `config.norm` over the residual stream."""
    kind = MDLMLayerNorm if config.norm == "layernorm" else MDLMRMSNorm
    return kind(config.hidden_size, config.rms_norm_eps)


class BranchLinear(nn.Linear):
    """A projection inside a residual branch whose initial weights DeepNorm scales: values, and the MLP's input."""


class ResidualOutput(BranchLinear):
    """A projection that writes into the residual stream. Its initial weights are smaller, so that the sum of all
    branches has the same scale at any depth (GPT-2)."""


def branch_gain(config: MDLMConfig, writes_to_stream: bool) -> float:
    """Factor on `initializer_range` for a `BranchLinear`; `writes_to_stream`: it is a `ResidualOutput`.

    pre, peri, hybrid: 1 / sqrt(2 layers) on outputs (GPT-2: the stream sums two branches a layer). span: 1 /
    sqrt(layers) on outputs: each skip meets one branch a layer, of variance about 1 / layers. post: 1, the original.
    deepnorm: (8 layers)^(-1/4) on values, MLP input and outputs (2203.00555, fig. 2, encoder); its
    weights are Xavier's in the paper, here `initializer_range` is their scale.
    """
    layers = config.num_hidden_layers
    if config.norm_placement == "deepnorm":
        return (8 * layers) ** -0.25
    if not writes_to_stream or config.norm_placement == "post":
        return 1.0
    return layers**-0.5 if config.norm_placement == "span" else (2 * layers) ** -0.5


class DecoupledScale(MDLMRMSNorm):
    """The scale alpha of SDD behind a linear layer, with the norm of its output (2502.15499). alpha starts at 1, behind
    a `ResidualOutput` at 1 / sqrt(layers)."""

    def __init__(self, width: int, eps: float, initial: float) -> None:
        super().__init__(width, eps)
        self.initial = initial


def scale_behind(linear: nn.Linear, config: MDLMConfig) -> nn.Module:
    """What follows `linear`: its `DecoupledScale` under `linear="sdd"`, else nothing."""
    if config.linear == "dense":
        return nn.Identity()
    initial = config.num_hidden_layers**-0.5 if isinstance(linear, ResidualOutput) else 1.0
    return DecoupledScale(linear.out_features, config.rms_norm_eps, initial)


def rotary_angles(
    config: MDLMConfig, positions: Int[Tensor, "rows seq"]
) -> tuple[Float[Tensor, "rows 1 seq dim"], Float[Tensor, "rows 1 seq dim"]]:
    """Cosine and sine of position * frequency, float32. Not a buffer: `model.half()` would round the frequencies.

    With learned positions every frequency is 0: nothing turns.
    """
    rope_type = config.rope_parameters["rope_type"]
    if config.position_embedding == "learned":
        frequency, scale = torch.zeros(config.head_dim // 2, device=positions.device), 1.0
    elif rope_type == "default":
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


class Rotation(nn.Module):
    """Rotary positions of queries and keys; a module so that what it answers can be noted (`attention_rows.py`)."""

    def forward(
        self,
        query: Float[Tensor, "batch heads seq dim"],
        key: Float[Tensor, "batch kv_heads seq dim"],
        angles: tuple[Tensor, Tensor],
    ) -> tuple[Float[Tensor, "batch heads seq dim"], Float[Tensor, "batch kv_heads seq dim"]]:
        return rotate(query, *angles), rotate(key, *angles)


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
        self.v_proj = BranchLinear(config.hidden_size, key_width, bias=config.qkv_bias)
        self.o_proj = ResidualOutput(query_width, config.hidden_size, bias=config.bias)
        self.q_scale, self.k_scale = scale_behind(self.q_proj, config), scale_behind(self.k_proj, config)
        self.v_scale, self.o_scale = scale_behind(self.v_proj, config), scale_behind(self.o_proj, config)
        self.rotate = Rotation()
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        self.v_norm: nn.Module = nn.Identity()
        hybrid = config.norm_placement == "hybrid"
        if config.qk_norm or hybrid:
            self.q_norm = MDLMRMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = MDLMRMSNorm(config.head_dim, config.rms_norm_eps)
        if hybrid:
            self.v_norm = MDLMRMSNorm(config.head_dim, config.rms_norm_eps)

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
        query = self.q_norm(self.q_scale(self.q_proj(hidden)).view(by_head)).transpose(1, 2)
        key = self.k_norm(self.k_scale(self.k_proj(hidden)).view(by_head)).transpose(1, 2)
        value = self.v_norm(self.v_scale(self.v_proj(hidden)).view(by_head)).transpose(1, 2)
        query, key = self.rotate(query, key, rotation)
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
        return self.o_scale(self.o_proj(out.reshape(batch, seq, -1))), weights


class MDLMMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)); with `mlp="gelu"` down(gelu(up(x))), gelu in its tanh form (1606.08415)."""

    def __init__(self, config: MDLMConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gated = config.mlp == "swiglu"
        if self.gated:
            self.gate_proj = nn.Linear(width, inner, bias=config.bias)
        self.up_proj = BranchLinear(width, inner, bias=config.bias)
        self.down_proj = ResidualOutput(inner, width, bias=config.bias)
        if self.gated:
            self.gate_scale = scale_behind(self.gate_proj, config)
        self.up_scale, self.down_scale = scale_behind(self.up_proj, config), scale_behind(self.down_proj, config)

    def forward(self, x: Float[Tensor, "batch seq width"]) -> Float[Tensor, "batch seq width"]:
        up = self.up_scale(self.up_proj(x))
        inner = F.silu(self.gate_scale(self.gate_proj(x))) * up if self.gated else F.gelu(up, approximate="tanh")
        return self.down_scale(self.down_proj(inner))


NORMS = {
    "pre": ("input_layernorm", "post_attention_layernorm"),
    "post": ("post_attention_layernorm", "output_layernorm"),
    "peri": ("input_layernorm", "attention_layernorm", "post_attention_layernorm", "mlp_layernorm"),
    "span": ("post_attention_layernorm", "output_layernorm"),
    "hybrid": ("post_attention_layernorm",),
    "deepnorm": ("post_attention_layernorm", "output_layernorm"),
}
"""`norm_placement` -> the norms of a layer on the stream; the first layer of `span` has an `input_layernorm` too."""


def normalised_stream(placement: str) -> bool:
    """Whether the layers of a placement hand on a normalised stream, which needs no norm at the end."""
    return "output_layernorm" in NORMS[placement]


class MDLMLayer(GradientCheckpointingLayer):
    """One transformer block. With N a norm each, h the input, A attention, M the MLP, `norm_placement` is

    - pre: a = h + A(N h); a + M(N a)
    - post: a = N(h + A h); N(a + M a)                                            (1706.03762)
    - peri: a = h + N(A(N h)); a + N(M(N a)), also called sandwich                (2502.02732)
    - span: a = N(h + A h); N(h + M a), the MLP's skip starts at the block's input; only in the first layer, whose input
      is the embedding, A(N h)                                                    (2601.22580)
    - hybrid: a = N(h + A h); a + M a, with queries, keys and values normalised per head inside A  (2503.04598)
    - deepnorm: a = N(c h + A h); N(c a + M a), c = (2 layers)^(1/4)              (2203.00555)
    """

    def __init__(self, config: MDLMConfig, layer: int) -> None:
        super().__init__()
        self.placement = config.norm_placement
        self.skip_weight = (2 * config.num_hidden_layers) ** 0.25 if self.placement == "deepnorm" else 1.0
        norms = set(NORMS[self.placement])
        if self.placement == "span" and layer == 0:
            norms.add("input_layernorm")

        def norm(name: str) -> nn.Module:
            return stream_norm(config) if name in norms else nn.Identity()

        self.input_layernorm = norm("input_layernorm")
        self.self_attn = MDLMAttention(config, layer)
        self.attention_layernorm = norm("attention_layernorm")
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.mlp = MDLMMLP(config)
        self.mlp_layernorm = norm("mlp_layernorm")
        self.output_layernorm = norm("output_layernorm")

    def forward(
        self,
        hidden: Float[Tensor, "batch seq width"],
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | BlockMask | None,
        flash: FlashPlan | None,
        feeding: Feeding | None = None,
    ) -> tuple[Float[Tensor, "batch seq width"], Float[Tensor, "batch heads seq keys"] | None]:
        attended, weights = self.self_attn(self.input_layernorm(hidden), rotation, mask, flash, feeding)
        if self.placement in ("pre", "peri"):
            hidden = hidden + self.attention_layernorm(attended)
            return hidden + self.mlp_layernorm(self.mlp(self.post_attention_layernorm(hidden))), weights
        between = self.post_attention_layernorm(self.skip_weight * hidden + attended)
        skip = hidden if self.placement == "span" else between
        return self.output_layernorm(self.skip_weight * skip + self.mlp(between)), weights
