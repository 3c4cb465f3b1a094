"""WINO, wide in and narrow out (2507.18578): commit generously, then judge each decided token without seeing it.

A step commits every position above a low threshold and masks decided tokens again that the model, not seeing them,
finds less likely than a high one. What judges is a feeder: at decided positions it answers with leave-one-out
predictions, by shadow rows (`mdlm/shadow.py`: one forward, one more token per decided position of the block) or by
masking each token in turn (works for every denoiser: one more row per decided position in the same call, and exact).
Read next: `presets_revise.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mdlm.denoiser import Denoiser
from mdlm.samplers.edit import log_of
from mdlm.samplers.revise import Revision, held
from mdlm.samplers.select import Looking, at_least_one_of, ranks
from mdlm.samplers.state import RowMemory, State, Step
from mdlm.shadow import ShadowDenoiser


@dataclass(frozen=True)
class WideIn(Looking):
    """Scores above log(`threshold`), the best `share` of the window's masks, but at least `least` and at most `most` of
    them. If none is above, the driver commits the best."""

    threshold: float = 0.6
    share: float = 0.7
    least: int = 5
    most: int = 20

    def __post_init__(self) -> None:
        at_least_one_of("tau_wide", self.threshold, 0)
        if not 0 <= self.share <= 1:
            raise ValueError(f"share is {self.share}; it must lie in [0, 1]")
        if not 1 <= self.least <= self.most:
            raise ValueError(f"least={self.least} and most={self.most}: least must be 1 or more and not above most")

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        """See `Selector`."""
        masks = (step.state.masked & step.window).sum(dim=-1)
        cap = (masks.double() * self.share).floor().long().clamp(min=self.least, max=self.most)
        return (scores > log_of(self.threshold)) & (ranks(scores) < cap[:, None])


@dataclass(frozen=True)
class NarrowOut:
    """Mask decided tokens again whose leave-one-out probability is below `threshold`.

    Only in a step that commits more than one token. If as many fail as the step before committed, or more, only that
    number less one does, the least likely first: so a block of n positions takes at most n steps. 0: nothing is masked
    again and nothing more is computed.
    """

    threshold: float = 0.9
    max_edits: int = 16

    def __post_init__(self) -> None:
        at_least_one_of("tau_narrow", self.threshold, 0)
        at_least_one_of("max_edits", self.max_edits, 0)

    @property
    def reads_decided(self) -> bool:
        """See `Reviser`."""
        return self.threshold > 0

    def pending(self, state: State) -> Bool[Tensor, " batch"]:
        """See `Reviser`: never."""
        return torch.zeros_like(state.rows, dtype=torch.bool)

    def __call__(self, step: Step, committed: Bool[Tensor, "batch seq"]) -> Revision:
        """See `Reviser`."""
        if not self.reads_decided:
            return Revision()
        state = step.state
        memory = step.remember(self, lambda: RowMemory({"accepted": torch.zeros_like(state.rows)}))
        assert isinstance(memory, RowMemory)
        before, accepted = memory["accepted"], committed.sum(dim=-1)
        memory["accepted"] = accepted
        log_prob = step.dense(step.of(step.packed(state.tokens)), torch.inf)
        fails = held(step) & (log_prob < log_of(self.threshold)) & (state.edits < self.max_edits)
        number = fails.sum(dim=-1)
        number = torch.where(number >= before, (before - 1).clamp(min=0), number)
        number = torch.where(accepted > 1, number, 0)
        order = ranks(torch.where(fails, -log_prob, -torch.inf))
        return Revision(remask=fails & (order < number[:, None]))


@dataclass(frozen=True)
class Shadows:
    """Cache policy: leave-one-out predictions by shadow rows."""

    exchangeable: ClassVar[bool] = False

    def start(self, denoiser: Denoiser) -> LeaveOneOut:
        """See `CachePolicy`. Raises ValueError for a denoiser without shadow rows."""
        if not isinstance(denoiser, ShadowDenoiser):
            raise ValueError(
                f"{type(denoiser).__name__} has no shadow rows (with_shadows); verify by masking each token in turn "
                "(verify='masked'), which costs a row per decided token"
            )
        denoiser.check_shadows()
        return LeaveOneOut(denoiser, denoiser)


@dataclass(frozen=True)
class MaskedInTurn:
    """Cache policy: leave-one-out predictions of copies of the row, each with one decided token masked."""

    exchangeable: ClassVar[bool] = False

    def start(self, denoiser: Denoiser) -> LeaveOneOut:
        """See `CachePolicy`."""
        return LeaveOneOut(denoiser, None)


@dataclass
class LeaveOneOut:
    """A feeder that answers at decided positions as if their token were not there.

    Shadows: one evaluation per step, length + decided tokens. Masked in turn: 1 + decided evaluations, each of the
    row's length. Both are one forward.
    """

    denoiser: Denoiser
    shadows: ShadowDenoiser | None

    def __call__(
        self,
        state: State,
        tokens: Int64[Tensor, "batch seq"],
        at: Bool[Tensor, "batch seq"],
        window: Bool[Tensor, "batch seq"],
    ) -> Float[Tensor, "rows vocab"]:
        """See `Feeder`."""
        judged, open_ = at & ~state.masked, at & state.masked
        fed, copies = at.any(dim=-1), judged.sum(dim=-1)
        state.forwards += fed
        if self.shadows is not None:
            state.nfe += fed
            state.tokens_fed += fed * (state.lengths + copies)
            parts = self._shadowed(state.lengths[fed], tokens[fed], open_[fed], judged[fed])
        else:
            fed = open_.any(dim=-1)
            state.nfe += fed + copies
            state.tokens_fed += (fed + copies) * state.lengths
            parts = self._masked(state.lengths, tokens, open_, judged)
        here = at & state.masked
        out = parts[0].new_empty(int(at.sum()), parts[0].shape[-1])
        out[here[at]], out[~here[at]] = parts
        return out

    def _shadowed(self, lengths: Tensor, tokens: Tensor, open_: Tensor, judged: Tensor) -> tuple[Tensor, Tensor]:
        assert self.shadows is not None
        tokens, mask, longest = trimmed(tokens, lengths)
        open_, judged = open_[:, :longest], judged[:, :longest]
        if not bool(judged.any()):
            out = self.denoiser(tokens, attention_mask=mask, at=open_)
            return out, out[:0]
        return self.shadows.with_shadows(tokens, at=open_, shadows=judged, attention_mask=mask)

    def _masked(self, lengths: Tensor, tokens: Tensor, open_: Tensor, judged: Tensor) -> tuple[Tensor, Tensor]:
        row, position = judged.nonzero(as_tuple=True)
        fed = open_.any(dim=-1)
        left_out = torch.zeros_like(judged[row]).scatter_(1, position[:, None], True)
        copies = tokens[row].masked_fill(left_out, self.denoiser.mask_token_id)
        tokens, mask, longest = trimmed(torch.cat([tokens[fed], copies]), torch.cat([lengths[fed], lengths[row]]))
        at = torch.cat([open_[fed], left_out])[:, :longest]
        out = self.denoiser(tokens, attention_mask=mask, at=at)
        return out[: len(out) - len(row)], out[len(out) - len(row) :]

    def keep(self, rows: Int64[Tensor, " batch"]) -> None:
        """See `Feeder`."""


def trimmed(
    tokens: Int64[Tensor, "batch seq"], lengths: Int64[Tensor, " batch"]
) -> tuple[Int64[Tensor, "batch longest"], Bool[Tensor, "batch longest"] | None, int]:
    """The rows without columns that are padding in all of them, their attention mask (None: no padding), the width."""
    longest = int(lengths.max())
    real = torch.arange(longest, device=tokens.device) < lengths[:, None]
    return tokens[:, :longest], None if bool(real.all()) else real, longest
