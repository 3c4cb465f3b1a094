"""From what a caller has (text, chats, token ids, a canvas) to the `Canvas` that is to be written, and back to text.

Read next: `canvas.py`."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mdlm.samplers.canvas import Canvas

_NEAR = 4  # tokens of the prompt that are decoded with its continuation


def check_length(model: Any, canvas: Canvas) -> None:
    """Raises ValueError if a row is longer than the model takes."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    longest = int(canvas.lengths.max())
    if limit is not None and longest > limit:
        raise ValueError(
            f"prompt and answer are {longest} tokens long, the model takes at most {limit}; shorten the prompt or "
            "lower max_new_tokens"
        )


def to_canvas(tokenizer: PreTrainedTokenizerBase | None, prompts: Any, max_new_tokens: int) -> Canvas:
    """The canvas that `prompts` (see `generate`) and an answer of `max_new_tokens` make."""
    if isinstance(prompts, Canvas):
        return prompts
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be 1 or more")
    rows = _rows(tokenizer, prompts)
    if not rows:
        raise ValueError("no prompts: give at least one (an empty string asks for text from nothing)")
    return Canvas.from_prompts(rows, max_new_tokens)


def _rows(tokenizer: PreTrainedTokenizerBase | None, prompts: Any) -> list[Any]:
    """Token ids of each prompt."""
    if isinstance(prompts, Tensor):
        if prompts.is_floating_point() or prompts.dim() not in (1, 2):
            raise ValueError(f"a tensor of prompts must hold ids as [seq] or [batch, seq], got {list(prompts.shape)}")
        return list(prompts[None] if prompts.dim() == 1 else prompts)
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise ValueError(
            f"prompts are a {type(prompts).__name__}; give text, chats, token ids or a Canvas (or a list of those)"
        )
    if len(prompts) and isinstance(prompts[0], (Integral, dict)):
        prompts = [prompts]
    return [_row(tokenizer, number, prompt) for number, prompt in enumerate(prompts)]


def _row(tokenizer: PreTrainedTokenizerBase | None, number: int, prompt: Any) -> Any:
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes, bytearray))
    if isinstance(prompt, Tensor) or (is_list and all(isinstance(x, Integral) for x in prompt)):
        return torch.as_tensor([int(x) for x in prompt], dtype=torch.int64)
    if not (isinstance(prompt, str) or (is_list and all(isinstance(x, dict) for x in prompt))):
        raise ValueError(f"prompt {number} is a {type(prompt).__name__}; give text, a chat or token ids")
    if tokenizer is None:
        raise ValueError(f"prompt {number} is text, which needs a tokenizer; give one, or token ids")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, add_special_tokens=False)
    if tokenizer.chat_template is None:
        raise ValueError(f"prompt {number} is a chat, but the tokenizer has no chat template; set one or give text")
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)


def decode_after(tokenizer: PreTrainedTokenizerBase, before: Sequence[int], ids: Sequence[int]) -> str:
    """Text of `ids` without special tokens, exactly as they spell it behind the tokens `before`.

    Alone, the first token of a SentencePiece tokenizer would lose its space, and code its first indentation.
    """

    def text(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    near = list(before)[-_NEAR:]
    start, whole = text(near), text([*near, *ids])
    return whole[len(start) :] if whole.startswith(start) else text(ids)  # a character half in the prompt


def check_tokenizer(tokenizer: PreTrainedTokenizerBase | None, mask_token_id: int) -> None:
    """Raises ValueError if the tokenizer's mask token is another than the model's: then it is another model's."""
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None and own != mask_token_id:
        raise ValueError(
            f"the tokenizer's mask token has id {own}, the model's {mask_token_id}; give the tokenizer the model was "
            "trained with"
        )
