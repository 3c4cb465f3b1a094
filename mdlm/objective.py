"""The training loss: NELBO of masked diffusion (MDLM), the 1/t loss (LLaDA), the unweighted loss, and their reductions.

For a row x of n maskable tokens, a time t and a set M of masked positions drawn from the forward process,

    loss(x) = weight(t) * importance * sum over i in M of -log p(x_i | x with M masked)

where p has no mass on the mask id and visible tokens are carried over (SUBS, MDLM section 3.2.3), is an unbiased
estimate of the NELBO of x in nats (MDLM eq. 10; LLaDA eq. 3 is the same thing with t as the mask probability).
`importance` pays for the at-least-one-mask rule (`corrupt.py`).

Losses of public code bases are not comparable because their normalisers differ. Here a model with uniform logits over V
tokens has loss log V in expectation under every option, and the loss of a global batch does not depend on how it is
split: each micro-batch adds a `numerator` and a `denominator`, and whoever trains sums the denominators over
micro-batches and processes before dividing. Dividing a 1/t-weighted sum by the number of *masked* tokens, as some
public code does, is not among the options. Read next: `eval/likelihood.py`, the same quantity measured.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int
from torch import Tensor

from mdlm.corrupt import mask_count, mask_tokens
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
from mdlm.weights import cart_weights, complementary_weights

if TYPE_CHECKING:
    from mdlm.data import Batch

Masking = Literal["independent", "count"]
Weighting = Literal["nelbo", "llada", "cart", "none"]
Reduction = Literal["token_mean", "sequence_mean"]
Normaliser = Literal["maskable", "masked", "rows", "weight"]

MASKINGS = ("independent", "count")
WEIGHTINGS = ("nelbo", "llada", "cart", "none")
REDUCTIONS = ("token_mean", "sequence_mean")
_CHUNK_ELEMENTS = {"cpu": 2**18}  # one megabyte of float32 stays in a core's cache
_CHUNK_ELEMENTS_ELSEWHERE = 2**26


def _compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def subs_log_probs(
    logits: Float[Tensor, "*axes vocab"], mask_token_id: int, num_tokens: int
) -> Float[Tensor, "*axes tokens"]:
    """Log-probabilities of the tokens that may be emitted (SUBS, MDLM section 3.2.3), shape [..., num_tokens].

    The column of the mask id is -inf, the padding rows of the vocabulary (ids >= num_tokens) are cut off, the rest is
    normalised in float32 (float64 logits: float64). A NaN in an allowed column makes its whole row NaN.
    """
    allowed = logits[..., :num_tokens].to(_compute_dtype(logits))
    column = torch.tensor(mask_token_id, device=logits.device)
    return allowed.index_fill(-1, column, -torch.inf).log_softmax(dim=-1)


class _SubsNll(torch.autograd.Function):
    """-log p of the targets under SUBS, a few rows at a time.

    Beside the logits only the gradient is ever as large as [rows, vocab], and with `reuse` it takes their place: no
    float32 copy of bf16 logits, no stored log-softmax, no dense one-hot gradient. The plain definition is
    `subs_log_probs(...).gather(...)`.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, mask_token_id: int, num_tokens: int, reuse: bool) -> Tensor:
        dtype = _compute_dtype(logits)
        normaliser = logits.new_empty(logits.shape[0], dtype=dtype)
        for rows in _chunks(logits):
            x = _allowed(logits[rows], dtype, mask_token_id, num_tokens, -torch.inf)
            largest = x.amax(dim=1, keepdim=True)
            normaliser[rows] = x.sub_(largest).exp_().sum(dim=1).log_().add_(largest[:, 0])
        nll = normaliser - logits.gather(1, targets[:, None]).squeeze(1).to(dtype)
        ctx.save_for_backward(logits, targets, normaliser)
        ctx.mask_token_id, ctx.num_tokens, ctx.reuse = mask_token_id, num_tokens, reuse
        return nll.masked_fill((targets == mask_token_id) | (targets >= num_tokens), torch.inf)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, targets, normaliser = ctx.saved_tensors
        grad_logits = logits if ctx.reuse else torch.empty_like(logits)
        for rows in _chunks(logits):
            x = _allowed(logits[rows], normaliser.dtype, ctx.mask_token_id, ctx.num_tokens, -torch.inf)
            x = x.sub_(normaliser[rows, None]).exp_().mul_(grad[rows, None])
            x.scatter_add_(1, targets[rows, None], -grad[rows, None])
            x[:, ctx.mask_token_id] = 0.0
            x[:, ctx.num_tokens :] = 0.0
            grad_logits[rows] = x.to(logits.dtype)
        return grad_logits, None, None, None, None


