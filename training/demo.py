"""`mdlm demo`: fine-tune the model that comes with the package on a folder of text; loss and samples before and after.

It runs the commands a user would type and prints each, so that the demonstration is also the manual. Run twice, it goes
on from its newest checkpoint and, when the training is finished, repeats only what follows. With `--from_scratch true`
it trains a small model on the interpreter's own library instead.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from importlib.resources import as_file, files
from pathlib import Path

from mdlm.command import run_command
from mdlm.data_source import DataConfig, open_source

MODEL = "builtin:python-8m"
PROMPTS = ("def ", "import ", "class ")
"""What the demonstration asks the model to continue."""


def demo(
    folder: str | None = None,
    output_dir: str = "demo",
    max_seconds: float | None = None,
    fresh: bool = False,
    tokens: int = 96,
    from_scratch: bool = False,
) -> None:
    """Fine-tune a model on your text, see what that did to its loss and its samples, watch it write.

    Args:
        folder: folder, file or glob of text (.txt, .md, .py, ...) to fine-tune on; default: the sources of mdlm itself.
        output_dir: folder for checkpoints and metrics.
        max_seconds: time the training steps may take (compiling and validation come on top); default: 90, from
            scratch 240.
        fresh: delete what an earlier demonstration left and start again.
        tokens: new tokens per generated text.
        from_scratch: train a new model of 2.2 M parameters on the standard library of this Python.
    """
    from mdlm.eval.__main__ import main as evaluate
    from mdlm.samplers.__main__ import main as sample
    from mdlm.training.__main__ import main as train

    if from_scratch and folder is not None:
        raise ValueError(f"--folder {folder} is for fine-tuning; a model from scratch learns the built-in corpus")
    start = time.perf_counter()
    recipe, seconds = ("demo.yaml", 240.0) if from_scratch else ("finetune.yaml", 90.0)
    written = [f"--prompt={prompt}" for prompt in PROMPTS]
    written += ["--strategy=ancestral", f"--max_new_tokens={tokens}", "--temperature=0.8"]
    options = ["--overwrite", "--resume=none"] if fresh else ["--resume=auto"]
    options += [f"--train.max_seconds={seconds if max_seconds is None else max_seconds}"]
    if not from_scratch:
        source = str(files("mdlm") / "**" / "*.py") if folder is None else folder
        open_source(DataConfig(source=source))  # what is wrong with the folder is said before anything takes time
        options += [f"--data.source={source}"]
        _run("sample", sample, [MODEL, *written])
    with as_file(files("mdlm.training.recipes") / recipe) as path:
        _run("train", train, [f"--config={path}", f"--output_dir={output_dir}", *options])
    if from_scratch:
        _run("eval", evaluate, [output_dir, "--rows=512", f"--results={output_dir}/results.jsonl"])
    else:
        print(f"\n{before_and_after(Path(output_dir) / 'metrics.jsonl')}")
    _run("sample", sample, [output_dir, *written])
    watched = ["--strategy=threshold", "--threshold=0.5", "--temperature=0.7", "--repetition_penalty=1.2", "--show"]
    _run("sample", sample, [output_dir, f"--prompt={PROMPTS[0]}", f"--max_new_tokens={tokens}", *watched])
    print(f"\ndone in {time.perf_counter() - start:.0f} s; the model is {Path(output_dir).resolve()}")


def before_and_after(metrics: Path) -> str:
    """The first and the last validation of a run, as two lines and the difference. Both see the same masks."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    first, *_, last = [record for record in records if record["kind"] == "validation"]
    rows = [
        f"{when}: {record['bits_per_byte']:.3f} bits/byte, {record['nats_per_token']:.3f} +- "
        f"{record['standard_error']:.3f} nats/token (NELBO of {record['tokens']} held-out tokens)"
        for when, record in ((f"before, step {first['step']}", first), (f"after,  step {last['step']}", last))
    ]
    return "\n".join([*rows, f"change: {last['bits_per_byte'] - first['bits_per_byte']:+.3f} bits/byte"])


def _run(command: str, main: Callable[[list[str]], int | None], arguments: Sequence[str]) -> None:
    print(f"\n$ mdlm {command} {' '.join(arguments)}", flush=True)
    status = main(list(arguments))
    if status:
        raise SystemExit(status)


def main(argv: list[str] | None = None) -> int:
    """Entry of `mdlm demo`."""
    return run_command(demo, argv, "mdlm demo")
