"""The training loss: NELBO of masked diffusion (MDLM) and of block diffusion (BD3-LM), other weights, reductions.

For a row x of n maskable tokens, a time t and a set M of masked positions drawn from the forward process,

    loss(x) = weight(t) * importance * sum over i in M of -log p(x_i | x with M masked)

where p has no mass on the mask id and visible tokens are carried over (SUBS, MDLM section 3.2.3), is an unbiased
estimate of the NELBO of x in nats (MDLM eq. 10; LLaDA eq. 3 is the same thing with t as the mask probability).
`importance` pays for the at-least-one-mask rule (`corrupt.py`).

A model with blocks (`config.block_size`) is trained by block diffusion: the same with x a block, each with a time of
its own, and p under the clean blocks before it (`block.py`), all blocks of a row in one forward over [x_t ; x_0].

Losses of public code bases are not comparable because their normalisers differ. Here a model with uniform logits over V
tokens has loss log V in expectation under every option, and the loss of a global batch does not depend on how it is
split: each micro-batch adds a `numerator` and a `denominator`, and whoever trains sums the denominators over
micro-batches and processes before dividing. Dividing a 1/t-weighted sum by the number of *masked* tokens, as some
public code does, is not among the options. Read next: `block.py`; then `eval/likelihood.py`, the quantity measured.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int
from torch import Tensor

from mdlm.anneal import Annealing, annealing_at
from mdlm.block import units_of
from mdlm.corrupt import lone_mask_importance, mask_count, mask_tokens
from mdlm.head_loss import Scored
from mdlm.modeling import head_rows
from mdlm.schedule import (
    TIME_SAMPLING,
    NoiseSchedule,
    TimeSampling,
    draw_times,
    exact_counts,
    make_schedule,
    nelbo_weight,
    unknown_name,
)
from mdlm.subs import subs_nll
from mdlm.weights import cart_weights, clipped_weights, complementary_weights

if TYPE_CHECKING:
    from mdlm.data import Batch

Masking = Literal["independent", "count"]
Weighting = Literal["nelbo", "llada", "cart", "none"]
Reduction = Literal["token_mean", "sequence_mean"]
BlockClip = Literal["off", "paper", "exact"]
Normaliser = Literal["maskable", "masked", "rows", "weight"]

MASKINGS = ("independent", "count")
WEIGHTINGS = ("nelbo", "llada", "cart", "none")
REDUCTIONS = ("token_mean", "sequence_mean")
BLOCK_CLIPS = ("off", "paper", "exact")


def _filled(masked: Bool[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq"]:
    """`masked` and the first other positions, until there are as many as the head computes anyway.

    Otherwise the model cuts its logits to size, and the backward of that cut copies all of them.
    """
    others = ~masked
    missing = head_rows(int(masked.sum()), masked.numel()) - masked.sum()
    return masked | (others & (others.flatten().cumsum(0).view_as(masked) <= missing))


@dataclass(frozen=True)
class NoisedBatch:
    """A `Batch` after the forward process: what the model sees, what it must say, and what each answer weighs."""

    input_ids: Int[Tensor, "batch seq"]
    targets: Int[Tensor, "batch seq"]
    masked: Bool[Tensor, "batch seq"]
    weight: Float32[Tensor, "batch seq"]
    """0 off the masked positions; includes the importance and, for a mean over sequences, 1 / (tokens of the row)."""
    attention_mask: Bool[Tensor, "batch seq"] | None
    position_ids: Int[Tensor, "batch seq"] | None
    rows: Int[Tensor, "batch"]
    times: Float64[Tensor, "units"]
    """Of each row; in block diffusion of each block (`block.units_of`)."""
    maskable_count: Int[Tensor, "batch"]
    normaliser: Normaliser
    """What `Objective.denominator` counts: maskable tokens, masked tokens, rows with any maskable token, or weights."""
    annealing: Annealing | None = None
    """What each token sees behind it, while a causal model learns to look there."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> NoisedBatch:
        """The same batch with every tensor on `device`."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=non_blocking)
            for field in fields(self)
            if isinstance(value := self.__dict__[field.name], (Tensor, Annealing))
        }
        return replace(self, **moved)


def _twice(batch: Batch) -> Batch:
    """Every row once more, behind all others."""
    both: dict[str, Any] = {name: None if x is None else torch.cat([x, x]) for name, x in batch.__dict__.items()}
    return replace(batch, **both)


@dataclass(frozen=True)
class LossTerms:
    """What one micro-batch adds to the loss of the global batch."""

    loss: Float32[Tensor, ""]
    """Differentiable weighted *sum*: divide by the denominators of the whole global batch."""
    nll_sum: Float64[Tensor, ""]
    """Plain sum of the masked tokens' negative log-likelihood, nats."""
    masked_count: Int[Tensor, ""]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The options of the loss that a person chooses; `Objective` adds what a run knows by itself."""

    schedule: str = "linear"
    """`linear`, `cosine` or `polynomial` (`mdlm.schedule.SCHEDULES`)."""
    schedule_power: float | None = None
    """Power of the polynomial schedule; None = 2."""
    sampling: TimeSampling = "low_discrepancy"
    """How times are spread over the global batch (`mdlm.schedule.TIME_SAMPLING`)."""
    eps: float = 1e-3
    """Times are drawn from (eps, t_max]; the weight makes up for the rest: uniform logits cost log V exactly."""
    t_max: float = 1.0
    """Below 1 the noise range is clipped from above, as eps does from below (BD3-LM, arXiv 2503.09573)."""
    search_range: bool = False
    """Search the range (eps, t_max] anew at every validation: the one of BD3-LM's grid inside the range given here
    under which the loss varies least on the validation text (`mdlm/noise_range.py`)."""
    block_clip: BlockClip = "off"
    """Block diffusion: mask each token of a block of B with probability max(t, 1 / B), so that fewer blocks need a
    forced mask (Stable-DiffCoder, arXiv 2601.15892). `paper`: weight 1 / max(t, 1/B), at most B, as published, which
    overweighs blocks with one mask; `exact`: the weight that makes the loss the NELBO (`weights.clipped_weights`)."""
    masking: Masking = "independent"
    """`independent`: every token for itself, as the process says; `count`: the number of masked tokens follows from the
    time, and only which ones is random. The same loss in expectation, with less variance."""
    complementary: bool = False
    """Train on each row twice, with a mask and with its complement, so that every token is predicted once (Fast-dLLM
    v2, arXiv 2509.26328). Twice the work per row; the same loss in expectation. Needs masking `count`."""
    weighting: Weighting = "nelbo"
    """`nelbo`: MDLM's -alpha'/(1-alpha); `llada`: 1 / mask probability (linear schedule only, where it is the same
    thing); `cart`: more for tokens near visible ones (`mdlm/weights.py`); `none`: 1, the plain mean over masked
    tokens. The last two are weighted means, no bounds on the likelihood."""
    cart_p: float = 0.1
    """Parameter of `cart`'s geometric distribution over distances, in (0, 1); larger looks less far."""
    reduction: Reduction = "token_mean"
    """`token_mean`: per maskable token of the global batch; `sequence_mean`: per maskable token of each row, then the
    mean over rows (LLaDA's fine-tuning loss)."""
    warmup_steps: int = 0
    """Corruption warm-up (Stable-DiffCoder, arXiv 2601.15892): for the first `warmup_steps` steps times are drawn from
    (0, u_max], u_max grows linearly from `warmup_start` to t_max, and the loss is the plain mean over the masked tokens
    of the global batch, whatever `weighting` and `reduction` say for later."""
    warmup_start: float = 1e-3
    anneal_steps: int = 0
    """Attention-mask annealing of a model that was causal (DiffuLLaMA, arXiv 2410.17891): in step s (from 0) a later
    token is visible with probability min(1, (s + 1) / anneal_steps); 0: all are from the start. The validation sees
    everything from the start."""

    def __post_init__(self) -> None:
        make_schedule(self.schedule, self.schedule_power)
        if self.sampling not in TIME_SAMPLING:
            raise unknown_name("sampling of times", self.sampling, TIME_SAMPLING)
        if self.masking not in MASKINGS:
            raise unknown_name("masking", self.masking, MASKINGS)
        if self.weighting not in WEIGHTINGS:
            raise unknown_name("weighting", self.weighting, WEIGHTINGS)
        if self.reduction not in REDUCTIONS:
            raise unknown_name("reduction", self.reduction, REDUCTIONS)
        if self.weighting == "llada" and self.schedule != "linear":
            raise ValueError(
                "weighting 'llada' is 1 / mask probability, a bound with schedule 'linear' alone; "
                f"got schedule {self.schedule!r}: use weighting 'nelbo', "
                "which is the same loss for 'linear' and right for every schedule"
            )
        if not 0.0 <= self.eps < self.t_max <= 1.0:
            raise ValueError(f"times come from (eps, t_max] inside (0, 1], got eps={self.eps}, t_max={self.t_max}")
        if not 0.0 < self.cart_p < 1.0:
            raise ValueError(f"cart_p must lie in (0, 1), got {self.cart_p}")
        if self.weighting != "cart" and self.cart_p != ObjectiveConfig.cart_p:
            raise ValueError(f"cart_p={self.cart_p} has no effect with weighting {self.weighting!r}, only with 'cart'")
        if self.complementary and (self.masking != "count" or self.warmup_steps):
            raise ValueError(
                "complementary needs masking 'count' (a complement of independent masks would need weights without "
                f"bound) and no corruption warm-up (whose complements mask most tokens); got masking {self.masking!r}, "
                f"warmup_steps {self.warmup_steps}"
            )
        if self.block_clip not in BLOCK_CLIPS:
            raise unknown_name("block_clip", self.block_clip, BLOCK_CLIPS)
        plain = self.masking == "independent" and not self.complementary and self.block_clip == "off"
        if self.search_range and not (plain and self.weighting in ("nelbo", "llada")):
            raise ValueError(
                "search_range compares noise ranges by the variance of the NELBO's estimate under independent masks: "
                "it needs masking 'independent' (under 'count' a range leaves counts of masks out for good), weighting "
                f"'nelbo' or 'llada', block_clip 'off'; got {self.masking!r}, {self.weighting!r}, {self.block_clip!r}"
            )
        if self.block_clip != "off" and not (
            self.masking == "independent" and self.weighting == "nelbo" and self.schedule == "linear"
        ):
            raise ValueError(
                "block_clip has its own noise and weight: it needs masking 'independent', weighting 'nelbo' and "
                f"schedule 'linear'; got {self.masking!r}, {self.weighting!r}, {self.schedule!r}"
            )
        for name in ("warmup_steps", "anneal_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0.0 < self.warmup_start <= 1.0:
            raise ValueError(f"warmup_start is a time in (0, 1], got {self.warmup_start}")
        if self.warmup_steps and self.warmup_start > self.t_max:
            raise ValueError(
                f"warmup_start={self.warmup_start} must not lie above t_max={self.t_max}, where it leads to"
            )

    def noise_schedule(self) -> NoiseSchedule:
        """The schedule these options name."""
        return make_schedule(self.schedule, self.schedule_power)

    def build(
        self,
        *,
        global_batch: int,
        seed: int,
        mask_token_id: int,
        num_tokens: int,
        block_size: int | None = None,
        fused_head: bool = False,
    ) -> Objective:
        """The objective of one run; `block_size` is the model's."""
        options = {field.name: self.__dict__[field.name] for field in fields(ObjectiveConfig)}
        return Objective(
            **options,
            global_batch=global_batch,
            seed=seed,
            mask_token_id=mask_token_id,
            num_tokens=num_tokens,
            block_size=block_size,
            fused_head=fused_head,
        )


@dataclass(frozen=True, kw_only=True)
class Objective(ObjectiveConfig):
    """The loss of one run. Everything random in it is a function of (seed, global row number, position)."""

    global_batch: int
    """Rows per optimizer step over all processes: row r belongs to step r // global_batch."""
    seed: int
    mask_token_id: int
    num_tokens: int
    """Ids >= num_tokens are padding rows of the vocabulary and can never be emitted."""
    block_size: int | None = None
    """None: each row is noised and predicted as a whole. Else block diffusion, for a model with this `block_size`."""
    fused_head: bool = False
    """The model makes head and loss in one (`head_loss.py`): the same loss in less time and memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.global_batch < 1:
            raise ValueError(f"global_batch must be at least 1, got {self.global_batch}")
        if not 0 <= self.mask_token_id < self.num_tokens:
            raise ValueError(f"the mask id must be one of the {self.num_tokens} tokens, got {self.mask_token_id}")
        if self.block_size is None and self.block_clip != "off":
            raise ValueError(
                f"block_clip {self.block_clip!r} is noise of block diffusion, but the model has no blocks; set its "
                "block_size, or block_clip 'off'"
            )
        if self.block_size is not None and self.weighting == "cart":
            raise ValueError(
                "weighting 'cart' counts visible tokens on both sides of a masked one; a model with blocks "
                f"(block_size={self.block_size}) does not see the right side: use 'nelbo', 'llada' or 'none'"
            )

    def in_warmup(self, step: int) -> bool:
        """Whether `step` (0-based) still belongs to the corruption warm-up."""
        return step < self.warmup_steps

    def max_time(self, step: int) -> float:
        """Upper end of the times drawn in `step`: u_max during the warm-up, t_max after it."""
        if not self.in_warmup(step):
            return self.t_max
        return self.warmup_start + (self.t_max - self.warmup_start) * step / self.warmup_steps

    def mask_prob(self, t: Float64[Tensor, "units"]) -> Float64[Tensor, "units"]:
        """The probability with which a token of a row or block with time t is masked."""
        p = self.noise_schedule().mask_prob(t)
        if self.block_clip == "off":
            return p
        assert self.block_size is not None, "checked above"
        return p.clamp(min=1.0 / self.block_size)

    def unit_weight(
        self, t: Float64[Tensor, "units"], maskable: Int[Tensor, "units"], masked: Int[Tensor, "units"]
    ) -> Float64[Tensor, "units"]:
        """What the summed loss of a row or block weighs that has time t and `masked` of `maskable` tokens masked.

        Of the NELBO (`nelbo`, `llada`) or the published one of `block_clip`; complementary masks have their own.
        """
        schedule = self.noise_schedule()
        if self.masking == "count":
            return exact_counts(schedule, t, maskable, self.eps, self.t_max)[1]
        p = self.mask_prob(t)
        if self.block_clip == "exact":
            assert self.block_size is not None, "checked above"
            width = max(1, int(maskable.amax())) if len(maskable) else 1
            return clipped_weights(masked, maskable, width, 1.0 / self.block_size, self.eps, self.t_max)
        if self.block_clip == "paper":
            return 1.0 / p
        time_weight = 1.0 / p if self.weighting == "llada" else nelbo_weight(schedule, t, self.eps, self.t_max)
        return time_weight * lone_mask_importance(p, maskable, masked)

    def noise(self, batch: Batch, step: int) -> NoisedBatch:
        """The forward process applied to `batch`: a function of (seed, the batch's row numbers, step).

        Costs a few waits for results, so call it where the batch is still on the CPU and move the result.
        Raises ValueError where the text holds the mask token at a maskable position.
        """
        schedule, warmup = self.noise_schedule(), self.in_warmup(step)
        eps, t_max = 0.0 if warmup else self.eps, self.max_time(step)
        units = units_of(batch, self.block_size, self.global_batch)
        t = draw_times(units.numbers, self.global_batch * units.per_row, self.seed, self.sampling, eps, t_max)
        count = units.maskable.sum(dim=1)
        where = (units.numbers, self.seed, self.mask_token_id)
        if self.masking == "count":
            size, _ = exact_counts(schedule, t, count, eps, t_max)
            chosen = mask_count(units.input_ids, units.maskable, size, *where).masked
        else:
            p = schedule.mask_prob(t) if warmup else self.mask_prob(t)
            chosen = mask_tokens(units.input_ids, units.maskable, p, *where).masked
        if warmup:
            unit_weight = torch.ones_like(t)
        elif self.complementary:
            chosen = torch.cat([chosen, units.maskable & ~chosen])
            t, count = t.repeat(2), count.repeat(2)
            unit_weight = complementary_weights(schedule, chosen.sum(dim=1), count, eps, t_max)
        else:
            unit_weight = self.unit_weight(t, count, chosen.sum(dim=1))
        if self.weighting == "none":
            unit_weight = torch.ones_like(t)
        views = 2 if self.complementary else 1
        weight, masked = units.per_token(unit_weight[:, None] * chosen, views), units.per_token(chosen, views)
        batch = _twice(batch) if self.complementary else batch
        maskable_count = batch.maskable.sum(dim=1)
        normaliser: Normaliser = "maskable"
        per_row = maskable_count.double()
        if warmup or self.weighting == "none":
            normaliser = "masked"
            per_row = per_row / 2 if self.complementary else masked.sum(dim=1).double()  # a pair masks each token once
        if self.weighting == "cart" and not warmup:
            weight, normaliser = cart_weights(masked, batch.attention_mask, batch.position_ids, self.cart_p), "weight"
            if self.reduction == "sequence_mean":
                weight = weight / weight.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        elif self.reduction == "sequence_mean" and not warmup:
            weight, normaliser = weight / per_row[:, None].clamp(min=0.5), "rows"
        return NoisedBatch(
            input_ids=batch.input_ids.masked_fill(masked, self.mask_token_id),
            targets=batch.input_ids,
            masked=masked,
            weight=weight.float(),
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            rows=batch.rows,
            times=t,
            maskable_count=maskable_count,
            normaliser=normaliser,
            annealing=annealing_at(step, self.anneal_steps, self.seed, batch.rows),
        )

    def denominator(self, noised: NoisedBatch) -> Float64[Tensor, ""]:
        """What this micro-batch adds to the normaliser of the global batch.

        Sum it over micro-batches and processes before the first backward: means of means weigh tokens unequally.
        """
        if noised.normaliser == "maskable":
            return noised.maskable_count.sum().double()
        if noised.normaliser == "rows":
            return (noised.maskable_count > 0).sum().double()
        if noised.normaliser == "weight":
            return noised.weight.sum(dtype=torch.float64)
        return noised.masked.sum().double()

    def numerator(self, model: Any, noised: NoisedBatch) -> LossTerms:
        """Weighted sum of the masked tokens' negative log-likelihood: one call of `model`, head on few rows more.

        `model(input_ids=, attention_mask=, position_ids=, logits_at=).logits` must be the raw logits
        [rows, vocab] of the positions asked for in row-major order. float32 or better, whatever their precision.
        In block diffusion `clean_ids=` is passed as well, while attention is annealed `annealing=`, and with
        `fused_head` `scored=`, which returns the loss.
        """
        at, nll, loss = self._evaluate(model, noised)
        return LossTerms(
            loss=(noised.weight[at] * nll).sum() if loss is None else loss,
            nll_sum=nll.detach().sum(dtype=torch.float64),
            masked_count=noised.masked.sum(),
        )

    def token_nats(self, model: Any, noised: NoisedBatch) -> Float[Tensor, "batch seq"]:
        """Negative log-likelihood in nats of each masked token, 0 elsewhere; `model` as in `numerator`."""
        at, nll, _ = self._evaluate(model, noised)
        return nll.new_zeros(at.shape).masked_scatter(at, nll)

    def _evaluate(
        self, model: Any, noised: NoisedBatch
    ) -> tuple[Bool[Tensor, "batch seq"], Float[Tensor, "rows"], Float[Tensor, ""] | None]:
        """Where the head was asked, the nll there (0 where it is not masked), and the loss if the model made it."""
        at = _filled(noised.masked)
        targets = noised.targets[at]
        more: dict[str, Any] = {} if self.block_size is None else {"clean_ids": noised.targets}
        if noised.annealing is not None:
            more["annealing"] = noised.annealing
        if self.fused_head:
            more["scored"] = Scored(targets, noised.weight[at], self.mask_token_id, self.num_tokens)
        out = model(
            input_ids=noised.input_ids,
            attention_mask=noised.attention_mask,
            position_ids=noised.position_ids,
            logits_at=at,
            **more,
        )
        nll = out.nll if self.fused_head else subs_nll(out.logits, targets, self.mask_token_id, self.num_tokens)
        return at, torch.where(noised.masked[at], nll, 0.0), out.loss if self.fused_head else None
