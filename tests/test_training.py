"""The training loop in one process: the split changes no loss, runs resume exactly, bad input is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_runs import arguments, assert_same, configure, fresh_accelerate, records, state, tensors, write_texts
from transformers import AutoModelForMaskedLM, AutoTokenizer

from mdlm.data import open_data
from mdlm.objective import LossTerms, NoisedBatch, Objective
from mdlm.training import loop
from mdlm.training.__main__ import main
from mdlm.training.loop import TrainingDiverged, optimizer_step, start, train, train_to_end
from mdlm.training.setup import Run
from mdlm.training.watch import validate


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    with fresh_accelerate():
        yield


def begin(texts: Path, output: Path, **options: Any) -> Run:
    return start(configure(texts, output, **options))


def gradients_of_one_step(run: Run) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        found.update({name: p.grad.clone() for name, p in run.core.named_parameters() if p.grad is not None})

    run.raw_optimizer.register_step_pre_hook(keep)
    optimizer_step(run)
    return found


SPLIT_OPTIONS: list[dict[str, Any]] = [
    {"data__packing": "none"},  # rows of different length: a mean of means would differ
    {"data__packing": "documents", "objective__reduction": "sequence_mean"},
    {"objective__warmup_steps": 100, "objective__warmup_start": 0.4},
]


@pytest.mark.parametrize("options", SPLIT_OPTIONS)
def test_loss_and_gradient_do_not_depend_on_the_accumulation(
    texts: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    whole = begin(texts, tmp_path / "whole", optim__clip_norm=None, **options)
    assert whole.accumulation == 1
    expected = gradients_of_one_step(whole)
    assert expected.keys() == dict(whole.core.named_parameters()).keys()
    for micro in (4, 1):
        split = begin(texts, tmp_path / f"micro{micro}", train__micro_batch=micro, optim__clip_norm=None, **options)
        assert split.accumulation == 8 // micro
        found = gradients_of_one_step(split)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)
        torch.testing.assert_close(split.unlogged[0], whole.unlogged[0], rtol=1e-6, atol=0)


def test_recomputing_activations_changes_no_gradient(texts: Path, tmp_path: Path) -> None:
    plain = gradients_of_one_step(begin(texts, tmp_path / "plain"))
    found = gradients_of_one_step(begin(texts, tmp_path / "recomputed", model__gradient_checkpointing="true"))
    for name in plain:
        torch.testing.assert_close(found[name], plain[name], rtol=0, atol=1e-6)


def test_gradients_are_clipped_to_the_norm(texts: Path, tmp_path: Path) -> None:
    free = gradients_of_one_step(begin(texts, tmp_path / "free", optim__clip_norm=None))
    norm = torch.stack([g.square().sum() for g in free.values()]).sum().sqrt()
    clipped = gradients_of_one_step(begin(texts, tmp_path / "clipped", optim__clip_norm=norm.item() / 4))
    for name in free:
        torch.testing.assert_close(clipped[name], free[name] / 4, rtol=1e-4, atol=1e-7)


def test_the_step_is_the_gradient_of_the_documented_loss(texts: Path, tmp_path: Path) -> None:
    """Sum of weighted masked negative log-likelihoods over maskable tokens, written out with a plain softmax."""
    run = begin(texts, tmp_path / "run", data__packing="none", optim__clip_norm=None, train__micro_batch=2)
    other = begin(texts, tmp_path / "other", data__packing="none")
    assert other.stream is not None
    batch = next(other.stream)
    noised = other.objective.noise(batch, 0)
    logits = other.core(noised.input_ids, noised.attention_mask, noised.position_ids).logits.double()
    logits = logits[..., : other.core.config.num_tokens]
    logits[..., other.core.config.mask_token_id] = -math.inf
    nll = -logits.log_softmax(-1).gather(-1, batch.input_ids[..., None])[..., 0]
    loss = (noised.weight.double() * nll.masked_fill(~noised.masked, 0.0)).sum() / batch.maskable.sum()
    loss.backward()
    found = gradients_of_one_step(run)
    for name, p in other.core.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=0, atol=1e-6)
    assert run.unlogged[0][0].item() == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"train__ema": 0.9},
        {"optim__name": "muon", "train__micro_batch": 2, "data__packing": "documents"},
        {"data__streaming": "true", "data__lanes": 2, "data__shuffle_buffer": 8, "data__validation_fraction": 0},
        {"train__precision": "bf16", "train__corruption_warmup": 0.5},
    ],
)
def test_resuming_equals_never_stopping(texts: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    straight = train(configure(texts, tmp_path / "straight", **options))
    run = begin(texts, tmp_path / "halves", checkpoint__every=4, **options)
    run.total_steps = 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "optimizer_step", crash_at(5))
        with pytest.raises(KeyboardInterrupt):
            train_to_end(run)
    with fresh_accelerate():
        resumed = train(configure(texts, tmp_path / "halves", checkpoint__every=4, resume="auto", **options))
    assert straight is not None
    assert resumed is not None
    assert_same(straight, resumed)
    keys = ("step", "loss", "lr", "grad_norm", "tokens")
    lines = [[tuple(line[key] for key in keys) for line in records(out, "train")] for out in tmp_path.iterdir()]
    assert lines[0] == lines[1]
    assert [line[0] for line in lines[0]] == list(range(1, 9))


def crash_at(step: int) -> Any:
    def patched(run: Run, stop: bool = False) -> loop.StepResult:
        if run.step == step:
            raise KeyboardInterrupt
        return optimizer_step(run, stop)

    return patched


class NotFinite(Objective):
    """Its loss is NaN although its gradient is finite: what log(0) at one token would leave behind."""

    def numerator(self, model: Any, noised: NoisedBatch) -> LossTerms:
        terms = super().numerator(model, noised)
        return dataclasses.replace(terms, loss=terms.loss + math.nan)


def test_a_loss_that_is_not_finite_changes_nothing_and_is_counted(texts: Path, tmp_path: Path) -> None:
    run = begin(texts, tmp_path / "run", train__max_bad_steps=3, train__ema=0.9)
    optimizer_step(run)
    good = run.objective
    bad = NotFinite(**{f.name: getattr(good, f.name) for f in dataclasses.fields(good)})
    assert run.ema is not None

    def everything() -> dict[str, Tensor]:
        optimizer = {
            f"{i}/{k}": v.clone() for i, s in enumerate(run.raw_optimizer.state.values()) for k, v in s.items()
        }
        average = {f"ema/{k}": v.clone() for k, v in run.ema.average.items()} if run.ema else {}
        return {**{n: p.detach().clone() for n, p in run.core.named_parameters()}, **optimizer, **average}

    before = everything()
    run.objective = bad
    for _ in range(2):
        assert optimizer_step(run).skipped
        loop.check_divergence(run)
    after = everything()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (run.step, run.skipped_steps, run.bad_in_a_row, run.ema.updates) == (3, 2, 2, 1)
    run.objective = good
    assert not optimizer_step(run).skipped
    assert run.bad_in_a_row == 0
    assert all(torch.isfinite(tensor).all() for tensor in everything().values())


def test_training_stops_when_it_diverges_and_says_what_to_do(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_weights(run: Run, stop: bool = False) -> loop.StepResult:
        if run.step == 2:
            with torch.no_grad():
                next(run.core.parameters()).fill_(math.inf)
        return optimizer_step(run, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "optimizer_step", break_weights)
        status = main(arguments(texts, tmp_path / "run", train__max_bad_steps=3))
    assert status == 3
    message = capsys.readouterr().err
    assert "3 steps in a row, up to step 5" in message
    assert "--optim.lr" in message
    lines = records(tmp_path / "run", "train")
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 2, 3]
    assert lines[-1]["loss"] is None  # JSON has no NaN
    with pytest.raises(TrainingDiverged):
        raise TrainingDiverged


def test_it_learns_and_what_is_saved_is_what_was_measured(texts: Path, tmp_path: Path) -> None:
    """The saved folder, loaded as any model, has the validation NELBO that the run reported for its average."""
    checkpoint = train(
        configure(
            texts,
            tmp_path / "run",
            train__steps=60,
            validation__every=30,
            validation__at_start="true",
            train__ema=0.9,
            train__log_every=20,
            train__global_batch=16,
            optim__lr=1e-2,
            checkpoint__every=20,
            checkpoint__keep_last=2,
        )
    )
    assert checkpoint is not None
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-40", "checkpoint-60"]
    lines = records(tmp_path / "run", "train")
    assert [line["step"] for line in lines] == [20, 40, 60]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    validation = records(tmp_path / "run", "validation")
    assert [line["step"] for line in validation] == [0, 30, 60]
    assert validation[0]["nats_per_token"] == pytest.approx(math.log(270), rel=0.03)  # initial weights know nothing
    assert validation[2]["nats_per_token"] < math.log(270) - 1.5

    weights = tensors(checkpoint)
    raw = {k.partition(":")[2]: t for k, t in weights.items() if k.startswith("train_state/model")}
    assert any(not torch.equal(weights[f"model.safetensors:{name}"], tensor) for name, tensor in raw.items())
    run = begin(texts, tmp_path / "again")
    model = AutoModelForMaskedLM.from_pretrained(checkpoint)
    run.core.load_state_dict(model.state_dict())
    assert validate(run)["nats_per_token"] == pytest.approx(validation[2]["nats_per_token"], abs=1e-6)
    assert validate(run) == validate(run)
    assert AutoTokenizer.from_pretrained(checkpoint).mask_token_id == model.config.mask_token_id


def test_the_checkpoint_says_how_it_was_made(texts: Path, tmp_path: Path) -> None:
    checkpoint = train(configure(texts, tmp_path / "run", train__steps=2, seed=5))
    assert checkpoint is not None
    content = json.loads((checkpoint / "train_state" / "state.json").read_text())
    assert content["config"]["optim"]["lr"] == 3e-3
    assert content["config"]["seed"] == 5
    assert content["versions"]["torch"] == torch.__version__
    assert (content["step"], content["total_steps"], content["data"]["row"]) == (2, 2, 16)
    assert not list(checkpoint.rglob("*.bin")) + list(checkpoint.rglob("*.pt")) + list(checkpoint.rglob("*.pkl"))


def test_the_learning_rate_follows_the_schedule(texts: Path, tmp_path: Path) -> None:
    config = configure(texts, tmp_path / "run", lr_schedule__kind="wsd", lr_schedule__final=0)
    train(config)
    rates = [line["lr"] for line in records(tmp_path / "run", "train")]
    assert rates == [3e-3 * config.lr_schedule.factor(step, 8) for step in range(8)]


def test_bf16_follows_fp32(texts: Path, tmp_path: Path) -> None:
    for precision in ("fp32", "bf16"):
        with fresh_accelerate():
            train(configure(texts, tmp_path / precision, train__precision=precision))
    full, half = (records(tmp_path / precision, "train") for precision in ("fp32", "bf16"))
    assert all(a["loss"] == pytest.approx(b["loss"], abs=0.05) for a, b in zip(full, half, strict=True))
    assert any(a["loss"] != b["loss"] for a, b in zip(full, half, strict=True))
    assert all(t.dtype == torch.float32 for t in tensors(tmp_path / "bf16" / "checkpoint-8").values())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on loading its compiler
@pytest.mark.parametrize("backend", ["force_eager", pytest.param("default", marks=pytest.mark.slow)])
def test_compiling_changes_neither_names_nor_numbers(texts: Path, tmp_path: Path, backend: str) -> None:
    plain = train(configure(texts, tmp_path / "plain", train__steps=3))
    with torch.compiler.set_stance(backend), fresh_accelerate():
        compiled = train(configure(texts, tmp_path / "compiled", train__steps=3, train__compile="true"))
    assert plain is not None
    assert compiled is not None
    assert_same(plain, compiled, tolerance=1e-5)


def test_max_seconds_fixes_the_length_once_and_the_probe_leaves_no_trace(texts: Path, tmp_path: Path) -> None:
    options = {"train__steps": None, "train__max_seconds": 0.3, "train__ema": 0.9, "train__corruption_warmup": 0.5}
    probed = begin(texts, tmp_path / "clock", **options)
    assert probed.total_steps >= 1
    assert probed.objective.warmup_steps == round(0.5 * probed.total_steps)
    untouched = begin(texts, tmp_path / "plain", train__ema=0.9)
    for name, p in probed.core.named_parameters():
        assert torch.equal(p, untouched.core.get_parameter(name))
    assert probed.ema is not None
    assert untouched.ema is not None
    assert all(torch.equal(a, untouched.ema.average[n]) for n, a in probed.ema.average.items())
    assert not probed.raw_optimizer.state
    assert (probed.step, probed.ema.updates, probed.unlogged) == (0, 0, [])
    assert probed.stream is not None
    assert untouched.stream is not None
    assert torch.equal(next(probed.stream).input_ids, next(untouched.stream).input_ids)

    run = begin(texts, tmp_path / "run", checkpoint__every=1, **options)
    run.total_steps = 6
    run.objective = dataclasses.replace(run.objective, warmup_steps=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "optimizer_step", crash_at(2))
        with pytest.raises(KeyboardInterrupt):
            train_to_end(run)
    resumed = begin(texts, tmp_path / "run", resume="auto", **options)
    assert (resumed.step, resumed.total_steps, resumed.objective.warmup_steps) == (2, 6, 3)


def test_steps_cap_max_seconds(texts: Path, tmp_path: Path) -> None:
    assert begin(texts, tmp_path / "run", train__steps=3, train__max_seconds=5).total_steps == 3


def test_a_finished_run_has_nothing_to_do(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(texts, tmp_path / "run", train__steps=2)) == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with fresh_accelerate():
        assert main(arguments(texts, tmp_path / "run", train__steps=2, resume="auto")) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_initial_weights_can_come_from_a_checkpoint(texts: Path, tmp_path: Path) -> None:
    first = train(configure(texts, tmp_path / "first", train__steps=3))
    assert first is not None
    sizes = {"model__hidden_size": 256, "model__num_hidden_layers": 6}  # the defaults: as good as not given
    run = begin(texts, tmp_path / "second", model__init_from=first, **sizes)
    weights = tensors(first)
    for name, p in run.core.named_parameters():
        assert torch.equal(p, weights[f"model.safetensors:{name}"])
    assert run.step == 0
    assert run.core.config.hidden_size == 32


def test_the_tensorboard_tracker_gets_the_numbers(texts: Path, tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(configure(texts, tmp_path / "run", train__steps=3, tracker="tensorboard", validation__every=3))
    events = next((tmp_path / "run").rglob("events.out.tfevents*"))
    accumulator = accumulators.EventAccumulator(str(events.parent))
    accumulator.Reload()
    values = [(event.step, event.value) for event in accumulator.Scalars("train/loss")]
    expected = [(line["step"], line["loss"]) for line in records(tmp_path / "run", "train")]
    assert values == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in expected]
    assert accumulator.Scalars("validation/nats_per_token")


# --- what is refused ------------------------------------------------------------------------------------------------


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"train__micro_batch": 3},
            r"--train.global_batch 8 must be a multiple of processes (1) x --train.micro_batch",
        ),
        ({"model__max_position_embeddings": 16}, "--data.seq_len 24 is longer than --model.max_position_embeddings 16"),
        ({"train__steps": 0}, "--train.steps is 0; it must be 1 or more"),
        ({"train__steps": None}, "--train.steps and --train.max_seconds are both null"),
        ({"train__ema": 1.0}, "--train.ema is 1.0"),
        ({"train__corruption_warmup": 0.1, "objective__warmup_steps": 5}, "both set the corruption warm-up"),
        ({"model__init_from": "there"}, "remove --model.hidden_size, --model.num_hidden_layers"),
        (
            {"validation__every": 5, "data__validation_fraction": 0},
            "--validation.every is 5, --validation.at_start false",
        ),
        (
            {"validation__at_start": "true", "data__validation_fraction": 0},
            "--validation.at_start true, but there is no",
        ),
        ({"resume": "nowhere"}, "--resume nowhere: there is no such folder"),
        ({"model__num_attention_heads": 5}, "not a multiple of num_attention_heads=5"),
        ({"data__source": "missing.txt"}, "missing.txt"),
        ({"tokenizer__path": Path(__file__).parent}, "the folder holds no tokenizer"),
        ({"train__precision": "fp16"}, "--train.precision fp16 needs a GPU"),
    ],
)
def test_bad_options_are_named_before_anything_happens(
    texts: Path, tmp_path: Path, options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "fp16" in message and torch.accelerator.is_available():
        pytest.skip("there is a GPU")
    assert message in refused(arguments(texts, tmp_path / "run", **options), capsys)
    assert not (tmp_path / "run").exists()


def test_earlier_checkpoints_are_never_lost_unasked(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    train(configure(texts, output, checkpoint__every=4))
    before = tensors(output / "checkpoint-8")
    message = refused(arguments(texts, output, seed=1), capsys)
    assert "checkpoint-8" in message
    assert "--resume auto" in message
    assert "--overwrite" in message
    message = refused(arguments(texts, output, resume=output / "checkpoint-4"), capsys)
    assert "would replace (checkpoint-8)" in message
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors(output / "checkpoint-8").items())
    (output / "notes.txt").write_text("mine")
    with fresh_accelerate():
        train(configure(texts, output, seed=1, train__steps=2, overwrite="true"))
    assert sorted(p.name for p in output.iterdir()) == ["checkpoint-2", "metrics.jsonl", "notes.txt"]
    assert {line["step"] for line in records(output, "train")} == {1, 2}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model__num_attention_heads": 2}, "the model's head_dim was 8, is 16"),
        ({"model__num_hidden_layers": 3}, "the model's num_hidden_layers was 2, is 3"),
        ({"train__global_batch": 16}, "--train.global_batch was 8, is 16"),
        ({"data__seq_len": 16}, "--data.seq_len was 24, is 16"),
        ({"seed": 1}, "--seed was 0, is 1"),
        ({"optim__name": "muon"}, "--optim.name was adamw, is muon"),
        ({"train__ema": 0.9}, "an EMA (--train.ema) was False, is True"),
        ({"tokenizer__vocab_size": 300}, "--tokenizer.vocab_size was 270, is 300"),
        ({"data__packing": "documents"}, "belongs to other data"),
    ],
)
def test_a_checkpoint_of_another_run_is_not_resumed(
    texts: Path, finished: Path, tmp_path: Path, options: dict[str, Any], reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    message = refused(arguments(texts, tmp_path / "run", resume=finished, train__steps=9, **options), capsys)
    assert reason in message
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def finished(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with fresh_accelerate():
        checkpoint = train(configure(texts, tmp_path_factory.mktemp("finished") / "run", train__steps=3))
    assert checkpoint is not None
    return checkpoint


def test_a_longer_run_may_go_on_elsewhere(
    texts: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = train(configure(texts, tmp_path / "run", resume=finished, train__steps=5))
    assert checkpoint == tmp_path / "run" / "checkpoint-5"
    assert state(checkpoint)["step"] == 5
    assert "5 steps long instead of 3" in capsys.readouterr().out


def test_the_output_folder_must_be_writable(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    assert "is a file" in refused(arguments(texts, tmp_path / "file"), capsys)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "cannot be written to" in refused(arguments(texts, tmp_path / "new"), capsys)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "--train.compile"),
        ("ACCELERATE_MIXED_PRECISION", "bf16", "mixed precision bf16"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2", "--train.micro_batch"),
        ("ACCELERATE_USE_FSDP", "true", "FSDP"),
    ],
)
def test_a_launcher_that_contradicts_the_configuration_is_refused(
    texts: Path, tmp_path: Path, variable: str, value: str, message: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv(variable, value)
    assert message in refused(arguments(texts, tmp_path / "run"), capsys)


def test_a_missing_tracker_is_named(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "pip install wandb" in refused(arguments(texts, tmp_path / "run", tracker="wandb"), capsys)


def test_the_data_a_run_sees_is_the_data_of_its_seed(texts: Path, tmp_path: Path) -> None:
    run = begin(texts, tmp_path / "run", seed=3)
    assert run.config.data.seed == 3
    again = open_data(run.config.data, run.tokenizer)
    assert run.stream is not None
    assert torch.equal(next(run.stream).input_ids, next(again.train_batches(8)).input_ids)
