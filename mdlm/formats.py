"""The public checkpoint formats: for each, one table of weight names and one of configuration keys.

A format is data. `names` maps a tensor's public name to ours; `keys` says what each key of its `config.json` means: a
`Key` is an option of `MDLMConfig` under another name, an `Only` is a feature that our model has in one variant, and
`inert` lists keys that do not change logits. A key that stands nowhere is an error, since it may be such a feature.
What a format's own code assumes for an absent key stands here too (`absent`); nothing is taken from a model's name.

Sources: the configuration and modelling files published with LLaDA-8B (2502.09992), Dream-7B (2508.15487), SDAR
(2510.06303), Fast-dLLM v2 (2509.26328) and dllm's A2D models; `transformers` for Llama, Qwen2, Qwen3 and GPT-2. They
turn the halves of a head against each other (half-split rotary positions), as our model does, so no weight is permuted;
GPT-2 has no rotation, but input x output matrices, and queries, keys and values in one (`Format.conv1d`,
`Format.fused`). Read next: `public_config.py`, which applies the tables of keys, and `convert.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

REQUIRED = object()
"""`Key.absent` of a key that a configuration must have."""


@dataclass(frozen=True)
class Key:
    """This key is the option `option` of `MDLMConfig`."""

    option: str
    absent: Any = REQUIRED
    """The value where the key is missing."""
    null: Any = REQUIRED
    """The value where the key is null."""


@dataclass(frozen=True)
class Only:
    """This key must have one of these values (a list: each of its elements), else our model is another function."""

    allowed: tuple[Any, ...]
    absent: Any
    """What the format's own code assumes where the key is missing."""


@dataclass(frozen=True)
class Format:
    """How a public family of checkpoints is read and written."""

    model_type: str
    architecture: str
    about: str
    names: dict[str, str]
    """Public tensor name -> ours; `{n}` is the layer."""
    keys: dict[str, Key | Only]
    fixed: dict[str, Any]
    """Options of `MDLMConfig` that every checkpoint of this format has."""
    said: dict[str, Any] = field(default_factory=dict)
    """Options that the configuration cannot say, with the format's usual value; the user may say another one."""
    rotary: bool = False
    """Rotary settings stand in `rope_theta` with `rope_scaling`, or in `rope_parameters` (transformers 5)."""
    inert: frozenset[str] = frozenset()
    skipped: tuple[str, ...] = ()
    """Tensors of old files that are computed, not learned; they are left out."""
    conv1d: tuple[str, ...] = ()
    """Matrices stored input x output, the transpose of ours."""
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """A tensor that is several of ours one after the other -> the suffixes that `names` calls them by."""
    prefix: str = ""
    """What stands before every name except the head's, but not in every file."""
    tokenizers: dict[str, str] = field(default_factory=dict)
    """Tokenizer class that comes as code with the checkpoint -> the class of `transformers` with the same algorithm."""
    causal: bool = False
    """A causal model: a start for adaptation, not a denoiser. Its mask token has to be chosen by the user."""
    template: dict[str, Any] = field(default_factory=dict)
    """A whole configuration to start from when a model that never was in this format is written in it."""


COMMON_INERT = frozenset(
    {
        "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "add_cross_attention",
        "architectures", "attention_dropout", "attn_implementation", "auto_map", "begin_suppress_tokens",
        "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id", "dtype",
        "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label",
        "is_decoder", "is_encoder_decoder", "label2id", "max_window_layers", "model_type", "name_or_path",
        "output_attentions", "output_hidden_states", "prefix", "pretraining_tp", "problem_type", "pruned_heads",
        "remove_invalid_values", "return_dict", "sep_token_id", "sliding_window", "suppress_tokens",
        "task_specific_params", "tf_legacy_loss", "tokenizer_class", "torch_dtype", "torchscript",
        "transformers_version", "use_bfloat16", "use_cache",
    }
)  # fmt: skip
"""Keys that `transformers` writes into any configuration and that do not change what these models compute."""

