"""`mdlm demo`: the whole flow on the interpreter's own library: train, save, evaluate, generate, watch it unmask.

It runs the commands a user would type and prints each, so that the demonstration is also the manual. Run twice, it goes
on from its newest checkpoint and, when the training is finished, repeats only what follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path

PROMPTS = ("def ", "import ", "class ")
"""What the demonstration asks the model to continue."""


def demo(output_dir: str = "demo", max_seconds: float = 240.0, fresh: bool = False, tokens: int = 96) -> None:
    """Train a small model on the built-in corpus, evaluate it, watch it write.

    Args:
        output_dir: folder for checkpoints, metrics and results.
        max_seconds: time the training steps may take (compiling and validation come on top).
        fresh: delete what an earlier demonstration left and start again.
        tokens: new tokens per generated text.
    """
    from mdlm.eval.__main__ import main as evaluate
    from mdlm.samplers.__main__ import main as sample
    from mdlm.training.__main__ import main as train

    start = time.perf_counter()
    with as_file(files("mdlm.training.recipes") / "demo.yaml") as recipe:
        options = ["--overwrite", "--resume=none"] if fresh else ["--resume=auto"]
        limit = f"--train.max_seconds={max_seconds}"
        _run("train", train, [f"--config={recipe}", f"--output_dir={output_dir}", *options, limit])
    _run("eval", evaluate, [output_dir, "--rows=512", f"--results={output_dir}/results.jsonl"])
    prompts = [f"--prompt={prompt}" for prompt in PROMPTS]
    length = f"--max_new_tokens={tokens}"
    _run("sample", sample, [output_dir, *prompts, "--strategy=ancestral", length, "--temperature=0.8"])
    watched = ["--strategy=threshold", "--threshold=0.5", "--temperature=0.7", "--repetition_penalty=1.2", "--show"]
    _run("sample", sample, [output_dir, f"--prompt={PROMPTS[0]}", length, *watched])
    print(f"\ndone in {time.perf_counter() - start:.0f} s; the model is {Path(output_dir).resolve()}")


def _run(command: str, main: Callable[[list[str]], int | None], arguments: list[str]) -> None:
    print(f"\n$ mdlm {command} {' '.join(arguments)}", flush=True)
    status = main(arguments)
    if status:
        raise SystemExit(status)


def main(argv: list[str] | None = None) -> int:
    """Entry of `mdlm demo`."""
    from jsonargparse import auto_cli

    auto_cli(demo, args=argv, as_positional=False, prog="mdlm demo")
    return 0
