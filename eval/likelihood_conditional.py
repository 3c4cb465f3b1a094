"""How likely an answer is given a prompt, in any order: the NELBO of the answer alone, the prompt never masked.

LLaDA's protocol (arXiv 2502.09992, section 2.4 and appendix B): mask exactly k of the answer's n tokens, k uniform in
1 .. n, weigh the summed log-probabilities of the masked ones by n / k, and average over draws (`mc_num` there,
`samples` here). Its expectation is the mean over all orders of the exact chain rule, a lower bound on the
log-likelihood that an exact denoiser reaches.
Draws come in groups (LLaDA's batch) whose counts are spread evenly over 1 .. n; groups are independent, so their spread
gives the standard error. An answer so short that all its 2^n - 1 sets of masked tokens take no more evaluations than
`samples` is summed over all of them, in proportion to their weight: no noise, error 0.

Everything random is a function of (seed, the pair's row number, draw, position): no result depends on batches or
processes, and pairs that share a row number share their noise, which cancels in part where choices of one question are
compared. Read first: `likelihood.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from mdlm.corrupt import mask_count
from mdlm.denoiser import Denoiser
from mdlm.eval.likelihood_block import blocks_of
from mdlm.samplers.guidance import guided_log_probs
from mdlm.schedule import Linear, draw_times, exact_counts

Ids = Sequence[int] | Int64[Tensor, " seq"]


@dataclass(frozen=True)
class ConditionalLikelihood:
    """Of each pair, on the CPU."""

    log_likelihood: Float64[Tensor, "rows"]
    """Nats; an estimate of a lower bound on log p(answer | prompt)."""
    standard_error: Float64[Tensor, "rows"]
    """Nats, of the noise of masks alone; 0 where summed over all masks, NaN with a single group of draws."""
    tokens: Int64[Tensor, "rows"]
    """Of the answers."""
    nfe: Int64[Tensor, "rows"]
    """Evaluations of the denoiser."""


@dataclass(frozen=True)
class _Draw:
    pair: int
    number: int
    ids: Int64[Tensor, " seq"]
    answer: Bool[Tensor, " seq"]
    masked: Bool[Tensor, " seq"]
    weight: float


def conditional(
    denoiser: Denoiser,
    prompts: Sequence[Ids],
    answers: Sequence[Ids],
    *,
    samples: int = 128,
    group: int = 8,
    exact: bool = True,
    guidance: float = 0.0,
    seed: int = 0,
    rows: Sequence[int] | None = None,
    batch: int = 32,
) -> ConditionalLikelihood:
    """Log-likelihood in nats of each answer given its prompt (which may be empty), with its standard error.

    Args:
        prompts, answers: token ids, one of each per pair.
        samples: draws per pair (LLaDA's `mc_num`).
        group: draws whose counts are stratified together; divides `samples`. 1: every draw for itself.
        exact: sum over all masks where that takes no more evaluations than `samples`.
        guidance: weight w >= 0 of classifier-free guidance, the prompt masked in a second evaluation
            (`samplers/guidance.py`). Above 0 the number is a score and bounds no likelihood.
        seed: of counts and masks.
        rows: number of each pair, which with the seed decides its noise; default: its place in the list.
        batch: rows per forward, padded on the right to the longest; never changes the result but for rounding.

    Raises:
        ValueError: no pairs, prompts and answers that do not match, an empty answer, tokens the denoiser does not know
            or its mask token, an answer in several blocks of a model that has blocks, or options out of range.
    """
    if samples < 1 or group < 1 or samples % group or batch < 1:
        raise ValueError(
            f"samples and batch must be at least 1 and group must divide samples, got samples={samples}, "
            f"group={group}, batch={batch}"
        )
    if not (guidance >= 0 and math.isfinite(guidance)):
        raise ValueError(f"guidance is {guidance}; it must be 0 (none) or a positive number")
    numbers = list(range(len(prompts))) if rows is None else list(rows)
    if not len(prompts) == len(answers) == len(numbers) or not numbers:
        raise ValueError(
            f"every pair needs a prompt and an answer, and there must be one: got {len(prompts)} prompts, "
            f"{len(answers)} answers and {len(numbers)} row numbers"
        )
    if min(numbers) < 0 or max(numbers) >= 2**62 // samples:
        raise ValueError(
            f"row numbers must lie in 0 .. 2^62 / samples, got {min(numbers)} .. {max(numbers)} with {samples} samples"
        )
    pairs = [_pair(denoiser, i, prompt, answer) for i, (prompt, answer) in enumerate(zip(prompts, answers))]
    counts = torch.tensor([int(maskable.sum()) for _, maskable in pairs])
    summed = [exact and 2**n - 1 <= samples for n in counts.tolist()]
    values = [
        torch.zeros(2**n - 1 if whole else samples, dtype=torch.float64) for n, whole in zip(counts.tolist(), summed)
    ]
    longest_first = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]))

    def draws() -> Iterator[_Draw]:
        for i in longest_first:
            ids, maskable = pairs[i]
            if summed[i]:
                masked, weight = _all_masks(maskable)
            else:
                masked, weight = _drawn_masks(denoiser, ids, maskable, numbers[i], samples, group, seed)
            for number, w in enumerate(weight.tolist()):
                yield _Draw(i, number, ids, maskable, masked[number], w)

    work = draws()
    while chunk := list(itertools.islice(work, batch)):
        for draw, nats in zip(chunk, _nats(denoiser, chunk, guidance).tolist()):
            values[draw.pair][draw.number] = -draw.weight * nats

    total, error = [], []
    for value, whole in zip(values, summed):
        groups = value.reshape(-1, 1 if whole else group).mean(dim=1)
        total.append(float(groups.sum() if whole else groups.mean()))
        spread = float(groups.std()) / math.sqrt(len(groups)) if len(groups) > 1 else math.nan
        error.append(0.0 if whole else spread)
    return ConditionalLikelihood(
        log_likelihood=torch.tensor(total, dtype=torch.float64),
        standard_error=torch.tensor(error, dtype=torch.float64),
        tokens=counts,
        nfe=torch.tensor([len(value) * (2 if guidance else 1) for value in values]),
    )


def _pair(
    denoiser: Denoiser, number: int, prompt: Ids, answer: Ids
) -> tuple[Int64[Tensor, " seq"], Bool[Tensor, " seq"]]:
    """The pair as one row, and which of it is the answer."""
    parts = [torch.as_tensor(part, dtype=torch.int64).reshape(-1).cpu() for part in (prompt, answer)]
    ids = torch.cat(parts)
    if not len(parts[1]):
        raise ValueError(f"pair {number} has an empty answer; its likelihood would be 1 under every model")
    if not 0 <= int(ids.min()) <= int(ids.max()) < denoiser.num_tokens or bool((ids == denoiser.mask_token_id).any()):
        raise ValueError(
            f"pair {number} holds token ids from {int(ids.min())} to {int(ids.max())}; allowed are 0 .. "
            f"{denoiser.num_tokens - 1} without the mask token ({denoiser.mask_token_id}); tokenise it for this model"
        )
    size = blocks_of(denoiser)
    if size is not None and len(parts[0]) // size != (len(ids) - 1) // size:
        raise ValueError(
            f"pair {number}: the answer, tokens {len(parts[0])} .. {len(ids) - 1}, reaches over a border of the "
            f"model's blocks of {size}; a later block would see a masked past, which such a model was not trained on. "
            "Give each block's part as a pair of its own, with all before it as the prompt, and sum"
        )
    return ids, torch.arange(len(ids)) >= len(parts[0])


def _drawn_masks(
    denoiser: Denoiser,
    ids: Int64[Tensor, " seq"],
    maskable: Bool[Tensor, " seq"],
    row: int,
    samples: int,
    group: int,
    seed: int,
) -> tuple[Bool[Tensor, "samples seq"], Float64[Tensor, "samples"]]:
    keys = row * samples + torch.arange(samples)
    t = draw_times(keys, group, seed, "low_discrepancy", eps=0.0)
    each = maskable.expand(samples, -1)
    count, weight = exact_counts(Linear(), t, each.sum(dim=1), eps=0.0)
    return mask_count(ids.expand(samples, -1), each, count, keys, seed, denoiser.mask_token_id).masked, weight


def _all_masks(maskable: Bool[Tensor, " seq"]) -> tuple[Bool[Tensor, "sets seq"], Float64[Tensor, "sets"]]:
    """Every set of masked tokens but the empty one; a set of k weighs 1 / (k (n choose k)), the NELBO's share of it."""
    n = int(maskable.sum())
    sets = torch.arange(1, 2**n)
    masked = torch.zeros(len(sets), len(maskable), dtype=torch.bool)
    masked[:, maskable] = (sets[:, None] >> torch.arange(n)) % 2 == 1
    weight = [1.0 / (k * math.comb(n, k)) for k in masked.sum(dim=1).tolist()]
    return masked, torch.tensor(weight, dtype=torch.float64)


def _nats(denoiser: Denoiser, chunk: Sequence[_Draw], guidance: float) -> Float64[Tensor, "batch"]:
    """Sum of -log p over the masked tokens of each draw."""
    width = max(len(draw.ids) for draw in chunk)
    clean = torch.full((len(chunk), width), denoiser.mask_token_id)
    masked, answer, real = (torch.zeros(len(chunk), width, dtype=torch.bool) for _ in range(3))
    for i, draw in enumerate(chunk):
        size = len(draw.ids)
        clean[i, :size], masked[i, :size], answer[i, :size], real[i, :size] = draw.ids, draw.masked, draw.answer, True
    attention = None if bool(real.all()) else real.to(denoiser.device)
    where = masked.to(denoiser.device)

    def ask(hidden: Bool[Tensor, "batch seq"]) -> Tensor:
        tokens = clean.masked_fill(hidden, denoiser.mask_token_id).to(denoiser.device)
        return denoiser(tokens, attention_mask=attention, at=where)

    with torch.no_grad():
        log_probs = ask(masked)
        if guidance:
            log_probs = guided_log_probs(log_probs, ask(masked | ~answer), guidance)
    chosen = log_probs.gather(1, clean.to(denoiser.device)[where][:, None]).squeeze(1)
    nats = torch.zeros(masked.shape, dtype=torch.float64)
    nats[masked] = -chosen.cpu().double()
    return nats.sum(dim=1)
