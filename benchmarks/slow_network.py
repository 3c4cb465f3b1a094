"""How much sooner is a loss reached when only a slow network joins the islands? Measured, on shaped links.

    python benchmarks/slow_network.py run --dry_run true      what would be run, and for about how long
    python benchmarks/slow_network.py run                     the matrix; go on with the same command if it was stopped
    python benchmarks/slow_network.py report                  table and pictures of what has been measured
    python benchmarks/slow_network.py check --mbit 20         builds the network, measures it, takes it down
    python benchmarks/slow_network.py clean                   after a kill -9: removes what is left

Every island is one process with one thread in its own network namespace (`network.py`). All start from the same
weights, which one island trained alone beforehand: early training needs frequent exchange, and masked diffusion has a
plateau to leave first. Then, per number of islands,

1. *tuning*, on links that are not shaped: each method with each learning rate, seed 0. The link's rate does not change
   what is computed, only when. A method keeps the rate with which it came lowest; the loss that plain DDP came to in
   `steps` steps is the target.
2. *measuring*: per rate of the link, method and seed, until the target is reached, or for `stretch` times as many
   steps.

Seconds leave out validation; bytes are the interface's; a method that did not reach the target says so. Results are
JSON lines, one per run, with the measured rate of the links beside the one asked for. Read next: `island_runs.py`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import network as net
from island_runs import BASELINES, METHODS, PARAMETERS, Case, measure, prepare
from jsonargparse import auto_cli, set_parsing_settings

from mdlm.eval.plots import line_plot


def reach(curve: Sequence[Sequence[float]], target: float) -> tuple[float, float, float] | None:
    """(steps, seconds, MB) at which the curve first comes down to the target, interpolated; None: it does not."""
    for i, point in enumerate(curve):
        if point[3] <= target:
            if i == 0:
                return point[0], point[1], point[2]
            last = curve[i - 1]
            share = (last[3] - target) / (last[3] - point[3])
            return tuple(a + share * (b - a) for a, b in zip(last[:3], point[:3]))  # type: ignore[return-value]
    return None


class Results:
    """The file of results: one JSON object a line, written at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        for line in path.read_text(encoding="utf-8").split("\n") if path.is_file() else []:
            with suppress(json.JSONDecodeError):  # the last line of a run that was killed
                self.rows.append(json.loads(line))

    def find(self, key: str) -> dict[str, Any] | None:
        """The run of that key, if it has been made."""
        return next((row for row in self.rows if row["key"] == key), None)

    def add(self, row: dict[str, Any]) -> None:
        """Appends a run."""
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+", encoding="utf-8") as file:
            torn = file.tell() > 0 and not self.path.read_bytes().endswith(b"\n")
            file.write("\n" * torn + json.dumps(row) + "\n")


def estimate(cases: Sequence[Case], step_seconds: float) -> float:
    """Seconds that the runs will take, about: steps, exchanges as the formula has them, and 25 s to start."""
    total = 0.0
    for case in cases:
        method = METHODS[case.method]
        wire = 2 * PARAMETERS * method.bits / method.every * (case.islands - 1) / case.islands
        exchange = 0.0 if case.mbit is None else wire / (0.95e6 * case.mbit)
        compute = step_seconds * case.islands / 4
        total += case.steps * (max(compute, exchange) if method.overlapped else compute + exchange) + 25.0
    return total


def _length(steps: int, stretch: float, method: str, every: int) -> int:
    """Steps of a run: multiples of the validation interval."""
    return every * max(1, round(steps * (1.0 if METHODS[method].every == 1 else stretch) / every))


