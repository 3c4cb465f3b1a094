"""The NELBO of models with blocks: exact for blocks of one, MDLM's for one block, the entropy for an exact model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import reference_block as rb
import torch
from block_tools import MASK, predictor, rows_batch
from model_tools import make_model
from reference import chain_table
from torch import Tensor

from mdlm.config import MDLMConfig
from mdlm.data import Batch
from mdlm.denoiser import FunctionDenoiser, ModelDenoiser
from mdlm.eval.likelihood import NelboProtocol, accumulate, merge, nelbo
from mdlm.eval.likelihood_block import block_noise
from mdlm.modeling import MDLMForMaskedLM
from mdlm.objective import ObjectiveConfig


def model_denoiser(block_size: int | None, shift: bool = False) -> ModelDenoiser:
    model = make_model("sdpa", torch.float64, block_size=block_size, shift_logits=shift, mask_token_id=MASK)
    return ModelDenoiser(model.eval())


@pytest.mark.parametrize("masking", ["count", "independent"])
@pytest.mark.parametrize("shift", [False, True], ids=["aligned", "shifted"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed"])
def test_blocks_of_one_token_give_the_exact_likelihood(masking: Any, shift: bool, packed: bool) -> None:
    """The chain rule, one run of the float64 reference per token, in every draw."""
    denoiser = model_denoiser(1, shift)
    batch = rows_batch(2, 8, packed=packed)
    total = 0.0
    for r in range(2):
        positions = list(range(8)) if batch.position_ids is None else batch.position_ids[r].tolist()
        documents = torch.tensor([p == 0 for p in positions]).cumsum(0).tolist()
        row = batch.input_ids[r].tolist(), positions, documents, batch.maskable[r].tolist()
        total += sum(rb.block_nll(predictor(denoiser.model), *row, MASK, 1).values())
    for seed in range(3):
        result = nelbo(denoiser, [batch], masking=masking, seed=seed)
        assert result.nats_per_token == pytest.approx(total / int(batch.maskable.sum()), rel=1e-7)  # float32 rotations
        assert result.block_size == 1


@pytest.mark.parametrize("masking", ["count", "independent"])
def test_one_block_is_the_likelihood_without_blocks(masking: Any) -> None:
    """The same times and masks, row by row."""
    batch = rows_batch(6, 8)
    whole = accumulate(model_denoiser(None), [batch], NelboProtocol(masking=masking, samples=2, strata_rows=2))
    block = accumulate(model_denoiser(8), [batch], NelboProtocol(masking=masking, samples=2, strata_rows=2))
    torch.testing.assert_close(block.nats, whole.nats, rtol=1e-12, atol=0)
    assert (whole.protocol.block_size, block.protocol.block_size) == (None, 8)


def test_neither_batches_nor_processes_change_the_number() -> None:
    denoiser, protocol = model_denoiser(4), NelboProtocol(samples=2)
    batch = rows_batch(8, 10, packed=True)
    whole = accumulate(denoiser, [batch], protocol).result()

    def part(at: slice) -> Batch:
        assert batch.position_ids is not None
        return Batch(batch.input_ids[at], batch.maskable[at], batch.rows[at], None, batch.position_ids[at])

    shares = [[part(slice(rank + 2 * i, rank + 2 * i + 1)) for i in range(4)] for rank in (0, 1)]
    again = merge([accumulate(denoiser, share, protocol) for share in shares]).result()
    assert again.nats_per_token == pytest.approx(whole.nats_per_token, rel=1e-12)
    assert again.standard_error == pytest.approx(whole.standard_error, rel=1e-9)


def test_levels_are_spread_over_all_blocks_of_a_group_of_rows_and_their_samples() -> None:
    """4 rows of 2 blocks of 8 tokens: every number of masks comes up once, over 2 samples twice."""
    ids = torch.ones(8, 16, dtype=torch.long)
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(8, 16))
    for samples in (1, 2):
        protocol = NelboProtocol(block_size=8, samples=samples)
        masked = torch.stack([block_noise(protocol, batch, sample, MASK)[0] for sample in range(samples)])
        counts = masked.view(samples, 2, 4 * 2, 8).sum(-1).transpose(0, 1).flatten(1)  # [group, blocks and samples]
        expected = torch.arange(1, 9).repeat_interleave(samples)
        assert torch.equal(counts.sort(dim=1).values, expected.expand(2, -1))


# --- a source whose probabilities are known: a Markov chain of six symbols ----------------------------------------

LENGTH, SYMBOLS = 6, 3
MASK_ID = SYMBOLS
TABLE = chain_table(np.array([0.6, 0.3, 0.1]), np.array([[0.8, 0.1, 0.1], [0.1, 0.2, 0.7], [0.3, 0.6, 0.1]]), LENGTH)
SEQUENCES = torch.tensor(list(TABLE))  # [729, 6]
PROBABILITIES = torch.tensor(list(TABLE.values()), dtype=torch.float64)
ENTROPY = -float((PROBABILITIES * PROBABILITIES.log()).sum())


@dataclass(frozen=True)
class ExactByBlocks:
    """p(token | clean blocks before, what is visible in its own); with `forgetful` its own block is not looked at."""

    block_size: int
    forgetful: bool = False
    mask_token_id: int = SYMBOLS
    num_tokens: int = SYMBOLS + 1
    device = torch.device("cpu")

    def __call__(self, tokens: Tensor, **_: Any) -> Tensor:
        raise AssertionError("a model with blocks was asked about whole rows")

    def by_blocks(
        self, tokens: Tensor, clean: Tensor, *, attention_mask: Any = None, position_ids: Any = None, at: Tensor
    ) -> Tensor:
        place = torch.arange(LENGTH)
        out = torch.full((*tokens.shape, self.num_tokens), -math.inf, dtype=torch.float64)
        for first in range(0, LENGTH, self.block_size):
            before, own = place < first, (place >= first) & (place < first + self.block_size)
            known = before | (own & (tokens != MASK_ID) & (not self.forgetful))
            seen = torch.where(before, clean, tokens)
            agrees = ((seen[:, None] == SEQUENCES) | ~known[:, None]).all(-1)  # [rows, sequences]
            weight = agrees * PROBABILITIES
            for symbol in range(SYMBOLS):
                mass = weight @ SEQUENCES.eq(symbol).double() / weight.sum(1, keepdim=True)
                out[:, own, symbol] = mass[:, own].log()
        return out[at]


def sample(rows: int, seed: int) -> Batch:
    drawn = torch.multinomial(PROBABILITIES, rows, True, generator=torch.Generator().manual_seed(seed))
    return Batch(SEQUENCES[drawn], torch.ones(rows, LENGTH, dtype=torch.bool), torch.arange(rows))


@pytest.mark.parametrize("block_size", [1, 2, 4, 6])
def test_an_exact_model_costs_what_the_text_is_worth_for_every_block_size(block_size: int) -> None:
    """Any order of the chain rule gives -log p(x): within 4 standard errors of the noise, on fixed texts."""
    batch = sample(8, 0)
    truth = [-math.log(TABLE[tuple(row)]) for row in batch.input_ids.tolist()]
    draws = torch.stack(
        [accumulate(ExactByBlocks(block_size), [batch], NelboProtocol(seed=s)).nats for s in range(200)]
    )
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - torch.tensor(truth, dtype=torch.float64)).abs() <= 4 * error + 1e-9).all()
    assert (float(error.max()) == 0) == (block_size == 1)


@pytest.mark.parametrize("block_size", [2, 4])
def test_the_standard_error_covers_the_entropy(block_size: int) -> None:
    """20 seeds of text and noise: all within 4 errors, about two thirds within one, and their spread is that error."""
    results = [nelbo(ExactByBlocks(block_size), [sample(96, s)], seed=s) for s in range(20)]
    z = torch.tensor([(r.nats_per_token - ENTROPY / LENGTH) / (r.standard_error or 0.0) for r in results])
    assert float(z.abs().max()) < 4
    assert 9 <= int((z.abs() < 1).sum()) <= 18
    assert 0.6 < float(z.std()) < 1.5


def test_a_model_that_forgets_its_block_costs_less_the_smaller_its_blocks() -> None:
    """sum of H(x_i | x before its block), in closed form; the estimate agrees within 4 standard errors."""
    costs = []
    for block_size in (1, 2, 3, 6):
        cost = 0.0
        for i in range(LENGTH):
            start = i // block_size * block_size
            joint: dict[tuple[int, ...], float] = {}
            past: dict[tuple[int, ...], float] = {}
            for x, p in TABLE.items():
                joint[(*x[:start], x[i])] = joint.get((*x[:start], x[i]), 0.0) + p
                past[x[:start]] = past.get(x[:start], 0.0) + p
            cost -= sum(p * math.log(p / past[key[:-1]]) for key, p in joint.items())
        costs.append(cost / LENGTH)
        result = nelbo(ExactByBlocks(block_size, forgetful=True), [sample(2000, 1)])
        assert result.standard_error is not None
        assert abs(result.nats_per_token - costs[-1]) < 4 * result.standard_error < 0.05
    assert costs[0] == pytest.approx(ENTROPY / LENGTH)
    assert costs == sorted(costs)
    assert costs[-1] - costs[0] > 0.2


def test_blocks_that_the_denoiser_does_not_have_are_refused() -> None:
    batch = rows_batch(2, 8)
    with pytest.raises(ValueError, match="blocks of 2, but ModelDenoiser has blocks of 4"):
        nelbo(model_denoiser(4), [batch], block_size=2)
    with pytest.raises(ValueError, match="ModelDenoiser has no blocks"):
        nelbo(model_denoiser(None), [batch], block_size=2)
    plain = FunctionDenoiser(lambda tokens: torch.zeros(*tokens.shape, 24), MASK, 24)
    with pytest.raises(ValueError, match="FunctionDenoiser has no blocks"):
        nelbo(plain, [batch], block_size=2)
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        replace(NelboProtocol(), block_size=0)


def chain_rows(rows: int, seed: int, transition: Tensor, length: int = 12) -> Batch:
    """Draws from a Markov chain that begins uniformly."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(len(transition), (rows, length), generator=generator)
    for i in range(1, length):
        x[:, i] = torch.multinomial(transition[x[:, i - 1]], 1, generator=generator)[:, 0]
    return Batch(x, torch.ones_like(x, dtype=torch.bool), torch.arange(rows) + 48 * seed)


