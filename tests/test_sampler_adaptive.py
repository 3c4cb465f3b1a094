"""Confidence-adaptive samplers without memory: parity with plain-Python references, reductions, exact laws, bounds, and
the public bugs of this family."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import pytest
import reference_samplers as reference
import torch
from adaptive_tools import (
    DREAM_SCORES,
    laws_of,
)
from sampler_tools import (
    MASK,
    VOCAB,
    DriftDenoiser,
    HashDenoiser,
    ragged_canvas,
    unmask,
)
from scipy import stats
from torch import Tensor

from mdlm.denoiser import FunctionDenoiser
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.driver import row_keys
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.scores import DistancePenalty, PositionCalibrated, negative_entropy
from mdlm.samplers.select import TopK
from mdlm.samplers.select_adaptive import (
    Dynamic,
    EntropyBudget,
    Factor,
    Hierarchy,
    MinSpacing,
    ShrinkingQuota,
)
from mdlm.samplers.state import State, Step

# Single rules by hand.


def view(log_probs: Tensor) -> Step:
    """A step over whole rows of candidates with these laws `[batch, seq, vocab]`; the last id is the mask."""
    batch, seq, vocab = log_probs.shape
    zeros, flags = torch.zeros(batch, dtype=torch.int64), torch.ones(batch, seq, dtype=torch.bool)
    state = State(
        rows=torch.arange(batch),
        keys=row_keys(0, batch),
        tokens=torch.full((batch, seq), vocab),
        editable=flags,
        masked=flags.clone(),
        window=flags.clone(),
        lengths=zeros + seq,
        origin=zeros,
        step_map=torch.full((batch, seq), -1),
        log_probs=torch.full((batch, seq), torch.nan, dtype=torch.float64),
        edits=torch.zeros(batch, seq, dtype=torch.int64),
        nfe=zeros,
        forwards=zeros,
        tokens_fed=zeros,
        block=zeros,
        block_step=zeros,
    )
    return Step(state, flags, flags, vocab, at=flags, log_probs=log_probs.reshape(batch * seq, vocab))


def confident(*rows: Sequence[float]) -> tuple[Tensor, Step]:
    """Scores log c and a step whose laws have these largest probabilities, the rest on one other token."""
    c = torch.tensor(rows, dtype=torch.float64)
    return c.log(), view(torch.stack([c, 1 - c], dim=-1).log())


def chosen(flags: Tensor) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in flags]


def test_factor_commits_one_below_the_bound_only_in_compat_mode() -> None:
    """Fast-dLLM, dInfer, AdaBlock: when only the last candidate fails, the loop takes it for a pass."""
    scores, step = confident([0.9, 0.99, 0.1], [0.9, 0.2, 0.1], [0.99, 0.98, 0.97])
    # row 0: 3 * .1 < 1, but 4 * .9 is not; row 1: 3 * .8 is not, two fail; row 2: all pass
    assert chosen(Factor(1.0)(scores, step)) == [[0, 1], [0], [0, 1, 2]]
    assert chosen(Factor(1.0, compat=True)(scores, step)) == [[0, 1, 2], [0], [0, 1, 2]]


def test_factor_keeps_the_theorem() -> None:
    """Theorem 1: n tokens whose confidences exceed 1 - eps with (n + 1) eps <= 1 are the joint argmax."""
    generator, several = torch.Generator().manual_seed(0), 0
    for _ in range(300):
        joint = torch.rand(3, 3, 3, generator=generator, dtype=torch.float64) ** 20
        joint = joint / joint.sum()
        marginals = [joint.sum([a for a in range(3) if a != axis]) for axis in range(3)]
        scores, step = torch.stack([m.max() for m in marginals]).log()[None], view(torch.stack(marginals)[None].log())
        together = chosen(Factor(1.0)(scores, step))[0]
        part = joint.sum([axis for axis in range(3) if axis not in together]) if len(together) < 3 else joint
        best = [int(i) for i in torch.unravel_index(part.argmax(), part.shape)]
        assert best == [int(marginals[axis].argmax()) for axis in together]
        several += len(together) > 1
    assert several > 50


def test_hierarchy_takes_the_best_of_every_run() -> None:
    scores, step = confident([0.5, 0.6, 0.45, 0.3, 0.7, 0.2, 0.35, 0.95])
    step.candidates = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 1]], dtype=torch.bool)
    scores = scores.masked_fill(~step.candidates, -torch.inf)
    assert chosen(Hierarchy(0.9, 0.4)(scores, step)) == [[1, 4, 7]]
    assert chosen(Hierarchy(0.4, 0.4)(scores, step)) == [[0, 1, 4, 7]]
    assert chosen(Hierarchy(0.99, 0.99)(scores, step)) == [[7]]


def test_dilation_halves_its_stride_at_every_length() -> None:
    def rounds(length: int, base: int) -> list[int]:
        denoiser = FunctionDenoiser(lambda tokens: torch.zeros(*tokens.shape, 3), 2, 3)
        strategy = build_strategy("dus", base=base, block_length=None)
        return unmask(denoiser, Canvas.from_prompts([[]], length), strategy).last.step_map[0].tolist()

    assert rounds(8, 2) == [0, 2, 1, 2, 0, 2, 1, 2]
    assert rounds(9, 3) == [0, 1, 1, 0, 1, 1, 0, 1, 1]
    assert rounds(6, 2) == [0, 1, 1, 0, 1, 1]
    assert rounds(1, 2) == [0]
    for length in range(1, 40):
        assert max(rounds(length, 2)) + 1 == max(1, int(math.log2(length)))


def test_min_spacing_is_one_after_the_other() -> None:
    generator = torch.Generator().manual_seed(0)
    for spacing in (2, 3, 5):
        scores = torch.randint(1, 6, (50, 17), generator=generator).double() / 10  # many ties
        scores, step = confident(*scores.tolist())
        found = chosen(MinSpacing(TopK(9), spacing)(scores, step))
        for row, got in enumerate(found):
            values = {i: float(scores[row, i]) for i in range(17)}
            assert got == sorted(reference.spaced(reference.ranked(values)[:9], values, spacing))


@pytest.mark.parametrize("linear", [True, False])
def test_alg_temp_draws_without_replacement_in_proportion_to_the_softmax(linear: bool) -> None:
    """Two of four: P(i then j) = w_i / W * w_j / (W - w_i), w = exp(c / alg_temp) or c^(1 / alg_temp)."""
    rows, c = 20_000, [0.9, 0.5, 0.3, 0.1]
    scores, step = confident(*[c] * rows)
    picked = ShrinkingQuota(steps=2, eps=0.0, alg_temp=0.4, linear=linear)(scores, step)
    weight = [math.exp(x / 0.4) if linear else x ** (1 / 0.4) for x in c]
    pairs = list(itertools.combinations(range(4), 2))
    found = [int((picked[:, i] & picked[:, j]).sum()) for i, j in pairs]
    assert sum(found) == rows

    def ordered(i: int, j: int) -> float:
        return weight[i] / sum(weight) * weight[j] / (sum(weight) - weight[i])

    expected = [rows * (ordered(i, j) + ordered(j, i)) for i, j in pairs]
    assert stats.chisquare(found, expected).pvalue > 1e-4


def test_public_bug_dream_10_alg_temp_never_draws_more_than_there_are() -> None:
    canvas = ragged_canvas()
    for alg_temp, steps in itertools.product((0.01, 0.3, 100.0), (1, 2, 9)):
        for alg in DREAM_SCORES:
            strategy = build_strategy("dream", alg=alg, steps=steps, alg_temp=alg_temp)
            last = unmask(HashDenoiser(60.0), canvas, strategy).last
            assert not bool(last.masked.any())
            assert int(last.nfe.max()) <= steps


def test_public_bug_dream_quota_is_not_a_batch_mean() -> None:
    """Dream: int(mean masks per row * (1 - s/t)); short rows then had the mask id written over their prompts."""
    canvas = Canvas.from_prompts([[3, MASK], [4] * 11, [5] * 3], [10, 1, 4])
    strategy = build_strategy("dream", alg="maskgit_plus", steps=4)
    together = unmask(HashDenoiser(), canvas, strategy)
    for number in range(3):
        alone = unmask(HashDenoiser(), canvas[[number]], strategy, seed=0)
        assert together.row(number)["step_map"] == alone.row(0)["step_map"]
        assert together.row(number)["tokens"] == alone.row(0)["tokens"]
    assert together.last.nfe.tolist() == [4, 1, 4]
    assert [int((together.last.step_map[0] == step).sum()) for step in range(4)] == [2, 2, 2, 4]


def test_public_bug_dream_pays_no_forward_that_commits_nothing() -> None:
    """Dream #3: a short answer costs all 512 steps."""
    last = unmask(HashDenoiser(), Canvas.from_prompts([[3]], 6), build_strategy("dream", alg="entropy")).last
    assert last.nfe.tolist() == [6]
    assert sorted(last.step_map[0, 1:].tolist()) == [0, 1, 2, 3, 4, 5]


