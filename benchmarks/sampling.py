"""Sampling against a plain loop on a trained model: tokens/s and tokens per forward at matched quality.

    python benchmarks/sampling.py [--model FOLDER]     measures what is not in the file yet; stop it and go on at will
    python benchmarks/sampling.py --report             the table of what has been measured, as Markdown

About 12 minutes on two cores for 7.5 M parameters.

The task: prompts are the first tokens of functions and classes at the top level of held-out files of the built-in
corpus, spread evenly over them; every sampler continues each by `--new_tokens` tokens, in blocks. The plain loop is
`mdlm.eval.speed_sampling.plain_loop`: one token a step, the whole canvas fed, the head on every position, float64
Gumbel noise. Ours is `mdlm.samplers.generate`, at the same temperature. At 0, the default, the plain loop writes what
`confidence` without a cache writes. Above 0 it ranks drawn tokens, as LLaDA does, and so writes likelier text than the
model's law (`mdlm.samplers.draw`); `llada2` and `sdar` do so too, the others do not and cannot match it.

*Speed.* Steps of the plain loop all cost the same, so a few of them, before and after each candidate, say what the loop
would make of the very same minutes: the ratio holds on a busy machine, where tokens/s do not. Batch 1 is timed on
`--single` prompts one after the other, the larger batch on all of them.

*Quality* is judged on all prompts by what does not know the model (`text_quality.py`): nats per token under a 3-gram
model of the training text, the share of lines that `ast.parse` accepts, the share of different 4-grams. Rows do not
depend on the batch they are in, so one judgement serves both batch sizes. A loss is the change for the worse of a
candidate's mean from the plain loop's, in percent of the latter, with the standard error of the paired differences over
prompts. **Matched quality**: each of the three loses less than 2 %. Text that repeats itself gains nats and perhaps
lines, and loses 4-grams, so it does not pass; being better than the plain loop is no fault. What the held-out files
themselves go on with is judged too, as the measure of the scale. Mind the standard errors: with 32 prompts they are of
the size of the bar, so of many candidates some pass by luck.
"""

from __future__ import annotations

import ast
import hashlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from lines import RESULTS, Case, finish, measure_missing, measured, parser, table
from text_quality import NGram, distinct_share, parsed_share
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mdlm.corpus import builtin_source
from mdlm.data import DataConfig, training_texts
from mdlm.data_encode import split_draw
from mdlm.data_source import held_out
from mdlm.eval.speed_sampling import masked_canvas, plain_loop, plain_step
from mdlm.load import load_model
from mdlm.modeling import MDLMForMaskedLM
from mdlm.samplers.generate import generate
from mdlm.tokenization import encode_texts

FILE = RESULTS / "sampling.jsonl"
MODEL = "builtin:python-8m"
MOST_LOSS, LEAST_RATIO = 2.0, 4.0
"""The target: percent of each quality, times the tokens/s of the plain loop."""
QUALITIES = {"nats": -1, "syntax": 1, "distinct_4": 1}
"""What is judged, and whether more of it is better (1) or worse (-1)."""
PLAIN, TEXT = "plain loop", "held-out text"
ORDER = 3
"""Of the n-gram model."""
PLAIN_STEPS = {1: 8}
"""Steps of the plain loop on either side of a candidate, by batch size; others: 1, of a second or so."""


def candidate(strategy: str, cache: str = "dual", **knobs: Any) -> dict[str, Any]:
    """A strategy of `PRESETS`, its knobs, a cache."""
    return {"strategy": strategy, "knobs": knobs, "cache": cache}


CANDIDATES: list[dict[str, Any]] = [
    candidate(TEXT, ""),
    candidate(PLAIN, "none"),
    *(candidate("confidence", cache, block_length=32) for cache in ("none", "prefix", "dual")),
    *(candidate("threshold", cache, threshold=0.9) for cache in ("none", "prefix", "dual")),
    *(candidate("threshold", threshold=threshold) for threshold in (0.95, 0.8, 0.7, 0.6)),
    *(candidate("factor", factor=factor) for factor in (1.0, 0.5)),
    *(candidate("eb", gamma=gamma, block_length=32) for gamma in (0.05, 0.1, 0.3)),
    candidate("clad", "none", threshold=0.7),  # reads attention over the whole canvas: no cache computes that
    *(candidate("klass", threshold=threshold, block_length=32) for threshold in (0.6, 0.8)),
    candidate("sdar", threshold=0.85, steps=32, block_length=32),
    candidate("llada2", threshold=0.9),
    candidate("entropy_threshold", max_entropy=0.3),
    candidate("credit", threshold=0.9),
    candidate("spans", budget=0.1),
    *(candidate("confidence", steps=steps, block_length=32) for steps in (16, 8)),
    *(candidate("eb", gamma=gamma, score="probability", block_length=32) for gamma in (1.0, 3.0)),
    *(candidate("spaced", gamma=gamma, score="probability", block_length=32) for gamma in (1.0, 3.0)),
    candidate("hierarchy", threshold=0.9),
    *(candidate("hierarchy", threshold=0.9, low=low) for low in (0.3, 0.2, 0.1)),
    candidate("dus"),
    candidate("dus", block_length=16),
]


