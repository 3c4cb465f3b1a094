"""The likelihood of an answer given a prompt: against enumeration, against orders, and what must not matter."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mdlm.config import MDLMConfig
from mdlm.denoiser import FunctionDenoiser, ModelDenoiser
from mdlm.eval.likelihood_conditional import conditional
from mdlm.eval.sources import MarkovSource, TabularSource
from mdlm.eval.sources_noisy import NoisyOracle
from mdlm.modeling import MDLMForMaskedLM

TABLE = TabularSource.random(6, 3, torch.Generator().manual_seed(2))


def log_marginal(prompt: list[int]) -> float:
    """log p of the first tokens, by summing the table."""
    joint = TABLE.joint
    for token in prompt:
        joint = joint[token]
    return math.log(float(joint.sum()))


@pytest.mark.parametrize("given", [0, 1, 2, 5])
def test_summed_over_all_masks_an_exact_denoiser_gives_the_exact_likelihood(given: int) -> None:
    x = TABLE.sample(6, torch.Generator().manual_seed(1)).tolist()
    got = conditional(TABLE, [row[:given] for row in x], [row[given:] for row in x])
    for i, row in enumerate(x):
        expected = float(TABLE.log_prob(torch.tensor([row]))) - log_marginal(row[:given])
        assert float(got.log_likelihood[i]) == pytest.approx(expected, abs=1e-10)
    assert got.standard_error.tolist() == [0.0] * 6
    assert got.nfe.tolist() == [2 ** (6 - given) - 1] * 6
    assert got.tokens.tolist() == [6 - given] * 6


def test_a_denoiser_that_errs_gives_the_mean_over_all_orders() -> None:
    """Its orders disagree; the estimate is the mean of the chain rule over all of them."""
    wrong = NoisyOracle(TABLE, temperature=0.6, uniform=0.1)
    row, given = [0, 2, 1, 1, 0, 2], 2
    each = []
    for order in itertools.permutations(range(given, 6)):
        state, total = row[:given] + [wrong.mask_token_id] * 4, 0.0
        for position in order:
            total += float(wrong(torch.tensor([state]))[0, position, row[position]])
            state[position] = row[position]
        each.append(total)
    assert max(each) - min(each) > 0.5
    expected = sum(each) / len(each)
    got = conditional(wrong, [row[:given]], [row[given:]])
    assert float(got.log_likelihood) == pytest.approx(expected, abs=1e-10)
    drawn = conditional(wrong, [row[:given]], [row[given:]], samples=4000, exact=False)
    assert abs(float(drawn.log_likelihood) - expected) < 4 * float(drawn.standard_error) < 0.2


@pytest.mark.parametrize("group", [1, 8])
def test_drawn_masks_are_unbiased_and_the_error_covers(group: int) -> None:
    source = MarkovSource.random(24, 6, torch.Generator().manual_seed(4))
    x = source.sample(20, torch.Generator().manual_seed(5))
    truth = source.log_prob(x) - source_prefix(source, x[:, :8])
    scores = []
    for seed in range(20):
        got = conditional(
            source, list(x[:, :8]), list(x[:, 8:]), samples=32 * group, group=group, seed=seed, batch=640 * group
        )
        scores.append((got.log_likelihood - truth) / got.standard_error)
    z = torch.stack(scores)
    assert abs(float(z.mean())) < 0.2  # 400 scores of unit spread: 4 standard errors
    assert 0.85 < float(z.std()) < 1.2
    assert float((z.abs() > 3).double().mean()) < 0.02


def source_prefix(source: MarkovSource, prefix: Tensor) -> Tensor:
    """log p of the first symbols of a chain: those of its first steps."""
    steps = torch.log(source.transition)[prefix[:, :-1], prefix[:, 1:]].sum(dim=1)
    return torch.log(source.initial)[prefix[:, 0]] + steps


def test_counts_are_spread_evenly_inside_a_group() -> None:
    """LLaDA's systematic stratification: with as many draws as answer tokens each count comes once."""
    seen: list[int] = []

    def note(tokens: Tensor) -> Tensor:
        seen.extend((tokens == 9).sum(dim=1).tolist())
        assert bool((tokens[:, :3] != 9).all()), "a prompt was masked"
        return torch.zeros(*tokens.shape, 10)

    denoiser = FunctionDenoiser(note, mask_token_id=9, num_tokens=10)
    conditional(denoiser, [[1, 2, 3]], [[4] * 8], samples=40, group=8, exact=False)
    assert [sorted(seen[i : i + 8]) for i in range(0, 40, 8)] == [list(range(1, 9))] * 5
    seen.clear()
    conditional(denoiser, [[1, 2, 3]], [[4] * 12], samples=4000, group=8, exact=False)
    share = torch.bincount(torch.tensor(seen), minlength=13)[1:] / 4000
    assert bool(((share - 1 / 12).abs() < 0.02).all())  # every count alike: 4.6 standard errors of free draws
    assert all(max(seen[i : i + 8]) > 10 for i in range(0, 4000, 8))


@pytest.mark.parametrize("options", [{}, {"exact": False}, {"exact": False, "group": 1}, {"guidance": 1.5}])
def test_constant_logits_cost_log_v_a_token_in_every_draw(options: dict[str, Any]) -> None:
    flat = FunctionDenoiser(lambda tokens: torch.zeros(*tokens.shape, 12), mask_token_id=0, num_tokens=10)
    got = conditional(flat, [[1], [1], [1]], [[2] * 4, [2] * 4, [3] * 4], samples=16, **options)
    assert got.log_likelihood.tolist() == pytest.approx([-4 * math.log(9)] * 3, rel=1e-6)
    assert bool((got.standard_error < 1e-6).all())
    assert got.nfe.tolist() == [(15 if options.get("exact", True) else 16) * (2 if "guidance" in options else 1)] * 3


