"""`mdlm plan`: what a slow network does to training, method by method, before anything is trained.

A table for the eye, one JSON line per method for programs (`--json`), utilisation against bandwidth as a picture
(`--plot`). Read next: `netsim.py`, whose formulas it prints.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jsonargparse import ActionYesNo, ArgumentParser
from rich.console import Console
from rich.table import Table

from mdlm.training.netsim import (
    DATA_PARALLEL,
    REALISTIC,
    SCENARIOS,
    Forecast,
    Method,
    Setting,
    bandwidth_for,
    forecast,
    method_of,
)
from mdlm.training.outer_config import PRESETS


def amount(value: float, unit: str) -> str:
    """A number with a decimal prefix, e.g. 2.5 MB."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g} {unit}"
    power = min(5, max(0, math.floor(math.log10(abs(value)) / 3)))
    return f"{value / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P'][power]}{unit}".rstrip()


def duration(hours: float) -> str:
    """A time with a unit that suits it."""
    for unit, length in (("days", 24.0), ("h", 1.0), ("min", 1 / 60)):
        if hours >= 2 * length:
            return f"{hours / length:.3g} {unit}"
    return f"{3600 * hours:.3g} s"


def methods(s: Setting, custom: Method | None) -> list[Method]:
    """Data parallel, every preset for several islands, and the user's own if there is one."""
    several = {name: config for name, config in PRESETS.items() if config.engine != "primal"}
    presets = [method_of(name, config, s) for name, config in several.items()]
    return [DATA_PARALLEL, *presets, *([] if custom is None else [custom])]


def table(s: Setting, forecasts: Sequence[Forecast], needed: Sequence[float]) -> Table:
    """One row per method."""
    facts = f"{amount(s.parameters, '')} parameters, {s.islands} islands of {s.accelerators} accelerators"
    link = f"{amount(s.rate, 'bit/s')}, RTT {1000 * s.rtt:g} ms, {s.seconds:.3g} s per step without exchanges"
    shown = Table(title=f"{facts}\n{link}", caption=f"realistic: exchanges take {REALISTIC} times as long")
    for name in ("method", "utilisation", "realistic", "s / step", "sent / round", "sent / token", "time", "realistic",
                 "link for 90 %"):  # fmt: skip
        shown.add_column(name, justify="left" if name == "method" else "right")
    for f, rate in zip(forecasts, needed):
        shown.add_row(
            f.method,
            f"{100 * f.utilisation:.1f} %",
            f"{100 * f.realistic_utilisation:.1f} %",
            f"{f.step_seconds:.3g}",
            amount(f.bytes_per_round, "B"),
            amount(f.bytes_per_token, "B"),
            duration(f.hours),
            duration(f.realistic_hours),
            amount(rate, "bit/s") if math.isfinite(rate) else "latency forbids",
        )
    return shown


def draw(s: Setting, chosen: Sequence[Method], path: Path) -> None:
    """Utilisation against the rate of the link, a line per method."""
    from mdlm.eval.plots import line_plot

    rates = [10 ** (6 + 0.1 * i) for i in range(61)]

    def at(rate: float, m: Method) -> float:
        there = dataclasses.replace(s, up=rate, down=None, stream_rate=None)
        return 100 * forecast(there, m, s.tokens_per_step).utilisation

    series = {m.name: [(rate / 1e6, at(rate, m)) for rate in rates] for m in chosen}
    title = f"{amount(s.parameters, '')} parameters, {s.islands} islands"
    line_plot(series, path, title=title, x_label="Mbit/s", y_label="compute utilisation (%)", x_log=True)


