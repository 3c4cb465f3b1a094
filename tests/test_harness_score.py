"""Likelihoods for the harness: three estimators against exact sums and the chain rule, windows, blocks, greedy flag."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mdlm.denoiser import FunctionDenoiser
from mdlm.eval.harness_options import Likelihoods
from mdlm.eval.harness_score import (
    Pair,
    Score,
    combine,
    cut_at_blocks,
    greedy_matches,
    row_number,
    score_pairs,
    windows,
)
from mdlm.samplers import Canvas, generate

MASK, VOCAB = 0, 5


def oracle(table: dict[tuple[int, ...], float]) -> FunctionDenoiser:
    """Exact conditionals of a law over sequences of one length, by summing over all of them."""

    def logits(tokens: Tensor) -> Tensor:
        out = torch.full((*tokens.shape, VOCAB), -1e9, dtype=torch.float64)
        for b, row in enumerate(tokens.tolist()):
            for i in range(len(row)):
                mass = [0.0] * VOCAB
                for sequence, p in table.items():
                    if all(t in (MASK, s) for t, s in zip(row, sequence)):
                        mass[sequence[i]] += p
                for v, m in enumerate(mass):
                    if m > 0:
                        out[b, i, v] = math.log(m)
        return out

    return FunctionDenoiser(logits, MASK, VOCAB, ragged_ok=True)


def random_law(length: int, seed: int = 0) -> dict[tuple[int, ...], float]:
    generator = torch.Generator().manual_seed(seed)
    sequences = list(itertools.product(range(1, VOCAB), repeat=length))
    weights = torch.rand(len(sequences), generator=generator, dtype=torch.float64) ** 3
    return dict(zip(sequences, (weights / weights.sum()).tolist()))


def crooked(seed: int = 0) -> FunctionDenoiser:
    """A denoiser that agrees with no law: logits that depend on the tokens up to a place, and on the place."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(VOCAB, 12, VOCAB, generator=generator, dtype=torch.float64)

    def logits(tokens: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1])
        return weight[tokens, place].cumsum(dim=1)

    return FunctionDenoiser(logits, MASK, VOCAB, ragged_ok=True)