_IDS: dict[str, Key | Only] = {
    "eos_token_id": Key("eos_token_id", absent=None, null=None),
    "pad_token_id": Key("pad_token_id", absent=None, null=None),
    "bos_token_id": Key("bos_token_id", absent=None, null=None),
}
_DECODER: dict[str, Key | Only] = {
    "vocab_size": Key("vocab_size"),
    "hidden_size": Key("hidden_size"),
    "intermediate_size": Key("intermediate_size"),
    "num_hidden_layers": Key("num_hidden_layers"),
    "num_attention_heads": Key("num_attention_heads"),
    "num_key_value_heads": Key("num_key_value_heads", absent=REQUIRED, null=None),
    "max_position_embeddings": Key("max_position_embeddings"),
    "initializer_range": Key("initializer_range", absent=0.02),
    "rms_norm_eps": Key("rms_norm_eps", absent=1e-6),
    "tie_word_embeddings": Key("tie_word_embeddings", absent=False),
    "hidden_act": Only(("silu",), absent="silu"),
    "use_sliding_window": Only((False,), absent=False),
    "layer_types": Only(("full_attention",), absent=None),
    "quantization_config": Only((None,), absent=None),
    **_IDS,
}
_MASK = Key("mask_token_id", absent=None, null=None)

_LLAMA_NAMES = {
    "model.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.{n}.input_layernorm.weight": "model.layers.{n}.input_layernorm.weight",
    "model.layers.{n}.self_attn.q_proj.weight": "model.layers.{n}.self_attn.q_proj.weight",
    "model.layers.{n}.self_attn.k_proj.weight": "model.layers.{n}.self_attn.k_proj.weight",
    "model.layers.{n}.self_attn.v_proj.weight": "model.layers.{n}.self_attn.v_proj.weight",
    "model.layers.{n}.self_attn.o_proj.weight": "model.layers.{n}.self_attn.o_proj.weight",
    "model.layers.{n}.post_attention_layernorm.weight": "model.layers.{n}.post_attention_layernorm.weight",
    "model.layers.{n}.mlp.gate_proj.weight": "model.layers.{n}.mlp.gate_proj.weight",
    "model.layers.{n}.mlp.up_proj.weight": "model.layers.{n}.mlp.up_proj.weight",
    "model.layers.{n}.mlp.down_proj.weight": "model.layers.{n}.mlp.down_proj.weight",
    "model.norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_LLADA_NAMES = {
    "model.transformer.wte.weight": "model.embed_tokens.weight",
    "model.transformer.blocks.{n}.attn_norm.weight": "model.layers.{n}.input_layernorm.weight",
    "model.transformer.blocks.{n}.q_proj.weight": "model.layers.{n}.self_attn.q_proj.weight",
    "model.transformer.blocks.{n}.q_proj.bias": "model.layers.{n}.self_attn.q_proj.bias",
    "model.transformer.blocks.{n}.k_proj.weight": "model.layers.{n}.self_attn.k_proj.weight",
    "model.transformer.blocks.{n}.k_proj.bias": "model.layers.{n}.self_attn.k_proj.bias",
    "model.transformer.blocks.{n}.v_proj.weight": "model.layers.{n}.self_attn.v_proj.weight",
    "model.transformer.blocks.{n}.v_proj.bias": "model.layers.{n}.self_attn.v_proj.bias",
    "model.transformer.blocks.{n}.attn_out.weight": "model.layers.{n}.self_attn.o_proj.weight",
    "model.transformer.blocks.{n}.ff_norm.weight": "model.layers.{n}.post_attention_layernorm.weight",
    "model.transformer.blocks.{n}.ff_proj.weight": "model.layers.{n}.mlp.gate_proj.weight",
    "model.transformer.blocks.{n}.up_proj.weight": "model.layers.{n}.mlp.up_proj.weight",
    "model.transformer.blocks.{n}.ff_out.weight": "model.layers.{n}.mlp.down_proj.weight",
    "model.transformer.ln_f.weight": "model.norm.weight",
    "model.transformer.ff_out.weight": "lm_head.weight",
}
_FREQUENCIES = ("model.layers.{n}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")

