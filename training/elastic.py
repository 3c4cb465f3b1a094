"""Islands that may come and go (`--outer.engine torchft`): torchft says who takes part in a round, and heals who comes.

torchft's lighthouse (a small server, `torchft_lighthouse`) knows the islands by their heartbeats; before every exchange
its managers agree on a *quorum*, and torchft builds a new gloo group if it is not the last one. The exchange in it, and
all that follows, are the outer step's as ever (`routes.py`, `outer.py`), with SUM over those who are there. An island
lost in mid-exchange is an error on all others before anything is applied: they form a new quorum, and send again.

An island that comes, or comes back, does so at an exchange: torchft fetches from another island the anchors, outer and
inner optimizer, step (with it the learning rate's schedule), position in the data and moving average; it takes part in
that exchange with weight 0, and trains on from its anchors. Residuals are dropped by all when the islands change.
At the start all take over one island's state in this way, so they begin alike.

torchft's own DiLoCo is not used: it shares one outer optimizer between fragments, and its bucketing drops tensors.
Read next: `islands.py`, whose engine this is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdlm.training.exchange import Merged, Message
from mdlm.training.islands import Islands, Moment
from mdlm.training.links import Gloo, IslandLost, Links, Patience, address_towards
from mdlm.training.outer import OuterStep
from mdlm.training.outer_config import OuterConfig
from mdlm.training.outer_optim import restore
from mdlm.training.packets import parse_address
from mdlm.training.routes import exchange
from mdlm.training.state import named_optimizer_state, restore_optimizer

WAIT_SECONDS = 3600.0
"""How long an island waits for the others at a round's end; they may be a round behind."""
EXCHANGE_SECONDS = 600.0
"""How long an exchange, or fetching a state, may take."""


class Healed(Exception):
    """This island has taken over another's state: the step that it was in is no more."""


def _group(limit: timedelta) -> Any:
    """torchft's reconfigurable gloo group, which counts its configurations."""
    from torchft.process_group import ProcessGroupGloo

    class Group(ProcessGroupGloo):
        generation = 0

        def configure(self, *settings: Any) -> None:
            super().configure(*settings)
            self.generation += 1

    return Group(timeout=limit)


