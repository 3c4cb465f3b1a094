"""The search of the noise range: variances against fresh draws, the winner where it is known, any split the same."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from block_tools import MASK, objective, rows_batch
from model_tools import VOCAB, make_model
from torch import Tensor

from mdlm.data import Batch
from mdlm.noise_range import LEAST_UNITS, STEP, WIDTHS, LevelCosts, best_range, measure, merge, ranges, variance


def whole_rows(rows: int, seq: int, start: int = 0) -> Batch:
    clean = rows_batch(rows, seq, start)
    return replace(clean, maskable=torch.ones_like(clean.maskable))


class Levels:
    """A denoiser whose tokens cost as much as a function of the share of masked tokens in their row says."""

    def __init__(self, cost: Any) -> None:
        self.cost = cost

    def __call__(self, input_ids: Tensor, logits_at: Tensor, clean_ids: Any = None, **_: Any) -> SimpleNamespace:
        share = (input_ids == MASK).double().mean(1, keepdim=True).expand(input_ids.shape)
        clean = clean_ids if clean_ids is not None else torch.zeros_like(input_ids)
        right = torch.exp(-self.cost(share))[logits_at][:, None]
        logits = (torch.ones(int(logits_at.sum()), VOCAB) * ((1 - right) / (VOCAB - 2))).double().log()
        return SimpleNamespace(logits=logits.scatter(1, clean[logits_at][:, None], right.log()))


def test_the_grid_is_that_of_bd3_lm() -> None:
    found = ranges(0.0, 1.0)
    assert found[0] == (0.0, 1.0)
    assert len(found) == 1 + sum(round((1 - w) / STEP) + 1 for w in WIDTHS)
    assert {(0.0, 0.5), (0.45, 0.95), (0.3, 0.8), (0.5, 1.0), (0.1, 1.0)} <= set(found)
    assert len(set(found)) == len(found)
    assert ranges(0.2, 0.8) == [(0.2, 0.8), (0.2, 0.7), (0.25, 0.75), (0.3, 0.8)]
    assert {(1e-3, 0.5), (1e-3, 0.9), (0.45, 0.95)} <= set(ranges(1e-3, 1.0)), "eps cuts the ranges that begin at 0"


def test_variances_are_those_of_fresh_draws_from_the_narrow_range() -> None:
    """Every range's variance, read off one set of draws, against training noise of that range itself."""
    model = Levels(lambda share: 0.2 + 2.0 * share**2)
    loss = objective(8, 500)
    costs = measure(loss, model, [whole_rows(500, 16, 500 * i) for i in range(12)], "cpu")
    assert len(costs.numbers) == len(set(costs.numbers.tolist())) == 12000
    for eps, t_max in ((1e-3, 1.0), (0.3, 0.8), (0.5, 1.0)):
        narrow = replace(loss, eps=eps, t_max=t_max, sampling="uniform", seed=5)
        noised = narrow.noise(whole_rows(3000, 16), 0)
        per_block = (noised.weight.double() * narrow.token_nats(model, noised)).view(-1, 8).sum(1) / 8
        fresh = float(per_block.var())
        error = float((per_block - per_block.mean()).square().std()) / len(per_block) ** 0.5
        read = variance(replace(loss, eps=eps, t_max=t_max), costs)
        assert abs(read - fresh) < 6 * error, (eps, t_max)


@pytest.mark.parametrize("block_size", [4, None])
def test_the_range_is_found_whose_loss_varies_least(block_size: int | None) -> None:
    """Costs that explode outside (0.3, 0.8] and are 1 / weight inside: no other range of the grid is as quiet."""
    loss = objective(block_size, 256, eps=0.0)
    generator = torch.Generator().manual_seed(0)
    count = 4000
    times = (torch.arange(count) + 0.5) / count
    size = torch.full((count,), 16)
    masked = torch.full((count,), 8)
    wild = 1 + 50 * torch.rand(count, generator=generator)
    nats = torch.where((times > 0.3) & (times <= 0.8), times, times * wild).double()
    costs = LevelCosts(torch.arange(count), times.double(), size, masked, nats)
    chosen, value, own = best_range(loss, costs)
    assert (chosen.eps, chosen.t_max) == (0.3, 0.8)
    assert value < 1e-12 < own
    assert replace(chosen, eps=0.0, t_max=1.0) == loss, "nothing else is changed"


def test_the_own_range_is_kept_where_none_is_better_and_few_draws_decide_nothing() -> None:
    loss = objective(4, 8, eps=0.0)
    times = torch.linspace(0.01, 1.0, LEAST_UNITS + 8, dtype=torch.float64)
    some = torch.full((len(times),), 4)
    costs = LevelCosts(torch.arange(len(times)), times, some, torch.full_like(some, 2), torch.zeros_like(times))
    assert best_range(loss, costs)[0] == loss, "no range has any variance"
    assert variance(replace(loss, eps=0.5), costs) == math.inf


def test_any_split_of_the_text_gives_the_same_costs() -> None:
    model = make_model("sdpa", torch.float64, block_size=4).eval()
    loss = objective(4, 8)
    whole = measure(loss, model, [rows_batch(8, 12, packed=True)], "cpu")

    def share(rank: int) -> list[Batch]:
        clean = rows_batch(8, 12, packed=True)
        assert clean.position_ids is not None
        return [
            Batch(clean.input_ids[[i]], clean.maskable[[i]], clean.rows[[i]], None, clean.position_ids[[i]])
            for i in range(rank, 8, 2)
        ]

    parts = merge([measure(loss, model, share(1), "cpu"), measure(loss, model, share(0), "cpu")])
    whole = merge([whole])
    for name in LevelCosts.__dataclass_fields__:
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-9, atol=0)
    again = measure(replace(loss, eps=0.4, t_max=0.9), model, [rows_batch(8, 12)], "cpu")
    assert float(again.times.min()) > 0.4
    assert float(again.times.max()) <= 0.9


def test_measuring_leaves_no_gradient_and_the_training_noise_alone() -> None:
    model, loss = make_model("sdpa", block_size=4), objective(4, 8)
    before = loss.noise(rows_batch(8, 12), 0)
    costs = measure(loss, model, [rows_batch(8, 12)], "cpu")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.equal(costs.times, before.times), "another stream than the training noise"
    assert torch.equal(loss.noise(rows_batch(8, 12), 0).masked, before.masked)
