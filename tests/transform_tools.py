"""Strategies for tests of what `generate` adds to them, and a model that notes what it is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mdlm.samplers import Generation

VOCAB, MASK = 13, 12


NAMES: list[tuple[str, dict[str, Any]]] = [
    ("threshold", {"threshold": 0.2, "block_length": None}),
    ("threshold", {"threshold": 0.0, "block_length": 4}),
    ("confidence", {"k": 3}),
    ("confidence", {"k": 3, "score": "random"}),
    ("llada", {"steps": 2}),
    ("ancestral", {"steps": 3}),
    ("ancestral", {"steps": 3, "noise": "joint"}),
    ("first_hitting", {}),
]
each_strategy = pytest.mark.parametrize(("name", "knobs"), NAMES)


class Watched:
    """A denoiser that depends on all tokens of a row, and keeps what it was asked."""

    mask_token_id, num_tokens, device = MASK, VOCAB, torch.device("cpu")

    def __init__(self, scale: float = 1.0, seed: int = 0) -> None:
        self.weights = scale * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
        self.calls: list[tuple[Tensor, Tensor | None]] = []

    def __call__(
        self,
        tokens: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        self.calls.append((tokens.clone(), attention_mask))
        real = torch.ones_like(tokens) if attention_mask is None else attention_mask.long()
        place = torch.arange(1, tokens.shape[1] + 1)
        given = (torch.nn.functional.one_hot(tokens, VOCAB) * (real * place)[..., None]).sum(dim=1, keepdim=True)
        logits = (given.float() @ self.weights) * torch.cos(place.float())[None, :, None]
        logits = logits.index_fill(-1, torch.tensor(MASK), -torch.inf).log_softmax(dim=-1)
        return logits if at is None else logits[at]


def same(a: Generation, b: Generation) -> bool:
    """Equal to the last bit, counts included."""
    rows = zip((*a.tokens, *a.step_map, *a.log_probs), (*b.tokens, *b.step_map, *b.log_probs))
    equal = all(torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0)) for x, y in rows)
    counts = zip((a.nfe, a.forwards, a.tokens_fed), (b.nfe, b.forwards, b.tokens_fed))
    return equal and all(torch.equal(x, y) for x, y in counts)
