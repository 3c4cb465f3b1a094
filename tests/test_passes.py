"""Passes over the vocabulary give what their formulas say, for a row alone as for a row among others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mdlm import passes
from mdlm.emit import emit_log_probs
from mdlm.passes import divergences, entropies, largest
from mdlm.samplers.draw import Draw

SIZES = [2, 63, 256, 257, 1000]


def laws(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random log-probabilities, some -inf; the first row is certain."""
    generator = torch.Generator().manual_seed(vocab)
    logits = 4 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    logits = logits.masked_fill(torch.rand(rows, vocab, generator=generator) < 0.2, -torch.inf)
    logits[:, 1] = 0.0
    logits[0] = -torch.inf
    logits[0, vocab // 2] = 0.0
    return logits.log_softmax(dim=-1).to(dtype)


@pytest.fixture(params=[1 << 18, 600], ids=["one block", "blocks"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows in one block, and few rows to a block."""
    monkeypatch.setattr(passes, "BLOCK", request.param)


@pytest.mark.parametrize("vocab", SIZES)
def test_entropy_is_that_of_the_law(vocab: int, block: None) -> None:
    values = laws(9, vocab, torch.float64)
    got = entropies(values)
    for row, expected in zip(got.tolist(), values.tolist()):
        assert row == pytest.approx(-sum(math.exp(v) * v for v in expected if v > -math.inf), abs=1e-12)
    assert float(got[0]) == 0.0
    assert torch.equal(entropies(values, torch.tensor([4, 0, 4])), got[[4, 0, 4]])


@pytest.mark.parametrize("vocab", SIZES)
def test_divergence_is_that_of_the_laws(vocab: int, block: None) -> None:
    first, second = laws(9, vocab, torch.float64), laws(9, vocab, torch.float64).flip(0)
    left, right = torch.tensor([1, 2, 3, 8, 0, 4, 3, 5, 6]), torch.tensor([1, 5, 5, 8, 1, 5, 7, 6, 8])
    got = divergences(first, second, left, right)
    for value, p, q in zip(got.tolist(), first[left].tolist(), second[right].tolist()):
        terms = [math.exp(a) * (passes.FARTHEST if b == -math.inf else a - b) for a, b in zip(p, q) if a > -math.inf]
        assert value == pytest.approx(max(0.0, sum(terms)), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("vocab", [300, 40_000])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_alone_gives_bitwise_what_it_gives_among_others(vocab: int, threads: int) -> None:
    """A sum over one long row is otherwise split among threads, one over many rows is not."""
    values, uniform = laws(40, vocab), torch.rand(40, generator=torch.Generator().manual_seed(1)).double()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        everything = entropies(values), Draw(temperature=0.7)(values, uniform)
        both = torch.arange(40)
        moved = divergences(values, values.flip(0), both, both)
        for row in (0, 3, 39):
            alone = values[row : row + 1]
            assert torch.equal(entropies(alone), everything[0][row : row + 1])
            assert torch.equal(Draw(temperature=0.7)(alone, uniform[row : row + 1]), everything[1][row : row + 1])
            other = values[39 - row : 40 - row]
            zero = torch.zeros(1, dtype=torch.int64)
            assert torch.equal(divergences(alone, other, zero, zero), moved[row : row + 1])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_tokens", [40, 37], ids=["all ids", "padded vocabulary"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_logits_given_away_answer_the_same(num_tokens: int, dtype: torch.dtype, block: None) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 20, 40, generator=generator).to(dtype)
    logits[1, 4, 7] = logits[1, 4, 9] = torch.inf  # in one block of several
    logits[2, 19] = -torch.inf
    logits[2, 19, 3] = 5.0
    plain = emit_log_probs(logits, 2, num_tokens)
    assert plain[1, 4, 7].exp().item() == pytest.approx(0.5)
    assert torch.equal(emit_log_probs(logits.clone(), 2, num_tokens, overwrite=True), plain)
    assert torch.equal(emit_log_probs(logits.clone(), 2, num_tokens, overwrite=True, again=logits.clone), plain)
    for wrong, message in ((torch.nan, "hold NaN"), (-torch.inf, "nothing to")):
        broken = logits.clone()
        broken[2, 10] = wrong
        with pytest.raises(ValueError, match=message):
            emit_log_probs(broken.clone(), 2, num_tokens, overwrite=True)
        with pytest.raises(ValueError, match=message):
            emit_log_probs(broken.clone(), 2, num_tokens, overwrite=True, again=broken.clone)


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 200])
def test_largest_is_the_first_maximum(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    values = torch.randint(0, 5, (50, vocab), generator=generator).double()  # many ties
    values[:3] = -torch.inf
    value, token = largest(values)
    for row in range(50):
        numbers = values[row].tolist()
        assert float(value[row]) == max(numbers)
        assert int(token[row]) == numbers.index(max(numbers))
    values[4, vocab // 2] = torch.nan
    assert bool(largest(values)[0][4].isnan())
    assert bool(values[4, largest(values)[1][4]].isnan())


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_a_draw_names_the_token_that_is_nan(temperature: float) -> None:
    values = laws(3, 300)
    values[1, 17] = torch.nan
    assert int(Draw(temperature=temperature)(values, torch.full((3,), 0.5).double())[1]) == 17
