"""Units and budgets over spans: exact laws, reductions, and a plain-Python reference."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import reference_spans as ref
import torch
from exact_law import exact_law, markov, source_law
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_tools import VOCAB, HashDenoiser, label, ragged_canvas, same_rows, tiny_model, unmask
from span_steps import between, make_step, positions, random_step, scores_of
from torch import Tensor

from mdlm.attention_rows import Attention
from mdlm.denoiser import FunctionDenoiser
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.conflicts import CrossProbability, MutualTop1, ThresholdedAttention
from mdlm.samplers.draw import Draw
from mdlm.samplers.phases import MovingThreshold, Relay
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.scores import SCORES, negative_entropy, probability
from mdlm.samplers.select import RandomOrder, Threshold, TopK
from mdlm.samplers.select_adaptive import EntropyBudget
from mdlm.samplers.solvers import Exact, Greedy, matching
from mdlm.samplers.spans import Clusters, Delimited, EntropyJumps, Runs, first_of_run, tokens
from mdlm.samplers.state import Step
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.windows import Blocks, whole

# --- units ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    members=st.lists(st.booleans(), min_size=1, max_size=14),
    max_len=st.one_of(st.none(), st.integers(1, 4)),
    max_gap=st.integers(0, 3),
)
def test_runs_equal_the_reference(members: list[bool], max_len: int | None, max_gap: int) -> None:
    row = torch.tensor([members])
    starts = Runs(max_len, max_gap)(make_step(torch.zeros(1, len(members), 3)), row)
    expected = ref.runs([i for i, member in enumerate(members) if member], max_len, max_gap)
    assert positions(starts[0]) == [group[0] for group in expected]


def test_chunks_end_after_a_predicted_delimiter() -> None:
    predicted = torch.tensor([[3, 5, 5, 3, 3, 3]])
    step = make_step(8.0 * torch.nn.functional.one_hot(predicted, 6))
    members = torch.tensor([[True, True, True, True, False, True]])
    assert positions(Delimited((5, 1))(step, members)[0]) == [0, 2, 3, 5]


def test_a_jump_of_entropy_begins_a_unit() -> None:
    sharp = torch.tensor([9.0, 9.0, 0.0, 0.0, 9.0])
    step = make_step(sharp[None, :, None] * torch.nn.functional.one_hot(torch.full((1, 5), 2), 6))
    members = torch.ones(1, 5, dtype=torch.bool)
    assert positions(EntropyJumps(0.5)(step, members)[0]) == [0, 2, 4]
    assert positions(EntropyJumps(2.0)(step, members)[0]) == [0], "ln 5 = 1.6 is the largest possible jump"


def test_a_decided_position_separates_runs() -> None:
    members = torch.tensor([[True, True, False, True]])
    assert positions(first_of_run(members)[0]) == [0, 3]
    assert positions(first_of_run(members, max_gap=1)[0]) == [0]


@pytest.mark.parametrize("reach", ["min", "mean"])
def test_a_unit_reaches_the_threshold_as_a_whole(reach: str) -> None:
    probs = torch.tensor([0.9, 0.9, 0.5, 0.9, 0.6])  # a decided position between the last two
    undecided = torch.tensor([[True, True, True, False, True, True]])
    rest = ((1 - probs) / 3)[:, None].expand(5, 3)
    logits = torch.zeros(1, 6, 5)
    logits[undecided] = torch.cat([torch.ones(5, 1), probs[:, None], rest], dim=1).log()
    step = make_step(logits, undecided)
    select = Clusters(0.7, Runs(), reach=reach)  # type: ignore[arg-type]
    # geometric means: (.9 * .9 * .5)^(1/3) = .740 and (.9 * .6)^(1/2) = .735; least: .5 and .6
    expected = [0, 1, 2, 4, 5] if reach == "mean" else []
    assert positions(select(scores_of(step), step)[0]) == expected


def test_units_behind_one_that_is_not_sure_keep_their_own_number() -> None:
    probs = torch.tensor([0.5, 0.5, 0.9, 0.9, 0.9])
    undecided = torch.tensor([[True, False, True, False, True, True, False, True]])
    logits = torch.zeros(1, 8, 5)
    logits[undecided] = torch.cat([torch.ones(5, 1), probs[:, None], ((1 - probs) / 3)[:, None].expand(5, 3)], 1).log()
    step = make_step(logits, undecided)
    assert positions(Clusters(0.7, Runs(), reach="min", budget=9.0)(scores_of(step), step)[0]) == [4, 5, 7]


# --- reductions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["probability", "margin", "entropy"])
@pytest.mark.parametrize("units", [Runs(), Runs(2, 1), tokens, EntropyJumps(0.3)], ids=label)
def test_clusters_without_conflict_are_threshold(units: Any, score: str) -> None:
    canvas = ragged_canvas()
    for window, temperature in itertools.product([whole, Blocks(3)], [0.0, 1.0]):
        shared = {"score": SCORES[score], "window": window, "draw": Draw(temperature=temperature)}
        grouped = unmask(HashDenoiser(), canvas, Strategy(select=Clusters(0.6, units), **shared), seed=5)
        plain = unmask(HashDenoiser(), canvas, Strategy(select=Threshold(0.6), **shared), seed=5)
        assert grouped.rows() == plain.rows()


def test_the_clad_preset_without_conflict_is_the_threshold_preset() -> None:
    canvas = ragged_canvas()
    ours = unmask(HashDenoiser(), canvas, build_strategy("clad", conflict="none", threshold=0.6, block_length=4))
    assert (
        ours.rows() == unmask(HashDenoiser(), canvas, build_strategy("threshold", threshold=0.6, block_length=4)).rows()
    )


@pytest.mark.parametrize("gamma", [0.0, 0.1, 0.7, 3.0, 1e9])
@pytest.mark.parametrize("score", ["probability", "entropy"])
def test_single_tokens_with_a_budget_are_the_entropy_bounded_sampler(gamma: float, score: str) -> None:
    canvas = ragged_canvas()
    shared = {"score": SCORES[score], "draw": Draw(temperature=1.0)}
    ours = Strategy(select=Clusters(0.0, tokens, budget=gamma), **shared)
    plain = Strategy(select=EntropyBudget(gamma), **shared)
    assert unmask(HashDenoiser(), canvas, ours, seed=2).rows() == unmask(HashDenoiser(), canvas, plain, seed=2).rows()


def test_a_budget_of_zero_commits_one_token_and_a_huge_one_everything() -> None:
    canvas = Canvas.from_prompts([[3]], 9)
    none = unmask(HashDenoiser(), canvas, Strategy(select=Clusters(0.0, Runs(), budget=0.0)))
    everything = unmask(HashDenoiser(), canvas, Strategy(select=Clusters(0.0, Runs(), budget=1e9)))
    assert none.last.nfe.tolist() == [9]
    assert everything.last.nfe.tolist() == [1]


def test_a_budget_of_zero_is_enough_for_what_is_certain() -> None:
    """Entropies 0, 0, h, h: the first three cost h - h = 0 nats, all four cost h."""
    logits = torch.full((1, 7, 5), -torch.inf)
    logits[0, [0, 2], 3] = 0.0
    logits[0, [4, 6], 2:4] = 0.0
    step = make_step(logits, torch.tensor([[True, False] * 3 + [True]]))
    chosen = Clusters(0.0, Runs(), budget=0.0)(scores_of(step), step)
    assert positions(chosen[0]) == [0, 2, 4]


def test_a_threshold_above_one_is_one_token_a_step() -> None:
    canvas = ragged_canvas()
    one = unmask(HashDenoiser(), canvas, Strategy(select=TopK(1)))
    assert unmask(tiny_model(), canvas, Strategy(select=Clusters(1.5, conflict=MutualTop1()))).last.nfe.tolist() == (
        one.last.nfe.tolist()
    )
    assert unmask(HashDenoiser(), canvas, Strategy(select=Clusters(1.5))).rows() == one.rows()


def test_no_conflict_is_found_where_none_can_be() -> None:
    canvas = ragged_canvas()
    plain = unmask(HashDenoiser(), canvas, Strategy(select=Threshold(0.4)))
    never = Clusters(0.4, tokens, conflict=CrossProbability(gamma=1.0))  # log-probabilities are at most 0
    assert unmask(HashDenoiser(), canvas, Strategy(select=never)).rows() == plain.rows()
    never = Clusters(0.4, tokens, conflict=ThresholdedAttention(1.0, 1.0))
    tiny = unmask(tiny_model(), canvas, Strategy(select=never))
    for left, right in zip(tiny.rows(), unmask(tiny_model(), canvas, Strategy(select=Threshold(0.4))).rows()):
        same_rows(left, right, exact=False)


# --- budget -----------------------------------------------------------------------------------------------------------


def spent(step: Step, chosen: Tensor) -> Tensor:
    """sum H - max H over the chosen positions of each row, nats."""
    probs = torch.zeros(*chosen.shape, VOCAB).double()
    probs[step.at] = step.log_probs.exp()
    entropy = torch.special.entr(probs).sum(dim=-1).masked_fill(~chosen, 0.0)
    return entropy.sum(dim=1) - entropy.amax(dim=1)


RULES = [tokens, Runs(), Runs(3), Runs(None, 2), EntropyJumps(0.4), Delimited((3, 4))]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    budget=st.sampled_from([0.0, 0.05, 0.5, 2.0, 8.0]),
    scale=st.sampled_from([0.0, 1.0, 4.0, 12.0]),
    threshold=st.sampled_from([0.0, 0.5]),
    rank=st.sampled_from(["min", "mean"]),
    tied=st.booleans(),
)
@pytest.mark.parametrize("units", RULES, ids=label)
def test_the_budget_is_kept_whatever_is_chosen(
    units: Any, seed: int, budget: float, scale: float, threshold: float, rank: Any, tied: bool
) -> None:
    step = random_step(seed, scale=scale, attention=True)
    conflict = MutualTop1() if tied else None
    chosen = Clusters(threshold, units, conflict=conflict, budget=budget, rank=rank)(scores_of(step), step)
    assert (spent(step, chosen) <= budget + 1e-9).all()
    assert chosen.any(dim=1).all(), "always one token"
    more = Clusters(threshold, units, conflict=conflict, budget=budget + 1.0, rank=rank)(scores_of(step), step)
    assert not (chosen & ~more).any(), "a larger budget commits at least as much"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.sampled_from([0.05, 0.5, 2.0, 8.0]), max_len=st.sampled_from([None, 2, 4]))
def test_units_within_a_budget_equal_the_reference(seed: int, budget: float, max_len: int | None) -> None:
    step = random_step(seed)
    scores = scores_of(step)
    chosen = Clusters(0.0, Runs(max_len), budget=budget)(scores, step)
    probs = torch.zeros(*chosen.shape, VOCAB).double()
    probs[step.at] = step.log_probs.exp()
    for row in range(len(chosen)):
        undecided = positions(step.candidates[row])
        expected = ref.budgeted(
            ref.runs(undecided, max_len),
            {i: float(scores[row, i]) for i in undecided},
            {i: ref.entropy(probs[row, i].tolist()) for i in undecided},
            budget,
        )
        assert positions(chosen[row]) == sorted(expected)


@pytest.mark.parametrize("gamma", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("max_len", [2, 3, None])
def test_the_divergence_of_spans_is_at_most_budget_times_steps(gamma: float, max_len: int | None) -> None:
    """The guarantee of the entropy-bounded sampler, kept for spans, by enumeration of the exact law."""
    source = markov(6, impossible="uniform")
    for score in (probability, negative_entropy):
        select = Clusters(0.0, Runs(max_len), budget=gamma)
        law = exact_law(source, Strategy(score=score, select=select, draw=Draw(temperature=1.0)))
        assert -1e-9 <= law.kl(source_law(source)) <= gamma * law.nfe
        assert law.nfe <= 6


@pytest.mark.parametrize(("gamma", "divergence"), [(0.5, 0.3869), (1.0, 0.7169)])
def test_single_tokens_within_a_budget_have_the_divergence_of_the_notes(gamma: float, divergence: float) -> None:
    source = markov(6, impossible="uniform")
    select = Clusters(0.0, tokens, budget=gamma)
    law = exact_law(source, Strategy(score=negative_entropy, select=select, draw=Draw(temperature=1.0)))
    assert abs(law.kl(source_law(source)) - divergence) < 1e-4


def test_spans_without_a_budget_are_what_the_budget_prevents() -> None:
    source = markov(6, impossible="uniform")
    free = exact_law(source, Strategy(select=Clusters(0.6, Runs()), draw=Draw(temperature=1.0)))
    assert abs(free.kl(source_law(source)) - 1.4613) < 1e-4, "threshold .6 of the notes: grouping changes nothing"
    bound = exact_law(source, Strategy(select=Clusters(0.6, Runs(), budget=0.5), draw=Draw(temperature=1.0)))
    assert bound.kl(source_law(source)) < free.kl(source_law(source))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Clusters(-0.1), "threshold is -0.1"),
        (lambda: Clusters(budget=-1.0), r"budget is -1.0; it must be 0 or more"),
        (lambda: Clusters(reach="max"), "reach is 'max'; it must be 'token', 'min' or 'mean'"),  # type: ignore[arg-type]
        (lambda: Clusters(rank="max"), "rank is 'max'"),  # type: ignore[arg-type]
        (lambda: Clusters(solver=matching), "a solver without a conflict graph"),
        (lambda: Clusters(conflict=CrossProbability(), solver=matching), "CrossProbability is not a matching"),
        (lambda: Runs(max_len=0), "max_len is 0"),
        (lambda: Runs(max_gap=-1), "max_gap is -1"),
        (lambda: Delimited(()), "no delimiters"),
        (lambda: EntropyJumps(-1.0), "jump is -1.0"),
        (lambda: MutualTop1(0), "layers is 0"),
        (lambda: MutualTop1(pair_scale=-1.0), "pair_scale is -1.0"),
        (lambda: CrossProbability(high=0.0), r"high is 0.0; it must lie in \(0, 1\]"),
        (lambda: CrossProbability(math.nan), "gamma is NaN"),
        (lambda: ThresholdedAttention(0.5, 0.1), "0 <= low <= high"),
        (lambda: Greedy("size"), "order is 'size'"),  # type: ignore[arg-type]
        (lambda: Exact("never"), "beyond is 'never'"),  # type: ignore[arg-type]
        (lambda: Relay(RandomOrder(), TopK()), "RandomOrder does not look at predictions"),
        (lambda: Relay(TopK(), TopK(), 1.5), "until is 1.5"),
        (lambda: MovingThreshold(-0.5), "first is -0.5"),
        (lambda: build_strategy("clad", conflict="cross"), "conflict is 'cross'; it must be one of attention, none"),
        (lambda: build_strategy("spans", units="words"), "units is 'words'; it must be one of runs, tokens"),
        (lambda: build_strategy("spans", delimiters=(3,)), "delimiters end chunks, but units is 'runs'"),
        (lambda: build_strategy("spans", units="chunks"), "no delimiters"),
        (lambda: build_strategy("spans", solver="greedy"), "solver 'greedy' settles conflicts"),
        (lambda: build_strategy("depcap", block_length=None, longest_block=9), "longest_block needs a block_length"),
    ],
)
def test_wrong_values_say_what_is_allowed(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_selector_that_hides_a_conflict_is_told_what_to_do() -> None:
    step = random_step(1)
    with pytest.raises(ValueError, match="does not ask for any; give the selector an attribute attention_layers"):
        Clusters(0.3, conflict=MutualTop1())(scores_of(step), step)


def test_a_denoiser_of_the_users_own_may_give_attention() -> None:
    class Attending(FunctionDenoiser):
        def with_attention(self, tokens: Tensor, *, layers: int, at: Tensor, **other: Any) -> tuple[Tensor, Attention]:
            return self(tokens, at=at), between(torch.full((len(tokens), 12, 12), 0.5))

    logits = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(0)) * 4
    model = Attending(lambda tokens: logits.expand(len(tokens), 12, VOCAB), 0, VOCAB)
    found = unmask(model, Canvas.from_prompts([[]], 12), build_strategy("clad", threshold=0.5))
    assert int(found.last.nfe[0]) >= 2
