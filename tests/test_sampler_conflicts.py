"""Conflict graphs and solvers: CLAD, DepCap and DAPD against plain-Python references, solvers against brute force."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import reference_spans as ref
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_tools import MASK, VOCAB, HashDenoiser, ragged_canvas, same_rows, tiny_model, unmask
from span_steps import make_step, positions, random_step, scores_of
from torch import Tensor

from mdlm.samplers.cache_policies import BlockCache, DualCache, PrefixCache
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.conflicts import CrossProbability, Graph, MutualTop1, ThresholdedAttention
from mdlm.samplers.guidance import Guided
from mdlm.samplers.phases import MovingThreshold, Relay
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.select import TopK
from mdlm.samplers.solvers import EXACT_UNITS, Exact, Greedy, heaviest_set, matching
from mdlm.samplers.spans import Clusters, Spans, first_of_run, tokens
from mdlm.samplers.state import Step
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.traits import attention_layers
from mdlm.samplers.windows import Blocks

# --- CLAD -------------------------------------------------------------------------------------------------------------


def reference_forward(model: Any, layers: int) -> Any:
    """Probabilities and attention of one row from `eager`, by lists; attention rows follow the logits' shift."""
    network = model.model

    def forward(row: list[int]) -> tuple[list[list[float]], list[list[float]]]:
        with torch.no_grad():
            out = network(torch.tensor([row]), output_attentions=True)
        logits = out.logits[0, :, :VOCAB].double()
        logits[:, MASK] = -torch.inf
        attention = torch.stack(out.attentions[-layers:]).mean(dim=(0, 2))[0].tolist()
        if network.config.shift_logits:
            attention = [attention[max(i - 1, 0)] for i in range(len(row))]
        return logits.softmax(dim=-1).tolist(), attention

    return forward


@pytest.mark.parametrize("shift", [False, True], ids=["LLaDA", "Dream"])
@pytest.mark.parametrize(("threshold", "block"), [(0.7, 8), (0.35, 16), (0.4, 16), (0.4, 40)])
def test_clad_equals_the_papers_rule_token_for_token(threshold: float, block: int, shift: bool) -> None:
    model = tiny_model(num_hidden_layers=5, shift_logits=shift, initializer_range=0.6)
    prompts, new = [[3, 4, 5], [6, 7, 8, 3, 4], [5]], 32
    canvas = Canvas.from_prompts(prompts, new)
    strategy = build_strategy("clad", threshold=threshold, block_length=block)
    found = unmask(model, canvas, strategy).rows()
    model.model.config._attn_implementation = "eager"
    committed = 0
    for prompt, row in zip(prompts, found):
        tokens_, steps = ref.decode(
            prompt + [MASK] * new,
            len(prompt),
            block,
            reference_forward(model, 4),
            lambda confidence, attention, length: ref.clad_step(confidence, attention, threshold, length),
            MASK,
        )
        assert row["tokens"] == tokens_
        assert row["step_map"] == steps
        committed += row["nfe"]
    plain = unmask(model, canvas, build_strategy("threshold", threshold=threshold, block_length=block))
    assert committed != int(plain.last.nfe.sum()), "some conflict was found, else this proves nothing"


def clad_rows(step: Step, threshold: float) -> list[tuple[list[int], list[int]]]:
    """(positions committed by the product, by the reference) of each row."""
    chosen = Clusters(threshold, conflict=MutualTop1())(scores_of(step), step)
    confidence = scores_of(step).exp()
    pairs = []
    between = step.attention(step.candidates)  # type: ignore[misc]
    for row in range(len(chosen)):
        undecided = positions(step.candidates[row])
        attention = [[0.0] * confidence.shape[1] for _ in range(confidence.shape[1])]
        for (a, i), (b, j) in itertools.product(enumerate(undecided), repeat=2):
            attention[i][j] = float(between[row, a, b])
        values = {i: float(confidence[row, i]) for i in undecided}
        pairs.append((positions(chosen[row]), ref.clad_step(values, attention, threshold, confidence.shape[1])))
    return pairs


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6), threshold=st.sampled_from([0.3, 0.5, 0.7, 0.9, 2.0]), seq=st.integers(1, 20))
def test_clad_commits_what_the_reference_does_on_random_steps(seed: int, threshold: float, seq: int) -> None:
    for ours, expected in clad_rows(random_step(seed, seq=seq, attention=True), threshold):
        assert ours == expected


