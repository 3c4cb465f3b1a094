"""What the outer step asks of the other islands: it gives a pseudo-gradient and is given the merged one.

The outer step knows no more than this page. `Alone` is the exchange of one island; `routes.py` holds those between
several. Read next: `routes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float32
from torch import Tensor

from mdlm.training.fragments import Fragment


@dataclass(frozen=True)
class Message:
    """What an island puts into an exchange."""

    fragment: int
    round: int
    pieces: Fragment
    delta: Float32[Tensor, " values"]
    """Pseudo-gradient, anchor - local."""
    anchor: Float32[Tensor, " values"]
    weight: float


@dataclass(frozen=True)
class Stats:
    """Numbers of one exchange. Norms are of what the islands meant to send, over this process's shard."""

    norm: float
    merged_norm: float
    cosine: float
    """Between this island's pseudo-gradient and the merged one; nan if either is zero."""
    norms: tuple[float, ...]
    contributors: tuple[int, ...]
    """Islands with a part in the result; the others were not finite, not trusted, or had no weight."""
    consensus: float
    """Root mean square distance of the contributors' local values from their mean (for plain averaging)."""
    bytes_sent: int


@dataclass(frozen=True)
class Merged:
    """What comes out, the same on all islands (except `share`)."""

    delta: Float32[Tensor, " values"]
    rolled_back: tuple[int, ...]
    """Pieces that nobody contributed to: they return to the anchor, and the outer optimizer leaves them alone."""
    share: float
    """Largest coefficient of this island's own pseudo-gradient; 0: it was left out."""
    stats: Stats
    anchor: Float32[Tensor, " values"] | None = None
    """The new anchor itself, where a syncer keeps it; the island's own outer optimizer is left alone then."""


class Exchange(Protocol):
    """How the outer step reaches the other islands."""

    @property
    def islands(self) -> int:
        """Number of islands."""

    def start(self, message: Message) -> Callable[[], Merged]:
        """Begins an exchange; the function returned waits for its result, and raises what went wrong."""

    def rewind(self) -> None:
        """Forgets every exchange whose result was not taken up, so that their messages can be started again."""

    def state_dict(self) -> dict[Any, Any]:
        """What a resume needs, as of the results taken up so far."""

    def load_state_dict(self, state: Mapping[Any, Any]) -> None:
        """Takes over a saved state."""


def measure(message: Message, merged: Tensor, norms: list[float], contributors: list[int], sent: int) -> Stats:
    """The numbers of one exchange; `sent` in bytes."""
    finite = bool(message.delta.isfinite().all())
    own, whole = (float(x.to(torch.float64).norm()) for x in (message.delta, merged))
    product = float(message.delta.to(torch.float64) @ merged.to(torch.float64)) if finite else float("nan")
    squares = sum(norms[i] ** 2 for i in contributors) / max(1, len(contributors))
    return Stats(
        norm=own,
        merged_norm=whole,
        cosine=product / (own * whole) if finite and own * whole > 0 else float("nan"),
        norms=tuple(norms),
        contributors=tuple(contributors),
        consensus=max(0.0, squares - whole * whole) ** 0.5,
        bytes_sent=sent,
    )


def unmeasured(norms: list[float], contributors: list[int], sent: int) -> Stats:
    """Without the numbers that take passes over all values: for exchanges of every step."""
    unknown = float("nan")
    return Stats(unknown, unknown, unknown, tuple(norms), tuple(contributors), unknown, sent)


class Alone:
    """One island: what goes in comes out, unless it is not finite: then the island returns to its anchor."""

    islands = 1

    def start(self, message: Message) -> Callable[[], Merged]:
        """Nothing to wait for."""
        finite = bool(message.delta.isfinite().all())
        delta = message.delta if finite else torch.zeros_like(message.delta)
        rolled_back = () if finite else tuple(range(len(message.pieces)))
        stats = measure(message, delta, [float(message.delta.to(torch.float64).norm())], [0] if finite else [], 0)
        merged = Merged(delta, rolled_back, 1.0 if finite else 0.0, stats)
        return lambda: merged

    def rewind(self) -> None:
        """Nothing is under way."""

    def state_dict(self) -> dict[Any, Any]:
        """Nothing is remembered."""
        return {}

    def load_state_dict(self, state: Mapping[Any, Any]) -> None:
        """Nothing to take over."""
