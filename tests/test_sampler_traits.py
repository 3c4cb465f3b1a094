"""Combinations are judged by what components state, so a user's own are treated as ours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from sampler_tools import HashDenoiser, ragged_canvas, tiny_model, unmask
from torch import Tensor

from mdlm.samplers.ancestral import JointAncestral
from mdlm.samplers.cache import NoCache
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.conflicts import MutualTop1
from mdlm.samplers.constrain import Constraint
from mdlm.samplers.draw import Draw
from mdlm.samplers.early_exit import EarlyExit
from mdlm.samplers.edit import EditTokens
from mdlm.samplers.generate import generate
from mdlm.samplers.history import Credit
from mdlm.samplers.phases import Relay
from mdlm.samplers.remdm import Planner
from mdlm.samplers.revise import Revision
from mdlm.samplers.select import Looking, RandomOrder, Threshold, TopK
from mdlm.samplers.select_adaptive import MinSpacing
from mdlm.samplers.spans import Clusters
from mdlm.samplers.speculate import Speculative
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.traits import (
    attention_layers,
    draws_itself,
    is_exchangeable,
    is_normalised,
    reads_scores,
    replaces_tokens,
)
from mdlm.samplers.transforms import SuppressTokens
from mdlm.samplers.wino import MaskedInTurn

CLAD = Clusters(0.2, conflict=MutualTop1(3))


def test_what_our_own_components_state() -> None:
    assert not reads_scores(RandomOrder(1))
    assert not reads_scores(Planner())
    assert not reads_scores(JointAncestral(4))
    assert reads_scores(TopK(1))
    assert draws_itself(JointAncestral(4), 0.0)
    assert draws_itself(EarlyExit(TopK(1)), 0.5)
    assert not draws_itself(EarlyExit(TopK(1)), 0.0)
    assert replaces_tokens(EditTokens())
    assert not replaces_tokens(None)
    assert is_normalised(Credit())
    assert not is_normalised(SuppressTokens((1,)))
    assert not is_exchangeable(Speculative())
    assert not is_exchangeable(MaskedInTurn())
    assert is_exchangeable(NoCache())


@pytest.mark.parametrize("wrap", [lambda s: EarlyExit(s), lambda s: MinSpacing(s, 1), lambda s: Relay(TopK(1), s)])
def test_what_a_part_states_counts_for_the_whole(wrap: Any) -> None:
    assert attention_layers(wrap(CLAD)) == 3
    assert attention_layers(wrap(TopK(1))) is None
    assert reads_scores(wrap(TopK(1)))


def test_a_filter_around_a_span_selector_leaves_it_its_attention() -> None:
    canvas = Canvas.from_prompts([[3, 4]], 12)
    plain = unmask(tiny_model(), canvas, Strategy(select=CLAD))
    for select in (MinSpacing(CLAD, 1), EarlyExit(CLAD, gaps=(torch.inf,) * 3)):
        assert torch.equal(unmask(tiny_model(), canvas, Strategy(select=select)).last.tokens, plain.last.tokens)


@dataclass(frozen=True)
class Own(Looking):
    """Commits the leftmost position, whatever its score; draws token 2 if told to."""

    draw: bool = False

    def __call__(self, scores: Tensor, step: Any) -> Tensor:
        if self.draw:
            step.drawn = torch.full_like(step.predicted, 2)
        return step.candidates & (step.candidates.cumsum(dim=-1) == 1)


class OwnUnread(Own):
    reads_scores = False


class OwnDrawing(Own):
    draws = "always"


class OwnReviser:
    """Writes token 3 over whatever else was decided."""

    reads_decided, max_edits = True, 1

    def pending(self, state: Any) -> Tensor:
        return torch.zeros_like(state.rows, dtype=torch.bool)

    def __call__(self, step: Any, committed: Tensor) -> Revision:
        decided = step.window & step.state.editable & ~step.candidates
        return Revision(replace=decided, tokens=torch.full_like(step.state.tokens, 3))


class OwnReplacing(OwnReviser):
    replaces = True


class OwnStop:
    name = "own"

    def __call__(self, state: Any) -> Tensor:
        return torch.full_like(state.rows, -1)


class OwnCache(NoCache):
    exchangeable = False


def call(strategy: Strategy, **options: Any) -> Any:
    return generate(tiny_model(), None, [[3, 4]], strategy=strategy, max_new_tokens=5, eos_token_id=1, **options)


def test_own_components_that_say_what_they_do_run() -> None:
    assert call(Strategy(select=OwnDrawing(draw=True))).tokens[0].tolist() == [3, 4, 2, 2, 2, 2, 2]
    assert call(Strategy(select=Own(), revise=OwnReplacing()), eos="ignore").tokens[0].tolist()[2:6] == [3] * 4


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Strategy(select=Own(draw=True)), "Own draws tokens and does not say so; give it an attribute draws"),
        (Strategy(select=Own(), revise=OwnReviser()), "OwnReviser replaces tokens .* replaces = True"),
    ],
    ids=["selector", "reviser"],
)
def test_own_components_that_do_what_they_do_not_say_are_refused(strategy: Strategy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(strategy, eos="ignore")


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        (Strategy(select=OwnUnread()), {"eos": "defer"}, "chooses them without looking at scores"),
        (Strategy(select=JointAncestral(4)), {"eos": "defer"}, "chooses them without looking at scores"),
        (Strategy(select=Own(), revise=OwnReplacing()), {"eos": "defer"}, "also edits written tokens"),
        (Strategy(select=Own(), revise=OwnReplacing()), {"repetition_penalty": 1.5}, "also edits written tokens"),
        (Strategy(cache=OwnCache()), {"cache": "prefix"}, "asks the denoiser in its own way"),
    ],
    ids=["defer, no scores", "defer, joint", "defer, edits", "penalty, edits", "cache"],
)
def test_own_components_are_refused_where_ours_are(strategy: Strategy, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(strategy, **options)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Strategy(select=OwnDrawing(draw=True)), "OwnDrawing draws tokens itself, .* take another selector"),
        (Strategy(select=EarlyExit(TopK(1)), draw=Draw(1.0)), "EarlyExit draws tokens itself, .* take temperature 0"),
        (Strategy(select=Threshold(), revise=OwnReplacing()), "OwnReplacing replaces tokens one by one"),
        (Strategy(stop=(OwnStop(),)), "OwnStop may end an answer anywhere"),
    ],
    ids=["draws", "draws when sampling", "replaces", "ends"],
)
def test_a_constraint_refuses_what_goes_behind_its_back(strategy: Strategy, message: str) -> None:
    from constrain_tools import automaton

    with pytest.raises(ValueError, match=message):
        unmask(HashDenoiser(), ragged_canvas(), replace(strategy, constraint=Constraint(automaton("a*"))))
