"""Tokens that end a piece of text (line ends, commas), said as text until a tokenizer is there to tell their ids.

A component keeps them in a field `delimiters`; `generate` exchanges texts for ids (`with_token_ids`) before a run
starts. Whoever runs a `Strategy` without a tokenizer gives ids. Read next: `windows_planned.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

Delimiters = tuple[int | str, ...]

Part = TypeVar("Part")


def ids_of(delimiters: Delimiters, whose: object) -> tuple[int, ...]:
    """The ids; ValueError if some are still texts."""
    texts = [delimiter for delimiter in delimiters if isinstance(delimiter, str)]
    if texts:
        raise ValueError(
            f"{type(whose).__name__} ends pieces at {', '.join(map(repr, texts))}, whose token ids only a tokenizer "
            "knows: call generate with one, or give delimiters as token ids"
        )
    return tuple(delimiter for delimiter in delimiters if isinstance(delimiter, int))


def token_id(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that is this text; ValueError if it is not one token.

    Where a tokenizer puts a mark of the beginning before every text, the last token counts.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids or tokenizer.decode(ids[-1:]) != text:
        raise ValueError(
            f"delimiter {text!r} is not one token of this tokenizer (it is {len(ids)}: {ids}); give token ids instead"
        )
    return int(ids[-1])


def with_token_ids(part: Part, tokenizer: PreTrainedTokenizerBase | None) -> Part:
    """The component (a `Strategy`, and whatever it is made of) with ids in place of texts in every `delimiters`.

    Raises ValueError if there are texts and no tokenizer, or one is not a token of its own.
    """
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return part
    changes = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name == "delimiters" and any(isinstance(item, str) for item in value):
            if tokenizer is None:
                ids_of(value, part)
            ids = (item if isinstance(item, int) else token_id(item, tokenizer) for item in value)  # type: ignore[arg-type]
            changes[field.name] = tuple(ids)
        elif field.init:
            inner: Any = with_token_ids(value, tokenizer)
            if inner is not value:
                changes[field.name] = inner
    return dataclasses.replace(part, **changes) if changes else part
