"""How likely a text is: the NELBO of any denoiser in nats per token and bits per byte, with its standard error.

The estimate is that of `mdlm/objective.py`, summed in float64 and without clipping of times, so it is unbiased: for an
exact denoiser it converges to the negative log-likelihood. By default the number of masked tokens follows from the time
(`masking="count"`), which takes most of the noise away; `independent` is the process as written.
Times and masks are a function of (seed, row number, sample number): two checkpoints see the same noise, so their curves
are comparable, and neither batch size nor the number of processes changes the number.

Standard error. Times are stratified over groups of `strata_rows` consecutive rows and their samples, which removes most
of the variance that comes from t, and makes the rows of a group dependent. So the independent unit is the group (the
row, for `sampling="uniform"`): the error is that of a ratio of sums over groups. It holds for the mean over an endless
supply of such rows, so it covers the choice of text as well as the noise, and is larger than the noise alone where the
text is fixed; with few groups it is itself uncertain. Models with blocks are evaluated block by block
(`likelihood_block.py`). Read next: `sources.py`, where all of this is checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float64, Int, Int64
from torch import Tensor

from mdlm.corrupt import Corruption, mask_count, mask_tokens
from mdlm.eval.likelihood_block import block_log_probs, block_noise, with_own_blocks
from mdlm.objective import MASKINGS, Masking
from mdlm.schedule import (
    TIME_SAMPLING,
    TimeSampling,
    discrete_times,
    draw_times,
    exact_counts,
    make_schedule,
    nelbo_weight,
    unknown_name,
)

if TYPE_CHECKING:
    from mdlm.data import Batch
    from mdlm.denoiser import Denoiser


@dataclass(frozen=True, kw_only=True)
class NelboProtocol:
    """Everything the number depends on beside the denoiser and the text."""

    schedule: str = "linear"
    schedule_power: float | None = None
    sampling: TimeSampling = "stratified"
    masking: Masking = "count"
    """`count`: exactly as many masked tokens as the time says; `independent`: every token for itself (noisier)."""
    strata_rows: int = 4
    """Rows whose times are stratified together; also the unit of the standard error."""
    samples: int = 1
    """Draws of (t, mask) per row."""
    eps: float = 0.0
    """Times are drawn from (eps, 1]; above 0 the estimate is (slightly) biased."""
    steps: int | None = None
    """None: continuous time. Else the NELBO of a reverse process with this many steps, which is not smaller."""
    seed: int = 0
    block_size: int | None = None
    """Block diffusion: length of the blocks. None: those of the denoiser, if it has any."""

    def __post_init__(self) -> None:
        make_schedule(self.schedule, self.schedule_power)
        if self.sampling not in TIME_SAMPLING:
            raise unknown_name("sampling of times", self.sampling, TIME_SAMPLING)
        if self.masking not in MASKINGS:
            raise unknown_name("masking", self.masking, MASKINGS)
        if self.strata_rows < 1 or self.samples < 1:
            raise ValueError(f"strata_rows and samples must be at least 1, got {self.strata_rows} and {self.samples}")
        if not 0.0 <= self.eps < 1.0:
            raise ValueError(f"eps must lie in [0, 1), got {self.eps}")
        if self.steps is not None and (self.steps < 1 or self.eps != 0.0):
            raise ValueError(f"discrete time needs steps >= 1 and eps = 0, got steps={self.steps}, eps={self.eps}")
        if self.steps is not None and self.masking == "count":
            raise ValueError("discrete time (steps) is defined for independent masks: add masking='independent'")
        if self.block_size is not None and self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")

    def noise(self, batch: Batch, sample: int, mask_token_id: int) -> tuple[Corruption, Float64[Tensor, "batch"]]:
        """One draw of the masks of every row, and what each row's summed loss weighs."""
        schedule = make_schedule(self.schedule, self.schedule_power)
        keys = batch.rows * self.samples + sample
        t = draw_times(keys, self.strata_rows * self.samples, self.seed, self.sampling, self.eps)
        where = (keys, self.seed, mask_token_id)
        if self.masking == "count":
            count, weight = exact_counts(schedule, t, batch.maskable.sum(dim=1), self.eps)
            return mask_count(batch.input_ids, batch.maskable, count, *where), weight
        if self.steps is not None:
            t, weight = discrete_times(schedule, t, self.steps)
        else:
            weight = nelbo_weight(schedule, t, self.eps)
        corruption = mask_tokens(batch.input_ids, batch.maskable, schedule.mask_prob(t), *where)
        return corruption, weight * corruption.importance


