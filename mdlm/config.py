"""Configuration of the masked-diffusion transformer: sizes, attention, special ids. Checked when it is made.

`MDLMConfig` is a `transformers` configuration, so it is saved as `config.json` beside the weights and found again by
`AutoConfig`. Read next: `modeling.py`, which builds the network it describes.
"""

from __future__ import annotations

import difflib
import inspect
import math
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.configuration_utils import PreTrainedConfig

NORM_PLACEMENTS = ("pre", "post", "peri", "span", "hybrid", "deepnorm")
"""Allowed values of `norm_placement`: where norms and residual sums sit (`layers.MDLMLayer` has the equations)."""

LINEARS = ("dense", "sdd")
"""Allowed values of `linear`: a plain matrix, or one whose output is normalised and scaled (2502.15499)."""

POSITION_EMBEDDINGS, NORMS, MLPS = ("rotary", "learned"), ("rmsnorm", "layernorm"), ("swiglu", "gelu")
"""Allowed values of `position_embedding`, `norm` and `mlp`; the second of each is GPT-2's."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Allowed `rope_parameters["rope_type"]`: the ones whose frequencies do not depend on the length of the input."""

_WRITTEN_BY_TRANSFORMERS = frozenset(
    {
        "_name_or_path", "name_or_path", "model_type", "auto_map", "torch_dtype", "quantization_config", "_commit_hash",
        "attn_implementation", "_attn_implementation_internal", "experts_implementation", "output_attentions",
        "_experts_implementation_internal", "num_labels", "architectures", "transformers_version", "dtype",
    }
)  # fmt: skip


