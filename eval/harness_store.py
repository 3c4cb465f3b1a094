"""The answers that an evaluation has found so far, kept as JSON lines, so that an interrupted one goes on.

A folder holds one file per process, `answers-RANK.jsonl`; every process reads them all, so a run may go on with another
number of processes. A line is keyed by everything that decides the answer: the request, the options, the seed, the
model. Read next: `harness.py`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mdlm.eval.jsonl import append, drop_torn_line

Record = dict[str, Any]


def answer_key(*parts: Any) -> str:
    """A hash of plain values; what is not one (a regular expression's flags, say) counts as it prints."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


class Answers:
    """Answers by key, in memory and, with a folder, on disk: a line is there as soon as its answer is known.

    Raises ValueError if the folder holds answers and `resume` is not set: they may be of another evaluation.
    """

    def __init__(self, folder: str | Path | None = None, rank: int = 0, resume: bool = False) -> None:
        self._found: dict[str, Record] = {}
        self.computed = 0
        """Answers that this process has added."""
        self._path = None if folder is None else Path(folder) / f"answers-{rank}.jsonl"
        if folder is None:
            if resume:
                raise ValueError("resume needs the folder that the interrupted evaluation kept its answers in")
            return
        files = sorted(Path(folder).glob("answers-*.jsonl")) if resume or rank == 0 else []
        if files and not resume:
            raise ValueError(f"{folder} holds answers of an earlier evaluation: resume it, or name another folder")
        for file in files:
            self._read(file)
        assert self._path is not None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        drop_torn_line(self._path)

    def _read(self, file: Path) -> None:
        for line in file.read_bytes().split(b"\n")[:-1]:  # what stands behind the last line's end was torn off
            record = json.loads(line)
            self._found[record.pop("key")] = record

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def __getitem__(self, key: str) -> Record:
        return self._found[key]

    def __len__(self) -> int:
        return len(self._found)

    def add(self, records: dict[str, Record]) -> None:
        """Keep these answers, and write them out at once."""
        self._found.update(records)
        self.computed += len(records)
        if self._path is not None:
            append(self._path, ({"key": key, **record} for key, record in records.items()))
