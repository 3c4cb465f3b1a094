"""`mdlm sample --html`: a page with one strategy or two, from the same options as any other call."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from show_tools import save_checkpoint

from mdlm.load import load_model
from mdlm.samplers import stream
from mdlm.samplers.__main__ import main
from mdlm.samplers.show_html import Unmasking

COMMON = ["--prompt", "the", "--max_new_tokens", "6", "--seed", "3", "--eos", "ban"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(folder)
    return folder


def data_of(path: Path) -> dict:
    found = re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_holds_what_stream_gives(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "out.html"
    second = ["--compare", "confidence", "--compare_knobs", '{"k": 3, "temperature": 1.0}']
    options = ["--strategy", "confidence", "--k", "2", "--html", str(page), *second]
    assert main([str(checkpoint), *COMMON, *options]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    model, tokenizer = load_model(checkpoint)
    common = {"strategy": "confidence", "max_new_tokens": 6, "seed": 3, "eos": "ban", "top": 5}
    expected = Unmasking(
        {
            "confidence (k=2)": stream(model, tokenizer, ["the"], k=2, **common),
            "confidence (k=3, temperature=1.0)": stream(model, tokenizer, ["the"], k=3, temperature=1.0, **common),
        },
        tokenizer,
        title=f"Unmasking with {checkpoint}",
    )
    assert page.read_text(encoding="utf-8") == expected.html()
    left, right = data_of(page)["runs"]
    assert (left["steps"], right["steps"]) == (3, 2)
    assert all(len(event[3]) == 5 for events in left["rows"][0]["events"] for event in events)


def test_one_strategy_alone_and_the_checkpoints_own(checkpoint: Path, tmp_path: Path) -> None:
    assert main([str(checkpoint), *COMMON, "--html", str(tmp_path / "one.html")]) == 0
    (run,) = data_of(tmp_path / "one.html")["runs"]
    assert run["name"] == "default strategy"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "dus"], "give its file with --html"),
        (["--html", "OUT", "--show"], "one of the three"),
        (["--html", "OUT", "--json"], "one of the three"),
        (["--html", "OUT", "--compare_knobs", '{"k": 2}'], "name it with --compare"),
        (["--html", "OUT", "--compare", "tresholt"], "did you mean 'threshold'"),
        (["--html", "OUT", "--compare", "dus", "--compare_knobs", '{"k": 2}'], "does not take k"),
        (["--html", "OUT", "--strategy", "dus", "--compare", "dus"], "both sides would be dus"),
    ],
)
def test_what_does_not_fit_together_is_one_line(
    checkpoint: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "out.html"
    assert main([str(checkpoint), *COMMON, *(str(page) if a == "OUT" else a for a in arguments)]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert not page.exists()
