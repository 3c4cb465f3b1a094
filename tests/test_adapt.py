"""Causal models become denoisers: attention-mask annealing, and runs that start from their folders."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_tools import VOCAB, make_model
from test_convert_causal import make_causal
from test_gpt2 import make_gpt2
from training_runs import DEFAULTS, assert_same, fresh_accelerate, records, write_texts

from mdlm.anneal import Annealing, annealed, annealing_at, check_annealing
from mdlm.config import MDLMConfig
from mdlm.data_pack import Batch
from mdlm.load import load_model
from mdlm.modeling import MDLMForMaskedLM
from mdlm.objective import ObjectiveConfig
from mdlm.training.config import TrainConfig, parse_config
from mdlm.training.loop import start, train

ROWS = torch.tensor([5, 9])


def share(value: float, rows: torch.Tensor = ROWS) -> Annealing:
    made = annealing_at(0, 10, 0, rows)
    assert made is not None
    return Annealing(torch.full_like(made.share, value), made.keys)


def test_the_share_grows_linearly_and_ends_in_no_mask() -> None:
    shares = [annealing_at(step, 4, 0, ROWS) for step in range(6)]
    assert [None if a is None else a.share.tolist() for a in shares] == [
        [0.25] * 2,
        [0.5] * 2,
        [0.75] * 2,
        None,
        None,
        None,
    ]
    assert annealing_at(0, 0, 0, ROWS) is None
    assert annealing_at(0, 1, 0, ROWS) is None


def test_what_is_before_is_seen_and_what_is_behind_with_its_probability() -> None:
    positions = torch.arange(200)[None]
    before = torch.ones(200, 200, dtype=torch.bool).tril()
    assert torch.equal(annealed(None, positions, share(0.0))[0, 0], before)
    assert annealed(None, positions, share(1.0)).all()
    seen = annealed(None, positions, share(0.3))[:, 0]
    assert seen[:, before].all()
    later = seen[:, ~before].double()
    assert abs(float(later.mean()) - 0.3) < 5 * (0.3 * 0.7 / later.numel()) ** 0.5
    assert not torch.equal(seen[0], seen[1]), "rows have draws of their own"
    more = annealed(None, positions, share(0.6))[:, 0]
    assert (more | ~seen).all(), "a key that is visible stays visible"
    hidden = torch.rand(2, 1, 200, 200) < 0.5
    assert torch.equal(annealed(hidden, positions, share(0.3))[:, 0], hidden[:, 0] & seen)


def test_with_share_0_the_model_is_causal_and_with_1_bidirectional() -> None:
    ids = torch.randint(0, VOCAB, (2, 9))
    model, causal = make_model("sdpa", qk_norm=True), make_model("sdpa", qk_norm=True, block_size=1)
    torch.testing.assert_close(model(ids, annealing=share(0.0)).logits, causal(ids).logits)
    torch.testing.assert_close(model(ids, annealing=share(1.0)).logits, model(ids).logits)
    half = model(ids, annealing=share(0.5)).logits
    assert not torch.allclose(half, causal(ids).logits, atol=1e-2)
    assert not torch.allclose(half, model(ids).logits, atol=1e-2)


def test_a_row_answers_alike_in_any_batch_and_behind_any_padding() -> None:
    model = make_model("sdpa")
    ids = torch.randint(0, VOCAB, (2, 6))
    both = model(ids, annealing=share(0.5)).logits
    alone = model(ids[1:], annealing=share(0.5, ROWS[1:])).logits
    torch.testing.assert_close(both[1:], alone, rtol=1e-4, atol=1e-4)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids[1:]], 1)
    mask = torch.tensor([[0] * 3 + [1] * 6])
    out = model(padded, attention_mask=mask, annealing=share(0.5, ROWS[1:])).logits[:, 3:]
    torch.testing.assert_close(out, alone, rtol=1e-4, atol=1e-4)


def test_the_objective_anneals_by_the_step_alone() -> None:
    model = make_model("sdpa", mask_token_id=0)
    objective = ObjectiveConfig(anneal_steps=4).build(global_batch=2, seed=3, mask_token_id=0, num_tokens=VOCAB)
    tokens = torch.randint(1, VOCAB, (2, 9))
    batch = Batch(input_ids=tokens, maskable=torch.ones(2, 9, dtype=torch.bool), rows=ROWS)
    losses = []
    for step in (0, 1, 3):
        noised = objective.noise(batch, step)
        expected = annealing_at(step, 4, 3, ROWS)
        assert (noised.annealing is None) == (expected is None)
        at = noised.masked
        logits = model(noised.input_ids, annealing=expected).logits[at].detach()
        logits[:, 0] = -torch.inf
        nats = torch.nn.functional.cross_entropy(logits, tokens[at], reduction="none")
        losses.append(float((noised.weight[at] * nats).sum()))
        assert float(objective.numerator(model, noised).loss.detach()) == pytest.approx(losses[-1], rel=1e-4)
    assert len(set(losses)) == 3


@pytest.mark.parametrize(
    ("options", "implementation", "message"),
    [
        ({"block_size": 2}, "sdpa", "this model has blocks"),
        ({}, "flex_attention", "takes no mask that differs"),
        ({}, "flash_attention_2", "takes no mask that differs"),
    ],
    ids=["blocks", "flex", "flash"],
)
def test_annealing_silently_off_with_flash_attention(
    options: dict[str, Any], implementation: str, message: str
) -> None:
    model = make_model("sdpa", **options)
    model.config._attn_implementation = implementation
    with pytest.raises(ValueError, match=message):
        check_annealing(model.config)
    if implementation == "sdpa":
        with pytest.raises(ValueError, match=message):
            model(torch.zeros(2, 4, dtype=torch.long), annealing=share(0.5))


# --- runs


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    with fresh_accelerate():
        yield


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"), documents=6)


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("causal")
    for name in ("llama", "qwen2", "qwen3"):
        make_causal(folder / name, name, initializer_range=0.02)
    make_gpt2(folder / "gpt2", initializer_range=0.02)
    return folder


def adapt(source: Path, texts: Path, output: Path, **options: Any) -> TrainConfig:
    given = {"output_dir": output, "data.source": texts, **DEFAULTS, "model.init_from": source}
    given |= {"model.add_mask_token": "true", "train.steps": 5}
    given |= {name.replace("__", "."): value for name, value in options.items()}
    for name in ("model.hidden_size", "model.num_hidden_layers", "tokenizer.vocab_size"):
        given.pop(name)
    return parse_config([f"--{name}={'null' if value is None else value}" for name, value in given.items()])


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt2"])
def test_a_run_starts_from_a_causal_folder_and_resumes_exactly(
    name: str, causal: Path, texts: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"objective__anneal_steps": 4, "objective__warmup_steps": 2, "checkpoint__every": 2}
    straight = train(adapt(causal / name, texts, tmp_path / "one", checkpoint__keep_last=9, **options))
    assert straight is not None
    model, tokenizer = load_model(straight, device="cpu")
    assert model.config.shift_logits
    assert (model.config.block_size, model.config.mask_token_id) == (None, 280)
    assert tokenizer.mask_token == "<|mask|>"
    assert all(np.isfinite(line["loss"]) for line in records(straight.parent, "train"))
    with fresh_accelerate():
        resume = straight.parent / "checkpoint-2"
        again = train(adapt(causal / name, texts, tmp_path / "two", resume=resume, **options))
    assert again is not None
    assert_same(straight, again)
    with fresh_accelerate():  # the annealing counts
        other = train(adapt(causal / name, texts, tmp_path / "three", objective__warmup_steps=2))
    assert other is not None
    assert records(other.parent, "train")[0]["loss"] != records(straight.parent, "train")[0]["loss"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model__shift_logits": "false"}, (False, None)),
        ({"model__shift_logits": "true", "model__block_size": 4}, (True, 4)),
        ({"model__add_mask_token": "false", "model__mask_token_id": 1}, (True, None)),
    ],
    ids=["unshifted", "blocks", "given mask"],
)
def test_conventions_are_said(
    options: dict[str, Any], expected: tuple[bool, int | None], causal: Path, texts: Path, tmp_path: Path
) -> None:
    checkpoint = train(adapt(causal / "llama", texts, tmp_path / "run", **{"train__steps": 2, **options}))
    assert checkpoint is not None
    config = MDLMConfig.from_pretrained(checkpoint)
    assert (config.shift_logits, config.block_size) == expected
    with fresh_accelerate():  # goes on by the same command
        more = adapt(causal / "llama", texts, tmp_path / "run", **{**options, "train__steps": 3, "resume": "auto"})
        assert train(more) is not None


def test_the_run_begins_with_the_causal_models_answers(causal: Path, texts: Path, tmp_path: Path) -> None:
    run = start(adapt(causal / "qwen2", texts, tmp_path / "run"))
    ids = torch.randint(2, 280, (1, 8))
    plain = MDLMForMaskedLM.from_pretrained(causal / "qwen2", add_mask_token=True, block_size=1)
    first = run.core(ids, annealing=share(0.0, ROWS[:1])).logits
    torch.testing.assert_close(first, plain(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model__add_mask_token": "false"}, "which has no mask token"),
        ({"model__block_size": 4, "objective__anneal_steps": 5}, "this model has blocks"),
        ({"model__attn_implementation": "flex_attention", "objective__anneal_steps": 5}, "takes no mask that differs"),
        ({"lora__r": 4}, "an adapter must find its base again"),
        ({"objective__anneal_steps": -1}, "anneal_steps must not be negative"),
    ],
    ids=["no mask", "blocks", "flex", "adapter", "negative"],
)
def test_what_does_not_go_together_is_refused(
    options: dict[str, Any], message: str, causal: Path, texts: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        start(adapt(causal / "llama", texts, tmp_path / "run", **options))


def test_a_checkpoint_of_ours_says_its_conventions_itself(causal: Path, texts: Path, tmp_path: Path) -> None:
    checkpoint = train(adapt(causal / "llama", texts, tmp_path / "run", train__steps=1))
    assert checkpoint is not None
    with fresh_accelerate(), pytest.raises(ValueError, match=r"add_mask_token: .* is a checkpoint of ours"):
        start(adapt(checkpoint, texts, tmp_path / "other"))
    with pytest.raises(ValueError, match=r"are for a model of --model\.init_from"):
        parse_config(["--output_dir=x", "--model.add_mask_token=true"])


def test_the_recipe_runs(causal: Path, texts: Path, tmp_path: Path) -> None:
    """adapt.yaml as it is, but short and small."""
    recipe = Path(str(files("mdlm.training.recipes"))) / "adapt.yaml"
    reduced = {
        "output_dir": tmp_path / "run", "model.init_from": causal / "qwen2", "data.source": texts, "data.seq_len": 24,
        "train.steps": 3, "train.global_batch": 4, "train.micro_batch": 2, "train.log_every": 1,
        "validation.every": 3, "data.validation_rows": 4, "train.measure_peak": "false",
    }  # fmt: skip
    with fresh_accelerate():
        checkpoint = train(parse_config([f"--config={recipe}", *(f"--{n}={v}" for n, v in reduced.items())]))
    assert checkpoint == tmp_path / "run" / "checkpoint-3"
    assert np.isfinite(records(tmp_path / "run", "validation")[0]["nats_per_token"])