def run(
    output: Path = Path("runs/slow_network"),
    islands: tuple[int, ...] = (4,),
    mbit: tuple[float, ...] = (100.0, 20.0),
    methods: tuple[str, ...] = tuple(METHODS),
    seeds: tuple[int, ...] = (0, 1, 2),
    lrs: tuple[float, ...] = (1e-3, 2e-3, 4e-3),
    steps: int = 200,
    stretch: float = 2.0,
    start_steps: int = 600,
    validate_every: int = 20,
    step_seconds: float = 0.16,
    unshaped: bool = True,
    dry_run: bool = False,
) -> None:
    """Runs the matrix; a run that is in the results already is not made again.

    Args:
        output: folder of the results, the common start and the logs.
        islands: numbers of islands.
        mbit: rates of the links in Mbit/s, the same in both directions.
        methods: which methods; the baselines are always among them.
        seeds: seeds of noise and data; a figure without three of them means nothing.
        lrs: inner learning rates to choose from, per method.
        steps: steps of the methods that exchange in every step.
        stretch: how many times as many the others may take.
        start_steps: steps of the common start.
        validate_every: steps between two validations.
        step_seconds: seconds per step of 4 islands on this machine, for the estimate.
        unshaped: also measure on links that are not shaped.
        dry_run: only say what would be run.

    Raises:
        ValueError: an unknown method, or a machine that cannot make the network.
    """
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise ValueError(f"unknown method {unknown[0]!r}; there are {', '.join(METHODS)}")
    chosen = dict.fromkeys([*BASELINES, *methods])
    results = Results(output / "results.jsonl")
    rates: list[float | None] = [*([None] if unshaped else []), *mbit]

    def tuning(count: int) -> list[Case]:
        return [Case(count, None, m, lr, 0, _length(steps, stretch, m, validate_every), None)
                for m in chosen for lr in lrs]  # fmt: skip

    def measuring(count: int, best: Mapping[str, float], target: float | None) -> list[Case]:
        return [Case(count, rate, m, best[m], seed, _length(steps, stretch, m, validate_every), target)
                for rate in rates for seed in seeds for m in chosen]  # fmt: skip

    cases = [c for n in islands for c in [*tuning(n), *measuring(n, dict.fromkeys(chosen, lrs[0]), None)]]
    done = sum(results.find(c.key) is not None for c in cases)
    hours = estimate(cases, step_seconds) / 3600
    print(f"{len(cases)} runs, about {hours:.1f} h at most if none had been made yet (about {done} have)", flush=True)
    if dry_run:
        for c in cases:
            print(f"{c.key}: {estimate([c], step_seconds):.0f} s")
        return
    problem = net.unavailable()
    if problem is not None:
        raise ValueError(f"no emulated network here: {problem}")
    with net.only_one(), net.stoppable():
        start = prepare(output / "start", start_steps)
        for count in islands:
            for case in tuning(count):
                _make(case, results, start, output, validate_every)
            best = best_lrs(results, tuning(count))
            target = target_of(results, tuning(count))
            print(f"{count} islands: target {target:.4f} nats per token; learning rates {best}", flush=True)
            for case in measuring(count, best, target):
                _make(case, results, start, output, validate_every)
    report(output)


def _make(case: Case, results: Results, start: Path, output: Path, every: int) -> None:
    if results.find(case.key) is not None:
        return
    folder = output / "logs" / case.key
    shutil.rmtree(folder, ignore_errors=True)
    begun = time.monotonic()
    outcome = measure(case, start, folder, every)
    facts = {"cores": os.cpu_count(), "kernel": platform.release(), "seconds_in_all": time.monotonic() - begun}
    results.add({"key": case.key, **dataclasses.asdict(case), **outcome, **facts})
    last = outcome["curve"][-1]
    print(f"{case.key}: {last[0]:.0f} steps, {last[1]:.1f} s, {last[2]:.2f} MB, {last[3]:.4f} nats", flush=True)


def _final(row: Mapping[str, Any]) -> float:
    return float(row["curve"][-1][3])


def best_lrs(results: Results, tuned: Sequence[Case]) -> dict[str, float]:
    """Method -> the learning rate with the lowest last loss (of those that stayed finite)."""
    best: dict[str, tuple[float, float]] = {}
    for case in tuned:
        row = results.find(case.key)
        assert row is not None
        loss = _final(row) if row["curve"][-1][3] is not None else float("inf")
        best[case.method] = min(best.get(case.method, (float("inf"), case.lr)), (loss, case.lr))
    return {method: lr for method, (_, lr) in best.items()}


