"""From every island's pseudo-gradient to the merged one: compress, send, merge, send back.

scatter (the default): each island owns a part of the buffer. Everybody sends each owner its part (all-to-all), the
owner merges in float32, and all owners send their merged parts to all (all-gather). Each value is coded exactly twice,
whatever the number of islands, and all islands decode the same bytes, so they end with the same values bit for bit.
gather: everybody's message to everybody, each value coded once; for sparse messages, whose mean is not sparse.

An exchange runs in a thread of its own, in the order in which it was started, so training goes on meanwhile. What it
remembers between rounds (residuals, bases, averages) is replaced, never changed, and a round that was not taken up yet
leaves the old memory in the state that is saved: a checkpoint in mid-flight sends the same message again. Read next:
`wire.py`, `merge.py`, `compress.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from mdlm.training.compress import codec
from mdlm.training.exchange import Merged, Message, measure, unmeasured
from mdlm.training.feedback import ErrorFeedback
from mdlm.training.fragments import Fragment, Piece
from mdlm.training.merge import combine, decide, gram, needs_gram, pair_of
from mdlm.training.outer_config import OuterConfig
from mdlm.training.project import projection
from mdlm.training.wire import Line, Transport

Memory = Mapping[str, Any]
"""Kept of a fragment between rounds: "push" and "pull" residuals, EDiT's "norms", a projection's "factors"."""


@dataclass(frozen=True)
class Inside:
    """Agreement among the processes of one island, each of which exchanges its own shard; by default there is one."""

    minimum: Callable[[float], float] = float
    """Smallest of the processes' numbers: an island takes part with all its shards or with none."""
    total: Callable[[Tensor], Tensor] = torch.clone
    """Sum of the processes' tensors: inner products over all shards."""


class _Background:
    """Runs exchanges one after the other in a thread, and keeps what they remember, per fragment."""

    def __init__(self, config: OuterConfig, transport: Transport, inside: Inside | None = None) -> None:
        self.config = config
        self.transport = transport
        self.inside = Inside() if inside is None else inside
        self.islands = transport.islands
        self.codec = codec(config.compress.codec, config.compress)
        self.feedback = ErrorFeedback.of(config.compress)
        self._memories: dict[int, Memory] = {}
        self._before: dict[int, list[Memory]] = {}
        self._pending: list[Future[Merged]] = []
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outer-exchange")

    def start(self, message: Message) -> Callable[[], Merged]:
        """Queues the exchange."""
        future = self._pool.submit(self._run, message)
        self._pending.append(future)

        def wait() -> Merged:
            merged = future.result()
            self._pending.remove(future)
            self._before[message.fragment].pop(0)
            return merged

        return wait

    def rewind(self) -> None:
        """Waits until nothing runs, then goes back to the memories of the results taken up so far."""
        for future in self._pending:
            future.cancel()
        for future in self._pending:
            if not future.cancelled():
                future.exception()
        self._memories = self.state_dict()
        self._pending, self._before = [], {}

    def close(self) -> None:
        """Ends the thread, once all that was started has ended (after a failure call `rewind` first)."""
        self._pool.shutdown(wait=True)

    def state_dict(self) -> dict[Any, Any]:
        """Memories as of the results taken up so far, per fragment."""
        return {f: (self._before[f][0] if self._before.get(f) else memory) for f, memory in self._memories.items()}

    def load_state_dict(self, state: Mapping[Any, Any]) -> None:
        """Takes over saved memories; nothing may be under way."""
        assert not self._pending, "an exchange is under way"
        self._memories, self._before = dict(state), {}

    def _run(self, message: Message) -> Merged:
        f = message.fragment
        memory = self._memories.setdefault(f, {})
        self._before.setdefault(f, []).append(memory)
        merged, self._memories[f] = self._exchange(message, memory, Line(self.transport, f, message.round))
        return merged

    def _exchange(self, message: Message, memory: Memory, line: Line) -> tuple[Merged, Memory]:
        raise NotImplementedError

    def _prepare(self, message: Message, memory: Memory) -> _Part:
        """What to send; a pseudo-gradient that is not finite gets weight 0 and does not travel."""
        finite = bool(message.delta.isfinite().all())
        weight = self.inside.minimum(message.weight if finite else 0.0)
        delta = message.delta if weight > 0 else torch.zeros_like(message.delta)
        values = self.feedback.meant(memory.get("push"), delta)
        return _Part(values, weight, float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2)


@dataclass
class _Result:
    """What a route finds out."""

    merged: Tensor
    sent: Tensor
    """What this island's own message decodes to."""
    coefficients: Tensor
    norms: list[float]
    averages: Any = None
    pull: Any = None


