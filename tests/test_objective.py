"""The loss: calibrated, the same for any split, exact against float64, and loud where something is wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mdlm.data import Batch
from mdlm.modeling import head_rows
from mdlm.objective import LossTerms, NoisedBatch, Objective, ObjectiveConfig
from mdlm.schedule import SCHEDULES

VOCAB, TOKENS, MASK = 24, 20, 3  # four padding rows of the vocabulary
OPTIONS: list[dict[str, Any]] = [
    {"weighting": weighting, "schedule": schedule, "reduction": reduction, "masking": masking}
    for masking in ("independent", "count")
    for weighting in ("nelbo", "llada", "none")
    for schedule in SCHEDULES
    for reduction in ("token_mean", "sequence_mean")
    if weighting != "llada" or schedule == "linear"
]


def _objective(global_batch: int = 8, seed: int = 0, **options: Any) -> Objective:
    config = ObjectiveConfig(**options)
    return config.build(global_batch=global_batch, seed=seed, mask_token_id=MASK, num_tokens=TOKENS)


def _batch(rows: int, seq: int = 16, start: int = 0, fraction: float = 0.8, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        input_ids=torch.randint(MASK + 1, TOKENS, (rows, seq), generator=generator),
        maskable=torch.rand(rows, seq, generator=generator) < fraction,
        rows=torch.arange(start, start + rows),
    )


def _take(batch: Batch, index: Tensor | slice) -> Batch:
    return Batch(batch.input_ids[index], batch.maskable[index], batch.rows[index])


class Constant:
    """A model with the same logits everywhere."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def __call__(self, input_ids: Tensor, attention_mask: Any, position_ids: Any, logits_at: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits.expand(int(logits_at.sum()), -1))


