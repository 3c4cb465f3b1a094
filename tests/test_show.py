"""What a run leaves to be shown: the likeliest tokens of each commit, revisions, costs; a page nothing escapes from."""

from __future__ import annotations

import html
import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from sampler_tools import EOS, MASK, VOCAB, HashDenoiser
from show_tools import COMMENT, SCRIPT, frames_of, make_tokenizer

from mdlm.samplers import Canvas, generate, stream
from mdlm.samplers.driver import Frame
from mdlm.samplers.show_html import Unmasking


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def written_in(before: Frame, after: Frame) -> torch.Tensor:
    return (after.step_map != before.step_map) & (after.step_map >= 0)


@pytest.mark.parametrize("knobs", [{"strategy": "confidence", "k": 2}, {"strategy": "threshold", "threshold": 0.3}])
def test_the_likeliest_tokens_are_those_the_model_gave_when_a_token_was_written(knobs: dict) -> None:
    canvas = Canvas.from_prompts([[3, 4], [5]], [6, 4])
    frames = list(stream(HashDenoiser(), None, canvas, temperature=1.0, seed=3, eos="ignore", top=3, **knobs))
    model, seen = HashDenoiser(), 0
    for before, after in itertools.pairwise(frames):
        answers = model(before.tokens, attention_mask=canvas.real)
        for row, position in written_in(before, after).nonzero().tolist():
            expected = sorted(range(VOCAB), key=lambda token: -answers[row, position, token].item())[:3]
            assert after.top_tokens[row, position].tolist() == expected
            given = after.top_log_probs[row, position]
            assert given.tolist() == pytest.approx([answers[row, position, token].item() for token in expected])
            seen += 1
    assert seen == 10
    last = frames[-1]
    assert bool((last.top_tokens[last.step_map < 0] == -1).all()), "given tokens had no alternatives"
    assert MASK not in last.top_tokens


def test_a_token_that_is_edited_in_place_gets_the_alternatives_of_its_edit() -> None:
    options = {"strategy": "t2t", "max_new_tokens": 8, "eos": "ignore", "top": 2}
    frames = list(stream(HashDenoiser(scale=4.0), None, [[3]], **options))
    model, edited = HashDenoiser(scale=4.0), 0
    for before, after in itertools.pairwise(frames):
        answers = model(before.tokens)
        for row, position in written_in(before, after).nonzero().tolist():
            assert after.top_tokens[row, position, 0] == answers[row, position].argmax()
            edited += int(before.step_map[row, position] >= 0)
    assert edited > 0, "this strategy revises here"


def test_watching_changes_nothing_and_costs_nothing_when_off() -> None:
    options = {"strategy": "remdm", "max_new_tokens": 8, "seed": 1, "eos": "ignore"}
    plain = list(stream(HashDenoiser(), None, [[3]], **options))
    watched = list(stream(HashDenoiser(), None, [[3]], **options, top=5))
    assert plain[0].top_tokens.shape == (1, 9, 0)
    assert [f.tokens.tolist() for f in plain] == [f.tokens.tolist() for f in watched]
    more = list(stream(HashDenoiser(), None, [[3]], **options, top=99))[-1]
    assert more.top_tokens.shape[-1] == VOCAB - 1, "all tokens but the mask"


@pytest.mark.parametrize("top", [-1, True, 2.5])
def test_a_wrong_number_of_alternatives_is_refused_at_the_call(top: object) -> None:
    with pytest.raises(ValueError, match="number of likeliest tokens"):
        stream(HashDenoiser(), None, [[3]], max_new_tokens=2, top=top)  # type: ignore[arg-type]


def test_events_costs_and_the_early_end_are_what_happened() -> None:
    tokenizer = make_tokenizer()
    the, cat = tokenizer.encode("the"), tokenizer.encode(" cat")
    a, b = the[0], cat[0]
    top = [(a, math.log(0.5)), (b, -math.inf)]
    steps = [{1: (a, math.log(0.5)), 2: (b, math.log(0.25))}, {1: None}, {1: (b, 0.0), 2: (a, -1.0)}, {3: (a, 0.0)}]
    page = Unmasking({"mine": frames_of(tokenizer, [b, None, None, None, None], steps, end=4, top=top)}, tokenizer)
    data = data_of(page.html())
    (run,) = data["runs"]
    (row,) = run["rows"]
    alternatives = [[a, pytest.approx(math.log(0.5), abs=1e-5)], [b, None]]
    assert run["name"] == "mine"
    assert run["steps"] == 4
    assert row["given"] == [b, None, None, None, None]
    assert row["first"] == 1
    assert row["events"] == [
        [],
        [[0, a, pytest.approx(math.log(0.5), abs=1e-5), alternatives], [1], [2, b, 0.0, alternatives]],
        [[0, b, pytest.approx(math.log(0.25), abs=1e-5), alternatives], [2, a, -1.0, alternatives]],
        [[3, a, 0.0, alternatives]],
        [],
    ]
    assert row["ends"] == [5, 5, 5, 5, 4]
    assert row["cost"] == [[n, n, 5 * n] for n in range(5)]
    assert data["tokens"] == {str(a): tokenizer.decode([a]), str(b): tokenizer.decode([b])}