@dataclass(frozen=True)
class _Part:
    """What an island sends: the values it means, its weight, and the squared norm it reports."""

    values: Tensor
    weight: float
    square: float

    def facts(self, products: Tensor) -> UInt8[Tensor, " bytes"]:
        """The few numbers that every island tells all others."""
        head = torch.tensor([self.weight, self.square], dtype=torch.float64)
        return torch.cat([head, products.flatten()]).view(torch.uint8)


def _read(facts: list[Tensor]) -> tuple[Tensor, list[float], Tensor]:
    """Weights, norms, and the sum of the products, from all islands' facts."""
    table = torch.stack([wire.clone().view(torch.float64) for wire in facts])
    return table[:, 0], table[:, 1].sqrt().tolist(), table[:, 2:].sum(0)


def _cuts(pieces: Fragment, start: int, stop: int) -> list[tuple[int, int, int]]:
    """(tensor, from, to) of the tensors' parts within a part of the buffer, counted from its start."""
    found = [(i, max(p.start, start), min(p.stop, stop)) for i, p in enumerate(pieces)]
    return [(i, a - start, b - start) for i, a, b in found if a < b]


class IslandExchange(_Background):
    """All islands with each other, by the rule, codec and route of the options."""

    def _exchange(self, message: Message, memory: Memory, line: Line) -> tuple[Merged, Memory]:
        part = self._prepare(message, memory)
        project = projection(self.config.compress)
        after: dict[str, Any] = {}
        if project is not None:
            peers = _Peers(self, line, part)
            merged, sent, after["factors"] = project(
                part.values, message.pieces, message.round, memory.get("factors"), peers
            )
            assert peers.last is not None, "a projection takes at least one mean"
            coefficients = peers.last.coefficients.expand(len(message.pieces), -1)
            result = _Result(merged, sent, coefficients, peers.last.norms)
        elif self.config.compress.route == "gather":
            result = self.gathered(message.pieces, part, memory, line)
        else:
            result = self.scattered(message.pieces, part, memory, line)
        share = float(result.coefficients[:, line.island].max())
        after["norms"], after["pull"] = result.averages, result.pull
        after["push"] = self.feedback.after(memory.get("push"), part.values, result.sent) if share > 0 else None
        heard = result.coefficients != 0
        rolled_back = tuple(i for i, p in enumerate(message.pieces) if not bool(heard[i].any()) and p.stop > p.start)
        contributors = heard.any(0).nonzero().flatten().tolist()
        if self.config.engine == "gradients":
            stats = unmeasured(result.norms, contributors, line.bytes_sent)
        else:
            stats = measure(message, result.merged, result.norms, contributors, line.bytes_sent)
        return Merged(result.merged, rolled_back, share, stats), after

    def scattered(self, pieces: Fragment, part: _Part, memory: Memory, line: Line) -> _Result:
        """All-to-all, merge of the own part, all-gather."""
        device, me = part.values.device, line.island
        bounds = self._bounds(len(part.values))
        sizes = [stop - start for start, stop in bounds]
        wires = [self.codec.encode(part.values[start:stop]) for start, stop in bounds]
        sent = torch.cat([self.codec.decode(wire, n) for wire, n in zip(wires, sizes)])
        came = line.all_to_all(wires, [self.codec.wire_bytes(sizes[me])] * self.islands)
        deltas = [self.codec.decode(wire.to(device), sizes[me]) for wire in came]
        cuts = _cuts(pieces, *bounds[me])
        products = gram(deltas, cuts, len(pieces)) if needs_gram(self.config.merge) else torch.zeros(0)
        facts = part.facts(products)
        weights, norms, products = _read(line.all_gather(facts, [len(facts)] * self.islands))
        coefficients, averages = self._decide(pieces, weights, products, memory)
        mine = self.feedback.meant(memory.get("pull"), combine(deltas, cuts, coefficients))
        pulled = line.all_gather(self.codec.encode(mine), [self.codec.wire_bytes(n) for n in sizes])
        merged = torch.cat([self.codec.decode(wire.to(device), n) for wire, n in zip(pulled, sizes)])
        start, stop = bounds[me]
        pull = self.feedback.after(memory.get("pull"), mine, merged[start:stop])
        return _Result(merged, sent, coefficients, norms, averages, pull)

    def gathered(self, pieces: Fragment, part: _Part, memory: Memory, line: Line) -> _Result:
        """Everybody's message to everybody; each island merges all of it."""
        count = len(part.values)
        facts, wire = part.facts(torch.zeros(0)), self.codec.encode(part.values)
        came = line.all_gather(torch.cat([facts, wire.cpu()]), [len(facts) + len(wire)] * self.islands)
        weights, norms, products = _read([w[: len(facts)] for w in came])
        deltas = [self.codec.decode(w[len(facts) :].to(part.values.device), count) for w in came]
        cuts = _cuts(pieces, 0, count)
        if needs_gram(self.config.merge):
            products = gram(deltas, cuts, len(pieces))
        coefficients, averages = self._decide(pieces, weights, products, memory)
        return _Result(combine(deltas, cuts, coefficients), deltas[line.island], coefficients, norms, averages)

    def _decide(self, pieces: Fragment, weights: Tensor, products: Tensor, memory: Memory) -> tuple[Tensor, Any]:
        shape = (len(pieces), self.islands, self.islands)
        if needs_gram(self.config.merge):
            products = self.inside.total(products.view(shape))
        else:
            products = torch.zeros(shape, dtype=torch.float64)
        plain = torch.tensor([piece.embedding for piece in pieces])
        return decide(self.config.merge, products, weights, plain, memory.get("norms"))

    def _bounds(self, count: int) -> list[tuple[int, int]]:
        """The islands' parts of a buffer, cut where the codec's blocks end."""
        step = self.codec.granule
        blocks = -(-count // step)
        cuts = [min(count, step * (blocks * i // self.islands)) for i in range(self.islands + 1)]
        return list(itertools.pairwise(cuts))


@dataclass
class _Peers:
    """The other islands as a projection sees them. Coordinates keep no pull residual: they change meaning by round."""

    exchange: IslandExchange
    line: Line
    part: _Part
    last: _Result | None = None

    @property
    def island(self) -> int:
        return self.line.island

    @property
    def islands(self) -> int:
        return self.line.islands

    def mean(self, values: Tensor) -> tuple[Tensor, Tensor]:
        whole = (Piece("coordinates", (len(values),), 0, len(values), False),)
        part = _Part(values, self.part.weight, self.part.square)
        self.last = self.exchange.scattered(whole, part, {}, self.line)
        return self.last.merged, self.last.sent

    def tell(self, wire: Tensor, teller: int, size: int) -> Tensor:
        sizes = [size if i == teller else 0 for i in range(self.islands)]
        return self.line.all_gather(wire, sizes)[teller]


class PairExchange(_Background):
    """One other island per round and no collective (NoLoCo, 2506.10911): anchors differ, and are pulled together.

    With j the partner, the result is mean(d_i, d_j) + (pull / lr) (a_i - mean(a_i, a_j)): stepped with heavy ball at
    learning rate lr, the anchor moves by lr times the mean pseudo-gradient and `pull` times its distance from the
    pair's mean. Anchors travel in float32. Replicas never become equal: evaluate their average, and save all of them.
    """

    def _exchange(self, message: Message, memory: Memory, line: Line) -> tuple[Merged, Memory]:
        part = self._prepare(message, memory)
        anchor, device, count = message.anchor, message.delta.device, len(message.delta)
        facts, code = part.facts(torch.zeros(0)), self.codec.encode(part.values)
        wires = [torch.cat([facts, code.cpu(), anchor.cpu().view(torch.uint8)])]
        members = [line.island]
        peer = pair_of(line.island, message.round, self.islands, self.config.merge.pair_seed)
        if peer != line.island:
            wires.append(line.swap(wires[0], peer))
            members.append(peer)
        weights, norms, _ = _read([w[: len(facts)] for w in wires])
        cut = len(facts) + len(code)
        deltas = [self.codec.decode(w[len(facts) : cut].to(device), count) for w in wires]
        anchors = [w[cut:].clone().view(torch.float32).to(device) for w in wires]
        share = (weights / weights.sum().clamp(min=1e-300)).tolist()
        merged = torch.zeros_like(anchor)
        for c, delta in zip(share, deltas):
            merged.add_(delta, alpha=c)
        direction = merged + (anchor - sum(anchors) / len(anchors)) * (self.config.merge.pull / self.config.lr)
        push = self.feedback.after(memory.get("push"), part.values, deltas[0]) if share[0] > 0 else None
        contributors = [i for i, c in zip(members, share) if c > 0]
        everyone = [float("nan")] * self.islands
        for i, norm in zip(members, norms):
            everyone[i] = norm
        rolled_back = () if contributors else tuple(range(len(message.pieces)))
        stats = measure(message, merged, everyone, contributors, line.bytes_sent)
        return Merged(direction, rolled_back, share[0], stats), {"push": push}


def exchange(config: OuterConfig, transport: Transport, inside: Inside | None = None) -> IslandExchange | PairExchange:
    """The exchange that the options ask for.

    Args:
        config: the outer step's options.
        transport: the islands; under sharding, this process's peers on the other islands.
        inside: agreement within the island, where it has several processes with a shard each.
    """
    return (PairExchange if config.merge.rule == "pairs" else IslandExchange)(config, transport, inside)
