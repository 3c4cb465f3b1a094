"""Fine-tuning loss: log V for constant logits, the same in any split, packing and padding, exact against float64."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference_model as ref
import torch
from model_tools import make_model
from test_training_processes import LAUNCH, launch
from text_rows import small_bpe
from torch import Tensor
from training_runs import WORDS, arguments, assert_same, configure, fresh_accelerate, records

from mdlm import cli
from mdlm.data import Batch, Data, DataConfig, open_data
from mdlm.modeling import MDLMForMaskedLM
from mdlm.objective import NoisedBatch, Objective, ObjectiveConfig
from mdlm.rng import counter_uniform
from mdlm.training.config import parse_config
from mdlm.training.loop import optimizer_step, start, train

GLOBAL = 8
POLICIES = ["none", "eos_one", "eos_to_batch", "eos_to_length"]


def pairs(count: int) -> list[dict[str, str]]:
    """Prompts and completions of very different length, with something to learn: the words go on in order."""
    rows = []
    for number in range(count):
        where, size = counter_uniform(7, number, torch.arange(2)).tolist()
        first, words = int(where * len(WORDS)), 1 + int(size * size * 9)
        text = [WORDS[(first + i) % len(WORDS)] for i in range(words + 2)]
        rows.append({"prompt": " ".join(text[:2]), "completion": " " + " ".join(text[2:])})
    return rows


PAIRS = pairs(40)


def as_chat(row: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    with fresh_accelerate():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs")
    (path / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in PAIRS))
    return path / "pairs.jsonl"


def examples(**options: Any) -> Data:
    defaults: dict[str, Any] = {"records": "completion", "packing": "none", "seq_len": 64, "validation_fraction": 0.0}
    return open_data(DataConfig(source="given", **{**defaults, **options}), small_bpe(), train=PAIRS)


def objective(**options: Any) -> Objective:
    tokenizer = small_bpe()
    return ObjectiveConfig(**options).build(
        global_batch=GLOBAL, seed=3, mask_token_id=tokenizer.mask_token_id, num_tokens=len(tokenizer)
    )


def model(**options: Any) -> MDLMForMaskedLM:
    return make_model(vocab_size=320, num_tokens=280, mask_token_id=0, pad_token_id=1, eos_token_id=2, **options).eval()


def split(data: Data, micro: int, world: int) -> list[Batch]:
    """The first global batch as the micro-batches of `world` processes."""
    count = GLOBAL // (micro * world)
    streams = [data.train_batches(micro, rank=r, world=world, global_batch=GLOBAL) for r in range(world)]
    return [next(s) for s in streams for _ in range(count)]


def loss_and_gradient(net: Any, loss: Objective, parts: list[NoisedBatch]) -> tuple[float, dict[str, Tensor]]:
    """As the loop does it: all normalisers first, then a backward per part."""
    total = sum(float(loss.denominator(part)) for part in parts)
    net.zero_grad()
    value = 0.0
    for part in parts:
        term = loss.numerator(net, part).loss / total
        term.backward()
        value += float(term.detach())
    return value, {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}


def assert_close(one: tuple[float, dict[str, Tensor]], other: tuple[float, dict[str, Tensor]]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    assert one[1].keys() == other[1].keys()
    scale = max(float(g.abs().max()) for g in one[1].values())
    for name, gradient in one[1].items():
        assert float((gradient - other[1][name]).abs().max()) < 1e-6 * max(scale, 1.0), name


# --- calibration and the prompt -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packing", "policy"), [*(("none", p) for p in POLICIES), ("documents", "none"), ("documents", "eos_one")]
)
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("weighting", ["nelbo", "llada", "none"])
def test_constant_logits_cost_log_v_in_every_draw(packing, policy, reduction, weighting):
    loss = objective(masking="count", reduction=reduction, weighting=weighting, eps=0.0)
    data = examples(packing=packing, pad_supervision=policy)
    logits = torch.zeros(320)
    logits[280:] = 5.0
    net = lambda logits_at, **_: SimpleNamespace(logits=logits.expand(int(logits_at.sum()), -1))  # noqa: E731
    parts = [loss.noise(batch, 0) for batch in split(data, 2, 2)]
    total = sum(float(loss.denominator(p)) for p in parts)
    value = sum(float(loss.numerator(net, p).loss) for p in parts) / total
    assert value == pytest.approx(math.log(279), rel=1e-6)


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_the_prompt_and_the_padding_are_never_noised(packing):
    data, loss = examples(packing=packing), objective()
    stream = data.train_batches(GLOBAL)
    seen = 0
    for step in range(30):
        batch = next(stream)
        noised = loss.noise(batch, step)
        assert torch.equal(noised.input_ids[~batch.maskable], batch.input_ids[~batch.maskable])
        assert (noised.weight[~batch.maskable] == 0).all()
        seen += int(noised.masked.sum())
    assert seen > 100


# --- the same in any split ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["eos_one", "eos_to_batch"])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize(
    "options",
    [{}, {"weighting": "cart"}, {"masking": "count", "complementary": True}, {"eps": 0.3, "t_max": 0.8}],
    ids=str,
)
def test_loss_and_gradient_do_not_scale_with_accumulation_or_processes(policy, reduction, options):
    """dllm, SDAR #27, NeMo #2437: the loss grew with accumulation, or the normaliser was that of the micro-batch."""
    data, loss, net = examples(pad_supervision=policy), objective(reduction=reduction, **options), model()
    whole = loss_and_gradient(net, loss, [loss.noise(b, 0) for b in split(data, GLOBAL, 1)])
    assert whole[0] > 1.0
    for micro, world in ((1, 1), (2, 1), (4, 1), (4, 2), (1, 4), (1, 8)):
        assert_close(loss_and_gradient(net, loss, [loss.noise(b, 0) for b in split(data, micro, world)]), whole)


