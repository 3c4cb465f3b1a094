"""`mdlm eval tasks CHECKPOINT --tasks a,b`: tasks of lm-evaluation-harness on a checkpoint, by any strategy.

Prints one JSON line (lm-eval's results; protocol, errors and cost under `config.mdlm`) and a table on stderr. With
`--output DIR` the line goes to `DIR/results.json` and each answer, as soon as it is known, to `DIR/answers-RANK.jsonl`;
`--resume` goes on from there. Several processes: `accelerate launch -m mdlm.eval tasks ...`. No hub is needed for tasks
whose data are local files. Read next: `harness.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mdlm.eval.harness_options import GENERATION, Likelihoods, Preset, Texts, load_preset, preset_names
from mdlm.samplers.generate import DEFAULT_STRATEGY, generate
from mdlm.samplers.presets import PRESETS, unknown_strategy

PROG = "mdlm eval tasks"


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """What is evaluated, on what, and where results go."""

    checkpoint: str
    """A checkpoint folder, also of a public format, or the output_dir of a run (its newest checkpoint)."""
    tasks: str | None = None
    """Names of tasks, groups or tags, or patterns (`arc_*`), separated by commas."""
    include_path: str | None = None
    """Folder with further tasks as YAML."""
    limit: float | None = None
    """Only so many documents of each task (below 1: this share); for trying out."""
    num_fewshot: int | None = None
    """Examples in each prompt; default: the preset's, else the task's."""
    preset: str | None = None
    """How a public model is evaluated; options given here beat it. See --presets."""
    apply_chat_template: bool | None = None
    """Put prompts into the tokenizer's chat template; default: the preset's choice, else no."""
    fewshot_as_multiturn: bool = True
    """With a chat template: examples are turns of the chat, not one text."""
    system_instruction: str | None = None
    """Put in front of every prompt."""
    peft: str | None = None
    """Adapter of our training for the checkpoint."""
    batch_size: int = 16
    """Rows per forward; changes nothing but rounding."""
    max_length: int | None = None
    """Longest prompt and answer together; default: what the model takes."""
    seed: int = 0
    """Of masks and sampling."""
    fewshot_seed: int = 1234
    """Of the choice of examples."""
    dtype: str = "float32"
    """Precision of the weights: float32, bfloat16, float16 or float64."""
    device: str = "auto"
    """auto (a GPU if there is one; several processes take one each), cpu, cuda, cuda:1, ..."""
    output: str | None = None
    """Folder for results and answers."""
    resume: bool = False
    """Go on with the answers in --output."""
    log_samples: bool = False
    """Put every document with its answer into the results."""
    confirm_run_unsafe_code: bool = False
    """Run tasks that execute the code they are answered with, without a sandbox."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the flag."""
        if not self.tasks:
            raise ValueError("give --tasks, names separated by commas")
        if self.resume and self.output is None:
            raise ValueError("--resume needs --output, the folder that the interrupted evaluation kept its answers in")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"--limit is {self.limit}; it must be above 0")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `mdlm eval tasks`; returns the exit status (130: interrupted)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--presets" in arguments:
        print(list_presets())
        return 0
    options = None
    try:
        options, given = parse(arguments)
        record = evaluate_tasks(options, given)
    except (ValueError, OSError, ImportError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = options.output if options is not None else None
        where = f"; answers so far are in {kept}, go on with --resume" if kept else "; without --output nothing is kept"
        print(f"{PROG}: interrupted{where}", file=sys.stderr)
        return 130
    finally:
        _leave_processes()
    if record is not None:
        print(json.dumps(record), flush=True)
        print(summary(record), file=sys.stderr)
    return 0


def parse(arguments: list[str]) -> tuple[TaskOptions, dict[str, Any]]:
    """Options of the command, and those of `resolve` that were given."""
    from jsonargparse import ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    first = argparse.ArgumentParser(prog=PROG, add_help=False, allow_abbrev=False)
    first.add_argument("--strategy")
    first.add_argument("--preset")
    early = first.parse_known_args(arguments)[0]
    preset = None if early.preset is None else load_preset(early.preset)
    name = early.strategy or (preset.options.get("strategy") if preset else None) or DEFAULT_STRATEGY
    if name not in PRESETS:
        raise unknown_strategy(name)
    knobs = inspect.signature(PRESETS[name]).parameters
    parser = ArgumentParser(
        prog=PROG, description="Tasks of lm-evaluation-harness on a checkpoint.", allow_abbrev=False
    )
    parser.add_argument("--presets", action="store_true", help="list all presets and end")
    text = f"how to unmask (default: the preset's, else the checkpoint's own, else {DEFAULT_STRATEGY})"
    parser.add_argument("--strategy", choices=list(PRESETS), help=text)
    parser.add_class_arguments(TaskOptions, as_group=False, as_positional=True)
    for kind, title in ((Likelihoods, "options of likelihoods"), (Texts, "options of texts")):
        group = parser.add_argument_group(title)
        group.add_class_arguments(kind, as_group=False)
    text = "length of an answer (default: the preset's, else the task's max_gen_toks, else 256)"
    unset = "What is not given here or by the preset is the task's: temperature 0 unless the task samples."
    group = parser.add_argument_group("options of generation", unset)
    group.add_argument("--max_new_tokens", type=int | None, default=None, help=text)
    others = {p for p in inspect.signature(generate).parameters if p not in GENERATION}
    group.add_function_arguments(generate, as_group=False, skip={*others, "max_new_tokens", *knobs})
    if knobs:
        group = parser.add_argument_group(f"options of the strategy {name!r}")
        group.add_function_arguments(PRESETS[name], as_group=False)
    parser.parse_args(arguments)  # reports what is missing or wrong
    said = vars(parser.instantiate(parser.parse_args(arguments, defaults=False)))
    own = {field.name for field in dataclasses.fields(TaskOptions)}
    flat = {key: value for key, value in said.items() if key not in own and key not in ("presets", "config")}
    return TaskOptions(**{key: value for key, value in said.items() if key in own}), flat


def list_presets() -> str:
    """Every preset with what it is, and its options, as Markdown."""
    parts = []
    for name in preset_names():
        preset = load_preset(name)
        lines = [f"## {name}", "", " ".join(preset.about.split()), "", f"- all tasks: {_flags(preset.options)}"]
        parts.append("\n".join([*lines, *(f"- `{task}`: {_flags(own)}" for task, own in preset.tasks.items())]))
    return "\n\n".join(parts)


def _flags(options: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items())


def evaluate_tasks(options: TaskOptions, given: dict[str, Any]) -> dict[str, Any] | None:
    """lm-eval's results with ours in their `config`; None on processes that do not report.

    `given`: options of `harness_options.resolve`. Raises ValueError for unknown tasks and options, before the model is
    asked anything.
    """
    from mdlm.eval.harness import MDLM  # says what to install where lm_eval is missing

    assert options.tasks is not None
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable

    preset = None if options.preset is None else load_preset(options.preset)
    manager = _task_manager(TaskManager, options)
    names = find_tasks(options.tasks, manager.all_tasks)
    model = MDLM(
        options.checkpoint,
        peft=options.peft,
        preset=options.preset,
        batch_size=options.batch_size,
        max_length=options.max_length,
        seed=options.seed,
        dtype=options.dtype,
        device=options.device,
        answers=options.output,
        resume=options.resume,
        **given,
    )
    chat = options.apply_chat_template
    chat = (preset is not None and preset.apply_chat_template) if chat is None else chat
    if chat:
        model.chat_template(True)
    selected, tasks = _select([manager.load([name]) for name in names])
    _set_fewshot(tasks, preset, options.num_fewshot)
    _check_documents(tasks, options.limit, model.world_size)
    with contextlib.redirect_stdout(sys.stderr):  # the one line on stdout is ours
        results = simple_evaluate(
            model=model,
            tasks=selected,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            log_samples=options.log_samples,
            apply_chat_template=chat,
            fewshot_as_multiturn=options.fewshot_as_multiturn and chat,
            system_instruction=options.system_instruction,
            task_manager=manager,
            random_seed=options.seed,
            numpy_random_seed=options.seed,
            torch_random_seed=options.seed,
            fewshot_random_seed=options.fewshot_seed,
            confirm_run_unsafe_code=options.confirm_run_unsafe_code,
            batch_size=options.batch_size,
        )
    if results is None:
        return None
    results["config"]["mdlm"]["command"] = {**dataclasses.asdict(options), "apply_chat_template": chat}
    record: dict[str, Any] = json.loads(json.dumps({"kind": "tasks", **results}, default=handle_non_serializable))
    if options.output is not None:
        (Path(options.output) / "results.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def summary(record: dict[str, Any]) -> str:
    """The results for the eye: a line per task and metric, with lm-eval's standard error over documents."""
    rows = []
    for task, found in record["results"].items():
        for name, value in found.items():
            metric, _, filtered = name.partition(",")
            if filtered and not metric.endswith("_stderr") and isinstance(value, (int, float)):
                error = found.get(f"{metric}_stderr,{filtered}")
                spread = f" ± {error:.4f}" if isinstance(error, float) else ""
                label = metric if filtered == "none" else f"{metric} ({filtered})"
                rows.append(f"{task:<24} {label:<28} {value:.4f}{spread}")
    return "\n".join(rows)


def _task_manager(kind: Any, options: TaskOptions) -> Any:
    """The tasks of `include_path` alone where they are all that is asked for: lm-eval's own take seconds to read."""
    if options.include_path is not None:
        if not Path(options.include_path).is_dir():
            raise ValueError(f"--include_path {options.include_path} is not a folder")
        manager = kind(include_path=options.include_path, include_defaults=False)
        assert options.tasks is not None
        if all(manager.match_tasks([name]) for name in options.tasks.split(",")):
            return manager
    return kind(include_path=options.include_path)


def find_tasks(asked: str, known: Sequence[str]) -> list[str]:
    """The names that a list of names and patterns means, each once. Raises ValueError naming the nearest ones."""
    from lm_eval.utils import pattern_match

    found: list[str] = []
    for name in filter(None, (part.strip() for part in asked.split(","))):
        matches = pattern_match([name], known)
        if not matches:
            near = difflib.get_close_matches(name, known, n=5)
            hint = f"; near it are {', '.join(near)}" if near else ""
            raise ValueError(
                f"there is no task {name!r}{hint}. {len(known)} are known ('lm_eval ls tasks' lists lm-eval's own); "
                "tasks of your own: --include_path"
            )
        found += [match for match in matches if match not in found]
    if not found:
        raise ValueError("give --tasks, names separated by commas")
    return found


def _select(loaded: Sequence[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """What lm-eval is to run, each task once: the outermost groups, and the tasks outside them; and all their tasks."""
    groups = {name: group for part in loaded for name, group in part["groups"].items()}
    nested = {inner.name for group in groups.values() for inner in group.get_all_groups()}
    outer = [group for name, group in groups.items() if name not in nested]
    inside = {task.task_name: task for group in outer for task in group.get_all_tasks()}
    outside = {name: task for part in loaded for name, task in part["tasks"].items() if name not in inside}
    return [*outer, *outside.values()], [*inside.values(), *outside.values()]


def _set_fewshot(tasks: Sequence[Any], preset: Preset | None, asked: int | None) -> None:
    """The preset's numbers of examples, where none was asked for."""
    if preset is None or asked is not None:
        return
    for task in tasks:
        number = preset.num_fewshot(task.task_name)
        if number is not None:
            task.set_config(key="num_fewshot", value=number)


def _check_documents(tasks: Sequence[Any], limit: float | None, processes: int) -> None:
    """Raises ValueError for a task without documents, or with fewer than processes: lm-eval cannot share them out."""
    for task in tasks:
        count = len(task.eval_docs)
        if limit is not None:
            count = min(count, math.ceil(count * limit) if limit < 1 else int(limit))
        if count < processes:
            raise ValueError(
                f"the task {task.task_name!r} has {count} documents for {processes} "
                f"process{'es: start at most as many' if processes > 1 else ': there is nothing to evaluate'}"
            )


def _leave_processes() -> None:
    """Ends the group that `MDLM` joined."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
