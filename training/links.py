"""How islands reach each other: process groups within an island and across islands, for both ways to launch.

A, one launch for all islands (`--outer.islands K`): the processes are cut into K equal parts, in order of rank.
B, one launch per island (`--outer.rendezvous host:port --outer.island i --outer.islands K`): the islands share no
process group of torch, only a store, held by island 0, and own gloo groups. An island then fails alone.

Either way the processes with the same rank within their islands form two gloo groups: one for exchanges (`Gloo`, a
`Transport`), one for agreement on a few numbers (`Control`). Nothing else crosses islands. gloo has no mean, and
waits for ever on a peer that is silent: sums are divided by whoever contributed, and every wait has an end.
Read next: `islands.py`.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from mdlm.training.outer_config import OuterConfig
from mdlm.training.team import Team
from mdlm.training.wire import Wire

FIRST_PATIENCE = 1800.0
"""Seconds that islands may start apart, and that their first round may take."""


class IslandLost(RuntimeError):
    """Another island did not answer."""


@dataclass
class Patience:
    """How long another island is waited for, in seconds; the islands' clock renews it from the measured rounds."""

    seconds: float = FIRST_PATIENCE


class Gloo:
    """A `Transport` over a gloo group: point-to-point messages, each numbered, each with an end to its wait."""

    def __init__(self, group: Any, island: int, islands: int, patience: Patience) -> None:
        self.group, self.island, self.islands, self.patience = group, island, islands, patience
        self.messages = 0
        """Collective calls so far."""

    def all_to_all(self, parts: Sequence[Wire], sizes: Sequence[int]) -> list[Wire]:
        """See `Transport`."""
        others = [j for j in range(self.islands) if j != self.island]
        came = self._trade({j: parts[j] for j in others}, {j: sizes[j] for j in others})
        return [parts[j] if j == self.island else came[j] for j in range(self.islands)]

    def all_gather(self, part: Wire, sizes: Sequence[int]) -> list[Wire]:
        """See `Transport`."""
        return self.all_to_all([part] * self.islands, sizes)

    def swap(self, part: Wire, peer: int) -> Wire:
        """See `Transport`."""
        return self._trade({peer: part}, {peer: len(part)})[peer]

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over the islands, in place, in CPU memory; the same bits on all islands."""
        with _naming_the_loss(self.patience):
            self.messages += 1
            self.group.allreduce([tensor]).wait(timedelta(seconds=self.patience.seconds))
        return tensor

    def close(self) -> None:
        """Hangs up: islands that still wait for this one then know at once that it has ended."""
        self.group = None

    def _trade(self, sends: Mapping[int, Wire], sizes: Mapping[int, int]) -> dict[int, Wire]:
        self.messages += 1
        came = {j: torch.empty(size, dtype=torch.uint8) for j, size in sizes.items()}
        limit = timedelta(seconds=self.patience.seconds)
        with _naming_the_loss(self.patience):
            work = [self.group.recv([buffer], j, self.messages) for j, buffer in came.items()]
            work += [self.group.send([wire.contiguous()], j, self.messages) for j, wire in sends.items()]
            try:
                while work:
                    work[0].wait(limit)
                    work.pop(0)
            finally:
                work.clear()  # what is kept of an error must not keep the connections open
        return came


class _naming_the_loss:
    """Turns what gloo raises into `IslandLost`."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise IslandLost(
                "another island did not answer: it has ended, its link is down, or it took more than "
                f"{self._patience.seconds:.0f} s (--outer.timeout). Nothing of this exchange was applied; start all "
                f"islands again with --resume auto, which goes on from the last step that all have saved. [{error}]"
            ) from error


class Control:
    """Small things that islands tell each other, one after the other in a thread of its own."""

    def __init__(self, transport: Gloo) -> None:
        self.transport = transport
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outer-control")

    def ask(self, thing: Any) -> Future[list[Any]]:
        """All islands' (JSON-able) things, in order; they must ask in the same order."""
        return self._pool.submit(self._gather, thing)

    def gather(self, thing: Any) -> list[Any]:
        """`ask`, and wait."""
        return self.ask(thing).result()

    def sum_(self, tensor: Tensor) -> Tensor:
        """`Gloo.sum_` in its turn."""
        return self._pool.submit(self.transport.sum_, tensor).result()

    def close(self) -> None:
        """Ends the thread; what was asked and is not under way is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.transport.close()

    def _gather(self, thing: Any) -> list[Any]:
        payload = torch.frombuffer(bytearray(json.dumps(thing).encode()), dtype=torch.uint8)
        length = torch.tensor([len(payload)]).view(torch.uint8)
        lengths = self.transport.all_gather(length, [8] * self.transport.islands)
        sizes = [int(size.clone().view(torch.int64)) for size in lengths]
        return [json.loads(bytes(wire.tolist())) for wire in self.transport.all_gather(payload, sizes)]


@dataclass
class Links:
    """This process's place among islands, and its lines to the others."""

    island: int
    islands: int
    team: Team
    split: bool = False
    """Whether one launch holds several islands, which accelerate must not join."""
    patience: Patience = field(default_factory=Patience)
    wide: Gloo | None = None
    """For exchanges; None: one island."""
    control: Control | None = None
    inside: dist.ProcessGroup | None = None
    """A gloo group of the island's own, for the thread that exchanges shards; None: one process."""
    store: Any = None
    """Kept alive: the islands' meeting place."""

    @property
    def rank(self) -> int:
        """Number of this process among those of all islands: where its rows of the global batch lie."""
        return self.island * self.team.size + self.team.rank

    @property
    def world(self) -> int:
        """Processes of all islands."""
        return self.islands * self.team.size


