"""Are commits as often right as they were sure? `mdlm eval calibration`, on sources whose truth is known.

True sequences with most tokens hidden are filled in by a strategy; a commit is right where it is the hidden token. The
confidence is the probability that the model gave the token when it was (last) written. With the exact conditionals as
the model, commits made all at once are calibrated by construction: whatever a strategy shows beyond that is its own
doing, because it goes on from its own mistakes and takes the tokens of one step to be independent. `temperature` and
`uniform` make the model itself wrong (`NoisyOracle`). Reliability diagrams: DeGroot and Fienberg (1983); the expected
calibration error is the mean distance from the diagonal, weighted by counts (Naeini et al., AAAI 2015). Read next:
`plots.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from mdlm.checkpoint import provenance
from mdlm.denoiser import Denoiser
from mdlm.eval.jsonl import append
from mdlm.eval.plots import Panel, Point, panels
from mdlm.eval.sources import ExactSource
from mdlm.eval.sources_noisy import NoisyOracle
from mdlm.eval.sources_zoo import build_source
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.generate import generate
from mdlm.samplers.strategy import Strategy

CALIBRATION = "calibration.jsonl"


@dataclass(frozen=True)
class Bin:
    """The commits whose confidence lies in (low, high]."""

    low: float
    high: float
    count: int
    confidence: float
    """Mean, in [0, 1]."""
    right: float
    """Share that was right."""
    right_low: float
    """95 % interval of that share (Wilson, 1927), as if commits of one sequence were independent: a little narrow."""
    right_high: float


@dataclass(frozen=True)
class Reliability:
    """All commits of a run over a source, by confidence; empty bins are left out."""

    bins: list[Bin]
    commits: int
    confidence: float
    """Mean over all commits."""
    right: float
    error: float
    """Expected calibration error: mean of |confidence - right| over the bins, weighted by their counts."""
    nfe: float
    """Mean evaluations per sequence."""


def wilson(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Interval for a share of which `right` of `count` (1 or more) were seen; z = 1.96 for 95 %."""
    share, extra = right / count, z * z / count
    centre = (share + extra / 2) / (1 + extra)
    half = z / (1 + extra) * math.sqrt(share * (1 - share) / count + extra / (4 * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def bin_commits(
    confidence: Float64[Tensor, " commits"], right: Bool[Tensor, " commits"], bins: int = 10, nfe: float = math.nan
) -> Reliability:
    """Commits sorted into `bins` of equal width. Raises ValueError for no commits or no bins."""
    if bins < 1 or not len(confidence):
        raise ValueError(f"reliability needs 1 or more bins and commits, got {bins} and {len(confidence)}")
    index = (confidence * bins).ceil().long().clamp(1, bins) - 1
    found = []
    for number in index.unique().tolist():
        here = index == number
        count, hits = int(here.sum()), int(right[here].sum())
        edges = (number / bins, (number + 1) / bins)
        found.append(Bin(*edges, count, float(confidence[here].mean()), hits / count, *wilson(hits, count)))
    total = len(confidence)
    error = sum(b.count * abs(b.confidence - b.right) for b in found) / total
    return Reliability(found, total, float(confidence.mean()), float(right.double().mean()), error, nfe)


def reliability(
    source: ExactSource,
    denoiser: Denoiser,
    strategy: str | Strategy,
    sequences: int = 256,
    given: float = 0.25,
    bins: int = 10,
    seed: int = 0,
    temperature: float | None = None,
    **knobs: Any,
) -> Reliability:
    """Fill in `sequences` draws of `source`, of which the share `given` of tokens (rounded) is shown.

    Args:
        source: of the truth.
        denoiser: the model: the source itself, a `NoisyOracle` of it, or one trained on it.
        strategy: a name in `PRESETS` with its `knobs`, or a `Strategy`.
        sequences: to fill in; all commits of all of them are counted.
        given: share of tokens shown, in [0, 1).
        bins: of equal width.
        seed: of sequences, of what is hidden, and of sampling.
        temperature: of drawing; None: the strategy's own. The confidence is the untempered probability.

    Raises ValueError for values out of range, and what `generate` raises.
    """
    if sequences < 1 or not 0 <= given < 1:
        raise ValueError(f"sequences is {sequences} and given {given}; they must be 1 or more, and in [0, 1)")
    shown = round(given * source.length)
    if shown == source.length:
        raise ValueError(f"given={given} of {source.length} tokens leaves none to write; lower it")
    generator = torch.Generator().manual_seed(seed)
    truth = source.sample(sequences, generator)
    order = torch.rand(truth.shape, generator=generator).argsort(dim=1)
    editable = torch.ones_like(truth, dtype=torch.bool).scatter_(1, order[:, :shown], False)
    canvas = Canvas(truth, editable, torch.full((sequences,), source.length))
    options: dict[str, Any] = {"seed": seed, "temperature": temperature, "eos": "ignore", "batch_size": 256}
    out = generate(denoiser, None, canvas, strategy=strategy, **options, **knobs)
    log_probs, tokens = torch.stack(out.log_probs)[editable], torch.stack(out.tokens)[editable]
    return bin_commits(log_probs.exp(), tokens == truth[editable], bins, float(out.nfe.double().mean()))


def calibration(
    source: str = "markov",
    strategies: list[str] | None = None,
    length: int | None = None,
    sequences: int = 256,
    given: float = 0.25,
    bins: int = 10,
    seed: int = 0,
    sampling_temperature: float | None = None,
    temperature: float = 1.0,
    uniform: float = 0.0,
    output: str = CALIBRATION,
    plot: str | None = None,
) -> list[dict[str, Any]]:
    """Reliability of commits: fill in true sequences of an exact source and compare confidence with being right.

    Args:
        source: a name in `mdlm.eval.sources_zoo.SOURCES`.
        strategies: names of strategies, with their own defaults; default: first_hitting, threshold, eb, dus.
        length: of the sequences; default: the source's own.
        sequences: to fill in for each strategy.
        given: share of tokens shown, in [0, 1).
        bins: of equal width over the confidence.
        seed: of sequences, of what is hidden, and of sampling.
        sampling_temperature: of drawing tokens; default: each strategy's own.
        temperature: of the oracle's predictions (1: exact; below: overconfident), to stand for a model that errs.
        uniform: share of uniform noise in the oracle's predictions, in [0, 1].
        output: JSON-lines file to append to, a line per strategy.
        plot: draw the diagram into this file (needs matplotlib); `mdlm eval plot calibration` draws it later.

    Raises:
        ValueError: unknown names, values out of range, a strategy that needs more than a source can give.
    """
    exact = build_source(source, length)
    denoiser = exact if (temperature, uniform) == (1.0, 0.0) else NoisyOracle(exact, temperature, uniform)
    settings = {
        "source": source,
        "length": exact.length,
        "sequences": sequences,
        "given": given,
        "seed": seed,
        "sampling_temperature": sampling_temperature,
        "temperature": temperature,
        "uniform": uniform,
    }
    records = []
    for name in strategies or ["first_hitting", "threshold", "eb", "dus"]:
        found = reliability(exact, denoiser, name, sequences, given, bins, seed, sampling_temperature)
        records.append({"kind": "calibration", "strategy": name, **settings, **asdict(found), **provenance()})
    append(Path(output), records)
    if plot is not None:
        panels(reliability_panels(records), plot)
    return records


def reliability_panels(records: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """The reliability diagram of one source's records, a line per strategy, and how many commits each bin has."""
    right: dict[str, list[Point]] = {}
    counts: dict[str, list[Point]] = {}
    for record in records:
        label = f"{record['strategy']}: error {record['error']:.3f}, NFE {record['nfe']:.1f}"
        label = label if label not in right else f"{label} ({len(right) + 1})"
        bins = record["bins"]
        right[label] = [(b["confidence"], b["right"], b["right_low"], b["right_high"]) for b in bins]
        counts[label] = [((b["low"] + b["high"]) / 2, b["count"]) for b in bins]
    about, x_label = f"{records[0]['source']}, length {records[0]['length']}", "confidence when committed"
    bars: dict[str, Any] = {"spread": "bars", "diagonal": True, "markers": True}
    return [
        Panel(right, f"reliability of commits: {about}", x_label, "share that was right (95 % interval)", **bars),
        Panel(counts, f"how many commits: {about}", x_label, "commits in the bin", y_scale="log", markers=True),
    ]


def summary(record: Mapping[str, Any]) -> str:
    """One line for the eye."""
    return (
        f"{record['strategy']}: {record['commits']} commits, confidence {record['confidence']:.3f}, right "
        f"{record['right']:.3f}, calibration error {record['error']:.3f}, NFE {record['nfe']:.1f}"
    )


def main(argv: list[str] | None = None) -> int:
    """Entry of `mdlm eval calibration`."""
    from mdlm.command import run_command

    def report(records: list[dict[str, Any]]) -> list[str]:
        short = [{key: value for key, value in record.items() if key != "bins"} for record in records]
        return [json.dumps(short), *map(summary, records)]

    return run_command(calibration, argv, prog="mdlm eval calibration", report=report)
