"""A training step against plain code: tokens/s, peak memory, share of the matmul peak; over vocabularies and lengths.

    python benchmarks/training_step.py              measures what is not in the file yet (about 40 minutes on two cores)
    python benchmarks/training_step.py --report     the table of what has been measured, as Markdown

Both loops train the same architecture (6 layers, 256 wide), compiled, bf16 autocast, AdamW; the plain one is what one
would write first: head and float32 loss on every row. They take turns in one process (`mdlm.eval.speed`), so the ratio
holds on a busy machine where tokens/s do not; memory is the peak of a process that does nothing else, interpreter
included. Every line of the file says on which machine, with which versions and at which commit.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mdlm.eval.speed import machine, train_step

FILE = Path(__file__).parent / "results" / "training_step.jsonl"
CASES: list[dict[str, Any]] = [
    {"vocab": 2048, "seq": 256, "batch": 16, "rounds": 8},
    {"vocab": 2048, "seq": 256, "batch": 16, "rounds": 8, "packed": True},
    {"vocab": 2048, "seq": 2048, "batch": 2, "rounds": 6},
    {"vocab": 2048, "seq": 2048, "batch": 2, "rounds": 6, "packed": True},
    {"vocab": 32768, "seq": 256, "batch": 16, "rounds": 4},
    {"vocab": 32768, "seq": 256, "batch": 16, "rounds": 4, "packed": True},
    {"vocab": 32768, "seq": 2048, "batch": 2, "rounds": 4},
    {"vocab": 131072, "seq": 256, "batch": 16, "rounds": 2},
    {"vocab": 131072, "seq": 2048, "batch": 2, "rounds": 2},
]


def measured(path: Path) -> list[dict[str, Any]]:
    """The lines of `path`, oldest first; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def same(case: dict[str, Any], line: dict[str, Any]) -> bool:
    """Whether `line` is a measurement of `case`."""
    return all(line.get(name) == case.get(name, False) for name in ("vocab", "seq", "batch", "packed"))


def run(path: Path) -> None:
    """Measure every case that `path` does not hold, one line each, written when it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if any(same(case, line) for line in measured(path)):
            continue
        result = {**train_step(**case, burst=1, memory=True), "machine": machine()}
        with path.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)


def report(lines: list[dict[str, Any]]) -> str:
    """The measurements as a table in Markdown."""
    rows = [
        "| vocabulary | row | tokens/s, plain | tokens/s, mdlm | ratio | peak memory, plain | mdlm | ratio | MFU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        tokens, memory = line["tokens_per_s"], line["peak_bytes"]
        what = f"{line['batch']} x {line['seq']}{', packed' if line['packed'] else ''}"
        rows.append(
            f"| {line['vocab']} | {what} | {tokens['plain']:,.0f} | {tokens['ours']:,.0f} | {line['ratio']:.2f} "
            f"| {memory['plain'] / 1e9:.2f} GB | {memory['ours'] / 1e9:.2f} GB | {line['memory_ratio']:.2f} "
            f"| {line['mfu']:.2f} |"
        )
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=FILE, help="JSON lines; kept and continued (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="print the table instead of measuring")
    given = parser.parse_args(argv)
    if given.report:
        print(report(measured(given.file)))
    else:
        run(given.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