def test_longer_padding_changes_nothing():
    """dllm #3, #15, LLaDA #89: padding was attended to, so a row's loss depended on its neighbours' length."""
    loss, net = objective(), model()
    parts = [[loss.noise(b, 0) for b in split(examples(seq_len=n), GLOBAL, 1)] for n in (64, 96)]
    assert_close(loss_and_gradient(net, loss, parts[0]), loss_and_gradient(net, loss, parts[1]))


def unpacked(packed: NoisedBatch, width: int) -> NoisedBatch:
    """Every example of packed rows in a row of its own, with the same masks and weights."""
    assert packed.position_ids is not None
    real = packed.attention_mask if packed.attention_mask is not None else torch.ones_like(packed.masked)
    rows = []
    for r in range(len(packed.rows)):
        end = int(real[r].sum())
        starts = [i for i in range(end) if packed.position_ids[r, i] == 0]
        rows += [(r, a, b) for a, b in zip(starts, [*starts[1:], end], strict=True)]

    def spread(x: Tensor) -> Tensor:
        out = torch.zeros(len(rows), width, dtype=x.dtype)
        for i, (r, a, b) in enumerate(rows):
            out[i, : b - a] = x[r, a:b]
        return out

    fields = ("input_ids", "targets", "masked", "weight")
    return replace(
        packed, **{f: spread(getattr(packed, f)) for f in fields}, attention_mask=spread(real), position_ids=None
    )


def test_packed_examples_cost_what_they_cost_alone():
    """maxtext #4743: packed documents leaked into each other."""
    loss, net = objective(), model()
    packed = [loss.noise(b, 0) for b in split(examples(packing="documents"), GLOBAL, 1)]
    alone = [unpacked(part, 64) for part in packed]
    assert len(alone[0].input_ids) > 2 * GLOBAL
    assert_close(loss_and_gradient(net, loss, packed), loss_and_gradient(net, loss, alone))


# --- against float64 ----------------------------------------------------------------------------------------------