_DECODER_TEMPLATE = {
    "vocab_size": 1, "hidden_size": 2, "intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "max_position_embeddings": 1, "initializer_range": 0.02, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "hidden_act": "silu", "attention_dropout": 0.0, "rope_theta": 10000.0,
    "rope_scaling": None, "use_sliding_window": False, "sliding_window": None, "use_cache": False, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "torch_dtype": "float32",
}  # fmt: skip
_LLADA_TEMPLATE = {
    "d_model": 2, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "mlp_hidden_size": 1, "vocab_size": 1,
    "embedding_size": 1, "max_sequence_length": 1, "rope": True, "rope_theta": 10000.0, "rope_full_precision": True,
    "rms_norm_eps": 1e-5, "init_std": 0.02, "activation_type": "silu", "block_type": "llama", "block_group_size": 1,
    "layer_norm_type": "rms", "layer_norm_with_affine": True, "bias_for_layer_norm": False, "include_bias": False,
    "include_qkv_bias": False, "weight_tying": False, "alibi": False, "attention_layer_norm": False,
    "multi_query_attention": None, "input_emb_norm": False, "scale_logits": False, "flash_attention": False,
    "attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0, "init_device": "cpu",
    "init_fn": "mitchell", "precision": "fp32", "use_cache": False, "mask_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "torch_dtype": "float32",
}  # fmt: skip


@dataclass(frozen=True)
class _Family:
    """What the formats that share the layout of Llama, Qwen2 or Qwen3 have in common."""

    extra_names: tuple[str, ...]
    """Tensors besides Llama's; all names are ours."""
    keys: dict[str, Key | Only]
    fixed: dict[str, Any]
    template: dict[str, Any]


_HEAD_DIM = {"head_dim": Key("head_dim", absent=None, null=None)}
_NO_BIAS: dict[str, Key | Only] = {"attention_bias": Only((False,), absent=False)}
_LLAMA = _Family(
    extra_names=(),
    keys={
        **_DECODER, **_HEAD_DIM, **_NO_BIAS, "num_key_value_heads": Key("num_key_value_heads", absent=None, null=None),
        "mlp_bias": Only((False,), absent=False),
    },
    fixed={"qkv_bias": False, "qk_norm": False},
    template={**_DECODER_TEMPLATE, "head_dim": None, "attention_bias": False, "mlp_bias": False},
)  # fmt: skip
_QWEN2 = _Family(
    extra_names=tuple(f"model.layers.{{n}}.self_attn.{x}_proj.bias" for x in "qkv"),
    keys={**_DECODER, "use_mrope": Only((False, None), absent=False)},
    fixed={"qkv_bias": True, "qk_norm": False},
    template=_DECODER_TEMPLATE,
)
_QWEN3 = _Family(
    extra_names=tuple(f"model.layers.{{n}}.self_attn.{x}_norm.weight" for x in "qk"),
    keys={**_DECODER, **_NO_BIAS, "head_dim": Key("head_dim", absent=128, null=None)},
    fixed={"qkv_bias": False, "qk_norm": True},
    template={**_DECODER_TEMPLATE, "head_dim": None, "attention_bias": False},
)


def _decoder(
    family: _Family,
    model_type: str,
    architecture: str,
    about: str,
    *,
    keys: dict[str, Key | Only] | None = None,
    fixed: dict[str, Any] | None = None,
    said: dict[str, Any] | None = None,
    inert: frozenset[str] = frozenset(),
    tokenizers: dict[str, str] | None = None,
    template: dict[str, Any] | None = None,
    causal: bool = False,
) -> Format:
    """A format of `family` with keys, options and a template of its own beside the family's."""
    return Format(
        model_type,
        architecture,
        about,
        names={**_LLAMA_NAMES, **{name: name for name in family.extra_names}},
        keys={**family.keys, **({} if causal else {"mask_token_id": _MASK}), **(keys or {})},
        fixed={**family.fixed, **(fixed or {})},
        said=said or {},
        rotary=True,
        inert=inert,
        skipped=_FREQUENCIES,
        tokenizers=tokenizers or {},
        causal=causal,
        template={} if causal else {**family.template, **(template or {})},
    )


def _adapted(family: _Family, base: str, label: str) -> Format:
    """A model of dllm's A2D: the base's layout, with a mask token."""
    told = {"shift_logits": False, "block_size": None}
    return _decoder(family, f"a2d-{base.lower()}", f"A2D{base}LMHeadModel", f"dllm's adapted {label} models", said=told)


