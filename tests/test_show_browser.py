"""The page in a real browser: play moves the slider, hovering shows the alternatives, keys work, tokens stay text."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import NAMES, Page, browser, find_chromium
from PIL import Image
from show_tools import SCRIPT, frames_of, make_tokenizer
from transformers import PreTrainedTokenizerBase

from mdlm.samplers.show_html import Unmasking

pytestmark = pytest.mark.browser
SPANS = "[...document.querySelectorAll('.text')[{}].children]"
VALUE = "Number(document.getElementById('step').value)"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if find_chromium() is None:
        pytest.skip(f"no browser found ({', '.join(NAMES)}); `make browser` installs Debian's chromium")
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer()


def ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int, int]:
    a, b, c = (tokenizer.encode(text)[0] for text in "abc")
    return a, b, c


@pytest.fixture
def two(page: Page, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Page:
    """Left: given, a, b in two steps and one taken back and written anew; right: three steps, one token each."""
    a, b, c = ids(tokenizer)
    top = [(a, math.log(0.5)), (b, math.log(0.25)), (c, math.log(0.125))]
    left = [{1: (a, math.log(0.5)), 2: (b, math.log(0.25))}, {2: None}, {2: (c, math.log(0.125))}]
    right = [{1: (a, -0.1)}, {2: (b, -2.0)}, {3: (c, -0.1)}, {4: (a, -0.1)}]
    runs = {
        "left": frames_of(tokenizer, [c, None, None], left, top=top),
        "right": frames_of(tokenizer, [c, None, None, None, None], right),
    }
    page.errors.clear()
    page.requests.clear()
    page.dark(False)
    page.open(Unmasking(runs, tokenizer).save(tmp_path / "two.html"))
    return page


def text(page: Page, run: int = 0) -> str:
    return page.run(f"document.querySelectorAll('.text')[{run}].textContent")


def classes(page: Page, position: int, run: int = 0) -> set[str]:
    return set(page.run(SPANS.format(run) + f"[{position}].className").split())


def to(page: Page, step: int) -> None:
    page.run(f"(s => {{ s.value = {step}; s.dispatchEvent(new Event('input')); }})(document.getElementById('step'))")


def test_the_slider_shows_each_state_of_the_canvas(two: Page) -> None:
    assert two.run(VALUE) == 4, "opens at the end"
    wanted = [("c", "c"), ("cab", "ca"), ("ca", "cab"), ("cac", "cabc"), ("cac", "cabca")]
    for step, (left, right) in enumerate(wanted):
        to(two, step)
        assert (text(two, 0), text(two, 1)) == (left, right), step
    assert two.run("document.querySelectorAll('section').length") == 2
    assert two.run("document.querySelector('.cost').textContent") == (
        "2 of 2 tokensNFE 3" + "0.67 tokens/forward" + "fed 9 tokens" + "finished at step 3"
    )
    assert two.errors == []


def test_what_was_revised_is_marked(two: Page) -> None:
    to(two, 2)
    assert classes(two, 2) == {"hole", "taken"}
    to(two, 3)
    assert classes(two, 2) == {"written", "new", "revised"}
    assert classes(two, 1) == {"written"}
    assert classes(two, 0) == {"given"}


def test_play_moves_the_slider_to_the_end_and_stops(two: Page) -> None:
    two.click(*two.centre("document.getElementById('play')"))
    assert two.run("document.getElementById('play').textContent") == "Pause"
    assert two.run(VALUE) < 4, "starts again from the beginning"
    two.wait(f"{VALUE} === 2")
    assert text(two) == "ca"
    two.wait(f"{VALUE} === 4 && document.getElementById('play').textContent === 'Play'")


def test_hovering_shows_what_else_it_could_have_been(two: Page) -> None:
    assert two.run("document.getElementById('tip').hidden")
    two.hover(*two.centre(SPANS.format(0) + "[2]"))
    two.wait("!document.getElementById('tip').hidden")
    items = two.run("[...document.querySelectorAll('#tip li')].map(item => item.innerText.replace(/\\s+/g, ' '))")
    assert items == ["a 50.0 %", "b 25.0 %", "c 12.5 %"]
    assert two.run("document.querySelector('#tip .chosen code').textContent") == "c"
    assert two.run("document.querySelector('#tip .past').textContent") == "1: b → 2: taken back → 3: c"
    assert "written in step 3 with 12.5 %" in two.run("document.getElementById('tip').textContent")
    two.hover(5, 5)
    two.wait("document.getElementById('tip').hidden")


def test_a_token_beside_the_likeliest_is_listed_too(two: Page) -> None:
    two.hover(*two.centre(SPANS.format(1) + "[2]"))
    two.wait("!document.getElementById('tip').hidden")
    assert two.run("[...document.querySelectorAll('#tip li code')].map(e => e.textContent)") == ["b"]


def test_keys_move_the_slider(two: Page) -> None:
    steps = [("Home", 0, 0), ("ArrowRight", 0, 1), ("ArrowRight", 0, 2), ("ArrowLeft", 0, 1), ("ArrowRight", 8, 4)]
    for key, modifiers, expected in steps:
        two.key(key, modifiers)
        assert two.run(VALUE) == expected, key
    two.key(" ")
    two.wait(f"{VALUE} < 4")
    two.key(" ")
    assert two.run("document.getElementById('play').textContent") == "Play"


def test_the_text_can_be_walked_by_keys(two: Page) -> None:
    two.run(SPANS.format(0) + "[1].focus()")
    two.key("ArrowRight")
    assert two.run("document.activeElement.textContent") == "c"
    assert "taken back" in two.run("document.getElementById('tip').textContent")
    assert two.run(VALUE) == 4
    two.key("Escape")
    assert two.run("document.activeElement.id") == "step"
    assert two.run("document.getElementById('tip').hidden")


def background(page: Page, position: int) -> str:
    return page.run(f"getComputedStyle({SPANS.format(1)}[{position}]).backgroundColor")


def test_colours_follow_steps_or_confidence(two: Page) -> None:
    by_step = [background(two, position) for position in (1, 2, 3, 4)]
    assert len(set(by_step)) == 4
    two.click(*two.centre("document.querySelector('input[value=confidence]')"))
    by_confidence = [background(two, position) for position in (1, 2, 3, 4)]
    assert by_confidence[0] == by_confidence[2] == by_confidence[3] != by_confidence[1]
    assert not set(by_step) & set(by_confidence)


def luminance(page: Page) -> float:
    image = np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("L"), dtype=float)
    assert image.std() > 5, "the picture is blank"
    return float(np.median(image))


def test_a_screenshot_is_not_blank_in_light_and_dark(two: Page) -> None:
    assert luminance(two) > 200
    two.dark(True)
    assert luminance(two) < 60


def test_tokens_are_text_and_nothing_is_fetched(two: Page, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    script = tokenizer.convert_tokens_to_ids(SCRIPT)
    frames = frames_of(tokenizer, [script, None], [{1: (script, 0.0)}], top=[(script, 0.0)])
    two.requests.clear()
    two.open(Unmasking({SCRIPT: frames}, tokenizer, title=SCRIPT).save(tmp_path / "script.html"))
    two.hover(*two.centre(SPANS.format(0) + "[1]"))
    two.wait("!document.getElementById('tip').hidden")
    assert two.run("typeof window.hacked") == "undefined"
    assert text(two) == SCRIPT * 2
    assert two.run("document.querySelector('#tip code').textContent") == SCRIPT
    assert [url for url in two.requests if not url.startswith("file:")] == []
    assert two.errors == []


def test_characters_in_several_tokens_are_put_together(
    page: Page, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    euro = tokenizer.encode("€")
    steps = [{0: (euro[0], 0.0), 2: (euro[2], 0.0)}, {1: (euro[1], 0.0)}, {3: (euro[0], 0.0)}]
    page.open(Unmasking({"a": frames_of(tokenizer, [None] * 4, steps)}, tokenizer).save(tmp_path / "bytes.html"))
    for step, wanted in enumerate(["", r"\xe2\xac", "€", r"€\xe2"]):
        to(page, step)
        assert text(page) == wanted


def test_five_hundred_tokens_play_and_fit(page: Page, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    a, b, _ = ids(tokenizer)
    steps = [{i: (a if i % 7 else b, -0.5)} for i in range(500)]
    frames = frames_of(tokenizer, [None] * 500, steps, top=[(a, -0.5), (b, -1.0), (b, -2.0), (b, -3.0), (b, -4.0)])
    saved = Unmasking({"a": frames, "b": frames}, tokenizer).save(tmp_path / "long.html")
    assert saved.stat().st_size < 300_000
    page.open(saved)
    assert len(text(page)) == 500
    assert page.run("document.documentElement.scrollWidth <= innerWidth"), "no sideways scrolling"
    to(page, 250)
    assert len(text(page, 1)) == 250


def test_it_runs_inside_a_notebook(page: Page, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    a, _, _ = ids(tokenizer)
    shown = Unmasking({"a": frames_of(tokenizer, [None], [{0: (a, 0.0)}])}, tokenizer)._repr_html_()
    (tmp_path / "cell.html").write_text(f"<style>span {{ display: none }}</style>{shown}")
    page.errors.clear()
    page.open(tmp_path / "cell.html")
    image = np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("L"), dtype=float)
    assert image[:250].std() > 5, "the page is drawn in its frame"
    assert page.errors == []
