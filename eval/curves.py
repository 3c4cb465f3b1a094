"""Quality against speed of unmasking strategies, on sources whose probabilities are known exactly.

The oracle denoiser of a source makes no mistakes, so whatever is wrong with the samples is the strategy's own error
(layer A); a `NoisyOracle` stands for a model that errs (layer A3), a `SourceModel` is one (layer B). Each strategy is
swept over its own knob. Measured is what judges like generative perplexity miss: the *signed* gap of the mean -log p to
the entropy (a sampler that prefers likely tokens lies below 0 and is as wrong as one above), the share of possible
sequences and of rare steps, pair frequencies, variety. All sampling is at temperature 1, with the same noise for all
strategies. Three gates fail a run: one token a step must be exact, the counts of evaluations and tokens must be what
the denoiser saw, and a row must not depend on its batch. Read next: `sources_zoo.py`, `curve_report.py`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float64, Int, Int64
from torch import Tensor

from mdlm.denoiser import Denoiser
from mdlm.eval.sources import ExactSource
from mdlm.samplers.cache import NoCache
from mdlm.samplers.canvas import Canvas, Generation
from mdlm.samplers.generate import generate
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.strategy import Strategy


@dataclass(frozen=True)
class Sweep:
    """A strategy, the knob that trades its quality for speed, and the values it is tried with."""

    strategy: str
    knob: str
    values: tuple[float | int | None, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Other knobs."""
    one_token: float | int | None = None
    """The value of the knob at which it commits one token a step, drawn after its position is chosen; there it must be
    exact. None: there is none."""

    def build(self, value: float | int | None) -> Strategy:
        """The strategy at this value, at temperature 1; tokens are drawn before or after selection as it does."""
        knobs = {**self.fixed, self.knob: value} if self.knob else dict(self.fixed)
        strategy = build_strategy(self.strategy, **knobs)
        return dataclasses.replace(strategy, draw=dataclasses.replace(strategy.draw, temperature=1.0))


_TOKENS = (1, 2, 4, 8, 16, 32)
_STEPS = (2, 4, 8, 16, 32, 64)
_THRESHOLDS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.97, 1.01)
_NATS = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_WHOLE: dict[str, Any] = {"block_length": None}

SWEEPS: dict[str, Sweep] = {
    "ancestral": Sweep("ancestral", "steps", _STEPS),
    "random": Sweep("confidence", "k", _TOKENS, {"score": "random"}, one_token=1),
    "confidence": Sweep("confidence", "k", _TOKENS, one_token=1),
    "margin": Sweep("confidence", "k", _TOKENS, {"score": "margin"}, one_token=1),
    "entropy": Sweep("confidence", "k", _TOKENS, {"score": "entropy"}, one_token=1),
    "threshold": Sweep("threshold", "threshold", _THRESHOLDS, _WHOLE, one_token=1.01),
    "threshold_blocks": Sweep("threshold", "threshold", _THRESHOLDS, {"block_length": 16}, one_token=1.01),
    "factor": Sweep("factor", "factor", (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0), _WHOLE, one_token=0.0),
    "eb": Sweep("eb", "gamma", _NATS),
    "spaced": Sweep("spaced", "gamma", _NATS, {"spacing": 4}),
    "spans": Sweep("spans", "budget", _NATS, {"threshold": 0.0, "max_len": 4, **_WHOLE}),
    "entropy_threshold": Sweep("entropy_threshold", "max_entropy", _NATS[:-1], _WHOLE),
    "wedlm": Sweep("wedlm", "max_entropy", _NATS[:-1]),
    "klass": Sweep("klass", "threshold", _THRESHOLDS, _WHOLE, one_token=1.01),
    "swd": Sweep("swd", "threshold", _THRESHOLDS, _WHOLE, one_token=1.01),
    "hierarchy": Sweep("hierarchy", "threshold", _THRESHOLDS[:-1], {"low": 0.3, **_WHOLE}),
    "depcap": Sweep("depcap", "gamma", (-32.0, -16.0, -8.0, -4.0, -2.0, -1.0), _WHOLE),
    "dus": Sweep("dus", "block_length", (1, 2, 4, 8, 16, 32, 64), one_token=1),
    "remdm": Sweep("remdm", "steps", (4, 8, 16, 32, 64, 128)),
    "lopa": Sweep("lopa", "threshold", _THRESHOLDS, {"branches": 2, **_WHOLE}),
    "wino": Sweep("wino", "tau_wide", (0.2, 0.3, 0.45, 0.6, 0.8, 0.95), {"verify": "masked", **_WHOLE}),
    "llada": Sweep("llada", "steps", _STEPS),
    "sdar": Sweep("sdar", "threshold", _THRESHOLDS, {"steps": 64, **_WHOLE}),
    "credit": Sweep("credit", "threshold", _THRESHOLDS, _WHOLE),
}
"""Name of a curve -> its sweep. Strategies that need attention or stored keys of a network have none."""

