"""The NELBO as an exact expectation on toys: time by quadrature, masks by enumeration, in float64, no Monte Carlo."""

from __future__ import annotations

import itertools
import math

import pytest
import reference
import torch
from torch import Tensor

from mdlm.corrupt import mask_tokens
from mdlm.eval.sources import CopySource, ExactSource, MarkovSource, TabularSource
from mdlm.schedule import SCHEDULES, discrete_times, exact_counts, make_schedule

LENGTH, VOCAB = 4, 3


def _source(name: str, length: int = LENGTH, vocab: int = VOCAB) -> ExactSource:
    generator = torch.Generator().manual_seed(8)
    if name == "tabular":
        return TabularSource.random(length, vocab, generator)
    if name == "markov":
        return MarkovSource.random(length, vocab, generator)
    return CopySource(torch.rand(vocab, generator=generator).double().softmax(0), length)


def _nll_of(source: ExactSource, x: Tensor) -> reference.Nll:
    """The product denoiser's negative log-probabilities for one sequence, per mask configuration."""

    def nll(masked: tuple[int, ...]) -> dict[int, float]:
        tokens = x.clone()
        tokens[list(masked)] = source.mask_token_id
        log_probs = source(tokens[None])[0]
        return {i: -float(log_probs[i, x[i]]) for i in masked}

    table = {masked: nll(masked) for masked in reference.configurations(range(x.numel()))}
    return table.__getitem__


@pytest.mark.parametrize("name", ["tabular", "markov", "copy"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_expected_loss_of_an_exact_denoiser_is_the_negative_log_likelihood(name: str, schedule: str) -> None:
    """No Monte Carlo: integral over t by quadrature, over masks by enumeration, with and without the forced mask."""
    source, product = _source(name), make_schedule(schedule)
    for x in source.sample(3, torch.Generator().manual_seed(1)):
        nll, exact = _nll_of(source, x), -float(source.log_prob(x[None]))
        assert reference.order_averaged_nelbo(nll, range(LENGTH)) == pytest.approx(exact, abs=1e-10)

        def plain(t: float, nll: reference.Nll = nll) -> float:
            time = torch.tensor(t, dtype=torch.float64)
            return float(product.weight(time)) * reference.masked_nll(
                nll, range(LENGTH), float(product.mask_prob(time))
            )

        def forced(t: float, nll: reference.Nll = nll) -> float:
            time = torch.tensor(t, dtype=torch.float64)
            p = float(product.mask_prob(time))
            importance = _importance(p)
            return float(product.weight(time)) * sum(
                reference.forced_probability(m, LENGTH, p) * importance[len(m)] * sum(nll(m).values())
                for m in reference.configurations(range(LENGTH))
                if m
            )

        assert reference.quadrature(plain, 0.0, 1.0) == pytest.approx(exact, abs=1e-9)
        assert reference.quadrature(forced, 0.0, 1.0) == pytest.approx(exact, abs=1e-9)
        by_count = 0.0
        for count in range(1, LENGTH + 1):
            ends = product.time(torch.tensor([count - 1, count]).double() / LENGTH)
            k, weight = exact_counts(product, ends.mean()[None], torch.tensor([LENGTH]), 0.0)
            assert int(k) == count
            sets = [sum(nll(m).values()) for m in itertools.combinations(range(LENGTH), count)]
            by_count += float((ends[1] - ends[0]) * weight) * sum(sets) / len(sets)
        assert by_count == pytest.approx(exact, abs=1e-9)


def _importance(p: float) -> dict[int, float]:
    """What the product says for each number of masked tokens (found by drawing until each was seen)."""
    rows = 64
    probability = torch.full((rows,), p, dtype=torch.float64)
    ones = torch.ones(rows, LENGTH, dtype=torch.long)
    draw = mask_tokens(ones, ones.bool(), probability, torch.arange(rows), 0, 0)
    seen = {int(k): float(i) for k, i in zip(draw.masked.sum(1), draw.importance, strict=True)}
    single = mask_tokens(ones[:1], ones[:1].bool().tril(), probability[:1], torch.zeros(1).long(), 0, 0)
    assert int(single.masked.sum()) == 1
    lone = LENGTH * p / (LENGTH * p + 1 - p)
    assert seen.get(1, lone) == pytest.approx(lone, rel=1e-12)
    assert all(value == 1.0 for count, value in seen.items() if count > 1)
    return {1: lone, **{count: 1.0 for count in range(2, LENGTH + 1)}}


@pytest.mark.parametrize("name", ["tabular", "markov", "copy"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_discrete_time_falls_to_the_continuous_value(name: str, schedule: str) -> None:
    """Expected over the source: T = 1 costs the sum of the marginal entropies, T -> infinity the entropy."""
    source, product = _source(name), make_schedule(schedule)
    sequences = torch.cartesian_prod(*[torch.arange(VOCAB)] * LENGTH)
    sequences = sequences[source.log_prob(sequences) > -math.inf]
    law = source.log_prob(sequences).exp().tolist()
    nlls = [_nll_of(source, x) for x in sequences]
    values = {}
    for steps in (1, 2, 4, 8, 64, 256):
        middle = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
        grid, weight = discrete_times(product, middle, steps)
        probabilities, weights = product.mask_prob(grid).tolist(), (weight / steps).tolist()
        # The expectation is linear: mix the sequences first, then go through the steps.
        mixed = {
            masked: {0: sum(q * sum(nll(masked).values()) for q, nll in zip(law, nlls, strict=True))}
            for masked in reference.configurations(range(LENGTH))
        }
        values[steps] = sum(
            w * reference.masked_nll(mixed.__getitem__, range(LENGTH), p)
            for w, p in zip(weights, probabilities, strict=True)
        )
        expected = reference.discrete_nelbo(mixed.__getitem__, range(LENGTH), reference.ALPHAS[schedule], steps)
        assert values[steps] == pytest.approx(expected, abs=1e-9)
    exact = source.entropy()
    marginals = source(torch.full((1, LENGTH), source.mask_token_id))[0, :, :VOCAB].exp()
    assert values[1] == pytest.approx(sum(reference.entropy(m.tolist()) for m in marginals), abs=1e-9)
    falling = list(values.values())
    assert all(a > b for a, b in itertools.pairwise(falling))
    assert falling[-1] > exact
    assert falling[-1] - exact < 4.5 / 256 * (falling[0] - exact)  # the gap closes like 1 / T
