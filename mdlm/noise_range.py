"""Which noise levels to train on: the range under which the loss varies least, found on data (BD3-LM, 2503.09573).

A block that is masked almost nowhere or almost everywhere says little and costs much variance; for short blocks that is
what keeps block diffusion behind causal models. So BD3-LM trains on times from (eps, t_max] only, and looks for the
range on the validation text again and again while it trains: for every block size another one (section 5 there).

Here every row or block of the text is noised once, at times spread over the whole range. What it costs under a narrower
range is then known without another forward: the weight there times the loss that was measured, if its time lies inside.
What is compared is the variance of that cost over blocks, per token, without the part that comes from their length.
Read next: `training/noise_range.py`, which does this during a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from mdlm.block import units_of
from mdlm.rng import hash_counters

if TYPE_CHECKING:
    from mdlm.data import Batch
    from mdlm.objective import Objective

WIDTHS = (0.5, 0.6, 0.7, 0.8, 0.9)
STEP = 0.05
"""BD3-LM's grid: ranges of these widths, beginning at every multiple of the step."""
LEAST_UNITS = 32
"""Rows or blocks from which a variance is read off."""
_SEARCH = 0x72616E67  # stream tag, see schedule.py


@dataclass(frozen=True)
class LevelCosts:
    """What rows or blocks (units) with something to predict cost, each at one time. On the CPU."""

    numbers: Int64[Tensor, " units"]
    times: Float64[Tensor, " units"]
    maskable: Int64[Tensor, " units"]
    masked: Int64[Tensor, " units"]
    nats: Float64[Tensor, " units"]
    """Summed over the unit's masked tokens, without a weight."""


def ranges(low: float, high: float) -> list[tuple[float, float]]:
    """(low, high] itself, then the grid's inside it; those that stick out by less than half a step are cut."""
    inside = [(low, high)]
    for width in WIDTHS:
        for start in range(round((1.0 - width) / STEP) + 1):
            first, last = round(start * STEP, 2), round(start * STEP + width, 2)
            if first > low - STEP / 2 and last < high + STEP / 2:
                inside.append((max(first, low), min(last, high)))
    return list(dict.fromkeys(inside))


def measure(objective: Objective, model: Any, batches: Iterable[Batch], device: torch.device | str) -> LevelCosts:
    """The costs of all units of `batches` at times from the objective's range, always under the same noise.

    `model` as in `Objective.numerator`; the caller puts it into evaluation mode.
    """
    seed = int(hash_counters(objective.seed, _SEARCH))
    whole = replace(objective, seed=seed, sampling="stratified", warmup_steps=0)
    parts: dict[str, list[Tensor]] = {name: [] for name in LevelCosts.__dataclass_fields__}
    for batch in batches:
        noised = whole.noise(batch, 0)
        with torch.no_grad():
            nats = whole.token_nats(model, noised.to(device)).double().cpu()
        units = units_of(batch, whole.block_size, whole.global_batch)
        used = units.maskable.any(dim=1)
        columns = {
            "numbers": units.numbers,
            "times": noised.times,
            "maskable": units.maskable.sum(dim=1),
            "masked": units.per_unit(noised.masked).sum(dim=1),
            "nats": units.per_unit(nats).sum(dim=1),
        }
        for name, column in columns.items():
            parts[name].append(column[used])
    return LevelCosts(**{name: torch.cat(columns) for name, columns in parts.items()})


def merge(parts: Sequence[LevelCosts]) -> LevelCosts:
    """The costs that several processes measured, in an order that does not depend on who measured what."""
    order = torch.cat([part.numbers for part in parts]).argsort()
    return LevelCosts(
        **{name: torch.cat([getattr(part, name) for part in parts])[order] for name in LevelCosts.__dataclass_fields__}
    )


def variance(objective: Objective, costs: LevelCosts) -> float:
    """Variance over units of what one adds to the loss under the objective's range, per token: nats squared.

    Infinite where fewer than `LEAST_UNITS` have their time inside.
    """
    inside = (costs.times > objective.eps) & (costs.times <= objective.t_max)
    if int(inside.sum()) < LEAST_UNITS:
        return math.inf
    size = costs.maskable[inside]
    weight = objective.unit_weight(costs.times[inside], size, costs.masked[inside])
    cost = weight * costs.nats[inside]
    rest = cost - size * (cost.sum() / size.sum())
    return float(rest.square().sum() / (len(rest) - 1) / size.double().mean() ** 2)


def best_range(objective: Objective, costs: LevelCosts) -> tuple[Objective, float, float]:
    """The objective with the range inside its own under which the loss varies least; its variance, and that of its own.

    Ties go to the earlier range of `ranges`, its own first.
    """
    own = best = variance(objective, costs)
    chosen = objective
    for eps, t_max in ranges(objective.eps, objective.t_max):
        candidate = replace(objective, eps=eps, t_max=t_max)
        value = variance(candidate, costs)
        if value < best:
            chosen, best = candidate, value
    return chosen, best, own