def test_a_generation_shows_the_same_writes_without_alternatives() -> None:
    options = {"strategy": "confidence", "k": 2, "max_new_tokens": 5, "eos_token_id": EOS}
    out = generate(HashDenoiser(), None, [[3], [4, 5]], **options)
    frames = list(stream(HashDenoiser(), None, [[3], [4, 5]], **options))
    data = data_of(Unmasking({"after": out, "live": frames}, None).html())
    after, live = data["runs"]
    assert after["steps"] == live["steps"]
    for row, (theirs, ours) in enumerate(zip(after["rows"], live["rows"])):
        end = len(out.tokens[row])
        assert theirs["events"] == ours["events"][:end]
        assert theirs["given"] == ours["given"][:end]
        assert theirs["cost"] == [ours["cost"][-1]]
    assert data["tokens"]["3"] == "3 ", "without a tokenizer tokens are numbers"


def test_parts_of_characters_stay_bytes_and_special_tokens_are_named() -> None:
    tokenizer = make_tokenizer()
    euro = tokenizer.encode("€")
    assert len(euro) == 3
    steps = [{i: (token, 0.0) for i, token in enumerate([*euro, tokenizer.eos_token_id])}]
    data = data_of(Unmasking({"a": frames_of(tokenizer, [None] * 4, steps)}, tokenizer).html())
    assert [data["tokens"][str(token)] for token in euro] == [[0xE2], [0x82], [0xAC]]
    assert data["tokens"][str(tokenizer.eos_token_id)] == {"special": "<|eos|>"}


class Tags(HTMLParser):
    """The tags of a page as a browser would find them, and its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "action")]


def tags_of(page: str) -> Tags:
    parser = Tags()
    parser.feed(page)
    return parser


def test_no_token_name_or_title_becomes_markup() -> None:
    tokenizer = make_tokenizer()
    script, comment = tokenizer.convert_tokens_to_ids([SCRIPT, COMMENT])
    harmless = Unmasking({"a": frames_of(tokenizer, [None], [{0: (65, 0.0)}])}, tokenizer).html()
    frames = frames_of(tokenizer, [script, None], [{1: (comment, 0.0)}], top=[(script, 0.0)])
    page = Unmasking({SCRIPT: frames}, tokenizer, title=f"%%DATA%%{COMMENT}").html()
    assert tags_of(page).tags == tags_of(harmless).tags
    assert SCRIPT not in page
    assert "%%DATA%%&lt;/script&gt;" in page, "a title is no place for data"
    data = data_of(page)
    assert data["tokens"][str(script)] == SCRIPT
    assert data["tokens"][str(comment)] == COMMENT
    assert data["runs"][0]["name"] == SCRIPT


def test_the_page_needs_nothing_but_itself() -> None:
    tokenizer = make_tokenizer()
    page = Unmasking({"a": frames_of(tokenizer, [None], [{0: (65, 0.0)}])}, tokenizer).html()
    assert tags_of(page).links == []
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|@import|url\(", page)


def test_a_notebook_gets_a_frame_of_its_own() -> None:
    tokenizer = make_tokenizer()
    script = tokenizer.convert_tokens_to_ids(SCRIPT)
    page = Unmasking({"a": frames_of(tokenizer, [None], [{0: (script, 0.0)}])}, tokenizer, title='"><b>')
    shown = page._repr_html_()
    assert tags_of(shown).tags == ["iframe"]
    found = re.search(r'srcdoc="([^"]*)"', shown)
    assert found is not None
    assert html.unescape(found[1]) == page.html()
    assert 'sandbox="allow-scripts"' in shown


def test_a_page_is_saved_where_it_was_asked_for(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    page = Unmasking({"a": frames_of(tokenizer, [None], [{0: (65, 0.0)}])}, tokenizer)
    assert page.save(tmp_path / "new" / "out.html").read_text(encoding="utf-8") == page.html()


def test_nothing_to_show_is_an_error() -> None:
    with pytest.raises(ValueError, match="no runs to show"):
        Unmasking({}, None)
    with pytest.raises(ValueError, match="'a' has no frames"):
        Unmasking({"a": []}, None)
