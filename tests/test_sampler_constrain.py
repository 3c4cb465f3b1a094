"""Constrained unmasking against brute force over all strings, and its promise that every answer is accepted."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import pytest
import torch
from constrain_tools import (
    EOS,
    MASK,
    PATTERNS,
    STRATEGIES,
    VOCAB,
    accepted_strings,
    automaton,
    each_strategy,
    matches,
    random_model,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from mdlm.denoiser import FunctionDenoiser
from mdlm.samplers import Canvas, Generation, generate
from mdlm.samplers.automaton import token_automaton
from mdlm.samplers.constrain import Constraint
from mdlm.samplers.draw import Draw
from mdlm.samplers.driver import Run, row_keys
from mdlm.samplers.edit import EditTokens
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.select import TopK
from mdlm.samplers.state import Step
from mdlm.samplers.stop import EosStop
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.windows import Blocks

# The dynamic programme against brute force


class Checked(Run):
    """A run that compares every step with brute force over all strings of the answer."""

    pattern = ""
    ends: tuple[int, ...] = (EOS,)
    prompt_lengths: list[int] = []  # noqa: RUF012 - set by the test
    steps_checked = 0

    def _draw(self, step: Step) -> Tensor:
        tokens = super()._draw(step)
        assert self.paths is not None
        state, rows = self.state, step.index[0]
        for row in range(len(state.rows)):
            start, end = self.prompt_lengths[int(state.rows[row])], int(state.lengths[row])
            fixed = [None if m else int(t) for t, m in zip(state.tokens[row, start:end], state.masked[row, start:end])]
            strings = accepted_strings(self.pattern, fixed, self.ends)
            mine = (rows == row).nonzero()[:, 0].tolist()
            places = [int(step.index[1][i]) - start for i in mine]
            raw = {place: self.paths.raw[i].double().tolist() for place, i in zip(places, mine)}
            weights: dict[tuple[int, ...], float] = {}
            for string in strings:
                seen = tuple(string[place] for place in places)
                weights[seen] = sum(raw[place][string[place]] for place in places)
            drawn = tuple(int(tokens[i]) for i in mine)
            assert drawn in weights, "what is drawn cannot be completed to an accepted answer"
            if self.strategy.draw.temperature == 0:
                assert weights[drawn] == pytest.approx(max(weights.values()), abs=1e-5)
            if not self.strategy.select.blind:
                total = math.log(sum(math.exp(w) for w in weights.values()))
                for nth, i in enumerate(mine):
                    law = [0.0] * VOCAB
                    for seen, weight in weights.items():
                        law[seen[nth]] += math.exp(weight - total)
                    assert step.log_probs[i].exp().tolist() == pytest.approx(law, abs=1e-5)
        self.steps_checked += 1
        return tokens


@given(
    pattern=st.sampled_from(PATTERNS),
    strategy=st.sampled_from(STRATEGIES),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.3, 2.0, 8.0]),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    ends=st.sampled_from([(EOS,), ()]),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_every_step_is_the_brute_force_answer_over_all_strings(
    pattern: str,
    strategy: tuple[str, dict[str, Any]],
    seed: int,
    scale: float,
    temperature: float,
    ends: tuple[int, ...],
    lengths: list[int],
) -> None:
    lengths = [n for n in lengths if accepted_strings(pattern, [None] * n, ends)]
    if not lengths:
        return
    base = build_strategy(strategy[0], **strategy[1])
    base = dataclasses.replace(base, draw=dataclasses.replace(base.draw, temperature=temperature))
    stop = (EosStop(ends),) if ends else ()
    full = dataclasses.replace(base, constraint=Constraint(automaton(pattern, ends)), stop=stop)
    prompts = [[1] * (row % 2) for row in range(len(lengths))]
    canvas = Canvas.from_prompts(prompts, lengths)
    run = Checked(random_model(seed, scale), canvas, full, row_keys(seed, len(canvas)))
    run.pattern, run.ends, run.prompt_lengths = pattern, ends, [len(p) for p in prompts]
    while not run.done:
        run.advance()
    assert run.steps_checked
    frame = run.frame()
    for row, prompt in enumerate(prompts):
        tokens = frame.tokens[row, len(prompt) : int(frame.ends[row])].tolist()
        assert matches(pattern, tokens, ends), (pattern, tokens)


@pytest.mark.parametrize(("pattern", "temperature"), [("(ab|b)+1?", 1.0), ("[ab]*1[ab]*", 0.7), ("é*a?b*", 1.4)])
@pytest.mark.parametrize("before", [True, False])
def test_what_is_drawn_at_once_has_the_law_of_the_product_given_the_pattern(
    pattern: str, temperature: float, before: bool
) -> None:
    model, rows = random_model(3, 0.7), 6000
    strategy = Strategy(
        select=TopK(9),
        draw=Draw(temperature=temperature, before_select=before),
        constraint=Constraint(automaton(pattern)),
    )
    canvas = Canvas.from_prompts([[0]] * rows, 3)
    run = Run(model, canvas, strategy, row_keys(5, rows))
    run.advance()
    assert run.done
    counts = Counter(tuple(row) for row in run.frame().tokens[:, 1:].tolist())
    log_probs = model(torch.tensor([[0, MASK, MASK, MASK]]))[0, 1:].double() / temperature
    strings = accepted_strings(pattern, [None] * 3)
    law = torch.tensor([sum(float(log_probs[i, t]) for i, t in enumerate(s)) for s in strings]).softmax(dim=0)
    common = law * rows >= 5
    expected = torch.cat([law[common], law[~common].sum()[None]]) * rows
    found = [counts[s] for s, often in zip(strings, common) if often]
    found.append(rows - sum(found))
    keep = expected > 0
    assert sum(counts[s] for s in strings) == rows
    assert stats.chisquare(torch.tensor(found)[keep], expected[keep], sum_check=False).pvalue > 1e-4


# Every output is accepted


@each_strategy
@pytest.mark.parametrize("temperature", [0.0, 0.2, 3.0])
@pytest.mark.parametrize("eos", ["stop", "defer"])
def test_parallel_commits_are_accepted_at_every_temperature(
    name: str, knobs: dict[str, Any], temperature: float, eos: str
) -> None:
    base = build_strategy(name, **knobs)
    if eos == "defer" and base.select.blind:
        return
    for number, pattern in enumerate(["(ab|1)+b", "é+(a|é)*", "[^1]*11", "((a|b)1?){2,9}"]):
        strategy = dataclasses.replace(base, constraint=Constraint(automaton(pattern)))
        out = generate(
            random_model(number),
            None,
            [[EOS, MASK], [1], []],
            strategy=strategy,
            max_new_tokens=11,
            temperature=temperature,
            eos=eos,  # type: ignore[arg-type]
            eos_token_id=EOS,
            seed=number,
        )
        for row, prompt in zip(out.tokens, (2, 1, 0)):
            assert matches(pattern, row[prompt:].tolist()), (pattern, row)


@pytest.mark.parametrize(
    "options",
    [{"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}, {"temperature": 1e-3}, {"temperature": 50.0}],
)
def test_truncation_gives_way_where_it_would_leave_no_accepted_answer(options: dict[str, Any]) -> None:
    strategy = Strategy(select=TopK(4), constraint=Constraint(automaton("(ab|b)+1")))
    for seed in range(10):
        out = generate(
            random_model(seed, 6.0),
            None,
            [[1], [3]],
            strategy=strategy,
            max_new_tokens=8,
            eos_token_id=EOS,
            **{"temperature": 1.0, **options},
        )
        assert all(matches("(ab|b)+1", row[1:].tolist()) for row in out.tokens)


def test_a_very_unlikely_answer_is_found_though_its_probability_underflows() -> None:
    def sure(tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, VOCAB)
        logits[..., 0], logits[..., 1] = 150.0, -150.0
        return logits

    model = FunctionDenoiser(sure, MASK, VOCAB)
    for temperature in (0.0, 1.0, 0.1):
        strategy = Strategy(select=TopK(7), constraint=Constraint(automaton("b{40}")))
        out = generate(model, None, [[]], strategy=strategy, max_new_tokens=40, temperature=temperature, eos="ignore")
        assert out.tokens[0].tolist() == [1] * 40


def test_penalty_guidance_suppression_and_constraint_hold_together() -> None:
    strategy = dataclasses.replace(
        build_strategy("threshold", threshold=0.0, block_length=4), constraint=Constraint(automaton("[ab1]*1[ab]*"))
    )
    for seed in range(10):
        out = generate(
            random_model(seed),
            None,
            [[1], [3, 0]],
            strategy=strategy,
            max_new_tokens=8,
            temperature=1.0,
            eos_token_id=EOS,
            suppress_tokens=[2],
            guidance=1.0,
            repetition_penalty=4.0,
        )
        for row, prompt in zip(out.tokens, (1, 2)):
            assert 2 not in row[prompt:]
            assert matches("[ab1]*1[ab]*", row[prompt:].tolist())


def test_only_the_answer_is_constrained_not_a_hole_before_given_text() -> None:
    canvas = Canvas.from_rows(
        [torch.tensor([3, 0, 0, 3, 0, 0, 0])], [torch.tensor([False, True, True, False, True, True, True])]
    )

    def ones(tokens: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(torch.full_like(tokens, 3), VOCAB).float()

    strategy = Strategy(select=TopK(2), constraint=Constraint(automaton("a*", ())))
    out = generate(FunctionDenoiser(ones, MASK, VOCAB), None, canvas, strategy=strategy, eos="ignore")
    assert out.tokens[0].tolist() == [3, 3, 3, 3, 0, 0, 0]


# Laws of every component


def same(a: Generation, b: Generation) -> bool:
    rows = zip((*a.tokens, *a.step_map, *a.log_probs), (*b.tokens, *b.step_map, *b.log_probs))
    return torch.equal(a.nfe, b.nfe) and all(torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0)) for x, y in rows)


@each_strategy
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.7}])
def test_a_pattern_that_allows_everything_is_no_constraint_to_the_last_bit(
    name: str, knobs: dict[str, Any], options: dict[str, Any]
) -> None:
    texts: list[bytes | None] = [b"a", b"b", b"\n", b"c", b"d d", b"e", None, None]
    base = build_strategy(name, **knobs)
    free = dataclasses.replace(base, constraint=Constraint(token_automaton("(?s:.*)", texts, (EOS,))))
    for seed in range(3):
        common: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": EOS, "seed": seed, **options}
        model = random_model(seed, dtype=torch.float64 if seed else torch.float32)
        plain = generate(model, None, [[1], [2, 3]], strategy=base, **common)
        assert same(plain, generate(model, None, [[1], [2, 3]], strategy=free, **common))


@each_strategy
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constrained_row_does_not_depend_on_its_batch(name: str, knobs: dict[str, Any], temperature: float) -> None:
    strategy = dataclasses.replace(build_strategy(name, **knobs), constraint=Constraint(automaton("(ab|b|é)+1?")))
    prompts, seeds = [[1, 2, 3, 0], [4], [5, 6]], [7, 8, 9]
    canvas = Canvas.from_prompts(prompts, [3, 9, 6])
    options: dict[str, Any] = {"strategy": strategy, "temperature": temperature, "eos_token_id": EOS}
    together = generate(random_model(1), None, canvas, seed=seeds, **options)
    for row in range(3):
        alone = generate(random_model(1), None, canvas[[row]], seed=seeds[row : row + 1], **options)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert torch.equal(alone.log_probs[0].nan_to_num(9.0), together.log_probs[row].nan_to_num(9.0))
        assert int(alone.nfe[0]) == int(together.nfe[row])


# What cannot be


def test_too_few_masks_to_reach_acceptance_raise_before_anything_is_written() -> None:
    calls = []

    def function(tokens: Tensor) -> Tensor:
        calls.append(tokens)
        return torch.zeros(*tokens.shape, VOCAB)

    strategy = Strategy(constraint=Constraint(automaton("(ab){4}1")))
    canvas = Canvas.from_prompts([[1], [1]], [5, 4])
    model = FunctionDenoiser(function, MASK, VOCAB, ragged_ok=True)
    with pytest.raises(ValueError, match="row 1 has 4 positions"):
        generate(model, None, canvas, strategy=strategy, eos_token_id=EOS)
    assert not calls
    exact = Strategy(constraint=Constraint(automaton("a?b", ())))
    with pytest.raises(ValueError, match="row 0 has 3 positions"):
        generate(model, None, [[1]], strategy=exact, max_new_tokens=3, eos="ignore")


def test_a_model_that_rules_out_every_accepted_answer_is_an_error() -> None:
    def function(tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, VOCAB).index_fill(-1, torch.tensor([3]), -torch.inf)

    strategy = Strategy(constraint=Constraint(automaton("a*1")))
    with pytest.raises(ValueError, match="probability 0 to every answer"):
        generate(FunctionDenoiser(function, MASK, VOCAB), None, [[1]], strategy=strategy, max_new_tokens=3)


class EndsAnywhere:
    name = "anywhere"

    def __call__(self, state: Any) -> Tensor:
        return torch.full_like(state.rows, -1)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (build_strategy("ancestral", noise="joint"), "draws tokens itself"),
        (Strategy(revise=EditTokens()), "replaces tokens"),
        (Strategy(stop=(EndsAnywhere(),)), "may end an answer anywhere"),
    ],
)
def test_components_that_go_behind_the_constraint_s_back_are_refused(strategy: Strategy, message: str) -> None:
    strategy = dataclasses.replace(strategy, constraint=Constraint(automaton("a*")))
    with pytest.raises(ValueError, match=message):
        generate(random_model(0), None, [[1]], strategy=strategy, max_new_tokens=3)


def test_a_greedy_answer_is_the_most_probable_match_not_the_nearest_to_the_greedy_text() -> None:
    """Position by position "1" is likeliest first, and then only "b" may follow, which is nearly impossible."""

    def function(tokens: Tensor) -> Tensor:
        logits = torch.full((*tokens.shape, VOCAB), -20.0)
        logits[:, 0, 3], logits[:, 0, 0] = 1.0, 0.0
        logits[:, 1, 0] = 2.0
        return logits

    strategy = Strategy(select=TopK(2), window=Blocks(2), constraint=Constraint(automaton("1b|aa", ())))
    out = generate(FunctionDenoiser(function, MASK, VOCAB), None, [[]], strategy=strategy, max_new_tokens=2)
    assert out.tokens[0].tolist() == [0, 0]
