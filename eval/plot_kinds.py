"""Which pictures there are: `mdlm eval plot training | traffic | curves | calibration | schedules`.

Everything but the schedules is read from files that other commands write, so a picture can be drawn again, and several
runs into one. `plots.py` does the drawing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from mdlm.eval.plots import Panel, Point, panels, scale_around
from mdlm.schedule import Cosine, Linear, NoiseSchedule, Polynomial

Kind = Literal["training", "traffic", "curves", "calibration", "schedules"]
Record = Mapping[str, Any]


def plot(kind: Kind, paths: list[str] | None = None, out: str = "plot.png", title: str | None = None) -> str:
    """Draw a picture of what other commands wrote.

    Args:
        kind: `training`: loss, validation NELBO, learning rate and speed of runs; `traffic`: what
            islands send each other, and how far they agree; `curves`: quality against evaluations (`mdlm eval curves`);
            `calibration`: reliability of commits (`mdlm eval calibration`); `schedules`: the noise schedules.
        paths: run folders or their metrics.jsonl; for curves and calibration the JSON-lines files (or their folder).
        out: picture to write; .png, .svg or .pdf.
        title: above all panels.

    Raises:
        ValueError: no paths where some are needed, a file without such records, matplotlib missing.
    """
    given = [Path(path) for path in paths or []]
    if kind == "schedules":
        if given:
            raise ValueError("schedules are drawn from their formulas: give no paths")
        parts = schedule_panels()
    else:
        if not given:
            raise ValueError(f"{kind} is drawn from files; give at least one with --paths")
        parts = FROM_FILES[kind](given)
    return str(panels(parts, out, title=title))


def read_lines(path: Path, name: str) -> list[dict[str, Any]]:
    """The records of a JSON-lines file, or of `name` in a folder. Raises ValueError where a line is no JSON object."""
    file = path / name if path.is_dir() else path
    records = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}, line {number} is not JSON ({error}); is this the right file?") from error
        if not isinstance(record, dict):
            raise ValueError(f"{file}, line {number} is no JSON object; is this the right file?")
        records.append(record)
    return records


def _runs(paths: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """Records of runs by a short name: of the folder, or the whole path where two folders are called alike."""
    names = [(path if path.is_dir() else path.parent).resolve().name for path in paths]
    names = [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths)]
    return {name: read_lines(path, "metrics.jsonl") for name, path in zip(names, paths)}


def _points(records: Sequence[Record], kind: str, x: str, y: str) -> list[Point]:
    """(x, y) of the records of this kind that have both."""
    found = [(r.get(x), r.get(y)) for r in records if r.get("kind") == kind]
    return [(float(a), float(b)) for a, b in found if a is not None and b is not None]


def training_panels(paths: Sequence[Path]) -> list[Panel]:
    """Loss, validation NELBO (with two standard errors), learning rate and speed of runs, against steps."""
    runs = _runs(paths)
    empty = [name for name, records in runs.items() if not _points(records, "train", "step", "loss")]
    if empty:
        raise ValueError(f"{', '.join(empty)}: no training record with a loss; give a run that has made some steps")
    validation: dict[str, list[Point]] = {}
    for name, records in runs.items():
        validation[name] = []
        for record in (r for r in records if r.get("kind") == "validation" and r.get("nats_per_token") is not None):
            value, error = float(record["nats_per_token"]), 2 * float(record.get("standard_error") or 0.0)
            validation[name].append((float(record["step"]), value, value - error, value + error))
    lines = {
        key: {name: _points(records, "train", "step", key) for name, records in runs.items()}
        for key in ("loss", "lr", "tokens_per_second")
    }
    parts = [Panel(lines["loss"], "training loss", "step", "nats per token")]
    if any(validation.values()):
        bars: dict[str, Any] = {"spread": "bars", "markers": True}
        parts.append(Panel(validation, "validation NELBO, ± 2 standard errors", "step", "nats per token", **bars))
    parts.append(Panel(lines["lr"], "learning rate", "step", "learning rate"))
    parts.append(Panel(lines["tokens_per_second"], "speed", "step", "tokens per second, all processes"))
    return parts


def traffic_panels(paths: Sequence[Path]) -> list[Panel]:
    """What an island has sent, in all and per step so far (10^6 bytes), and the cosine between islands, by step."""
    runs = _runs(paths)
    sent = {name: _points(records, "outer", "step", "bytes_total") for name, records in runs.items()}
    empty = [name for name, points in sent.items() if not points]
    if empty:
        raise ValueError(f"{', '.join(empty)}: no exchange between islands; give a run with --outer.preset")
    total: dict[str, list[Point]] = {n: [(x, y / 1e6) for x, y, *_ in points] for n, points in sent.items()}
    rate: dict[str, list[Point]] = {n: [(x, y / 1e6 / x) for x, y, *_ in points] for n, points in sent.items()}
    cosine = {name: _points(records, "outer", "step", "cosine_between_islands") for name, records in runs.items()}
    agreement = Panel(
        cosine, "do the islands agree?", "step", "cosine of their pseudo-gradients", markers=True, level=0.0
    )
    return [
        Panel(total, "sent in all", "step", "megabytes per island", steps=True, from_zero=True),
        Panel(rate, "sent per step so far", "step", "megabytes per step and island", from_zero=True),
        *([agreement] if any(cosine.values()) else []),
    ]


def curve_panels(paths: Sequence[Path]) -> list[Panel]:
    """Quality against evaluations, a panel per source, as `mdlm eval curves` draws them."""
    from mdlm.eval.curve_report import POINTS, X_AXES, curve_series

    records = [record for path in paths for record in read_lines(path, POINTS)]
    found, x_label = curve_series(records), X_AXES["nfe"]
    if not found:
        raise ValueError("there are no points of `mdlm eval curves` in these files")
    return [
        Panel(series, heading, x_label, y_label, "log2", scale_around(level), level=level, markers=True)
        for heading, y_label, level, series in found.values()
    ]


def calibration_panels(paths: Sequence[Path]) -> list[Panel]:
    """Reliability diagrams, two panels per source: how often commits of a confidence were right, and how many."""
    from mdlm.eval.calibration import CALIBRATION, reliability_panels

    records = [record for path in paths for record in read_lines(path, CALIBRATION) if record["kind"] == "calibration"]
    if not records:
        raise ValueError("there are no records of `mdlm eval calibration` in these files")
    sources = dict.fromkeys(record["source"] for record in records)
    return [part for name in sources for part in reliability_panels([r for r in records if r["source"] == name])]


def schedule_panels(points: int = 200) -> list[Panel]:
    """Mask probability and the NELBO's weight of every noise schedule against t."""
    shown: dict[str, NoiseSchedule] = {
        "linear": Linear(),
        "cosine": Cosine(),
        "polynomial, power 2": Polynomial(2.0),
        "polynomial, power 0.5": Polynomial(0.5),
    }
    t = torch.linspace(0.02, 0.98, points, dtype=torch.float64)  # weights are infinite at 0, and may be 0 at 1

    def series(of: Callable[[NoiseSchedule], torch.Tensor]) -> dict[str, list[Point]]:
        return {name: list(zip(t.tolist(), of(schedule).tolist())) for name, schedule in shown.items()}

    masked, weight = series(lambda schedule: schedule.mask_prob(t)), series(lambda schedule: schedule.weight(t))
    return [
        Panel(masked, "how much is masked when", "time t", "probability that a token is masked"),
        Panel(weight, "how much a masked token counts", "time t", "weight in the NELBO", y_scale="log"),
    ]


FROM_FILES: dict[str, Callable[[Sequence[Path]], list[Panel]]] = {
    "training": training_panels,
    "traffic": traffic_panels,
    "curves": curve_panels,
    "calibration": calibration_panels,
}


def main(argv: list[str] | None = None) -> int:
    """Entry of `mdlm eval plot`."""
    from mdlm.command import run_command

    return run_command(plot, argv, prog="mdlm eval plot", report=lambda written: [written])
