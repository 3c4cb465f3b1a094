"""How much is masked when: noise schedules, and how diffusion times are drawn over the global batch.

A masked-diffusion process keeps each token with probability alpha(t) and masks it otherwise, independently; alpha falls
from alpha(0) = 1 to alpha(1) = 0. The continuous-time NELBO weighs the cross entropy of the tokens masked at time t by
`weight(t)` = -alpha'(t) / (1 - alpha(t)) (Sahoo et al., MDLM, arXiv 2406.07524, eq. 10; Shi et al., MD4, arXiv
2406.04329). Its value does not depend on the schedule; only the variance of its estimate does.

Times of one step are drawn together, as a function of (seed, global row number, global batch) alone: which process or
micro-batch holds a row changes nothing, and the strata are shuffled in every step so that a row's place in the batch
says nothing about its noise. Read next: `corrupt.py`.
"""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Float64, Int, Int64
from torch import Tensor

from mdlm.rng import counter_uniform, hash_counters

TimeSampling = Literal["uniform", "antithetic", "low_discrepancy", "stratified"]

_TIMES = 0x74696D65  # stream tags: the same (seed, row) must give unrelated numbers for unrelated purposes
_STRATA = 0x73747261
_LARGE = 4096  # places of a step from which sorting them costs more than keeping them


def unknown_name(what: str, name: str, allowed: Iterable[str]) -> ValueError:
    """The error for a name that is not in a registry: what came, what is allowed, and the nearest one."""
    names = list(allowed)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {what} {name!r}; allowed: {', '.join(names)}{hint}")


@dataclass(frozen=True)
class NoiseSchedule(ABC):
    """alpha(t) for t in (0, 1]; t = 1 masks everything. All maths is float64, whatever comes in."""

    @abstractmethod
    def mask_prob(self, t: Tensor) -> Float64[Tensor, "..."]:
        """1 - alpha(t): the probability that a token is masked at time t."""

    @abstractmethod
    def dalpha(self, t: Tensor) -> Float64[Tensor, "..."]:
        """alpha'(t) <= 0."""

    @abstractmethod
    def weight(self, t: Tensor) -> Float64[Tensor, "..."]:
        """-alpha'(t) / (1 - alpha(t)) >= 0: the NELBO's weight; finite for every t > 0."""

    @abstractmethod
    def time(self, mask_prob: Tensor) -> Float64[Tensor, "..."]:
        """The t in [0, 1] at which tokens are masked with probability `mask_prob`: the inverse of `mask_prob`."""

    def alpha(self, t: Tensor) -> Float64[Tensor, "..."]:
        """The probability that a token is still visible at time t."""
        return 1.0 - self.mask_prob(t)


@dataclass(frozen=True)
class Linear(NoiseSchedule):
    """alpha = 1 - t: t is the mask probability and the weight is 1/t.

    The schedule of LLaDA (arXiv 2502.09992) and the one MDLM calls log-linear (linear in alpha; its rate
    sigma = -log(1 - t) is the log of something linear). Not MDLM's "linear", which is linear in sigma.
    """

    def mask_prob(self, t: Tensor) -> Float64[Tensor, "..."]:
        """t itself."""
        return t.double()

    def dalpha(self, t: Tensor) -> Float64[Tensor, "..."]:
        """-1."""
        return torch.full_like(t.double(), -1.0)

    def weight(self, t: Tensor) -> Float64[Tensor, "..."]:
        """1 / t."""
        return 1.0 / t.double()

    def time(self, mask_prob: Tensor) -> Float64[Tensor, "..."]:
        """The mask probability itself."""
        return mask_prob.double()


@dataclass(frozen=True)
class Cosine(NoiseSchedule):
    """alpha = 1 - cos(pi/2 (1 - t)): most of the time is spent at high mask probability (MD4; MaskGIT).

    Not the alpha = cos(pi t / 2) that some code bases call cosine: that one spends its time at low mask probability.
    """

    def mask_prob(self, t: Tensor) -> Float64[Tensor, "..."]:
        """sin(pi t / 2), the accurate form of cos(pi/2 (1 - t)) near t = 0."""
        return torch.sin(0.5 * math.pi * t.double())

    def dalpha(self, t: Tensor) -> Float64[Tensor, "..."]:
        """-pi/2 cos(pi t / 2)."""
        return -0.5 * math.pi * torch.cos(0.5 * math.pi * t.double())

    def weight(self, t: Tensor) -> Float64[Tensor, "..."]:
        """pi/2 cot(pi t / 2); zero at t = 1."""
        return 0.5 * math.pi / torch.tan(0.5 * math.pi * t.double())

    def time(self, mask_prob: Tensor) -> Float64[Tensor, "..."]:
        """2/pi arcsin(mask_prob)."""
        return torch.asin(mask_prob.double()) * (2.0 / math.pi)


