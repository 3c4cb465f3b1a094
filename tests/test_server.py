"""Islands and their syncer over real TCP: the synchronous step where nobody is late; joins, losses, restarts."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from simulated_islands import on_islands
from toy_islands import Toy, flat, quadratic, quadratic_, train_islands

from mdlm.training import packets
from mdlm.training.outer import OuterStep
from mdlm.training.outer_config import CompressConfig, MergeConfig, OuterConfig, SyncerConfig
from mdlm.training.served import Refused, Served, SyncerLost
from mdlm.training.server import Server

STREAMING = OuterConfig(every=4, fragments=2, overlap="streaming", tau=1, alpha=0.25, merge=MergeConfig(rule="radial"))


@contextmanager
def serving(**options: object) -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), **options)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


class Island:
    """A toy island of a syncer."""

    def __init__(
        self,
        address: tuple[str, int],
        island: int,
        config: OuterConfig,
        options: SyncerConfig,
        islands: int = 2,
        seed: int = 0,
        patience: float = 20.0,
    ) -> None:
        self.model, self.island = Toy(seed), island
        config = dataclasses.replace(config, engine="syncer", syncer=options)
        self.served = Served(config, address, island, islands, patience)
        self.outer = OuterStep(self.model, config, self.served)
        adopted = self.served.join(self.outer.fragments, self.outer.anchors)
        if adopted is not None:
            self.outer.adopt(adopted)

    def train(self, steps: Sequence[int]) -> None:
        for n in steps:
            quadratic_(self.model, self.island, n)
            self.outer.step(n, tokens=5 + self.island)

    def anchors(self) -> np.ndarray:
        with self.outer.averaged():
            return flat(self.model)


@pytest.mark.parametrize("config", [OuterConfig(every=3), STREAMING], ids=["diloco", "streaming"])
def test_one_island_is_the_outer_step_of_one_island_bit_for_bit(config: OuterConfig) -> None:
    alone = Toy()
    step = OuterStep(alone, config)
    for n in range(1, 14):
        quadratic_(alone, 0, n)
        step.step(n, tokens=5)
    with serving() as server:
        island = Island(server.address, 0, config, SyncerConfig(), islands=1)
        island.train(range(1, 14))
        assert np.array_equal(flat(island.model), flat(alone))
        island.served.close()


@pytest.mark.parametrize(
    "config",
    [OuterConfig(every=3), STREAMING, OuterConfig(every=2, compress=CompressConfig(codec="int8", feedback="classic"))],
    ids=["diloco", "streaming", "int8"],
)
def test_with_a_quorum_of_all_it_is_the_synchronous_step(config: OuterConfig) -> None:
    """Of an exchange by all-gather: the syncer's answer is not coded a second time."""
    gathered = dataclasses.replace(config, compress=dataclasses.replace(config.compress, route="gather"))
    expected = train_islands(gathered, 2, 13)
    barrier = threading.Barrier(2)
    with serving() as server:

        def work(i: int) -> tuple[np.ndarray, np.ndarray]:
            island = Island(server.address, i, config, SyncerConfig(quorum=2))
            barrier.wait(20)  # else the first would be alone at its first push
            island.train(range(1, 14))
            barrier.wait(20)
            island.served.close()
            return flat(island.model), island.anchors()

        found = on_islands(2, work)
    for island, (local, anchors) in zip(expected, found):
        assert local == pytest.approx(flat(island.model), abs=1e-6)
        assert np.array_equal(anchors, found[0][1])


def test_a_joiner_goes_on_from_the_syncers_anchors_and_a_lost_island_stops_nobody() -> None:
    config = OuterConfig(every=2)
    with serving() as server:
        first = Island(server.address, 0, config, SyncerConfig(quorum=2))
        first.train(range(1, 7))
        assert not np.array_equal(first.anchors(), flat(Toy()))
        second = Island(server.address, 1, config, SyncerConfig(quorum=2))
        assert np.array_equal(flat(second.model), first.anchors())
        second.served.close()  # and now it is gone again, and the quorum with it
        first.train(range(7, 11))
        back = Island(server.address, 1, config, SyncerConfig(quorum=2))
        assert np.array_equal(flat(back.model), first.anchors())
        back.served.close()
        first.served.close()


def test_what_does_not_fit_is_refused_with_its_reason() -> None:
    config, options = OuterConfig(every=2), SyncerConfig()
    with serving() as server:
        first = Island(server.address, 0, config, options)
        for number, other, changed, seed, reason in (
            (0, config, options, 0, "connected already"),
            (1, dataclasses.replace(config, lr=0.5), options, 0, "outer.lr"),
            (1, config, SyncerConfig(quorum=2), 0, "outer.syncer"),
            (1, dataclasses.replace(config, fragments=2), options, 0, "outer.fragments"),
            (1, config, options, 1, "other weights"),
        ):
            with pytest.raises(Refused, match=reason):
                Island(server.address, number, other, changed, seed=seed)
        second = Island(server.address, 1, config, options)
        for island in (first, second):
            island.train(range(1, 3))
            island.served.close()


