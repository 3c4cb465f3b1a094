"""The models that come with the package: `builtin("python-8m")` is a folder like any checkpoint's.

Wherever a command or `load_model` takes a path, `builtin:python-8m` means the same. Beside weights and tokenizer lie a
model card (`README.md`) and the list of the texts it was trained on (`corpus.json`, see `corpus.manifest`). Read next:
`load.py`.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from mdlm.corpus import manifest

PREFIX = "builtin:"
CORPUS_FILE = "corpus.json"
_ROOT = Path(str(files("mdlm"))) / "builtin_models"


def names() -> list[str]:
    """The models there are."""
    return sorted(folder.name for folder in _ROOT.iterdir() if (folder / "config.json").is_file())


def builtin(name: str) -> Path:
    """The folder of a model of the package. Raises ValueError, with the names there are, for another one."""
    if name.removeprefix(PREFIX) not in names():
        raise ValueError(f"there is no built-in model {name!r}; there are: {', '.join(names())}")
    return _ROOT / name.removeprefix(PREFIX)


def resolve(path: str | Path) -> Path:
    """`path` itself, or the folder that `builtin:NAME` means. Raises ValueError for a NAME there is not."""
    return builtin(str(path)) if str(path).startswith(PREFIX) else Path(path)


def corpus_difference(folder: Path) -> str | None:
    """How the built-in corpus of this interpreter differs from what the model in `folder` was trained on.

    None where it does not, or where the folder has no list of its texts. Scores on text that differs are of another
    text, and what is held out here was held out there only where the file has the same path.
    """
    path = folder / CORPUS_FILE
    if not path.is_file():
        return None
    theirs: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    ours = manifest()
    if theirs["sha256"] == ours["sha256"]:
        return None
    before, now = ({f["path"]: f["sha256"] for f in side["files"]} for side in (theirs, ours))
    same = sum(before.get(name) == digest for name, digest in now.items())
    return (
        f"the model was trained on the library of {theirs['python']} ({theirs['documents']} documents); this is "
        f"{ours['python']}: {same} of its {ours['documents']} documents are the same"
    )