def target_of(results: Results, tuned: Sequence[Case]) -> float:
    """The lowest last loss of plain DDP, in nats per token."""
    rows = [results.find(case.key) for case in tuned if case.method == BASELINES[0]]
    return min(_final(row) for row in rows if row is not None)


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per islands, rate and method: medians over seeds, with the extremes of the time; speed-ups over the baselines."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["target"] is not None:
            groups.setdefault((row["islands"], row["mbit"], row["method"], row["lr"]), []).append(row)
    table = []
    for (islands, mbit, method, lr), group in groups.items():
        reached = [found for row in group if (found := reach(row["curve"], row["target"])) is not None]
        table.append(
            {
                "islands": islands,
                "mbit": mbit,
                "method": method,
                "lr": lr,
                "seeds": len(group),
                "reached": len(reached),
                "measured_mbit": statistics.median(rate for row in group for rate in row["measured_mbit"]),
                "seconds_per_step": statistics.median(row["curve"][-1][1] / row["curve"][-1][0] for row in group),
                "mb_per_step": statistics.median(row["curve"][-1][2] / row["curve"][-1][0] for row in group),
                "steps": statistics.median(x[0] for x in reached) if reached else None,
                "seconds": statistics.median(x[1] for x in reached) if reached else None,
                "fastest": min((x[1] for x in reached), default=None),
                "slowest": max((x[1] for x in reached), default=None),
                "mb": statistics.median(x[2] for x in reached) if reached else None,
            }
        )
    for baseline in BASELINES:
        base = {(r["islands"], r["mbit"]): r["seconds"] for r in table if r["method"] == baseline}
        for r in table:
            first = base.get((r["islands"], r["mbit"]))
            r[f"over_{baseline}"] = first / r["seconds"] if first and r["seconds"] else None
    return table


def report(output: Path = Path("runs/slow_network")) -> None:
    """Prints the table of what has been measured as Markdown, and draws loss against seconds per rate.

    Args:
        output: folder of the results.
    """
    results = Results(output / "results.jsonl")
    table = summarise(results.rows)
    if not table:
        raise ValueError(f"{output}/results.jsonl holds no measured run yet")
    names = ("islands", "mbit", "measured_mbit", "method", "lr", "seeds", "reached", "seconds_per_step", "mb_per_step",
             "steps", "seconds", "fastest", "slowest", "mb", *(f"over_{b}" for b in BASELINES))  # fmt: skip
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in table:
        cells = ["" if row[n] is None else f"{row[n]:.4g}" if isinstance(row[n], float) else str(row[n]) for n in names]
        print("| " + " | ".join(cells) + " |")
    for islands, mbit in dict.fromkeys((r["islands"], r["mbit"]) for r in table):
        rows = [r for r in results.rows if r["target"] is not None and (r["islands"], r["mbit"]) == (islands, mbit)]
        series = {f"{r['method']} (lr {r['lr']:g})": [(p[1], p[3]) for p in r["curve"]] for r in reversed(rows)}
        rate = "unshaped" if mbit is None else f"{mbit:g}mbit"
        path = output / f"{islands}x-{rate}.png"
        title = f"{islands} islands, {rate}, seed {rows[0]['seed']}"
        line_plot(series, path, title=title, x_label="seconds", y_label="validation nats per token", x_log=True)
        print(f"picture: {path}")


def check(mbit: float | None = 100.0, islands: int = 4) -> None:
    """Builds the network, measures its links and takes it down again.

    Args:
        mbit: rate in Mbit/s and direction; null: not shaped.
        islands: number of islands.
    """
    problem = net.unavailable()
    if problem is not None:
        raise ValueError(f"no emulated network here: {problem}")
    with net.only_one(), net.stoppable(), net.Network(islands, mbit) as network:
        print(" ".join(f"{rate:.1f}" for rate in network.verified()), "Mbit/s")


def clean() -> None:
    """Removes what a killed benchmark left behind: processes in its namespaces, namespaces, interfaces, bridge."""
    with net.only_one():
        print("removed:", ", ".join(net.clean()) or "nothing")


def main() -> int:
    """The command line; returns the exit status."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    try:
        auto_cli({"run": run, "report": report, "check": check, "clean": clean}, prog="slow_network.py")
    except (ValueError, RuntimeError) as error:
        print(f"slow_network.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("slow_network.py: stopped; the network has been taken down", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
