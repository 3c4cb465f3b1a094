"""The process that holds the anchors of islands that never wait for each other.

    python -m mdlm.training.server --listen 0.0.0.0:29700 --state syncer.pt
    python -m mdlm.training.server --listen 0.0.0.0:29701 --upper hub:29700 --number 0      # HALoS: one per region

It knows nothing until the first island joins, which brings options, layout and anchors; the others must have the same.
It needs no accelerator: memory for anchors, momentum and the pushes under way, 12 bytes per parameter and 4 per island.
With `--state` it writes everything down from time to time and when it is told to stop, and goes on from there.
Connections are neither encrypted nor authenticated: for private networks only. Read next: `syncer.py`, `served.py`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from jsonargparse import ArgumentParser
from torch import Tensor

from mdlm.training.compress import codec
from mdlm.training.exchange import Message
from mdlm.training.fragments import Fragment, Piece
from mdlm.training.outer_config import CompressConfig, MergeConfig, OuterConfig, SyncerConfig
from mdlm.training.packets import PacketError, floats, parse_address, receive, send, tuned
from mdlm.training.served import SHARED, Refused, Served, SyncerLost
from mdlm.training.syncer import Push, Syncer, Ticket

SAVE_SECONDS = 60.0
"""Least time between two writings of the state."""


def options_of(contract: dict[str, Any]) -> OuterConfig:
    """What the islands were told by their options."""
    merge, compress = MergeConfig(**contract["merge"]), CompressConfig(**contract["compress"])
    shared = {name: contract[name] for name in SHARED}
    every, syncer = shared["fragments"], SyncerConfig(**contract["syncer"])  # the schedule is the islands' business
    return OuterConfig(engine="syncer", every=every, merge=merge, compress=compress, syncer=syncer, **shared)


def upper_options(config: OuterConfig) -> OuterConfig:
    """The options of the syncer above: everything on arrival, with an optimizer of its own rate."""
    return OuterConfig(
        engine="syncer",
        every=config.fragments,
        optimizer=config.optimizer,
        lr=config.syncer.upper_lr,
        momentum=config.syncer.upper_momentum,
        buffer=config.syncer.upper_buffer,
        fragments=config.fragments,
        pattern=config.pattern,
        syncer=SyncerConfig(grace=0.0),
    )


class Server:
    """Serves islands until it is closed. Every connection has a thread; one lock guards the syncer.

    Attributes:
        address: where it listens.
    """

    def __init__(
        self,
        address: tuple[str, int],
        state: Path | None = None,
        upper: tuple[str, int] | None = None,
        number: int = 0,
    ) -> None:
        """`number`: of this syncer among those of `upper`. Raises OSError if the address cannot be listened at."""
        self._socket = socket.create_server(address)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._state, self._upper, self._number = state, upper, number
        self._changed = threading.Condition()
        self._syncer: Syncer | None = None
        self._contract: dict[str, Any] = {}
        self._layout: list[Any] = []
        self._above: Served | None = None
        self._saved_at = time.monotonic()
        self._open: set[socket.socket] = set()
        self._closing = False

    def serve(self) -> None:
        """Accepts connections until `close`."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._handle, args=(tuned(connection),), daemon=True).start()

    def close(self) -> None:
        """Ends all connections and writes the state."""
        self._closing = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._changed:
            for connection in list(self._open):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._save(always=True)
            self._changed.notify_all()
        if self._above is not None:
            self._above.close()

    def settled(self, timeout: float) -> bool:
        """Waits, in seconds, until no answer from above is outstanding; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._syncer is None or not self._syncer.relaying, timeout)

    def _handle(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, PacketError):
            self._open.add(connection)
            try:
                facts, payload = receive(connection)
                handler = {"join": self._join, "push": self._push}.get(str(facts.get("kind")))
                if handler is not None:
                    handler(connection, facts, payload)
            finally:
                self._open.discard(connection)

    def _join(self, connection: socket.socket, facts: dict[str, Any], payload: Tensor) -> None:
        island = facts["island"]
        with self._changed:
            problem = self._begin(facts, payload.clone().view(torch.float32))
            if problem is None and self._syncer is not None and island in self._syncer.members:
                problem = f"island {island} is connected already; number the islands from 0, each once"
            if problem is not None:
                send(connection, {"refused": problem})
                return
            assert self._syncer is not None
            self._syncer.members.add(island)
            current = floats(torch.cat(self._syncer.anchors))
            same = torch.equal(current, payload)
            answer = {"numbers": self._syncer.numbers(island)}
        try:
            send(connection, answer, None if same else current)
            while connection.recv(1):
                pass
        finally:
            with self._changed:
                self._syncer.members.discard(island)
                self._changed.notify_all()

    def _begin(self, facts: dict[str, Any], anchors: Tensor) -> str | None:
        """Makes the syncer for the first island; what is wrong with another."""
        if self._syncer is None:
            config = options_of(facts["contract"])
            layout: list[Fragment] = [
                tuple(
                    Piece(name, tuple(shape), start, stop, embedding) for name, shape, start, stop, embedding in pieces
                )
                for pieces in facts["layout"]
            ]
            syncer = Syncer(config, layout, list(anchors.split([pieces[-1].stop for pieces in layout])))
            if self._state is not None and self._state.is_file():
                try:
                    syncer.load_state_dict(torch.load(self._state, weights_only=True))
                except ValueError as error:
                    return str(error)
            if self._upper is not None:
                above = Served(upper_options(config), self._upper, self._number, self._number + 1)
                newer = above.join(syncer.fragments, syncer.anchors)
                for f, anchor in enumerate(newer or []):
                    syncer.take(f, anchor)
                self._above = above
            self._syncer, self._contract, self._layout = syncer, facts["contract"], facts["layout"]
            return None
        different = [name for name, value in facts["contract"].items() if value != self._contract[name]]
        if different:
            return f"the other islands have another --outer.{different[0]}: {self._contract[different[0]]}"
        if facts["layout"] != self._layout:
            return "the other islands have another model or other fragments"
        fresh = not any(self._syncer.versions)
        if fresh and not torch.equal(anchors, torch.cat(self._syncer.anchors)):
            return "the other islands start from other weights: give all the same seed or --model.init_from"
        return None

    def _push(self, connection: socket.socket, facts: dict[str, Any], payload: Tensor) -> None:
        f = facts["fragment"]
        with self._changed:
            if self._syncer is None or facts["island"] not in self._syncer.members:
                send(connection, {"unknown": True})
                return
            coder = codec(self._syncer.config.compress.codec, self._syncer.config.compress)
        delta = coder.decode(payload, facts["count"])
        push = Push(facts["island"], facts["number"], delta, facts["weight"], facts["slack"])
        with self._changed:
            ticket = self._syncer.push(f, push, time.monotonic())
            self._wait(ticket)
            answer = ticket.answer
        if answer is None:
            return
        told = {"version": answer.version, "norms": dict(answer.norms), "shares": dict(answer.shares)}
        send(connection, told, floats(answer.anchor))

    def _wait(self, ticket: Ticket) -> None:
        assert self._syncer is not None
        while ticket.answer is None and not self._closing:
            now = time.monotonic()
            if self._syncer.merge_due(now):
                if self._above is not None:
                    self._syncer.relay(self._relay)
                self._save()
                self._changed.notify_all()
                continue
            due = self._syncer.next_due()
            self._changed.wait(None if due is None else max(0.0, due - now))

    def _relay(self, fragment: int, way: Tensor) -> None:
        """Sends a fragment's way to the syncer above; its answer is mixed in when it comes."""
        assert self._above is not None
        assert self._syncer is not None
        syncer = self._syncer
        message = Message(fragment, 0, syncer.fragments[fragment], way, syncer.anchors[fragment].clone(), 1.0)
        wait = self._above.start(message)

        def take() -> None:
            try:
                anchor = wait().anchor
            except (SyncerLost, Refused, CancelledError) as error:
                print(f"mdlm.training.server: no answer from above: {error}", file=sys.stderr, flush=True)
                with self._changed:
                    syncer.unanswered(fragment)
                    self._changed.notify_all()
                return
            assert anchor is not None
            with self._changed:
                syncer.answered(fragment, anchor)
                self._changed.notify_all()

        threading.Thread(target=take, daemon=True).start()

    def _save(self, always: bool = False) -> None:
        now = time.monotonic()
        if self._state is None or self._syncer is None or (now - self._saved_at < SAVE_SECONDS and not always):
            return
        self._saved_at = now
        written = self._state.with_name(f".{self._state.name}.new")
        torch.save(self._syncer.state_dict(), written)
        os.replace(written, self._state)


def main(argv: list[str] | None = None) -> int:
    """Runs a syncer until SIGTERM or Ctrl-C; returns the exit status."""
    parser = ArgumentParser(prog="python -m mdlm.training.server", description="Hold the anchors of islands.")
    parser.add_argument("--listen", type=str, required=True, help="host:port; 0.0.0.0 for all of this machine's.")
    parser.add_argument("--state", type=str, default=None, help="File to write the state to, and to go on from.")
    parser.add_argument("--upper", type=str, default=None, help="host:port of a syncer above this one (HALoS).")
    parser.add_argument("--number", type=int, default=0, help="This syncer's number below the one above, from 0.")
    options = parser.parse_args(argv)
    try:
        upper = None if options.upper is None else parse_address(options.upper, "upper")
        state = None if options.state is None else Path(options.state)
        server = Server(parse_address(options.listen, "listen"), state, upper, options.number)
    except (ValueError, OSError) as error:
        print(f"mdlm.training.server: {error}", file=sys.stderr)
        return 1

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    print(f"listening at {server.address[0]}:{server.address[1]}", flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
