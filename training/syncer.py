"""Islands that never wait for each other: a syncer holds the anchors and merges whatever has arrived.

Decoupled DiLoCo (2604.21428): per fragment, pushes are pooled; when a quorum has arrived, a grace window waits for
more, but no longer than the islands that wait can go on training; then the pool is merged (by weights, norms and
directions, as in `merge.py`), the outer optimizer moves the anchor, and every island of the pool gets it. A late
island's push opens the next pool. A pseudo-gradient is the anchor that its island last had less its local values, so a
late one adds its own progress and takes back nobody else's (the paper's syncer subtracts from its newest anchor: the
same if nobody is late).

HALoS (2506.04531): a quorum of one and no grace, so every push is applied on arrival, by delayed Nesterov; and syncers
form a tree: after every `relay` merges one sends the way its anchor has gone to its own syncer, goes on serving, and
merges the answer as anchor = (1 - mix) anchor + mix answer. The way it went in the meantime stays in its anchor, and
never travels as such: the next way is measured from the merged anchor.

Pure state, with a clock passed in; processes and sockets are `server.py`'s. Read next: `server.py`, `merge.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from mdlm.training.fragments import Fragment
from mdlm.training.merge import combine, decide, gram
from mdlm.training.outer_config import OuterConfig
from mdlm.training.outer_optim import OPTIMIZERS, restore

MARGIN = 0.8
"""Share of the time that an island can go on without an answer for which it is made to wait."""


@dataclass(frozen=True)
class Push:
    """One island's pseudo-gradient of one fragment."""

    island: int
    number: int
    """Counts this island's pushes of the fragment from 0; one that is sent again is merged once."""
    delta: Float32[Tensor, " values"]
    weight: float
    slack: float = 0.0
    """Seconds for which the island has other things to do."""


@dataclass(frozen=True)
class Answer:
    """What every island of a pool gets."""

    anchor: Float32[Tensor, " values"]
    version: int
    """Merges of the fragment so far."""
    norms: Mapping[int, float]
    """Island -> length of its pseudo-gradient, of all in the pool."""
    shares: Mapping[int, float]
    """Island -> largest coefficient of its pseudo-gradient; 0: it was left out."""
    merged_norm: float


@dataclass
class _Pool:
    pushes: dict[int, Push] = field(default_factory=dict)
    arrived: dict[int, float] = field(default_factory=dict)
    quorum_at: float | None = None
    answer: Answer | None = None


