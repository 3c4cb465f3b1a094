"""Token-to-mask with a cap: of the doubtful tokens only the worst are masked again in one step."""

from __future__ import annotations

import math

import pytest
import torch
from revise_tools import hashed, ragged, run
from sampler_tools import HashDenoiser
from torch import Tensor

from mdlm.samplers.canvas import Canvas
from mdlm.samplers.driver import Run, row_keys
from mdlm.samplers.edit import Behind, Doubt, MaskDoubtful, Outvoted, Unlikely
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.state import Step
from mdlm.samplers.strategy import Strategy


def judged(probabilities: list[float], undecided: list[int]) -> Step:
    """One row of six symbols, decided ones hold symbol 1 with these probabilities, symbol 2 has the rest."""
    n = len(probabilities)
    canvas = Canvas(torch.zeros(1, n, dtype=torch.int64), torch.ones(1, n, dtype=torch.bool), torch.tensor([n]))
    state = Run(HashDenoiser(), canvas, Strategy(), row_keys(0, 1)).state
    state.masked[:] = False
    state.masked[0, undecided] = True
    state.tokens = torch.where(state.masked, 0, 1)
    everywhere = torch.ones_like(state.masked)
    step = Step(state, everywhere, state.masked.clone(), 0, at=everywhere)
    law = torch.zeros(n, 6, dtype=torch.float64)
    law[:, 1] = torch.tensor(probabilities, dtype=torch.float64)
    law[:, 2] = 1 - law[:, 1]
    step.log_probs = law.log()
    return step


def masked(step: Step, doubt: Doubt, ratio: float | None, max_edits: int = 3) -> list[int]:
    remask = MaskDoubtful(doubt, max_edits, ratio)(step, torch.zeros_like(step.window)).remask
    assert isinstance(remask, Tensor)
    return remask[0].nonzero()[:, 0].tolist()


PROBABILITIES = [0.05, 0.01, 0.5, 0.02, 0.05, 0.9, 0.0, 0.3]


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(None, [0, 1, 3, 4]), (1.0, [0, 1, 3, 4]), (0.5, [0, 1, 3]), (0.3, [1, 3]), (0.2, [1]), (0.14, []), (0.0, [])],
)
def test_the_cap_is_a_share_of_the_decided_tokens_and_takes_the_most_doubtful(
    ratio: float | None, expected: list[int]
) -> None:
    step = judged(PROBABILITIES, undecided=[6])  # seven are decided: floor(7 ratio); 0 and 4 tie, the left one goes
    assert masked(step, Unlikely(0.1), ratio) == expected


def test_positions_that_may_not_be_masked_again_do_not_use_up_the_cap() -> None:
    step = judged(PROBABILITIES, undecided=[6])
    step.state.edits[0, 1] = 1
    assert masked(step, Unlikely(0.1), 0.2, max_edits=1) == [3]


@pytest.mark.parametrize(("doubt", "expected"), [(Outvoted(0.6), [1, 3]), (Behind(0.3), [1, 3]), (Unlikely(0), [])])
def test_every_kind_of_doubt_has_a_degree(doubt: Doubt, expected: list[int]) -> None:
    assert masked(judged(PROBABILITIES, undecided=[6]), doubt, 0.3) == expected


@pytest.mark.parametrize("doubt", ["low_prob", "other", "logit_diff"])
def test_a_ratio_of_1_is_no_cap_and_of_0_no_remasking(doubt: str) -> None:
    for seed in range(3):
        frames = {
            name: run(hashed(seed), ragged(), strategy)
            for name, strategy in {
                "none": build_strategy("t2m", doubt=doubt, block_length=4),
                "one": build_strategy("t2m", doubt=doubt, block_length=4, ratio=1.0),
                "zero": build_strategy("t2m", doubt=doubt, block_length=4, ratio=0.0),
                "base": build_strategy("threshold", threshold=0.7, block_length=4),
            }.items()
        }
        for a, b in (("none", "one"), ("zero", "base")):
            assert torch.equal(frames[a].tokens, frames[b].tokens)
            assert torch.equal(frames[a].step_map, frames[b].step_map)


@pytest.mark.parametrize("ratio", [-0.1, 1.5, math.nan])
def test_a_ratio_out_of_range_is_an_error(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"ratio is .*; it must lie in \[0, 1\]"):
        build_strategy("t2m", ratio=ratio)
