"""LLaDA against an independent reference, and the symptoms that users of public samplers reported, one test each."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import reference_llada
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_tools import EOS, MASK, VOCAB, HashDenoiser, denoiser_for, few_steps, tiny_model, unmask
from torch import Tensor

from mdlm.denoiser import FunctionDenoiser, LogitsModelDenoiser
from mdlm.samplers import PRESETS, Canvas, Strategy, generate
from mdlm.samplers.draw import Draw
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.select import Quota


def script(*rows: dict[int, float]) -> FunctionDenoiser:
    """A model whose logits at a position depend on nothing else: the given ones, 0 elsewhere."""
    table = torch.zeros(len(rows), VOCAB, dtype=torch.float64)
    for position, logits in enumerate(rows):
        for token, value in logits.items():
            table[position, token] = value
    return FunctionDenoiser(lambda t: table[: t.shape[1]].expand(len(t), -1, -1), MASK, VOCAB, ragged_ok=True)


def greedy(denoiser: HashDenoiser) -> reference_llada.Model:
    return lambda row: denoiser(torch.tensor([row]))[0].tolist()


# LLaDA.


@settings(max_examples=25, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=5),
    length=st.integers(1, 12),
    block=st.integers(1, 14),
    steps=st.integers(1, 14),
    seed=st.integers(0, 99),
)
def test_llada_is_the_reference_token_for_token(
    prompt: list[int], length: int, block: int, steps: int, seed: int
) -> None:
    denoiser = HashDenoiser(6.0, seed)
    row, when, forwards = reference_llada.decode(greedy(denoiser), prompt, length, block, steps, MASK)
    for strategy in ("llada", "confidence"):  # at temperature 0 the drawn token is the best one
        out = generate(
            denoiser, None, [prompt], strategy=strategy, max_new_tokens=length, block_length=block, steps=steps
        )
        assert out.tokens[0].tolist() == row
        assert out.step_map[0].tolist() == when
        assert out.nfe.tolist() == [forwards]


@pytest.mark.parametrize(
    "options", [{"guidance": 1.5}, {"never": [EOS, 5]}, {"last": [EOS, 5]}, {"guidance": 0.5, "last": [5]}]
)
def test_llada_with_guidance_and_end_options_is_the_reference(options: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"guidance": options.get("guidance", 0.0), "suppress_tokens": options.get("never", ())}
    for seed in range(8):
        denoiser = HashDenoiser(6.0, seed)
        row, when, _ = reference_llada.decode(greedy(denoiser), [3, MASK, 4], 10, 10, 10, MASK, **options)
        out = generate(
            denoiser, None, [[3, MASK, 4]], strategy="llada", max_new_tokens=10, steps=10, eos="ignore", **arguments
        )
        if "last" in options:
            strategy = build_strategy("llada", steps=10)
            out = generate(
                denoiser,
                None,
                [[3, MASK, 4]],
                strategy=dataclasses.replace(strategy, score=Last(strategy.score, tuple(options["last"]))),
                max_new_tokens=10,
                eos="ignore",
                **arguments,
            )
        assert out.tokens[0].tolist() == row
        assert out.step_map[0].tolist() == when


@dataclasses.dataclass(frozen=True)
class Last:
    """LLaDA's rule for end tokens as a scorer of a user's own."""

    base: Any
    ends: tuple[int, ...]

    def __call__(self, step: Any) -> Tensor:
        return self.base(step).masked_fill(torch.isin(step.predicted, torch.tensor(self.ends)), -math.inf)


# End tokens.

ENDING = ({}, {}, {3: 5.0}, {4: 4.0}, {5: 3.0}, {EOS: 9.0}, {6: 1.0}, {6: 1.0}, {6: 1.0}, {6: 1.0})
"""Positions 0 and 1 are the prompt; the end at 5 is the surest of all."""


def test_eos_policies_decide_when_an_answer_ends() -> None:
    written: dict[str, Any] = {}
    for eos in ("stop", "defer", "ignore", "ban"):
        out = generate(
            script(*ENDING), None, [[7, EOS]], strategy="confidence", max_new_tokens=8, eos=eos, eos_token_id=EOS
        )  # type: ignore[call-overload]
        written[eos] = (out.tokens[0].tolist()[2:], out.step_map[0].tolist()[2:], int(out.nfe), out.finish[0])
    assert written["stop"] == ([3, 4, 5, EOS], [1, 2, 3, 0], 4, "eos")
    assert written["defer"] == ([3, 4, 5, EOS], [0, 1, 2, 3], 4, "eos")
    assert written["ignore"] == ([3, 4, 5, EOS, 6, 6, 6, 6], [1, 2, 3, 0, 4, 5, 6, 7], 8, "length")
    tokens, steps, nfe, finish = written["ban"]
    assert (nfe, finish, len(tokens)) == (8, "length", 8)
    assert EOS not in tokens
    assert steps[3] == 7  # without the end that position is the least sure


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", [name for name in PRESETS if build_strategy(name).revise is None])
def test_an_end_waits_for_what_is_left_of_it_at_every_temperature(name: str, temperature: float) -> None:
    """LLaDA #137: at temperatures above 0 deferring ends had no effect, because it was written to the wrong tensor."""
    strategy, seen = few_steps(name), 0
    if strategy.select.blind:
        pytest.skip("chooses positions without looking")
    prompts = [[3, EOS, 4], [5], [6, 2], [7, 7], [8], [2], [4, 2, 2], [6], [], [3], [4], [7]]
    denoiser = denoiser_for(strategy, Canvas.from_prompts(prompts, 7), scale=4.0)
    for seed in range(2):
        if isinstance(denoiser, HashDenoiser):
            denoiser.seed = seed
        out = generate(
            denoiser,
            None,
            prompts,
            strategy=strategy,
            max_new_tokens=7,
            temperature=temperature,
            eos="defer",
            eos_token_id=EOS,
            seed=seed,
        )
        for prompt, tokens, steps in zip(prompts, out.tokens, out.step_map):
            for place in range(len(prompt), len(tokens)):
                if tokens[place] == EOS:
                    seen += 1
                    assert bool((steps[len(prompt) : place] < steps[place]).all())
    assert seen