@dataclass(frozen=True)
class Likelihood:
    """A NELBO with its error and its protocol; `dataclasses.asdict` gives one JSON-able record."""

    nats_per_token: float
    standard_error: float | None
    """Of `nats_per_token`; None with fewer than two independent groups of rows (see the module docstring)."""
    bits_per_byte: float | None
    """None where the number of bytes is not known."""
    perplexity_bound: float
    """exp(nats_per_token): an upper bound on the perplexity per token."""
    tokens: int
    bytes: int | None
    sequences: int
    nfe: int
    """Sequences passed through the denoiser: rows with any token to predict, times samples."""
    schedule: str
    schedule_power: float | None
    sampling: str
    masking: str
    strata_rows: int
    samples: int
    eps: float
    steps: int | None
    seed: int
    block_size: int | None
    context_length: int
    precision: str
    """Of the log-probs, unless the caller says more (e.g. "bfloat16 autocast")."""


@dataclass(frozen=True)
class LikelihoodSums:
    """What one process has summed up: per row, so that sums of several processes merge to what one would have."""

    protocol: NelboProtocol
    rows: Int64[Tensor, "rows"]
    nats: Float64[Tensor, "rows"]
    tokens: Int64[Tensor, "rows"]
    bytes: Int64[Tensor, "rows"] | None
    context_length: int
    precision: str

    def result(self, total_bytes: int | None = None) -> Likelihood:
        """The likelihood of all rows together.

        `total_bytes`: bytes of the evaluated text, where no table of bytes per token was given. Raises ValueError
        where there is nothing to evaluate or a row came twice.
        """
        if total_bytes is not None and self.bytes is not None:
            raise ValueError("give either token_bytes or total_bytes, not both")
        used = self.tokens > 0
        rows, order = self.rows[used].sort()
        if rows.numel() == 0:
            raise ValueError("nothing to evaluate: no row has a maskable token")
        if bool((rows[1:] == rows[:-1]).any()):
            twice = int(rows[1:][rows[1:] == rows[:-1]][0])
            raise ValueError(f"row {twice} was evaluated twice: each process and batch must bring its own rows")
        nats, tokens = self.nats[used][order], self.tokens[used][order].double()
        mean = float(nats.sum() / tokens.sum())
        count = total_bytes if self.bytes is None else int(self.bytes[used].sum())
        if count is not None and count < 1:
            raise ValueError(f"the evaluated text must have at least one byte, got {count}")
        p = self.protocol
        return Likelihood(
            nats_per_token=mean,
            standard_error=_ratio_error(nats, tokens, rows // (1 if p.sampling == "uniform" else p.strata_rows)),
            bits_per_byte=None if count is None else float(nats.sum()) / math.log(2.0) / count,
            perplexity_bound=float(torch.tensor(mean, dtype=torch.float64).exp()),
            tokens=int(tokens.sum()),
            bytes=count,
            sequences=rows.numel(),
            nfe=rows.numel() * p.samples,
            schedule=p.schedule,
            schedule_power=p.schedule_power,
            sampling=p.sampling,
            masking=p.masking,
            strata_rows=p.strata_rows,
            samples=p.samples,
            eps=p.eps,
            steps=p.steps,
            seed=p.seed,
            block_size=p.block_size,
            context_length=self.context_length,
            precision=self.precision,
        )


def _ratio_error(
    values: Float64[Tensor, "rows"], sizes: Float64[Tensor, "rows"], groups: Int64[Tensor, "rows"]
) -> float | None:
    """Standard error of sum(values) / sum(sizes) with independent groups (linearised ratio of means)."""
    residual = values - sizes * (values.sum() / sizes.sum())
    names, inverse = groups.unique(return_inverse=True)
    count = names.numel()
    if count < 2:
        return None
    per_group = torch.zeros(count, dtype=torch.float64).index_add_(0, inverse, residual)
    return float((per_group.square().sum() * count / (count - 1)).sqrt() / sizes.sum())


def accumulate(
    denoiser: Denoiser,
    batches: Iterable[Batch],
    protocol: NelboProtocol,
    *,
    token_bytes: Int[Tensor, "tokens"] | None = None,
    precision: str | None = None,
) -> LikelihoodSums:
    """Evaluate the rows of `batches`: one denoiser call per batch and sample, even where there is nothing to predict.

    `token_bytes`: UTF-8 bytes of each token id, for bits per byte. `precision`: what to report instead of the dtype of
    the log-probs. Raises ValueError where the denoiser's answer is not a distribution without mass on the mask id.
    """
    parts = list(batch_sums(denoiser, batches, protocol, token_bytes=token_bytes, precision=precision))
    if not parts:
        raise ValueError("nothing to evaluate: there are no batches")
    return merge(parts)


def batch_sums(
    denoiser: Denoiser,
    batches: Iterable[Batch],
    protocol: NelboProtocol,
    *,
    token_bytes: Int[Tensor, "tokens"] | None = None,
    precision: str | None = None,
) -> Iterator[LikelihoodSums]:
    """The sums of each batch as soon as it is evaluated (see `accumulate`): what a long run writes down on its way."""
    protocol = with_own_blocks(protocol, denoiser)
    for number, batch in enumerate(batches):
        total = torch.zeros(batch.rows.shape[0], dtype=torch.float64)
        for sample in range(protocol.samples):
            values, dtype = _nats(denoiser, batch, protocol, sample, check=number == sample == 0)
            total += values
        size = None
        if token_bytes is not None:
            size = (token_bytes.cpu()[batch.input_ids.cpu()] * batch.maskable.cpu()).sum(dim=1)
        yield LikelihoodSums(
            protocol=protocol,
            rows=batch.rows.cpu(),
            nats=total / protocol.samples,
            tokens=batch.maskable.sum(dim=1).cpu(),
            bytes=size,
            context_length=batch.input_ids.shape[1],
            precision=precision or str(dtype).removeprefix("torch."),
        )


def _nats(
    denoiser: Denoiser, batch: Batch, protocol: NelboProtocol, sample: int, check: bool
) -> tuple[Float64[Tensor, "batch"], torch.dtype]:
    """One draw of each row's NELBO in nats, on the CPU, and the dtype of the log-probs."""
    moved = batch.to(denoiser.device)
    if protocol.block_size is not None:
        chosen, weight = block_noise(protocol, batch, sample, denoiser.mask_token_id)
        masked = chosen.to(denoiser.device)
        log_probs = block_log_probs(denoiser, moved, masked)
    else:
        noised, row_weight = protocol.noise(batch, sample, denoiser.mask_token_id)
        masked, weight = noised.masked.to(denoiser.device), row_weight[:, None]
        with torch.no_grad():
            log_probs = denoiser(
                noised.input_ids.to(denoiser.device),
                attention_mask=moved.attention_mask,
                position_ids=moved.position_ids,
                at=masked,
            )
    if check:
        _check_distribution(log_probs, denoiser, int(masked.sum()))
    likelihood = log_probs.gather(1, moved.input_ids[masked][:, None]).squeeze(1)
    nll = torch.zeros(masked.shape, dtype=torch.float64)
    nll[masked.cpu()] = -likelihood.cpu().double()
    return (nll * weight.cpu()).sum(dim=1), log_probs.dtype


def _check_distribution(log_probs: Tensor, denoiser: Denoiser, rows: int) -> None:
    if tuple(log_probs.shape) != (rows, denoiser.num_tokens):
        raise ValueError(
            f"the denoiser was asked for {rows} rows of {denoiser.num_tokens} tokens and gave {tuple(log_probs.shape)}"
        )
    if bool((log_probs[:, denoiser.mask_token_id] > -math.inf).any()):
        raise ValueError(f"the denoiser gives the mask token (id {denoiser.mask_token_id}) a probability above 0")
    total = log_probs.double().exp().sum(dim=1)
    if bool(((total - 1.0).abs() > 1e-3).any()):
        raise ValueError(f"the denoiser's probabilities sum to {total.min():.6g} .. {total.max():.6g}, not to 1")


def merge(parts: Sequence[LikelihoodSums]) -> LikelihoodSums:
    """The sums of several processes (or runs over disjoint rows) as those of one. Raises ValueError if they differ."""
    if not parts:
        raise ValueError("nothing to merge")
    first = parts[0]
    for part in parts[1:]:
        if part.protocol != first.protocol or part.precision != first.precision:
            raise ValueError("sums made under different protocols or precisions cannot be merged")
        if (part.bytes is None) != (first.bytes is None):
            raise ValueError("sums with and without bytes cannot be merged")
    sizes = [part.bytes for part in parts if part.bytes is not None]
    return LikelihoodSums(
        protocol=first.protocol,
        rows=torch.cat([part.rows for part in parts]),
        nats=torch.cat([part.nats for part in parts]),
        tokens=torch.cat([part.tokens for part in parts]),
        bytes=torch.cat(sizes) if sizes else None,
        context_length=max(part.context_length for part in parts),
        precision=first.precision,
    )


def nelbo(
    denoiser: Denoiser,
    batches: Iterable[Batch],
    *,
    schedule: str = "linear",
    schedule_power: float | None = None,
    sampling: TimeSampling = "stratified",
    masking: Masking = "count",
    strata_rows: int = 4,
    samples: int = 1,
    eps: float = 0.0,
    steps: int | None = None,
    seed: int = 0,
    block_size: int | None = None,
    token_bytes: Int[Tensor, "tokens"] | None = None,
    total_bytes: int | None = None,
    precision: str | None = None,
) -> Likelihood:
    """NELBO of the maskable tokens of `batches` (see `NelboProtocol` and `accumulate` for the options).

    One process: `accumulate(...).result(...)`. Several: `accumulate` on each, then `merge(gathered).result(...)`.
    """
    protocol = NelboProtocol(
        schedule=schedule,
        schedule_power=schedule_power,
        sampling=sampling,
        masking=masking,
        strata_rows=strata_rows,
        samples=samples,
        eps=eps,
        steps=steps,
        seed=seed,
        block_size=block_size,
    )
    sums = accumulate(denoiser, batches, protocol, token_bytes=token_bytes, precision=precision)
    return sums.result(total_bytes)


def token_counts(tokens: Tensor | Iterable[Tensor], vocab: int) -> Int64[Tensor, "vocab"]:
    """How often each id 0 .. vocab-1 occurs in a tensor or a stream of tensors. Raises ValueError for other ids."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for part in [tokens] if isinstance(tokens, Tensor) else tokens:
        flat = part.reshape(-1).cpu().long()
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < vocab:
            raise ValueError(f"token ids must lie in 0..{vocab - 1}, got {int(flat.min())}..{int(flat.max())}")
        counts += torch.bincount(flat, minlength=vocab)
    return counts


def unigram_log_probs(counts: Int64[Tensor, "vocab"]) -> Float64[Tensor, "vocab"]:
    """Log-probabilities in nats of the least baseline, token frequencies: (count + 1) / (all + vocab), never 0."""
    return torch.log((counts.double() + 1.0) / (counts.sum() + len(counts)))
