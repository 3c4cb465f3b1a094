"""The exchange of one island: which of its processes exchange, and how all of them take up a result, or none.

Shards are exchanged by every process with its peers on the other islands; replicas by the island's main process, which
hands the result on. Read next: `routes.py`, the exchange itself; `islands.py`, which uses this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mdlm.training.exchange import Exchange, Merged, Message
from mdlm.training.links import IslandLost, Links, minimum_in, total_in
from mdlm.training.outer import OuterStep
from mdlm.training.outer_config import OuterConfig
from mdlm.training.packets import parse_address
from mdlm.training.routes import Inside, exchange
from mdlm.training.served import Served
from mdlm.training.team import Team


def make_exchange(config: OuterConfig, links: Links, sharded: bool) -> Exchange | None:
    """How this process exchanges; None: one island. Of equal replicas within an island only the main one does."""
    team, inside = links.team, None
    if config.engine == "syncer":
        if sharded or config.rendezvous is None:
            raise ValueError("--outer.engine syncer needs --outer.rendezvous host:port (of a python -m "
                             "mdlm.training.server), and DDP within an island: it takes no shards")  # fmt: skip
        address = parse_address(config.rendezvous, "outer.rendezvous")
        patience = 600.0 if config.timeout is None else config.timeout
        served = Served(config, address, links.island, links.islands, patience) if team.is_main else None
        return Joined(served, links.islands, team, sharded=False)
    if links.wide is None:
        return None
    if sharded and links.inside is not None:
        inside = Inside(minimum_in(links.inside), total_in(links.inside))
    real = exchange(config, links.wide, inside) if sharded or team.is_main else None
    return Joined(real, links.islands, team, sharded)


class Joined:
    """The exchange of an island of several processes: all of them take up a result, or none."""

    def __init__(self, real: Any, islands: int, team: Team, sharded: bool) -> None:
        self.real, self.islands, self.team, self.sharded = real, islands, team, sharded

    def start(self, message: Message) -> Callable[[], Merged]:
        """Begins the exchange."""
        wait = None if self.real is None else self.real.start(message)
        return lambda: self._wait(message, wait)

    def _wait(self, message: Message, wait: Callable[[], Merged] | None) -> Merged:
        merged: Merged | None = None
        problem: Exception | None = None
        try:
            merged = None if wait is None else wait()
        except Exception as error:  # noqa: BLE001 - raised below, on every process of the island
            problem = error
        failed = torch.tensor(float(problem is not None), device=self.team.device)
        if self.team.all_reduce(failed, largest=True).item():
            raise problem or IslandLost("the exchange of another process of this island failed; it says why")
        if self.sharded or self.team.size == 1:
            assert merged is not None
            return merged
        rest = self.team.share(None if merged is None else replace(merged, delta=torch.empty(0)))
        delta = torch.empty_like(message.delta) if merged is None else merged.delta
        return replace(rest, delta=self.team.copy_from(delta))

    def join(self, outer: OuterStep) -> None:
        """Makes the island known to its syncer, and goes on from the syncer's anchors if it has others."""
        problem: Exception | None = None
        anchors: list[Tensor] | None = None
        if self.real is not None:
            try:
                anchors = self.real.join(outer.fragments, outer.anchors)
            except Exception as error:  # noqa: BLE001 - raised below, on every process of the island
                problem = error
        anchors, failed = self.team.share((anchors, None if problem is None else str(problem)))
        if failed is not None:
            raise ValueError(failed) from problem
        if anchors is not None:
            outer.adopt(anchors)

    def rewind(self) -> None:
        """See `Exchange`."""
        if self.real is not None:
            self.real.rewind()

    def close(self) -> None:
        """Ends the thread."""
        if self.real is not None:
            self.real.rewind()
            self.real.close()

    def state_dict(self) -> dict[Any, Any]:
        """See `Exchange`; replicas other than the main one remember nothing."""
        return {} if self.real is None else self.real.state_dict()

    def load_state_dict(self, state: Mapping[Any, Any]) -> None:
        """See `Exchange`."""
        if self.real is not None:
            self.real.load_state_dict(state)
