"""`mdlm eval curves`: sweep strategies over sources; write points (JSON lines), pictures, an HTML and a Markdown table.

Sources are never averaged: which strategy is best depends on the structure of the text, and that is the result. Points
are written as they are measured; `--resume true` goes on after an interruption. Read first: `curves.py`.
"""

from __future__ import annotations

import html
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mdlm.checkpoint import provenance
from mdlm.denoiser import Denoiser
from mdlm.eval.curves import CORE, RARE, SWEEPS, Truth, curve_point
from mdlm.eval.jsonl import append, drop_torn_line
from mdlm.eval.likelihood_run import weights_digest
from mdlm.eval.sources import ExactSource
from mdlm.eval.sources_noisy import NoisyOracle, excess_nats
from mdlm.eval.sources_text import SourceModel
from mdlm.eval.sources_zoo import build_source
from mdlm.load import load_model

DEFAULT_SOURCES = ["markov", "noisy_copy", "parity", "templates", "dyck", "sudoku"]
JUDGED_BY_KL = {"markov", "hmm", "noisy_copy", "templates"}
"""Sources of which no strategy draws an impossible sequence with the oracle, and hardly one with a model: judged by
`kl`, which has less noise than the gap and no sign. The others by the share of impossible sequences; their gap is of
the possible ones only, and 0 where all are equally likely."""

POINTS = "points.jsonl"
GOOD_KL, GOOD_SHARE = 0.02, 0.05
"""Good enough: a divergence of at most 2 % of the entropy above the least that any point of the source has (0 with an
oracle), or at most 5 % more impossible sequences than that."""
GATE_SAMPLES = 64

Record = dict[str, Any]


def curves(
    output: str = "curves",
    sources: list[str] = DEFAULT_SOURCES,
    strategies: list[str] | None = None,
    length: int | None = None,
    seeds: list[int] | None = None,
    samples: int = 64,
    temperature: float = 1.0,
    uniform: float = 0.0,
    noise: float = 0.0,
    model: str | None = None,
    resamples: int = 200,
    source_seed: int = 0,
    plots: bool = True,
    resume: bool = False,
) -> dict[str, Any]:
    """Quality against speed: every strategy, swept over its own knob, on sources with known probabilities.

    Args:
        output: folder for points.jsonl, curves.html, curves.md and a picture per source.
        sources: names in `mdlm.eval.sources_zoo.SOURCES`: markov, hmm, copy, noisy_copy, parity, dyck, templates,
            sudoku, addition, json.
        strategies: names in `mdlm.eval.curves.SWEEPS`; default: the eleven of `CORE`.
        length: of all sequences; default: each source's own.
        seeds: each gives `samples` sequences, the same noise for every strategy; default: 0, 1, 2.
        samples: sequences per seed and point.
        temperature: of the oracle's predictions (1: exact; below: overconfident), to stand for a model that errs.
        uniform: share of uniform noise in the oracle's predictions, in [0, 1].
        noise: standard deviation of Gaussian noise on the oracle's logits, drawn anew for every canvas, position and
            symbol (layer A3, `sources_noisy.py`).
        model: checkpoint of a model that was trained on the one source named (layer B, `python -m
            mdlm.training.layer_b`); it predicts in float64 in the oracle's place.
        resamples: bootstrap samples of the 95 % bands.
        source_seed: of random sources.
        plots: draw pictures (needs matplotlib).
        resume: keep the points that the folder holds already.

    Raises:
        ValueError: unknown names, too few samples or seeds, a model that does not fit its source, a folder that holds
            points already, a failed gate.
    """
    seeds = [0, 1, 2] if seeds is None else seeds
    names = list(CORE) if strategies is None else strategies
    unknown = [name for name in names if name not in SWEEPS]
    if unknown:
        raise ValueError(f"no sweep is defined for {', '.join(unknown)}; there are: {', '.join(SWEEPS)}")
    if not seeds or len(set(seeds)) != len(seeds) or samples < 2 or resamples < 1:
        raise ValueError("curves need different seeds, 2 or more samples for each, and 1 or more resamples")
    if not sources or not names:
        raise ValueError("name one source or more, and one strategy or more")
    for source in sources:
        NoisyOracle(build_source(source, length, source_seed), temperature, uniform, noise)
    trained = None
    if model is not None:
        if len(sources) != 1 or (temperature, uniform, noise) != (1.0, 0.0, 0.0):
            raise ValueError("a model stands for one oracle: give one source, and no temperature, uniform or noise")
        trained = SourceModel(*load_model(model, "float64", "cpu"), build_source(sources[0], length, source_seed))
    folder = Path(output)
    path = folder / POINTS
    if path.exists() and not resume:
        raise ValueError(f"{path} exists; give another --output, or --resume true to go on with it")
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "length": length,
        "seeds": seeds,
        "samples": samples,
        "temperature": temperature,
        "uniform": uniform,
        "noise": noise,
        "weights": None if trained is None else weights_digest(trained.model),
        "resamples": resamples,
        "source_seed": source_seed,
    }
    done = _stored(path, settings) if path.exists() else []
    records = list(done)
    append(path, [{"kind": "curves", "settings": settings, **provenance()}])
    for record in measured(sources, names, settings, {_key(point) for point in done}, trained):
        append(path, [record])
        records.append(record)
        print(progress(record), file=sys.stderr, flush=True)
    chosen = [record for record in records if record["source"] in sources and record.get("strategy") in (None, *names)]
    pictures = draw(chosen, folder) if plots else {}
    (folder / "curves.html").write_text(as_html(chosen, pictures), encoding="utf-8")
    (folder / "curves.md").write_text(as_markdown(chosen), encoding="utf-8")
    return {"output": str(folder), "points": sum(record["kind"] == "point" for record in chosen)}


