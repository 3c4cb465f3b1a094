"""Documents out of files: whole text files, lines, JSON lines and parquet, each document with the place it came from.

A source is a list of *shards* (files, or the shards of a Hugging Face dataset), and a shard is a list of numbered
*records*. A place in a source is therefore two integers, which is all that resuming needs.

Every fault of the input is a `ValueError` or `FileNotFoundError` that names the file and the line or row.
Read next: `data_hf.py` for Hugging Face datasets, `data.py` for what becomes of the documents.
"""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

SUFFIXES: dict[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "parquet": (".parquet",),
    "text": (".txt", ".text", ".md", ".rst", ".py", ".tex", ".html", ".xml", ".c", ".h", ".cpp", ".js", ".java", ".rs"),
}
"""File name endings by format (`.gz` may follow, except for parquet): what `format="auto"` and folders go by."""


@dataclass(frozen=True)
class Document:
    """One document.

    `where` names its place for a reader of error messages; `record` is its number within the shard; `key` decides
    whether it is held out for validation: documents with equal keys stay together (None = the text itself); `side` says
    so outright.
    """

    text: str
    where: str
    record: int
    key: str | None = None
    side: Literal["train", "validation"] | None = None


Column: TypeAlias = "str | tuple[str, ...]"
"""The column that holds the text; or several, whose values become one text: a JSON object (see `chat.py`)."""


class Source(Protocol):
    """Documents in `num_shards` shards; `read(shard, start)` begins at record `start`. Must be picklable."""

    @property
    def name(self) -> str: ...

    @property
    def num_shards(self) -> int: ...

    def read(self, shard: int, start: int = 0) -> Iterator[Document]: ...


@dataclass(frozen=True)
class TextSource:
    """Documents that are in memory already, in one shard."""

    documents: tuple[Document, ...]
    name: str = "texts"
    num_shards: int = 1

    @classmethod
    def of(cls, texts: Sequence[Any], name: str = "texts", column: Column = "text") -> TextSource:
        """Wrap a list of strings, or with several columns of dicts; raises ValueError for any other or bad item."""
        places = (f"{name}[{i}]" for i in range(len(texts)))
        if isinstance(column, str):
            return cls(tuple(Document(check_text(t, w), w, i) for i, (t, w) in enumerate(zip(texts, places))), name)
        return cls(tuple(Document(take_text(t, column, w), w, i) for i, (t, w) in enumerate(zip(texts, places))), name)

    def read(self, shard: int, start: int = 0) -> Iterator[Document]:
        """The documents from number `start` on."""
        return iter(self.documents[start:])


@dataclass(frozen=True)
class FileSource:
    """Documents in local files of one format, one shard per file."""

    name: str
    paths: tuple[Path, ...]
    format: str
    column: Column = "text"

    @property
    def num_shards(self) -> int:
        """The number of files."""
        return len(self.paths)

    def read(self, shard: int, start: int = 0) -> Iterator[Document]:
        """The documents of file number `shard` from record `start` on."""
        path = self.paths[shard]
        try:
            yield from READERS[self.format](path, self.column, start)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{path}: no such file (a link that leads nowhere?)") from error
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: cannot be read: {error}") from error


def check_text(value: Any, where: str) -> str:
    """`value` if it is a string that UTF-8 can encode, otherwise a ValueError that names `where`."""
    if not isinstance(value, str):
        raise ValueError(f"{where}: the text is {value!r:.60} of type {type(value).__name__}; a string is needed")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: character {error.start} of the text is the lone surrogate {value[error.start]!r}, "
            "which stands for no character; repair or remove it"
        ) from error
    return value


def take_text(record: Any, column: Column, where: str) -> str:
    """The text of a record: one column, or several as one JSON object. ValueError where a column is missing."""
    if not isinstance(record, Mapping):
        raise ValueError(f"{where}: expected a record (JSON object), found {type(record).__name__}")
    wanted = (column,) if isinstance(column, str) else column
    missing = [name for name in wanted if name not in record]
    if missing:
        raise ValueError(f"{where}: no column {missing[0]!r}; there are {', '.join(sorted(record)) or 'none'}")
    if isinstance(column, str):
        return check_text(record[column], where)
    return check_text(json.dumps({name: record[name] for name in column}, ensure_ascii=False, default=repr), where)


