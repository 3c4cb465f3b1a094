"""Texts of the evaluation harness to tokens and back: pairs as lm-eval cuts them, `until` strings, generation keywords.

Read next: `harness.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mdlm.samplers.prompts import decode_after
from mdlm.samplers.state import State

Ids = list[int]
DEFAULT_NEW_TOKENS = 256
"""As in lm-eval's own models, where neither the task nor the caller says a length."""

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Ids:
    """Token ids; special tokens spelt out in the text are these tokens, as chat templates need, except for the mask.

    A text that spells the mask token out (a document about masked models, say) must not hold a hole.
    """
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    mask = tokenizer.mask_token_id
    if mask is None or mask not in ids:
        return ids
    spelt = tokenizer(str(tokenizer.mask_token), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    if mask in spelt:
        raise ValueError(
            f"the text contains the mask token {tokenizer.mask_token!r}, which this tokenizer cannot read as plain text"
        )
    return [piece for token in ids for piece in (spelt if token == mask else [token])]


def encode_pair(tokenizer: PreTrainedTokenizerBase, context: str, continuation: str) -> tuple[Ids, Ids]:
    """A context and its continuation as lm-eval cuts them: spaces at the context's end go to the continuation, and the
    continuation's tokens are those of the whole text behind the context's own.

    Where a token of the whole holds text of both (which lm-eval cuts in the middle), it belongs to the continuation.
    Raises ValueError for an empty continuation.
    """
    kept = context.rstrip()
    whole = encode(tokenizer, context + continuation)
    before = encode(tokenizer, kept)
    common = next((i for i, (a, b) in enumerate(zip(before, whole)) if a != b), min(len(before), len(whole)))
    if common >= len(whole):
        raise ValueError(f"the continuation of {context[-40:]!r} is empty: there is nothing to score")
    return whole[:common], whole[common:]


@dataclass(frozen=True)
class Wish:
    """What a task asks of a generation."""

    until: tuple[str, ...]
    max_new_tokens: int | None
    sampling: tuple[tuple[str, Any], ...]
    """Arguments of `generate`; temperature 0 where the task asks for no sampling."""


def read_wish(gen_kwargs: Mapping[str, Any]) -> Wish:
    """lm-eval's generation keywords, read as its own models read them: greedy unless `do_sample` or a temperature says
    otherwise. Raises ValueError for keywords that cannot be followed."""
    rest = dict(gen_kwargs)
    until = rest.pop("until", None) or ()
    texts = tuple(until) if isinstance(until, (list, tuple)) else (until,)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"until is {until!r}; it must be a string or a list of strings")
    lengths = [rest.pop(name) for name in _LENGTHS if name in rest]
    do_sample = rest.pop("do_sample", None)
    if rest.pop("num_beams", 1) != 1:
        raise ValueError("num_beams is not 1: there is no beam search for masked diffusion; leave it out")
    sampling = {name: rest.pop(name) for name in _SAMPLING if rest.get(name) is not None}
    if rest:
        allowed = ", ".join(("until", "do_sample", *_LENGTHS, *_SAMPLING))
        raise ValueError(f"the task's generation keywords {', '.join(rest)} are not known; allowed are {allowed}")
    temperature = float(sampling.pop("temperature", 1.0 if do_sample else 0.0))
    temperature = 0.0 if do_sample is False else temperature
    kept = {"top_p": sampling.get("top_p"), "top_k": sampling.get("top_k") or None, "min_p": sampling.get("min_p")}
    used = {name: value for name, value in kept.items() if value is not None} if temperature > 0 else {}
    return Wish(
        until=tuple(text for text in texts if text),
        max_new_tokens=int(lengths[0]) if lengths else None,
        sampling=(("temperature", temperature), *used.items()),
    )


def end_ids(tokenizer: PreTrainedTokenizerBase, until: Sequence[str]) -> tuple[int, ...]:
    """Ids of the `until` strings that are special tokens: decoded text does not show them, so they end by id."""
    special = set(tokenizer.all_special_ids)
    found = []
    for text in until:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) == 1 and ids[0] in special:
            found.append(int(ids[0]))
    return tuple(found)


def cut(text: str, until: Sequence[str]) -> str:
    """The text before the first of the `until` strings."""
    ends = [place for place in (text.find(stop) for stop in until) if place >= 0]
    return text[: min(ends)] if ends else text


@dataclass(frozen=True)
class UntilStop:
    """A stop rule: a row ends where its text, written without a hole from its beginning, holds one of the strings.

    What `cut` leaves of the answer does not change by it: later tokens only add text behind.
    """

    tokenizer: PreTrainedTokenizerBase
    until: tuple[str, ...]
    name: ClassVar[str] = "until"

    def __call__(self, state: State) -> Int64[Tensor, " batch"]:
        """See `samplers.stop.StopRule`."""
        ends = torch.full_like(state.lengths, -1)
        position = torch.arange(state.tokens.shape[1], device=state.tokens.device)
        open_ = state.masked | (position >= state.lengths[:, None])
        holes = torch.where(open_.any(dim=-1), open_.int().argmax(dim=-1), state.tokens.shape[1]).tolist()
        for row, (start, hole) in enumerate(zip(state.origin.tolist(), holes)):
            if hole > start:
                ids = state.tokens[row, :hole].tolist()
                text = decode_after(self.tokenizer, ids[:start], ids[start:])
                if any(stop in text for stop in self.until):
                    ends[row] = hole
        return ends