def test_deferring_an_end_keeps_the_law_of_everything_else() -> None:
    """It draws first to know the ends, but likely draws must not jump the queue: with ends impossible, no change."""
    table = [{3: 2.0, 4: 1.0, EOS: -math.inf} for _ in range(8)]
    plain, deferred = (
        generate(
            script(*table),
            None,
            [[]],
            strategy="confidence",
            max_new_tokens=8,
            temperature=1.0,
            eos=eos,
            eos_token_id=EOS,
        )
        for eos in ("stop", "defer")
    )  # type: ignore[call-overload]
    assert plain.tokens[0].tolist() == deferred.tokens[0].tolist()
    assert plain.step_map[0].tolist() == deferred.step_map[0].tolist()
    with pytest.raises(ValueError, match="leave draw out"):
        generate(script(*table), None, [[]], temperature=1.0, eos="defer", draw="after_select", eos_token_id=EOS)


def test_a_short_answer_costs_a_short_run() -> None:
    """Dream #3: "Say hello!" cost all 512 steps. And another row's length does not change it."""
    rows = [{3: 9.0}, {4: 8.0}, {EOS: 7.0}, *[{5: 1.0}] * 61]
    out = generate(script(*rows), None, [[]], strategy="threshold", max_new_tokens=64, eos_token_id=EOS, threshold=0.9)
    assert out.tokens[0].tolist() == [3, 4, EOS]
    assert out.nfe.tolist() == [1]
    assert out.new_tokens.tolist() == [3]


def test_an_end_in_a_hole_or_in_the_prompt_is_a_token_like_any_other() -> None:
    rows = [{EOS: 9.0}, {EOS: 8.0}, {}, {3: 1.0}, {4: 1.0}]
    canvas = Canvas(
        torch.tensor([[EOS, 5, EOS, 5, 5]]), torch.tensor([[False, True, False, True, True]]), torch.tensor([5])
    )
    out = generate(script(*rows), None, canvas, strategy="confidence", eos_token_id=EOS)
    assert out.tokens[0].tolist() == [EOS, EOS, EOS, 3, 4]
    assert out.finish == ["length"]


# Symptoms.


@pytest.mark.parametrize("name", PRESETS)
def test_exactly_as_many_tokens_as_asked_for(name: str) -> None:
    """dllm PR #107: the answer was rounded up to whole blocks. LLaDA refuses lengths that are not whole blocks."""
    for length in (1, 5):
        model = tiny_model()
        strategy = few_steps(name)
        out = generate(model, None, [[3, 4], [5]], strategy=strategy, max_new_tokens=length, eos="ignore")
        assert [len(row) for row in out.tokens] == [2 + length, 1 + length]
        assert out.new_tokens.tolist() == [length, length]
        assert all(bool((row[k:] != MASK).all()) for row, k in zip(out.tokens, (2, 1)))


@pytest.mark.parametrize("name", PRESETS)
def test_one_token_from_nothing(name: str) -> None:
    out = generate(tiny_model(), None, [[]], strategy=few_steps(name), max_new_tokens=1, eos="ignore")
    assert out.new_tokens.tolist() == [1]
    assert out.tokens[0].tolist() != [MASK]


def test_a_threshold_nobody_reaches_does_not_hang() -> None:
    """Fast-dLLM #42: no commit was forced when nothing passed the threshold."""
    for threshold in (1.0, 1.5):
        out = generate(script(*[{}] * 6), None, [[]], strategy="threshold", max_new_tokens=6, threshold=threshold)
        assert out.step_map[0].tolist() == [0, 1, 2, 3, 4, 5]


