"""A model that errs, made from one that does not (layer A3), and how much a model errs.

Temperature makes an oracle over- or underconfident, uniform noise gives mass to what cannot be, and Gaussian noise on
the logits is wrong anew on every canvas without leaning either way: three ways in which trained models are wrong, each
of a size that one sets. `excess_nats` measures that size in the same unit for any denoiser, so that a noisy oracle can
be made as wrong as a trained model. Read next: `curves.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from mdlm.data import Batch
from mdlm.denoiser import Denoiser
from mdlm.eval.likelihood import NelboProtocol, accumulate
from mdlm.eval.sources import ExactSource
from mdlm.rng import counter_uniform, hash_counters

_NOISE = 0x4E4F4953  # stream tag, see mdlm/schedule.py


def canvas_noise(
    tokens: Int[Tensor, "batch length"], at: Bool[Tensor, "batch length"], vocab: int, seed: int
) -> Float64[Tensor, "rows vocab"]:
    """A standard normal number per asked position and symbol: a function of (seed, row of tokens, position, symbol).

    One row's tokens decide, not the batch: a canvas is judged alike whenever it comes up, and another one anew.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    canvas = hash_counters(positions, tokens.long()).sum(dim=1)  # wraps around; the position is in each term
    row, position = at.nonzero(as_tuple=True)
    symbols = torch.arange(vocab, device=tokens.device)
    u = counter_uniform(seed, _NOISE, canvas[row][:, None], position[:, None], symbols)
    return math.sqrt(2.0) * torch.erfinv(2.0 * u - 1.0)


@dataclass(frozen=True)
class NoisyOracle:
    """A source's oracle made imperfect (layer A3).

    q = (1 - uniform) r + uniform / symbols, where log r = log p / temperature + noise * z, normalised; z is standard
    normal, drawn anew for every canvas, position and symbol (`canvas_noise`). Temperatures below 1 are overconfident.
    Without `uniform` what is impossible stays so. Raises ValueError for values out of range.
    """

    source: ExactSource
    temperature: float = 1.0
    uniform: float = 0.0
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0 (1: the exact conditionals)")
        if not 0 <= self.uniform <= 1:
            raise ValueError(f"uniform is {self.uniform}; it must lie in [0, 1] (0: the exact conditionals)")
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"noise is {self.noise}; it must be 0 (the exact conditionals) or a positive number")

    @property
    def mask_token_id(self) -> int:
        """The source's."""
        return self.source.mask_token_id

    @property
    def num_tokens(self) -> int:
        """The source's."""
        return self.source.num_tokens

    @property
    def device(self) -> torch.device:
        """The source's."""
        return self.source.device

    def __call__(
        self,
        tokens: Int[Tensor, "batch length"],
        *,
        attention_mask: Bool[Tensor, "batch length"] | None = None,
        position_ids: Int[Tensor, "batch length"] | None = None,
        at: Bool[Tensor, "batch length"] | None = None,
    ) -> Float64[Tensor, "..."]:
        """See `Denoiser`."""
        exact = self.source(tokens, attention_mask=attention_mask, position_ids=position_ids, at=at)
        logits = exact[..., :-1] / self.temperature
        if self.noise:
            where = torch.ones_like(tokens, dtype=torch.bool) if at is None else at
            z = canvas_noise(tokens, where, self.source.vocab, self.seed)
            logits = logits + self.noise * z.view(logits.shape)
        mixed = (1 - self.uniform) * logits.softmax(dim=-1) + self.uniform / self.source.vocab
        return torch.nn.functional.pad(mixed.log(), (0, 1), value=-math.inf)


def excess_nats(source: ExactSource, denoiser: Denoiser, sequences: int = 256, samples: int = 4) -> tuple[float, float]:
    """How much a denoiser errs: its NELBO above that of the source's oracle, nats per token, with its standard error.

    Both see the same sequences under the same masks, which cancels nearly all noise; for the oracle it is 0 exactly.
    """
    x = source.sample(sequences, torch.Generator(source.device).manual_seed(4_711))
    batch = Batch(x, torch.ones_like(x, dtype=torch.bool), torch.arange(sequences))
    protocol = NelboProtocol(samples=samples, strata_rows=1)
    nats = [accumulate(each, [batch], protocol).nats for each in (denoiser, source)]
    difference = (nats[0] - nats[1]) / source.length
    return float(difference.mean()), float(difference.std()) / math.sqrt(sequences)
