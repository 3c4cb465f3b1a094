"""Cache policies: which positions of a canvas are fed in a step, the others being answered from stored keys and values.

| policy | name | fed in a step | exact |
|---|---|---|---|
| `NoCache` | `none` | everything | always |
| `PrefixCache` | `prefix` | the window and all right of it | no |
| `DualCache` | `dual` | the window | no |
| `DelayedCache` | `delayed` | undecided tokens, and each new one once | no |
| `IntervalCache` | `interval` | what is asked, new tokens, the most changed; prompt and answer at intervals | no |
| `BlockCache` | `block` | the current block of a block-causal model, each finished one once more | always |

In a model that attends both ways every key depends on every token, so keys of tokens that have not changed are out of
date as soon as any token has: the middle four are approximations, and an interval of 1 makes each of them exact. How
much they lose depends on the model; how much they save is `Generation.tokens_fed`. Read next: `presets_cache.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from mdlm.denoiser import Denoiser
from mdlm.samplers.arguments import one_of
from mdlm.samplers.cache import CachePolicy, NoCache
from mdlm.samplers.cache_feeder import StoredFeeder, View, cached_denoiser
from mdlm.samplers.select import within
from mdlm.samplers.select_adaptive import highest


def _at_least_one(**intervals: int | None) -> None:
    """Raises ValueError for an interval below 1."""
    for name, value in intervals.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be 1 (in every forward: exact) or more")


def _due(view: View, refresh: int | None) -> Bool[Tensor, " batch"]:
    """Rows whose last whole forward is `refresh` forwards ago (None: never due)."""
    if refresh is None:
        return torch.zeros_like(view.begins)
    return view.since_whole >= refresh


@dataclass(frozen=True)
class PrefixCache:
    """Approximate. The whole row when its window begins, then the window and everything right of it (Fast-dLLM,
    2505.22618, section 3.2); the text left of the window keeps its keys and values."""

    refresh: int | None = None
    """Feed the whole row again every so many forwards; None: only when a window begins."""

    def __post_init__(self) -> None:
        _at_least_one(refresh=self.refresh)

    def start(self, denoiser: Denoiser) -> StoredFeeder:
        """See `CachePolicy`."""
        return StoredFeeder(cached_denoiser(denoiser, self), self)

    def plan(self, view: View) -> Bool[Tensor, "batch seq"]:
        """See `FeedPolicy`."""
        whole = view.begins | _due(view, self.refresh)
        start = view.window.int().argmax(dim=-1)
        start = torch.where(whole, 0, start)
        return (view.position >= start[:, None]) & view.real | view.changed


@dataclass(frozen=True)
class DualCache:
    """Approximate. The whole row when its window begins, then the window only, its keys and values written in place
    (Fast-dLLM, 2505.22618, section 3.2, "DualCache")."""

    refresh: int | None = None
    """Feed the whole row again every so many forwards; None: only when a window begins."""

    def __post_init__(self) -> None:
        _at_least_one(refresh=self.refresh)

    def start(self, denoiser: Denoiser) -> StoredFeeder:
        """See `CachePolicy`."""
        return StoredFeeder(cached_denoiser(denoiser, self), self)

    def plan(self, view: View) -> Bool[Tensor, "batch seq"]:
        """See `FeedPolicy`."""
        whole = view.begins | _due(view, self.refresh)
        return (view.window | whole[:, None]) & view.real | view.changed


@dataclass(frozen=True)
class DelayedCache:
    """Approximate. Undecided tokens are always fed; a token's keys and values are stored one step after it was written,
    when it has been fed once as itself (dKV-Cache-Decode, 2505.15781, section 3.2)."""

    refresh: int | None = 8
    """Feed the whole row every so many forwards; None: never again after the first."""

    def __post_init__(self) -> None:
        _at_least_one(refresh=self.refresh)

    def start(self, denoiser: Denoiser) -> StoredFeeder:
        """See `CachePolicy`."""
        return StoredFeeder(cached_denoiser(denoiser, self), self)

    def plan(self, view: View) -> Bool[Tensor, "batch seq"]:
        """See `FeedPolicy`."""
        return view.masked | view.changed | (view.real & _due(view, self.refresh)[:, None])


@dataclass(frozen=True)
class IntervalCache:
    """Approximate. The given tokens are fed every `prompt_refresh` forwards of a row and the answer every
    `answer_refresh`; in between what is asked for, new tokens, and the fraction `ratio` of the answer whose values
    have changed most (dLLM-Cache, 2506.06295, section 3).

    The paper keeps the outputs of attention and feed-forward layers too, so that it knows in every layer how far each
    token's values would have moved by now. Here are keys and values only, and what counts is how far a token's values
    moved when it was last fed (the cosine of new and old, over all layers); equal ones from the left.
    """

    prompt_refresh: int = 100
    answer_refresh: int = 6
    ratio: float = 0.25
    """In [0, 1], rounded down to whole tokens; 0: none. 1 feeds the whole answer in every forward."""

    def __post_init__(self) -> None:
        _at_least_one(prompt_refresh=self.prompt_refresh, answer_refresh=self.answer_refresh)
        within("ratio", self.ratio, 0, 1)

    def start(self, denoiser: Denoiser) -> StoredFeeder:
        """See `CachePolicy`."""
        return StoredFeeder(cached_denoiser(denoiser, self), self, watch_values=self.ratio > 0)

    def plan(self, view: View) -> Bool[Tensor, "batch seq"]:
        """See `FeedPolicy`."""
        given = ((view.forwards % self.prompt_refresh) == 0)[:, None] & ~view.editable
        answer = ((view.forwards % self.answer_refresh) == 0)[:, None] & view.editable
        feed = (given | answer) & view.real | view.changed
        if view.similarity is None:
            return feed
        own = view.editable & view.real
        count = (own.sum(dim=-1).double() * self.ratio).floor().long()
        return feed | highest(torch.where(own, -view.similarity, -torch.inf), count)


@dataclass(frozen=True)
class BlockCache:
    """Exact, for block-causal models: a block depends on earlier blocks only, so keys and values of a block that is
    finished stay right (BD3-LM, 2503.09573, section 4). Each forward feeds the blocks it is asked about, and before
    them whatever has changed since it was stored; later blocks are not fed at all.

    A block that has just been finished is thus fed once more, together with the first step of the next one: that is
    what stores it, and it is counted. Right for all windows; saves most where they are the model's blocks,
    `Blocks(block_size, align="row")`. Raises ValueError if the model is not block-causal.
    """

    def start(self, denoiser: Denoiser) -> StoredFeeder:
        """See `CachePolicy`."""
        cached = cached_denoiser(denoiser, self)
        if cached.block_size is None:
            raise ValueError(
                "BlockCache needs a block-causal model (config.block_size); in this one every token depends on all "
                "others, so stored keys and values are approximations: take PrefixCache or DualCache "
                "(cache='prefix' or 'dual')"
            )
        return StoredFeeder(cached, _FromFirstChange(cached.block_size), forget_right=True)


@dataclass(frozen=True)
class _FromFirstChange:
    """The `FeedPolicy` of `BlockCache`."""

    block_size: int

    def plan(self, view: View) -> Bool[Tensor, "batch seq"]:
        """See `FeedPolicy`."""
        block = view.position // self.block_size
        first = (view.at | view.changed).int().argmax(dim=-1) // self.block_size
        last = torch.where(view.at, block, -1).amax(dim=-1)
        return (block >= first[:, None]) & (block <= last[:, None]) & view.real


CacheName = Literal["none", "prefix", "dual", "delayed", "interval", "block"]

CACHES: dict[str, Callable[..., CachePolicy]] = {
    "none": NoCache,
    "prefix": PrefixCache,
    "dual": DualCache,
    "delayed": DelayedCache,
    "interval": IntervalCache,
    "block": BlockCache,
}
"""Name -> policy, with its own defaults when called."""


def cache_named(name: str) -> CachePolicy:
    """The policy of this name with its defaults; ValueError that lists the names."""
    one_of("cache", name, CACHES)
    return CACHES[name]()
