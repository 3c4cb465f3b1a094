"""No run of n tokens stands twice in an answer, also where several tokens of it are written at once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_tools import EOS, MASK, VOCAB, HashDenoiser
from torch import Tensor

from mdlm.denoiser import FunctionDenoiser
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.driver import Run, row_keys
from mdlm.samplers.generate import generate
from mdlm.samplers.ngrams import NoRepeatNgram
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.state import Step
from mdlm.samplers.strategy import Strategy


def repeated(tokens: list[int | None], n: int) -> int:
    """How many runs of n tokens stand in the row that stood further left already."""
    runs = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    whole = [run for run in runs if None not in run]
    return len(whole) - len(set(whole))


STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("threshold", {"threshold": 0.1, "block_length": None}),
    ("confidence", {"k": 5}),
    ("llada", {"steps": 3}),
    ("ancestral", {"steps": 4}),
    ("dus", {}),
    ("remdm", {"steps": 12, "eta": 0.4}),
    ("spans", {"budget": 5.0, "threshold": 0.1}),
]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(("name", "knobs"), STRATEGIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_written_twice(name: str, knobs: dict[str, Any], n: int, temperature: float) -> None:
    prompts = [[3, 4, 3, 4, 3], [5], []] if n > 1 else [[3], [5, 4], []]
    length = 14 if n > 1 else 5
    for seed in range(3):
        out = generate(
            HashDenoiser(3.0, seed), None, prompts, strategy=name, max_new_tokens=length, no_repeat_ngram=n,
            temperature=temperature, seed=seed, eos="ignore", **knobs,
        )  # fmt: skip
        for prompt, tokens in zip(prompts, out.tokens):
            assert MASK not in tokens[len(prompt) :].tolist()
            assert repeated(tokens.tolist(), n) == repeated(list(prompt), n)


def test_without_it_there_are_repetitions() -> None:
    """Else the test above would show nothing."""
    out = generate(HashDenoiser(3.0), None, [[3, 4]], strategy="confidence", k=5, max_new_tokens=14, eos="ignore")
    assert repeated(out.tokens[0].tolist(), 2) > 0


def test_two_positions_of_one_step_do_not_write_the_same_run() -> None:
    """Everything wants 5 5 5 5 5 5: no pair may stand twice, though no pair stands yet."""
    model = FunctionDenoiser(lambda t: torch.nn.functional.one_hot(torch.full_like(t, 5), VOCAB) * 9.0, MASK, VOCAB)
    out = generate(model, None, [[]], strategy="threshold", max_new_tokens=6, no_repeat_ngram=2, eos="ignore")
    tokens = out.tokens[0].tolist()
    assert repeated(tokens, 2) == 0
    assert (5, 5) in itertools.pairwise(tokens), "once is allowed"


@settings(max_examples=150, deadline=None)
@given(
    row=st.lists(st.one_of(st.none(), st.integers(1, 4)), min_size=1, max_size=9).filter(lambda r: None in r),
    n=st.integers(1, 4),
)
def test_what_is_forbidden_is_what_would_repeat(row: list[int | None], n: int) -> None:
    """By trying every token at every open position."""
    tokens = torch.tensor([[MASK if token is None else token for token in row]])
    open_ = torch.tensor([[token is None for token in row]])
    state = Run(HashDenoiser(), Canvas(tokens, open_, torch.tensor([len(row)])), Strategy(), row_keys(0, 1)).state
    step = Step(state, open_, open_, MASK, at=open_)
    step.log_probs = torch.zeros(int(open_.sum()), VOCAB)
    got = NoRepeatNgram(n)(step.log_probs, step) == -torch.inf
    for number, place in enumerate(i for i, token in enumerate(row) if token is None):
        for token in range(VOCAB):
            tried = [*row[:place], token, *row[place + 1 :]]
            assert bool(got[number, token]) == (repeated(tried, n) > repeated(row, n)), (place, token)


@pytest.mark.parametrize(("name", "knobs"), STRATEGIES)
def test_0_is_no_rule_and_a_length_that_cannot_repeat_changes_nothing(name: str, knobs: dict[str, Any]) -> None:
    options = {"strategy": name, "max_new_tokens": 8, "temperature": 1.0, "eos": "ignore", **knobs}
    plain = generate(HashDenoiser(), None, [[3], [4, 5]], **options)
    for n in (0, 11):
        same = generate(HashDenoiser(), None, [[3], [4, 5]], no_repeat_ngram=n, **options)
        assert [row.tolist() for row in same.tokens] == [row.tolist() for row in plain.tokens]
        assert [row.tolist() for row in same.step_map] == [row.tolist() for row in plain.step_map]


def test_it_goes_with_the_penalty_and_rows_do_not_see_each_other() -> None:
    options = {"strategy": "confidence", "k": 4, "max_new_tokens": 9, "repetition_penalty": 1.3, "no_repeat_ngram": 2}
    together = generate(HashDenoiser(4.0), None, [[3, 4], [5], [6, 6, 2]], seed=[1, 2, 3], eos="ignore", **options)
    for number, prompt in enumerate(([3, 4], [5], [6, 6, 2])):
        alone = generate(HashDenoiser(4.0), None, [prompt], seed=[number + 1], eos="ignore", **options)
        assert torch.equal(alone.tokens[0], together.tokens[number])
        assert repeated(alone.tokens[0].tolist(), 2) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"no_repeat_ngram": -1}, "no_repeat_ngram is -1; it must be 1 or more"),
        ({"no_repeat_ngram": 2, "strategy": "t2t"}, "no_repeat_ngram looks at commits, but this strategy also edits"),
    ],
)
def test_what_makes_no_sense_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(HashDenoiser(), None, [[3]], max_new_tokens=4, eos_token_id=EOS, **options)


def test_a_step_of_a_strategy_object_keeps_its_own_admission() -> None:
    seen: list[int] = []

    def admit(step: Step, row: Tensor, *rest: Tensor) -> Tensor:
        seen.append(len(row))
        return torch.ones_like(row, dtype=torch.bool)

    strategy = Strategy(select=build_strategy("confidence", k=3).select, admit=admit)
    generate(HashDenoiser(), None, [[3]], strategy=strategy, max_new_tokens=6, no_repeat_ngram=2, eos="ignore")
    assert seen