class Quorums:
    """An `Exchange` between the islands that are there at the time.

    Attributes:
        islands: number of islands of the last exchange.
        members: their numbers.
        news: what a person should know; whoever reads it empties it.
        give, take, join_in, witness: the state that another island needs; taking over another's; what a bystander
            sends, for a fragment and round; and what it does with the result. Set by the engine.
    """

    give: Callable[[], dict[str, Any]]
    take: Callable[[dict[str, Any]], None]
    join_in: Callable[[int, int], Message]
    witness: Callable[[int, Merged], None]

    def __init__(self, config: OuterConfig, island: int) -> None:
        """Raises ValueError without torchft, or without a lighthouse."""
        try:
            from torchft.manager import Manager
        except ImportError as error:
            raise ValueError("--outer.engine torchft needs torchft: pip install 'mdlm-torch[ft]'") from error
        assert config.rendezvous is not None
        host, port = parse_address(config.rendezvous, "outer.rendezvous")
        here = address_towards(host, port)
        wait = timedelta(seconds=WAIT_SECONDS if config.timeout is None else config.timeout)
        limit = timedelta(seconds=EXCHANGE_SECONDS if config.timeout is None else config.timeout)
        self.config, self.island, self.islands = config, island, 1
        self.members: list[int] = []
        self.news: list[str] = []
        self._patience = Patience(limit.total_seconds())
        self._store = dist.TCPStore(here, 0, 1, True, limit, wait_for_workers=False)
        self._group = _group(limit)
        self._generation = -1
        self._real: Any = None
        self._under_way: tuple[int, int] | None = None
        self._taken: dict[str, Any] | None = None
        try:
            self._manager = Manager(
                pg=self._group,
                load_state_dict=self._healed,
                state_dict=lambda: {**self.give(), "under_way": self._under_way},
                min_replica_size=1,
                use_async_quorum=False,
                timeout=limit,
                quorum_timeout=wait,
                rank=0,
                world_size=1,
                store_addr=here,
                store_port=self._store.port,
                lighthouse_addr=f"http://{host}:{port}",
                replica_id=f"island-{island}",
                hostname=here,
            )
        except RuntimeError as error:
            raise ValueError(
                f"--outer.rendezvous: no lighthouse at {host}:{port} (start torchft_lighthouse --min_replicas 1 --bind "
                f"[::]:{port} there): {error}"
            ) from error

    def _healed(self, state: dict[str, Any]) -> None:
        self._taken = state

    def join(self) -> None:
        """Meets the islands for the first time, and takes over the state of one that has a longer way behind it."""
        self._rounds(None)

    def start(self, message: Message) -> Callable[[], Merged]:
        """The exchange is made when it is waited for: nothing else may change the state that others may fetch."""

        def wait() -> Merged:
            merged = self._rounds(message)
            assert merged is not None
            return merged

        return wait

    def _rounds(self, message: Message | None) -> Merged | None:
        """One exchange, again and again until it has been made; None for a mere meeting.

        Raises `Healed` if this island has taken over another's state in place of making the exchange `message`.
        """
        healed, asked = False, message
        while True:
            self._under_way = None if message is None else (message.fragment, message.round)
            try:
                self._manager.start_quorum()
            except (RuntimeError, TimeoutError) as error:
                raise IslandLost(
                    f"no word from the lighthouse or the other islands: has {self.config.rendezvous} "
                    "(--outer.rendezvous) ended, or did the others need longer than --outer.timeout for their round? "
                    f"[{error}]"
                ) from error
            if self._taken is not None:
                state, self._taken, healed = self._taken, None, True
                self.take(state)
                under_way = state["under_way"]
                message = None if under_way is None else self.join_in(*under_way)
                self._under_way = under_way
            done, merged = self._attempt(message)
            if not done:
                continue
            if healed and message is not None:
                assert merged is not None
                self.witness(message.fragment, merged)
            if healed and asked is not None:
                raise Healed
            return merged

    def _attempt(self, message: Message | None) -> tuple[bool, Merged | None]:
        """Whether all of it was made, and what came out."""
        merged: Merged | None = None
        before: Mapping[Any, Any] = {}
        if self._manager.errored() is None:
            try:
                self._regroup()
                before = self._real.state_dict()
                if message is not None:
                    merged = self._real.start(message)()
            except RuntimeError as error:
                self.news.append(f"an island was lost in mid-exchange, which is made again without it [{error}]")
                self._manager.report_error(error)
                if self._real is not None:
                    self._real.rewind()
        if self._manager.should_commit():
            return True, None if merged is None else self._named(merged)
        if self._real is not None:
            self._real.load_state_dict(before)
        return False, None

    def _regroup(self) -> None:
        """A new exchange, without residuals, if the islands are others than at the last."""
        if self._generation == self._group.generation and self._real is not None:
            return
        if self._real is not None:
            self._real.close()
        rank, self.islands = self._manager.participating_rank(), self._manager.num_participants()
        assert rank is not None
        transport = Gloo(self._group, rank, self.islands, self._patience)
        self._real = exchange(self.config, transport)
        own = torch.tensor([self.island], dtype=torch.int64).view(torch.uint8)
        numbers = transport.all_gather(own, [8] * self.islands)
        members = [int(number.clone().view(torch.int64)) for number in numbers]
        if members != self.members:
            self.news.append(f"islands that exchange from here on: {sorted(members)}")
        self.members, self._generation = members, self._group.generation

    def _named(self, merged: Merged) -> Merged:
        """Contributors by their own numbers, not by their places in the quorum."""
        stats = merged.stats
        norms = dict(zip(self.members, stats.norms))
        everyone = tuple(norms.get(i, float("nan")) for i in range(self.config.islands))
        named = replace(stats, contributors=tuple(sorted(self.members[i] for i in stats.contributors)), norms=everyone)
        return replace(merged, stats=named)

    def rewind(self) -> None:
        """Nothing is ever under way between two calls."""

    def close(self) -> None:
        """Leaves the islands."""
        if self._real is not None:
            self._real.close()
        self._manager.shutdown(wait=False)
        self._group.abort()

    def state_dict(self) -> dict[Any, Any]:
        """Nothing: a resumed island joins the others, and residuals are dropped."""
        return {}

    def load_state_dict(self, state: Mapping[Any, Any]) -> None:
        """Nothing to take over."""


