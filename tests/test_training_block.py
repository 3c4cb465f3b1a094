"""Training with blocks, end to end: exact resume, splits, validation, `mdlm eval`, sampling with the exact cache."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from test_training_processes import LAUNCH, launch
from training_runs import arguments, assert_same, configure, fresh_accelerate, records, state, write_texts

from mdlm.data import Batch
from mdlm.denoiser import ModelDenoiser
from mdlm.eval.__main__ import evaluate
from mdlm.eval.likelihood import nelbo
from mdlm.load import load_model
from mdlm.objective import NoisedBatch, Objective
from mdlm.samplers import generate
from mdlm.training import loop
from mdlm.training.config import parse_config
from mdlm.training.loop import optimizer_step, start, train

OPTIONS: dict[str, Any] = {
    "model__block_size": 4,
    "model__max_position_embeddings": 96,
    "data__packing": "documents",
    "data__validation_fraction": 0.1,
    "objective__search_range": "true",
    "validation__every": 3,
    "checkpoint__every": 3,
    "checkpoint__keep_last": 5,
    "train__ema": 0.9,
    "preview__every": 8,
    "preview__length": 10,
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    with fresh_accelerate():
        yield


@pytest.fixture(scope="module")
def straight(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of a run of 8 steps in one piece."""
    output = tmp_path_factory.mktemp("straight") / "run"
    with fresh_accelerate():
        checkpoint = train(configure(texts, output, **OPTIONS))
    assert checkpoint is not None
    return checkpoint


def test_the_range_is_searched_at_validations_logged_and_used(straight: Path) -> None:
    found = records(straight.parent, "noise_range")
    assert [line["step"] for line in found] == [3, 6]
    for line in found:
        assert 0.0 < line["eps"] < line["t_max"] <= 1.0
        assert line["variance"] <= line["variance_of_whole_range"]
        assert line["t_max"] - line["eps"] >= 0.5 - 1e-9
    assert state(straight)["noise_range"] == [found[-1]["eps"], found[-1]["t_max"]]
    assert state(straight.parent / "checkpoint-3")["noise_range"] == [1e-3, 1.0]
    assert state(straight.parent / "checkpoint-6")["noise_range"] == [found[0]["eps"], found[0]["t_max"]]
    assert found[0]["variance"] < found[0]["variance_of_whole_range"]
    tops = [line["max_time"] for line in records(straight.parent, "train")]
    assert tops == [1.0] * 3 + [found[0]["t_max"]] * 3 + [found[1]["t_max"]] * 2