CORE = ("random", "ancestral", "confidence", "threshold", "factor", "eb", "spaced", "spans", "klass", "swd", "dus")
"""The curves drawn unless others are asked for: the extremes, the usual choices and the ones with a guarantee."""


@dataclass
class Counting:
    """A denoiser that counts what it is asked and rounds what it answers.

    Log-probabilities are rounded to multiples of 2^-30: equal predictions then tie exactly, whatever order of addition
    the size of the batch brings about.
    """

    base: Denoiser
    rows: int = 0
    tokens: int = 0

    @property
    def mask_token_id(self) -> int:
        """The base's."""
        return self.base.mask_token_id

    @property
    def num_tokens(self) -> int:
        """The base's."""
        return self.base.num_tokens

    @property
    def device(self) -> torch.device:
        """The base's."""
        return self.base.device

    def __call__(
        self,
        tokens: Int[Tensor, "batch seq"],
        *,
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
        position_ids: Int[Tensor, "batch seq"] | None = None,
        at: Bool[Tensor, "batch seq"] | None = None,
    ) -> Tensor:
        """See `Denoiser`."""
        self.rows += tokens.shape[0]
        self.tokens += tokens.numel() if attention_mask is None else int(attention_mask.sum())
        answer = self.base(tokens, attention_mask=attention_mask, position_ids=position_ids, at=at)
        return (answer * 2.0**30).round() / 2.0**30


def row_seeds(seeds: Sequence[int], samples: int) -> list[int]:
    """A seed for each row: `samples` rows for each of `seeds`, the same for every strategy."""
    return [seed * 1_000_003 + row for seed in seeds for row in range(samples)]


def draw_samples(
    denoiser: Denoiser, length: int, strategy: Strategy, seeds: Sequence[int], batch_size: int | None = None
) -> Generation:
    """One sequence per seed on an empty canvas."""
    canvas = Canvas.from_prompts([[]] * len(seeds), length)
    size = len(seeds) if batch_size is None else batch_size
    return generate(denoiser, None, canvas, strategy=strategy, seed=seeds, eos="ignore", batch_size=size)


# What is measured of samples. Every value is a mean over rows, so that one set of resampling weights serves them all.

KL_POSSIBLE = 0.9
"""Least share of possible sequences of which a divergence says something (a model gives mass to what cannot be)."""
RARE = 0.01
"""A step of a sequence is rare if its symbol has less than this probability given what stands before it."""


def pair_counts(x: Int64[Tensor, "n length"], distance: int, vocab: int) -> Float64[Tensor, "n pairs"]:
    """Share of each pair of symbols `distance` apart within each row."""
    code = x[:, :-distance] * vocab + x[:, distance:]
    counts = torch.zeros(len(x), vocab * vocab, dtype=torch.float64)
    return counts.scatter_add_(1, code, torch.ones_like(code, dtype=torch.float64)) / code.shape[1]


def distinct(x: Int64[Tensor, "n length"], n: int) -> float:
    """Number of different n-grams over number of n-grams, in all rows together."""
    grams = x.unfold(1, n, 1).reshape(-1, n)
    return len(grams.unique(dim=0)) / len(grams)