def test_strangers_and_damaged_packets_do_not_disturb_it() -> None:
    with serving() as server:
        for greeting in (b"GET / HTTP/1.1\r\n\r\n" + bytes(100), None):
            with socket.create_connection(server.address) as stranger:
                if greeting is None:
                    packets.send(stranger, {"kind": "nonsense"})
                else:
                    stranger.sendall(greeting)
                with pytest.raises(ConnectionResetError):
                    packets.receive(stranger)
        island = Island(server.address, 0, OuterConfig(every=1), SyncerConfig())
        island.train(range(1, 4))
        island.served.close()
    left, right = socket.socketpair()
    with left, right:
        packets.send(left, {"a": 1}, torch.arange(9, dtype=torch.uint8))
        wire = bytearray(right.recv(1000))
        wire[-1] ^= 1
        left.sendall(wire)
        with pytest.raises(packets.PacketError, match="damaged"):
            packets.receive(right)


def test_halos_syncers_in_a_tree_follow_the_recurrence() -> None:
    """Two regions of one island; each syncer reports every second push, and mixes the answer in before the next."""
    config = OuterConfig(every=1, optimizer="sgd", lr=0.5)
    options = SyncerConfig(grace=0.0, relay=2, mix=0.25, upper_lr=0.8)
    start = flat(Toy())
    low, sent_from, anchor, top = [start, start], [start, start], [start, start], start
    with serving() as hub, serving(upper=hub.address) as east, serving(upper=hub.address, number=1) as west:
        servers = (east, west)
        regions = [Island(server.address, i, config, options) for i, server in enumerate(servers)]
        for n in range(1, 13):
            for i, server in enumerate(servers):
                regions[i].train([n])
                low[i] = low[i] - 0.5 * (anchor[i] - quadratic(i, n, anchor[i]))
                anchor[i] = low[i]
                assert regions[i].anchors() == pytest.approx(anchor[i], abs=1e-5)
                if n % 2 == 0:
                    top = top - 0.8 * (sent_from[i] - low[i])
                    low[i] = sent_from[i] = 0.75 * low[i] + 0.25 * top
                    server.settled(timeout=20)
        for island in regions:
            island.served.close()
    assert np.abs(top - start).max() > 0.1


def test_a_syncer_that_is_gone_for_good_is_an_error_that_says_what_to_do() -> None:
    with serving() as server:
        island = Island(server.address, 0, OuterConfig(every=1), SyncerConfig(), patience=0.5)
        island.train(range(1, 3))
    with pytest.raises(SyncerLost, match="--state"):
        island.train(range(3, 5))
    island.served.close()


def by_turns(islands: list[Island], steps: Sequence[int]) -> None:
    for n in steps:
        for island in islands:
            island.train([n])


def test_a_syncer_that_is_stopped_and_started_again_has_forgotten_nothing(tmp_path: Path) -> None:
    """Its islands join it again in passing."""
    config, options, found = OuterConfig(every=1), SyncerConfig(grace=0.0), []
    for pauses in (False, True):
        with serving(state=tmp_path / "state.pt") as server:
            islands = [Island(server.address, i, config, options) for i in range(2)]
            by_turns(islands, range(1, 5))
            if not pauses:
                by_turns(islands, range(5, 9))
        if pauses:
            again = Server(server.address, tmp_path / "state.pt")
            thread = threading.Thread(target=again.serve)
            thread.start()
            by_turns(islands, range(5, 9))
            again.close()
            thread.join()
        found.append([island.anchors() for island in islands])
        for island in islands:
            island.served.close()
        (tmp_path / "state.pt").unlink()
    assert np.array_equal(found[0], found[1])


def test_a_syncer_killed_by_kill_9_is_started_again_and_training_goes_on() -> None:
    """The real process, without a state: it takes over the anchors of the first island that comes back."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    command = [sys.executable, "-m", "mdlm.training.server", "--listen", f"127.0.0.1:{address[1]}"]
    processes: list[subprocess.Popen[str]] = []

    def start() -> None:
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout is not None
        assert processes[-1].stdout.readline().startswith("listening")

    start()
    config = OuterConfig(every=1, optimizer="sgd", lr=0.5)
    islands = [Island(address, i, config, SyncerConfig(grace=0.0), patience=60.0) for i in range(2)]
    try:
        by_turns(islands, range(1, 5))
        before = [island.anchors() for island in islands]
        processes[0].kill()
        processes[0].wait()
        start()
        by_turns(islands, [5])
        held = before[0]
        for i, (island, anchors) in enumerate(zip(islands, before)):
            held = held - 0.5 * (anchors - quadratic(i, 5, anchors))
            assert island.anchors() == pytest.approx(held, abs=1e-5)
        processes[1].terminate()
        assert processes[1].wait(timeout=60) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for island in islands:
            island.served.close()
