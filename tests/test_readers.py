"""Files into documents: every format, every start record, every fault named with its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdlm.readers import FileSource, TextSource, find_files

LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), min_size=1).filter(
    lambda s: not s.startswith("\ufeff")
)


def read(path: Path, format: str, column: str = "text", start: int = 0) -> list[str]:
    return [d.text for d in FileSource("s", (path,), format, column).read(0, start)]


@given(lines=st.lists(LINE, max_size=5), end=st.sampled_from(["\n", "\r\n"]), blanks=st.integers(0, 2))
@settings(max_examples=50)
def test_lines_come_back_whatever_ends_them(tmp_path_factory, lines, end, blanks):
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes((end * blanks + "".join(line + end * (1 + blanks) for line in lines)).encode())
    assert read(path, "lines") == lines
    path.write_bytes(end.join(lines).encode())  # no line end behind the last
    assert read(path, "lines") == lines


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=50)
def test_a_whole_file_is_one_document_byte_for_byte(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "whole.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())  # a byte order mark is no text
    assert read(path, "text") == [text]
    assert read(path, "text", start=1) == []


@pytest.mark.parametrize("format", ["lines", "jsonl", "parquet"])
def test_reading_from_a_record_on_is_the_rest(tmp_path, format):
    texts = [f"document {i}\twith é" for i in range(11)]
    path = write(tmp_path / f"x.{format}", format, texts)
    source = FileSource("s", (path,), format)
    everything = list(source.read(0))
    assert [d.text for d in everything] == texts
    for d in everything:
        assert next(source.read(0, d.record)).text == d.text
        rest = [x.text for x in source.read(0, d.record + 1)]
        assert rest == texts[texts.index(d.text) + 1 :]


def write(path: Path, format: str, texts: list[str]) -> Path:
    if format == "parquet":
        pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), path, row_group_size=3)
    elif format == "jsonl":
        path.write_text("".join(json.dumps({"text": t, "id": 0}) + "\n\n" for t in texts))
    else:
        path.write_text("".join(t + "\n" for t in texts))
    return path


def test_gzip_is_read_like_the_file_inside(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "b"}\n'))
    assert find_files(str(path)) == ((path,), "jsonl")
    assert read(path, "jsonl") == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"good\nba\xffd\n", r"x\.txt:2: byte 3 of the line is not valid UTF-8 \(0xff"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', r"x\.jsonl:2: byte 11 of the line is not valid UTF-8"),
        ("x.jsonl", b'{"text": "a"}\n\n{"text": \n', r"x\.jsonl:3: not valid JSON: Expecting value at column 10"),
        ("x.jsonl", b'{"text": "a"}\n["b"]\n', r"x\.jsonl:2: expected a JSON object per line, found list"),
        ("x.jsonl", b'{"body": "a", "id": 1}\n', r"x\.jsonl:1: no column 'text'; there are body, id"),
        ("x.jsonl", b'{"text": null}\n', r"x\.jsonl:1: the text is None of type NoneType; a string is needed"),
        ("x.jsonl", b'{"text": 7}\n', r"x\.jsonl:1: the text is 7 of type int"),
        ("x.jsonl", b'{"text": "ab\\ud800"}\n', r"x\.jsonl:1: character 2 of the text is the lone surrogate"),
        ("x.parquet", b"PAR1 not at all", r"x\.parquet: not a parquet file"),
        ("x.parquet", b"", r"x\.parquet: not a parquet file"),
        ("x.txt.gz", b"plain", r"x\.txt\.gz: cannot be read: Not a gzipped file"),
        ("x.txt.gz", gzip.compress(b"abc" * 99, mtime=0)[:-12], r"x\.txt\.gz: cannot be read: Compressed file ended"),
    ],
)
def test_a_fault_is_named_with_its_place(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    paths, format = find_files(str(path))
    with pytest.raises(ValueError, match=message):
        list(FileSource("s", paths, format).read(0))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"]}, r"x\.parquet: no column 'text'; there are body"),
        ({"text": [1, 2]}, r"x\.parquet: column 'text' is of type int64; a string column is needed"),
        ({"text": ["a", None]}, r"x\.parquet: row 1: the text is None"),
        ({"text": pa.array([b"ok", b"\xff"]).view(pa.string())}, r"x\.parquet: row 1: not valid UTF-8"),
    ],
)
def test_a_fault_of_a_parquet_file_is_named(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "x.parquet", "parquet")


def test_parquet_dictionary_and_large_strings_are_strings(tmp_path):
    for array in (pa.array(["a", "b", "a"]).dictionary_encode(), pa.array(["a", "b", "a"], pa.large_string())):
        pq.write_table(pa.table({"text": array}), tmp_path / "x.parquet")
        assert read(tmp_path / "x.parquet", "parquet") == ["a", "b", "a"]


def test_a_file_that_is_gone_or_closed_to_us_is_named(tmp_path, monkeypatch):
    source = FileSource("s", (tmp_path / "gone.txt",), "text")
    with pytest.raises(FileNotFoundError, match=r"gone\.txt: no such file"):
        list(source.read(0))
    with pytest.raises(ValueError, match=r"cannot be read: .*Is a directory"):
        list(FileSource("s", (tmp_path,), "text").read(0))
    (tmp_path / "secret.txt").write_text("x")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # the tests may run as root, whom no mode stops
    with pytest.raises(ValueError, match=r"secret\.txt: cannot be read: .*Permission denied"):
        list(FileSource("s", (tmp_path / "secret.txt",), "text").read(0))


def test_folders_and_globs(tmp_path):
    for name in ("b.txt", "a.md", "deep/c.txt", ".git/d.txt", "deep/.hidden.txt", "table.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    names = [str(p.relative_to(tmp_path)) for p in find_files(str(tmp_path))[0]]
    assert names == ["a.md", "b.txt", "deep/c.txt"]
    assert find_files(str(tmp_path), "lines")[0] == find_files(str(tmp_path))[0]
    assert [p.name for p in find_files(str(tmp_path / "**/*.txt"))[0]] == ["b.txt", "c.txt"]
    assert find_files(str(tmp_path / "table.bin"), "text") == ((tmp_path / "table.bin",), "text")


@pytest.mark.parametrize(
    ("source", "format", "error", "message"),
    [
        ("nothing.txt", "auto", FileNotFoundError, "no such file or folder, and no file matches it as a glob"),
        ("*.nothing", "auto", FileNotFoundError, "no file matches it as a glob"),
        ("empty", "auto", FileNotFoundError, "the folder holds no text, JSON lines or parquet files"),
        ("mixed", "parquet", FileNotFoundError, r"the folder holds no parquet files \(endings .parquet\)"),
        ("mixed", "auto", ValueError, "one format is needed, found 1 jsonl, 2 text; set format to"),
        ("odd.bin", "auto", ValueError, "found 1 unknown ending '.bin'; set format to"),
    ],
)
def test_a_name_that_leads_to_no_files_is_refused(tmp_path, source, format, error, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed").mkdir()
    for name in ("mixed/a.txt", "mixed/b.txt", "mixed/c.jsonl", "odd.bin"):
        (tmp_path / name).write_text("x")
    with pytest.raises(error, match=message):
        find_files(str(tmp_path / source), format)


def test_texts_in_memory_are_checked():
    assert [d.text for d in TextSource.of(["a", "b", "c"]).read(0, 1)] == ["b", "c"]
    with pytest.raises(ValueError, match=r"texts\[1\]: the text is 3 of type int"):
        TextSource.of(["a", 3])
    with pytest.raises(ValueError, match=r"texts\[0\]: .*lone surrogate"):
        TextSource.of(["\udc80"])
