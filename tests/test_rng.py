"""Counter-based random numbers: bit for bit as defined, uniform, and independent across every kind of key."""

from __future__ import annotations

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from mdlm import rng
from mdlm.rng import counter_uniform, hash_counters

INT64 = st.integers(min_value=-(2**63), max_value=2**63 - 1)


@given(st.lists(st.tuples(INT64, st.booleans()), min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_hash_equals_the_definition_in_unbounded_integers(counters: list[tuple[int, bool]]) -> None:
    """Of plain numbers, of tensors and of both; by the arithmetic of tensors too, which another device would use."""
    mixed = [torch.tensor([number]) if as_tensor else number for number, as_tensor in counters]
    expected = reference.splitmix_hash(*(number for number, _ in counters))
    signed = expected - 2**64 if expected >= 2**63 else expected
    assert hash_counters(*mixed).flatten().tolist() == [signed]
    assert hash_counters(*(torch.tensor(number) for number, _ in counters)).tolist() == signed
    assert int(rng._hashed(mixed)) == signed


def test_uniform_is_the_top_52_bits_and_never_0_or_1() -> None:
    for key in [(0,), (1, 2), (-5, 7, 9)]:
        assert float(counter_uniform(*key)) == ((reference.splitmix_hash(*key) >> 12) + 0.5) / 2.0**52
    u = counter_uniform(3, torch.arange(1_000_000))
    assert u.dtype == torch.float64
    assert 0.0 < float(u.min()) < 1e-4
    assert 1.0 - 1e-4 < float(u.max()) < 1.0


def test_shapes_broadcast_and_each_value_depends_on_its_own_key_alone() -> None:
    rows, positions = torch.tensor([5, 0, 10**12]), torch.tensor([0, 3])
    table = counter_uniform(7, rows[:, None], positions)
    assert table.shape == (3, 2)
    for i, row in enumerate(rows.tolist()):
        for j, position in enumerate(positions.tolist()):
            assert float(table[i, j]) == float(counter_uniform(7, row, position))


def test_order_of_counters_matters() -> None:
    assert int(hash_counters(1, 2)) != int(hash_counters(2, 1))
    assert int(hash_counters(1)) != int(hash_counters(1, 0)) != int(hash_counters(0, 1))


def test_no_collisions_among_a_million_neighbouring_keys() -> None:
    keys = hash_counters(torch.arange(10)[:, None, None], torch.arange(1000)[:, None], torch.arange(100))
    assert keys.unique().numel() == keys.numel()


STREAMS = {
    "rows": lambda n: counter_uniform(0, torch.arange(n), 0),
    "positions": lambda n: counter_uniform(0, 0, torch.arange(n)),
    "seeds": lambda n: counter_uniform(torch.arange(n), 0, 0),
    "powers of two": lambda n: counter_uniform(1, torch.arange(n) << 20),
    "negative": lambda n: counter_uniform(-torch.arange(n)),
}


@pytest.mark.parametrize("name", STREAMS)
def test_each_counter_alone_gives_uniform_uncorrelated_numbers(name: str) -> None:
    u: Tensor = STREAMS[name](100_000)
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-4
    centred = (u - 0.5) * 12**0.5
    for lag in (1, 2, 3, 8, 256):
        correlation = float((centred[lag:] * centred[:-lag]).mean())
        assert abs(correlation) * (u.numel() - lag) ** 0.5 < 4.5, lag
    # Pairs of neighbours fill the unit square evenly.
    cells = ((u[::2] * 16).long() * 16 + (u[1::2] * 16).long()).bincount(minlength=256)
    assert stats.chisquare(cells.numpy()).pvalue > 1e-4


def test_every_bit_is_fair_and_flips_when_any_input_bit_flips() -> None:
    keys = torch.arange(20_000)
    base = hash_counters(9, keys)
    bits = (base[:, None] >> torch.arange(64)) & 1
    assert float((bits.double().mean(0) - 0.5).abs().max()) < 4.5 * 0.5 / 20_000**0.5
    for flipped in (0, 1, 17, 40, 62):
        change = base ^ hash_counters(9, keys ^ (1 << flipped))
        rate = ((change[:, None] >> torch.arange(64)) & 1).double().mean(0)
        assert float((rate - 0.5).abs().max()) < 4.8 * 0.5 / 20_000**0.5, flipped


def test_streams_of_different_seeds_and_rows_are_independent() -> None:
    table = counter_uniform(torch.arange(60)[:, None], torch.arange(4000)) - 0.5
    correlation = torch.corrcoef(table)
    off = correlation[~torch.eye(60, dtype=torch.bool)]
    assert float(off.abs().max()) < 5.5 / 4000**0.5
    assert float(off.std()) == pytest.approx(1 / 4000**0.5, rel=0.05)