def test_trained_models_cost_less_the_smaller_their_blocks() -> None:
    """Three tiny models, the same 150 steps on a chain of known entropy: 0.67 nats per token.

    Measured: 0.666 (blocks of 1), 0.777 (3), 0.842 (12), each with a standard error of 0.012, which they share: it is
    that of the text.
    """
    symbols, length, steps = 5, 12, 150
    transition = torch.softmax(2.5 * torch.randn(symbols, symbols, generator=torch.Generator().manual_seed(0)), 1)
    state, truth = torch.full((symbols,), 1 / symbols, dtype=torch.float64), math.log(symbols)
    for _ in range(1, length):
        truth -= float(state @ (transition * transition.log()).sum(1).double())
        state = state @ transition.double()
    costs = []
    for size in (1, 3, 12):
        torch.manual_seed(0)
        model = MDLMForMaskedLM(
            MDLMConfig(
                vocab_size=16, num_tokens=symbols + 1, hidden_size=24, num_hidden_layers=1, num_attention_heads=2,
                intermediate_size=48, mask_token_id=symbols, block_size=size,
            )
        )  # fmt: skip
        loss = ObjectiveConfig(masking="count").build(
            global_batch=48, seed=0, mask_token_id=symbols, num_tokens=symbols + 1, block_size=size
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 20) * (1 - step / steps)
            noised = loss.noise(chain_rows(48, 1000 + step, transition), step)
            (loss.numerator(model, noised).loss / loss.denominator(noised)).backward()
            optimizer.step()
            optimizer.zero_grad()
        costs.append(nelbo(ModelDenoiser(model.eval()), [chain_rows(512, 5, transition)], samples=8))
    means = [cost.nats_per_token for cost in costs]
    errors = [cost.standard_error or math.inf for cost in costs]
    assert max(errors) < 0.02
    assert abs(means[0] - truth / length) < 4 * errors[0]
    assert means[0] + 3 * errors[0] < means[1]
    assert means[1] + 3 * errors[1] < means[2]