def measured(
    sources: Sequence[str],
    names: Sequence[str],
    settings: Mapping[str, Any],
    done: set[tuple[Any, ...]],
    trained: SourceModel | None = None,
) -> Iterator[Record]:
    """The truth of each source and the points that are not done yet.

    Where something that errs stands for the oracle, the gate of exactness is passed with the oracle first. Raises
    GateError.
    """
    seeds, samples = settings["seeds"], settings["samples"]
    for name in sources:
        source = build_source(name, settings["length"], settings["source_seed"])
        truth = Truth.of(source, samples, len(seeds))
        denoiser = _denoiser(source, settings, trained)
        exact = denoiser is source
        about = {
            "source": name,
            "length": source.length,
            "entropy": source.entropy(),
            "judged_by": "kl" if name in JUDGED_BY_KL else "impossible",
        }
        head = {"kind": "truth", **about, "entropy_error": source.entropy_error, **truth.values}
        if _key(head) not in done:
            excess, error = (0.0, 0.0) if exact else excess_nats(source, denoiser)
            yield {**head, "excess": excess, "excess_error": error}
        for strategy in names:
            values, one_token = SWEEPS[strategy].values, SWEEPS[strategy].one_token
            left = [value for value in values if ("point", name, strategy, value) not in done]
            if left and not exact and one_token is not None:
                curve_point(truth, source, strategy, one_token, seeds[:1], GATE_SAMPLES, resamples=0, twice=False)
            for value in left:
                point = curve_point(
                    truth,
                    denoiser,
                    strategy,
                    value,
                    seeds,
                    samples,
                    settings["resamples"],
                    exact,
                    twice=value == values[len(values) // 2],
                )
                yield {"kind": "point", "source": name, "strategy": strategy, "value": value, **about, **point}


def _denoiser(source: ExactSource, settings: Mapping[str, Any], trained: SourceModel | None) -> Denoiser:
    if trained is not None:
        return trained
    how = (settings["temperature"], settings["uniform"], settings["noise"])
    return source if how == (1, 0, 0) else NoisyOracle(source, *how)


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return record["kind"], record["source"], record.get("strategy"), record.get("value")


def _stored(path: Path, settings: Mapping[str, Any]) -> list[Record]:
    """The records of a file; a half-written last line is dropped. Raises ValueError if other settings made it."""
    drop_torn_line(path)
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} was not written by this command ({error}); give another --output") from error
    if any(record["kind"] == "curves" and record["settings"] != dict(settings) for record in records):
        raise ValueError(f"{path} was made with other settings; give another --output")
    return [record for record in records if record["kind"] != "curves"]