def reference_loss(
    weights: dict[str, np.ndarray], net: MDLMForMaskedLM, noised: NoisedBatch, batch: Batch, kind: str
) -> float:
    """LLaDA's fine-tuning loss in float64 from its definition, k of the n answer tokens masked: (n / k) sum of nll."""
    c = net.config
    shape = ref.Shape(
        c.num_attention_heads, c.num_key_value_heads, c.num_hidden_layers, c.rope_theta, c.rms_norm_eps, None, False
    )
    total, per_row, answers = 0.0, [], 0
    for r in range(len(batch.rows)):
        size = int(batch.attention_mask[r].sum()) if batch.attention_mask is not None else 64
        ids, clean = noised.input_ids[r, :size].tolist(), batch.input_ids[r, :size].tolist()
        logits = ref.logits(weights, shape, ids, list(range(size)), [0] * size)
        masked = [i for i in range(size) if ids[i] == 0]
        nll = 0.0
        for i in masked:
            row = [logits[i][v] for v in range(280) if v != 0]
            top = max(row)
            nll += top + math.log(sum(math.exp(x - top) for x in row)) - logits[i][clean[i]]
        n = int(batch.maskable[r].sum())
        total += n / len(masked) * nll
        per_row.append(nll / len(masked))
        answers += n
    return total / answers if kind == "token_mean" else sum(per_row) / len(per_row)


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("policy", ["eos_one", "eos_to_batch"])
def test_loss_and_its_slope_equal_a_float64_reference(kind, policy):
    loss, net = objective(masking="count", eps=0.0, reduction=kind), model()
    (batch,) = split(examples(pad_supervision=policy), GLOBAL, 1)
    noised = loss.noise(batch, 0)
    value, gradient = loss_and_gradient(net, loss, [noised])
    weights = {name: w.detach().double().numpy() for name, w in net.state_dict().items()}
    assert value == pytest.approx(reference_loss(weights, net, noised, batch, kind), rel=2e-6)

    generator = np.random.default_rng(0)
    ways = {name: generator.standard_normal(tuple(g.shape)) for name, g in gradient.items()}
    step = 1e-5

    def moved(sign: float) -> float:
        shifted = {n: w + sign * step * ways[n] if n in ways else w for n, w in weights.items()}
        for name in weights:
            if name not in ways:  # a tied head is the embedding under another name
                shifted[name] = shifted["model.embed_tokens.weight"]
        return reference_loss(shifted, net, noised, batch, kind)

    slope = sum(float((gradient[n].double().numpy() * ways[n]).sum()) for n in ways)
    assert slope == pytest.approx((moved(1.0) - moved(-1.0)) / (2 * step), rel=2e-5)


# --- whole runs ---------------------------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    "data__records": "completion",
    "data__packing": "none",
    "data__seq_len": 64,
    "data__pad_supervision": "eos_to_batch",
    "train__steps": 6,
    "checkpoint__keep_last": 5,
    "checkpoint__every": 3,
}


def test_training_resumes_exactly_and_in_another_split(folder, tmp_path, capsys):
    straight = train(configure(folder, tmp_path / "straight", **RUN))
    assert "tokens in the loss per epoch" in capsys.readouterr().out
    with fresh_accelerate():
        middle = tmp_path / "straight" / "checkpoint-3"
        resumed = train(configure(folder, tmp_path / "again", resume=middle, **RUN))
    assert straight is not None
    assert resumed is not None
    assert_same(straight, resumed)
    with fresh_accelerate():
        other = train(configure(folder, tmp_path / "other", train__micro_batch=2, **RUN))
    assert other is not None
    assert_same(straight, other, tolerance=2e-6)
    losses = [line["loss"] for line in records(tmp_path / "straight", "train")]
    assert losses[-1] < losses[0]


def test_two_processes_train_as_one(folder, tmp_path):
    expected = train(configure(folder, tmp_path / "one", **RUN))
    done = launch([*LAUNCH, "-m", "mdlm.training", *arguments(folder, tmp_path / "two", train__micro_batch=2, **RUN)])
    assert done.returncode == 0, done.stderr
    assert expected is not None
    assert_same(expected, tmp_path / "two" / "checkpoint-6", tolerance=2e-6)
    one, two = ([line["loss"] for line in records(tmp_path / name, "train")] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-6)


