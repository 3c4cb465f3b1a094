"""`StoredFeeder`: feeds the positions a policy asks for and uses the stored keys and values of all others.

It keeps, per row, what was fed last at each position. So a token that was written, edited or masked again since is
known without being told, and rows begin blocks, refresh and finish each in their own time. All of that is state of the
feeder: two feeders (two requests, two branches of guidance) never share anything. Read next: `cache_policies.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from mdlm.denoiser import CachedDenoiser, Denoiser
from mdlm.keyvalues import KeyValues
from mdlm.samplers.state import RowMemory, State


@dataclass(frozen=True)
class View:
    """What a `FeedPolicy` decides by."""

    at: Bool[Tensor, "batch seq"]
    """Where predictions are asked for."""
    window: Bool[Tensor, "batch seq"]
    masked: Bool[Tensor, "batch seq"]
    """Undecided positions."""
    editable: Bool[Tensor, "batch seq"]
    real: Bool[Tensor, "batch seq"]
    """Tokens, not padding."""
    changed: Bool[Tensor, "batch seq"]
    """Tokens that are not what was last fed there; before its first forward, all of a row."""
    begins: Bool[Tensor, " batch"]
    """The row has entered another window since its last whole forward."""
    forwards: Int64[Tensor, " batch"]
    """Forwards of the row so far."""
    since_whole: Int64[Tensor, " batch"]
    """Forwards of the row since the last one that fed all of it, that one included; 0 before the first."""
    similarity: Float64[Tensor, "batch seq"] | None = None
    """How alike the values of each position were the last two times it was fed (`KeyValues.similarity`); None unless
    the feeder was told to watch them."""

    @property
    def position(self) -> Int64[Tensor, " seq"]:
        """0, 1, 2, ..."""
        return torch.arange(self.at.shape[1], device=self.at.device)


class FeedPolicy(Protocol):
    """Which positions are fed in a step."""

    def plan(self, view: View) -> Bool[Tensor, "batch seq"]:
        """Real positions to feed; those in `at` are fed anyway, and only rows with one are fed at all."""


def cached_denoiser(denoiser: Denoiser, policy: object) -> CachedDenoiser:
    """`denoiser`, if it can store keys and values; ValueError if not."""
    if not isinstance(denoiser, CachedDenoiser):
        raise ValueError(
            f"{type(policy).__name__} stores keys and values, which {type(denoiser).__name__} cannot; ModelDenoiser "
            "(an MDLMForMaskedLM) can, and so can any denoiser with the methods of CachedDenoiser. Leave the cache "
            "out (cache='none')"
        )
    denoiser.key_values(1, 1)  # raises if the model, as it is loaded, cannot
    return denoiser


@dataclass
class StoredFeeder:
    """The `Feeder` of all policies that store keys and values."""

    denoiser: CachedDenoiser
    policy: FeedPolicy
    forget_right: bool = False
    """What lies right of the fed positions is out of date and must be fed before it is used."""
    watch_values: bool = False
    """Note how much values change, for policies that go by it."""
    kv: KeyValues | None = field(default=None, init=False)
    memory: RowMemory = field(default_factory=lambda: RowMemory({}), init=False)
    """`tokens [batch, seq]` as last fed, -1 where never; per row `lengths`, `block`, `forwards`, `since_whole`."""

    def __call__(
        self,
        state: State,
        tokens: Int64[Tensor, "batch seq"],
        at: Bool[Tensor, "batch seq"],
        window: Bool[Tensor, "batch seq"],
    ) -> Float[Tensor, "rows vocab"]:
        """See `Feeder`."""
        kv, memory = self._store(state), self.memory
        seq = kv.valid.shape[1]
        tokens, at, window = tokens[:, :seq], at[:, :seq], window[:, :seq]
        asked = at.any(dim=-1)
        real = torch.arange(seq, device=tokens.device) < state.lengths[:, None]
        view = View(
            at=at,
            window=window,
            masked=state.masked[:, :seq],
            editable=state.editable[:, :seq],
            real=real,
            changed=real & (tokens != memory["tokens"]),
            begins=state.block != memory["block"],
            forwards=memory["forwards"],
            since_whole=memory["since_whole"],
            similarity=kv.similarity,
        )
        feed = (self.policy.plan(view) | at) & asked[:, None]
        if self.denoiser.predicts_from_previous:
            feed[:, :-1] |= at[:, 1:]
        counts = feed.sum(dim=-1)
        log_probs = self._forward(kv, tokens, feed, at, counts)
        state.nfe += asked
        state.forwards += asked
        state.tokens_fed += counts
        whole = asked & (counts >= state.lengths)
        memory["tokens"] = torch.where(feed, tokens, memory["tokens"])
        if self.forget_right:
            after = ~feed.flip(-1).cumsum(dim=-1).flip(-1).bool()
            memory["tokens"] = memory["tokens"].masked_fill(after & asked[:, None], -1)
        memory["block"] = torch.where(whole, state.block, memory["block"])
        memory["since_whole"] = torch.where(whole, 1, memory["since_whole"] + asked)
        memory["forwards"] = memory["forwards"] + asked
        return log_probs

    def keep(self, rows: Int64[Tensor, " batch"]) -> None:
        """See `Feeder`."""
        if self.kv is None or len(rows) == len(self.kv.valid):
            return
        self.memory = self.memory.keep(rows)
        seq = int(self.memory["lengths"].max()) if len(rows) else 0
        self.memory["tokens"] = self.memory["tokens"][:, :seq]
        self.kv = self.kv.keep(rows, seq)

    def _store(self, state: State) -> KeyValues:
        """The store, made at the first call."""
        if self.kv is None:
            rows, seq = len(state.rows), int(state.lengths.max())
            self.kv = self.denoiser.key_values(rows, seq)
            if self.watch_values:
                self.kv.similarity = torch.zeros((rows, seq), dtype=torch.float64, device=state.rows.device)
            zero = torch.zeros_like(state.rows)
            never = torch.full((rows, seq), -1, device=zero.device)
            per_row = {"lengths": state.lengths, "block": zero - 1, "forwards": zero, "since_whole": zero}
            self.memory = RowMemory({"tokens": never, **per_row})
        return self.kv

    def _forward(
        self,
        kv: KeyValues,
        tokens: Int64[Tensor, "batch seq"],
        feed: Bool[Tensor, "batch seq"],
        at: Bool[Tensor, "batch seq"],
        counts: Int64[Tensor, " batch"],
    ) -> Float[Tensor, "rows vocab"]:
        """One call, or two if some rows feed at most half of what others do: padding them would cost more."""
        least, most = torch.stack(counts.aminmax()).tolist()
        if least > most // 2:
            return self._call(kv, tokens, feed, at, counts)
        few = counts <= most // 2
        groups = [group.nonzero()[:, 0] for group in (few & (counts > 0), ~few)]
        groups = [group for group in groups if len(group)]
        answers = [self._call(kv.of(rows), tokens[rows], feed[rows], at[rows], counts[rows]) for rows in groups]
        if len(groups) == 1:
            return answers[0]
        in_few = few[at.nonzero()[:, 0]]
        out = torch.empty((len(in_few), *answers[0].shape[1:]), dtype=answers[0].dtype, device=in_few.device)
        out[in_few], out[~in_few] = answers
        return out

    def _call(
        self,
        kv: KeyValues,
        tokens: Int64[Tensor, "batch seq"],
        feed: Bool[Tensor, "batch seq"],
        at: Bool[Tensor, "batch seq"],
        counts: Int64[Tensor, " batch"],
    ) -> Float[Tensor, "rows vocab"]:
        """Feed these rows, those with fewer positions padded with their last one."""
        position = feed.nonzero()[:, 1]
        width = int(counts.max())
        if len(position) == width * len(feed):
            positions, real = position.view(-1, width), None
            wanted = at.gather(1, positions)
        else:
            slot = torch.arange(width, device=feed.device)
            last = (counts - 1)[:, None]
            positions = position[(counts.cumsum(dim=0) - counts)[:, None] + torch.minimum(slot, last)]
            real = slot <= last
            wanted = at.gather(1, positions) & real
        return self.denoiser.feed(
            tokens.gather(1, positions), kv, position_ids=positions, attention_mask=real, at=wanted
        )