def plan(
    scenario: Literal["laptops", "homes", "sites", "regions", "planet"] = "sites",
    parameters: float | None = None,
    islands: int | None = None,
    accelerators: int | None = None,
    layers: int | None = None,
    tokens_per_step: float | None = None,
    tflops: float | None = None,
    step_seconds: float | None = None,
    mbit: float | None = None,
    down_mbit: float | None = None,
    rtt_ms: float | None = None,
    streams: int | None = None,
    stream_mbit: float | None = None,
    straggler: float | None = None,
    mtbf_hours: float | None = None,
    restart_seconds: float | None = None,
    elastic: bool | None = None,
    tokens: float | None = None,
    every: int | None = None,
    fragments: int = 1,
    tau: int = 0,
    bits: float = 16.0,
    json: bool = False,
    plot: Path | None = None,
) -> None:
    """Predict wall-clock time, compute utilisation and bytes of every method on a slow network.

    Args:
        scenario: the setting to start from; the options below replace its numbers.
        parameters: parameters of the model.
        islands: places that only the slow network joins.
        accelerators: accelerators per island, which a fast network joins.
        layers: transformer layers.
        tokens_per_step: tokens that one island trains on in one step.
        tflops: TFLOP/s that one accelerator really does.
        step_seconds: measured time of a step, in place of what FLOPs say.
        mbit: Mbit/s that an island can send.
        down_mbit: Mbit/s that it can receive; not given: as it sends.
        rtt_ms: round-trip time between islands, in ms.
        streams: parallel TCP connections.
        stream_mbit: Mbit/s that one TCP connection carries at most.
        straggler: coefficient of variation of an accelerator's step time.
        mtbf_hours: mean time between failures of one accelerator.
        restart_seconds: from a failure to training again.
        elastic: a failed island stops only itself.
        tokens: length of the training, in tokens of all islands; not given: 20 per parameter.
        every: adds a method of your own: steps between two exchanges.
        fragments: of your own method: number of fragments.
        tau: of your own method: steps that go on during an exchange.
        bits: of your own method: bits per value on the wire.
        json: print one JSON object per method instead of the table.
        plot: also draw utilisation against bandwidth into this file.

    Raises:
        ValueError: a number out of range.
    """
    given: dict[str, float | int | bool | None] = {
        "parameters": parameters,
        "islands": islands,
        "accelerators": accelerators,
        "layers": layers,
        "tokens_per_step": tokens_per_step,
        "flops": None if tflops is None else 1e12 * tflops,
        "step_seconds": step_seconds,
        "up": None if mbit is None else 1e6 * mbit,
        "rtt": None if rtt_ms is None else rtt_ms / 1000,
        "streams": streams,
        "stream_rate": None if stream_mbit is None else 1e6 * stream_mbit,
        "straggler": straggler,
        "mtbf_hours": mtbf_hours,
        "restart_seconds": restart_seconds,
        "elastic": elastic,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    if mbit is not None or down_mbit is not None:
        changes["down"] = None if down_mbit is None else 1e6 * down_mbit  # type: ignore[assignment]
    s = dataclasses.replace(SCENARIOS[scenario], **changes)  # type: ignore[arg-type]
    tokens = 20 * s.parameters if tokens is None else tokens
    if not tokens > 0:
        raise ValueError(f"--tokens is {tokens}; it must be positive")
    custom = None
    if every is not None:
        if not 1 <= fragments <= every or not 0 <= tau <= every or not bits > 0:
            raise ValueError(
                f"--fragments {fragments} must lie in [1, every = {every}], --tau {tau} in [0, every], "
                f"and --bits {bits} must be positive"
            )
        custom = Method("your own", every, fragments, tau, bits)
    chosen = methods(s, custom)
    forecasts = [forecast(s, m, tokens) for m in chosen]
    needed = [bandwidth_for(s, m, 0.9) for m in chosen]
    if json:
        print_json(s, forecasts, needed)
    else:
        wide = Console(width=200)
        shown = table(s, forecasts, needed)
        Console(width=max(Console().width, wide.measure(shown).maximum)).print(shown)  # a folded table is no table
    if plot is not None:
        draw(s, chosen, plot)


def print_json(s: Setting, forecasts: Sequence[Forecast], needed: Sequence[float]) -> None:
    """One line per method: the setting, the forecast, and the link rate for 90 % utilisation (null: never)."""
    for f, rate in zip(forecasts, needed):
        row = {"setting": dataclasses.asdict(s), **dataclasses.asdict(f)}
        row["bandwidth_for_90_percent"] = rate if math.isfinite(rate) else None
        print(json.dumps(row))


def main(argv: list[str] | None = None) -> int:
    """Run `mdlm plan ARGV`; returns the exit status."""
    parser = ArgumentParser(prog="mdlm plan", description="Predict training on a slow network, method by method.")
    parser.add_function_arguments(plan, skip={"json", "elastic"})
    parser.add_argument("--elastic", action=ActionYesNo, nargs="?", help="A failed island stops only itself.")
    parser.add_argument("--json", action=ActionYesNo, nargs="?", default=False, help="JSON lines instead of the table.")
    try:
        plan(**parser.parse_args(argv).as_dict())
    except (ValueError, OSError) as error:
        print(f"mdlm plan: {error}", file=sys.stderr)
        return 1
    return 0