def test_public_bug_dream_72_scores_do_not_tie_at_low_temperature() -> None:
    """Dream #56, #72: at temperature .1 every tempered confidence is 1 in float32: left to right."""
    logits = torch.zeros(5, 4)
    logits[:, 1] = torch.tensor([4.0, 5.0, 6.0, 7.0, 8.0])

    def order(tempered: bool) -> list[int]:
        denoiser = FunctionDenoiser(lambda tokens: logits.expand(len(tokens), -1, -1), 3, 4)
        strategy = build_strategy("dream", alg="maskgit_plus", score_tempered=tempered)
        draw = dataclasses.replace(strategy.draw, temperature=0.1)
        strategy = dataclasses.replace(strategy, draw=draw)
        return unmask(denoiser, Canvas.from_prompts([[]], 5), strategy).last.step_map[0].tolist()

    assert order(tempered=False) == [4, 3, 2, 1, 0]
    assert order(tempered=True) == [0, 1, 2, 3, 4]


def test_public_bug_entropy_baselines_commit_the_most_certain_first() -> None:
    """KLASS: the "entropy" baseline ranks by +H and commits what is least certain."""
    _, step = confident([0.6, 0.99, 0.8])
    entropy = step.dense(negative_entropy(step), 0.0)
    assert chosen(TopK(1)(entropy, step)) == [[1]]
    last = unmask(DriftDenoiser(coupling=0.0), Canvas.from_prompts([[]], 7), build_strategy("eb", gamma=0.0)).last
    laws = laws_of(DriftDenoiser(coupling=0.0))([MASK] * 7)
    expected = reference.ranked({i: -reference.entropy(p) for i, p in enumerate(laws)})
    assert last.step_map[0].argsort().tolist() == expected