def find_files(source: str, format: str = "auto") -> tuple[tuple[Path, ...], str]:
    """Files that `source` (a file, a folder or a glob) names, sorted by path, and their common format.

    A folder is searched through all its depths for the endings in `SUFFIXES`, leaving out hidden files and folders.
    With `format="auto"` the endings decide; files of several formats are refused rather than guessed at.
    A format that is given is believed, for any ending, where files are named one by one or by a glob.
    """
    root = Path(source).expanduser()
    if root.is_dir():
        known = [p for p in root.rglob("*") if p.is_file() and not _hidden(p.relative_to(root)) and _format_of(p)]
        paths = [
            p for p in known if format in ("auto", _format_of(p)) or (format == "lines" and _format_of(p) == "text")
        ]
        if not paths:
            wanted = "text, JSON lines or parquet" if format == "auto" else format
            endings = sorted({s for f in SUFFIXES for s in SUFFIXES[f] if format in ("auto", f, "lines")})
            raise FileNotFoundError(f"{source}: the folder holds no {wanted} files (endings {' '.join(endings)})")
    elif root.exists() or root.is_symlink():
        paths = [root]
    else:
        paths = [p for p in map(Path, glob.glob(str(root), recursive=True)) if p.is_file()]
        if not paths:
            raise FileNotFoundError(f"{source}: no such file or folder, and no file matches it as a glob")
    paths.sort()
    if format != "auto":
        return tuple(paths), format
    found = Counter(_format_of(p) or f"unknown ending {p.suffix!r}" for p in paths)
    if len(found) > 1 or not set(found) <= set(SUFFIXES):
        counts = ", ".join(f"{n} {kind}" for kind, n in sorted(found.items()))
        raise ValueError(
            f"{source}: one format is needed, found {counts}; set format to text, lines, jsonl or parquet, or use a "
            "glob that matches one kind of file"
        )
    return tuple(paths), next(iter(found))


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _format_of(path: Path) -> str | None:
    suffix = path.with_suffix("").suffix if path.suffix.lower() == ".gz" else path.suffix
    return next((format for format, endings in SUFFIXES.items() if suffix.lower() in endings), None)


def _open(path: Path) -> BufferedIOBase:
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")


def _decode(raw: bytes, path: Path, first_line: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        place = error.start - raw.rfind(b"\n", 0, error.start)
        raise ValueError(
            f"{path}:{line}: byte {place} of the line is not valid UTF-8 "
            f"(0x{raw[error.start]:02x}: {error.reason}); convert the file to UTF-8"
        ) from error


def read_whole(path: Path, column: Column, start: int) -> Iterator[Document]:
    """The whole file as one document."""
    if start == 0:
        with _open(path) as file:
            raw = file.read()
        yield Document(_decode(raw.removeprefix(b"\xef\xbb\xbf"), path, 1), str(path), 0)


def _lines(path: Path, start: int) -> Iterator[tuple[int, str]]:
    """Lines with their number from 0, without line ends; empty lines are left out, those before `start` unread."""
    with _open(path) as file:
        for number, raw in enumerate(file):
            if number >= start:
                line = _decode(raw.removeprefix(b"\xef\xbb\xbf") if number == 0 else raw, path, number + 1)
                line = line.removesuffix("\n").removesuffix("\r")
                if line:
                    yield number, line


def read_lines(path: Path, column: Column, start: int) -> Iterator[Document]:
    """Every line that is not empty is a document."""
    for number, line in _lines(path, start):
        yield Document(line, f"{path}:{number + 1}", number)


def read_jsonl(path: Path, column: Column, start: int) -> Iterator[Document]:
    """Every line is a JSON object whose entry `column` is the text; empty lines are left out."""
    for number, line in _lines(path, start):
        where = f"{path}:{number + 1}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from error
        if not isinstance(record, dict):
            raise ValueError(
                f"{where}: expected a JSON object per line, found {type(record).__name__}; a file that is one JSON "
                "array must be rewritten with one object per line"
            )
        yield Document(take_text(record, column, where), where, number)


def read_parquet(path: Path, column: Column, start: int) -> Iterator[Document]:
    """Every row's entry `column` is a document. Row groups before record `start` are not read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: not a parquet file: {error}") from error
    with file:
        schema = file.schema_arrow
        names = (column,) if isinstance(column, str) else column
        for name in names:
            if name not in schema.names:
                raise ValueError(f"{path}: no column {name!r}; there are {', '.join(schema.names)}")
        kind = schema.field(column).type if isinstance(column, str) else pa.string()
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ValueError(f"{path}: column {column!r} is of type {kind}; a string column is needed")
        number = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if number + rows <= start:
                number += rows
                continue
            for batch in file.iter_batches(batch_size=512, row_groups=[group], columns=list(names)):
                for values in zip(*(batch.column(name) for name in names)):
                    if number >= start:
                        where = f"{path}: row {number}"
                        record = {name: _utf8(value, where) for name, value in zip(names, values)}
                        yield Document(take_text(record, column, where), where, number)
                    number += 1


def _utf8(value: Any, where: str) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not valid UTF-8 ({error.reason})") from error


READERS: dict[str, Callable[[Path, Column, int], Iterator[Document]]] = {
    "text": read_whole,
    "lines": read_lines,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
}
"""Reader of each file format: (path, text column, first record) -> documents."""