def progress(record: Mapping[str, Any]) -> str:
    """One line for the eye."""
    if record["kind"] == "truth":
        return f"{record['source']}: length {record['length']}, entropy {record['entropy']:.2f} nats"
    return (
        f"  {record['strategy']} {record['knob']}={record['value']}: NFE {record['nfe']:.1f}, "
        f"gap {_shown(record['gap'], 2, sign=True)}, possible {record['possible']:.3f}"
    )


# Comparing strategies of one source.


def error(record: Mapping[str, Any]) -> float:
    """What a point of this source is judged by, 0 = perfect: `kl` in nats, or the share of impossible sequences.

    Infinite where a strategy has no `kl`.
    """
    if record["judged_by"] == "kl":
        return math.inf if record["kl"] is None else float(record["kl"])
    return 1 - float(record["possible"])


def error_at(points: Sequence[Record], most: float) -> float | None:
    """Least error of one curve's points with at most so many evaluations; None if it has none."""
    return min((error(point) for point in points if point["nfe"] <= most + 1e-9), default=None)


def tolerance(truth: Mapping[str, Any]) -> float:
    """How much more error than the least is good enough (`GOOD_KL`, `GOOD_SHARE`)."""
    return GOOD_KL * float(truth["entropy"]) if truth["judged_by"] == "kl" else GOOD_SHARE


def cost_of_good(points: Sequence[Record], limit: float) -> float | None:
    """Fewest evaluations of one curve's points with no more error than `limit`; None if there is none."""
    return min((float(point["nfe"]) for point in points if error(point) <= limit), default=None)