def connect(config: OuterConfig, accelerator: Accelerator) -> Links:
    """The links that the options ask for; every process of every island must call it.

    Raises ValueError where options and launch contradict each other, `IslandLost` if islands do not come.
    """
    patience = Patience(config.timeout or FIRST_PATIENCE)
    if config.engine in ("syncer", "torchft"):  # through which alone islands hear of each other
        return Links(config.island or 0, config.islands, Team.of(accelerator), patience=patience)
    if config.rendezvous is not None:
        return _by_rendezvous(config, accelerator, patience)
    if config.islands > 1:
        return _in_one_launch(config, accelerator, patience)
    return Links(0, 1, Team.of(accelerator), patience=patience)


def _in_one_launch(config: OuterConfig, accelerator: Accelerator, patience: Patience) -> Links:
    processes, islands = accelerator.num_processes, config.islands
    if processes % islands:
        raise ValueError(
            f"--outer.islands {islands} does not divide the {processes} process(es) of this launch; launch a multiple "
            "(accelerate launch --num_processes N), or each island by itself with --outer.rendezvous"
        )
    size = processes // islands
    island, rank = divmod(accelerator.process_index, size)
    limit = timedelta(seconds=patience.seconds)

    def mine(members: Sequence[list[int]], backend: str | None = None) -> Any:
        """A group of this process's members; every process makes all groups, in the same order."""
        groups = [dist.new_group(ranks, backend=backend, timeout=limit) for ranks in members]
        return next(g for g, ranks in zip(groups, members) if accelerator.process_index in ranks)

    within = [[i * size + r for r in range(size)] for i in range(islands)]
    across = [[i * size + r for i in range(islands)] for r in range(size)]
    team = Team(rank, size, accelerator.device, mine(within))
    inside = mine(within, "gloo") if size > 1 else None
    wide, control = (Gloo(mine(across, "gloo"), island, islands, patience) for _ in range(2))
    return Links(island, islands, team, True, patience, wide, Control(control), inside)


def _by_rendezvous(config: OuterConfig, accelerator: Accelerator, patience: Patience) -> Links:
    assert config.rendezvous is not None
    assert config.island is not None
    host, _, port = config.rendezvous.rpartition(":")
    team, island, islands = Team.of(accelerator), config.island, config.islands
    limit = timedelta(seconds=patience.seconds)
    with _naming_the_loss(patience):
        store = dist.TCPStore(host, int(port), None, island == 0 and team.is_main, limit, wait_for_workers=False)
        shape = f"{islands} islands of {team.size} process(es)"
        agreed = store.compare_set("shape", "", shape).decode()
        if agreed != shape:
            raise ValueError(f"this launch is one of {shape}, but another of {agreed}: give all the same")
        if store.add(f"island {island} process {team.rank}", 1) > 1:
            raise ValueError(f"two launches have --outer.island {island}; number the islands from 0")
        groups = []
        for name in ("wide", "control"):
            apart = dist.PrefixStore(f"{name}/{team.rank}", store)
            if os.environ.get("GLOO_SOCKET_IFNAME"):
                group = dist.ProcessGroupGloo(apart, island, islands, limit)
            else:
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(host, int(port)))]
                options._timeout = limit
                group = dist.ProcessGroupGloo(apart, island, islands, options)
            groups.append(Gloo(group, island, islands, patience))
    inside = dist.new_group(backend="gloo", timeout=limit) if team.size > 1 else None
    return Links(island, islands, team, False, patience, groups[0], Control(groups[1]), inside, store)


def address_towards(host: str, port: int) -> str:
    """The address of this machine on the network that leads to `host`: a host name often resolves to the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])


def minimum_in(group: dist.ProcessGroup) -> Callable[[float], float]:
    """Smallest of the numbers of the group's processes."""

    def minimum(value: float) -> float:
        number = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
        return number.item()

    return minimum


def total_in(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Sum of the tensors of the group's processes."""

    def total(tensor: Tensor) -> Tensor:
        summed = tensor.clone()
        dist.all_reduce(summed, group=group)
        return summed

    return total
