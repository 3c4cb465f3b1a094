"""The NELBO against exact likelihoods: enumerated where that is possible, else within its stated standard error."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from mdlm.data import Batch
from mdlm.eval.likelihood import (
    Likelihood,
    LikelihoodSums,
    NelboProtocol,
    accumulate,
    merge,
    nelbo,
)
from mdlm.eval.sources import CopySource, ExactSource, MarkovSource, TabularSource
from mdlm.objective import ObjectiveConfig
from mdlm.schedule import SCHEDULES

LENGTH, VOCAB = 4, 3


def _source(name: str, length: int = LENGTH, vocab: int = VOCAB) -> ExactSource:
    generator = torch.Generator().manual_seed(8)
    if name == "tabular":
        return TabularSource.random(length, vocab, generator)
    if name == "markov":
        return MarkovSource.random(length, vocab, generator)
    return CopySource(torch.rand(vocab, generator=generator).double().softmax(0), length)


def _batches(sequences: Tensor, size: int, start: int = 0, world: int = 1, rank: int = 0) -> Iterator[Batch]:
    rows = torch.arange(start, start + sequences.shape[0])
    for piece in torch.arange(rank, sequences.shape[0], world).split(size):
        yield Batch(sequences[piece], torch.ones(piece.numel(), sequences.shape[1], dtype=torch.bool), rows[piece])


# --- Monte Carlo, with the stated error as tolerance --------------------------------------------------------------


@pytest.mark.parametrize("name", ["tabular", "markov", "copy"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sampling", ["stratified", "uniform", "low_discrepancy", "antithetic"])
@pytest.mark.parametrize("masking", ["count", "independent"])
def test_an_exact_denoiser_reaches_the_entropy(name: str, schedule: str, sampling: Any, masking: Any) -> None:
    source = _source(name, 6)
    x = source.sample(2000, torch.Generator().manual_seed(5))
    result = nelbo(source, _batches(x, 500), schedule=schedule, sampling=sampling, masking=masking, seed=1)
    assert result.standard_error is not None
    assert 0 < result.standard_error < 0.03
    assert abs(result.nats_per_token - source.entropy() / 6) < 4 * result.standard_error


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("masking", ["count", "independent"])
def test_given_the_text_the_noise_alone_averages_out(schedule: str, masking: Any) -> None:
    """Sharper: against the exact likelihood of the very same sequences, row by row, over many samples."""
    source = _source("markov", 8, 5)
    x = source.sample(100, torch.Generator().manual_seed(5))
    protocol = NelboProtocol(schedule=schedule, masking=masking, samples=64, strata_rows=1)
    difference = accumulate(source, _batches(x, 100), protocol).nats + source.log_prob(x)
    error = float(difference.std()) / 10
    assert error < 0.012 * source.entropy()
    assert abs(float(difference.mean())) < 4 * error


@pytest.mark.parametrize("sampling", ["stratified", "uniform"])
@pytest.mark.parametrize("masking", ["count", "independent"])
def test_the_three_sigma_interval_covers_and_is_no_wider_than_it_must_be(sampling: Any, masking: Any) -> None:
    source = _source("markov", 16, 6)
    exact = source.entropy() / 16
    scores = []
    for seed in range(40):
        x = source.sample(256, torch.Generator().manual_seed(2000 + seed))
        result = nelbo(source, _batches(x, 256), sampling=sampling, masking=masking, seed=seed)
        assert result.standard_error is not None
        scores.append((result.nats_per_token - exact) / result.standard_error)
    z = torch.tensor(scores)
    assert float(z[:20].abs().max()) < 3
    assert float(z.abs().max()) < 4
    assert 0.7 < float(z.std()) < 1.35
    assert abs(float(z.mean())) < 0.6


def test_counts_strata_and_samples_each_shrink_the_error() -> None:
    source = _source("markov", 64, 8)
    x = source.sample(512, torch.Generator().manual_seed(3))
    ways: dict[str, dict[str, Any]] = {
        "plain": {"sampling": "uniform", "masking": "independent"},
        "strata": {"masking": "independent"},
        "strata and counts": {},
        "and samples": {"samples": 4},
    }
    errors = [nelbo(source, _batches(x, 512), **options).standard_error or 0.0 for options in ways.values()]
    for larger, smaller in itertools.pairwise(errors):
        assert 0 < smaller < 0.95 * larger


def test_the_standard_error_is_that_of_a_ratio_over_groups() -> None:
    source = _source("markov", 6)
    x = source.sample(40, torch.Generator().manual_seed(3))
    maskable = torch.rand(40, 6, generator=torch.Generator().manual_seed(1)) < 0.7
    batch = Batch(x, maskable, torch.arange(40))
    for protocol, width in ((NelboProtocol(strata_rows=4), 4), (NelboProtocol(sampling="uniform"), 1)):
        sums = accumulate(source, [batch], protocol)
        total, tokens = sums.nats.reshape(-1, width).sum(1), sums.tokens.double().reshape(-1, width).sum(1)
        mean = total.sum() / tokens.sum()
        count = total.numel()
        variance = count / (count - 1) * ((total - mean * tokens) ** 2).sum() / tokens.sum() ** 2
        result = sums.result()
        assert result.nats_per_token == pytest.approx(float(mean))
        assert result.standard_error == pytest.approx(float(variance.sqrt()))
        assert result.tokens == int(maskable.sum())


def test_discrete_time_by_monte_carlo_is_larger() -> None:
    source = _source("copy", 6)
    x = source.sample(2000, torch.Generator().manual_seed(5))
    result = nelbo(source, _batches(x, 500), steps=1, masking="independent")
    assert result.nats_per_token == pytest.approx(2 * source.entropy() / 6, abs=4 * (result.standard_error or 0.0))
    fine = nelbo(source, _batches(x, 500), steps=512, masking="independent")
    smooth = nelbo(source, _batches(x, 500))
    assert smooth.nats_per_token < fine.nats_per_token + 0.01 < result.nats_per_token


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("masking", ["independent", "count"])
def test_the_training_loss_of_an_exact_model_is_the_entropy(schedule: str, masking: Any) -> None:
    """End to end: `Objective` on a model that emits the exact conditionals and a huge logit for the mask."""
    source = _source("markov", 6)
    rows = 4000
    x = source.sample(rows, torch.Generator().manual_seed(6))
    batch = next(_batches(x, rows))
    for eps, bias in ((0.0, 0.0), (1e-3, 2e-3)):
        objective = ObjectiveConfig(schedule=schedule, eps=eps, sampling="uniform", masking=masking).build(
            global_batch=rows, seed=2, mask_token_id=source.mask_token_id, num_tokens=source.num_tokens
        )
        noised = objective.noise(batch, 0)

        def model(input_ids: Tensor, logits_at: Tensor, **_: Any) -> SimpleNamespace:
            logits = source(input_ids, at=logits_at).clone()
            logits[:, source.mask_token_id] = 50.0
            return SimpleNamespace(logits=logits + 7.0)

        loss = float(objective.numerator(model, noised).loss / objective.denominator(noised))
        nll = torch.zeros(rows, 6, dtype=torch.float64)
        log_probs = source(noised.input_ids, at=noised.masked)
        nll[noised.masked] = -log_probs.gather(1, x[noised.masked][:, None]).squeeze(1)
        per_row = (nll * noised.weight).sum(1) / 6
        error = float(per_row.std()) / rows**0.5
        assert loss == pytest.approx(float(per_row.mean()), rel=1e-6)
        assert abs(loss - source.entropy() / 6) < 4 * error + bias
        assert error < 0.02


# --- what must not matter -----------------------------------------------------------------------------------------


def test_batch_size_and_number_of_processes_change_nothing() -> None:
    source = _source("markov", 6)
    x = source.sample(50, torch.Generator().manual_seed(3))
    protocol = NelboProtocol(samples=2, seed=4)
    whole = accumulate(source, _batches(x, 50), protocol).result()
    for size in (1, 7, 16):
        assert accumulate(source, _batches(x, size), protocol).result() == whole
    for world in (2, 3):
        parts = [accumulate(source, _batches(x, 5, world=world, rank=rank), protocol) for rank in range(world)]
        assert merge(parts).result() == whole
        assert merge(parts[::-1]).result() == whole


def _evaluate_one_process(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    source = _source("markov", 6)
    x = source.sample(50, torch.Generator().manual_seed(3))
    sums = accumulate(source, _batches(x, 4, world=world, rank=rank), NelboProtocol(seed=4))
    gathered: list[LikelihoodSums | None] = [None] * world
    torch.distributed.all_gather_object(gathered, sums)
    result = merge([part for part in gathered if part is not None]).result()
    Path(folder, f"{rank}.json").write_text(json.dumps(dataclasses.asdict(result)))
    torch.distributed.destroy_process_group()


def test_two_real_processes_report_what_one_would(tmp_path: Path) -> None:
    source = _source("markov", 6)
    x = source.sample(50, torch.Generator().manual_seed(3))
    one = accumulate(source, _batches(x, 50), NelboProtocol(seed=4)).result()
    mp.spawn(_evaluate_one_process, args=(2, str(tmp_path)), nprocs=2)
    for rank in range(2):
        assert Likelihood(**json.loads((tmp_path / f"{rank}.json").read_text())) == one


class Recorder:
    """A uniform denoiser that keeps what it was given."""

    def __init__(self, num_tokens: int = 9, mask_token_id: int = 8) -> None:
        self.num_tokens, self.mask_token_id, self.device = num_tokens, mask_token_id, torch.device("cpu")
        self.calls: list[tuple[Tensor, Tensor | None, Tensor | None, Tensor]] = []

    def __call__(
        self,
        tokens: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        assert at is not None
        self.calls.append((tokens, attention_mask, position_ids, at))
        log_probs = torch.full((int(at.sum()), self.num_tokens), -math.log(self.num_tokens - 1))
        log_probs[:, self.mask_token_id] = -math.inf
        return log_probs


def _plain_batch(rows: int = 8, seq: int = 5, start: int = 0) -> Batch:
    ids = torch.randint(0, 8, (rows, seq), generator=torch.Generator().manual_seed(rows))
    return Batch(ids, torch.ones(rows, seq, dtype=torch.bool), torch.arange(start, start + rows))


def test_every_evaluation_sees_the_same_masks() -> None:
    """Validation curves are comparable: the noise depends on the seed and the rows, not on the call."""
    first, second, other = Recorder(), Recorder(), Recorder()
    nelbo(first, [_plain_batch()], seed=1)
    nelbo(second, [_plain_batch()], seed=1)
    nelbo(other, [_plain_batch()], seed=2)
    assert torch.equal(first.calls[0][0], second.calls[0][0])
    assert not torch.equal(first.calls[0][0], other.calls[0][0])


def test_a_uniform_denoiser_scores_log_v_and_the_record_is_complete() -> None:
    table = torch.tensor([1, 2, 3, 1, 1, 1, 1, 4, 0])
    batches = [_plain_batch(8, 5, start) for start in range(0, 4000, 8)]
    denoiser = Recorder()
    result = nelbo(denoiser, batches, seed=3, samples=2, token_bytes=table, schedule="polynomial", schedule_power=3.0)
    assert result.standard_error is not None
    assert abs(result.nats_per_token - math.log(8)) < 4 * result.standard_error < 0.2
    size = sum(int(table[b.input_ids].sum()) for b in batches)
    assert result.bytes == size
    assert result.bits_per_byte == pytest.approx(result.nats_per_token * result.tokens / math.log(2) / size)
    assert result.perplexity_bound == pytest.approx(math.exp(result.nats_per_token))
    assert (result.tokens, result.sequences, result.nfe, len(denoiser.calls)) == (20_000, 4000, 8000, 1000)
    record = json.loads(json.dumps(dataclasses.asdict(result), allow_nan=False))
    assert record["schedule"] == "polynomial"
    assert record["schedule_power"] == 3.0
    assert record["context_length"] == 5
    assert record["precision"] == "float32"
    assert nelbo(Recorder(), batches[:2], total_bytes=77, precision="bf16").bytes == 77
    assert nelbo(Recorder(), batches[:2], precision="bfloat16 autocast").precision == "bfloat16 autocast"
    assert nelbo(Recorder(), batches[:2]).bits_per_byte is None


def test_masks_and_positions_of_the_batch_reach_the_denoiser() -> None:
    denoiser = Recorder()
    batch = dataclasses.replace(
        _plain_batch(),
        maskable=torch.tensor([True, False, True, True, False]).expand(8, 5),
        attention_mask=torch.ones(8, 5, dtype=torch.bool),
        position_ids=torch.tensor([0, 1, 0, 1, 2]).expand(8, 5),
    )
    result = nelbo(denoiser, [batch])
    tokens, attention_mask, position_ids, at = denoiser.calls[0]
    assert attention_mask is not None
    assert position_ids is not None
    assert torch.equal(attention_mask, torch.ones(8, 5, dtype=torch.bool))
    assert torch.equal(position_ids, batch.position_ids)  # type: ignore[arg-type]
    assert torch.equal(at, tokens == 8)
    assert not bool(at[:, [1, 4]].any())
    assert result.tokens == 24


def test_rows_and_batches_without_tokens_to_predict() -> None:
    """They add nothing, but the denoiser is called all the same: other processes may wait for it."""
    denoiser, full = Recorder(), _plain_batch()
    nothing = dataclasses.replace(_plain_batch(4, 5, 100), maskable=torch.zeros(4, 5, dtype=torch.bool))
    twice = dataclasses.replace(nothing, rows=torch.zeros(4, dtype=torch.long))
    assert nelbo(denoiser, [full, nothing, twice]) == nelbo(Recorder(), [full])
    assert len(denoiser.calls) == 3
    with pytest.raises(ValueError, match="no row has a maskable token"):
        nelbo(Recorder(), [nothing])
    with pytest.raises(ValueError, match="no batches"):
        nelbo(Recorder(), [])
    single = nelbo(Recorder(), [_plain_batch(1)])
    assert single.standard_error is None  # one group says nothing about the spread


def test_a_row_that_comes_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="row 0 was evaluated twice"):
        nelbo(Recorder(), [_plain_batch(), _plain_batch()])
    sums = accumulate(Recorder(), [_plain_batch()], NelboProtocol())
    with pytest.raises(ValueError, match="row 0 was evaluated twice"):
        merge([sums, sums]).result()
    with pytest.raises(ValueError, match="different protocols"):
        merge([sums, accumulate(Recorder(), [_plain_batch(start=8)], NelboProtocol(seed=1))])
    with pytest.raises(ValueError, match="nothing to merge"):
        merge([])


class Bad(Recorder):
    """Changes the uniform answer."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def __call__(self, tokens: Tensor, **options: Any) -> Tensor:
        answer: Tensor = self.change(super().__call__(tokens, **options))
        return answer


