"""Writes `docs/benchmarks.md` from the files of results: `python benchmarks/page.py [--results DIR] [--output FILE]`.

A section per command, with the command, machine, versions and commit, the tables, the target and whether it was
reached. A file that does not exist is named as not measured. The page is a function of the files, and a test holds the
one in `docs/` to that: measure, then write the page, then commit both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu
import sampler_speed
import sampling
import scaling
import training_step
from lines import RESULTS, Case, measured, measures

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
INTRODUCTION = """# Benchmarks

Written by `python benchmarks/page.py` from `benchmarks/results/*.jsonl`. Each command goes on where its file ends; take
the file away to measure anew. On a shared machine tokens/s swing threefold from one minute to the next: ratios within
one line hold, tokens/s of different lines compare only roughly. What a slow network costs has its own page:
[low-communication training](low-communication.md)."""


@dataclass(frozen=True)
class Section:
    """A command, what it aims at, and what its lines say."""

    title: str
    command: str
    file: str
    report: Callable[[Any], str]
    target: str | None = None
    reached: Callable[[Sequence[Case]], str] | None = None


def _sampling_reached(lines: Sequence[Case]) -> str:
    found = []
    for batch in dict.fromkeys(size for line in lines for size in line.get("ratio", ())):
        good = [line for line in lines if batch in sampling.reached(line, lines)]
        if good:
            best = max(good, key=lambda line: line["ratio"][batch])
            found.append(
                f"batch {batch}: yes, by {len(good)} of the candidates, best {sampling.named(best)}, "
                f"{best['ratio'][batch]:.1f} times"
            )
        else:
            found.append(f"batch {batch}: no")
    return "; ".join(found)


def _gpu_reached(lines: Sequence[Case]) -> str:
    found = []
    for device in dict.fromkeys(line["device"] for line in lines):
        seconds = sum(line["wall_s"] for line in lines if line["device"] == device and measures(line))
        found.append(f"{device}: {'yes' if seconds < gpu.MOST_SECONDS else 'no'}, {seconds:.0f} s")
    return "; ".join(found)


SECTIONS = (
    Section("A training step", "python benchmarks/training_step.py", "training_step.jsonl", training_step.report),
    Section(
        "Sampling",
        "python benchmarks/sampling.py",
        "sampling.jsonl",
        sampling.report,
        f"at least {sampling.LEAST_RATIO:g} times the tokens/s of the plain loop, each quality losing less than "
        f"{sampling.MOST_LOSS:g} %",
        _sampling_reached,
    ),
    Section(
        "The sampler itself",
        "python benchmarks/sampler_speed.py",
        "sampler_speed.jsonl",
        sampler_speed.report,
        f"at most {100 * sampler_speed.MOST_SHARE:g} % of a step outside the network, for every strategy that is not "
        f"speculative; {', '.join(f'{least:g} ({cache})' for cache, least in sampler_speed.LEAST_RATIO.items())} times "
        f"the tokens/s of the plain loop, by cache; a batch of 16 at least {sampler_speed.LEAST_GAIN:g} times one row",
        sampler_speed.reached,
    ),
    Section("Scaling", "python benchmarks/scaling.py", "scaling.jsonl", scaling.report),
    Section(
        "One GPU",
        "python benchmarks/gpu.py",
        "gpu.jsonl",
        gpu.report,
        f"everything in under {gpu.MOST_SECONDS / 60:g} minutes on one H200",
        _gpu_reached,
    ),
)


def machines(lines: Sequence[Case]) -> str:
    """The machines, versions and commits of some lines, each once."""
    found: dict[str, dict[str, None]] = {}
    for line in lines:
        at = line["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in at["versions"].items() if version)
        what = f"{at['processor']}, {at['cpus']} CPUs, {at['threads']} threads; {versions}"
        commit = at["git_commit"] or "not in git"
        found.setdefault(what, {})[commit[:12] + "+changes" * commit.endswith("+changes")] = None
    return "; ".join(f"{what}; commit {', '.join(commits)}" for what, commits in found.items())


def page(results: Path) -> str:
    """The page of what lies in `results`."""
    parts = [INTRODUCTION]
    for section in SECTIONS:
        lines = measured(results / section.file)
        parts.append(f"## {section.title}\n\n    {section.command}")
        if section.target:
            parts.append(f"**Target**: {section.target}.")
        if not lines:
            parts.append(f"Not measured: there is no `benchmarks/results/{section.file}`.")
            continue
        if section.reached:
            parts.append(f"**Reached**: {section.reached(lines)}.")
        parts.append(f"Machine: {machines(lines)}.")
        parts.append(section.report(lines))
    return "\n\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=PAGE, help="page to write (default: %(default)s)")
    given = parser.parse_args(argv)
    given.output.write_text(page(given.results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