def test_guidance_is_the_formula_by_hand() -> None:
    x = [0, 2, 1, 1, 0, 2]
    got = conditional(TABLE, [x[:5]], [x[5:]], guidance=0.7)
    mask = TABLE.mask_token_id
    with_prompt, without = (TABLE(torch.tensor([state]))[0, 5, :3] for state in ([*x[:5], mask], [mask] * 6))
    expected = (with_prompt + 0.7 * (with_prompt - without)).log_softmax(dim=0)[2]
    assert float(got.log_likelihood) == pytest.approx(float(expected))
    assert got.nfe.tolist() == [2]


@pytest.fixture(scope="module")
def model() -> ModelDenoiser:
    torch.manual_seed(0)
    ids = {"mask_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    config = MDLMConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3, **ids
    )
    return ModelDenoiser(MDLMForMaskedLM(config).eval())


def test_batches_order_and_neighbours_change_nothing(model: ModelDenoiser) -> None:
    lengths = [(3, 9), (12, 10), (0, 8), (5, 2), (1, 20)]
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 64, (p,), generator=draw).tolist() for p, _ in lengths]
    answers = [torch.randint(3, 64, (a,), generator=draw).tolist() for _, a in lengths]
    whole = conditional(model, prompts, answers, samples=16)
    for size in (1, 5, 100):
        torch.testing.assert_close(
            conditional(model, prompts, answers, samples=16, batch=size).log_likelihood,
            whole.log_likelihood,
            rtol=1e-5,
            atol=1e-4,
        )
    back = conditional(model, prompts[::-1], answers[::-1], rows=[4, 3, 2, 1, 0], samples=16)
    torch.testing.assert_close(back.log_likelihood.flip(0), whole.log_likelihood, rtol=1e-5, atol=1e-4)
    alone = conditional(model, prompts[4:], answers[4:], rows=[4], samples=16)
    torch.testing.assert_close(alone.log_likelihood, whole.log_likelihood[4:], rtol=1e-5, atol=1e-4)
    other = conditional(model, prompts[4:], answers[4:], rows=[5], samples=16)
    assert abs(float(other.log_likelihood - whole.log_likelihood[4])) > 1e-3
    assert (whole.standard_error > 0).tolist() == [True, True, True, False, True]


def test_one_group_has_no_error_and_says_so() -> None:
    x = TABLE.sample(1, torch.Generator().manual_seed(1)).tolist()[0]
    got = conditional(TABLE, [[]], [x], samples=8, exact=False)
    assert math.isnan(float(got.standard_error))


def test_an_impossible_answer_has_no_likelihood() -> None:
    source = TabularSource(torch.tensor([[0.5, 0.0], [0.0, 0.5]]))
    assert float(conditional(source, [[0]], [[1]]).log_likelihood) == -math.inf


@pytest.mark.parametrize(
    ("prompts", "answers", "options", "message"),
    [
        ([], [], {}, "there must be one"),
        ([[1]], [[1], [2]], {}, "1 prompts, 2 answers"),
        ([[1]], [[]], {}, "empty answer"),
        ([[1]], [[3]], {}, "mask token"),
        ([[7]], [[1]], {}, "allowed are 0 .. 3"),
        ([[1]], [[1]], {"samples": 0}, "at least 1"),
        ([[1]], [[1]], {"samples": 12, "group": 8}, "must divide"),
        ([[1]], [[1]], {"guidance": -1.0}, "guidance is -1.0"),
        ([[1]], [[1]], {"rows": [1, 2]}, "2 row numbers"),
        ([[1]], [[1]], {"rows": [-1]}, "row numbers must lie"),
        ([[1]], [[1]], {"rows": [2**60]}, "row numbers must lie"),
    ],
    ids=["none", "unequal", "empty", "mask", "unknown", "samples", "group", "guidance", "rows", "negative", "large"],
)
def test_bad_input_is_named(prompts: Any, answers: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conditional(TABLE, prompts, answers, **options)


def test_an_answer_in_several_blocks_is_taken_block_by_block_or_refused() -> None:
    """Blocks of one token: the parts, summed, are the exact chain rule. Masks over several blocks are not its bound."""
    torch.manual_seed(0)
    sizes = MDLMConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, mask_token_id=0, pad_token_id=1,
        eos_token_id=2, initializer_range=0.5,
    )  # fmt: skip
    prompt, answer = [3, 4, 5], [6, 7, 8]
    for size, refused in ((1, True), (2, True), (4, True), (3, False), (6, False), (None, False)):
        sizes.block_size = size
        model = ModelDenoiser(MDLMForMaskedLM(sizes).eval())
        if refused:
            with pytest.raises(ValueError, match=rf"pair 0: .*tokens 3 \.\. 5, reaches over .* blocks of {size}"):
                conditional(model, [prompt], [answer])
        else:
            assert math.isfinite(float(conditional(model, [prompt], [answer]).log_likelihood))
    sizes.block_size = 1
    model = ModelDenoiser(MDLMForMaskedLM(sizes).double().eval())
    row = prompt + answer
    parts = conditional(model, [row[:i] for i in (3, 4, 5)], [[row[i]] for i in (3, 4, 5)])
    expected = [float(model(torch.tensor([[*row[:i], 0]]))[0, i, row[i]]) for i in (3, 4, 5)]
    assert parts.log_likelihood.tolist() == pytest.approx(expected, abs=1e-12)