def test_predictions_that_are_no_candidates_do_not_shift_the_attention() -> None:
    """A window's horizon and revisers ask for more predictions than there are candidates."""
    for seed in range(20):
        step = random_step(seed, batch=1, seq=14, attention=True)
        few = step.candidates & (torch.arange(14) % 3 != seed % 3)
        if int(few.sum()) == 0:
            continue
        alone = dataclasses.replace(step, candidates=few, at=few, log_probs=step.log_probs[few[step.at]])
        more = dataclasses.replace(step, candidates=few)
        scores = scores_of(step).masked_fill(~few, -torch.inf)
        for conflict in (MutualTop1(), ThresholdedAttention(0.6, 0.6), CrossProbability(-6.0)):
            select = Clusters(0.4, conflict=conflict)
            assert torch.equal(select(scores, more), select(scores, alone))


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6), threshold=st.sampled_from([0.3, 0.5, 0.7]), seq=st.integers(1, 24))
def test_at_least_half_of_the_candidates_and_one_token_are_committed(seed: int, threshold: float, seq: int) -> None:
    step = random_step(seed, seq=seq, attention=True)
    scores = scores_of(step)
    everything = Clusters(threshold)(scores, step)
    chosen = Clusters(threshold, conflict=MutualTop1())(scores, step)
    assert not (chosen & ~everything).any()
    assert (2 * chosen.sum(dim=1) >= everything.sum(dim=1)).all()
    assert (chosen.sum(dim=1) >= 1).all()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), seq=st.integers(2, 24))
def test_a_matching_drops_at_most_one_of_each_pair_and_never_the_longer(seed: int, seq: int) -> None:
    step = random_step(seed, seq=seq, attention=True)
    scores = scores_of(step)
    members = Clusters(0.5)(scores, step)
    spans = Spans.of(step, members, first_of_run(members), scores)
    graph = MutualTop1()(spans)
    keep = matching(graph, spans)
    assert (graph.edges.sum(dim=2) <= 1).all()
    assert torch.equal(graph.edges, graph.edges.mT)
    for row, a, b in graph.edges.nonzero().tolist():
        assert keep[row, a] != keep[row, b]
        dropped, kept = (a, b) if keep[row, b] else (b, a)
        longer = spans.length[row, kept] - spans.length[row, dropped]
        assert longer > 0 or (longer == 0 and kept < dropped)
    assert bool(keep[~graph.edges.any(dim=2) & (spans.length > 0)].all())


def two_clusters(seq: int, value: float) -> Step:
    """Sure at the first and the last position, which attend to each other with `value`."""
    logits = torch.zeros(1, seq, VOCAB)
    logits[0, [0, -1], [3, 4]] = 20.0
    attention = torch.zeros(1, seq, seq).double()
    attention[0, 0, -1] = value
    return make_step(logits, attention=attention)


def test_two_clusters_are_judged_by_the_block_and_not_by_the_whole_sequence() -> None:
    """CLAD's Dream path divides 1.2 by the length of the sequence: the two-cluster test is ~10 times looser."""
    select = Clusters(0.9, conflict=MutualTop1())
    below, above = two_clusters(32, 1.2 / 32 - 1e-9), two_clusters(32, 1.2 / 32 + 1e-9)
    assert positions(select(scores_of(below), below)[0]) == [0, 31]
    assert positions(select(scores_of(above), above)[0]) == [0], "equally long: the left one stays"
    model = tiny_model()
    seen: list[int] = []

    class Spy(MutualTop1):
        def __call__(self, spans: Spans) -> Graph:
            seen.extend(spans.step.window.sum(dim=1).tolist())
            assert spans.position.shape[1] <= 4
            return super().__call__(spans)

    select = Clusters(0.0, tokens, conflict=Spy())
    unmask(model, Canvas.from_prompts([[3] * 40], 8), Strategy(select=select, window=Blocks(4)))
    assert set(seen) == {4}


