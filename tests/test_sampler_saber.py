"""Saber: a threshold by what has been committed, and taking back what has fallen."""

from __future__ import annotations

import pytest
import torch
from sampler_tools import HashDenoiser, unmask
from torch import Tensor

from mdlm.denoiser import FunctionDenoiser
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.presets import build_strategy

# Saber.


def test_saber_commits_what_is_surer_than_the_mean_so_far() -> None:
    """Confidences .9, .8, .85, .5, .84 that never change: first the best two (mean .875), then none exceeds the mean
    and the best two go, then the last."""
    c = torch.tensor([0.9, 0.8, 0.85, 0.5, 0.84], dtype=torch.float64)
    law = torch.stack([c, 1 - c, 0 * c], dim=-1)
    denoiser = FunctionDenoiser(lambda tokens: law.log().expand(len(tokens), -1, -1), 2, 3)
    strategy = build_strategy("saber", backtrack=False)
    assert unmask(denoiser, Canvas.from_prompts([[]], 5), strategy).last.step_map[0].tolist() == [0, 1, 0, 2, 1]


def test_saber_counts_what_earlier_blocks_hold() -> None:
    """Mean of the first block (.9, .8): .85, which both tokens of the second exceed."""
    c = torch.tensor([0.9, 0.8, 0.86, 0.87], dtype=torch.float64)
    law = torch.stack([c, 1 - c, 0 * c], dim=-1)
    denoiser = FunctionDenoiser(lambda tokens: law.log().expand(len(tokens), -1, -1), 2, 3)
    strategy = build_strategy("saber", least=1, backtrack=False, block_length=2)
    assert unmask(denoiser, Canvas.from_prompts([[]], 4), strategy).last.step_map[0].tolist() == [0, 1, 2, 2]


def test_saber_takes_back_what_has_fallen_most() -> None:
    """Once two tokens are known, position 1 doubts the one it holds: it is masked again and written anew."""

    def logits(tokens: Tensor) -> Tensor:
        c = torch.tensor([0.9, 0.8, 0.6, 0.55, 0.54, 0.53], dtype=torch.float64).expand(*tokens.shape).clone()
        c[(tokens != 2).sum(dim=-1) >= 2, 1] = 0.1
        return torch.stack([c, 1 - c, 0 * c], dim=-1).log()

    frames, canvas = {}, Canvas.from_prompts([[]], 6)
    for backtrack in (False, True):
        strategy = build_strategy("saber", backtrack=backtrack)
        frames[backtrack] = unmask(FunctionDenoiser(logits, 2, 3), canvas, strategy).frames
    assert frames[True][1].step_map[0].tolist() == [0, 0, -1, -1, -1, -1]
    assert frames[False][2].step_map[0].tolist() == [0, 0, 1, 1, -1, -1]
    assert frames[True][2].step_map[0].tolist() == [0, -1, 1, 1, -1, -1]
    assert frames[False][-1].tokens[0].tolist() == [0, 0, 0, 0, 0, 0]
    assert frames[True][-1].tokens[0].tolist() == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("least", [1, 2, 5])
def test_saber_gains_a_token_in_every_step(least: int) -> None:
    canvas = Canvas.from_prompts([[1], [2, 3]], [30, 17])
    outcome = unmask(HashDenoiser(4.0), canvas, build_strategy("saber", least=least, block_length=8))
    left = torch.stack([frame.masked.sum(dim=-1) for frame in outcome.frames])
    assert bool(((left[1:] < left[:-1]) | (left[:-1] == 0)).all())
