"""Where the numbers of a run go: `metrics.jsonl` always, a tracker if asked for, a progress bar or lines for the eye.

Each line of `metrics.jsonl` is one JSON object with `kind` ("start", "train", "validation", "preview", "drift",
"outer", "event") and `step`, the number of optimizer steps made. Units: losses in nats per token, `tokens_per_second`
over all processes, `mfu` as a fraction of the matmul peak measured at the start. With islands each has a file of its
own, with its own loss. Read next: `loop.py`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""Tracker -> the package it needs."""


class JsonLines:
    """A file of JSON objects, one a line, each written out at once, so that a killed run loses none."""

    def __init__(self, path: Path, keep_until_step: int) -> None:
        """Keeps the complete lines up to and including that step, so that a resumed run has no line twice."""
        kept = []
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n") and json.loads(line)["step"] <= keep_until_step:
                    kept.append(line)
        rewritten = path.with_name(f".{path.name}.new")
        rewritten.write_text("".join(kept), encoding="utf-8")
        os.replace(rewritten, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one line; numbers that are not finite, which JSON has not, become null."""
        clean = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def check_tracker(tracker: str) -> None:
    """Raises ValueError if the package of a tracker is not installed (accelerate would leave it out in silence)."""
    if tracker != "none" and importlib.util.find_spec(TRACKERS[tracker]) is None:
        package = TRACKERS[tracker]
        raise ValueError(f"--tracker {tracker} needs the package {package}: pip install {package}, or --tracker none")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, (int, float, str, bool)) else json.dumps(value)
    return flat


class Metrics:
    """Writes records on the main process; does nothing on the others. Use as a context manager."""

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        config: Mapping[str, Any],
        first_step: int,
        total_steps: int,
        console: Console | None = None,
        main: bool | None = None,
    ) -> None:
        """`main`: this process writes the file (None: if it is accelerate's main process, which alone prints)."""
        self._accelerator = accelerator
        self._main = accelerator.is_main_process if main is None else main
        self._total = total_steps
        self._tracking = config["tracker"] != "none"
        if self._tracking:
            accelerator.init_trackers("mdlm", config=_flat(config))
        if not self._main:
            return
        self._lines = JsonLines(folder / "metrics.jsonl", keep_until_step=first_step)
        self._console = console or Console(quiet=not accelerator.is_main_process)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console)
            self._task = self._progress.add_task("", total=total_steps, completed=first_step)
            self._progress.start()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        if self._main:
            if self._progress is not None:
                self._progress.stop()
            self._lines.close()

    def step(self, step: int) -> None:
        """Moves the progress bar."""
        if self._main and self._progress is not None:
            self._progress.update(self._task, completed=step)

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """One record: into metrics.jsonl, its numbers into the tracker, a line or the progress bar for the eye."""
        if not self._main:
            return
        self._lines.write({"kind": kind, "step": step, **values})
        numbers = {k: v for k, v in values.items() if isinstance(v, (int, float)) and math.isfinite(v)}
        if self._tracking and kind != "start":
            self._accelerator.log({f"{kind}/{name}": value for name, value in numbers.items()}, step=step)
        if kind == "train":
            if self._progress is not None:
                self._progress.update(self._task, completed=step, description=_summary(values))
            else:
                self._console.print(
                    f"step {step}/{self._total}  {_summary(values)}  ETA {_clock(values['eta_seconds'])}",
                    highlight=False,
                    soft_wrap=True,
                )

        elif kind == "validation":
            self.say(
                f"step {step}  validation NELBO {values['nats_per_token']:.4f} nats/token "
                f"(standard error {values['standard_error'] or math.nan:.4f}), {values['bits_per_byte']:.4f} bits/byte"
            )

    def say(self, text: str) -> None:
        """A line of text above the progress bar."""
        if self._main:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _summary(values: Mapping[str, Any]) -> str:
    parts = [f"loss {values['loss']:.4f}", f"{values['tokens_per_second']:,.0f} tokens/s"]
    if values["mfu"] is not None:
        parts.append(f"MFU {100 * values['mfu']:.0f} %")
    if values["skipped_steps"]:
        parts.append(f"{values['skipped_steps']} skipped")
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
