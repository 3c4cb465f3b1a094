"""What the benchmark commands share: a file of JSON lines that is gone on with, tables in Markdown, the command line.

A case is a dict of what is asked; its line holds the case, what was measured, and `machine`. A case whose items stand
in some line has been measured. Read next: `training_step.py`, `sampling.py`, `scaling.py`, `gpu.py`; `page.py` writes
the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mdlm.eval.jsonl import append, drop_torn_line
from mdlm.eval.speed import machine

RESULTS = Path(__file__).parent / "results"
Case = Mapping[str, Any]
REASONS = ("skipped", "failed")
"""A line with one of these says why its case was not measured."""


def measured(path: Path) -> list[dict[str, Any]]:
    """The lines of `path`, oldest first; none if it does not exist."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def holds(line: Mapping[str, Any], case: Case) -> bool:
    """Whether `line` is a measurement of `case`."""
    return all(name in line and line[name] == value for name, value in case.items())


def measures(line: Mapping[str, Any]) -> bool:
    """Whether a line holds a measurement, not only a reason why there is none."""
    return not any(name in line for name in REASONS)


def measure_missing(path: Path, cases: Iterable[Case], measure: Callable[[Case], dict[str, Any]]) -> None:
    """Measure every case that `path` holds no measurement of; a line is written and printed as soon as it is known."""
    drop_torn_line(path)
    done = [line for line in measured(path) if measures(line)]
    for case in cases:
        if any(holds(line, case) for line in done):
            continue
        line = {**case, **measure(case), "machine": machine()}
        append(path, [line])
        print(json.dumps(line), flush=True)
        done.append(line)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def parser(doc: str | None, file: Path) -> argparse.ArgumentParser:
    """The options that every command has."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--file", type=Path, default=file, help="JSON lines; kept and continued (default: %(default)s)"
    )
    options.add_argument("--report", action="store_true", help="print the tables instead of measuring")
    return options


def finish(work: Callable[[], None]) -> int:
    """Do the work; the exit status. What the user can cause is said in one line."""
    try:
        work()
    except ValueError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0
