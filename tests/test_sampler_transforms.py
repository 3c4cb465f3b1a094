"""Guidance, repetition penalty, suppressed tokens, and the strategy that a model's `generation_config` stores."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transform_tools import MASK, VOCAB, Watched, each_strategy, same

from mdlm.denoiser import FunctionDenoiser, LogitsModelDenoiser
from mdlm.samplers import Canvas, generate
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.revise import Revision
from mdlm.samplers.state import State, Step
from mdlm.samplers.transforms import OncePerStep, RepetitionPenalty

# Repetition penalty


def test_the_penalty_divides_the_probability_of_what_the_row_holds() -> None:
    plain, changed = [], []
    canvas = Canvas.from_rows(
        [torch.tensor([1, 4, 0, 7]), torch.tensor([2, 0])],
        [torch.tensor([False, False, True, False]), torch.tensor([False, True])],
    )

    def uneven(tokens: Tensor) -> Tensor:
        return torch.arange(VOCAB).double().mul(0.3).expand(*tokens.shape, VOCAB)

    denoiser = FunctionDenoiser(uneven, MASK, VOCAB, ragged_ok=True)
    weights = [math.exp(0.3 * token) for token in range(MASK)]
    for row, held in enumerate([{1, 4, 7}, {2}]):  # row 1 is padded with 0, which it does not hold
        penalised = [w / 3 if token in held else w for token, w in enumerate(weights)]
        changed.append([math.log(w / sum(penalised)) for w in penalised])
        plain.append(math.log(max(weights) / sum(weights)))
        out = generate(denoiser, None, canvas, strategy="confidence", repetition_penalty=3.0, eos="ignore")
        position = [2, 1][row]
        token = int(out.tokens[row][position])
        assert token == max(range(MASK), key=lambda t: changed[row][t])
        assert float(out.log_probs[row][position]) == pytest.approx(changed[row][token], abs=1e-12)


@each_strategy
def test_a_penalty_of_1_is_none(name: str, knobs: dict[str, Any]) -> None:
    options: dict[str, Any] = {"strategy": name, "max_new_tokens": 6, **knobs}
    plain = generate(Watched(), None, [[1], [2, 3]], **options)
    assert same(plain, generate(Watched(), None, [[1], [2, 3]], repetition_penalty=1.0, **options))


def the_the(tokens: Tensor) -> Tensor:
    """Every position wants 3 ("the") most, then 5, then 7."""
    logits = torch.zeros(*tokens.shape, VOCAB)
    logits[..., 3], logits[..., 5], logits[..., 7] = 6.0, 5.0, 4.0
    return logits


def test_the_the_two_positions_of_one_step_do_not_both_pick_a_token_that_the_penalty_forbids() -> None:
    denoiser = FunctionDenoiser(the_the, MASK, VOCAB)
    options: dict[str, Any] = {"strategy": "confidence", "k": 3, "max_new_tokens": 3}
    bug = dataclasses.replace(build_strategy("confidence", k=3), transforms=(RepetitionPenalty(1e6),))
    assert generate(denoiser, None, [[1]], strategy=bug, max_new_tokens=3).tokens[0].tolist() == [1, 3, 3, 3]
    out = generate(denoiser, None, [[1]], repetition_penalty=1e6, **options)
    assert out.tokens[0].tolist() == [1, 3, 5, 7]
    assert out.step_map[0].tolist() == [-1, 0, 1, 2]
    held = generate(denoiser, None, [[3, 5]], repetition_penalty=1.5, **options)
    assert held.tokens[0].tolist() == [3, 5, 3, 3, 3], "a mild penalty on a token already there is seen by all"
    assert held.nfe.tolist() == [1]


class Witness:
    """A reviser that changes nothing and notes what it was told."""

    reads_decided, max_edits = False, 1

    def __init__(self) -> None:
        self.told: list[list[bool]] = []

    def pending(self, state: State) -> Tensor:
        return torch.zeros_like(state.rows, dtype=torch.bool)

    def __call__(self, step: Step, committed: Tensor) -> Revision:
        self.told += committed.tolist()
        return Revision()


def test_revisers_are_told_what_was_written_not_what_was_chosen() -> None:
    witness = Witness()
    strategy = dataclasses.replace(build_strategy("confidence", k=3), revise=witness)
    denoiser = FunctionDenoiser(the_the, MASK, VOCAB)
    generate(denoiser, None, [[1]], strategy=strategy, max_new_tokens=3, repetition_penalty=1e6)
    expected = [[False, place == 1, place == 2, place == 3] for place in (1, 2, 3)]
    assert witness.told == expected


@each_strategy
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_escapes_a_harsh_penalty_whatever_the_strategy(
    name: str, knobs: dict[str, Any], temperature: float
) -> None:
    for seed in range(5):
        out = generate(
            Watched(0.02, seed),
            None,
            [[1, 2], [3]],
            strategy=name,
            seed=seed,
            max_new_tokens=8,
            repetition_penalty=1e12,
            temperature=temperature,
            **knobs,
        )
        for row in out.tokens:
            assert len(set(row.tolist())) == len(row)
        assert bool((out.nfe <= 8).all())


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(-3, 0)), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_one_step_admits_the_most_probable_commit_of_each_new_token(commits: list[tuple[int, int, int]]) -> None:
    commits = sorted(commits, key=lambda c: c[0])
    row = torch.tensor([c[0] for c in commits])
    tokens = torch.tensor([c[1] for c in commits])
    log_probs = torch.tensor([float(c[2]) for c in commits], dtype=torch.float64)
    state = SimpleNamespace(
        tokens=torch.tensor([[0, 9], [1, 9]]),
        masked=torch.tensor([[False, True], [False, True]]),
        lengths=torch.tensor([2, 1]),
    )
    step: Any = SimpleNamespace(state=state, log_probs=torch.zeros(1, 10))
    stay = OncePerStep()(step, row, torch.arange(len(commits)), tokens, log_probs)
    expected = []
    for index, (r, token, value) in enumerate(commits):
        rivals = [(-c[2], i) for i, c in enumerate(commits) if c[:2] == (r, token)]
        expected.append(token == r or (-value, index) == min(rivals))
    assert stay.tolist() == expected


@pytest.mark.parametrize("penalty", [0.9, 0.0, math.inf, math.nan])
def test_a_penalty_out_of_range_is_an_error(penalty: float) -> None:
    with pytest.raises(ValueError, match="must be 1"):
        generate(Watched(), None, [[1]], repetition_penalty=penalty)


# Suppressed tokens


class Successor(nn.Module):
    """Logits at i are sure of token i + 1, one more than token i (mod 6): a converted causal model, shifted."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        place = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        logits = torch.nn.functional.one_hot((input_ids[:, :1] + place + 1) % 6, VOCAB).float() * 5
        logits[..., 8] = 2.0
        return SimpleNamespace(logits=logits)


