"""Which inputs the model refuses, with a reason: what would fail deep inside torch, or worse, pass.

Values are looked at on the CPU only; an accelerator would have to wait for them. Read first: `modeling.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.utils.generic import is_flash_attention_requested

from mdlm.config import MDLMConfig
from mdlm.keyvalues import KeyValues


def check_inputs(
    config: MDLMConfig, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> None:
    """Refuse inputs that would fail deep inside torch, or worse, pass. Raises ValueError."""
    if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise ValueError(
            f"input_ids is {input_ids.dtype} of shape {list(input_ids.shape)}; it must hold token ids as [batch, seq]"
        )
    if input_ids.numel() == 0:
        raise ValueError(f"input_ids is empty, shape {list(input_ids.shape)}; give at least one token")
    for name, value in (("attention_mask", attention_mask), ("position_ids", position_ids)):
        if value is not None and value.shape != input_ids.shape:
            raise ValueError(
                f"{name} has shape {list(value.shape)}; it must have the shape of input_ids, {list(input_ids.shape)}: "
                "one number per token (the model builds the square attention mask itself)"
            )
    if position_ids is None and input_ids.shape[1] > config.max_position_embeddings:
        raise ValueError(
            f"the sequence is {input_ids.shape[1]} tokens long, the model takes at most "
            f"max_position_embeddings={config.max_position_embeddings}; shorten it or pack documents with position_ids"
        )
    if config.block_size is not None and is_flash_attention_requested(config):
        raise ValueError(
            f"{config._attn_implementation} has no block-causal mask (block_size={config.block_size}); load the model "
            "with attn_implementation='sdpa' or 'flex_attention', or set block_size=None"
        )
    _check_ids(config, "input_ids", input_ids)
    if position_ids is not None and _may_look(position_ids):
        low, high = (int(bound) for bound in position_ids.aminmax())
        if low < 0 or high >= config.max_position_embeddings:
            raise ValueError(
                f"position_ids holds {low if low < 0 else high}; positions run from 0 to "
                f"max_position_embeddings - 1 = {config.max_position_embeddings - 1}"
            )


def _may_look(values: Tensor) -> bool:
    return not torch.compiler.is_compiling() and values.device.type == "cpu"


def _check_ids(config: MDLMConfig, name: str, ids: Tensor) -> None:
    if not _may_look(ids):
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= config.vocab_size:
        raise ValueError(
            f"{name} holds {low if low < 0 else high}, but the embedding has rows 0 .. {config.vocab_size - 1}; is "
            "this the tokenizer the model was trained with?"
        )


def check_clean(config: MDLMConfig, input_ids: Tensor, clean_ids: Tensor, kv: KeyValues | None) -> None:
    """Refuse `clean_ids` where they mean nothing. Raises ValueError."""
    if config.block_size is None:
        raise ValueError(
            "clean_ids are the clean past of each block, but this model has no blocks (config.block_size is None); set "
            "block_size, or leave clean_ids out"
        )
    if kv is not None:
        raise ValueError("clean_ids feed every row whole, kv feeds parts of rows; give one of them")
    if clean_ids.shape != input_ids.shape:
        raise ValueError(
            f"clean_ids has shape {list(clean_ids.shape)}; it must have the shape of input_ids, {list(input_ids.shape)}"
        )
    _check_ids(config, "clean_ids", clean_ids)


def check_outputs(config: MDLMConfig, output_hidden_states: bool, output_attentions: bool) -> None:
    """Refuse to return what an attention implementation does not have. Raises ValueError."""
    if output_attentions and config._attn_implementation != "eager":
        raise ValueError(
            f"{config._attn_implementation} does not return attention weights; load the model with "
            "attn_implementation='eager'"
        )
    if output_hidden_states and is_flash_attention_requested(config):
        raise ValueError(
            f"hidden states are not returned under {config._attn_implementation}, which runs without padding; load the "
            "model with attn_implementation='sdpa'"
        )


def check_feed(config: MDLMConfig, position_ids: Tensor | None) -> None:
    """Refuse to feed some positions of a row (`kv`) where that is not possible.

    With `kv`, `input_ids [batch, fed]` are tokens of one document per row, `position_ids` their positions in it,
    ascending, and `attention_mask` is False where a row feeds fewer than others. Raises ValueError without
    `position_ids`, while gradients are recorded, and as `check_kv`.
    """
    if position_ids is None:
        raise ValueError("kv needs position_ids: which positions of their rows the tokens stand at")
    if torch.is_grad_enabled():
        raise ValueError("stored keys and values carry no gradient; call the model under torch.no_grad()")
    check_kv(config)


def check_kv(config: MDLMConfig) -> None:
    """Raises ValueError for attention implementations that cannot attend to stored keys and values."""
    if is_flash_attention_requested(config) or config._attn_implementation == "flex_attention":
        raise ValueError(
            f"{config._attn_implementation} cannot attend to stored keys and values; load the model with "
            "attn_implementation='sdpa' or 'eager', or sample without a cache"
        )
