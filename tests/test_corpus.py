"""The built-in corpus: what is in it, that it stays the same, that its split does not leak."""

from __future__ import annotations

import ast
import hashlib
import platform

import pytest

from mdlm import corpus
from mdlm.data_encode import split_draw
from mdlm.data_source import DataConfig, held_out


def test_the_corpus_is_megabytes_of_sources_and_help_and_nothing_local():
    documents = corpus.builtin_source().documents
    paths = [d.where for d in documents]
    assert 5e6 < sum(len(d.text) for d in documents) < 2e7
    assert len(set(paths)) == len(paths)
    assert {"argparse.py", "json/decoder.py", "pydoc_data/topics.py#assert"} <= set(paths)
    for path in paths:
        folders = set(path.split("/")[:-1])
        assert not folders & {"test", "tests", "idle_test", "encodings", "site-packages", "__pycache__", "idlelib"}, (
            path
        )
        assert "_sysconfigdata" not in path
        assert "sitecustomize" not in path
    sources = {d.where: d.text for d in documents}
    assert "class ArgumentParser" in sources["argparse.py"]
    assert sources["pydoc_data/topics.py#assert"].startswith('The "assert" statement')
    ast.parse(sources["json/decoder.py"])


def test_the_manifest_accounts_for_every_byte_and_repeats():
    first = corpus.manifest()
    corpus._read.cache_clear()
    assert corpus.manifest() == first
    documents = corpus.builtin_source().documents
    assert first["python"].endswith(platform.python_version())
    assert first["documents"] == len(documents) == len(first["files"])
    assert first["bytes"] == sum(len(d.text.encode()) for d in documents) == sum(f["bytes"] for f in first["files"])
    entry = next(f for f in first["files"] if f["path"] == "argparse.py")
    text = next(d.text for d in documents if d.where == "argparse.py")
    assert entry == {
        "path": "argparse.py",
        "bytes": len(text.encode()),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def test_the_split_is_by_file_and_of_the_size_asked_for():
    import numpy as np

    documents = corpus.builtin_source().documents
    draws = np.asarray([split_draw(d) for d in documents])
    out = held_out(draws, DataConfig().validation_fraction)
    assert 0.02 < out.mean() < 0.12
    topics = {bool(o) for d, o in zip(documents, out) if d.key == "pydoc_data/topics.py"}
    assert len(topics) == 1, "help topics quote each other and must stay together"
    expected = int.from_bytes(hashlib.blake2b(b"argparse.py", digest_size=6).digest(), "big") / 2**48
    assert draws[[d.where for d in documents].index("argparse.py")] == expected


def test_an_interpreter_without_sources_is_refused(tmp_path):
    (tmp_path / "one.py").write_text("pass\n")
    with pytest.raises(ValueError, match="holds only 5 bytes of them; use an interpreter that comes with its"):
        corpus._read(str(tmp_path))