@dataclass(frozen=True)
class Truth:
    """What samples of a source are compared with."""

    source: ExactSource
    near: Float64[Tensor, " pairs"]
    far: Float64[Tensor, " pairs"]
    values: dict[str, float]
    """The measures of as many true samples as a point has: what a perfect sampler would show, noise floor included."""

    @staticmethod
    def of(source: ExactSource, samples: int, seeds: int = 1, draws: int = 20_000) -> Truth:
        """Pair frequencies from `draws` sequences, measures from `samples` others for each of `seeds` groups."""
        generator = torch.Generator(source.device).manual_seed(20_261)
        x = source.sample(draws, generator)
        near = pair_counts(x, 1, source.vocab).mean(0)
        far = pair_counts(x, source.length // 2, source.vocab).mean(0)
        truth = Truth(source, near, far, {})
        truth.values.update(measure(truth, source.sample(samples * seeds, generator), [samples] * seeds))
        return truth


def measure(
    truth: Truth,
    x: Int64[Tensor, "n length"],
    groups: Sequence[int],
    resamples: int = 0,
    costs: Mapping[str, Tensor] | None = None,
    drawn: Float64[Tensor, " n"] | None = None,
) -> dict[str, Any]:
    """The measures of samples, each with a bootstrap 95 % band if `resamples` > 0 (`NAME_low`, `NAME_high`).

    `groups`: rows per seed, for `distinct_4`, whose band is the range over seeds (resampling repeats rows and would
    lower it). `gap` is over the possible sequences only, None if there are none. nats.

    `drawn`: each row's sum of the log-probabilities under which its tokens were drawn. Then `kl` is the mean of that
    minus log p: the divergence of how the row was drawn from the same order of positions with exact conditionals, by
    the chain rule at least KL(strategy || source). It is 0 in every single row where one token is drawn a step, so it
    has far less noise than the gap. Like the gap it is over the possible sequences; None if fewer than `KL_POSSIBLE`
    are.
    """
    source = truth.source
    steps = source.step_log_probs(x)
    nats = -source.log_prob(x)
    possible = nats.isfinite().double()
    weights = torch.ones(1, len(x), dtype=torch.float64)
    if resamples:
        generator = torch.Generator().manual_seed(7)
        picks = torch.randint(len(x), (resamples, len(x)), generator=generator)
        counts = torch.zeros(resamples, len(x), dtype=torch.float64)
        weights = torch.cat([weights, counts.scatter_add_(1, picks, torch.ones_like(picks, dtype=torch.float64))])
    n = len(x)
    near, far = pair_counts(x, 1, source.vocab), pair_counts(x, source.length // 2, source.vocab)
    kept = weights @ possible
    values = {
        "gap": weights @ torch.where(possible > 0, nats, 0.0) / kept - source.entropy(),
        "possible": kept / n,
        "rare": weights @ (steps < math.log(RARE)).double().mean(dim=1) / n,
        "pair_tv": (weights @ near / n - truth.near).abs().sum(dim=1) / 2,
        "far_pair_tv": (weights @ far / n - truth.far).abs().sum(dim=1) / 2,
        **{name: weights @ cost.double() / n for name, cost in (costs or {}).items()},
    }
    record: dict[str, Any] = {"kl": None}
    if drawn is not None and float(possible.mean()) >= KL_POSSIBLE:
        values["kl"] = weights @ torch.where(possible > 0, drawn + nats, 0.0) / kept
    for name, value in values.items():
        record[name] = _finite(value[0])
        if resamples:
            sure = value[1:][value[1:].isfinite()]
            band = sure.quantile(torch.tensor([0.025, 0.975]).double()) if len(sure) else value[1:3]
            record[f"{name}_low"], record[f"{name}_high"] = _finite(band[0]), _finite(band[1])
    if record["gap"] is not None and int(possible.sum()) > 1:
        spread = float(nats[possible > 0].std()) / math.sqrt(int(possible.sum()))
        record["gap_error"] = math.hypot(spread, source.entropy_error)
    each = [distinct(part, min(4, source.length)) for part in x.split(list(groups))]
    record["distinct_4"] = sum(each) / len(each)
    if resamples:
        record["distinct_4_low"], record["distinct_4_high"] = min(each), max(each)
    return record


def _finite(value: Tensor) -> float | None:
    return float(value) if bool(value.isfinite()) else None


# Gates: a table is not worth reading if one of these fails.


class GateError(ValueError):
    """Something that must hold does not: the run's numbers mean nothing."""


def check_exact(name: str, record: Mapping[str, Any]) -> None:
    """One token a step is exact: every sequence possible, gap 0 within 4 standard errors, no divergence in the drawing.

    Raises GateError.
    """
    off = record["possible"] < 1 or abs(record["gap"]) > 4 * record["gap_error"] + 1e-6
    if off or (record["kl"] is not None and abs(record["kl"]) > 1e-4):
        raise GateError(
            f"{name}: one token a step must follow the source's law, but the gap is {record['gap']} ± "
            f"{record.get('gap_error')} nats, the divergence {record['kl']} nats, and {record['possible']:.3f} of the "
            "sequences possible"
        )


def check_counts(name: str, out: Generation, seen: Counting) -> None:
    """Counted evaluations and tokens are those that the denoiser saw. Raises GateError."""
    nfe, fed = int(out.nfe.sum()), int(out.tokens_fed.sum())
    if (nfe, fed) != (seen.rows, seen.tokens):
        raise GateError(
            f"{name}: counted {nfe} evaluations and {fed} tokens fed, the denoiser saw {seen.rows} and {seen.tokens}"
        )


def check_batch(
    name: str, denoiser: Denoiser, length: int, strategy: Strategy, seeds: Sequence[int], out: Generation
) -> None:
    """Some rows of `out`, sampled again in another order and in a smaller batch, are the same. Raises GateError."""
    rows = sorted({0, len(seeds) // 2, len(seeds) - 1}, reverse=True)
    again = draw_samples(denoiser, length, strategy, [seeds[row] for row in rows])
    for i, row in enumerate(rows):
        same = torch.equal(again.tokens[i], out.tokens[row]) and torch.equal(again.step_map[i], out.step_map[row])
        if not same or int(again.nfe[i]) != int(out.nfe[row]):
            raise GateError(f"{name}: row {row} of {len(seeds)} comes out differently in a batch of {len(rows)}")


def curve_point(
    truth: Truth,
    denoiser: Denoiser,
    name: str,
    value: float | int | None,
    seeds: Sequence[int],
    samples: int,
    resamples: int = 200,
    exact: bool = True,
    twice: bool = True,
) -> dict[str, Any]:
    """One point of the curve `name`: costs and measures of `samples` sequences for each of `seeds`.

    Raises GateError. The gate of exactness is for the points that are so and only with `exact` (not for a noisy
    oracle); with `twice` some rows are sampled again for the gate of batches.
    """
    sweep, source = SWEEPS[name], truth.source
    strategy, rows = sweep.build(value), row_seeds(seeds, samples)
    counting = Counting(denoiser)
    start = time.perf_counter()
    out = draw_samples(counting, source.length, strategy, rows)
    seconds = time.perf_counter() - start
    label = f"{name} {sweep.knob}={value}"
    check_counts(label, out, counting)
    if twice:
        check_batch(label, Counting(denoiser), source.length, strategy, rows, out)
    x = torch.stack(out.tokens)
    costs = {"nfe": out.nfe, "tokens_fed": out.tokens_fed}
    # Tokens that are ranked once drawn, revised, fused with history or chosen among branches do not follow the law they
    # are noted with.
    noted = strategy.revise is None and not (strategy.draw.before_select or strategy.transforms)
    noted = noted and isinstance(strategy.cache, NoCache)
    drawn = torch.stack(out.log_probs).nansum(dim=1) if noted else None
    record = measure(truth, x, [samples] * len(seeds), resamples, costs, drawn)
    if exact and value is not None and value == sweep.one_token:
        check_exact(label, record)
    return {
        "strategy": name,
        "preset": sweep.strategy,
        "knob": sweep.knob,
        "value": value,
        "fixed": dict(sweep.fixed),
        "one_token": value is not None and value == sweep.one_token,
        "samples": len(rows),
        "seconds_per_sample": seconds / len(rows),
        "batch": len(rows),
        **record,
    }