def test_rows_of_a_batch_do_not_share_attention_or_flat_indices() -> None:
    """CLAD ignores the padding mask and WINO indexes the flattened batch: right only for one row at a time."""
    model, canvas = tiny_model(), ragged_canvas()
    for strategy in (
        build_strategy("clad", threshold=0.2),
        build_strategy("dapd", low=0.05, high=0.1),
        build_strategy("depcap", gamma=-4.0),
        build_strategy("spans", budget=1.0),
        build_strategy("spans", conflict="attention", solver="exact", threshold=0.2, budget=3.0),
    ):
        together = unmask(model, canvas, strategy, seed=list(range(6)))
        order = [4, 2, 0, 5, 3]  # row 1 is all masks: every position predicts the same, so rounding decides
        moved = unmask(model, canvas[order], strategy, seed=order)
        for place, row in enumerate(order):
            alone = unmask(model, canvas[[row]], strategy, seed=[row])
            same_rows(together.row(row), alone.row(0), exact=False)
            same_rows(together.row(row), moved.row(place), exact=False)


def test_attention_is_asked_of_the_same_forward() -> None:
    model, calls = tiny_model(), []
    model.model.model.register_forward_hook(lambda *_: calls.append(1))
    found = unmask(model, Canvas.from_prompts([[3, 4]], 12), build_strategy("clad", threshold=0.2))
    assert len(calls) == int(found.last.nfe[0]) == int(found.last.forwards[0])


@pytest.mark.parametrize("name", ["clad", "dapd"])
def test_a_denoiser_without_attention_is_refused_before_the_first_step(name: str) -> None:
    with pytest.raises(ValueError, match=r"HashDenoiser does not give; ModelDenoiser .* 'depcap'"):
        unmask(HashDenoiser(), ragged_canvas(), build_strategy(name))


@pytest.mark.parametrize("cache", [PrefixCache(), DualCache(), BlockCache(), Guided(0.5, PrefixCache())], ids=str)
def test_attention_over_the_whole_canvas_and_a_cache_exclude_each_other(cache: Any) -> None:
    strategy = Strategy(select=Clusters(0.2, conflict=MutualTop1()), window=Blocks(4), cache=cache)
    with pytest.raises(ValueError, match=r"reads attention over the whole canvas, .* leave the cache out"):
        unmask(tiny_model(block_size=4), ragged_canvas(), strategy)


def test_guidance_decides_by_the_attention_of_the_branch_that_sees_the_prompt() -> None:
    canvas = Canvas.from_prompts([[3, 4, 5]], 10)
    strategy = build_strategy("clad", threshold=0.2)
    seen: list[Tensor] = []

    class Spy(MutualTop1):
        def __call__(self, spans: Spans) -> Graph:
            seen.append(spans.step.attention(spans.step.candidates))  # type: ignore[misc]
            return super().__call__(spans)

    select = Clusters(0.0, tokens, conflict=Spy())
    unmask(tiny_model(), canvas, Strategy(select=select, window=strategy.window, cache=Guided(0.5)))
    unmask(tiny_model(), canvas, Strategy(select=select, window=strategy.window))
    assert torch.equal(seen[0], seen[[s.shape[1] for s in seen[1:]].index(10) + 1])


# --- solvers ----------------------------------------------------------------------------------------------------------