def test_dllm_37_tokens_are_suppressed_after_the_shift() -> None:
    denoiser = LogitsModelDenoiser(Successor(), MASK, VOCAB, shift=True)
    options: dict[str, Any] = {"strategy": "threshold", "max_new_tokens": 4}
    assert generate(denoiser, None, [[1, 2]], **options).tokens[0].tolist() == [1, 2, 3, 4, 5, 0]
    out = generate(denoiser, None, [[1, 2]], suppress_tokens=[4], **options)
    assert out.tokens[0].tolist() == [1, 2, 3, 8, 5, 0]
    first = generate(denoiser, None, [[1, 2], [1]], begin_suppress_tokens=[3, 4], **options)
    assert first.tokens[0].tolist() == [1, 2, 8, 4, 5, 0], "only the first answer position, not the one before or after"
    assert first.tokens[1].tolist() == [1, 2, 3, 4, 5]


@each_strategy
@pytest.mark.parametrize("guidance", [0.0, 2.0])
def test_what_is_suppressed_stays_so_under_guidance_and_penalty(
    name: str, knobs: dict[str, Any], guidance: float
) -> None:
    banned = [0, 2, 4, 6, 8, 10]
    out = generate(
        Watched(),
        None,
        [[2], [1, 4]],
        strategy=name,
        temperature=1.5,
        max_new_tokens=9,
        suppress_tokens=banned,
        begin_suppress_tokens=[1, 3],
        repetition_penalty=5.0,
        guidance=guidance,
        **knobs,
    )
    for row, prompt in zip(out.tokens, (1, 2)):
        assert not set(row[prompt:].tolist()) & {*banned, MASK}
        assert int(row[prompt]) not in (1, 3)


@pytest.mark.parametrize("argument", ["suppress_tokens", "begin_suppress_tokens"])
@pytest.mark.parametrize("token", [-1, VOCAB])
def test_ids_that_do_not_exist_cannot_be_suppressed(argument: str, token: int) -> None:
    with pytest.raises(ValueError, match=r"do not exist; the model knows 0 \.\. 12"):
        generate(Watched(), None, [[1]], **{argument: [3, token]})


def test_a_list_that_suppresses_everything_says_so() -> None:
    with pytest.raises(ValueError, match="allow more tokens"):
        generate(Watched(), None, [[1]], suppress_tokens=list(range(MASK)))
