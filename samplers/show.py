"""Watch a canvas unmask in the terminal: tokens where and when they are written, coloured by step or by confidence.

`show(stream(model, tokenizer, prompt, ...), tokenizer)` draws the frames and returns the last one. On anything that is
not a terminal it prints a few frames below each other instead.
"""

from __future__ import annotations

import colorsys
import math
import time
from collections.abc import Iterable
from typing import Literal

from rich.console import Console, Group
from rich.live import Live
from rich.rule import Rule
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from mdlm.samplers.driver import Frame

Colour = Literal["step", "confidence"]
HOLE = "░"
"""Stands for an undecided position."""
PLAIN_FRAMES = 8
"""Frames shown where nothing can be redrawn, the last included."""


def show(
    frames: Iterable[Frame],
    tokenizer: PreTrainedTokenizerBase,
    console: Console | None = None,
    colour: Colour = "step",
    delay: float = 0.0,
) -> Frame:
    """Draw the frames as they come and return the last.

    Args:
        frames: what `stream` yields.
        tokenizer: makes text of single tokens; bytes that are no whole character show as a replacement character.
        console: where to; None: standard output.
        colour: `step` (from blue, first, to red, last) or `confidence` (from red, unsure, to green).
        delay: seconds to wait after each frame.

    Raises ValueError for no frames, or another colour.
    """
    if colour not in ("step", "confidence"):
        raise ValueError(f"colour is {colour!r}; it must be 'step' or 'confidence'")
    console = console or Console()
    if console.is_terminal:
        frame = _live(frames, tokenizer, console, colour, delay)
    else:
        kept = list(frames)
        frame = kept[-1] if kept else None
        count = min(PLAIN_FRAMES, len(kept))
        for number in sorted({round(i * (len(kept) - 1) / max(1, count - 1)) for i in range(count)}):
            console.print(render(kept[number], tokenizer, colour))
    if frame is None:
        raise ValueError("there are no frames to show")
    return frame


def _live(
    frames: Iterable[Frame], tokenizer: PreTrainedTokenizerBase, console: Console, colour: Colour, delay: float
) -> Frame | None:
    frame = None
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        for frame in frames:
            live.update(render(frame, tokenizer, colour), refresh=True)
            time.sleep(delay)
    return frame


def render(frame: Frame, tokenizer: PreTrainedTokenizerBase, colour: Colour = "step") -> Group:
    """One frame: each row as text, and a line with what it has cost so far."""
    parts: list[Rule | Text] = []
    for row in range(len(frame.tokens)):
        parts += [Rule(cost(frame, row), style="dim"), row_text(frame, row, tokenizer, colour)]
    return Group(*parts)


def cost(frame: Frame, row: int) -> str:
    """What a row has cost, e.g. `step 12  NFE 12  31 of 64 tokens  2.58 tokens/forward`."""
    end = int(frame.ends[row])
    written = int((frame.step_map[row, :end] >= 0).sum())
    total = written + int(frame.masked[row, :end].sum())
    forwards = int(frame.forwards[row])
    per_forward = f"{written / forwards:.2f}" if forwards else "-"
    nfe = int(frame.nfe[row])
    return f"step {frame.step}  NFE {nfe}  {written} of {total} tokens  {per_forward} tokens/forward"


def row_text(frame: Frame, row: int, tokenizer: PreTrainedTokenizerBase, colour: Colour = "step") -> Text:
    """One row: given tokens dim, written ones coloured, `HOLE` where nothing is decided."""
    end = int(frame.ends[row])
    text = Text()
    tokens, masked = frame.tokens[row, :end].tolist(), frame.masked[row, :end].tolist()
    steps, log_probs = frame.step_map[row, :end].tolist(), frame.log_probs[row, :end].tolist()
    last = max(1, frame.step - 1)
    for token, hole, step, log_prob in zip(tokens, masked, steps, log_probs):
        if hole:
            text.append(HOLE, style="bright_black")
        elif step < 0:
            text.append(str(tokenizer.decode([token])), style="dim")
        else:
            # hues: blue (first step) to red (last); red (unsure) to green (sure)
            hue = 0.66 * (1 - step / last) if colour == "step" else 0.33 * math.exp(log_prob)
            red, green, blue = (round(255 * part) for part in colorsys.hsv_to_rgb(hue, 0.65, 0.95))
            text.append(str(tokenizer.decode([token])), style=f"rgb({red},{green},{blue})")
    return text