@dataclass(frozen=True)
class Polynomial(NoiseSchedule):
    """alpha = 1 - t^power; the weight is power / t (MD4). `power` = 1 is `Linear`.

    A power of at most 1/2 gives the NELBO's estimate infinite variance unless times are clipped away from 0.
    """

    power: float = 2.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.power) and self.power > 0):
            raise ValueError(f"the power of a polynomial schedule must be a positive number, got {self.power!r}")

    def mask_prob(self, t: Tensor) -> Float64[Tensor, "..."]:
        """t^power."""
        return t.double() ** self.power

    def dalpha(self, t: Tensor) -> Float64[Tensor, "..."]:
        """-power t^(power - 1)."""
        return -self.power * t.double() ** (self.power - 1.0)

    def weight(self, t: Tensor) -> Float64[Tensor, "..."]:
        """power / t."""
        return self.power / t.double()

    def time(self, mask_prob: Tensor) -> Float64[Tensor, "..."]:
        """mask_prob^(1 / power)."""
        return mask_prob.double() ** (1.0 / self.power)


SCHEDULES: dict[str, type[NoiseSchedule]] = {"linear": Linear, "cosine": Cosine, "polynomial": Polynomial}


def make_schedule(name: str, power: float | None = None) -> NoiseSchedule:
    """The schedule called `name`; `power` belongs to `polynomial` alone (None = its default, 2).

    Raises ValueError for an unknown name, or a power that the schedule would not use.
    """
    if name not in SCHEDULES:
        raise unknown_name("schedule", name, SCHEDULES)
    if power is None:
        return SCHEDULES[name]()
    if name != "polynomial":
        raise ValueError(f"schedule {name!r} has no power (got {power}); only 'polynomial' has one: leave it out")
    return Polynomial(power)


def nelbo_weight(schedule: NoiseSchedule, t: Tensor, eps: float, t_max: float = 1.0) -> Float64[Tensor, "..."]:
    """The NELBO's weight for t uniform in (eps, t_max], where masks are drawn independently.

    The expectation of weight * (share of masked tokens) is 1 for every eps: the loss of the times left out is taken to
    be that of the others, so uniform logits cost log V exactly. With eps = 0 this is `schedule.weight`.
    """
    low, high = schedule.mask_prob(torch.tensor([eps, t_max], dtype=torch.float64)).tolist()
    return schedule.weight(t) * ((t_max - eps) / (high - low))


def exact_counts(
    schedule: NoiseSchedule,
    t: Float64[Tensor, "batch"],
    maskable: Int[Tensor, "batch"],
    eps: float,
    t_max: float = 1.0,
) -> tuple[Int64[Tensor, "batch"], Float64[Tensor, "batch"]]:
    """How many of `maskable` tokens to mask at time t uniform in (eps, t_max], and the NELBO's weight for that count.

    k = ceil(mask_prob(t) * n) of n tokens, all sets of k alike, weight 1 / (k P(k)): n / k for the linear schedule
    (LLaDA's likelihood estimate, arXiv 2502.09992, section 2.4). It is the NELBO with time integrated out given the
    masks, so its expectation is the same and its variance smaller: uniform logits cost log V in every draw.
    A row without maskable tokens gets count and weight 0.
    """
    n = maskable.double()
    size = n.clamp(min=1.0)
    k = torch.minimum(torch.ceil(schedule.mask_prob(t) * n).clamp(min=1.0), n)
    upper = schedule.time(k / size).clamp(max=t_max)
    times = upper - schedule.time((k - 1.0).clamp(min=0.0) / size).clamp(min=eps)
    low, high = schedule.mask_prob(torch.tensor([eps, t_max], dtype=torch.float64)).tolist()
    reached = torch.ceil(high * n) - torch.floor(low * n)
    weight = n / reached * (t_max - eps) / (k.clamp(min=1.0) * times)
    return k.long(), torch.where(n > 0, weight, 0.0)


