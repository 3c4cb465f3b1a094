"""The public checkpoint formats: for each, one table of weight names and one of configuration keys.

A format is data. `names` maps a tensor's public name to ours; `keys` says what each key of its `config.json` means: a
`Key` is an option of `MDLMConfig` under another name, an `Only` is a feature that our model has in one variant, and
`inert` lists keys that do not change logits. A key that stands nowhere is an error, since it may be such a feature.
What a format's own code assumes for an absent key stands here too (`absent`); nothing is taken from a model's name.

Sources: the configuration and modelling files published with LLaDA-8B (2502.09992), Dream-7B (2508.15487), SDAR
(2510.06303), Fast-dLLM v2 (2509.26328) and dllm's A2D models; `transformers` for Llama, Qwen2 and Qwen3. All of them
turn the halves of a head against each other (half-split rotary positions), as our model does, so no weight is permuted.
Read next: `public_config.py`, which applies the tables of keys, and `convert.py`.
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
_QWEN2 = {**_DECODER, "use_mrope": Only((False, None), absent=False)}
_QWEN3 = {
    **_DECODER,
    "head_dim": Key("head_dim", absent=128, null=None),
    "attention_bias": Only((False,), absent=False),
}
_LLAMA = {
    **_DECODER,
    "num_key_value_heads": Key("num_key_value_heads", absent=None, null=None),
    "head_dim": Key("head_dim", absent=None, null=None),
    "attention_bias": Only((False,), absent=False),
    "mlp_bias": Only((False,), absent=False),
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
_QWEN2_NAMES = {
    **_LLAMA_NAMES,
    "model.layers.{n}.self_attn.q_proj.bias": "model.layers.{n}.self_attn.q_proj.bias",
    "model.layers.{n}.self_attn.k_proj.bias": "model.layers.{n}.self_attn.k_proj.bias",
    "model.layers.{n}.self_attn.v_proj.bias": "model.layers.{n}.self_attn.v_proj.bias",
}
_QWEN3_NAMES = {
    **_LLAMA_NAMES,
    "model.layers.{n}.self_attn.q_norm.weight": "model.layers.{n}.self_attn.q_norm.weight",
    "model.layers.{n}.self_attn.k_norm.weight": "model.layers.{n}.self_attn.k_norm.weight",
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
    "dream": Format(
        model_type="Dream",
        architecture="DreamModel",
        about="Dream-7B, DiffuCoder",
        names=_QWEN2_NAMES,
        keys={**_QWEN2, "mask_token_id": _MASK},
        fixed={"qkv_bias": True, "qk_norm": False, "shift_logits": True, "block_size": None},
        rotary=True,
        inert=frozenset({"attention_bias"}),
        skipped=_FREQUENCIES,
        tokenizers={"DreamTokenizer": "Qwen2Tokenizer"},
        template={**_DECODER_TEMPLATE, "mask_token_id": None},
    ),
    "sdar": Format(
        model_type="sdar",
        architecture="SDARForCausalLM",
        about="SDAR, TraDo",
        names=_QWEN3_NAMES,
        keys={**_QWEN3, "mask_token_id": _MASK, "block_size": Key("block_size")},
        fixed={"qkv_bias": False, "qk_norm": True, "shift_logits": False},
        rotary=True,
        inert=frozenset({"debug", "ep_size", "fuse_cross_entropy", "micro_forward", "skip_checkpoint"}),
        skipped=_FREQUENCIES,
        template={
            **_DECODER_TEMPLATE, "head_dim": None, "attention_bias": False, "mask_token_id": None, "block_size": 1,
            "fuse_cross_entropy": False,
        },
    ),
    "fast_dllm": Format(
        model_type="Fast_dLLM_Qwen",
        architecture="Fast_dLLM_QwenForCausalLM",
        about="Fast-dLLM v2",
        names=_QWEN2_NAMES,
        keys={**_QWEN2, "mask_token_id": _MASK, "bd_size": Key("block_size")},
        fixed={"qkv_bias": True, "qk_norm": False, "shift_logits": True},
        rotary=True,
        inert=frozenset({"attention_bias"}),
        skipped=_FREQUENCIES,
        template={**_DECODER_TEMPLATE, "mask_token_id": None, "bd_size": 1},
    ),
    "a2d-llama": Format(
        model_type="a2d-llama",
        architecture="A2DLlamaLMHeadModel",
        about="dllm's adapted Llama models",
        names=_LLAMA_NAMES,
        keys={**_LLAMA, "mask_token_id": _MASK},
        fixed={"qkv_bias": False, "qk_norm": False},
        said={"shift_logits": False, "block_size": None},
        rotary=True,
        skipped=_FREQUENCIES,
        template={**_DECODER_TEMPLATE, "head_dim": None, "attention_bias": False, "mlp_bias": False},
    ),
    "a2d-qwen2": Format(
        model_type="a2d-qwen2",
        architecture="A2DQwen2LMHeadModel",
        about="dllm's adapted Qwen2 and Qwen2.5 models",
        names=_QWEN2_NAMES,
        keys={**_QWEN2, "mask_token_id": _MASK},
        fixed={"qkv_bias": True, "qk_norm": False},
        said={"shift_logits": False, "block_size": None},
        rotary=True,
        skipped=_FREQUENCIES,
        template=_DECODER_TEMPLATE,
    ),
    "a2d-qwen3": Format(
        model_type="a2d-qwen3",
        architecture="A2DQwen3LMHeadModel",
        about="dllm's adapted Qwen3 models",
        names=_QWEN3_NAMES,
        keys={**_QWEN3, "mask_token_id": _MASK},
        fixed={"qkv_bias": False, "qk_norm": True},
        said={"shift_logits": False, "block_size": None},
        rotary=True,
        skipped=_FREQUENCIES,
        template={**_DECODER_TEMPLATE, "head_dim": None, "attention_bias": False},
    ),
    "llama": Format(
        model_type="llama",
        architecture="LlamaForCausalLM",
        about="causal Llama",
        names=_LLAMA_NAMES,
        keys=_LLAMA,
        fixed={"qkv_bias": False, "qk_norm": False},
        said={"shift_logits": True, "block_size": None},
        rotary=True,
        skipped=_FREQUENCIES,
        causal=True,
    ),
    "qwen2": Format(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        about="causal Qwen2 and Qwen2.5",
        names=_QWEN2_NAMES,
        keys=_QWEN2,
        fixed={"qkv_bias": True, "qk_norm": False},
        said={"shift_logits": True, "block_size": None},
        rotary=True,
        skipped=_FREQUENCIES,
        causal=True,
    ),
    "qwen3": Format(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        about="causal Qwen3",
        names=_QWEN3_NAMES,
        keys=_QWEN3,
        fixed={"qkv_bias": False, "qk_norm": True},
        said={"shift_logits": True, "block_size": None},
        rotary=True,
        skipped=_FREQUENCIES,
        causal=True,
    ),
}  # fmt: skip
"""Every format of `mdlm convert --to`, besides our own (`mdlm`)."""

BY_MODEL_TYPE = {entry.model_type: name for name, entry in FORMATS.items()}
"""`config.json`'s `model_type` -> key of `FORMATS`."""

UNHOSTED = {
    "lladamoe": "a mixture of experts",
    "llada_moe": "a mixture of experts",
    "llada2_moe": "a mixture of experts",
    "gpt2": "learned positions and LayerNorm",
    "bd3lm": "LayerNorm and a time input",
    "mdlm_dit": "LayerNorm and a time input",
}
"""Public model types that our transformer cannot host, and why."""
