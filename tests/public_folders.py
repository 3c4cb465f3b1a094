"""Tiny random checkpoints in every public format: right `config.json`, right tensor names, a small tokenizer.

Names and keys are written out here from the published files, apart from the product's tables.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mdlm.tokenization import train_bpe

ROWS, WIDTH, HIDDEN, HEADS, KV = 320, 32, 48, 4, 2
TEXTS = ["the cat sat on a mat and saw one dog run in the sun"] * 4
MASK, EOS = 0, 2
_COMMON = {
    "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "vocab_size": ROWS, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "initializer_range": 0.02, "hidden_act": "silu", "attention_dropout": 0.0, "bos_token_id": EOS,
    "eos_token_id": EOS, "tie_word_embeddings": False, "rope_scaling": None, "rope_theta": 1000000.0,
    "sliding_window": None, "use_sliding_window": False, "max_window_layers": 2, "torch_dtype": "float32",
    "transformers_version": "4.46.2", "use_cache": True,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llada": {
        "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0, "architectures": ["LLaDAModelLM"],
        "attention_dropout": 0.0, "attention_layer_norm": False, "attention_layer_norm_with_affine": True,
        "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig", "AutoModel": "modeling_llada.LLaDAModelLM"},
        "bias_for_layer_norm": False, "block_group_size": 1, "block_type": "llama", "d_model": WIDTH,
        "embedding_dropout": 0.0, "embedding_size": ROWS, "eos_token_id": EOS, "flash_attention": False,
        "include_bias": False, "include_qkv_bias": False, "init_cutoff_factor": None, "init_device": "meta",
        "init_fn": "mitchell", "init_std": 0.02, "input_emb_norm": False, "layer_norm_type": "rms",
        "layer_norm_with_affine": True, "mask_token_id": MASK, "max_sequence_length": 128,
        "mlp_hidden_size": HIDDEN, "mlp_ratio": 4, "model_type": "llada", "multi_query_attention": None,
        "n_heads": HEADS, "n_kv_heads": HEADS, "n_layers": 2, "pad_token_id": EOS, "precision": "amp_bf16",
        "residual_dropout": 0.0, "rms_norm_eps": 1e-5, "rope": True, "rope_full_precision": True,
        "rope_theta": 500000.0, "scale_logits": False, "transformers_version": "4.46.3", "use_cache": False,
        "vocab_size": ROWS, "weight_tying": False,
    },
    "dream": {
        **_COMMON, "architectures": ["DreamModel"], "model_type": "Dream", "mask_token_id": MASK, "pad_token_id": EOS,
        "auto_map": {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
    },
    "sdar": {
        **_COMMON, "architectures": ["SDARForCausalLM"], "model_type": "sdar", "mask_token_id": MASK, "block_size": 4,
        "head_dim": 12, "attention_bias": False, "fuse_cross_entropy": True, "pad_token_id": EOS,
        "auto_map": {"AutoConfig": "configuration_sdar.SDARConfig"},
    },
    "fast_dllm": {
        **_COMMON, "architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen", "bd_size": 4,
        "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True,
    },
    "a2d-llama": {
        **_COMMON, "architectures": ["A2DLlamaLMHeadModel"], "model_type": "a2d-llama", "attention_bias": False,
        "mlp_bias": False, "pretraining_tp": 1, "head_dim": 8, "rope_theta": 10000.0,
    },
    "a2d-qwen2": {**_COMMON, "architectures": ["A2DQwen2LMHeadModel"], "model_type": "a2d-qwen2"},
    "a2d-qwen3": {
        **_COMMON, "architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3", "head_dim": 16,
        "attention_bias": False, "tie_word_embeddings": True,
    },
}  # fmt: skip


def tensors(public: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Random weights under the public names; norms and biases are not 1 and 0, so that they count."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, around: float = 0.0) -> Tensor:
        scale = 0.3 if len(shape) == 1 else 0.4
        return (around + scale * torch.randn(shape, generator=generator)).to(dtype)

    if public["model_type"] == "llada":
        width, hidden, heads, kv = (public[k] for k in ("d_model", "mlp_hidden_size", "n_heads", "n_kv_heads"))
        rows = public["embedding_size"] or public["vocab_size"]
        out = {"model.transformer.wte.weight": draw(rows, width)}
        dim = width // heads
        for n in range(public["n_layers"]):
            at = f"model.transformer.blocks.{n}."
            out |= {
                at + "q_proj.weight": draw(width, width), at + "k_proj.weight": draw(kv * dim, width),
                at + "v_proj.weight": draw(kv * dim, width), at + "attn_out.weight": draw(width, width),
                at + "ff_proj.weight": draw(hidden, width), at + "up_proj.weight": draw(hidden, width),
                at + "ff_out.weight": draw(width, hidden), at + "attn_norm.weight": draw(width, around=1.0),
                at + "ff_norm.weight": draw(width, around=1.0),
            }  # fmt: skip
            if public["include_qkv_bias"]:
                out |= {at + "q_proj.bias": draw(width), at + "k_proj.bias": draw(kv * dim)}
                out |= {at + "v_proj.bias": draw(kv * dim)}
        out["model.transformer.ln_f.weight"] = draw(width, around=1.0)
        if not public["weight_tying"]:
            out["model.transformer.ff_out.weight"] = draw(rows, width)
        return out
    width, hidden, heads = public["hidden_size"], public["intermediate_size"], public["num_attention_heads"]
    kv, dim = public["num_key_value_heads"], public.get("head_dim") or width // heads
    out = {"model.embed_tokens.weight": draw(public["vocab_size"], width)}
    for n in range(public["num_hidden_layers"]):
        at = f"model.layers.{n}."
        out |= {
            at + "self_attn.q_proj.weight": draw(heads * dim, width),
            at + "self_attn.k_proj.weight": draw(kv * dim, width),
            at + "self_attn.v_proj.weight": draw(kv * dim, width),
            at + "self_attn.o_proj.weight": draw(width, heads * dim),
            at + "mlp.gate_proj.weight": draw(hidden, width), at + "mlp.up_proj.weight": draw(hidden, width),
            at + "mlp.down_proj.weight": draw(width, hidden), at + "input_layernorm.weight": draw(width, around=1.0),
            at + "post_attention_layernorm.weight": draw(width, around=1.0),
        }  # fmt: skip
        if public["model_type"] in ("Dream", "Fast_dLLM_Qwen", "a2d-qwen2", "qwen2"):
            out |= {at + "self_attn.q_proj.bias": draw(heads * dim), at + "self_attn.k_proj.bias": draw(kv * dim)}
            out |= {at + "self_attn.v_proj.bias": draw(kv * dim)}
        if public["model_type"] in ("sdar", "a2d-qwen3", "qwen3"):
            out |= {at + f"self_attn.{name}_norm.weight": draw(dim, around=1.0) for name in "qk"}
    out["model.norm.weight"] = draw(width, around=1.0)
    if not public["tie_word_embeddings"]:
        out["lm_head.weight"] = draw(public["vocab_size"], width)
    return out


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE; mask id 0, pad 1, end 2."""
    return train_bpe(TEXTS, 280)


