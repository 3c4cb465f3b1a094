"""Rules that remember: how a prediction has changed since the last step, and what it has been before.

- `Stability`: a scorer that holds back positions whose prediction still moves (SWD, Wu & Huang, 2604.17068);
- `StableThreshold`: sure and at rest for some steps (KLASS, 2511.05664);
- `Credit`: a transform that adds up past confidence in a token (CreditDecoding, 2510.06133).

All of it lives in the run's memory, per row, and begins anew with every block: two runs, two requests or two blocks
never see each other's. Read next: `saber.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mdlm.passes import divergences, largest, per_row, row_sum
from mdlm.samplers.scores import Scorer
from mdlm.samplers.select import Looking, at_least_one_of, within
from mdlm.samplers.select_adaptive import highest, log_threshold
from mdlm.samplers.state import RowMemory, Step

UNKNOWN = 1e30
"""A divergence that no finite threshold exceeds: there is no previous prediction."""

Direction = Literal["prev_now", "now_prev"]


@dataclass
class Predictions:
    """The predictions of the step before, where they were. The packed tensor is kept, not copied."""

    log_probs: Float[Tensor, "rows vocab"]
    number: Int64[Tensor, "batch seq"]
    """Row of `log_probs` at each position; -1 where nothing was predicted."""

    def keep(self, rows: Int64[Tensor, " batch"]) -> Predictions:
        """See `Memory`."""
        return Predictions(self.log_probs, self.number[rows])


def divergence_from_previous(component: object, step: Step, direction: Direction) -> Float[Tensor, " rows"]:
    """KL in nats between each prediction and that of the same position one step ago; `UNKNOWN` where there is none.

    `prev_now` is KL(previous || now), `now_prev` KL(now || previous); see `divergences`. Remembers this step's
    predictions under `component`: call once a step.
    """
    state = step.state
    nothing = torch.full_like(state.tokens, -1)
    memory = step.remember((component, "predictions"), lambda: Predictions(step.log_probs[:0], nothing))
    assert isinstance(memory, Predictions)
    # What is decided predicts itself; if it is masked again, that is no previous prediction.
    number = step.dense(torch.arange(len(step.log_probs), device=nothing.device), -1)
    previous, old = step.packed(memory.number.masked_fill((state.block_step == 0)[:, None], -1)), memory.log_probs
    memory.number = torch.where(step.candidates, number, -1)
    memory.log_probs = step.log_probs
    known = previous >= 0
    result = torch.full_like(step.best[0], UNKNOWN)
    now = known.nonzero()[:, 0]
    if direction == "prev_now":
        result[now] = divergences(old, step.log_probs, previous[now], now)
    else:
        result[now] = divergences(step.log_probs, old, now, previous[now])
    return result


def divergence_from_uniform(step: Step, direction: Direction) -> Float[Tensor, " rows"]:
    """KL in nats of each prediction and the uniform law over the tokens it allows, the uniform one as `prev`."""

    def count(block: Float[Tensor, "block vocab"]) -> Float[Tensor, " block"]:
        return row_sum(block.clone().gt_(-torch.inf))

    tokens = per_row(step.log_probs, count)
    if direction == "now_prev":
        return (tokens.log() - step.entropy).clamp(min=0)
    total = per_row(step.log_probs, lambda block: row_sum(block.nan_to_num(neginf=0.0)))
    return (-tokens.log() - total / tokens).clamp(min=0)


@dataclass(frozen=True)
class Stability:
    """`base` - `lam` * KL between the last prediction and this one: stability-weighted decoding (2604.17068).

    In log space that is the paper's factor exp(-lam * KL) on the score, for any base score and any selector. A
    heuristic against tokens that still flicker, no guarantee: the KL bounds the dependence on masked context from below
    only, so a prediction may stand still and yet depend on a masked neighbour (`tests/test_sampler_history.py` has the
    example).

    `direction`: `prev_now` = KL(previous || now), as in the paper's algorithm; `now_prev` as in its proof. `first`: a
    position without a previous prediction (the first step of a block) is compared with the uniform law, or not at all.
    The paper's `lam` is not published for all settings; tune it.
    """

    base: Scorer
    lam: float = 1.0
    direction: Direction = "prev_now"
    first: Literal["uniform", "skip"] = "uniform"

    def __post_init__(self) -> None:
        if not (self.lam >= 0 and math.isfinite(self.lam)):
            raise ValueError(f"lam is {self.lam}; it must be 0 (no weighting) or a positive number")
        if self.direction not in ("prev_now", "now_prev"):
            raise ValueError(f"direction is {self.direction!r}; it must be 'prev_now' or 'now_prev'")
        if self.first not in ("uniform", "skip"):
            raise ValueError(f"first is {self.first!r}; it must be 'uniform' or 'skip'")

    def __call__(self, step: Step) -> Float[Tensor, " rows"]:
        """See `Scorer`."""
        score = self.base(step)
        if self.lam == 0:
            return score
        moved = divergence_from_previous(self, step, self.direction)
        new = moved == UNKNOWN
        if self.first == "skip":
            moved = moved.masked_fill(new, 0.0)
        elif bool(new.any()):
            moved = torch.where(new, divergence_from_uniform(step, self.direction), moved)
        return score - self.lam * moved


@dataclass(frozen=True)
class StableThreshold(Looking):
    """KLASS (2511.05664): every position with score > log(`threshold`) whose prediction has moved by less than `tau_kl`
    nats, KL(now || previous), in each of the last `n` steps of the block; if there is none, the `quota` highest scores.

    The first step of a block has nothing to compare with, which no finite `tau_kl` accepts; with an infinite one the
    gate is closed for the first n - 1 steps only.
    """

    threshold: float = 0.6
    tau_kl: float = 0.015
    n: int = 2
    quota: int = 1

    def __post_init__(self) -> None:
        at_least_one_of("threshold", self.threshold, 0)
        at_least_one_of("tau_kl", self.tau_kl, 0)
        at_least_one_of("n", self.n, 1)
        at_least_one_of("quota", self.quota, 1)

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        moved = step.dense(divergence_from_previous(self, step, "now_prev"), UNKNOWN)
        unknown = torch.full((*moved.shape, self.n), UNKNOWN, dtype=moved.dtype, device=moved.device)
        memory = step.remember((self, "moved"), lambda: RowMemory({"moved": unknown}))
        assert isinstance(memory, RowMemory)
        # A new block needs no reset: in its first step everything is unknown, and stays in sight for n steps.
        memory["moved"] = torch.cat([memory["moved"][:, :, 1:], moved[:, :, None]], dim=-1)
        rest = (memory["moved"] < self.tau_kl).all(dim=-1) & (step.state.block_step >= self.n - 1)[:, None]
        ready = rest & (scores > log_threshold(self.threshold))
        if self.quota == 1:
            return ready  # the driver commits the best where there is none
        quota = highest(scores, torch.full_like(step.state.rows, self.quota))
        return torch.where(ready.any(dim=-1, keepdim=True), ready, quota)


@dataclass(frozen=True)
class Credit:
    """log-probabilities + `alpha` * log(1 + E): CreditDecoding (2510.06133), a transform.

    In every step of a block the credit E of all tokens fades by `decay`, and the most probable token of each undecided
    position gains p^`gamma`. A token that has led for some steps passes a threshold earlier. E is stored sparsely: at
    most one new token per position and step. Confidences and `Generation.log_probs` are those of the fused law.
    """

    alpha: float = 0.7
    gamma: float = 0.2
    decay: float = 0.8
    normalised: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least_one_of("alpha", self.alpha, 0)
        at_least_one_of("gamma", self.gamma, 0)
        within("decay", self.decay, 0, 1)

    def __call__(self, log_probs: Float[Tensor, "rows vocab"], step: Step) -> Float[Tensor, "rows vocab"]:
        """See `Transform`."""
        if self.alpha == 0:
            return log_probs
        state = step.state
        none = {
            "token": torch.zeros((*state.tokens.shape, 0), dtype=torch.int64, device=log_probs.device),
            "credit": torch.zeros((*state.tokens.shape, 0), dtype=torch.float64, device=log_probs.device),
            "used": torch.zeros_like(state.tokens),
        }
        memory = step.remember(self, lambda: RowMemory(none))
        assert isinstance(memory, RowMemory)
        fresh = (state.block_step == 0)[:, None]
        width = int(state.block_step.max()) + 1  # slots: at most one is taken per step of a block
        token = _resized(memory["token"], width)
        credit = (self.decay * _resized(memory["credit"], width)).masked_fill(fresh[:, :, None], 0.0)
        used = memory["used"].masked_fill(fresh, 0)

        row, position = step.index
        value, best = largest(log_probs)
        slots = torch.arange(width, device=best.device)
        same = (token[row, position] == best[:, None]) & (slots < used[row, position][:, None])
        slot = torch.where(same.any(dim=-1), same.int().argmax(dim=-1), used[row, position])
        gains = step.candidates[row, position]
        row, position, slot, best, value = row[gains], position[gains], slot[gains], best[gains], value[gains]
        token[row, position, slot] = best
        credit[row, position, slot] += (self.gamma * value.double()).exp()
        used[row, position] = torch.maximum(used[row, position], slot + 1)
        memory["token"], memory["credit"], memory["used"] = token, credit, used

        token, bonus = token[step.index], self.alpha * torch.log1p(credit[step.index])
        # The new total is 1 + sum of p (e^bonus - 1) over the tokens with credit. Summed in order: how many slots there
        # are depends on the other rows.
        raised = log_probs.gather(-1, token).double() + bonus
        shift = raised.amax(dim=-1, keepdim=True).clamp(min=0.0)
        gains = (raised - shift).exp().mul_(-torch.expm1(-bonus)).cumsum(dim=-1)
        total = shift + torch.log(gains[:, -1:] + torch.exp(-shift))
        raised = (raised - total).to(log_probs.dtype)
        fused = log_probs - total.to(log_probs.dtype)
        return fused.scatter_reduce_(-1, token, raised, "amax")  # an unused slot raises nothing


def _resized(tensor: Tensor, width: int) -> Tensor:
    """A copy with `width` slots on the last axis: zeros added, or unused ones cut off."""
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1])).clone()