def test_answers_that_are_no_distribution_are_refused() -> None:
    """Symptom: the mask token can be predicted, or probabilities sum to more than one, and the bound is no bound."""
    for change, message in (
        (lambda x: x.clamp(min=-9.0), "mask token"),
        (lambda x: x + 0.1, "sum to"),
        (lambda x: x[:, :-1], "rows of 9 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            nelbo(Bad(change), [_plain_batch()])


def test_nan_and_impossible_tokens_show_in_the_result() -> None:
    def poison(value: float) -> Any:
        def change(x: Tensor) -> Tensor:
            x = x.clone()
            x[0, :8] = value
            return x

        return change

    assert math.isnan(nelbo(Bad(poison(math.nan)), [_plain_batch()]).nats_per_token)

    def certain_of_the_wrong_token(x: Tensor) -> Tensor:
        x = torch.full_like(x, -math.inf)
        x[:, 0] = 0.0
        return x

    result = nelbo(Bad(certain_of_the_wrong_token), [_plain_batch()])
    assert result.nats_per_token == math.inf
    assert result.perplexity_bound == math.inf


def test_protocols_that_cannot_be_right_are_refused() -> None:
    for options, message in (
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"sampling": "sobol"}, "unknown sampling"),
        ({"samples": 0}, "at least 1"),
        ({"strata_rows": 0}, "at least 1"),
        ({"eps": 1.0}, "eps"),
        ({"masking": "exact"}, "unknown masking"),
        ({"steps": 0}, "discrete time"),
        ({"steps": 4, "eps": 0.1}, "discrete time"),
        ({"steps": 4}, "masking='independent'"),
    ):
        with pytest.raises(ValueError, match=message):
            nelbo(Recorder(), [_plain_batch()], **options)
    table = torch.ones(9, dtype=torch.long)
    with pytest.raises(ValueError, match="not both"):
        nelbo(Recorder(), [_plain_batch()], token_bytes=table, total_bytes=5)
    with pytest.raises(ValueError, match="at least one byte"):
        nelbo(Recorder(), [_plain_batch()], total_bytes=0)


@pytest.mark.gpu
def test_a_denoiser_on_cuda_gives_the_number_of_the_cpu() -> None:
    source = _source("markov", 6)
    assert isinstance(source, MarkovSource)
    there = MarkovSource(source.initial.cuda(), source.transition.cuda(), 6)
    x = source.sample(50, torch.Generator().manual_seed(3))
    for masking in ("count", "independent"):
        protocol = NelboProtocol(masking=masking, samples=2)
        cpu, gpu = (accumulate(s, _batches(x, 16), protocol).result() for s in (source, there))
        assert gpu.nats_per_token == pytest.approx(cpu.nats_per_token, rel=1e-12)
        assert (gpu.tokens, gpu.nfe, gpu.precision) == (cpu.tokens, cpu.nfe, cpu.precision)