def test_steps_given_to_a_strategy_that_counts_none_are_an_error() -> None:
    """Fast-dLLM #54: `steps` beside a threshold was ignored or made nonsense."""
    with pytest.raises(ValueError, match=r"'threshold' does not take steps; it takes threshold=0.9"):
        generate(script({}), None, [[]], strategy="threshold", steps=4)


def test_a_row_with_few_masks_keeps_its_prompt_beside_one_with_many() -> None:
    """Dream: the quota was the batch's mean, so short rows got mask ids over their prompts."""
    canvas = Canvas.from_rows(
        [torch.tensor([5, 6, 7, 8, 5, 6, 7, 8]), torch.tensor([3] * 8)],
        [torch.tensor([0, 0, 0, 0, 0, 0, 0, 1]).bool(), torch.ones(8).bool()],
    )
    for strategy in (Strategy(select=Quota(2)), few_steps("dream"), build_strategy("dream", alg="entropy", steps=2)):
        last = unmask(HashDenoiser(), canvas, strategy).last
        assert last.tokens[0, :7].tolist() == [5, 6, 7, 8, 5, 6, 7]
        assert not bool((last.tokens == MASK).any())
        assert int(last.nfe[0]) == 1


def test_forwards_of_first_hitting_are_one_per_token_for_each_row_of_a_batch() -> None:
    """bd3lms: first-hitting works for one row only, and one of its forwards is not counted."""
    denoiser = HashDenoiser()
    canvas = Canvas.from_prompts([[3], [4, 5], []], [3, 6, 1])
    last = unmask(denoiser, canvas, build_strategy("first_hitting")).last
    assert last.nfe.tolist() == last.forwards.tolist() == [3, 6, 1]
    assert denoiser.rows_fed == 10
    assert denoiser.calls == 6


@pytest.mark.parametrize("name", ["threshold", "eb", "llada", "dream", "factor"])
def test_rollouts_differ_and_say_when_each_token_came(name: str) -> None:
    """sglang PR #27943: threshold decoding ignored temperature and top-p, so all rollouts were one; no step maps."""
    denoiser = HashDenoiser(1.0)
    strategy = few_steps(name)
    out = generate(denoiser, None, [[3, 4]] * 6, strategy=strategy, max_new_tokens=6, temperature=1.0, eos="ignore")
    assert len({tuple(row.tolist()) for row in out.tokens}) == 6
    narrow = generate(
        denoiser, None, [[3, 4]] * 6, strategy=strategy, max_new_tokens=6, temperature=1.0, top_p=1e-9, eos="ignore"
    )
    plain = generate(denoiser, None, [[3, 4]], strategy=strategy, max_new_tokens=6, temperature=0.0, eos="ignore")
    if name not in ("dream", "llada"):  # the former's orders are random, the latter's scores are of what is drawn
        assert {tuple(row.tolist()) for row in narrow.tokens} == {tuple(plain.tokens[0].tolist())}
    for steps, nfe in zip(out.step_map, out.nfe.tolist()):
        assert sorted(set(steps[2:].tolist()))[-1] + 1 >= nfe


class Shifted(torch.nn.Module):
    """Logits at i are for token i + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        logits = torch.zeros(*input_ids.shape, VOCAB)
        place = torch.arange(input_ids.shape[1])
        logits[..., 2] = 1.0
        logits[:, place, 3 + place % 4] = 2.0 + place
        return dataclasses.make_dataclass("Out", ["logits"])(logits)


def test_a_suppressed_token_is_suppressed_where_it_would_be_written() -> None:
    """dllm PR #110: suppression came before the shift of the logits, one position off."""
    denoiser = LogitsModelDenoiser(Shifted(), MASK, VOCAB, shift=True)
    free = generate(denoiser, None, [[8, 8]], strategy="confidence", max_new_tokens=5)
    assert free.tokens[0].tolist() == [8, 8, 4, 5, 6, 3, 4]
    held = generate(denoiser, None, [[8, 8]], strategy="confidence", max_new_tokens=5, suppress_tokens=[6])
    assert held.tokens[0].tolist() == [8, 8, 4, 5, 2, 3, 4]
    begin = generate(denoiser, None, [[8, 8]], strategy="confidence", max_new_tokens=5, begin_suppress_tokens=[4])
    assert begin.tokens[0].tolist() == [8, 8, 2, 5, 6, 3, 4]


def test_confidence_order_with_draws_after_selection_is_no_greedy_repetition() -> None:
    """mdlm #35: one token a step in the order of confidence gave repetitions. Drawn after selection it is as varied as
    the model: every position draws from its own marginal."""
    strategy = dataclasses.replace(build_strategy("confidence"), draw=Draw(1.0))
    last = unmask(script(*[{3: 2.0, 4: 2.0}] * 400), Canvas.from_prompts([[]], 400), strategy).last
    counts = last.tokens[0].bincount(minlength=VOCAB)[1:].double() / 400
    expected = torch.tensor([0.0, 0, 2, 2, 0, 0, 0, 0]).double().softmax(0)
    assert float((counts - expected).abs().max()) < 4 * math.sqrt(0.25 / 400)
