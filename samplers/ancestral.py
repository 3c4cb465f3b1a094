"""Selectors that follow the reverse process of a noise schedule: tokens are revealed at random times.

From mask probability t to s < t a masked position is revealed with probability (t - s) / t (MDLM, 2406.07524, eq. 8
with alpha = 1 - t). The draw is split, reveal first and token second: one categorical over "mask or token", as
published code draws it, needs uniforms near (t - s) / t * p(token), which float32 cannot reach at many steps, so that
the entropy of the output falls with the number of steps. Read next: `revise.py`, whose ReMDM masks again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from mdlm.rng import counter_uniform
from mdlm.samplers.select import at_least_one_of
from mdlm.samplers.state import NOISE_REVEAL, NOISE_TOKEN, Step


def grid(step: Step, steps: int) -> tuple[Float64[Tensor, " batch"], Float64[Tensor, " batch"]]:
    """Mask probabilities (t, s) before and after this step of each row on the even grid 1, 1 - 1/steps, ..., 0."""
    done = step.state.block_step.double().clamp(max=steps - 1)
    return 1 - done / steps, 1 - (done + 1) / steps


@dataclass(frozen=True)
class Ancestral:
    """Reveal each candidate with probability (t - s) / t, on an even grid of `steps` steps per window.

    A step that reveals nothing in a row costs the row no forward: its canvas has not changed, so neither would the
    logits.
    """

    steps: int = 64
    blind: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least_one_of("steps", self.steps, 1)

    @property
    def schedule(self) -> int:
        """See `Selector`."""
        return self.steps

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        t, s = grid(step, self.steps)
        return step.candidates & (step.state.uniform(NOISE_REVEAL) < ((t - s) / t)[:, None])


@dataclass(frozen=True)
class JointAncestral:
    """`Ancestral` as published: one Gumbel race over all tokens and the mask, in float64. For parity; costs a forward
    in every step and a random number per token. Temperature and truncation are not applied."""

    steps: int = 64
    blind: ClassVar[bool] = False
    reads_scores: ClassVar[bool] = False
    draws: ClassVar[str] = "always"

    def __post_init__(self) -> None:
        at_least_one_of("steps", self.steps, 1)

    @property
    def schedule(self) -> int:
        """See `Selector`."""
        return self.steps

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`; leaves the tokens in `step.drawn`."""
        t, s = grid(step, self.steps)
        row, position = step.index
        vocab = step.log_probs.shape[-1]
        token = torch.arange(vocab, device=position.device)
        key, place = step.state.keys[row], position
        uniform = counter_uniform(key[:, None], NOISE_TOKEN, step.state.step, place[:, None], token)
        stay = counter_uniform(key, NOISE_REVEAL, step.state.step, place)
        race = step.log_probs.double() + (t - s).log()[row][:, None] - (-uniform.log()).log()
        masked = s.log()[row] - (-stay.log()).log()
        value, step.drawn = race.max(dim=-1)
        return step.dense(value > masked, fill=False) & step.candidates
