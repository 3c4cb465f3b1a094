"""The built-in corpus: the sources and help texts of the standard library of the Python that runs this.

About 10 MB of real code and English that every machine with Python has: nothing is downloaded and no foreign text is
shipped. Left out are tests, codecs tables, vendored or generated files, and whatever was installed or configured
locally. The text depends on the version of the interpreter; `manifest()` says exactly what it was.

Documents come in a fixed order (by path). The help topics of `pydoc` are one document each and, as they quote each
other, stay together on one side of the split into training and validation text.
"""

from __future__ import annotations

import ast
import hashlib
import io
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from mdlm.readers import Document, TextSource

_LEFT_OUT_FOLDERS = frozenset(
    {
        *("test", "tests", "idle_test", "idlelib", "encodings", "lib2to3", "turtledemo", "ensurepip", "lib-dynload"),
        *("site-packages", "dist-packages", "__pycache__", "__phello__"),
    }
)
_LEFT_OUT_FILES = frozenset({"html/entities.py", "sitecustomize.py", "usercustomize.py", "this.py"})
_TOPICS = "pydoc_data/topics.py"
_LEAST_BYTES = 1_000_000


def builtin_source() -> TextSource:
    """The corpus as a source of documents. Raises ValueError where the interpreter came without its sources."""
    return _read(sysconfig.get_path("stdlib"))


@lru_cache(maxsize=1)
def _read(stdlib: str) -> TextSource:
    documents = tuple(_documents(Path(stdlib)))
    size = sum(len(d.text.encode()) for d in documents)
    if size < _LEAST_BYTES:
        raise ValueError(
            f"the built-in corpus needs the sources of the standard library, but {stdlib} holds only {size} bytes of "
            "them; use an interpreter that comes with its .py files, or name your own text as the source"
        )
    return TextSource(documents, name="builtin")


def manifest() -> dict[str, Any]:
    """What the corpus holds: interpreter version, totals, a digest, and path, bytes and sha256 of every document.

    `bytes` counts the UTF-8 text as it is given to the tokenizer.
    """
    files = []
    for document in builtin_source().documents:
        raw = document.text.encode()
        files.append({"path": document.where, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()})
    digest = hashlib.sha256("".join(f"{f['path']}\0{f['sha256']}\n" for f in files).encode()).hexdigest()
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "documents": len(files),
        "bytes": sum(f["bytes"] for f in files),
        "sha256": digest,
        "files": files,
    }


def corpus_summary() -> dict[str, Any]:
    """`manifest()` without its list of files: what a run says of its text."""
    return {name: value for name, value in manifest().items() if name != "files"}


def _documents(stdlib: Path) -> Iterator[Document]:
    number = 0
    for path in sorted(stdlib.rglob("*.py"), key=lambda p: p.relative_to(stdlib).as_posix()):
        name = path.relative_to(stdlib).as_posix()
        if _left_out(name):
            continue
        text = _source_text(path)
        for part, content in _topics(text, name) if name == _TOPICS else [("", text)]:
            if not content.isspace() and content:
                yield Document(content, name + part, number, key=name)
                number += 1


def _left_out(name: str) -> bool:
    *folders, file = name.split("/")
    return (
        name in _LEFT_OUT_FILES
        or file.startswith("_sysconfigdata")
        or any(f in _LEFT_OUT_FOLDERS or f.startswith("config-") for f in folders)
    )


def _source_text(path: Path) -> str:
    """Text of a Python file by its own coding line, line ends as they stand."""
    raw = path.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    return raw.decode(encoding)


def _topics(text: str, name: str) -> list[tuple[str, str]]:
    """The help topics: `topics.py` is one assignment of a dict of strings."""
    for node in ast.parse(text, filename=name).body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict):
            return [(f"#{topic}", content) for topic, content in sorted(ast.literal_eval(value).items())]
    raise ValueError(f"{name}: holds no dict of help topics")