def test_the_checkpoint_keeps_the_chat_template(tmp_path):
    from transformers import AutoTokenizer

    chats = tmp_path / "chats.jsonl"
    rows = [{"messages": as_chat(row)} for row in PAIRS]
    chats.write_text("\n".join(json.dumps(row) for row in rows))
    options = {**RUN, "data__records": "messages", "data__chat_template": "plain", "train__steps": 1}
    checkpoint = train(configure(chats, tmp_path / "run", **options))
    assert checkpoint is not None
    again = AutoTokenizer.from_pretrained(checkpoint)
    text = again.apply_chat_template(rows[0]["messages"][:1], tokenize=False, add_generation_prompt=True)
    assert text == f"### user\n{PAIRS[0]['prompt']}\n### assistant\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data__seq_len": 4, "data__too_long": "drop"}, "no example is left of 40 records"),
        ({"data__seq_len": 4}, "the example has"),
        ({"data__prompt_column": "question"}, "no column 'question'"),
    ],
)
def test_bad_data_is_an_error_before_the_first_step(folder, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        start(configure(folder, tmp_path / "run", **{**RUN, **options, "tokenizer__path": None}))
    assert not (tmp_path / "run").exists()


def test_one_step_of_the_loop_is_the_loss_of_the_reference(folder, tmp_path):
    """The whole path, from file to metrics, against the definition."""
    options = {**RUN, "objective__masking": "count", "objective__eps": 0.0, "train__micro_batch": 2}
    run = start(configure(folder, tmp_path / "run", **options))
    batch = next(run.data.train_batches(8, global_batch=8))
    net = run.core
    weights = {name: w.detach().double().numpy().copy() for name, w in net.state_dict().items()}
    noised = run.objective.noise(batch, 0)
    assert (run.tokenizer.mask_token_id, net.config.num_tokens) == (0, 270)
    optimizer_step(run)
    assert run.unlogged
    c = net.config
    shape = ref.Shape(
        c.num_attention_heads, c.num_key_value_heads, c.num_hidden_layers, c.rope_theta, c.rms_norm_eps, None, False
    )
    total = 0.0
    for r in range(8):
        size = int(batch.attention_mask[r].sum())
        ids, clean = noised.input_ids[r, :size].tolist(), batch.input_ids[r, :size].tolist()
        logits = np.asarray(ref.logits(weights, shape, ids, list(range(size)), [0] * size))[:, 1:270]
        masked = [i for i in range(size) if ids[i] == 0]
        nll = sum(float(np.log(np.exp(logits[i]).sum()) - logits[i][clean[i] - 1]) for i in masked)
        total += int(batch.maskable[r].sum()) / len(masked) * nll
    assert float(run.unlogged[0][0]) == pytest.approx(total / int(batch.maskable.sum()), rel=2e-6)


def test_the_recipe_runs_on_ones_own_model(folder: Path, tmp_path: Path) -> None:
    """sft.yaml as it is, but short and small: from a run's folder, on chats."""
    base = train(configure(folder, tmp_path / "base", **{**RUN, "train__steps": 1}))
    assert base is not None
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(json.dumps({"messages": as_chat(row)}) for row in PAIRS))
    recipe = Path(str(files("mdlm.training.recipes"))) / "sft.yaml"
    reduced = {
        "output_dir": tmp_path / "run", "model.init_from": tmp_path / "base", "data.source": chats, "data.seq_len": 64,
        "train.steps": 3, "train.global_batch": 8, "train.log_every": 1, "validation.every": 3,
        "data.validation_rows": 4, "lr_schedule.warmup_steps": 1,
    }  # fmt: skip
    options = [f"--{name}={value}" for name, value in reduced.items()]
    with fresh_accelerate():
        assert train(parse_config([f"--config={recipe}", *options])) == tmp_path / "run" / "checkpoint-3"
    assert len(records(tmp_path / "run", "train")) == 3
    nats = records(tmp_path / "run", "validation")[0]["nats_per_token"]
    results = tmp_path / "results.jsonl"
    assert cli.main(["eval", str(tmp_path / "run"), "--device=cpu", f"--results={results}"]) == 0
    assert math.isfinite(nats)
    assert 0 < json.loads(results.read_text())["nats_per_token"] < 2 * nats
