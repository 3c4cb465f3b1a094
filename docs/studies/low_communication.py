"""The study of the outer step at equal tokens: `python docs/studies/low_communication.py`; what came out is in
`low-communication.md`.

Small models (192 wide, 4 layers) go on from one start, which was trained without islands until it had left the unigram
plateau, for the same number of steps and tokens: data-parallel, or on 2 or 4 islands that exchange every H steps. The
first steps of each run are shared (`outer.start_step`), while the learning rate rises; validation is at the anchor.

1. *methods*: every method with every one of its learning rates, seed 0; then the best rate with the other seeds;
2. *grid*: islands x H, at the learning rate that was best for DiLoCo.

Each island is a process of its own, all on this machine: seconds mean nothing here (`benchmarks/slow_network.py` is
about them). Writes `low_communication.jsonl`, one JSON object a run; runs that are in the file are left out, so the
command goes on where it was stopped. `--report` prints the tables and draws the curves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mdlm.eval.plots import line_plot

HERE = Path(__file__).resolve().parent
FILE = HERE / "low_communication.jsonl"
ROWS = 32
"""Rows of 64 tokens per step, of all islands together."""
STEPS, SHARED = 500, 25
"""Steps of a run, and how many of them are shared."""
BASE = {
    "data.source": "builtin",
    "data.seq_len": 64,
    "data.validation_rows": 512,
    "train.precision": "fp32",
    "train.measure_peak": False,
    "train.global_batch": ROWS,
    "lr_schedule.kind": "wsd",
    "lr_schedule.warmup_fraction": SHARED / STEPS,
    "lr_schedule.decay_fraction": 0.4,
    "checkpoint.every": 0,
}
START = {
    **BASE,
    "tokenizer.vocab_size": 512,
    "model.hidden_size": 192,
    "model.num_hidden_layers": 4,
    "model.num_attention_heads": 3,
    "model.qk_norm": True,
    "train.steps": 1000,
    "train.corruption_warmup": 0.5,
    "train.log_every": 50,
    "validation.every": 1000,
    "optim.name": "muon",
    "optim.lr": 4e-3,
    "optim.muon_lr": 0.02,
    "lr_schedule.kind": "constant",
}
"""The start: 2 M tokens, few masks first."""
DILOCO = {"outer.preset": "diloco", "outer.start_step": SHARED}
ADAMW = ({"optim.lr": 1e-3}, {"optim.lr": 2e-3}, {"optim.lr": 4e-3})
MUON = tuple({"optim.name": "muon", "optim.lr": 2e-3, "optim.muon_lr": lr} for lr in (0.005, 0.01, 0.02))


@dataclass(frozen=True)
class Method:
    """One way to train, on so many islands."""

    islands: int
    options: Mapping[str, Any]
    rates: Sequence[Mapping[str, Any]] = ADAMW
    """The learning rates tried."""


METHODS: dict[str, Method] = {
    "data-parallel": Method(1, {}),
    "diloco, H 20, 4 islands": Method(4, {**DILOCO, "outer.every": 20}),
    "streaming int4, H 20, 4 islands": Method(
        4,
        {
            **DILOCO,
            "outer.preset": "streaming",
            "outer.every": 20,
            "outer.fragments": 4,
            "outer.tau": 2,
            "outer.lr": 0.7,
            "outer.compress.codec": "int4",
        },
    ),
    "diloco, H 30, 4 islands": Method(4, {**DILOCO, "outer.every": 30}),
    "muloco, H 30, 4 islands": Method(4, {**DILOCO, "outer.preset": "muloco", "outer.every": 30}, MUON),
    "diloco, H 50, 4 islands": Method(4, {**DILOCO, "outer.every": 50}),
    "diloco, H 20, 2 islands": Method(2, {**DILOCO, "outer.every": 20}),
    "data-parallel, Muon": Method(1, {}, MUON),
}
SEEDS = (0, 1, 2)
GRID = [(islands, every) for islands in (1, 2, 4) for every in (5, 10, 20, 50, 100)]


def port() -> int:
    """A free one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def arguments(options: Mapping[str, Any]) -> list[str]:
    """The command line of one process."""
    return [f"--{name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in options.items()]


def train(islands: int, options: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Trains in `folder`, one process an island; the validations. Raises SystemExit with the log of what failed."""
    meeting = f"127.0.0.1:{port()}"
    threads = max(1, (os.cpu_count() or 1) // islands)
    processes = []
    for island in range(islands):
        own = {**options, "output_dir": folder}
        if islands > 1:
            own |= {"outer.rendezvous": meeting, "outer.island": island, "outer.islands": islands}
        command = [sys.executable, "-m", "mdlm.training", *arguments(own)]
        log = (folder.parent / f"{island}.log").open("w")
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
    for island, process in enumerate(processes):
        if process.wait():
            for other in processes:
                other.kill()
            raise SystemExit((folder.parent / f"{island}.log").read_text(encoding="utf-8")[-3000:])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["kind"] == "validation"]


def measured(path: Path) -> list[dict[str, Any]]:
    """The runs in the file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def best_rate(rows: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The learning rates with which a method came lowest with seed 0."""
    runs = [row for row in rows if row["method"] == name and row["seed"] == 0]
    rates: Mapping[str, Any] = min(runs, key=lambda row: final(row))["rates"]
    return rates


def final(row: Mapping[str, Any]) -> float:
    """Nats per token at the end; infinite for a run that diverged."""
    value = row["curve"][-1][1]
    return math.inf if value is None or not math.isfinite(value) else float(value)


def study(path: Path, start: Path, steps: int, seeds: Sequence[int]) -> None:
    """Makes every run that is not in the file."""

    def run(name: str, islands: int, options: Mapping[str, Any], rates: Mapping[str, Any], seed: int) -> None:
        rows = measured(path)
        if any((row["method"], row["rates"], row["seed"]) == (name, dict(rates), seed) for row in rows):
            return
        every = max(1, steps // 10)
        given = {
            **BASE,
            "model.init_from": start,
            "train.steps": steps,
            "train.log_every": every,
            "validation.every": every,
            **options,
            **rates,
            "seed": seed,
        }
        with tempfile.TemporaryDirectory() as folder:
            found = train(islands, given, Path(folder) / "run")
        row = {"method": name, "islands": islands, "options": dict(options), "rates": dict(rates), "seed": seed}
        row["curve"] = [[line["step"], line["nats_per_token"], line["bits_per_byte"]] for line in found]
        row["standard_error"] = found[-1]["standard_error"]
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name}, {dict(rates)}, seed {seed}: {final(row):.4f} nats", flush=True)

    for name, method in METHODS.items():
        for rates in method.rates:
            run(name, method.islands, method.options, rates, 0)
    rates = best_rate(measured(path), "diloco, H 20, 4 islands")
    for islands, every in GRID:
        run(f"grid: {islands} islands, H {every}", islands, {**DILOCO, "outer.every": every}, rates, 0)
    for seed in seeds[1:]:
        for name, method in METHODS.items():
            run(name, method.islands, method.options, best_rate(measured(path), name), seed)


def fitted(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Least squares of log loss = a + b log islands + c log H over the grid, with what each run leaves."""
    points = [row for row in rows if row["method"].startswith("grid: ")]
    x = np.array([[1.0, math.log(r["islands"]), math.log(r["options"]["outer.every"])] for r in points])
    y = np.array([math.log(final(row)) for row in points])
    weights = np.linalg.lstsq(x, y, rcond=None)[0]
    left = y - x @ weights
    return {
        "a": weights[0],
        "islands": weights[1],
        "H": weights[2],
        "residuals": {(r["islands"], r["options"]["outer.every"]): float(e) for r, e in zip(points, left)},
        "rms": float(np.sqrt((left**2).mean())),
    }


def report(path: Path) -> None:
    """Prints the tables as Markdown and draws the curves of the methods beside the file."""
    rows = measured(path)
    names = [name for name in METHODS if any(row["method"] == name for row in rows)]
    base = {}
    print("| method | best rates | seeds | nats per token | to data-parallel |\n|---|---|---|---|---|")
    for name in names:
        rates = best_rate(rows, name)
        runs = {row["seed"]: final(row) for row in rows if row["method"] == name and row["rates"] == rates}
        base = base or runs
        ratios = [runs[seed] / base[seed] - 1 for seed in runs if seed in base]
        values = " ".join(f"{runs[seed]:.4f}" for seed in sorted(runs))
        shown = ", ".join(f"{option.split('.')[-1]} {value}" for option, value in rates.items())
        print(f"| {name} | {shown} | {len(runs)} | {values} | {100 * sum(ratios) / len(ratios):+.2f} % |")
    print("\n| method | rates | nats per token |\n|---|---|---|")
    for row in rows:
        if row["method"] in names and row["seed"] == 0:
            print(f"| {row['method']} | {row['rates']} | {final(row):.4f} |")
    grid = [row for row in rows if row["method"].startswith("grid: ")]
    if len(grid) == len(GRID):
        fit = fitted(rows)
        everies = sorted({every for _, every in GRID})
        print("\n| islands | " + " | ".join(f"H {h}" for h in everies) + " |\n" + "|---" * (len(everies) + 1) + "|")
        for islands in sorted({islands for islands, _ in GRID}):
            cells = []
            for h in everies:
                row = next(r for r in grid if r["islands"] == islands and r["options"]["outer.every"] == h)
                cells.append(f"{final(row):.4f} ({100 * fit['residuals'][islands, h]:+.2f} %)")
            print(f"| {islands} | " + " | ".join(cells) + " |")
        print(
            f"\nloss = {math.exp(fit['a']):.4f} islands^{fit['islands']:.5f} H^{fit['H']:.5f}, which leaves "
            f"{100 * fit['rms']:.2f} % (root mean square)"
        )
    curves = {}
    for name in names:
        row = next(r for r in rows if r["method"] == name and r["rates"] == best_rate(rows, name) and r["seed"] == 0)
        curves[name] = [(point[0], point[1]) for point in row["curve"]]
    line_plot(
        curves,
        path.with_suffix(".svg"),
        title="equal tokens, seed 0",
        x_label="steps",
        y_label="validation nats per token",
    )


def main() -> None:
    """Runs what is missing; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=FILE, help="JSON lines; kept and continued (default: %(default)s)")
    parser.add_argument("--start", type=Path, default=Path("runs/low_communication"), help="folder of the common start")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="the first is that of the tuning")
    parser.add_argument("--report", action="store_true", help="print the tables and draw the curves instead")
    given = parser.parse_args()
    if given.report:
        report(given.file)
        return
    start = given.start / f"checkpoint-{START['train.steps']}"
    if not start.is_dir():
        given.start.parent.mkdir(parents=True, exist_ok=True)
        train(1, {**START, "overwrite": True}, given.start)
    study(given.file, start, given.steps, given.seeds)


if __name__ == "__main__":
    main()
