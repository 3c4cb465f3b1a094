"""JSON lines as results are kept: each there as soon as it is known; what a killed process left half written is cut.

Read next: `likelihood_run.py`, which goes on from them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def append(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes one line per record behind what `path` holds; makes the file and its folder where they are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def drop_torn_line(path: Path) -> None:
    """Cuts a last line without end off `path`, if there is such a file."""
    if not path.is_file():
        return
    whole = path.read_bytes()
    kept = whole.rfind(b"\n") + 1
    if kept < len(whole):
        with path.open("r+b") as file:
            file.truncate(kept)
