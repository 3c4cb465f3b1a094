"""How training scales on this machine: one to two processes; growth with the length of a row and with the vocabulary.

    python benchmarks/scaling.py              measures what is not in the file yet (about 5 minutes on two cores)
    python benchmarks/scaling.py --report     the tables of what has been measured, as Markdown

*Processes*: tokens/s of two gloo processes with one core each (DDP) over one process on one core
(`mdlm.eval.speed.processes`). *Growth*: seconds of a whole training step (noise, forward, backward, clipping, AdamW;
bf16 autocast, not compiled) of 6 layers, 256 wide, always over the same number of tokens, while one size grows. The
sizes take turns, round after round, so that a slow minute hits all alike. Fitted is time = a * size ** p, a straight
line in logarithms, by least squares; what of each point it leaves is in the table, and beside it the exponent between
the two largest sizes alone, for a cost with a constant part is no power law. At a constant number of tokens
p = 0 is cost per token that does not grow; attention alone would have p = 1 in the length, the head alone p = 1 in the
vocabulary, so a p between says how much of the step they are over this range: read it for the range, not beyond.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lines import RESULTS, Case, finish, measure_missing, measured, parser, table

from mdlm.eval.speed import _config, _Ours, alternate, processes

FILE = RESULTS / "scaling.jsonl"
CASES: list[dict[str, Any]] = [
    {"measurement": "length", "sizes": [128, 256, 512, 1024, 2048], "vocab": 2048, "tokens": 4096, "rounds": 12},
    {
        "measurement": "vocabulary",
        "sizes": [1024, 2048, 4096, 8192, 16384, 32768, 65536],
        "seq": 256,
        "tokens": 2048,
        "rounds": 12,
    },
    {"measurement": "processes", "steps": 60},
]
LAYERS, WIDTH = 6, 256


def power_law(sizes: Sequence[float], seconds: Sequence[float]) -> dict[str, Any]:
    """Least squares of log seconds = log a + p log size: `a`, `exponent`, `residuals` (log seconds left over, each),
    and `last_exponent`, between the last two sizes.

    Raises ValueError for fewer than two different sizes, or values that are not positive.
    """
    if len(set(sizes)) < 2 or min(*sizes, *seconds) <= 0:
        raise ValueError(f"need two or more positive sizes with positive times, got {list(sizes)}, {list(seconds)}")
    x, y = np.log(np.asarray(sizes, dtype=np.float64)), np.log(np.asarray(seconds, dtype=np.float64))
    exponent, intercept = np.polyfit(x, y, 1)
    return {
        "a": math.exp(intercept),
        "exponent": float(exponent),
        "residuals": (y - (intercept + exponent * x)).tolist(),
        "last_exponent": float((y[-1] - y[-2]) / (x[-1] - x[-2])),
    }


def growth(case: Case) -> dict[str, Any]:
    """Seconds per step at each size, and the power law through them."""
    tokens = case["tokens"]
    steps = {}
    for size in case["sizes"]:
        seq = size if case["measurement"] == "length" else case["seq"]
        vocab = size if case["measurement"] == "vocabulary" else case["vocab"]
        if tokens % seq:
            raise ValueError(f"{tokens} tokens a step are no whole number of rows of {seq}")
        bench = _Ours(_config(vocab, LAYERS, WIDTH, seq), tokens // seq, seq, compile=False)
        steps[str(size)] = bench.step
    seconds = list(alternate(steps, case["rounds"], warmup=1, burst=1).values())
    rates = [tokens / taken for taken in seconds]
    return {"seconds_per_step": seconds, "tokens_per_s": rates, **power_law(case["sizes"], seconds)}


def measure(case: Case) -> dict[str, Any]:
    """One case of `CASES`."""
    return processes(steps=case["steps"]) if case["measurement"] == "processes" else growth(case)


def report(lines: Sequence[Case]) -> str:
    """Tables in Markdown."""
    return "\n\n".join(_processes(line) if line["measurement"] == "processes" else _growth(line) for line in lines)


def _processes(line: Mapping[str, Any]) -> str:
    rates = line["tokens_per_s"]
    head = ["processes", "tokens/s", "times one"]
    return table(head, [["1", f"{rates['one']:,.0f}", "1"], ["2", f"{rates['two']:,.0f}", f"{line['ratio']:.2f}"]])


def _growth(line: Mapping[str, Any]) -> str:
    name = "row length" if line["measurement"] == "length" else "vocabulary"
    other = f"vocabulary {line['vocab']}" if line["measurement"] == "length" else f"rows of {line['seq']}"
    head = [name, "seconds per step", "tokens/s", "left by the fit"]
    points = zip(line["sizes"], line["seconds_per_step"], line["tokens_per_s"], line["residuals"], strict=True)
    rows = [[f"{n}", f"{s:.3f}", f"{rate:,.0f}", f"{100 * math.expm1(left):+.0f} %"] for n, s, rate, left in points]
    return (
        f"{line['tokens']} tokens a step, {other}: seconds = {line['a']:.3g} * n ^ **{line['exponent']:.2f}** "
        f"(between the last two: {line['last_exponent']:.2f})\n\n"
        f"{table(head, rows)}"
    )


def main(argv: list[str] | None = None) -> int:
    """Entry of the command."""
    given = parser(__doc__, FILE).parse_args(argv)

    def work() -> None:
        if given.report:
            print(report(measured(given.file)))
        else:
            measure_missing(given.file, CASES, measure)

    return finish(work)


if __name__ == "__main__":
    sys.exit(main())
