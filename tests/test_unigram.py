"""The unigram baseline, by hand and against a known entropy."""

from __future__ import annotations

import math

import pytest
import torch

from mdlm.eval.likelihood import token_counts, unigram_bits_per_byte


def test_unigram_bits_per_byte_by_hand() -> None:
    train, evaluated = torch.tensor([0, 0, 0, 1]), [torch.tensor([[0, 1]]), torch.tensor([2])]
    expected = -(math.log2(4 / 7) + math.log2(2 / 7) + math.log2(1 / 7)) / 5
    assert unigram_bits_per_byte(train, evaluated, 5, 3) == pytest.approx(expected, rel=1e-12)
    assert token_counts(evaluated, 4).tolist() == [1, 1, 1, 0]
    with pytest.raises(ValueError, match=r"ids must lie in 0\.\.2"):
        unigram_bits_per_byte(train, torch.tensor([3]), 5, 3)
    for tokens, size in ((torch.tensor([0]), 0), (torch.zeros(0).long(), 5)):
        with pytest.raises(ValueError, match="nothing to evaluate"):
            unigram_bits_per_byte(train, tokens, size, 3)


def test_unigram_reaches_the_entropy_of_independent_symbols() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.5, 0.25, 0.125, 0.125])
    train, evaluated = (torch.multinomial(p.expand(50, -1), 1000, True, generator=generator) for _ in range(2))
    assert unigram_bits_per_byte(train, evaluated, 50_000, 4) == pytest.approx(1.75, abs=0.02)