def _chunks(logits: Tensor) -> list[slice]:
    count, vocab = logits.shape
    size = max(1, _CHUNK_ELEMENTS.get(logits.device.type, _CHUNK_ELEMENTS_ELSEWHERE) // vocab)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _allowed(logits: Tensor, dtype: torch.dtype, mask_token_id: int, num_tokens: int, fill: float) -> Tensor:
    """A fresh copy with every column that may not be emitted set to `fill`."""
    x = logits.to(dtype, copy=True)
    x[:, mask_token_id] = fill
    x[:, num_tokens:] = fill
    return x


def subs_nll(
    logits: Float[Tensor, "rows vocab"],
    targets: Int[Tensor, "rows"],
    mask_token_id: int,
    num_tokens: int,
    reuse: bool = False,
) -> Float[Tensor, "rows"]:
    """Negative log-likelihood in nats of each row's target under `subs_log_probs`, differentiable once.

    float32 or better. A target that may not be emitted costs +inf; NaN in an allowed column gives NaN. With `reuse` the
    backward writes the gradient over the logits, for a caller that does not look at them again (the largest tensor of a
    training step is then there once); a second backward raises.
    """
    nll: Tensor = _SubsNll.apply(logits, targets, mask_token_id, num_tokens, reuse)
    return nll


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
    times: Float64[Tensor, "batch"]
    maskable_count: Int[Tensor, "batch"]
    normaliser: Normaliser
    """What `Objective.denominator` counts: maskable tokens, masked tokens, rows with any maskable token, or weights."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> NoisedBatch:
        """The same batch with every tensor on `device`."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=non_blocking)
            for field in fields(self)
            if isinstance(value := self.__dict__[field.name], Tensor)
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
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}")
        if not 0.0 < self.warmup_start <= 1.0:
            raise ValueError(f"warmup_start is a time in (0, 1], got {self.warmup_start}")
        if self.warmup_steps and self.warmup_start > self.t_max:
            raise ValueError(
                f"warmup_start={self.warmup_start} must not lie above t_max={self.t_max}, where it leads to"
            )

    def noise_schedule(self) -> NoiseSchedule:
        """The schedule these options name."""
        return make_schedule(self.schedule, self.schedule_power)

    def build(self, *, global_batch: int, seed: int, mask_token_id: int, num_tokens: int) -> Objective:
        """The objective of one run."""
        options = {field.name: self.__dict__[field.name] for field in fields(ObjectiveConfig)}
        return Objective(
            **options, global_batch=global_batch, seed=seed, mask_token_id=mask_token_id, num_tokens=num_tokens
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.global_batch < 1:
            raise ValueError(f"global_batch must be at least 1, got {self.global_batch}")
        if not 0 <= self.mask_token_id < self.num_tokens:
            raise ValueError(f"the mask id must be one of the {self.num_tokens} tokens, got {self.mask_token_id}")

    def in_warmup(self, step: int) -> bool:
        """Whether `step` (0-based) still belongs to the corruption warm-up."""
        return step < self.warmup_steps

    def max_time(self, step: int) -> float:
        """Upper end of the times drawn in `step`: u_max during the warm-up, t_max after it."""
        if not self.in_warmup(step):
            return self.t_max
        return self.warmup_start + (self.t_max - self.warmup_start) * step / self.warmup_steps

    def noise(self, batch: Batch, step: int) -> NoisedBatch:
        """The forward process applied to `batch`: a function of (seed, the batch's row numbers, step).

        Costs a few waits for results, so call it where the batch is still on the CPU and move the result.
        Raises ValueError where the text holds the mask token at a maskable position.
        """
        schedule, warmup = self.noise_schedule(), self.in_warmup(step)
        eps, t_max = 0.0 if warmup else self.eps, self.max_time(step)
        t = draw_times(batch.rows, self.global_batch, self.seed, self.sampling, eps, t_max)
        maskable_count = batch.maskable.sum(dim=1)
        where = (batch.rows, self.seed, self.mask_token_id)
        if self.masking == "count":
            count, row_weight = exact_counts(schedule, t, maskable_count, eps, t_max)
            corruption = mask_count(batch.input_ids, batch.maskable, count, *where)
            masked = corruption.masked
        else:
            p = schedule.mask_prob(t)
            corruption = mask_tokens(batch.input_ids, batch.maskable, p, *where)
            masked = corruption.masked
            time_weight = 1.0 / p if self.weighting == "llada" else nelbo_weight(schedule, t, eps, t_max)
            row_weight = time_weight * corruption.importance
        if self.complementary:
            batch = _twice(batch)
            masked = torch.cat([masked, batch.maskable[: len(t)] & ~masked])
            t, maskable_count = t.repeat(2), maskable_count.repeat(2)
            row_weight = complementary_weights(schedule, masked.sum(dim=1), maskable_count, eps, t_max)
        normaliser: Normaliser = "maskable"
        per_row = maskable_count
        if warmup or self.weighting == "none":
            row_weight, normaliser = torch.ones_like(t), "masked"
            per_row = maskable_count / 2 if self.complementary else masked.sum(dim=1)  # a pair masks each token once
        if self.weighting == "cart" and not warmup:
            weight, normaliser = cart_weights(masked, batch.attention_mask, batch.position_ids, self.cart_p), "weight"
            if self.reduction == "sequence_mean":
                weight = weight / weight.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        else:
            if self.reduction == "sequence_mean" and not warmup:
                row_weight, normaliser = row_weight / per_row.clamp(min=0.5), "rows"
            weight = row_weight[:, None] * masked
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
        """
        at = _filled(noised.masked)
        logits = model(
            input_ids=noised.input_ids,
            attention_mask=noised.attention_mask,
            position_ids=noised.position_ids,
            logits_at=at,
        ).logits
        nll = subs_nll(logits, noised.targets[at], self.mask_token_id, self.num_tokens, reuse=True)
        nll = torch.where(noised.masked[at], nll, 0.0)
        return LossTerms(
            loss=(noised.weight[at] * nll).sum(),
            nll_sum=nll.detach().sum(dtype=torch.float64),
            masked_count=noised.masked.sum(),
        )