def _causal(family: _Family, base: str, label: str) -> Format:
    told = {"shift_logits": True, "block_size": None}
    return _decoder(family, base.lower(), f"{base}ForCausalLM", f"causal {label}", said=told, causal=True)


_GPT2_LAYER = {
    "ln_1.weight": "input_layernorm.weight", "ln_1.bias": "input_layernorm.bias",
    "attn.c_attn.weight:q": "self_attn.q_proj.weight", "attn.c_attn.bias:q": "self_attn.q_proj.bias",
    "attn.c_attn.weight:k": "self_attn.k_proj.weight", "attn.c_attn.bias:k": "self_attn.k_proj.bias",
    "attn.c_attn.weight:v": "self_attn.v_proj.weight", "attn.c_attn.bias:v": "self_attn.v_proj.bias",
    "attn.c_proj.weight": "self_attn.o_proj.weight", "attn.c_proj.bias": "self_attn.o_proj.bias",
    "ln_2.weight": "post_attention_layernorm.weight", "ln_2.bias": "post_attention_layernorm.bias",
    "mlp.c_fc.weight": "mlp.up_proj.weight", "mlp.c_fc.bias": "mlp.up_proj.bias",
    "mlp.c_proj.weight": "mlp.down_proj.weight", "mlp.c_proj.bias": "mlp.down_proj.bias",
}  # fmt: skip
_GPT2 = Format(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    about="causal GPT-2",
    names={
        "transformer.wte.weight": "model.embed_tokens.weight",
        "transformer.wpe.weight": "model.embed_positions.weight",
        **{f"transformer.h.{{n}}.{there}": f"model.layers.{{n}}.{ours}" for there, ours in _GPT2_LAYER.items()},
        "transformer.ln_f.weight": "model.norm.weight",
        "transformer.ln_f.bias": "model.norm.bias",
        "lm_head.weight": "lm_head.weight",
    },
    keys={
        "vocab_size": Key("vocab_size"),
        "n_positions": Key("max_position_embeddings", absent=1024),
        "n_embd": Key("hidden_size"),
        "n_layer": Key("num_hidden_layers"),
        "n_head": Key("num_attention_heads"),
        "n_inner": Key("intermediate_size", absent=None, null=None),
        "layer_norm_epsilon": Key("rms_norm_eps", absent=1e-5),
        "initializer_range": Key("initializer_range", absent=0.02),
        "tie_word_embeddings": Key("tie_word_embeddings", absent=True),
        "activation_function": Only(("gelu_new", "gelu_pytorch_tanh"), absent="gelu_new"),
        "scale_attn_weights": Only((True,), absent=True),
        "scale_attn_by_inverse_layer_idx": Only((False,), absent=False),
        "add_cross_attention": Only((False,), absent=False),
        "quantization_config": Only((None,), absent=None),
        **_IDS,
    },
    fixed={
        "position_embedding": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "qkv_bias": True,
        "qk_norm": False,
    },
    said={"shift_logits": True, "block_size": None},
    inert=frozenset(
        {
            "attn_pdrop", "embd_pdrop", "n_ctx", "reorder_and_upcast_attn", "resid_pdrop", "summary_activation",
            "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
        }
    ),
    skipped=("transformer.h.{n}.attn.bias", "transformer.h.{n}.attn.masked_bias"),
    conv1d=tuple(
        f"transformer.h.{{n}}.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ),
    fused={f"transformer.h.{{n}}.attn.c_attn.{leaf}": ("q", "k", "v") for leaf in ("weight", "bias")},
    prefix="transformer.",
    causal=True,
)  # fmt: skip

FORMATS: dict[str, Format] = {
    "llada": Format(
        model_type="llada",
        architecture="LLaDAModelLM",
        about="LLaDA-8B, LLaDA-1.5",
        names=_LLADA_NAMES,
        keys={
            "embedding_size": Key("vocab_size", absent=None, null=None),
            "vocab_size": Key("num_tokens"),
            "d_model": Key("hidden_size"),
            "n_layers": Key("num_hidden_layers"),
            "n_heads": Key("num_attention_heads"),
            "n_kv_heads": Key("num_key_value_heads", absent=None, null=None),
            "mlp_hidden_size": Key("intermediate_size"),
            "max_sequence_length": Key("max_position_embeddings"),
            "rope_theta": Key("rope_theta", absent=10000.0),
            "rms_norm_eps": Key("rms_norm_eps", absent=1e-5),
            "init_std": Key("initializer_range", absent=0.02),
            "include_qkv_bias": Key("qkv_bias", absent=False),
            "weight_tying": Key("tie_word_embeddings", absent=True),
            "mask_token_id": _MASK,
            **_IDS,
            "include_bias": Only((False,), absent=True),
            "rope": Only((True,), absent=False),
            "rope_full_precision": Only((True,), absent=True),
            "alibi": Only((False,), absent=False),
            "activation_type": Only(("silu",), absent="swiglu"),
            "block_type": Only(("llama",), absent="sequential"),
            "block_group_size": Only((1,), absent=1),
            "layer_norm_type": Only(("rms",), absent="default"),
            "layer_norm_with_affine": Only((True,), absent=True),
            "bias_for_layer_norm": Only((False, None), absent=None),
            "attention_layer_norm": Only((False,), absent=False),
            "multi_query_attention": Only((False, None), absent=None),
            "clip_qkv": Only((None,), absent=None),
            "input_emb_norm": Only((False,), absent=False),
            "scale_logits": Only((False,), absent=False),
            "quantization_config": Only((None,), absent=None),
        },
        fixed={"qk_norm": False, "shift_logits": False, "block_size": None},
        inert=frozenset(
            {
                "alibi_bias_max", "attention_layer_norm_with_affine", "embedding_dropout", "flash_attention",
                "init_cutoff_factor", "init_device", "init_fn", "mlp_ratio", "precision", "residual_dropout",
                "tie_word_embeddings",
            }
        ),
        template=_LLADA_TEMPLATE,
    ),
    "dream": _decoder(
        _QWEN2, "Dream", "DreamModel", "Dream-7B, DiffuCoder",
        fixed={"shift_logits": True, "block_size": None},
        inert=frozenset({"attention_bias"}),
        tokenizers={"DreamTokenizer": "Qwen2Tokenizer"},
        template={"mask_token_id": None},
    ),
    "sdar": _decoder(
        _QWEN3, "sdar", "SDARForCausalLM", "SDAR, TraDo",
        keys={"block_size": Key("block_size")},
        fixed={"shift_logits": False},
        inert=frozenset({"debug", "ep_size", "fuse_cross_entropy", "micro_forward", "skip_checkpoint"}),
        template={"mask_token_id": None, "block_size": 1, "fuse_cross_entropy": False},
    ),
    "fast_dllm": _decoder(
        _QWEN2, "Fast_dLLM_Qwen", "Fast_dLLM_QwenForCausalLM", "Fast-dLLM v2",
        keys={"bd_size": Key("block_size")},
        fixed={"shift_logits": True},
        inert=frozenset({"attention_bias"}),
        template={"mask_token_id": None, "bd_size": 1},
    ),
    "a2d-llama": _adapted(_LLAMA, "Llama", "Llama"),
    "a2d-qwen2": _adapted(_QWEN2, "Qwen2", "Qwen2 and Qwen2.5"),
    "a2d-qwen3": _adapted(_QWEN3, "Qwen3", "Qwen3"),
    "llama": _causal(_LLAMA, "Llama", "Llama"),
    "qwen2": _causal(_QWEN2, "Qwen2", "Qwen2 and Qwen2.5"),
    "qwen3": _causal(_QWEN3, "Qwen3", "Qwen3"),
    "gpt2": _GPT2,
}  # fmt: skip
"""Every format of `mdlm convert --to`, besides our own (`mdlm`)."""

BY_MODEL_TYPE = {entry.model_type: name for name, entry in FORMATS.items()}
"""`config.json`'s `model_type` -> key of `FORMATS`."""

UNHOSTED = {
    "lladamoe": "a mixture of experts",
    "llada_moe": "a mixture of experts",
    "llada2_moe": "a mixture of experts",
    "bd3lm": "LayerNorm and a time input",
    "mdlm_dit": "LayerNorm and a time input",
}
"""Public model types that our transformer cannot host, and why."""
