"""What the evaluation harness asks of a model's likelihood: answers given prompts, whole texts, and the greedy flag.

Three estimators of one number, the mean over all orders of the log-probability that the chain rule gives along an
order: a lower bound on log p(answer | prompt), reached by an exact denoiser (`Likelihoods.estimator`).

    count      exactly k masked tokens, k spread evenly (LLaDA, 2502.09992): `likelihood_conditional.py`
    nelbo      every token masked for itself at stratified times (MDLM, 2406.07524): `likelihood.py`
    any_order  the chain rule along random orders, one token at a time: here

A block-causal model has a tighter bound, that of its own blocks (BD3-LM, 2503.09573): each block's part of the
answer given everything before it. So an answer is cut where a block ends, and the parts' numbers are summed.
Read next: `harness.py`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mdlm.data_pack import Batch
from mdlm.denoiser import Denoiser
from mdlm.eval.harness_options import Likelihoods
from mdlm.eval.likelihood import NelboProtocol, accumulate
from mdlm.eval.likelihood_conditional import conditional
from mdlm.rng import counter_uniform

Ids = list[int]
_ORDER = 0x6F72646572  # stream tag, see schedule.py
_ROW_BITS = 40


@dataclass(frozen=True)
class Pair:
    """An answer given a prompt, as token ids, and the number that with the seed decides its noise."""

    prompt: Ids
    answer: Ids
    row: int


@dataclass(frozen=True)
class Score:
    """Of one pair, or of pairs summed."""

    log_likelihood: float
    """Nats."""
    standard_error: float
    """Nats, of the noise of masks alone; NaN where a single draw or group was made."""
    tokens: int
    nfe: int
    """Evaluations of the denoiser."""


def row_number(*parts: Any) -> int:
    """A number for noise that depends on what is asked alone, never on what else is asked, or where."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") % 2**_ROW_BITS


def cut_at_blocks(pair: Pair, block_size: int | None) -> list[Pair]:
    """The parts of a pair that lie in one block each, a part's prompt being all before it; None: the pair itself."""
    if block_size is None:
        return [pair]
    start, end = len(pair.prompt), len(pair.prompt) + len(pair.answer)
    ids = pair.prompt + pair.answer
    cuts = [start, *range((start // block_size + 1) * block_size, end, block_size), end]
    return [Pair(ids[:a], ids[a:b], row_number(pair.row, a)) for a, b in itertools.pairwise(cuts)]


def windows(ids: Ids, first: Ids, length: int | None, row: int) -> list[Pair]:
    """A whole text as pairs in which every token is an answer once.

    The first pair has the prompt `first` alone. Windows hold at most `length` tokens (None: any number); each is
    filled, so the last one, which has fewer tokens left to predict, sees more of what stands before.
    """
    if not ids:
        return []
    room = len(ids) if length is None else length - len(first)
    if room < 1 or (length is not None and length < 2):
        raise ValueError(f"windows of {length} tokens leave no room to predict behind {len(first)} given ones")
    pairs = [Pair(first, ids[:room], row_number(row, 0))]
    done = min(room, len(ids))
    while done < len(ids):
        assert length is not None
        end = min(done + length - 1, len(ids))  # at least one token of context
        pairs.append(Pair(ids[max(0, end - length) : done], ids[done:end], row_number(row, done)))
        done = end
    return pairs


def combine(scores: Sequence[Score]) -> Score:
    """The sum of independent scores."""
    return Score(
        log_likelihood=sum(score.log_likelihood for score in scores),
        standard_error=math.sqrt(sum(score.standard_error**2 for score in scores)),
        tokens=sum(score.tokens for score in scores),
        nfe=sum(score.nfe for score in scores),
    )


def score_pairs(
    denoiser: Denoiser,
    pairs: Sequence[Pair],
    options: Likelihoods,
    *,
    guidance: float = 0.0,
    block_size: int | None = None,
    seed: int = 0,
    batch: int = 32,
) -> list[Score]:
    """The score of each pair.

    `guidance`: weight of classifier-free guidance, for `count` alone; above 0 the number bounds no likelihood.
    `batch`: rows per forward; changes nothing but rounding. Raises ValueError for empty answers and unknown tokens.
    """
    parts = [cut_at_blocks(pair, block_size) for pair in pairs]
    flat = [part for whole in parts for part in whole]
    if guidance and options.estimator != "count":
        raise ValueError(f"guidance is {guidance}, which estimator={options.estimator!r} does not take; use 'count'")
    if options.estimator == "count":
        found = conditional(
            denoiser,
            [part.prompt for part in flat],
            [part.answer for part in flat],
            samples=options.draws,
            group=options.stratum,
            exact=options.exact,
            guidance=guidance,
            seed=seed,
            rows=[part.row for part in flat],
            batch=batch,
        )
        columns = (found.log_likelihood, found.standard_error, found.tokens, found.nfe)
        scores = [Score(*values) for values in zip(*(column.tolist() for column in columns))]
    elif options.estimator == "nelbo":
        scores = _independent(denoiser, flat, options, seed, batch)
    else:
        scores = _any_order(denoiser, flat, options, seed, batch)
    remaining = iter(scores)
    return [combine([next(remaining) for _ in whole]) for whole in parts]


def _spread(groups: Tensor) -> float:
    """Standard error of the mean of independent numbers."""
    return float(groups.std()) / math.sqrt(len(groups)) if len(groups) > 1 else math.nan


def _rows(pairs: Sequence[Pair], rows: Sequence[int], fill: int) -> Batch:
    """Pairs as a batch, padded on the right, their answers maskable."""
    ids = [torch.tensor(pair.prompt + pair.answer) for pair in pairs]
    lengths = torch.tensor([len(row) for row in ids])
    at = torch.arange(int(lengths.max()))
    real = at < lengths[:, None]
    starts = torch.tensor([len(pair.prompt) for pair in pairs])
    return Batch(
        input_ids=pad_sequence(ids, batch_first=True, padding_value=fill),
        maskable=real & (at >= starts[:, None]),
        rows=torch.tensor(rows),
        attention_mask=None if bool(real.all()) else real,
    )


def _independent(denoiser: Denoiser, pairs: Sequence[Pair], options: Likelihoods, seed: int, batch: int) -> list[Score]:
    """The NELBO of each answer with independent masks; a group of draws is one row of `likelihood.accumulate`."""
    groups = options.draws // options.stratum
    protocol = NelboProtocol(masking="independent", strata_rows=1, samples=options.stratum, seed=seed)
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i].prompt) - len(pairs[i].answer))
    work = [(i, g) for i in order for g in range(groups)]
    values = torch.zeros(len(pairs), groups, dtype=torch.float64)
    for start in range(0, len(work), batch):
        chunk = work[start : start + batch]
        rows = _rows([pairs[i] for i, _ in chunk], [pairs[i].row * groups + g for i, g in chunk], 0)
        sums = accumulate(denoiser, [rows], protocol)
        for (i, g), nats in zip(chunk, sums.nats.tolist()):
            values[i, g] = -nats
    return [Score(float(own.mean()), _spread(own), len(pair.answer), options.draws) for pair, own in zip(pairs, values)]