@dataclass(frozen=True)
class Task:
    """What every candidate is asked to do."""

    prompts: int = 32
    prompt_tokens: int = 64
    new_tokens: int = 128
    block: int = 32
    """Of the plain loop; a divisor of `new_tokens`."""
    batch: int = 16
    """Rows of the larger batch; batch 1 is always measured."""
    single: int = 4
    """Prompts on which batch 1 is timed."""
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if self.new_tokens % self.block or not 1 <= self.single <= self.prompts or self.batch < 2:
            raise ValueError(
                f"{self}: new_tokens must be a multiple of block, single from 1 to prompts, batch 2 or more"
            )


def pieces_of_code(
    tokenizer: PreTrainedTokenizerBase, count: int, length: int, fraction: float = DataConfig().validation_fraction
) -> Int64[Tensor, "count length"]:
    """The first `length` tokens of functions and classes of the top level of held-out files, spread evenly over all.

    Raises ValueError if there are fewer than `count` that are so long with what follows them in their file.
    """
    documents = builtin_source().documents
    out = held_out(np.asarray([split_draw(document) for document in documents]), fraction)
    texts = []
    for document, held in zip(documents, out):
        if held and document.where.endswith(".py"):
            lines = document.text.split("\n")
            for node in ast.parse(document.text).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    texts.append("\n".join(lines[first - 1 :])[: 40 * length])
    rows = [ids[:length] for ids in encode_texts(tokenizer, texts) if len(ids) >= length]
    if len(rows) < count:
        raise ValueError(f"only {len(rows)} pieces of held-out code have {length} tokens; ask for fewer than {count}")
    return torch.from_numpy(np.stack([rows[i * len(rows) // count] for i in range(count)]).astype(np.int64))


def training_tokens(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The training documents of the built-in corpus in one row, the end token behind each."""
    encoded = encode_texts(tokenizer, list(training_texts(DataConfig())))
    end = np.asarray([tokenizer.eos_token_id])
    return np.concatenate([part for ids in encoded for part in (ids, end)])


def digest(model: MDLMForMaskedLM) -> str:
    """Of the weights: lines of two checkpoints in one folder are not the same measurement."""
    total = hashlib.sha256()
    for weight in model.state_dict().values():
        total.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


@dataclass
class Bench:
    """A model, the prompts, and the judge that has read the training text."""

    model: MDLMForMaskedLM
    tokenizer: PreTrainedTokenizerBase
    task: Task

    @cached_property
    def code(self) -> Int64[Tensor, "prompts seq"]:
        """Prompts with what follows them in their files."""
        return pieces_of_code(self.tokenizer, self.task.prompts, self.task.prompt_tokens + self.task.new_tokens)

    @property
    def prompts(self) -> Int64[Tensor, "prompts length"]:
        """What the samplers are given."""
        return self.code[:, : self.task.prompt_tokens]

    @cached_property
    def judge(self) -> NGram:
        """The n-gram model of the training text."""
        return NGram(training_tokens(self.tokenizer), self.model.config.vocab_size, ORDER)

    def quality(self, rows: Int64[Tensor, "prompts seq"]) -> dict[str, list[float]]:
        """Of the answers in `rows`, each by what `text_quality.py` says; text counts up to the first end token."""
        given = self.task.prompt_tokens
        values: dict[str, list[float]] = {"nats": self.judge.nats(rows.numpy(), given).mean(axis=1).tolist()}
        values |= {"syntax": [], "distinct_4": []}
        for row in rows.tolist():
            written, end = row[given:], self.tokenizer.eos_token_id
            stop = given + written.index(end) if end in written else len(row)
            prompt, whole = str(self.tokenizer.decode(row[:given])), str(self.tokenizer.decode(row[:stop]))
            values["syntax"].append(parsed_share(prompt, whole[len(prompt) :]))
            values["distinct_4"].append(distinct_share(written))
        return {name: [round(value, 5) for value in found] for name, found in values.items()}

    def plain_seconds(self, batch: int) -> list[float]:
        """Seconds of single steps of the plain loop."""
        task = self.task
        canvas = masked_canvas(self.model, self.prompts[:batch], task.new_tokens)
        return [
            _timed(lambda: plain_step(self.model, canvas, task.prompt_tokens + task.block, task.temperature))[0]
            for _ in range(PLAIN_STEPS.get(batch, 1))
        ]

    def ours(self, case: Case, rows: int, batch: int) -> Any:
        """The first `rows` prompts continued, `batch` at a time."""
        return generate(
            self.model,
            self.tokenizer,
            self.prompts[:rows],
            strategy=case["strategy"],
            max_new_tokens=self.task.new_tokens,
            temperature=self.task.temperature,
            eos="ignore",
            batch_size=batch,
            cache=case["cache"],
            **case["knobs"],
        )

    def measure(self, case: Case) -> dict[str, Any]:
        """Everything about one candidate."""
        if case["strategy"] == TEXT:
            return self.quality(self.code)
        if case["strategy"] == PLAIN:
            return self.measure_plain()
        task = self.task
        ours: dict[str, float] = {}
        plain: dict[str, float] = {}
        self.ours(case, 1, 1)  # warms up
        for batch, rows in ((1, task.single), (task.batch, task.prompts)):
            steps = self.plain_seconds(batch)
            seconds, made = _timed(partial(self.ours, case, rows, batch))
            steps += self.plain_seconds(batch)
            ours[str(batch)] = rows * task.new_tokens / seconds
            plain[str(batch)] = min(batch, rows) / statistics.median(steps)
        forwards = float(made.forwards.double().mean())
        return {
            "tokens_per_s": ours,
            "plain_tokens_per_s": plain,
            "ratio": {batch: ours[batch] / plain[batch] for batch in ours},
            "forwards": forwards,
            "tokens_per_forward": task.new_tokens / forwards,
            "tokens_fed": float(made.tokens_fed.double().mean()),
            **self.quality(torch.stack(made.tokens)),
        }

    def measure_plain(self) -> dict[str, Any]:
        """The plain loop: all prompts one after the other, and a few steps of the larger batch."""
        task = self.task
        torch.manual_seed(0)
        seconds, rows = _timed(
            lambda: torch.cat(
                [
                    plain_loop(self.model, prompt[None], task.new_tokens, task.block, task.temperature)
                    for prompt in self.prompts
                ]
            )
        )
        steps = [seconds for _ in range(4) for seconds in self.plain_seconds(task.batch)]
        rates = {"1": task.prompts * task.new_tokens / seconds}
        rates[str(task.batch)] = min(task.batch, task.prompts) / statistics.median(steps)
        return {
            "tokens_per_s": rates,
            "plain_tokens_per_s": rates,
            "ratio": dict.fromkeys(rates, 1.0),
            "forwards": float(task.new_tokens),
            "tokens_per_forward": 1.0,
            "tokens_fed": float(task.new_tokens * rows.shape[1]),
            **self.quality(rows),
        }


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def loss(of: Sequence[float], reference: Sequence[float], better: int) -> tuple[float, float]:
    """Change for the worse of the mean of `of` from that of `reference`, in percent of the latter, and the standard
    error of the paired differences (NaN for one pair). Both NaN, which is no match, where the latter is 0. `better`: 1
    where more is better, else -1."""
    mean = statistics.fmean(reference)
    if mean == 0:
        return math.nan, math.nan
    differences = [better * (r - o) for o, r in zip(of, reference, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else math.nan
    return 100 * statistics.fmean(differences) / mean, 100 * error / mean


def losses(line: Case, lines: Sequence[Case]) -> dict[str, tuple[float, float]]:
    """`loss` of each quality of a line against the plain loop that did the same task; {} if none has."""
    same = [other for other in lines if other["strategy"] == PLAIN and _task_of(other) == _task_of(line)]
    if not same:
        return {}
    return {name: loss(line[name], same[0][name], better) for name, better in QUALITIES.items()}


def matched(found: dict[str, tuple[float, float]]) -> bool:
    """Whether every quality loses less than the bar."""
    return bool(found) and all(percent < MOST_LOSS for percent, _ in found.values())


def reached(line: Case, lines: Sequence[Case]) -> list[str]:
    """The batch sizes at which a candidate reaches the target."""
    if line["strategy"] in (PLAIN, TEXT) or not matched(losses(line, lines)):
        return []
    return [batch for batch, ratio in line["ratio"].items() if ratio >= LEAST_RATIO]


def named(line: Case) -> str:
    """A candidate in words: strategy, knobs, cache."""
    if line["strategy"] in (PLAIN, TEXT):
        return str(line["strategy"])
    knobs = ", ".join(f"{name} {value}" for name, value in line["knobs"].items())
    return f"{line['strategy']}{f' ({knobs})' if knobs else ''}, cache {line['cache']}"


def _task_of(line: Case) -> tuple[Any, ...]:
    return line["weights"], *sorted(line["task"].items())


def report(lines: Sequence[Case]) -> str:
    """A table in Markdown for each model and task that has been measured."""
    parts = []
    for task in dict.fromkeys(_task_of(line) for line in lines):
        parts.append(_report_of([line for line in lines if _task_of(line) == task]))
    return "\n\n".join(parts)


def _report_of(lines: Sequence[Case]) -> str:
    first, batch = lines[0], str(lines[0]["task"]["batch"])
    head = ["strategy", "tokens per forward"]
    head += [f"{what}, batch {size}" for size in ("1", batch) for what in ("tokens/s", "times plain")]
    head += ["3-gram nats", "loss %", "lines parsed", "loss %", "distinct 4-grams", "loss %", "target reached"]
    rows = []
    for line in lines:
        cells = [named(line), *[""] * 5]
        if "ratio" in line:
            cells[1:] = [f"{line['tokens_per_forward']:.2f}"]
            for size in ("1", batch):
                cells += [f"{line['tokens_per_s'][size]:.0f}", f"{line['ratio'][size]:.1f}"]
        found = losses(line, lines)
        for name in QUALITIES:
            cells.append(f"{statistics.fmean(line[name]):.3f}")
            cells.append(f"{found[name][0]:+.1f} ± {found[name][1]:.1f}" if name in found else "")
        batches = reached(line, lines)
        verdict = f"batch {' and '.join(batches)}" if batches else "quality only" if matched(found) else "no"
        rows.append([*cells, "" if line["strategy"] in (PLAIN, TEXT) else verdict])
    task = first["task"]
    what = (
        f"`{first['model']}` ({first['parameters'] / 1e6:.1f} M parameters, weights {first['weights']}); "
        f"{task['prompts']} prompts of {task['prompt_tokens']} tokens, {task['new_tokens']} new ones, "
        f"temperature {task['temperature']:g}. Losses are against the plain loop, ± their standard errors."
    )
    return f"{what}\n\n{table(head, rows)}"


def cases(bench: Bench, model: str, chosen: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One case per candidate, with all that its result depends on."""
    parameters = sum(weight.numel() for weight in bench.model.parameters())
    common = {"model": model, "weights": digest(bench.model), "parameters": parameters, "task": vars(bench.task)}
    return [{"measurement": "sampling", **common, **one} for one in chosen]


def main(argv: list[str] | None = None) -> int:
    """Entry of the command."""
    options = parser(__doc__, FILE)
    options.add_argument("--model", default=MODEL, help="checkpoint or run folder (default: %(default)s)")
    options.add_argument("--only", nargs="+", default=None, help="strategies; the plain loop is always among them")
    for name, default in vars(Task()).items():
        options.add_argument(f"--{name}", type=type(default), default=default, help="default: %(default)s")
    given = options.parse_args(argv)

    def work() -> None:
        if given.report:
            print(report(measured(given.file)))
            return
        known = {one["strategy"] for one in CANDIDATES}
        unknown = set(given.only or ()) - known
        if unknown:
            raise ValueError(f"--only {' '.join(sorted(unknown))}: not measured here; there are {', '.join(known)}")
        task = Task(**{name: getattr(given, name) for name in vars(Task())})
        model, tokenizer = load_model(given.model, device="cpu")
        bench = Bench(model, tokenizer, task)
        chosen = [one for one in CANDIDATES if given.only is None or one["strategy"] in (*given.only, PLAIN)]
        measure_missing(given.file, cases(bench, given.model, chosen), bench.measure)

    return finish(work)


if __name__ == "__main__":
    sys.exit(main())
