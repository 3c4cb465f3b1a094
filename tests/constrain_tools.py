"""A small vocabulary of bytes, patterns over it, and what they accept by brute force."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from mdlm.denoiser import FunctionDenoiser
from mdlm.samplers.automaton import TokenAutomaton, token_automaton

TEXTS: list[bytes | None] = [b"a", b"b", b"ab", b"1", b"\xc3", b"\xa9", None, None]
EOS, MASK, VOCAB = 6, 7, 8
PATTERNS = ["a*", "(ab|b)+1?", "(ab)*", "[ab]*1[ab]*", "é*a?b*", "(a|b|1){2,3}", "a.b|.", "(?s:.*)", "[^b]+"]
STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("threshold", {"threshold": 0.3, "block_length": 2}),
    ("threshold", {"threshold": 0.0, "block_length": None}),
    ("confidence", {"k": 2}),
    ("confidence", {"k": 1, "score": "entropy", "block_length": 3}),
    ("llada", {"steps": 2}),
    ("llada", {"steps": 2, "remasking": "random"}),
    ("ancestral", {"steps": 3}),
    ("first_hitting", {}),
    ("first_hitting", {"block_length": 2}),
]
each_strategy = pytest.mark.parametrize(("name", "knobs"), STRATEGIES)


def random_model(seed: int, scale: float = 1.5, dtype: torch.dtype = torch.float32) -> FunctionDenoiser:
    """Logits that depend on the place and on all tokens to the left of it."""
    vocab = VOCAB
    weights = scale * torch.randn(3, vocab, vocab, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def logits(tokens: Tensor) -> Tensor:
        here = torch.nn.functional.one_hot(tokens, vocab).to(dtype)
        left = here.cumsum(dim=1).sin() @ weights[0]
        place = torch.arange(tokens.shape[1]).to(dtype)[:, None]
        return (
            left
            + torch.nn.functional.pad(here, (0, 0, 1, -1)) @ weights[1]
            + (weights[2, 0] * (place + 1)).cos() * scale
        )

    return FunctionDenoiser(logits, vocab - 1, vocab, ragged_ok=True)


def matches(pattern: str, tokens: list[int], ends: tuple[int, ...] = (EOS,)) -> bool:
    """Whether an answer is accepted: what stands before its first end-of-sequence token, read as text, matches."""
    text = b""
    for token in tokens:
        if token in ends:
            break
        piece = TEXTS[token]
        if piece is None:
            return False
        text += piece
    try:
        decoded = text.decode()
    except UnicodeDecodeError:
        return False
    return re.fullmatch(pattern, decoded) is not None


def accepted_strings(pattern: str, fixed: list[int | None], ends: tuple[int, ...] = (EOS,)) -> list[tuple[int, ...]]:
    """All strings with these tokens (None: any) that are accepted; never with the mask id."""
    choices = [range(MASK) if token is None else [token] for token in fixed]
    return [
        string
        for string in itertools.product(*choices)
        if matches(pattern, list(string), ends) and (EOS in ends or EOS not in string)
    ]


def automaton(pattern: str, ends: tuple[int, ...] = (EOS,)) -> TokenAutomaton:
    return token_automaton(pattern, TEXTS, ends)


def accepts(machine: TokenAutomaton, tokens: list[int]) -> bool:
    state = 0
    for token in tokens:
        state = int(machine.next_state[state, machine.token_class[token]])
        if state == machine.states:
            return False
    return bool(machine.accepting[state])