def _any_order(denoiser: Denoiser, pairs: Sequence[Pair], options: Likelihoods, seed: int, batch: int) -> list[Score]:
    """The chain rule along random orders: the j-th evaluation of an order sees its first j tokens."""
    orders = [
        [
            counter_uniform(seed, _ORDER, pair.row, number, torch.arange(len(pair.answer)))
            .argsort(stable=True)
            .tolist()
            for number in range(options.draws)
        ]
        for pair in pairs
    ]
    longest_first = sorted(range(len(pairs)), key=lambda i: -len(pairs[i].prompt) - len(pairs[i].answer))

    def steps() -> Iterator[tuple[int, int, int]]:
        for i in longest_first:
            for number in range(options.draws):
                for seen in range(len(pairs[i].answer)):
                    yield i, number, seen

    totals = [torch.zeros(options.draws, dtype=torch.float64) for _ in pairs]
    work = steps()
    while chunk := list(itertools.islice(work, batch)):
        rows = _rows([pairs[i] for i, _, _ in chunk], [0] * len(chunk), 0)
        masked, asked = torch.zeros_like(rows.maskable), torch.zeros_like(rows.maskable)
        for place, (i, number, seen) in enumerate(chunk):
            hidden = torch.tensor(orders[i][number][seen:]) + len(pairs[i].prompt)
            masked[place, hidden], asked[place, hidden[0]] = True, True
        for (i, number, _), value in zip(chunk, _ask(denoiser, rows, masked, asked)[0].tolist()):
            totals[i][number] += value
    return [
        Score(float(own.mean()), _spread(own), len(pair.answer), len(pair.answer) * options.draws)
        for pair, own in zip(pairs, totals)
    ]


def _ask(denoiser: Denoiser, rows: Batch, masked: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of the true token at each asked position, and all of them, on the CPU."""
    there = rows.to(denoiser.device)
    tokens = rows.input_ids.masked_fill(masked, denoiser.mask_token_id).to(denoiser.device)
    with torch.no_grad():
        log_probs = denoiser(tokens, attention_mask=there.attention_mask, at=asked.to(denoiser.device)).cpu()
    return log_probs.gather(1, rows.input_ids[asked][:, None]).squeeze(1).double(), log_probs


def greedy_matches(
    denoiser: Denoiser, pairs: Sequence[Pair], *, block_size: int | None = None, batch: int = 32
) -> list[tuple[bool, int]]:
    """Whether greedy decoding writes exactly the answer, and the evaluations that it took to know.

    Greedy decoding is: the likeliest token at the surest position, one at a time. The surest position is the one whose
    likeliest token is most probable (the leftmost of equals), among the masked ones, of the block for a block-causal
    model. A pair is left as soon as one token is wrong.
    """
    parts = [(i, part) for i, pair in enumerate(pairs) for part in cut_at_blocks(pair, block_size)]
    verdict, nfe = [True] * len(pairs), [0] * len(pairs)
    for start in range(0, len(parts), batch):
        live = [(i, part, set(range(len(part.answer)))) for i, part in parts[start : start + batch] if verdict[i]]
        while live:
            rows = _rows([part for _, part, _ in live], [0] * len(live), 0)
            masked = torch.zeros_like(rows.maskable)
            for place, (_, part, hidden) in enumerate(live):
                masked[place, torch.tensor(sorted(hidden)) + len(part.prompt)] = True
            _, log_probs = _ask(denoiser, rows, masked, masked)
            best, tokens = log_probs.max(dim=-1)
            at = 0
            left = []
            for i, part, hidden in live:
                places = sorted(hidden)
                surest = int(best[at : at + len(places)].argmax())
                right = int(tokens[at + surest]) == part.answer[places[surest]]
                at += len(places)
                nfe[i] += 1
                verdict[i] = verdict[i] and right
                if right and len(hidden) > 1:
                    left.append((i, part, hidden - {places[surest]}))
            live = [entry for entry in left if verdict[entry[0]]]
    return list(zip(verdict, nfe))
