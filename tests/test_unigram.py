"""The unigram baseline, by hand and against a known entropy."""

from __future__ import annotations

import math

import pytest
import torch

from mdlm.eval.likelihood import token_counts, unigram_log_probs


def test_unigram_probabilities_by_hand() -> None:
    train, evaluated = torch.tensor([0, 0, 0, 1]), [torch.tensor([[0, 1]]), torch.tensor([2])]
    got = unigram_log_probs(token_counts(train, 3))
    assert got.tolist() == pytest.approx([math.log(4 / 7), math.log(2 / 7), math.log(1 / 7)], rel=1e-12)
    assert token_counts(evaluated, 4).tolist() == [1, 1, 1, 0]
    with pytest.raises(ValueError, match=r"ids must lie in 0\.\.2"):
        token_counts(torch.tensor([3]), 3)


def test_unigram_reaches_the_entropy_of_independent_symbols() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.5, 0.25, 0.125, 0.125])
    train, evaluated = (torch.multinomial(p.expand(50, -1), 1000, True, generator=generator) for _ in range(2))
    nats = -unigram_log_probs(token_counts(train, 4))[evaluated].mean()
    assert float(nats) / math.log(2) == pytest.approx(1.75, abs=0.02)