class Elastic(Islands):
    """The outer step between islands that come and go. Implements `Outer`."""

    def __init__(self, core: nn.Module, config: OuterConfig, links: Links) -> None:
        """Raises ValueError for an island of several processes, and without torchft or its lighthouse."""
        if config.rendezvous is None:
            raise ValueError("--outer.engine torchft needs --outer.rendezvous host:port (of a torchft_lighthouse)")
        if links.team.size > 1:
            raise ValueError(f"--outer.engine torchft takes islands of one process; this one has {links.team.size}")
        super().__init__(core, config, links, sharded=False)
        self.quorums = Quorums(config, links.island)
        self.outer = OuterStep(core, config, self.quorums)
        self.quorums.give, self.quorums.take = self._give, self._take
        self.quorums.join_in, self.quorums.witness = self.outer.bystander, self._witness
        self._run: Any = None

    def attach(self, run: Any) -> None:
        """The run (`setup.Run`) whose step, data and optimizer others may need, or that takes over theirs."""
        self._run = run

    def verify(self, facts: Mapping[str, Any]) -> None:
        """Meets the others."""
        self.quorums.join()

    def after_step(self, step: int, tokens: int, stop: bool, last: bool) -> Moment:
        """See `Outer`; if the island was healed, the run stands at another step."""
        try:
            moment = super().after_step(step, tokens, stop, last)
        except Healed:
            moment = Moment(stop=stop or self._run.step >= self._run.total_steps)
            self.quorums.news.append(f"took over another island's state at step {self._run.step}, in place of {step}")
        news, self.quorums.news = self.quorums.news, []
        return replace(moment, events=[*moment.events, *news])

    def close(self) -> None:
        """See `Outer`."""
        self.quorums.close()

    def _give(self) -> dict[str, Any]:
        run, state = self._run, self.outer.state_dict()
        ema = None if run.ema is None else {"average": run.ema.average, "updates": run.ema.updates}
        return {
            "outer": {key: state[key] for key in ("anchors", "optimizers", "rounds", "last")},
            "optimizer": named_optimizer_state(run.core, run.raw_optimizer),
            "step": run.step,
            "moved_at": self._moved_at,
            "total_steps": run.total_steps,
            "position": run.stream.state_dict(),
            "ema": ema,
        }

    def _witness(self, fragment: int, merged: Merged) -> None:
        """What the others do with the result, the moving average included."""
        run = self._run
        self.outer.witness(fragment, merged)
        moved, self._moved_at = run.step - self._moved_at, run.step
        if run.ema is not None and moved:
            with self.published(None):
                run.ema.update(run.core, moved)

    def _take(self, state: dict[str, Any]) -> None:
        from mdlm.training.setup import build_objective
        from mdlm.training.snapshot import open_stream

        run, outer = self._run, state["outer"]
        self.outer.continue_from(outer["anchors"], outer["rounds"], outer["last"])
        for optimizer, saved in zip(self.outer.optimizers, outer["optimizers"]):
            restore(optimizer, saved)
        own: dict[str, Tensor] = {key: value.clone() for key, value in state["optimizer"].items()}
        restore_optimizer(run.core, run.raw_optimizer, own, "the other island")
        run.step, run.position, self._moved_at = state["step"], state["position"], state["moved_at"]
        run.stream.close()
        run.stream = open_stream(run)
        if run.total_steps != state["total_steps"]:
            run.total_steps = state["total_steps"]
            run.objective = build_objective(run.config, run.core, run.total_steps)
        if run.ema is not None:
            run.ema.load(state["ema"]["average"], state["ema"]["updates"])
