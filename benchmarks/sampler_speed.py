"""The sampler itself, on random weights: tokens/s against a plain loop, and the share of a step outside the network.

    python benchmarks/sampler_speed.py              measures what is not in the file yet (about 15 minutes on two cores)
    python benchmarks/sampler_speed.py --report     the tables of what has been measured, as Markdown

Both measurements are those of `mdlm.eval.speed_sampling`, at its defaults; `sampling.py` is about a trained model, with
the quality of what is written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from lines import RESULTS, Case, finish, measure_missing, measured, parser, table

from mdlm.eval.speed_sampling import COMMANDS

FILE = RESULTS / "sampler_speed.jsonl"
CASES: list[dict[str, Any]] = [{"measurement": "overhead"}, {"measurement": "tokens"}]
MOST_SHARE = 0.10
"""The target: of a step outside the network, at 32768 tokens."""
LEAST_RATIO = {"none": 1.5, "prefix": 2.2, "dual": 3.0}
"""The target: times the tokens/s of the plain loop, by cache."""
LEAST_GAIN = 1.5
"""The target: tokens/s of 16 rows over those of one."""


def reached(lines: Sequence[Case]) -> str:
    """Whether the targets are, in words."""
    found = []
    for line in lines:
        if line["measurement"] == "overhead":
            above = [name for name, share in line["share"].items() if share > MOST_SHARE]
            found.append(f"overhead: {'not by ' + ', '.join(above) if above else 'yes, by every strategy'}")
        else:
            short = [cache for cache, least in LEAST_RATIO.items() if line["ratio_to_plain"][cache] < least]
            short += [f"{cache} x{line['batch']}" for cache, gain in line["batch_gain"].items() if gain < LEAST_GAIN]
            found.append(f"tokens/s: {'not with ' + ', '.join(short) if short else 'yes'}")
    return "; ".join(found)


def report(lines: Sequence[Case]) -> str:
    """The measurements as tables in Markdown."""
    parts = []
    for line in lines:
        size = f"{line['layers']} layers, {line['width']} wide, {line['vocab']} tokens, blocks of {line['block']}"
        if line["measurement"] == "overhead":
            times = line["milliseconds (network, outside)"]
            rows = [
                [name, f"{100 * share:.1f} %", f"{times[name][1]:.2f} ms", f"{times[name][0]:.2f} ms"]
                for name, share in sorted(line["share"].items(), key=lambda item: -item[1])
            ]
            parts.append(f"**Outside the network** ({size}, batch {line['batch']}), of a step:")
            parts.append(table(["strategy", "share", "outside", "network"], rows))
        else:
            rate, batch = line["tokens_per_s"], line["batch"]
            rows = [["plain loop", f"{rate['plain']:.0f}", "1", ""]]
            rows += [
                [
                    f"cache `{cache}`",
                    f"{rate[f'{cache} x1']:.0f}",
                    f"{ratio:.2f}",
                    f"{rate[f'{cache} x{batch}']:.0f} ({line['batch_gain'][cache]:.2f} times)",
                ]
                for cache, ratio in line["ratio_to_plain"].items()
            ]
            parts.append(f"**One token a step**, greedy ({size}, {line['prompt']} + {line['new_tokens']} tokens):")
            parts.append(table(["", "tokens/s, batch 1", "times the plain loop", f"tokens/s, batch {batch}"], rows))
    return "\n\n".join(parts)


def measure(case: Case) -> dict[str, Any]:
    """A line; what the case holds beside the measurement's name are options of it."""
    options = {name: value for name, value in case.items() if name != "measurement"}
    return COMMANDS[case["measurement"]](**options)


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