def save_tokenizer(folder: Path, mask: bool = True) -> None:
    """The tokenizer's files. Padding = end, as in most public models; `mask` False: the mask token is not named."""
    names = {"mask_token": "<|mask|>"} if mask else {}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().backend_tokenizer, eos_token="<|eos|>", pad_token="<|eos|>", **names
    ).save_pretrained(folder)


@cache
def maskless() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 280 tokens as causal models have: special are only the end (id 0) and a spare token (1)."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|end|>", "<|spare|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def save_weights(folder: Path, weights: dict[str, Tensor], files: int = 1) -> None:
    """As one safetensors file, or as several with an index."""
    if files == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(weights)
    weight_map = {}
    for number in range(files):
        part = names[number::files]
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def make_folder(
    folder: Path, name: str, *, dtype: torch.dtype = torch.float32, files: int = 1, mask: bool = True, **changes: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write a checkpoint of format `name`; returns its configuration (with `changes`) and its tensors."""
    public = {**CONFIGS[name], **changes}
    if "torch_dtype" in public:
        public["torch_dtype"] = str(dtype).removeprefix("torch.")
    weights = tensors(public, dtype)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(public, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"steps": 512, "alg": "entropy"}))
    save_tokenizer(folder, mask)
    save_weights(folder, weights, files)
    return public, weights
