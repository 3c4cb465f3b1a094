"""Several islands in one process: a thread per island, and a network of mailboxes that behaves like a real one.

Collectives wait for all islands (a barrier with a time-out), so an island that lags, or dies, is felt as it would be.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
PATIENCE = 20.0


class Network:
    """Mailboxes for `islands` islands. `cut_at`: the collective call, from 0, at which `victim` loses its link."""

    def __init__(self, islands: int) -> None:
        self.islands = islands
        self.barrier = threading.Barrier(islands)
        self.boxes: dict[tuple[int, int], list[Tensor]] = {}
        self.pairs: dict[tuple[int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)
        self.cut_at: int | None = None
        self.victim = 0

    def repair(self) -> None:
        """The link is back: as a new group of processes, with nothing left of the old one's messages."""
        self.cut_at = None
        self.barrier = threading.Barrier(self.islands)
        self.boxes.clear()
        self.pairs.clear()


class Link:
    """One island's `Transport` on a `Network`. Counts the bytes that leave the island, as an interface would."""

    def __init__(self, network: Network, island: int) -> None:
        self.network, self.island, self.islands = network, island, network.islands
        self.calls = 0
        self.bytes_out = 0

    def _post(self, parts: Sequence[Tensor]) -> int:
        call, self.calls = self.calls, self.calls + 1
        if self.network.cut_at is not None and call == self.network.cut_at and self.island == self.network.victim:
            until = time.monotonic() + PATIENCE
            while self.network.barrier.n_waiting < self.islands - 1 and time.monotonic() < until:
                time.sleep(0.001)  # the others come as far first: all of them have the call before this one
            self.network.barrier.abort()
            raise ConnectionError("link lost")
        assert all(p.dtype == torch.uint8 and p.device.type == "cpu" for p in parts)
        self.network.boxes[call, self.island] = [p.clone() for p in parts]
        self.network.barrier.wait(PATIENCE)
        return call

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        assert len(parts) == self.islands
        self.bytes_out += sum(len(p) for j, p in enumerate(parts) if j != self.island)
        call = self._post(parts)
        return self._checked([self.network.boxes[call, i][self.island] for i in range(self.islands)], sizes)

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        self.bytes_out += len(part) * (self.islands - 1)
        call = self._post([part])
        return self._checked([self.network.boxes[call, i][0] for i in range(self.islands)], sizes)

    def swap(self, part: Tensor, peer: int) -> Tensor:
        self.bytes_out += len(part)
        self.network.pairs[self.island, peer].put(part.clone())
        return self.network.pairs[peer, self.island].get(timeout=PATIENCE)

    @staticmethod
    def _checked(parts: list[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        assert [len(p) for p in parts] == list(sizes), "a receiver reserved another size than was sent"
        return parts


def on_islands(islands: int, work: Callable[[int], Result]) -> list[Result]:
    """work(island) on all islands at once; results in order; the first island's error is raised."""
    results: list[Result | None] = [None] * islands
    errors: list[BaseException | None] = [None] * islands

    def run(island: int) -> None:
        try:
            results[island] = work(island)
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            errors[island] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(islands)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)]
    for error in real or [e for e in errors if e is not None]:
        raise error
    return results  # type: ignore[return-value]
