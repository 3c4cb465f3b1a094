"""What one GPU makes of `mdlm`, in under five minutes: attention, training steps, sampling of an 8 B model, memory.

    python benchmarks/gpu.py [--file gpu.jsonl]           measures what is not in the file yet
    python benchmarks/gpu.py --report [--file gpu.jsonl]  the tables of what has been measured, as Markdown
    python benchmarks/gpu.py --toy --file toy.jsonl       tries the whole script at toy sizes, without a GPU too
    python benchmarks/gpu.py --only train                 one part of it

- `attention`: forward and backward over documents packed in one row of 16384 tokens: flash attention's varlen kernels
  (the package `flash-attn`, and torch's own) and flex_attention against SDPA with a mask.
- `train`: whole steps (AdamW, bf16 autocast) of models of 100 M and 1 B parameters, as they are and with their layers
  compiled one by one, which share one compilation; packed rows under each attention; a vocabulary of 131072 with head
  and loss in one and apart. MFU is a share of what a matmul of this machine reaches, not of what is printed on the box.
- `sampling`: a model of LLaDA-8B's shape with random weights, one token a step, with each cache, for one row and eight;
  beside the plain loop (`mdlm.eval.speed_sampling.plain_step`). Says nothing about quality.

What the machine cannot do stands in the file as "skipped", with the reason, and so does what there was no time left for
after `--seconds`; an error as "failed". The next call tries these again. Read next: `gpu_parts.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from gpu_parts import ATTENTION, CACHES, FULL, PLAIN, TOY, Machine, Skip
from lines import REASONS, RESULTS, Case, finish, holds, measure_missing, measured, measures, parser, table

FILE = RESULTS / "gpu.jsonl"
PARTS = ("attention", "train", "sampling")
MOST_SECONDS = 300.0
"""In which everything should be measured on one H200."""


def _train(
    shape: str, compiled: bool = True, attention: str = "sdpa", packed: bool = False, fused_head: bool = True
) -> dict[str, Any]:
    return {
        "measurement": "train",
        "shape": shape,
        "compiled": compiled,
        "attention": attention,
        "packed": packed,
        "fused_head": fused_head,
    }


def cases(device: str, toy: bool, parts: Sequence[str] = PARTS) -> Iterator[dict[str, Any]]:
    """Everything that is measured, in an order in which the first minute says most."""
    batches = (TOY if toy else FULL).batches
    every: list[dict[str, Any]] = [
        *({"measurement": "attention", "implementation": name} for name in ATTENTION),
        *(_train("100M", compiled) for compiled in (False, True)),
        *(_train("100M", attention=name, packed=True) for name in ("sdpa", "flex_attention", "flash_attention_2")),
        *(_train("1B", compiled) for compiled in (False, True)),
        *(_train("100M, vocabulary 131072", fused_head=fused) for fused in (False, True)),
        *(
            {"measurement": "sampling", "cache": cache, "batch": batch}
            for batch in batches
            for cache in (PLAIN, *CACHES)
        ),
    ]
    for case in every:
        if case["measurement"] in parts:
            yield {"device": device, "toy": toy, **case}


def measure(machine: Machine, case: Case, until: float) -> dict[str, Any]:
    """One case, or why it was not measured: such a machine is lent for minutes, so one error must not cost the rest."""
    if time.monotonic() > until:
        return {"skipped": "no time was left; the same command goes on"}
    begin = time.monotonic()
    try:
        part = {"attention": machine.attention, "train": machine.train, "sampling": machine.sampling}
        return {**part[case["measurement"]](case), "wall_s": time.monotonic() - begin}
    except Skip as reason:
        return {"skipped": str(reason)}
    except (RuntimeError, ValueError, TypeError, ImportError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def newest(lines: Sequence[Case]) -> list[Case]:
    """Without lines that say why something was not measured which has been tried again since."""
    kept = []
    for i, line in enumerate(lines):
        case = {name: line[name] for name in line if name not in (*REASONS, "machine")}
        if measures(line) or not any(holds(later, case) for later in lines[i + 1 :]):
            kept.append(line)
    return kept


def report(lines: Sequence[Case]) -> str:
    """A table in Markdown per part and device."""
    parts = []
    for where in dict.fromkeys((line["device"], line["toy"]) for line in lines):
        here = newest([line for line in lines if (line["device"], line["toy"]) == where])
        parts.append(f"**{where[0]}**{', toy sizes: the figures mean nothing' if where[1] else ''}")
        for name, rows in (("attention", _attention), ("train", _steps), ("sampling", _sampling)):
            chosen = [line for line in here if line["measurement"] == name]
            if chosen:
                parts.append(rows(chosen))
    return "\n\n".join(parts)


def _table(head: Sequence[str], lines: Sequence[Case], cells: Callable[[Case], Sequence[str]]) -> str:
    """The cells of each line behind its label; of one that measured nothing, why."""
    return table(head, ([_label(line), *(cells(line) if measures(line) else _reason(line, head))] for line in lines))


def _label(line: Case) -> str:
    if line["measurement"] == "attention":
        return str(line["implementation"])
    if line["measurement"] == "sampling":
        return f"{line['cache']}, {line['batch']} row{'s' * (line['batch'] > 1)}"
    what = [line["shape"], "compiled" if line["compiled"] else "as it is", line["attention"]]
    return ", ".join([*what, *["packed"] * line["packed"], *["head apart from the loss"] * (not line["fused_head"])])


def _reason(line: Case, head: Sequence[str]) -> list[str]:
    name = next(name for name in REASONS if name in line)
    return [f"{name}: {' '.join(line[name].split())[:300]}".replace("|", "/"), *[""] * (len(head) - 2)]


def _gigabytes(line: Case) -> str:
    return "" if line["peak_bytes"] is None else f"{line['peak_bytes'] / 1e9:.2f} GB"


def _attention(lines: Sequence[Case]) -> str:
    head = ["packed attention, forward and backward", "ms", "of the matmul peak", "peak memory", "difference from SDPA"]
    return _table(
        head,
        lines,
        lambda line: (
            f"{1e3 * line['seconds']:.2f}",
            f"{line['flops_share']:.2f}",
            _gigabytes(line),
            f"{line['difference_from_sdpa']:.1e}",
        ),
    )


def _steps(lines: Sequence[Case]) -> str:
    return _table(
        ["training step", "tokens/s", "MFU", "peak memory", "first step, s"],
        lines,
        lambda line: (
            f"{line['tokens_per_s']:,.0f}",
            f"{line['mfu']:.2f}",
            _gigabytes(line),
            f"{line['first_step_seconds']:.1f}",
        ),
    )


def _sampling(lines: Sequence[Case]) -> str:
    plain = {line["batch"]: line["tokens_per_s"] for line in lines if line["cache"] == PLAIN and measures(line)}
    return _table(
        ["sampling, LLaDA-8B's shape: cache", "tokens/s", "times the plain loop", "tokens fed", "peak memory"],
        lines,
        lambda line: (
            f"{line['tokens_per_s']:.1f}",
            f"{line['tokens_per_s'] / plain[line['batch']]:.1f}" if line["batch"] in plain else "",
            f"{line['tokens_fed']:,.0f}" if "tokens_fed" in line else "",
            _gigabytes(line),
        ),
    )


def main(argv: list[str] | None = None) -> int:
    """Entry of the command."""
    options = parser(__doc__, FILE)
    options.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts of it")
    options.add_argument("--toy", action="store_true", help="sizes that a CPU makes in seconds; try the script")
    options.add_argument("--seconds", type=float, default=280.0, help="begin nothing after so long (default: 280)")
    given = options.parse_args(argv)

    def work() -> None:
        if given.report:
            print(report(measured(given.file)))
            return
        cuda = torch.cuda.is_available()
        if not cuda and not given.toy:
            raise ValueError("there is no CUDA device; --toy tries the script without one")
        name = torch.cuda.get_device_name() if cuda else "CPU"
        machine = Machine(torch.device("cuda" if cuda else "cpu"), TOY if given.toy else FULL)
        until = time.monotonic() + given.seconds
        chosen = cases(name, given.toy, given.only)
        measure_missing(given.file, chosen, lambda case: measure(machine, case, until))
        failed = [line for line in newest(measured(given.file)) if "failed" in line]
        if failed:
            raise ValueError(f"{len(failed)} cases failed, see {given.file}: {failed[0]['failed']}")

    return finish(work)


if __name__ == "__main__":
    sys.exit(main())