def random_graph(seed: int, units: int, density: float = 0.3, batch: int = 4) -> tuple[Graph, Spans]:
    generator = torch.Generator().manual_seed(seed)
    step = make_step(4 * torch.randn(batch, 3 * units, VOCAB, generator=generator))
    starts = torch.zeros(batch, 3 * units, dtype=torch.bool)
    for row in starts:
        row[torch.randperm(3 * units - 1, generator=generator)[: units - 1] + 1] = True
        row[0] = True
    spans = Spans.of(step, torch.ones_like(starts), starts, scores_of(step))
    size = spans.length.shape[1]
    edges = torch.rand(batch, size, size, generator=generator) < density
    real = spans.length > 0
    edges = (edges | edges.mT) & real[:, :, None] & real[:, None, :] & ~torch.eye(size, dtype=torch.bool)
    return Graph(edges, torch.rand(batch, size, generator=generator).double()), spans


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), units=st.integers(1, 9), density=st.sampled_from([0.1, 0.3, 0.7, 1.0]))
def test_exact_is_the_best_of_all_independent_sets(seed: int, units: int, density: float) -> None:
    graph, spans = random_graph(seed, units, density)
    keep = Exact()(graph, spans)
    for row in range(len(keep)):
        weight = spans.length[row].tolist()
        sets = ref.independent_sets(graph.edges[row].tolist(), units)
        best = max(sum(weight[n] for n in s) for s in sets)
        leftmost = max(
            (s for s in sets if sum(weight[n] for n in s) == best), key=lambda s: [n in s for n in range(units)]
        )
        assert tuple(positions(keep[row])) == leftmost


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), units=st.integers(1, 20), density=st.sampled_from([0.05, 0.3, 0.9]))
@pytest.mark.parametrize("order", ["score", "length", "influence"])
def test_greedy_is_the_sequential_greedy_and_independent(order: str, seed: int, units: int, density: float) -> None:
    graph, spans = random_graph(seed, units, density)
    keep = Greedy(order)(graph, spans)  # type: ignore[arg-type]
    assert not (graph.edges & keep[:, :, None] & keep[:, None, :]).any()
    mean = spans.unit_score("mean")
    for row in range(len(keep)):
        if order == "length":
            by = sorted(range(units), key=lambda n: (-int(spans.length[row, n]), -float(mean[row, n]), n))
            priority = [-float(by.index(n)) for n in range(units)]
        else:
            priority = mean[row, :units].tolist()
            if order == "influence":
                priority = [float(graph.influence[row, n]) * math.exp(priority[n]) for n in range(units)]
        assert set(positions(keep[row])) == ref.greedy_set(graph.edges[row].tolist(), priority)


def test_on_a_matching_all_solvers_by_length_agree_in_tokens() -> None:
    for seed in range(20):
        step = random_step(seed, seq=20, attention=True)
        scores = scores_of(step)
        counts = [
            Clusters(0.4, conflict=MutualTop1(), solver=solver)(scores, step).sum(dim=1).tolist()
            for solver in (matching, Greedy("length"), Exact())
        ]
        assert counts[0] == counts[1] == counts[2]


def test_exact_beyond_its_size_is_an_error_or_what_was_asked_for() -> None:
    graph, spans = random_graph(3, EXACT_UNITS + 4, 0.5, batch=3)
    graph.edges[1, 4:] = False
    graph.edges[1, :, 4:] = False
    with pytest.raises(ValueError, match=r"units with conflicts, .* up to 16"):
        Exact()(graph, spans)
    keep, greedy = Exact("greedy")(graph, spans), Greedy("length")(graph, spans)
    assert torch.equal(keep[[0, 2]], greedy[[0, 2]])
    alone = Graph(graph.edges[1:2], graph.influence[1:2])
    only = Spans(spans.step, spans.position[1:2], spans.used[1:2], spans.unit[1:2], spans.scores[1:2])
    assert torch.equal(keep[1:2], Exact()(alone, only)), "a small row is solved exactly beside large ones"


def test_the_largest_exact_problem() -> None:
    chain = torch.diag(torch.ones(EXACT_UNITS - 1), 1).bool()
    best = heaviest_set((chain | chain.T)[None], torch.ones(1, EXACT_UNITS, dtype=torch.int64))
    assert positions(best[0]) == list(range(0, EXACT_UNITS, 2))


# --- DepCap and DAPD --------------------------------------------------------------------------------------------------


def same_word_twice() -> Step:
    """Two positions at .96 predict the same token, far apart; a third is sure of another one."""
    probs = torch.full((1, 3, 5), 0.01).double()
    probs[0, 0, 3] = probs[0, 1, 3] = probs[0, 2, 4] = 0.96
    return make_step(probs.log())


