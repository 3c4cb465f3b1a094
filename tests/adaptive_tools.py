"""What tests of the adaptive selectors share: models, canvases, the reference beside the product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import reference_samplers as reference
import torch
from sampler_tools import (
    DriftDenoiser,
    HashDenoiser,
    ragged_canvas,
    tiny_model,
    unmask,
)

from mdlm.denoiser import Denoiser, ModelDenoiser
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.draw import Draw
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.windows import Blocks, whole

SAMPLE = Draw(temperature=1.0)
MODELS: dict[str, Callable[[], Denoiser]] = {
    "sharp": lambda: HashDenoiser(9.0, seed=1),
    "flat": lambda: HashDenoiser(3.0, seed=2),
    "steady": lambda: DriftDenoiser(9.0, seed=3),
    "transformer": tiny_model,
}
each_model = pytest.mark.parametrize("model", MODELS)
each_length = pytest.mark.parametrize("block_length", [None, 1, 4])


DREAM_SCORES: dict[str, Callable[[reference.Law], float]] = {
    "maskgit_plus": reference.top1,
    "topk_margin": reference.margin,
    "entropy": lambda p: -reference.entropy(p),
}


def laws_of(denoiser: Denoiser) -> reference.Model:
    return lambda row: denoiser(torch.tensor([row]))[0].double().exp().tolist()


def parity_canvas(denoiser: Denoiser) -> Canvas:
    """For a transformer without the row of masks alone, whose positions differ by rounding only."""
    return ragged_canvas()[[0, 2, 3, 4, 5]] if isinstance(denoiser, ModelDenoiser) else ragged_canvas()


def check_parity(
    strategy: Strategy,
    denoiser: Denoiser,
    block_length: int | None,
    rule: Callable[[int], reference.Rule],
    pick: Callable[[int, int, int, reference.Law], int] | None = None,
    canvas: Canvas | None = None,
) -> None:
    """Tokens, steps and NFE of every row of a batch are those of the reference, row for row."""
    canvas = parity_canvas(denoiser) if canvas is None else canvas
    outcome = unmask(denoiser, canvas, strategy)
    for number, length in enumerate(canvas.lengths.tolist()):
        one = canvas.tokens[number, :length].tolist(), canvas.editable[number, :length].tolist()
        expected = reference.decode(
            laws_of(denoiser),
            *one,
            denoiser.mask_token_id,
            block_length,
            lambda number=number: rule(number),  # type: ignore[misc]
            None if pick is None else lambda *now, number=number: pick(number, *now),  # type: ignore[misc]
        )
        found = outcome.row(number)
        assert found["tokens"] == expected.tokens
        assert found["step_map"] == expected.step_map
        assert found["nfe"] == expected.steps


def window(block_length: int | None) -> Blocks | Callable:
    return whole if block_length is None else Blocks(block_length)