def mean_over_orders(denoiser: FunctionDenoiser, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The chain rule along every order, one position at a time."""
    total, orders = 0.0, list(itertools.permutations(range(len(answer))))
    for order in orders:
        row = [*prompt, *[MASK] * len(answer)]
        for place in order:
            at = len(prompt) + place
            total += float(denoiser(torch.tensor([row]))[0, at, answer[place]])
            row[at] = answer[place]
    return total / len(orders)


ESTIMATORS = [
    Likelihoods("count", 64, 8, exact=False),
    Likelihoods("count", 64, 8, exact=True),
    Likelihoods("nelbo", 64, 8),
    Likelihoods("any_order", 16),
]
NAMES = ["count", "count_exact", "nelbo", "any_order"]


@pytest.mark.parametrize("options", ESTIMATORS, ids=NAMES)
def test_an_exact_model_gets_its_own_log_likelihood_within_the_error(options: Likelihoods) -> None:
    law = random_law(4)
    denoiser = oracle(law)
    pairs, truths = [], []
    for row, sequence in enumerate([(1, 2, 3, 4), (2, 2, 1, 1), (4, 1, 3, 2)]):
        prior = sum(p for other, p in law.items() if other[0] == sequence[0])
        pairs.append(Pair([sequence[0]], list(sequence[1:]), row))
        truths.append(math.log(law[sequence] / prior))
    for score, truth in zip(score_pairs(denoiser, pairs, options), truths):
        assert abs(score.log_likelihood - truth) < 4 * score.standard_error + 1e-9
        assert score.tokens == 3


@pytest.mark.parametrize("options", ESTIMATORS, ids=NAMES)
def test_estimators_of_a_crooked_model_agree_with_the_mean_over_all_orders(options: Likelihoods) -> None:
    denoiser, prompt, answer = crooked(), [1, 3], [2, 1, 3, 2]
    truth = mean_over_orders(denoiser, prompt, answer)
    scores = [score_pairs(denoiser, [Pair(prompt, answer, row)], options)[0] for row in range(30)]
    mean = sum(score.log_likelihood for score in scores) / len(scores)
    assert abs(mean - truth) < 4 * combine(scores).standard_error / len(scores) + 1e-9
    covered = sum(abs(score.log_likelihood - truth) <= 2 * score.standard_error + 1e-9 for score in scores)
    assert covered >= 24  # of 30; 8 groups make t-like errors


def test_any_order_has_no_noise_where_the_model_is_exact() -> None:
    law = random_law(3)
    (score,) = score_pairs(oracle(law), [Pair([], [3, 1, 2], 0)], Likelihoods("any_order", 4))
    assert score.log_likelihood == pytest.approx(math.log(law[(3, 1, 2)]), abs=1e-9)
    assert score.standard_error < 1e-9
    assert score.nfe == 12


@pytest.mark.parametrize("options", ESTIMATORS, ids=NAMES)
def test_constant_logits_cost_log_v_per_token(options: Likelihoods) -> None:
    flat = FunctionDenoiser(lambda tokens: torch.zeros(*tokens.shape, VOCAB), MASK, VOCAB, ragged_ok=True)
    pairs = [Pair([1], [2, 3], 0), Pair([], [1, 1, 2], 1)]
    scores = score_pairs(flat, pairs, options)
    for score, pair in zip(scores, pairs):
        tolerance = 4 * score.standard_error + 1e-5
        assert abs(score.log_likelihood + len(pair.answer) * math.log(VOCAB - 1)) < tolerance


@pytest.mark.parametrize("options", ESTIMATORS, ids=NAMES)
def test_a_pair_gets_the_same_number_alone_and_in_any_batch(options: Likelihoods) -> None:
    pairs = [Pair([1, 2], [3, 1], 7), Pair([3], [1, 2, 1, 3], 9), Pair([], [2], 11)]
    together = score_pairs(crooked(), pairs, options, batch=5)
    alone = [score_pairs(crooked(), [pair], options, batch=1)[0] for pair in pairs]
    for a, b in zip(together, alone):
        assert a.log_likelihood == pytest.approx(b.log_likelihood, abs=1e-12)
        assert a.standard_error == pytest.approx(b.standard_error, abs=1e-12)
    assert [score.nfe for score in together] == [score.nfe for score in alone]


def test_a_whole_text_in_windows_has_no_token_twice_and_none_left_out() -> None:
    """lm-eval's picture: full windows, the last with more context."""
    assert windows([10, 11, 12], [2], 8, 0)[0].prompt == [2]
    cut = windows(list(range(10, 20)), [2], 4, 5)
    assert [pair.answer for pair in cut] == [[10, 11, 12], [13, 14, 15], [16, 17, 18], [19]]
    assert [pair.prompt for pair in cut] == [[2], [12], [15], [16, 17, 18]]
    for size, length in itertools.product(range(1, 20), range(2, 9)):
        ids = list(range(10, 10 + size))
        pairs = windows(ids, [2], length, 0)
        assert [token for pair in pairs for token in pair.answer] == ids
        assert all(len(pair.prompt) + len(pair.answer) <= length for pair in pairs)
        for pair in pairs[1:]:
            start = ids.index(pair.answer[0])
            assert pair.prompt == ids[start - len(pair.prompt) : start]
            assert len(pair.prompt) + len(pair.answer) == length
    assert windows([], [2], 8, 0) == []
    assert windows([5, 6], [], None, 0) == [Pair([], [5, 6], row_number(0, 0))]
    with pytest.raises(ValueError, match="no room"):
        windows([1, 2], [3], 1, 0)


def test_an_answer_of_a_block_causal_model_is_cut_where_its_blocks_end() -> None:
    parts = cut_at_blocks(Pair([1, 2, 3], [4, 5, 6, 7, 8, 9], 3), 4)
    assert [(part.prompt, part.answer) for part in parts] == [
        ([1, 2, 3], [4]),
        ([1, 2, 3, 4], [5, 6, 7, 8]),
        ([1, 2, 3, 4, 5, 6, 7, 8], [9]),
    ]
    assert len({part.row for part in parts}) == 3
    assert cut_at_blocks(Pair([1], [2], 3), None) == [Pair([1], [2], 3)]
    assert [part.answer for part in cut_at_blocks(Pair([], [1, 2], 0), 2)] == [[1, 2]]


def test_loglikelihood_of_a_block_model_is_not_refused_and_is_that_of_its_blocks() -> None:
    """dllm #93, #95: `loglikelihood` of block models raised NotImplementedError."""
    denoiser, prompt, answer = crooked(), [1, 3, 2], [2, 1, 3]
    (score,) = score_pairs(denoiser, [Pair(prompt, answer, 0)], Likelihoods("any_order", 1024), block_size=4, batch=256)
    blocks = [([1, 3, 2], [2]), ([1, 3, 2, 2], [1, 3])]
    truth = sum(mean_over_orders(denoiser, *block) for block in blocks)
    assert abs(score.log_likelihood - truth) < 4 * score.standard_error + 1e-9
    whole = mean_over_orders(denoiser, prompt, answer)
    assert abs(whole - truth) > 8 * score.standard_error, "the test could not tell blocks from none"


def test_the_greedy_flag_is_what_one_token_at_a_time_decoding_writes() -> None:
    denoiser = crooked()
    prompts = [[1, 2], [3], [2, 2, 1], [1]]
    lengths = [3, 4, 1, 2]
    written = [
        generate(
            denoiser,
            None,
            Canvas.from_prompts([prompt], length),
            strategy="confidence",
            temperature=0.0,
            eos="ignore",
        )
        .tokens[0][len(prompt) :]
        .tolist()
        for prompt, length in zip(prompts, lengths)
    ]
    right = [Pair(prompt, answer, 0) for prompt, answer in zip(prompts, written)]
    wrong = [
        Pair(pair.prompt, [*pair.answer[:place], pair.answer[place] % 4 + 1, *pair.answer[place + 1 :]], 0)
        for pair in right
        for place in range(len(pair.answer))
    ]
    for batch in (1, 3, 64):
        found = greedy_matches(denoiser, right + wrong, batch=batch)
        assert [matches for matches, _ in found] == [True] * len(right) + [False] * len(wrong)
        assert [nfe for _, nfe in found[: len(right)]] == lengths
        assert sum(nfe for _, nfe in found[len(right) :]) < sum(length * length for length in lengths)  # left early


def test_greedy_decoding_begins_where_it_is_surest_not_on_the_left() -> None:
    """P(second = 2) = 0.6 beats P(first = 1) = 0.55, and with it the first is 2; from the left both would be 1."""
    denoiser = oracle({(1, 1): 0.4, (1, 2): 0.15, (2, 2): 0.45})
    found = greedy_matches(denoiser, [Pair([], [2, 2], 0), Pair([], [1, 1], 1), Pair([], [1, 2], 2)])
    assert found == [(True, 2), (False, 1), (False, 2)]


def test_guidance_needs_the_estimator_that_has_it() -> None:
    with pytest.raises(ValueError, match="guidance"):
        score_pairs(crooked(), [Pair([1], [2], 0)], Likelihoods("nelbo"), guidance=0.5)


def test_sums_of_scores_add_errors_in_squares() -> None:
    total = combine([Score(-1.0, 0.3, 2, 5), Score(-2.5, 0.4, 3, 7)])
    assert total == Score(-3.5, pytest.approx(0.5), 5, 12)
    assert combine([]) == Score(0, 0.0, 0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "exact"}, "estimator"),
        ({"mc_num": 0}, "mc_num"),
        ({"mc_num": 12, "group": 8}, "group must divide"),
    ],
    ids=["estimator", "mc_num", "group"],
)
def test_options_of_the_likelihood_out_of_range_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Likelihoods(**options)  # type: ignore[arg-type]
