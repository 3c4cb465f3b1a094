"""Counter-based random numbers: a value depends on its key (seed, row, step, position, ...) and on nothing else.

A stateful generator makes a row's result depend on who was drawn before it: on batch neighbours, on padding, on the
number of processes. Here each uniform is a hash of integer counters, so the same key gives the same number in any
batch, on any process, after any resume. Mixing function: the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014), applied once per counter. Read next: `corrupt.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


Number = TypeVar("Number", int, np.ndarray, Tensor)
"""A 64-bit integer (signed), or many: plain numbers and arrays are hashed as such, because for a few hundred positions
a call of torch costs more than the arithmetic."""


def _wrapped(x: Number) -> Number:
    """`x` modulo 2^64; arrays and tensors wrap by themselves."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63) if isinstance(x, int) else x


def _shift_right(x: Number, bits: int) -> Number:
    """Logical right shift: `>>` of signed integers copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Number) -> Number:
    x = _wrapped((x ^ _shift_right(x, 30)) * _MIX1)
    x = _wrapped((x ^ _shift_right(x, 27)) * _MIX2)
    return x ^ _shift_right(x, 31)


def hash_counters(*counters: int | Tensor) -> Tensor:
    """64-bit hash (int64) of integer counters, broadcast against each other.

    Order matters: `hash_counters(seed, row, step)` is a stream apart from `hash_counters(seed, step, row)`.
    """
    assert counters, "at least one counter"
    device = next((c.device for c in counters if isinstance(c, Tensor)), None)
    with np.errstate(over="ignore"):
        state = _hashed([_operand(counter, device) for counter in counters])
    if isinstance(state, Tensor):
        return state
    return torch.from_numpy(np.asarray(state, dtype=np.int64)).to(device)


def _operand(counter: int | Tensor, device: torch.device | None) -> Any:
    """A counter as a number, an array where all of them lie on a CPU, or a tensor on `device`."""
    if not isinstance(counter, Tensor):
        assert -(2**63) <= counter < 2**63, f"{counter} has more than 64 bits"
        return int(counter)
    value = counter.to(device, torch.int64)
    return value.numpy() if value.device.type == "cpu" else value


def _hashed(values: Sequence[Any]) -> Any:
    state: Any = 0
    for value in values:
        state = _mix(_wrapped((state ^ _mix(_wrapped(value + _GOLDEN))) + _GOLDEN))
    return state


def counter_uniform(*counters: int | Tensor) -> Tensor:
    """Uniform float64 in the open interval (0, 1), shape = broadcast of the counters; never exactly 0 or 1."""
    bits = _shift_right(hash_counters(*counters), 12)  # 52 random bits: the half step below stays exact in float64
    return (bits.to(torch.float64) + 0.5) * 2.0**-52
