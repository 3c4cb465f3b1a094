"""Learning-rate schedules against closed forms."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from mdlm.training.lr import SHAPES, LRSchedule


@pytest.mark.parametrize("kind", SHAPES)
def test_warmup_is_linear_and_ends_at_the_peak(kind: Any) -> None:
    schedule = LRSchedule(kind=kind, warmup_steps=4, final=0.1)
    assert [schedule.factor(step, 100) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_never_rises_after_warmup_and_stays_above_final(kind: Any, final: float) -> None:
    schedule = LRSchedule(kind=kind, warmup_steps=10, final=final)
    factors = [schedule.factor(step, 200) for step in range(10, 200)]
    assert factors[0] == 1.0
    assert all(a >= b for a, b in itertools.pairwise(factors))
    assert factors[-1] > 0.0
    assert min(factors) >= final
    assert (
        schedule.factor(200, 200) == schedule.factor(5000, 200) == pytest.approx(1.0 if kind == "constant" else final)
    )


def test_closed_forms() -> None:
    def at(kind: Any, step: int) -> float:
        return LRSchedule(kind=kind, warmup_steps=20, final=0.2, decay_fraction=0.25).factor(step, 120)

    assert at("linear", 70) == pytest.approx(0.2 + 0.8 * 0.5)
    assert at("cosine", 45) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert at("wsd", 95) == 1.0  # three quarters of the 100 steps after warm-up are stable
    assert at("wsd", 107) == pytest.approx(0.2 + 0.8 * 13 / 25)
    assert at("constant", 119) == 1.0


def test_warmup_as_a_fraction_follows_the_length_of_the_run() -> None:
    schedule = LRSchedule(kind="constant", warmup_fraction=0.1)
    assert schedule.warmup(200) == 20
    assert schedule.factor(9, 200) == pytest.approx(0.5)
    assert schedule.factor(9, 100) == 1.0


def test_a_warmup_longer_than_the_run_is_only_warmup() -> None:
    assert LRSchedule(warmup_steps=100).factor(9, 10) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "cosinus"),
        ("warmup_steps", -1),
        ("warmup_fraction", 1.0),
        ("final", 1.5),
        ("decay_fraction", 0.0),
    ],
)
def test_bad_values_name_the_flag(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"--lr_schedule\.{field} is .*must|fraction of the peak"):
        LRSchedule(**{field: value})


def test_two_warmups_are_refused() -> None:
    with pytest.raises(ValueError, match="both set the warm-up"):
        LRSchedule(warmup_steps=5, warmup_fraction=0.1)
