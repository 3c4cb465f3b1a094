"""Classifier-free guidance: its formula, its costs, its limits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transform_tools import MASK, VOCAB, Watched, each_strategy, same

from mdlm.denoiser import Denoiser, FunctionDenoiser
from mdlm.eval.sources import TabularSource
from mdlm.samplers import Canvas, generate, stream
from mdlm.samplers.cache import Feeder, WholeCanvas
from mdlm.samplers.guidance import Guided, guided_log_probs
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.state import State

# Guidance


@given(st.integers(0, 10**6), st.floats(0, 5))
@settings(max_examples=30, deadline=None)
def test_both_printed_forms_of_guidance_are_what_is_computed(seed: int, weight: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    c, u = torch.randn(2, 3, 7, dtype=torch.float64, generator=generator).mul(3).log_softmax(dim=-1)
    guided = guided_log_probs(c, u, weight)
    for row in range(3):
        for form in (
            [float(u[row, t] + (weight + 1) * (c[row, t] - u[row, t])) for t in range(7)],
            [float(c[row, t] + weight * (c[row, t] - u[row, t])) for t in range(7)],
        ):
            total = math.log(sum(math.exp(x) for x in form))
            assert guided[row].tolist() == pytest.approx([x - total for x in form], abs=1e-9)


@pytest.mark.parametrize("weight", [0.25, 1.0, 4.0])
def test_no_nan_from_inf_minus_inf_at_the_mask_id_under_guidance(weight: float) -> None:
    c = torch.tensor([0.5, 0.3, 0.2, 0.0]).log()[None]
    u = torch.tensor([0.2, 0.3, 0.5, 0.0]).log()[None]
    probs = guided_log_probs(c, u, weight)[0].exp()
    expected = torch.tensor([0.5 ** (1 + weight) / 0.2**weight, 0.3, 0.2 ** (1 + weight) / 0.5**weight, 0.0])
    torch.testing.assert_close(probs, expected / expected.sum())


def test_a_token_that_only_the_unconditional_branch_excludes_takes_the_mass_that_its_limit_has() -> None:
    c = torch.tensor([0.5, 0.2, 0.3, 0.0, 0.0]).log()[None]
    u = torch.tensor([0.0, 0.0, 0.4, 0.6, 0.0]).log()[None]
    expected = torch.tensor([0.25, 0.04, 0.0, 0.0, 0.0]) / 0.29
    torch.testing.assert_close(guided_log_probs(c, u, 1.0)[0].exp(), expected)


def test_guidance_is_exact_on_a_source_with_known_conditionals() -> None:
    source = TabularSource.random(3, 4, torch.Generator().manual_seed(5))
    canvas = Canvas.from_prompts([[2, 1]], 1)
    run = stream(source, None, canvas, strategy="first_hitting", guidance=1.5, eos="ignore")
    last = list(run)[-1]
    token = int(last.tokens[0, 2])
    c = source.joint[2, 1] / source.joint[2, 1].sum()
    u = source.joint.sum(dim=(0, 1))
    law = c**2.5 / u**1.5
    assert float(last.log_probs[0, 2]) == pytest.approx(float((law / law.sum()).log()[token]), abs=1e-12)


@each_strategy
def test_guidance_of_weight_0_is_no_guidance_and_costs_one_evaluation(name: str, knobs: dict[str, Any]) -> None:
    prompts, base = [[1, 2], [3]], build_strategy(name, **knobs)
    plain = generate(Watched(), None, prompts, strategy=base, max_new_tokens=6)
    off = dataclasses.replace(base, cache=Guided(0.0, base.cache))
    assert same(plain, generate(Watched(), None, prompts, strategy=off, max_new_tokens=6))
    assert same(plain, generate(Watched(), None, prompts, strategy=base, max_new_tokens=6, guidance=0.0))


@each_strategy
def test_guidance_counts_what_the_model_was_really_asked(name: str, knobs: dict[str, Any]) -> None:
    watched = Watched()
    out = generate(watched, None, [[1, 2, 3], [4], []], strategy=name, max_new_tokens=5, guidance=2.0, **knobs)
    lengths = [8, 6, 5]
    calls = torch.zeros(3, dtype=torch.int64)
    for tokens, mask in watched.calls:
        width = tokens.shape[1] if mask is None else None
        for real in [width] * len(tokens) if mask is None else mask.sum(dim=-1).tolist():
            calls[lengths.index(real)] += 1
    assert out.nfe.tolist() == out.forwards.tolist() == calls.tolist()
    assert bool((out.nfe % 2 == 0).all())
    assert out.tokens_fed.tolist() == (calls * torch.tensor(lengths)).tolist()


def test_the_unconditional_branch_has_every_given_token_masked_and_keeps_what_is_written() -> None:
    watched = Watched()
    canvas = Canvas.from_rows(
        [torch.tensor([1, MASK, 0, 0, 3]), torch.tensor([5, 0])],
        [torch.tensor([False, False, True, True, False]), torch.tensor([False, True])],
    )
    frames = list(stream(watched, None, canvas, strategy="confidence", guidance=1.0, eos="ignore"))
    for step, frame in enumerate(frames[:-1]):
        (c, mask), (u, other) = watched.calls[2 * step : 2 * step + 2]
        assert torch.equal(c[0], frame.tokens[0])
        assert u[0].tolist() == [MASK, MASK, int(c[0, 2]), int(c[0, 3]), MASK]
        assert (mask is None) == (other is None)
        if len(c) == 2:
            assert mask is not None
            assert torch.equal(mask, other)
            assert u[1].tolist() == [MASK, MASK, *c[1, 2:].tolist()], "padding stays as it is"


def test_llada_8_guidance_works_without_an_attention_mask() -> None:
    watched = Watched()
    generate(watched, None, [[1, 2], [3, 4]], strategy="llada", steps=3, max_new_tokens=4, guidance=1.0)
    assert watched.calls
    assert all(mask is None for _, mask in watched.calls)

    def blind(tokens: Tensor) -> Tensor:
        return (
            torch.nn.functional.one_hot(tokens, VOCAB).float().sum(dim=1, keepdim=True).expand(-1, tokens.shape[1], -1)
        )

    denoiser = FunctionDenoiser(blind, MASK, VOCAB)  # refuses any padding
    out = generate(denoiser, None, [[1, 2], [3, 4]], strategy="llada", steps=3, max_new_tokens=4, guidance=1.0)
    assert out.new_tokens.tolist() == [4, 4]


@each_strategy
def test_a_guided_row_does_not_depend_on_its_batch(name: str, knobs: dict[str, Any]) -> None:
    prompts, seeds = [[1, 2, 3], [4], [5, 6]], [7, 8, 9]
    options: dict[str, Any] = {
        "strategy": name,
        "max_new_tokens": 5,
        "guidance": 1.5,
        "repetition_penalty": 2.0,
        **knobs,
    }
    together = generate(Watched(), None, prompts, seed=seeds, **options)
    for row in range(3):
        alone = generate(Watched(), None, prompts[row : row + 1], seed=seeds[row : row + 1], **options)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert int(alone.nfe[0]) == int(together.nfe[row])


class Logged:
    """A cache policy whose feeders remember the tokens they saw: state that branches must not share."""

    def __init__(self) -> None:
        self.feeders: list[LoggedFeeder] = []

    def start(self, denoiser: Denoiser) -> Feeder:
        self.feeders.append(LoggedFeeder(WholeCanvas(denoiser)))
        return self.feeders[-1]


@dataclasses.dataclass
class LoggedFeeder:
    base: WholeCanvas
    seen: list[Tensor] = dataclasses.field(default_factory=list)
    kept: list[int] = dataclasses.field(default_factory=list)

    def __call__(self, state: State, tokens: Tensor, at: Tensor, window: Tensor) -> Tensor:
        self.seen.append(tokens)
        return self.base(state, tokens, at, window)

    def keep(self, rows: Tensor) -> None:
        self.kept.append(len(rows))


def test_dllm_cache_branches_of_guidance_share_no_cache() -> None:
    policy = Logged()
    base = dataclasses.replace(build_strategy("threshold", threshold=0.0), cache=policy)
    plain = generate(
        Watched(), None, [[1, 2], [3]], strategy="threshold", threshold=0.0, max_new_tokens=5, guidance=1.0
    )
    out = generate(Watched(), None, [[1, 2], [3]], strategy=base, max_new_tokens=5, guidance=1.0)
    assert same(plain, out)
    conditional, unconditional = policy.feeders
    assert conditional.kept == unconditional.kept
    assert conditional.kept[-1] == 0
    assert all(t[0, 0] == 1 for t in conditional.seen)
    assert all(t[0, 0] == MASK for t in unconditional.seen)


@pytest.mark.parametrize("weight", [-0.1, math.inf, math.nan])
def test_guidance_out_of_range_is_an_error(weight: float) -> None:
    with pytest.raises(ValueError, match="must be 0"):
        generate(Watched(), None, [[1]], guidance=weight)
