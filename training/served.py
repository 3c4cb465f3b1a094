"""An island's side of a syncer: an exchange whose answer is the anchor itself.

Every push has a connection and a thread of its own, so that several fragments can be under way; it is sent again until
it is answered, and counted once (`syncer.py`). Another connection, open all the time, says that the island is alive. An
island that joins later, or is started again, takes the syncer's anchors and goes on from there; what it had in flight,
and the round it had begun, are dropped, and its inner optimizer is whatever it brings. A syncer that is started again
is joined again in passing. Read next: `server.py`.
"""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from mdlm.training.compress import codec
from mdlm.training.exchange import Merged, Message, measure
from mdlm.training.feedback import ErrorFeedback
from mdlm.training.fragments import Fragment
from mdlm.training.outer_config import OuterConfig
from mdlm.training.packets import PacketError, connect, floats, receive, send

SHARED = ("optimizer", "lr", "momentum", "beta2", "eps", "buffer", "spread", "fragments", "pattern")
"""Options that all islands of a syncer must have alike, besides merging, compression and the syncer's own."""


class SyncerLost(RuntimeError):
    """The syncer did not answer for too long."""


class Refused(RuntimeError):
    """The syncer does not want this island."""


def contract(config: OuterConfig) -> dict[str, Any]:
    """What the syncer is told of the options."""
    shared = {name: getattr(config, name) for name in SHARED}
    parts: dict[str, Any] = {"merge": config.merge, "compress": config.compress, "syncer": config.syncer}
    return shared | {name: dataclasses.asdict(part) for name, part in parts.items()}


class Served:
    """The exchange with a syncer. `join` before the first `start`.

    Attributes:
        islands: number of islands that were asked for; fewer may be there.
        retries: pushes that had to be sent again, so far.
    """

    def __init__(
        self,
        config: OuterConfig,
        address: tuple[str, int],
        island: int,
        islands: int,
        patience: float = 600.0,
    ) -> None:
        """`patience`: seconds without an answer after which `SyncerLost` is raised."""
        self.config = config
        self.address, self.island, self.islands = address, island, islands
        self.patience = patience
        self.retries = 0
        self._contract = contract(config)
        self._codec = codec(config.compress.codec, config.compress)
        self._feedback = ErrorFeedback.of(config.compress)
        self._memories: dict[int, Any] = {}
        self._numbers: list[int] = []
        self._alive: socket.socket | None = None
        self._joining = threading.Lock()
        self._begun: dict[int, float] = {}
        self._fragments: list[Fragment] = []
        self._anchors: list[Tensor] = []
        self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="outer-push")

    def join(self, fragments: Sequence[Fragment], anchors: Sequence[Tensor]) -> list[Tensor] | None:
        """Makes the island known.

        Returns the anchors to go on from, per fragment; None if they are the given ones.

        Raises:
            Refused: other options, another layout, another start, or an island of this number is there already.
            SyncerLost: there is no syncer.
        """
        self._fragments, self._anchors = list(fragments), list(anchors)
        answer, payload = self._join()
        self._numbers = answer["numbers"]
        if not len(payload):
            return None
        return list(payload.clone().view(torch.float32).split([len(a) for a in anchors]))

    def _join(self) -> tuple[dict[str, Any], Tensor]:
        layout = [[dataclasses.astuple(piece) for piece in fragment] for fragment in self._fragments]
        facts = {"kind": "join", "island": self.island, "layout": layout, "contract": self._contract}

        def attempt(connection: socket.socket) -> tuple[dict[str, Any], Tensor]:
            send(connection, facts, floats(torch.cat([a.cpu() for a in self._anchors])))
            answer, payload = receive(connection)
            if "refused" in answer:
                raise Refused(answer["refused"])
            connection.settimeout(None)
            self._alive = connection
            return answer, payload

        return self._until_answered(attempt, keep=True)

    def start(self, message: Message) -> Callable[[], Merged]:
        """Sends the pseudo-gradient."""
        assert self._alive is not None, "join first"
        f = message.fragment
        self._numbers[f] += 1
        now = time.monotonic()
        slack = self.config.landing * (now - self._begun.get(f, now)) / self.config.every
        self._begun[f] = now
        future = self._pool.submit(self._exchange, message, self._numbers[f], self._memories.get(f), slack)

        def wait() -> Merged:
            merged, self._memories[f] = future.result()
            return merged

        return wait

    def _exchange(self, message: Message, number: int, memory: Any, slack: float) -> tuple[Merged, Any]:
        f, count, device = message.fragment, len(message.delta), message.delta.device
        finite = bool(message.delta.isfinite().all())
        delta = message.delta if finite else torch.zeros_like(message.delta)
        values = self._feedback.meant(memory, delta)
        wire = self._codec.encode(values)
        facts = {"kind": "push", "island": self.island, "fragment": f, "number": number, "slack": slack, "count": count,
                 "weight": message.weight if finite else 0.0}  # fmt: skip
        sent = 0

        def attempt(connection: socket.socket) -> tuple[dict[str, Any], Tensor]:
            nonlocal sent
            sent += send(connection, facts, wire)
            return receive(connection)

        answer, payload = self._until_answered(attempt)
        while "unknown" in answer:  # the syncer has been started again, or has taken this island for lost
            alive = self._alive
            with self._joining:
                if self._alive is alive and alive is not None:
                    alive.close()
                    self._join()
            answer, payload = self._until_answered(attempt)
        anchor = payload.clone().view(torch.float32).to(device)
        norms, shares = ({int(i): x for i, x in answer[key].items()} for key in ("norms", "shares"))
        share = shares.get(self.island, 0.0)
        way = message.anchor - anchor
        everyone = [norms.get(i, float("nan")) for i in range(self.islands)]
        stats = measure(message, way, everyone, [i for i, c in shares.items() if c != 0], sent)
        stats = dataclasses.replace(stats, consensus=float("nan"))  # the way is no plain mean
        after = self._feedback.after(memory, values, self._codec.decode(wire, count).to(device)) if share > 0 else None
        return Merged(way, (), share, stats, anchor=anchor), after

    def _until_answered(self, attempt: Callable[[socket.socket], Any], keep: bool = False) -> Any:
        """What `attempt` returns, on a new connection each time until one answers."""
        deadline = time.monotonic() + self.patience
        pause = 0.05
        while True:
            left = deadline - time.monotonic()
            try:
                connection = connect(self.address, timeout=max(0.1, left))
                try:
                    found = attempt(connection)
                except BaseException:
                    connection.close()
                    raise
                if not keep:
                    connection.close()
                return found
            except (OSError, PacketError) as error:
                if time.monotonic() + pause > deadline:
                    host, port = self.address
                    raise SyncerLost(
                        f"the syncer at {host}:{port} did not answer for {self.patience:.0f} s (--outer.timeout): has "
                        f"it ended? Start it again with its --state, then the islands with --resume auto. [{error}]"
                    ) from error
                self.retries += 1
                time.sleep(pause)
                pause = min(2.0, 2 * pause)

    def rewind(self) -> None:
        """Nothing to do: a push is sent again until it is answered."""

    def close(self) -> None:
        """Leaves; a push under way is waited for."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._alive is not None:
            self._alive.close()
            self._alive = None

    def state_dict(self) -> dict[Any, Any]:
        """Residuals as of the answers taken up so far, per fragment."""
        return dict(self._memories)

    def load_state_dict(self, state: Mapping[Any, Any]) -> None:
        """Takes over saved residuals."""
        self._memories = dict(state)