def discrete_times(
    schedule: NoiseSchedule, t: Tensor, steps: int
) -> tuple[Float64[Tensor, "..."], Float64[Tensor, "..."]]:
    """Times moved up to the grid {1/steps, ..., 1}, and the weight of the discrete-time NELBO there.

    For t uniform in (0, 1] the expectation of weight * (cross entropy of the masked tokens at the grid time) is the
    NELBO of a reverse process with `steps` steps, sum_i (alpha(t_{i-1}) - alpha(t_i)) / (1 - alpha(t_i)) * CE(t_i)
    (MDLM, eq. 8). It is an upper sum of the continuous one for a denoiser that is exact.
    """
    if steps < 1:
        raise ValueError(f"a discrete-time process needs at least one step, got {steps}")
    index = torch.ceil(t.double() * steps).clamp(1, steps)
    grid = index / steps
    here, before = schedule.mask_prob(grid), schedule.mask_prob((index - 1) / steps)
    return grid, steps * (here - before) / here


def _places(rows: Int[Tensor, "batch"], global_batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Step of each row, and its place in that step's own permutation of the global batch."""
    steps, inverse = torch.unique(rows // global_batch, return_inverse=True)
    if global_batch < _LARGE or rows.device.type != "cpu":
        order = _order(seed, steps, global_batch)
    else:  # the micro-batches of a step share it
        order = torch.stack([_large_order(seed, step, global_batch) for step in steps.tolist()])
    return steps[inverse], order[inverse, rows % global_batch]


def _order(seed: int, steps: Int64[Tensor, "steps"], size: int) -> Int64[Tensor, "steps size"]:
    keys = hash_counters(seed, _STRATA, steps[:, None], torch.arange(size, device=steps.device))
    return keys.argsort(dim=1, stable=True)


@lru_cache(maxsize=4)
def _large_order(seed: int, step: int, size: int) -> Int64[Tensor, "size"]:
    return _order(seed, torch.tensor([step]), size)[0]


def _uniform(rows: Int[Tensor, "batch"], global_batch: int, seed: int) -> Float64[Tensor, "batch"]:
    """Independent draws."""
    return counter_uniform(seed, _TIMES, rows)


def _antithetic(rows: Int[Tensor, "batch"], global_batch: int, seed: int) -> Float64[Tensor, "batch"]:
    """Random pairs (u, 1 - u); the odd one out of an odd batch stands alone."""
    step, place = _places(rows, global_batch, seed)
    u = counter_uniform(seed, _TIMES, step, place // 2)
    return torch.where(place % 2 == 0, u, 1.0 - u)


def _low_discrepancy(rows: Int[Tensor, "batch"], global_batch: int, seed: int) -> Float64[Tensor, "batch"]:
    """One draw per stratum at a common offset: an even grid, shifted at random (Kingma et al., VDM, appendix I.1)."""
    step, place = _places(rows, global_batch, seed)
    return (place + counter_uniform(seed, _TIMES, step)) / global_batch


def _stratified(rows: Int[Tensor, "batch"], global_batch: int, seed: int) -> Float64[Tensor, "batch"]:
    """One independent draw inside each stratum (what MDLM's code calls antithetic sampling)."""
    step, place = _places(rows, global_batch, seed)
    return (place + counter_uniform(seed, _TIMES, step, place)) / global_batch


TIME_SAMPLING: dict[str, Callable[[Int[Tensor, "batch"], int, int], Float64[Tensor, "batch"]]] = {
    "uniform": _uniform,
    "antithetic": _antithetic,
    "low_discrepancy": _low_discrepancy,
    "stratified": _stratified,
}


def draw_times(
    rows: Int[Tensor, "batch"], global_batch: int, seed: int, kind: str, eps: float, t_max: float = 1.0
) -> Float64[Tensor, "batch"]:
    """Diffusion times of the rows with these global numbers, each uniform in (eps, t_max].

    Row r belongs to step r // global_batch; the draws of one step are stratified together as `kind` says
    (`TIME_SAMPLING`), whichever of its rows are asked for here. Raises ValueError for an unknown kind, an empty range
    or a global batch below 1.
    """
    if kind not in TIME_SAMPLING:
        raise unknown_name("sampling of times", kind, TIME_SAMPLING)
    if global_batch < 1:
        raise ValueError(f"the global batch must hold at least one row, got {global_batch}")
    if not 0.0 <= eps < t_max <= 1.0:
        raise ValueError(f"times are drawn from (eps, t_max] inside (0, 1]; got eps={eps}, t_max={t_max}")
    return eps + (t_max - eps) * TIME_SAMPLING[kind](rows.long(), global_batch, seed)