def by_curve(records: Sequence[Record], source: str) -> dict[str, list[Record]]:
    """Strategy -> its points on this source, fewest evaluations first."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record["kind"] == "point" and record["source"] == source:
            found.setdefault(record["strategy"], []).append(record)
    return {name: sorted(points, key=lambda point: float(point["nfe"])) for name, points in found.items()}


def _truths(records: Sequence[Record]) -> dict[str, Record]:
    return {record["source"]: record for record in records if record["kind"] == "truth"}


BUDGETS = (8, 4, 2, 1)


def as_markdown(records: Sequence[Record]) -> str:
    """A table per source: the least error at so many evaluations, the best in bold, and the cost of a good result."""
    parts = []
    for source, truth in _truths(records).items():
        length, divergence = truth["length"], truth["judged_by"] == "kl"
        what = "divergence in nats" if divergence else "share of impossible sequences"
        heads = [f"NFE ≤ {length / budget:g}" for budget in BUDGETS]
        curves_ = by_curve(records, source)
        least = min((error(point) for points in curves_.values() for point in points), default=0.0)
        limit = (0.0 if math.isinf(least) else least) + tolerance(truth)
        shown = f"{limit:.2f} nats" if divergence else f"{limit:.1%}"
        columns = [[error_at(points, length / budget) for points in curves_.values()] for budget in BUDGETS]
        columns.append([cost_of_good(points, limit) for points in curves_.values()])
        lines = [
            f"### {source} (length {length}, entropy {truth['entropy']:.1f} nats{_excess(truth)}): {what}",
            "",
            f"| strategy | {' | '.join(heads)} | NFE for ≤ {shown} |",
            "|---" * (len(columns) + 1) + "|",
        ]
        digits = [2 if divergence else 3] * len(BUDGETS) + [1]
        for row, name in enumerate(curves_):
            cells = [_cell(column[row], column, places) for column, places in zip(columns, digits)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _excess(truth: Mapping[str, Any]) -> str:
    """How wrong the denoiser is that stood for the oracle; nothing for the oracle itself."""
    if not truth["excess"]:
        return ""
    return f", denoiser {truth['excess']:.3f} ± {truth['excess_error']:.3f} nats per token above it"


def _cell(value: float | None, column: Sequence[float | None], places: int) -> str:
    shown = _shown(value, places)
    best = min((other for other in column if other is not None), default=None)
    return f"**{shown}**" if value is not None and shown == _shown(best, places) else shown


def _shown(value: float | None, places: int, sign: bool = False) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{round(value, places) + 0.0:{'+' if sign else ''}.{places}f}"  # + 0.0: no minus before a zero


COLUMNS = {
    "nfe": ("NFE", 1),
    "tokens_fed": ("tokens fed", 0),
    "seconds_per_sample": ("s / sample", 4),
    "gap": ("gap, nats", 2),
    "kl": ("divergence, nats", 2),
    "possible": ("possible", 3),
    "rare": (f"rare (p < {RARE})", 4),
    "pair_tv": ("pair TV", 3),
    "far_pair_tv": ("far pair TV", 3),
    "distinct_4": ("distinct-4", 3),
}
"""Measure -> heading and digits."""


def as_html(records: Sequence[Record], pictures: Mapping[str, str]) -> str:
    """Every point with its bands, in one file that needs nothing else. `pictures`: SVG by source."""
    style = "td,th{padding:2px 8px;text-align:right}small{color:#666}body{font-family:sans-serif}svg{max-width:60em}"
    parts = ["<!doctype html><meta charset=utf-8><title>Quality against speed</title>", f"<style>{style}</style>"]
    heads = "".join(f"<th>{html.escape(head)}</th>" for head, _ in COLUMNS.values())
    for source, truth in _truths(records).items():
        parts.append(
            f"<h2>{html.escape(source)}: length {truth['length']}, {truth['entropy']:.2f} nats{_excess(truth)}</h2>"
        )
        parts.append(pictures.get(source, ""))
        parts.append(f"<table><tr><th>strategy</th><th>knob</th>{heads}</tr>")
        rows = [("the source itself", "", truth)]
        for name, points in by_curve(records, source).items():
            rows += [(name, f"{point['knob']}={point['value']}", point) for point in points]
        for name, knob, record in rows:
            cells = "".join(_html_cell(record, key, places) for key, (_, places) in COLUMNS.items())
            parts.append(f"<tr><td>{html.escape(name)}</td><td>{html.escape(knob)}</td>{cells}</tr>")
        parts.append("</table>")
    return "\n".join(parts)


def _html_cell(record: Mapping[str, Any], key: str, places: int) -> str:
    shown = _shown(record.get(key), places, sign=key == "gap")
    band = ""
    if record.get(f"{key}_low") is not None:
        low, high = record[f"{key}_low"], record[f"{key}_high"]
        band = f" <small>{low:.{places}f} .. {high:.{places}f}</small>"
    return f"<td>{shown}{band}</td>"


X_AXES = {
    "nfe": "evaluations per sample (NFE)",
    "tokens_fed": "tokens fed per sample",
    "seconds_per_sample": "seconds per sample, all samples in one batch",
}
"""Costs that curves are drawn over -> label."""


def curve_series(records: Sequence[Record], x: str = "nfe") -> dict[str, tuple[str, str, float, dict[str, list[Any]]]]:
    """What is drawn per source: heading, label, level of what is perfect, and per strategy (x, value, low, high)."""
    found = {}
    for source, truth in _truths(records).items():
        key, level = ("gap", 0.0) if source in JUDGED_BY_KL else ("possible", 1.0)
        series = {
            name: sorted(
                (point[x], point[key], point[f"{key}_low"], point[f"{key}_high"])
                for point in points
                if point[key] is not None
            )
            for name, points in by_curve(records, source).items()
        }
        heading = f"{source}, length {truth['length']}, {truth['entropy']:.1f} nats"
        label = "mean -log p minus entropy, nats" if key == "gap" else "share of possible sequences"
        found[source] = heading, label, level, {name: points for name, points in series.items() if points}
    return found


def draw(records: Sequence[Record], folder: Path) -> dict[str, str]:
    """Pictures per source in `folder`: signed gap, or share of possible sequences, against each of `X_AXES`."""
    from mdlm.eval.plots import band_plot

    pictures: dict[str, str] = {}
    for x, x_label in X_AXES.items():
        for source, (heading, label, level, series) in curve_series(records, x).items():
            path = folder / (f"{source}.svg" if x == "nfe" else f"{source}_{x}.svg")
            band_plot(series, path, title=heading, x_label=x_label, y_label=label, level=level)
            text = path.read_text(encoding="utf-8")
            pictures[source] = pictures.get(source, "") + text[text.index("<svg") :]
    return pictures


def main(argv: list[str] | None = None) -> int:
    """Entry of `mdlm eval curves`."""
    from mdlm.command import run_command

    return run_command(curves, argv, prog="mdlm eval curves", report=lambda record: [json.dumps(record)])
