"""`mdlm sample`: every argument of `generate` and every knob of the chosen strategy is an option; the live view."""

from __future__ import annotations

import inspect
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from mdlm.config import MDLMConfig
from mdlm.modeling import MDLMForMaskedLM
from mdlm.samplers import PRESETS, Canvas, generate, stream
from mdlm.samplers.__main__ import chosen_strategy, list_strategies, main, parse
from mdlm.samplers.show import HOLE, PLAIN_FRAMES, render, show
from mdlm.tokenization import num_tokens, padded_vocab_size, train_bpe


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = train_bpe(["the cat sat on a mat and saw one dog"] * 4, vocab_size=270)
    torch.manual_seed(0)
    model = MDLMForMaskedLM(
        MDLMConfig(
            vocab_size=padded_vocab_size(tokenizer),
            num_tokens=num_tokens(tokenizer),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            mask_token_id=tokenizer.mask_token_id,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", [None, *PRESETS])
def test_every_argument_and_knob_is_an_option(name: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"], name)
    assert ended.value.code == 0
    text = capsys.readouterr().out
    wanted = [p for p in inspect.signature(generate).parameters if p not in ("model", "tokenizer", "prompts", "knobs")]
    knobs = [] if name is None else list(inspect.signature(PRESETS[name]).parameters)
    missing = [option for option in (*wanted, *knobs) if f"--{option}" not in text]
    assert not missing


@pytest.mark.parametrize("name", PRESETS)
def test_defaults_of_the_command_are_those_of_the_functions(name: str) -> None:
    _, shared, knobs = parse(["folder"], name)
    parameters = {**inspect.signature(generate).parameters, **inspect.signature(PRESETS[name]).parameters}
    for option, value in {**shared, **knobs}.items():
        default = parameters[option].default
        assert value == (list(default) if isinstance(value, list) else default), option


def test_json_lines_hold_what_generate_returns(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", "the cat", "--prompt", "a", "--max_new_tokens", "8", "--seed", "3", "--temperature", "1.0"]
    assert main([str(checkpoint), *options, "--strategy", "confidence", "--k", "2", "--json"]) == 0
    printed = capsys.readouterr()
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert [line["prompt"] for line in lines] == ["the cat", "a"]
    from mdlm.load import load_model

    model, tokenizer = load_model(checkpoint)
    out = generate(
        model, tokenizer, ["the cat", "a"], strategy="confidence", k=2, max_new_tokens=8, seed=3, temperature=1.0
    )
    for number, line in enumerate(lines):
        assert line == {"prompt": line["prompt"], **out.as_dict(number), "dtype": "float32"}
    assert "NFE 4.0" in printed.err or "eos" in out.finish


def test_prompts_from_a_file_and_several_samples(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    options = ["--prompt_file", str(tmp_path / "prompts.txt"), "--samples", "2", "--max_new_tokens", "4", "--json"]
    assert main([str(checkpoint), *options, "--strategy", "first_hitting"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "one", "two", "two"]
    assert lines[0]["tokens"] != lines[1]["tokens"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "tresholt"], "there is no strategy 'tresholt'; did you mean 'threshold'"),
        (["--max_new_tokens", "4", "--strategy", "threshold", "--threshold", "-1"], "threshold is -1.0"),
        (["--samples", "0"], "--samples is 0"),
        (["--show", "--json"], "both want the output"),
        (["--max_new_tokens", "100"], "the model takes at most 64"),
        (["--prompt_file", "no/such/file"], "No such file"),
        (["--dtype", "float8"], "dtype is 'float8'"),
    ],
)
def test_wrong_values_end_with_one_line(
    checkpoint: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(checkpoint), *arguments]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert printed.out == ""


def test_a_knob_of_another_strategy_is_refused(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(checkpoint), "--strategy", "threshold", "--k", "3"])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert "--k" in printed
    assert "--threshold" in printed, "the usage lists what the strategy takes"


def test_no_folder_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no/such/folder"]) == 1
    assert "there is no such folder" in capsys.readouterr().err


def test_strategies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--strategies"]) == 0
    listed = [line[3:] for line in capsys.readouterr().out.splitlines() if line.startswith("## ")]
    assert listed == list(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_every_strategy_says_what_it_is_and_explains_its_knobs(name: str) -> None:
    from docstring_parser import parse as parse_docstring

    doc = parse_docstring(PRESETS[name].__doc__ or "")
    assert doc.short_description
    explained = {parameter.arg_name for parameter in doc.params if parameter.description}
    assert explained == set(inspect.signature(PRESETS[name]).parameters)


def test_the_page_of_strategies_is_up_to_date() -> None:
    page = Path(__file__).parents[1] / "docs" / "strategies.md"
    text = page.read_text(encoding="utf-8")
    made = "mdlm sample --strategies"
    assert text.split("\n\n", 2)[2].strip() == list_strategies().strip(), f"make {page.name} again from `{made}`"


def test_the_strategy_is_known_before_the_rest_is_parsed() -> None:
    assert chosen_strategy(["folder", "--strategy", "llada", "--steps", "4"]) == "llada"
    assert chosen_strategy(["folder", "--strategy=llada"]) == "llada"
    assert chosen_strategy(["folder"]) is None


def test_the_view_shows_given_text_written_tokens_and_holes(checkpoint: Path) -> None:
    from mdlm.load import load_model

    model, tokenizer = load_model(checkpoint)
    canvas = Canvas.from_pieces(tokenizer, ["the", 3, " mat"], ["a", 2])
    frames = list(stream(model, tokenizer, canvas, strategy="confidence", eos="ban"))
    texts = []
    for frame in frames:
        console = Console(file=io.StringIO(), width=80)
        console.print(render(frame, tokenizer))
        texts.append(console.file.getvalue())
    assert texts[0].count(HOLE) == 5
    assert "0 of 3 tokens" in texts[0]
    assert [text.count(HOLE) for text in texts] == [5, 3, 1, 0]
    assert HOLE not in texts[-1]
    assert "NFE 3  3 of 3 tokens  1.00 tokens/forward" in texts[-1]
    assert "the" in texts[-1]
    assert " mat" in texts[-1]


def test_without_a_terminal_a_few_frames_are_printed(checkpoint: Path) -> None:
    from mdlm.load import load_model

    model, tokenizer = load_model(checkpoint)
    frames = list(stream(model, tokenizer, "the", strategy="first_hitting", max_new_tokens=24, eos="ban"))
    console = Console(file=io.StringIO(), width=80)
    last = show(iter(frames), tokenizer, console)
    text = console.file.getvalue()
    assert text.count("tokens/forward") == PLAIN_FRAMES
    assert "24 of 24 tokens" in text
    assert torch.equal(last.tokens, frames[-1].tokens)
    with pytest.raises(ValueError, match="no frames"):
        show(iter([]), tokenizer, console)
    with pytest.raises(ValueError, match="'step' or 'confidence'"):
        show(iter(frames), tokenizer, console, colour="rainbow")


@pytest.mark.parametrize("colour", ["step", "confidence"])
def test_a_terminal_is_redrawn(checkpoint: Path, colour: str) -> None:
    from mdlm.load import load_model

    model, tokenizer = load_model(checkpoint)
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="truecolor")
    show(stream(model, tokenizer, "the", max_new_tokens=4, eos="ban"), tokenizer, console, colour=colour)
    written = console.file.getvalue()
    assert written.count("tokens/forward") >= 4
    assert "38;2;" in written, "tokens are coloured"