class MDLMConfig(PreTrainedConfig):
    """Shape and conventions of an `MDLMForMaskedLM`.

    Args:
        vocab_size: rows of the embedding and of the head, normally a multiple of 64.
        num_tokens: ids that exist in the tokenizer; rows `num_tokens .. vocab_size - 1` pad the matrix and are never
            emitted. None: `vocab_size`.
        hidden_size: width of the residual stream.
        num_hidden_layers: transformer blocks.
        num_attention_heads: query heads.
        num_key_value_heads: key/value heads, a divisor of the query heads (grouped-query attention, 2305.13245).
            None: as many as query heads.
        head_dim: width of a head, even. None: `hidden_size / num_attention_heads`.
        intermediate_size: inner width of the MLP. None: 8/3 of the width, rounded up to a multiple of 64, for `swiglu`;
            4 times the width for `gelu`.
        max_position_embeddings: longest document (tokens) the model takes.
        rope_theta: base of the rotary frequencies (2104.09864); shorthand for `rope_parameters["rope_theta"]`.
        rope_parameters: `transformers`' rotary settings, which win over `rope_theta`; `rope_type` one of `ROPE_TYPES`.
        rms_norm_eps: added to the mean square (LayerNorm: to the variance) inside every norm.
        qkv_bias: biases on the query, key and value projections (Qwen2, Dream).
        qk_norm: RMSNorm over each head of queries and keys before the rotation (Qwen3).
        tie_word_embeddings: the head shares the matrix of the embedding. Right for small models; large ones untie.
        norm_placement: one of `NORM_PLACEMENTS`. Public formats know `pre` only.
        position_embedding: `rotary`, or `learned`: one vector per position is added to the tokens' (GPT-2).
        norm: `rmsnorm`, or `layernorm` with biases, for the norms on the stream.
        mlp: `swiglu` (2002.05202), or `gelu`: one matrix in, one out.
        bias: biases on the attention's output and the MLP's projections.
        linear: one of `LINEARS`, for every projection of the blocks. Public formats know `dense` only.
        block_size: None: every token sees its whole document. Otherwise block-causal: a token sees the blocks of
            `block_size` positions up to and including its own (2503.09573).
        shift_logits: the head at position i predicts token i + 1, as in a converted causal model (Dream). The model
            realigns its output, so users of its logits never shift.
        initializer_range: standard deviation of the initial weights; residual output projections get less of it, by
            `layers.branch_gain` (with pre: 1 / sqrt(2 layers)).
        mask_token_id: id of the absorbing state. None only for a configuration that will get one before it is used.
        pad_token_id: id that fills rows beyond their end; may equal `eos_token_id`.
        eos_token_id: id that ends a document.
        bos_token_id: id that starts a document.
        kwargs: what `transformers` itself stores in a configuration; anything else is refused.

    Raises:
        ValueError: a value out of range, values that contradict each other, or an unknown option.
    """

    model_type = "mdlm"

    def __init__(
        self,
        vocab_size: int = 32000,
        num_tokens: int | None = None,
        hidden_size: int = 512,
        num_hidden_layers: int = 8,
        num_attention_heads: int = 8,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        max_position_embeddings: int = 4096,
        rope_theta: float = 10000.0,
        rope_parameters: dict[str, Any] | None = None,
        rms_norm_eps: float = 1e-6,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        tie_word_embeddings: bool = True,
        norm_placement: str = "pre",
        linear: str = "dense",
        position_embedding: str = "rotary",
        norm: str = "rmsnorm",
        mlp: str = "swiglu",
        bias: bool = False,
        block_size: int | None = None,
        shift_logits: bool = False,
        initializer_range: float = 0.02,
        mask_token_id: int | None = None,
        pad_token_id: int | None = None,
        eos_token_id: int | None = None,
        bos_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        _refuse_unknown_options(kwargs)
        self.vocab_size = _positive_int("vocab_size", vocab_size)
        self.num_tokens = self.vocab_size if num_tokens is None else _positive_int("num_tokens", num_tokens)
        self.hidden_size = _positive_int("hidden_size", hidden_size)
        self.num_hidden_layers = _positive_int("num_hidden_layers", num_hidden_layers)
        self.num_attention_heads = _positive_int("num_attention_heads", num_attention_heads)
        if num_key_value_heads is None:
            num_key_value_heads = num_attention_heads
        self.num_key_value_heads = _positive_int("num_key_value_heads", num_key_value_heads)
        if head_dim is None:
            if hidden_size % num_attention_heads:
                raise ValueError(
                    f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_attention_heads}; "
                    "change one of them or give head_dim"
                )
            head_dim = hidden_size // num_attention_heads
        self.head_dim = _positive_int("head_dim", head_dim)
        if intermediate_size is None:
            intermediate_size = 4 * hidden_size if mlp == "gelu" else 64 * math.ceil(8 * hidden_size / 3 / 64)
        self.intermediate_size = _positive_int("intermediate_size", intermediate_size)
        self.max_position_embeddings = _positive_int("max_position_embeddings", max_position_embeddings)
        self.rope_parameters = {"rope_type": "default", "rope_theta": rope_theta, **(rope_parameters or {})}
        self.rms_norm_eps = rms_norm_eps
        self.qkv_bias = qkv_bias
        self.qk_norm = qk_norm
        self.norm_placement = norm_placement
        self.linear = linear
        self.position_embedding = position_embedding
        self.norm = norm
        self.mlp = mlp
        self.bias = bias
        self.block_size = None if block_size is None else _positive_int("block_size", block_size)
        self.shift_logits = shift_logits
        self.initializer_range = initializer_range
        self.mask_token_id = mask_token_id
        self.tie_word_embeddings = tie_word_embeddings
        self.pad_token_id = pad_token_id
        self.eos_token_id = eos_token_id
        self.bos_token_id = bos_token_id
        self._check()
        base_options: dict[str, Any] = {
            "tie_word_embeddings": tie_word_embeddings,
            "pad_token_id": pad_token_id,
            "eos_token_id": eos_token_id,
            "bos_token_id": bos_token_id,
        }
        try:
            super().__init__(**base_options, **kwargs)
        except StrictDataclassError as error:  # `transformers` checks rope_parameters and its own options
            raise ValueError(str(error)) from error

    def __eq__(self, other: object) -> bool:
        """Do both describe the same network? Where it was loaded from and what runs it does not count."""
        return isinstance(other, MDLMConfig) and all(getattr(self, n) == getattr(other, n) for n in _own_options())

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies."""
        return self.rope_parameters["rope_theta"]

    def _check(self) -> None:
        if self.num_tokens > self.vocab_size:
            raise ValueError(
                f"num_tokens={self.num_tokens} ids do not fit into vocab_size={self.vocab_size} rows; "
                "vocab_size is num_tokens rounded up, normally to a multiple of 64"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; the rotary embedding turns pairs of coordinates")
        for name in ("qkv_bias", "qk_norm", "bias", "shift_logits", "tie_word_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        for name in ("rms_norm_eps", "initializer_range", "rope_theta"):
            _positive_float(name, getattr(self, name))
        choices = {
            "norm_placement": (self.norm_placement, NORM_PLACEMENTS),
            "linear": (self.linear, LINEARS),
            "position_embedding": (self.position_embedding, POSITION_EMBEDDINGS),
            "norm": (self.norm, NORMS),
            "mlp": (self.mlp, MLPS),
            "rope_type": (self.rope_parameters["rope_type"], ROPE_TYPES),
        }
        for name, (value, allowed) in choices.items():
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is unknown; allowed: {', '.join(allowed)}")
        if self.linear == "sdd" and (self.qkv_bias or self.bias):
            raise ValueError(
                "linear='sdd' normalises what its matrices give and has no biases; set qkv_bias=False and bias=False"
            )
        self._check_special_ids()

    def _check_special_ids(self) -> None:
        ids = {name: getattr(self, f"{name}_token_id") for name in ("mask", "pad", "eos", "bos")}
        for name, value in ids.items():
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < self.num_tokens:
                raise ValueError(
                    f"{name}_token_id={value!r} is not an id of the vocabulary: 0 .. {self.num_tokens - 1} "
                    f"(num_tokens={self.num_tokens})"
                )
        for name in ("pad", "eos", "bos"):
            if ids["mask"] is not None and ids["mask"] == ids[name]:
                raise ValueError(
                    f"mask_token_id and {name}_token_id are both {ids['mask']}; the mask needs an id of its own, "
                    "because it can never be part of a text"
                )


def _positive_int(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a positive integer")
    return value


def _positive_float(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a positive finite number")


def _own_options() -> list[str]:
    return [name for name in inspect.signature(MDLMConfig.__init__).parameters if name not in ("self", "kwargs")]


def _refuse_unknown_options(options: dict[str, Any]) -> None:
    """`transformers` keeps every keyword as an attribute, so a misspelt option would change nothing, silently."""
    known = set(_WRITTEN_BY_TRANSFORMERS) | set(inspect.signature(PreTrainedConfig.__init__).parameters)
    known |= set(PreTrainedConfig.__annotations__)
    unknown = sorted(set(options) - known)
    if unknown:
        own = _own_options()
        near = difflib.get_close_matches(unknown[0], own, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"MDLMConfig has no option {unknown[0]!r}{hint} Options: {', '.join(own)}")