def test_depcap_as_printed_commits_two_positions_in_conflict() -> None:
    """The printed algorithm takes every candidate of at least .95 unchecked: .96 and .96 write the same word."""
    step = same_word_twice()
    # log p_i(x_j) + log p_j(x_i) is 2 log .9697 for the first two and 2 log .0101 across: -9.2
    strict, printed = (
        Clusters(0.0, tokens, conflict=CrossProbability(-8.0, strict=value), solver=Greedy()) for value in (True, False)
    )
    assert positions(printed(scores_of(step), step)[0]) == [0, 1, 2]
    assert positions(strict(scores_of(step), step)[0]) == [0, 2]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), gamma=st.sampled_from([-16.0, -9.0, -5.0, -2.0]), scale=st.sampled_from([1.0, 4.0]))
def test_depcap_equals_the_reference_and_leaves_no_conflict(seed: int, gamma: float, scale: float) -> None:
    step = random_step(seed, scale=scale)
    scores = scores_of(step)
    chosen = Clusters(0.0, tokens, conflict=CrossProbability(gamma), solver=Greedy())(scores, step)
    log_probs = torch.full((*scores.shape, VOCAB), torch.nan).double()
    log_probs[step.at] = step.log_probs
    for row in range(len(chosen)):
        undecided = positions(step.candidates[row])
        says = log_probs[row].tolist()
        word = {i: says[i].index(max(says[i])) for i in undecided}
        edges = [[i != j and says[i][word[j]] + says[j][word[i]] > gamma for j in undecided] for i in undecided]
        expected = ref.greedy_set(edges, [max(says[i]) for i in undecided])
        assert positions(chosen[row]) == sorted(undecided[n] for n in expected)


def test_depcap_judges_by_drawn_tokens_where_tokens_are_drawn_first() -> None:
    step = same_word_twice()
    step.drawn = torch.tensor([3, 2, 4])
    chosen = Clusters(0.0, tokens, conflict=CrossProbability(-8.0), solver=Greedy())(scores_of(step), step)
    # across the first two: log p_0(2) + log p_1(3) = log .0101 + log .9697 = -4.6
    assert positions(chosen[0]) == [0, 2]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), low=st.sampled_from([0.2, 0.4]), high=st.sampled_from([0.5, 0.8]))
def test_dapd_equals_the_reference(seed: int, low: float, high: float) -> None:
    step = random_step(seed, attention=True)
    scores = scores_of(step)
    graph = ThresholdedAttention(low, high)
    chosen = Clusters(0.0, tokens, conflict=graph, solver=Greedy("influence"))(scores, step)
    for row in range(len(chosen)):
        undecided = positions(step.candidates[row])
        weights = step.attention(step.candidates)[row].tolist()  # type: ignore[misc]
        n = len(undecided)
        tie = [[0.0 if a == b else (weights[a][b] + weights[b][a]) / 2 for b in range(n)] for a in range(n)]
        threshold = low + (high - low) * (1 - n / scores.shape[1])
        edges = [[a != b and tie[a][b] > threshold for b in range(n)] for a in range(n)]
        priority = [sum(tie[a]) * math.exp(float(scores[row, i])) for a, i in enumerate(undecided)]
        assert positions(chosen[row]) == sorted(undecided[a] for a in ref.greedy_set(edges, priority))


def test_dapd_hands_over_when_half_is_done() -> None:
    select = build_strategy("dapd", until=0.5).select
    assert isinstance(select, Relay)
    assert attention_layers(select) == 0.3
    early, late = torch.tensor([[True, False, False, False]]), torch.tensor([[True, True, False, False]])
    for left, expected in ((4, early), (3, early), (2, late), (1, late)):
        undecided = torch.arange(4)[None] < left
        step = make_step(torch.zeros(1, 4, 3), undecided)
        relay = Relay(TopK(1), TopK(2), 0.5)
        assert torch.equal(relay(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), step), expected)


def test_a_moving_threshold_moves_with_the_window() -> None:
    scores = torch.tensor([[0.85, 0.75, 0.65, 0.5]]).log()
    select = MovingThreshold(0.8, 0.6)
    assert positions(select(scores, make_step(torch.zeros(1, 4, 3)))[0]) == [0], "all undecided: .8"
    half = make_step(torch.zeros(1, 4, 3), torch.tensor([[True, True, False, False]]))
    assert positions(select(scores, half)[0]) == [0, 1], "half undecided: .7"