class Tiny(nn.Module):
    """A denoiser that looks at its neighbours."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embed = nn.Parameter(torch.randn(VOCAB, 8, generator=generator).to(dtype))
        self.head = nn.Parameter(torch.randn(8, VOCAB, generator=generator).to(dtype))

    def forward(self, input_ids: Tensor, attention_mask: Any, position_ids: Any, logits_at: Tensor) -> SimpleNamespace:
        x = self.embed[input_ids]
        x = torch.tanh(x + x.roll(1, dims=1) - 0.5 * x.roll(-1, dims=1))
        return SimpleNamespace(logits=x[logits_at] @ self.head)


# --- calibration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o.values()))
@pytest.mark.parametrize("eps", [0.0, 1e-3, 0.3])
def test_uniform_logits_cost_log_v(options: dict[str, Any], eps: float) -> None:
    """Exactly for the mean over masked tokens, in expectation (here: within 4 standard errors) for every option."""
    rows = 4096
    objective, batch = _objective(rows, eps=eps, sampling="uniform", **options), _batch(rows)
    noised = objective.noise(batch, 0)
    terms = objective.numerator(Constant(torch.full((VOCAB,), 0.37)), noised)
    log_v = math.log(TOKENS - 1)
    assert float(terms.nll_sum / terms.masked_count) == pytest.approx(log_v, rel=1e-6)
    share = noised.weight.double().sum(1)  # of each row in the numerator
    scale = float(objective.denominator(noised)) / rows
    error = float(share.std()) / rows**0.5 / scale
    assert error < 0.08
    loss = float(terms.loss) / float(objective.denominator(noised))
    if options["weighting"] == "none":
        assert loss == pytest.approx(log_v, rel=1e-5)
    else:
        assert abs(loss / log_v - 1.0) < 4 * error + 1e-6  # float32 sums
    if options["masking"] == "count" and options["schedule"] == "linear" and eps == 0.0:
        assert loss == pytest.approx(log_v, rel=1e-5)  # in every draw


def test_dividing_a_weighted_sum_by_the_masked_count_would_depend_on_batch_size() -> None:
    """Symptom (two public frameworks): uniform logits cost 22.6 at batch size 1 and 9.7 at 8 instead of log V."""
    log_v, model = math.log(TOKENS - 1), Constant(torch.zeros(VOCAB))
    steps = 3000
    ours, theirs = {}, {}
    for size in (1, 8):
        objective = _objective(size, sampling="uniform")
        batch = _batch(size * steps, fraction=1.0)
        noised = objective.noise(batch, 0)
        step_sum = (noised.weight.double().sum(1) * log_v).reshape(steps, size).sum(1)
        first = objective.noise(_take(batch, slice(0, size)), 0)
        assert float(objective.numerator(model, first).loss) == pytest.approx(float(step_sum[0]), rel=1e-5)
        assert float(objective.denominator(first)) == 16 * size
        right = step_sum / (16 * size)
        wrong = step_sum / noised.masked.sum(1).reshape(steps, size).sum(1)
        ours[size] = (float(right.mean()), float(right.std()) / steps**0.5)
        theirs[size] = float(wrong.mean())
    for mean, error in ours.values():
        assert abs(mean - log_v) < 4 * error
    assert theirs[1] > 1.5 * theirs[8] > 1.5 * log_v


def test_a_position_left_out_of_the_loss_is_left_out_of_the_normaliser() -> None:
    """Symptom: the BOS leaves the numerator but stays in the denominator, so the loss is too low by 1/length."""
    rows, seq = 4096, 4
    objective = _objective(rows)
    batch = _batch(rows, seq, fraction=1.0)
    maskable = batch.maskable.clone()
    maskable[:, 0] = False
    noised = objective.noise(replace(batch, maskable=maskable), 0)
    assert not bool(noised.masked[:, 0].any())
    assert float(objective.denominator(noised)) == rows * (seq - 1)
    share = noised.weight.double().sum(1)
    error = float(share.std()) / rows**0.5 / (seq - 1)
    assert abs(float(share.sum()) / (rows * (seq - 1)) - 1) < 4 * error < 0.1


def test_nan_logits_make_the_loss_nan() -> None:
    objective, batch = _objective(4), _batch(4)
    poisoned = torch.zeros(VOCAB)
    poisoned[11] = math.nan
    terms = objective.numerator(Constant(poisoned), objective.noise(batch, 0))
    assert math.isnan(float(terms.loss))
    assert math.isnan(float(terms.nll_sum))


# --- weights ------------------------------------------------------------------------------------------------------


def test_llada_and_the_nelbo_of_the_linear_schedule_are_the_same_loss() -> None:
    batch = _batch(64)
    for reduction in ("token_mean", "sequence_mean"):
        nelbo = _objective(64, weighting="nelbo", reduction=reduction).noise(batch, 0)
        llada = _objective(64, weighting="llada", reduction=reduction).noise(batch, 0)
        assert torch.equal(nelbo.masked, llada.masked)
        torch.testing.assert_close(nelbo.weight, llada.weight, rtol=1e-6, atol=0)


def test_weights_equal_their_formulas_row_by_row() -> None:
    batch = _batch(200, seq=6)
    for schedule, alpha in reference.ALPHAS.items():
        for reduction in ("token_mean", "sequence_mean"):
            noised = _objective(200, schedule=schedule, eps=0.0, reduction=reduction).noise(batch, 0)
            for row in range(200):
                t, n, k = float(noised.times[row]), int(batch.maskable[row].sum()), int(noised.masked[row].sum())
                if n == 0:
                    assert not bool(noised.weight[row].any())
                    continue
                p, h = 1 - alpha(t), 1e-6
                expected = -(alpha(t + h) - alpha(t - h)) / (2 * h) / p
                expected *= n * p / (n * p + 1 - p) if k == 1 else 1.0
                expected /= n if reduction == "sequence_mean" else 1
                assert noised.weight[row, noised.masked[row]].tolist() == pytest.approx([expected] * k, rel=1e-4)
                assert not bool(noised.weight[row, ~noised.masked[row]].any())


def test_exact_counts_weigh_one_over_their_probability() -> None:
    batch = _batch(200, seq=6)
    noised = _objective(200, eps=0.0, masking="count").noise(batch, 0)
    n, k = batch.maskable.sum(1), noised.masked.sum(1)
    assert torch.equal(k, torch.ceil(noised.times * n).long())
    expected = (n / k.clamp(min=1))[:, None].expand(200, 6)[noised.masked]
    torch.testing.assert_close(noised.weight[noised.masked], expected)
    assert not bool(noised.weight[~noised.masked].any())


def test_a_small_time_cannot_blow_up_a_row() -> None:
    """Without clipping, a lone mask at t -> 0 weighs at most n (1/t without the importance)."""
    objective = _objective(1, eps=0.0)
    batch = Batch(torch.full((20_000, 16), 5), torch.ones(20_000, 16, dtype=torch.bool), torch.arange(20_000))
    noised = objective.noise(batch, 0)
    single = noised.masked.sum(1) == 1
    assert float(noised.times.min()) < 1e-4
    assert float(noised.weight[single].max()) <= 16.0


def test_unweighted_loss_is_the_plain_mean() -> None:
    batch = _batch(8)
    model = Tiny()
    for reduction in ("token_mean", "sequence_mean"):
        objective = _objective(8, weighting="none", reduction=reduction)
        noised = objective.noise(batch, 0)
        loss = _loss(objective, model, noised)
        nll = _dense_nll(model, noised)
        if reduction == "token_mean":
            expected = nll[noised.masked].mean()
        else:
            expected = torch.stack([nll[r, noised.masked[r]].mean() for r in range(8)]).mean()
        assert loss == pytest.approx(float(expected), rel=1e-5)


def _loss(objective: Objective, model: Any, noised: NoisedBatch) -> float:
    return float(objective.numerator(model, noised).loss.detach() / objective.denominator(noised))


def _dense_nll(model: Any, noised: NoisedBatch) -> Tensor:
    """Reference negative log-likelihood at masked positions, 0 elsewhere, float64."""
    logits = model(noised.input_ids, None, None, noised.masked).logits.detach().double().numpy()
    log_probs = torch.from_numpy(reference.allowed_log_softmax(logits, MASK, TOKENS))
    nll = torch.zeros(noised.masked.shape, dtype=torch.float64)
    nll[noised.masked] = -log_probs.gather(1, noised.targets[noised.masked][:, None]).squeeze(1)
    return nll


def test_sequence_mean_weighs_sequences_equally_and_token_mean_tokens() -> None:
    batch = _batch(8)
    maskable = batch.maskable.clone()
    maskable[0, 2:] = False
    maskable[1] = False
    maskable[2] = True
    batch = replace(batch, maskable=maskable)
    model, n = Tiny(), maskable.sum(1).double()
    token = _objective(8)
    noised = token.noise(batch, 0)
    per_row = (_dense_nll(model, noised) * noised.weight).sum(1)
    loss = _loss(token, model, noised)
    assert loss == pytest.approx(float(per_row.sum() / n.sum()), rel=1e-5)
    sequence = _objective(8, reduction="sequence_mean")
    noised = sequence.noise(batch, 0)
    loss = _loss(sequence, model, noised)
    assert loss == pytest.approx(float((per_row[n > 0] / n[n > 0]).mean()), rel=1e-5)


# --- splits -------------------------------------------------------------------------------------------------------


@given(
    pieces=st.sampled_from([(1,) * 8, (8,), (4, 4), (2, 2, 2, 2), (3, 5), (1, 6, 1)]),
    options=st.sampled_from(OPTIONS),
    warmup=st.booleans(),
    order=st.permutations(list(range(8))),
)
@settings(max_examples=60, deadline=None)
def test_accumulation_and_processes_do_not_change_loss_or_gradient(
    pieces: tuple[int, ...], options: dict[str, Any], warmup: bool, order: list[int]
) -> None:
    """Symptom: gradient accumulation multiplies the loss. Sums are over the global batch, however it is split."""
    objective = _objective(8, warmup_steps=10 if warmup else 0, **options)
    batch = _batch(8, start=16)
    maskable = batch.maskable.clone()
    maskable[5] = False
    maskable[6, 3:] = False
    batch = replace(batch, maskable=maskable)
    whole = _loss_and_gradient(objective, [batch])
    parts = [_take(batch, index) for index in torch.tensor(order).split(list(pieces))]
    split = _loss_and_gradient(objective, parts)
    for a, b in zip(split, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def _loss_and_gradient(objective: Objective, parts: list[Batch]) -> list[Tensor]:
    model = Tiny(torch.float64)
    noised = [objective.noise(part, 2) for part in parts]
    denominator = torch.stack([objective.denominator(n) for n in noised]).sum()
    total = torch.zeros((), dtype=torch.float64)
    for n in noised:
        loss = objective.numerator(model, n).loss / denominator
        loss.backward()
        total += loss.detach()
    assert model.embed.grad is not None
    assert model.head.grad is not None
    return [total, model.embed.grad, model.head.grad]


def test_noise_is_a_function_of_seed_row_and_step_alone() -> None:
    objective, batch = _objective(8, seed=3), _batch(8)
    again = _objective(8, seed=3).noise(batch, 5)
    first = objective.noise(batch, 5)
    assert torch.equal(first.masked, again.masked)
    assert torch.equal(first.weight, again.weight)
    other = _objective(8, seed=4).noise(batch, 5)
    assert not torch.equal(first.masked, other.masked)
    later = objective.noise(replace(batch, rows=batch.rows + 8), 5)
    assert not torch.equal(first.masked, later.masked)


# --- warm-up ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_corruption_warmup_bounds_times_and_takes_the_plain_mean(reduction: str) -> None:
    options: dict[str, Any] = {"warmup_steps": 10, "warmup_start": 0.05, "reduction": reduction, "eps": 0.04}
    objective = _objective(64, **options)
    model = Tiny()
    for step in range(10):
        noised = objective.noise(_batch(64, start=64 * step), step)
        top = 0.05 + 0.95 * step / 10
        assert objective.max_time(step) == pytest.approx(top)
        assert top * 0.9 < float(noised.times.max()) <= top
        assert float(noised.times.min()) < top / 32  # not clipped by eps: the loss has no weight to tame
        assert torch.equal(noised.weight, noised.masked.float())
        assert float(objective.denominator(noised)) == float(noised.masked.sum())
        loss = _loss(objective, model, noised)
        assert loss == pytest.approx(float(_dense_nll(model, noised)[noised.masked].mean()), rel=1e-5)


def test_corruption_warmup_ends_exactly_at_its_step() -> None:
    with_warmup, without = _objective(8, warmup_steps=10), _objective(8)
    batch = _batch(8, start=80)
    last, first, plain = with_warmup.noise(batch, 9), with_warmup.noise(batch, 10), without.noise(batch, 10)
    assert last.normaliser == "masked"
    for name in ("input_ids", "masked", "weight", "times"):
        assert torch.equal(getattr(first, name), getattr(plain, name)), name
    assert first.normaliser == plain.normaliser == "maskable"
    assert with_warmup.max_time(10) == 1.0


# --- edges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o.values()))
def test_rows_without_maskable_tokens_add_nothing(options: dict[str, Any]) -> None:
    objective, model = _objective(8, **options), Tiny()
    batch = _batch(8)
    empty = replace(batch, maskable=torch.zeros_like(batch.maskable))
    noised = objective.noise(empty, 0)
    terms: LossTerms = objective.numerator(model, noised)
    terms.loss.backward()  # a process with nothing to predict still takes part in the backward pass
    assert float(terms.loss.detach()) == 0.0
    assert float(objective.denominator(noised)) == 0.0
    assert int(terms.masked_count) == 0
    assert model.head.grad is not None
    assert not bool(model.head.grad.any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_reduced_in_float32(dtype: torch.dtype) -> None:
    """The loss is that of the rounded logits to float32 accuracy: far below the error of summing in bf16."""
    model = Tiny(dtype)
    objective = _objective(64)
    noised = objective.noise(_batch(64), 0)
    terms = objective.numerator(model, noised)
    assert terms.loss.dtype == torch.float32
    exact = float((_dense_nll(model, noised) * noised.weight).sum())
    assert float(terms.loss.detach()) == pytest.approx(exact, rel=2e-6)
    terms.loss.backward()
    assert model.head.grad is not None
    assert bool(model.head.grad.isfinite().all())


def test_rows_beside_the_masked_ones_add_nothing() -> None:
    """The head is computed on a few more rows than are masked; a token there that may not be emitted costs infinity."""
    batch = _batch(4)
    noised = _objective(4).noise(batch, 0)
    leaf = torch.randn(4, 16, VOCAB, dtype=torch.float64, requires_grad=True)
    banned = replace(noised, targets=noised.targets.masked_fill(~noised.masked, MASK))
    answers = []
    for each in (noised, banned):
        leaf.grad = None
        terms = _objective(4).numerator(lambda **inputs: SimpleNamespace(logits=leaf[inputs["logits_at"]] * 1.0), each)
        terms.loss.backward()
        assert leaf.grad is not None
        assert not bool(leaf.grad[~noised.masked].any())
        answers.append((terms.loss.item(), terms.nll_sum.item(), leaf.grad.clone()))
    assert answers[0][:2] == answers[1][:2]
    assert torch.equal(answers[0][2], answers[1][2])


def test_model_sees_the_masks_and_positions_of_the_batch() -> None:
    seen: dict[str, Any] = {}

    def model(**inputs: Any) -> SimpleNamespace:
        seen.update(inputs)
        return SimpleNamespace(logits=torch.zeros(int(inputs["logits_at"].sum()), VOCAB))

    batch = replace(
        _batch(4),
        attention_mask=torch.ones(4, 16, dtype=torch.bool),
        position_ids=torch.arange(16).expand(4, 16),
    )
    objective = _objective(4)
    noised = objective.noise(batch, 0).to("cpu")
    objective.numerator(model, noised)
    assert seen["attention_mask"] is batch.attention_mask
    assert seen["position_ids"] is batch.position_ids
    assert torch.equal(seen["logits_at"] & noised.masked, noised.masked)
    assert int(seen["logits_at"].sum()) == head_rows(int(noised.masked.sum()), 64)
    assert torch.equal(seen["input_ids"], torch.where(noised.masked, MASK, batch.input_ids))
    assert torch.equal(noised.targets, batch.input_ids)


def test_text_that_holds_the_mask_token_is_refused() -> None:
    batch = _batch(4)
    ids = batch.input_ids.clone()
    ids[batch.maskable] = MASK
    with pytest.raises(ValueError, match="clean text holds the mask token"):
        _objective(4).noise(replace(batch, input_ids=ids), 0)


@pytest.mark.gpu
def test_cuda_gives_the_noise_and_the_loss_of_the_cpu() -> None:
    batch = _batch(64)
    for masking in ("independent", "count"):
        objective = _objective(64, masking=masking, schedule="cosine")
        here, there = objective.noise(batch, 0), objective.noise(batch.to("cuda"), 0)
        assert torch.equal(here.masked, there.masked.cpu())
        torch.testing.assert_close(here.weight, there.weight.cpu())
        model = Tiny()
        on_cpu = objective.numerator(model, here).loss
        on_gpu = objective.numerator(model.to("cuda"), here.to("cuda")).loss
        torch.testing.assert_close(on_gpu.detach().cpu(), on_cpu.detach(), rtol=1e-5, atol=0)
        torch.testing.assert_close(objective.denominator(there).cpu(), objective.denominator(here))
