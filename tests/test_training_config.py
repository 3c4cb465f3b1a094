"""Options: a file, then the command line; what is unknown or contradictory is named; the recipes are complete."""

from __future__ import annotations

import dataclasses
import io
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate import Accelerator
from rich.console import Console
from training_runs import arguments, configure, fresh_accelerate, records, write_texts

from mdlm.training.config import TrainConfig, as_dict, option_names, parse_config
from mdlm.training.loop import train
from mdlm.training.metrics import JsonLines, Metrics

RECIPES = sorted(
    path
    for path in Path(str(files("mdlm.training.recipes"))).glob("*.yaml")
    # these need a model or more text: tests/test_sft.py, test_lora.py, test_adapt.py, test_training_block.py
    if not path.stem.startswith(("sft", "adapt", "block"))
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


def write(path: Path, content: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(content))
    return f"--config={path}"


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    recipe = write(tmp_path / "r.yaml", {"output_dir": "run", "seed": 7, "optim": {"lr": 0.5, "betas": [0.8, 0.9]}})
    config = parse_config([recipe, "--optim.lr=0.25", "--train.steps", "3", "--overwrite"])
    assert (config.optim.lr, config.optim.betas, config.optim.eps) == (0.25, (0.8, 0.9), 1e-8)
    assert (config.seed, config.data.seed, config.train.steps, config.overwrite) == (7, 7, 3, True)
    assert not parse_config([recipe]).overwrite
    assert parse_config([recipe, "--overwrite=false"]).overwrite is False
    assert write(tmp_path / "o.yaml", {"output_dir": "run", "overwrite": True})
    assert parse_config([f"--config={tmp_path / 'o.yaml'}"]).overwrite


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--optim.lrr=1"], "'optim.lrr' is unknown; did you mean 'optim.lr'?"),
        (["--lr", "1"], "'lr' is unknown; did you mean 'optim.lr'?"),
        (["--train.global_bach=4"], "did you mean 'train.global_batch'?"),
        (["--overwrit"], "did you mean 'overwrite'?"),
    ],
)
def test_an_unknown_option_names_the_nearest(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_config(["--output_dir=run", *arguments])
    assert stopped.value.code == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ({"optim": {"wieght_decay": 1}}, "did you mean 'optim.weight_decay'?"),
        ({"otpim": {"lr": 1}}, "did you mean 'optim"),
        ({"seeed": 1}, "did you mean 'seed'?"),
    ],
)
def test_an_unknown_key_in_a_file_names_the_nearest(
    tmp_path: Path, content: dict[str, Any], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_config([write(tmp_path / "r.yaml", {"output_dir": "run", **content})])
    assert hint in capsys.readouterr().err


def test_a_wrong_type_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--output_dir=run", "--optim.name=adam"])
    assert "adamw" in capsys.readouterr().err


def test_the_printed_configuration_gives_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--output_dir=run", "--optim.lr=0.125", "--preview.prompts=[a, b]", "--seed=9"]
    with pytest.raises(SystemExit) as stopped:
        parse_config([*options, "--print_config"])
    assert stopped.value.code == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert parse_config([f"--config={tmp_path / 'printed.yaml'}"]) == parse_config(options)


def test_the_stored_configuration_gives_the_same_run(tmp_path: Path) -> None:
    config = parse_config(["--output_dir=run", "--preview.prompts=[a, b]", "--train.max_seconds=5"])
    stored = json.loads(json.dumps(as_dict(config)))
    stored["data"].pop("seed")  # follows from the seed of the run
    assert parse_config([write(tmp_path / "stored.yaml", stored)]) == config


def test_every_option_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    others = ("data.", "objective.", "tokenizer.", "overwrite")
    own = [name for name in option_names(TrainConfig) if not name.startswith(others)]
    assert len(own) > 50
    for name in own:
        _, _, after = text.partition(f" --{name} ")
        assert after, name
        first = after.partition(" (type:")[0].partition(" --")[0]
        assert len(first.split()) >= 2, f"--{name} has no help text: {first}"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_run(recipe: Path, texts: Path, tmp_path: Path) -> None:
    """As they are, but short, small and on other text."""
    reduced = {
        "train__steps": 3, "train__max_seconds": None, "train__compile": "false", "train__log_every": 1,
        "train__measure_peak": "true", "validation__every": 3, "preview__every": 0, "data__validation_rows": 4,
        "model__num_attention_heads": 4,
    }  # fmt: skip
    options = arguments(texts, tmp_path / "run", **reduced)
    kept = {"train.precision", "optim.lr", "lr_schedule.warmup_steps", "checkpoint.every"}
    shortened = [option for option in options if option[2:].partition("=")[0] not in kept]
    if "init_from:" in recipe.read_text():  # sizes and tokenizer are the model's
        shortened = [option for option in shortened if not option.startswith(("--model.", "--tokenizer."))]
    with fresh_accelerate():
        assert train(parse_config([f"--config={recipe}", *shortened])) == tmp_path / "run" / "checkpoint-3"
    lines = records(tmp_path / "run", "train")
    assert len(lines) == 3
    assert all(0.0 < line["mfu"] < 2.0 for line in lines)
    assert records(tmp_path / "run", "validation")


def test_recipes_are_found() -> None:
    assert {"demo", "small"} <= {path.stem for path in RECIPES}


def test_dataclasses_are_frozen(texts: Path, tmp_path: Path) -> None:
    config = configure(texts, tmp_path / "run")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.steps = 5  # type: ignore[misc]


def test_a_resumed_metrics_file_has_no_line_twice_and_no_broken_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 3}\n{"step": 2}\n{"step": 2, "lo')
    lines = JsonLines(path, keep_until_step=2)
    lines.write({"step": 3, "loss": float("nan"), "lr": 0.5})
    lines.close()
    assert path.read_text().splitlines() == ['{"step": 1}', '{"step": 2}', '{"step": 3, "loss": null, "lr": 0.5}']


@pytest.mark.parametrize("terminal", [True, False])
def test_the_eye_sees_loss_speed_mfu_and_time_left(texts: Path, tmp_path: Path, terminal: bool) -> None:
    values = {"loss": 1.25, "tokens_per_second": 12345.6, "mfu": 0.415, "eta_seconds": 3725.0, "skipped_steps": 2}
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=150)
    config = as_dict(configure(texts, tmp_path / "run"))
    with fresh_accelerate(), Metrics(Accelerator(cpu=True), tmp_path, config, 0, 20, console) as metrics:
        metrics.step(4)
        metrics.log("train", 5, values)
        metrics.log("validation", 5, {"nats_per_token": 2.5, "standard_error": None, "bits_per_byte": 1.5})
        metrics.say("[not markup]")
    shown = screen.getvalue()
    for part in ("loss 1.2500", "12,346 tokens/s", "MFU 42 %", "2 skipped", "2.5000 nats/token", "[not markup]"):
        assert part in shown
    assert "5/20" in shown
    assert terminal or "1:02:05" in shown
    assert [line["kind"] for line in records(tmp_path, "train") + records(tmp_path, "validation")]