def test_public_bug_sdar_works_at_temperature_zero_and_its_budget_is_per_position() -> None:
    """SDAR: division by 0 at temperature 0; `entropy_bounded` sums over positions and returns uninitialised memory."""
    strategy = build_strategy("sdar", block_length=4)
    greedy = dataclasses.replace(strategy, draw=dataclasses.replace(strategy.draw, temperature=0.0))
    assert not bool(unmask(HashDenoiser(), ragged_canvas(), greedy).last.masked.any())
    law = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.9, 0.1]]).log()
    step = view(law.expand(2, 3, 2))
    scores = step.dense(negative_entropy(step), -torch.inf)
    h = [math.log(2), 0.0, 0.9 * math.log(1 / 0.9) + 0.1 * math.log(10)]
    assert chosen(EntropyBudget(0.0)(scores, step)) == [[1, 2]] * 2  # sum - max: the first uncertain one is free
    assert chosen(EntropyBudget(h[2] - 1e-6)(scores, step)) == [[1, 2]] * 2
    assert chosen(EntropyBudget(h[2] + 1e-6)(scores, step)) == [[0, 1, 2]] * 2


def test_refused_positions_are_nobodys_choice() -> None:
    scores, step = confident([0.9, 0.99, 0.95, 0.9, 0.97, 0.9])
    scores = scores.masked_fill(torch.tensor([0, 1, 0, 0, 1, 0]).bool(), -torch.inf)
    for select in (
        Factor(1e9),
        Factor(1e9, compat=True),
        EntropyBudget(1e9),
        Dynamic(0.0, 6),
        Dynamic(1.5, 6),
        ShrinkingQuota(1),
        ShrinkingQuota(1, alg_temp=50.0, linear=True),
        Hierarchy(0.0, 0.0),
        MinSpacing(TopK(6), 1),
    ):
        assert chosen(select(scores, step)) == [[0, 2, 3, 5]], select


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("dream", {"alg": "best"}, "origin, maskgit_plus, topk_margin, entropy"),
        ("dream", {"alg_temp": 0.1}, "origin"),
        ("dream", {"alg": "entropy", "alg_temp": -0.1}, "0 or more"),
        ("dream", {"eps": 0.9}, r"\[0, 0.5\]"),
        ("dream", {"steps": 0}, "1 or more"),
        ("factor", {"factor": -1.0}, "0 or more"),
        ("factor", {"factor": math.nan}, "0 or more"),
        ("eb", {"gamma": -0.1}, "0 or more"),
        ("eb", {"score": "size"}, "probability, margin, entropy, random"),
        ("dynamic", {"quota": 2, "steps": 3}, "contradict"),
        ("dynamic", {"score": "random"}, "probability, margin, entropy"),
        ("sdar", {"steps": 0}, "1 or more"),
        ("llada2", {"threshold": -1.0}, "0 or more"),
        ("entropy_threshold", {"max_entropy": -1.0}, "0 or more"),
        ("pc", {"lam": -1.0}, "0 .* or more"),
        ("pc", {"alpha": 0.0}, "above 0"),
        ("pc", {"frequencies": [0.0] * VOCAB}, "not all 0"),
        ("wedlm", {"penalty": -1.0}, "0 or more"),
        ("wedlm", {"max_entropy": math.nan}, "0 or more"),
        ("wedlm", {"masks": 0}, "1 or more"),
        ("dus", {"base": 1}, "2 or more"),
        ("spaced", {"spacing": 0}, "1 or more"),
        ("hierarchy", {"low": -0.1}, "0 or more"),
    ],
)
def test_a_knob_out_of_range_names_what_is_allowed(name: str, knobs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_strategy(name, **knobs)


def test_distances_are_counted_from_the_first_candidate_and_places_from_the_window() -> None:
    step = view(torch.full((1, 5, 3), 1 / 3, dtype=torch.float64).log())
    step.window = torch.tensor([[0, 1, 1, 1, 1]], dtype=torch.bool)
    step.candidates = torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.bool)
    step.at = step.candidates
    step.log_probs = step.log_probs[:3]
    far = DistancePenalty(negative_entropy, 0.1)(step)
    assert far.tolist() == pytest.approx([-math.log(3), -math.log(3) - 0.1, -math.log(3) - 0.2])
    placed = PositionCalibrated(lam=0.25)(step)
    at_start = math.log(1 / 3 * math.log(2))
    assert placed.tolist() == pytest.approx([at_start - 0.25 * offset for offset in (1, 2, 3)])


def test_a_frequency_table_of_the_wrong_length_is_an_error() -> None:
    strategy = build_strategy("pc", frequencies=[1.0, 2.0])
    with pytest.raises(ValueError, match="2 frequencies for 9 token ids"):
        unmask(HashDenoiser(), ragged_canvas(), strategy)
