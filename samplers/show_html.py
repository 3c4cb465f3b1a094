"""Watch canvases unmask in a browser or a notebook: one HTML page that needs nothing but itself.

`Unmasking({"eb": stream(..., top=5), "dus": stream(..., top=5)}, tokenizer).save("out.html")` puts runs side by side,
with a slider over the steps, colour by step or confidence, what else each token could have been, and what was revised.
In a notebook the object shows itself. `show.html` is the page. For the terminal: `show.py`.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mdlm.samplers.automaton import token_texts
from mdlm.samplers.canvas import Generation
from mdlm.samplers.driver import Frame

Event = list[Any]
"""[step] where a token was taken back; [step, token, log-probability, [[token, log-probability], ...]] where one was
written."""


class Unmasking:
    """Runs over the same or different canvases, as one page."""

    def __init__(
        self,
        runs: Mapping[str, Iterable[Frame] | Generation],
        tokenizer: PreTrainedTokenizerBase | None,
        title: str = "Unmasking",
    ) -> None:
        """
        Args:
            runs: by name, the frames of `stream` (with `top=5` to see alternatives) or a `Generation`, which knows
                neither alternatives, nor what was revised, nor the cost of single steps.
            tokenizer: makes text of tokens; None: numbers.
            title: above everything.

        Raises ValueError for no runs, or a run without frames.
        """
        if not runs:
            raise ValueError("there are no runs to show; give at least one name with its frames")
        self.title = title
        self.runs = [
            {"name": name, **(_of_generation(run) if isinstance(run, Generation) else _of_frames(name, list(run)))}
            for name, run in runs.items()
        ]
        self.tokens = _texts(self.runs, tokenizer)

    def html(self) -> str:
        """The whole page."""
        data = json.dumps({"runs": self.runs, "tokens": self.tokens}, allow_nan=False, separators=(",", ":"))
        # a string of JSON may hold these characters escaped; then no token can end the script or open a comment
        for char in "<>&":
            data = data.replace(char, f"\\u{ord(char):04x}")
        parts = {"TITLE": html.escape(self.title), "DATA": data}
        page = files("mdlm.samplers").joinpath("show.html").read_text(encoding="utf-8")
        return re.sub("%%(TITLE|DATA)%%", lambda found: parts[found[1]], page)

    def save(self, path: str | Path) -> Path:
        """Write the page to `path`, whose folder is made if need be."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.html(), encoding="utf-8")
        return file

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that its script runs and no style leaks in or out."""
        longest = max((len(row["given"]) for run in self.runs for row in run["rows"]), default=0)
        rows = max(len(run["rows"]) for run in self.runs)
        height = min(760, 250 + rows * (70 + longest))
        return (
            f'<iframe srcdoc="{html.escape(self.html())}" sandbox="allow-scripts" title="{html.escape(self.title)}" '
            f'style="width:100%;height:{height}px;border:0"></iframe>'
        )


def _of_frames(name: str, frames: list[Frame]) -> dict[str, Any]:
    """Steps, and per row: given tokens, events per position, ends and costs after each step."""
    if not frames:
        raise ValueError(f"the run {name!r} has no frames; `stream` yields at least one, and only once")
    rows, first, last = [], frames[0], frames[-1]
    for row in range(len(first.tokens)):
        given = _given(first.tokens[row], first.masked[row] | (last.step_map[row] >= 0))
        events: list[list[Event]] = [[] for _ in given]
        before = first.step_map.new_full(first.step_map[row].shape, -1)
        for frame in frames:
            steps = frame.step_map[row]
            for position in (steps != before).nonzero()[:, 0].tolist():
                here = (row, position)
                taken = int(steps[position]) < 0
                events[position].append([frame.step - 1] if taken else _written(frame, here))
            before = steps
        rows.append(
            {
                "given": given[: int(first.ends[row])],
                "events": events[: int(first.ends[row])],
                "first": next((i for i, token in enumerate(given) if token is None), 0),
                "ends": [int(frame.ends[row]) for frame in frames],
                "cost": [[int(f.nfe[row]), int(f.forwards[row]), int(f.tokens_fed[row])] for f in frames],
            }
        )
    return {"steps": last.step, "rows": rows}


def _of_generation(out: Generation) -> dict[str, Any]:
    """The same of what is left when a run has ended."""
    rows = []
    for row in range(len(out)):
        steps, log_probs, tokens = out.step_map[row].tolist(), out.log_probs[row].tolist(), out.tokens[row].tolist()
        given = _given(out.tokens[row], out.step_map[row] >= 0)
        rows.append(
            {
                "given": given,
                "events": [
                    [[step, token, _number(log_prob), []]] if step >= 0 else []
                    for step, token, log_prob in zip(steps, tokens, log_probs)
                ],
                "first": next((i for i, token in enumerate(given) if token is None), 0),
                "ends": [len(tokens)],
                "cost": [[int(out.nfe[row]), int(out.forwards[row]), int(out.tokens_fed[row])]],
            }
        )
    return {"steps": 1 + max(int(steps.max()) for steps in out.step_map), "rows": rows}


def _given(tokens: Tensor, written: Tensor) -> list[int | None]:
    return [None if write else token for token, write in zip(tokens.tolist(), written.tolist())]


def _written(frame: Frame, here: tuple[int, int]) -> Event:
    top = zip(frame.top_tokens[here].tolist(), frame.top_log_probs[here].tolist())
    return [
        int(frame.step_map[here]),
        int(frame.tokens[here]),
        _number(float(frame.log_probs[here])),
        [[token, _number(log_prob)] for token, log_prob in top],
    ]


def _number(log_prob: float) -> float | None:
    """For JSON; None where the probability is 0."""
    return round(log_prob, 5) if math.isfinite(log_prob) else None


def _texts(runs: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase | None) -> dict[int, Any]:
    """What each token that occurs looks like: a string, its bytes where they are no whole characters, or
    `{"special": name}`."""
    ids = {token for run in runs for row in run["rows"] for token in row["given"] if token is not None}
    for event in (e for run in runs for row in run["rows"] for events in row["events"] for e in events if len(e) > 1):
        ids |= {event[1], *(token for token, _ in event[3])}
    if tokenizer is None:
        return {token: f"{token} " for token in sorted(ids)}
    special = set(tokenizer.all_special_ids)
    try:
        raw = token_texts(tokenizer, 1 + max(ids, default=0))
    except ValueError:  # a token's text depends on its neighbours (WordPiece): the pieces themselves, as they are
        raw = [token.encode() for token in tokenizer.convert_ids_to_tokens(list(range(1 + max(ids, default=0))))]
    texts: dict[int, Any] = {}
    for token in sorted(ids):
        content = raw[token]
        if token in special or content is None:
            texts[token] = {"special": str(tokenizer.convert_ids_to_tokens(token))}
            continue
        try:
            texts[token] = content.decode("utf-8")
        except UnicodeDecodeError:
            texts[token] = list(content)
    return texts