class Ticket:
    """A push's place in a pool; `answer` is None until the pool is merged."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool

    @property
    def answer(self) -> Answer | None:
        """The anchor after the merge."""
        return self._pool.answer


class Syncer:
    """Anchors, outer optimizers and pools of all fragments.

    Attributes:
        members: islands that are known to be alive; a quorum never asks for more.
        anchors: per fragment a flat float32 buffer.
        relaying: fragments whose report is not answered yet.
    """

    def __init__(self, config: OuterConfig, fragments: Sequence[Fragment], anchors: Sequence[Tensor]) -> None:
        """Takes copies of the anchors.

        Args:
            config: outer optimizer, merge rule, and when to merge (`config.syncer`).
            fragments: the layout of the flat buffers, as on the islands.
            anchors: the islands' common start.
        """
        self.config, self.options = config, config.syncer
        self.fragments = list(fragments)
        self.anchors = [anchor.detach().to(torch.float32, copy=True).cpu() for anchor in anchors]
        self._pieces = [[p.of(a) for p in f] for f, a in zip(self.fragments, self.anchors)]
        self._optimizers = [OPTIMIZERS[config.optimizer](pieces, config) for pieces in self._pieces]
        self.members: set[int] = set()
        count = len(self.fragments)
        self.versions = [0] * count
        self._numbers: list[dict[int, int]] = [{} for _ in range(count)]
        self._memories: list[Any] = [None] * count
        self._pools = [_Pool() for _ in range(count)]
        self._sent_from = [anchor.clone() for anchor in self.anchors]
        self._since_relay = [0] * count
        self.relaying: set[int] = set()

    def numbers(self, island: int) -> list[int]:
        """Per fragment the number of that island's last push that was merged; -1: none yet."""
        return [numbers.get(island, -1) for numbers in self._numbers]

    def push(self, fragment: int, push: Push, now: float) -> Ticket:
        """Puts a push into the fragment's pool at time `now` (seconds on any clock that only goes forward).

        One that has been merged already is answered with the anchor as it is.
        """
        if push.number <= self._numbers[fragment].get(push.island, -1):
            return Ticket(_Pool(answer=self._answer(fragment, {}, {push.island: 1.0}, 0.0)))
        pool = self._pools[fragment]
        pool.pushes[push.island] = push
        pool.arrived[push.island] = now
        self._note_quorum(pool, now)
        return Ticket(pool)

    def merge_due(self, now: float) -> list[int]:
        """Merges the pools whose window is over; returns their fragments."""
        due = []
        for f, pool in enumerate(self._pools):
            self._note_quorum(pool, now)  # the loss of a member may complete one
            if pool.pushes and self._closes(pool) <= now:
                self._merge(f, pool)
                due.append(f)
        return due

    def next_due(self) -> float | None:
        """When `merge_due` has something to do next, if nothing else arrives; None: not before something does."""
        times = [self._closes(pool) for pool in self._pools if pool.pushes]
        finite = [time for time in times if time < float("inf")]
        return min(finite) if finite else None

    def _note_quorum(self, pool: _Pool, now: float) -> None:
        needed = max(1, min(self.options.quorum, len(self.members)))
        if pool.quorum_at is None and len(pool.pushes) >= needed:
            pool.quorum_at = now

    def _closes(self, pool: _Pool) -> float:
        """When the pool's window ends."""
        if pool.quorum_at is None:
            return float("inf")
        if self.members <= pool.pushes.keys():
            return pool.quorum_at
        if self.options.grace is not None:
            return pool.quorum_at + self.options.grace
        return max(pool.quorum_at, min(pool.arrived[i] + MARGIN * p.slack for i, p in pool.pushes.items()))

    def _merge(self, f: int, pool: _Pool) -> None:
        self._pools[f] = _Pool()
        pushes = [pool.pushes[i] for i in sorted(pool.pushes)]
        fragment = self.fragments[f]
        cuts = [(i, p.start, p.stop) for i, p in enumerate(fragment)]
        deltas = [p.delta for p in pushes]
        finite = [bool(d.isfinite().all()) for d in deltas]
        weights = torch.tensor([p.weight * ok for p, ok in zip(pushes, finite)], dtype=torch.float64)
        products = gram(deltas, cuts, len(fragment))
        plain = torch.tensor([piece.embedding for piece in fragment])
        coefficients, self._memories[f] = decide(self.config.merge, products, weights, plain, self._memories[f])
        merged = combine(deltas, cuts, coefficients)
        for i, (piece, anchor) in enumerate(zip(fragment, self._pieces[f])):
            anchor.grad = piece.of(merged) if bool((coefficients[i] != 0).any()) else None
        self._optimizers[f].step()
        self._optimizers[f].zero_grad()
        self.versions[f] += 1
        self._since_relay[f] += len(pushes)
        for p in pushes:
            self._numbers[f][p.island] = p.number
        norms = {p.island: float(d.to(torch.float64).norm()) for p, d in zip(pushes, deltas)}
        shares = {p.island: float(coefficients[:, k].max()) for k, p in enumerate(pushes)}
        pool.answer = self._answer(f, norms, shares, float(merged.to(torch.float64).norm()))

    def _answer(self, f: int, norms: Mapping[int, float], shares: Mapping[int, float], merged_norm: float) -> Answer:
        return Answer(self.anchors[f].clone(), self.versions[f], norms, shares, merged_norm)

    def relay(self, send: Callable[[int, Tensor], None]) -> None:
        """Calls `send(fragment, way)` for the fragments that have `relay` new pushes; `answered` must follow each."""
        for f, anchor in enumerate(self.anchors):
            if self.options.relay and self._since_relay[f] >= self.options.relay and f not in self.relaying:
                self.relaying.add(f)
                send(f, self._sent_from[f] - anchor)

    def answered(self, fragment: int, anchor: Float32[Tensor, " values"]) -> None:
        """The upper syncer's anchor has come: it is mixed in, and the next way begins here."""
        self.anchors[fragment].lerp_(anchor, self.options.mix)
        self._sent_from[fragment].copy_(self.anchors[fragment])
        self._since_relay[fragment] = 0
        self.relaying.discard(fragment)

    def take(self, fragment: int, anchor: Float32[Tensor, " values"]) -> None:
        """Goes on from an anchor that the upper syncer has, as one does that joins others later."""
        self.anchors[fragment].copy_(anchor)
        self._sent_from[fragment].copy_(anchor)

    def unanswered(self, fragment: int) -> None:
        """The upper syncer is gone: the next push tries again, with the whole way."""
        self.relaying.discard(fragment)

    def state_dict(self) -> dict[str, Any]:
        """What a restart needs; pushes that wait are not in it: their islands send them again. Shares memory."""
        return {
            "anchors": self.anchors,
            "sent_from": self._sent_from,
            "optimizers": [optimizer.state_dict()["state"] for optimizer in self._optimizers],
            "versions": self.versions,
            "numbers": self._numbers,
            "memories": self._memories,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a saved state. Raises ValueError for another layout."""
        if [len(a) for a in state["anchors"]] != [len(a) for a in self.anchors]:
            raise ValueError("the saved syncer has other fragments: give it the configuration it was saved with")
        for own, saved in zip([*self.anchors, *self._sent_from], [*state["anchors"], *state["sent_from"]]):
            own.copy_(saved)
        for optimizer, saved in zip(self._optimizers, state["optimizers"]):
            restore(optimizer, {"state": saved})
        self.versions, self._numbers = list(state["versions"]), [dict(n) for n in state["numbers"]]
        self._memories = list(state["memories"])