@pytest.mark.parametrize("at", [4, 6])
def test_a_stopped_and_resumed_run_is_the_run_that_was_not(
    texts: Path, tmp_path: Path, straight: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the range is searched before the very step with which it goes on."""
    original = loop.optimizer_step

    def step(run: Any, stop: bool = False) -> Any:
        return original(run, stop or run.step == at - 1)

    monkeypatch.setattr(loop, "optimizer_step", step)
    train(configure(texts, tmp_path / "run", **OPTIONS))
    assert (tmp_path / "run" / f"checkpoint-{at}").is_dir()
    assert not (tmp_path / "run" / "checkpoint-8").is_dir()
    monkeypatch.setattr(loop, "optimizer_step", original)
    with fresh_accelerate():
        resumed = train(configure(texts, tmp_path / "run", resume="auto", **OPTIONS))
    assert resumed is not None
    assert_same(straight, resumed)
    assert [line["step"] for line in records(tmp_path / "run", "noise_range")] == [3, 6]


def test_the_recipe_stopped_and_resumed_is_the_recipe_in_one_piece(texts: Path, tmp_path: Path) -> None:
    """block.yaml as it is, but short, small and on other text; stopped where the range is searched."""
    recipe = Path(str(files("mdlm.training.recipes"))) / "block.yaml"
    reduced = {
        "train__steps": 4, "train__compile": "false", "validation__every": 2, "checkpoint__every": 2,
        "preview__every": 4,
        "preview__length": 8, "objective__warmup_steps": 1, "model__num_attention_heads": 4,
        "data__validation_fraction": 0.3, "train__ema": 0.9, "model__max_position_embeddings": 64,
    }  # fmt: skip
    kept = {"train.precision", "optim.lr"}

    def run(output: Path, **more: Any) -> Path | None:
        given = arguments(texts, output, **reduced, **more)
        shortened = [option for option in given if option[2:].partition("=")[0] not in kept]
        with fresh_accelerate():
            return train(parse_config([f"--config={recipe}", *shortened]))

    whole = run(tmp_path / "whole")
    assert whole is not None
    assert records(tmp_path / "whole", "noise_range")[0]["step"] == 2
    assert all(math.isfinite(line["loss"]) for line in records(tmp_path / "whole", "train"))
    assert [line["step"] for line in records(tmp_path / "whole", "validation")] == [2, 4]
    shutil.copytree(whole.parent / "checkpoint-2", tmp_path / "pieces" / "checkpoint-2")
    resumed = run(tmp_path / "pieces", resume="auto")
    assert resumed is not None
    assert_same(whole, resumed)
    assert records(tmp_path / "pieces", "noise_range") == records(tmp_path / "whole", "noise_range")


def test_two_processes_make_the_steps_of_one(texts: Path, tmp_path: Path, straight: Path) -> None:
    command = [*LAUNCH, "-m", "mdlm.training", *arguments(texts, tmp_path / "run", train__micro_batch=2, **OPTIONS)]
    done = launch(command)
    assert done.returncode == 0, done.stderr
    assert_same(straight, tmp_path / "run" / "checkpoint-8", tolerance=2e-6)
    for kind, key in (("train", "loss"), ("train", "grad_norm"), ("validation", "nats_per_token")):
        one, two = ([line[key] for line in records(folder, kind)] for folder in (straight.parent, tmp_path / "run"))
        assert two == pytest.approx(one, rel=2e-6)


def test_loss_and_gradient_do_not_depend_on_the_accumulation(texts: Path, tmp_path: Path) -> None:
    found = []
    for micro in (8, 4, 1):
        run = start(configure(texts, tmp_path / str(micro), train__micro_batch=micro, optim__clip_norm=None, **OPTIONS))
        gradients: dict[str, torch.Tensor] = {}

        def keep(*_: object, into: dict[str, torch.Tensor] = gradients, run: Any = run) -> None:
            into.update({name: p.grad.clone() for name, p in run.core.named_parameters()})

        run.raw_optimizer.register_step_pre_hook(keep)
        optimizer_step(run)
        found.append((gradients, run.unlogged[0]))
    for gradients, sums in found[1:]:
        torch.testing.assert_close(sums, found[0][1], rtol=1e-6, atol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, found[0][0][name], rtol=0, atol=1e-6)


def test_mdlm_eval_and_the_validation_give_the_same_block_nelbo(straight: Path) -> None:
    record = evaluate(str(straight), batch=3)
    assert record is not None
    assert record["block_size"] == 4
    last = records(straight.parent, "validation")[-1]
    assert record["nats_per_token"] == pytest.approx(last["nats_per_token"], rel=1e-5)
    assert record["standard_error"] == pytest.approx(last["standard_error"], rel=1e-4)


# --- what the trained model writes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long enough for the model to know which word follows which."""
    output = tmp_path_factory.mktemp("trained") / "run"
    quick = {"train__steps": 120, "optim__lr": 1e-2, "validation__every": 60, "preview__every": 0, "train__ema": None}
    with fresh_accelerate():
        checkpoint = train(configure(texts, output, **{**OPTIONS, **quick, "checkpoint__every": 0}))
    assert checkpoint is not None
    return checkpoint


def test_the_loss_of_blocks_falls(trained: Path) -> None:
    last = records(trained.parent, "validation")[-1]
    assert last["nats_per_token"] + 5 * last["standard_error"] < 0.75 * math.log(269)
    losses = [line["loss"] for line in records(trained.parent, "train")]
    assert sum(losses[-20:]) / 20 < 0.7 * sum(losses[:5]) / 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_writes_beyond_its_training_length_with_an_exact_cache(trained: Path, temperature: float) -> None:
    """The folder names the strategy; with and without the cache the same tokens at the same probabilities."""
    model, tokenizer = load_model(trained, "float64", "cpu")
    assert model.generation_config.strategy == {"name": "block_diffusion", "knobs": {"block_length": 4}}
    prompts = ["the cat sat", "one", "was raining"]  # with nothing given a block of masks is predicted alike
    options = {"max_new_tokens": 70, "threshold": 0.6, "temperature": temperature, "eos": "ignore"}
    plain = generate(model, tokenizer, prompts, **options)
    cached = generate(model, tokenizer, prompts, cache="block", **options)
    for row in range(3):
        assert plain.tokens[row].tolist() == cached.tokens[row].tolist()
        assert plain.step_map[row].tolist() == cached.step_map[row].tolist()
        torch.testing.assert_close(plain.log_probs[row], cached.log_probs[row], rtol=0, atol=1e-10, equal_nan=True)
        assert len(cached.tokens[row]) > 2 * 24, "longer than any row of the training"
        blocks = (torch.arange(len(cached.tokens[row])) // 4)[cached.step_map[row] >= 0]
        order = cached.step_map[row][cached.step_map[row] >= 0]
        spans = [(int(order[blocks == b].min()), int(order[blocks == b].max())) for b in blocks.unique().tolist()]
        assert all(last < first for (_, last), (first, _) in pairwise(spans)), "block after block"
    assert torch.equal(plain.nfe, cached.nfe)
    assert (cached.tokens_fed < plain.tokens_fed / 3).all()
    with pytest.raises(ValueError, match="96"):
        generate(model, tokenizer, prompts, **{**options, "max_new_tokens": 97})


def test_a_row_stops_at_its_end_token_inside_a_block(trained: Path) -> None:
    model, tokenizer = load_model(trained, "float64", "cpu")
    whole = generate(model, tokenizer, "the cat", max_new_tokens=40, cache="block", eos="ignore")
    written = whole.tokens[0][whole.step_map[0] >= 0].tolist()
    end = written[9]  # some token that it does write
    stopped = generate(model, tokenizer, "the cat", max_new_tokens=40, cache="block", eos_token_id=end)
    first = written.index(end)
    assert stopped.finish == ["eos"]
    assert stopped.tokens[0][stopped.step_map[0] >= 0].tolist() == written[: first + 1]
    assert int(stopped.nfe[0]) < int(whole.nfe[0])


def test_with_blocks_of_one_token_samples_have_the_probability_that_the_loss_gives_them(
    texts: Path, tmp_path: Path
) -> None:
    """What the sampler says of its draws, the NELBO of the finished text, and the training loss are one number."""
    checkpoint = train(configure(texts, tmp_path / "run", model__block_size=1, model__max_position_embeddings=96))
    assert checkpoint is not None
    model, tokenizer = load_model(checkpoint, "float64", "cpu")
    out = generate(model, tokenizer, [[5], [6, 7]], max_new_tokens=30, temperature=1.0, eos="ignore", cache="block")
    for row, tokens in enumerate(out.tokens):
        drawn = out.step_map[row] >= 0
        batch = Batch(tokens[None], drawn[None], torch.tensor([0]))
        result = nelbo(ModelDenoiser(model), [batch])
        assert result.nats_per_token == pytest.approx(-float(out.log_probs[row][drawn].mean()), rel=1e-9)


def test_a_model_without_blocks_goes_on_as_one_with_blocks(texts: Path, tmp_path: Path) -> None:
    """BD3-LM trains with one block first and with short ones later."""
    before = train(configure(texts, tmp_path / "whole"))
    with fresh_accelerate():
        given = {"model__init_from": before, "model__block_size": 4, "model__hidden_size": 256}
        sizes = {"model__num_hidden_layers": 6}
        after = train(configure(texts, tmp_path / "blocks", **given, **sizes))
    assert after is not None
    model, _ = load_model(after, "float32", "cpu")
    assert (model.config.block_size, model.config.hidden_size) == (4, 32)
    changed = {**given, **sizes, "model__block_size": 2, "resume": "auto", "train__steps": 9}
    config = configure(texts, tmp_path / "blocks", **changed)
    with fresh_accelerate(), pytest.raises(ValueError, match="block_size was 4, is 2"):
        train(config)


def test_answers_are_learnt_with_an_adapter_and_prompts_are_never_noised(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SFT with LoRA of a model with blocks: packed examples, the prompt's last block shared with the answer."""
    pairs = [{"prompt": "the cat sat on " * (1 + i % 2), "completion": "a mat and saw"} for i in range(60)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    seen: list[NoisedBatch] = []
    original = Objective.noise

    def noise(self: Objective, batch: Batch, step: int) -> NoisedBatch:
        noised = original(self, batch, step)
        assert not bool((noised.masked & ~batch.maskable).any())
        seen.append(noised)
        return noised

    monkeypatch.setattr(Objective, "noise", noise)
    options = {"tokenizer__vocab_size": 32000, "model__hidden_size": 256, "model__num_hidden_layers": 6, "lora__r": 2}
    data = {
        "data__records": "completion",
        "data__chat_template": "plain",
        "data__seq_len": 64,
        "data__packing": "documents",
    }
    config = configure(tmp_path / "pairs.jsonl", tmp_path / "run", model__init_from=trained, **options, **data)
    checkpoint = train(config)
    assert checkpoint is not None
    losses = [line["loss"] for line in records(tmp_path / "run", "train")]
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(int(n.masked.sum()) for n in seen) > 100
    model, tokenizer = load_model(checkpoint, "float64", "cpu")
    assert model.config.block_size == 4
    assert len(generate(model, tokenizer, "the cat", max_new_tokens=6, cache="block").text) == 1


def test_a_search_that_has_nothing_to_go_by_is_refused_before_the_first_step(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="begin with a model of such blocks"):
        configure(
            texts,
            tmp_path / "run",
            model__init_from="x",
            lora__r=2,
            model__block_size=4,
            **{"model__hidden_size": 256, "model__num_hidden_layers": 6},
        )
    with pytest.raises(ValueError, match=r"set --validation\.every"):
        configure(texts, tmp_path / "run", **{**OPTIONS, "validation__every": 0})
    with pytest.raises(ValueError, match=r"it needs 64: raise --data\.validation_rows"):
        start(configure(texts, tmp_path / "run", **{**OPTIONS, "data__validation_rows": 2}))
