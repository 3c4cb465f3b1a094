"""Islands in the training loop: when it exchanges, what it agrees on, what it saves.

**How the loop uses it.** `setup.py` makes one `Outer` per process where `--outer.preset` is given (`run.outer`; None
otherwise), after the model was wrapped (it sees shards) and before a checkpoint is loaded. Then, per optimizer step n
(from 0) of `loop.py`:

    outer.dense(n)              the step is shared by all islands (the dense phase):
        outer.total(numbers)        normaliser and stop votes summed over islands, and
        outer.share_gradients()     the gradients too, between the last backward and clipping
    outer.after_step(n + 1, ..) after every *attempted* optimizer step: starts and lands exchanges, says what happened
    with outer.published(ema)   the weights that are evaluated, shown and saved: the anchors
    outer.save / outer.load     a part of the checkpoint (`StatePart`)
    outer.close()

**How another engine plugs in.** Either with an `Exchange` of its own (`exchange.py`: how a pseudo-gradient becomes the
merged one), made in `joined.py`; or as another class with the methods of `Outer`, chosen in `make_outer`.

Islands meet only in `make_outer`'s caller `verify` (once), in dense steps, in exchanges, and where anchors differ by
design (NoLoCo, eager) to publish their mean. A stop signal travels beside an exchange and is obeyed by all islands at
its landing, so they stop at the same step without a word in between. Read next: `outer.py`, `links.py`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mdlm.training import packed
from mdlm.training.ema import EMA
from mdlm.training.fragments import gather, local, scatter
from mdlm.training.joined import Joined, make_exchange
from mdlm.training.links import Links
from mdlm.training.outer import Landed, OuterStep
from mdlm.training.outer_config import OuterConfig


@dataclass(frozen=True)
class Moment:
    """What happened after one optimizer step."""

    records: list[dict[str, Any]] = field(default_factory=list)
    """One per landed exchange, for the metrics (kind "outer")."""
    events: list[str] = field(default_factory=list)
    """What a person should know: an island was left out of a round."""
    stop: bool = False
    """All islands stop now."""
    moved: int = 0
    """Optimizer steps by which the anchors have just moved on; 0: they did not."""


class Outer(Protocol):
    """What the loop asks of an engine; see the head of this file."""

    def dense(self, step: int) -> bool:
        """Whether optimizer step `step` (from 0) is shared by all islands."""

    def total(self, numbers: Tensor) -> Tensor:
        """Sum over the islands of numbers that the island's processes have summed already."""

    def share_gradients(self) -> None:
        """Adds up the islands' gradients, in place."""

    def after_step(self, step: int, tokens: int, stop: bool, last: bool) -> Moment:
        """After `step` attempted steps. `tokens`: masked tokens of the island's step; `stop`: it was asked to stop;
        `last`: training ends here."""

    def published(self, ema: EMA | None) -> Any:
        """Context in which the model holds the weights to publish."""

    def common_step(self) -> int | None:
        """All islands have saved whatever they save at steps before this one; None: nobody else saves."""

    def largest(self, value: float) -> float:
        """Largest of the islands' values; at the start only."""

    def forget(self) -> None:
        """The steps so far were a probe: as before the first, with the parameters as they are."""

    def attach(self, run: Any) -> None:
        """The run (`setup.Run`) that the engine belongs to."""

    def verify(self, facts: Mapping[str, Any]) -> None:
        """Raises ValueError unless all islands start from the same weights and `facts`."""

    def save(self, folder: Path) -> None:
        """`StatePart.save`."""

    def load(self, folder: Path) -> None:
        """`StatePart.load`."""

    def close(self) -> None:
        """Ends threads; nothing may be under way."""


def make_outer(
    core: nn.Module,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: OuterConfig,
    links: Links,
    sharded: bool,
) -> Outer:
    """The engine that the options ask for.

    Args:
        core: the model itself.
        model: as it was wrapped for its processes.
        optimizer: torch's own.
        config: the options.
        links: this process's place among islands.
        sharded: the island's processes hold a shard of the parameters each.

    Raises:
        ValueError: options that do not suit the model or its processes.
    """
    from mdlm.training.engines import Gradients, Primal

    if config.engine == "gradients":
        return Gradients(core, model, config, links)
    if config.engine == "primal":
        return Primal(core, optimizer, config, links)
    if config.engine == "torchft":
        from mdlm.training.elastic import Elastic

        if sharded:
            raise ValueError("--outer.engine torchft takes islands of one process, which have no shards")
        return Elastic(core, config, links)
    return Islands(core, config, links, sharded)


class Islands:
    """The outer step over links: what one process of one island does. Implements `Outer`."""

    def __init__(self, core: nn.Module, config: OuterConfig, links: Links, sharded: bool) -> None:
        """Takes the parameters as they are as the anchors. Raises ValueError where options and model do not fit."""
        self.config, self.links, self.sharded = config, links, sharded
        self.exchange = make_exchange(config, links, sharded)
        self.outer = OuterStep(core, config, self.exchange)
        self.differ = links.islands > 1 and (config.merge.rule == "pairs" or config.overlap == "eager")
        self._asked: list[tuple[int, int, Future[list[Any]]]] = []
        self._moved_at = 0
        self._known: int | None = None if links.control is None else 0
        self._bytes = 0
        self._clock, self._longest = time.monotonic(), 0.0
        self._resumed = False

    def dense(self, step: int) -> bool:
        """See `Outer`."""
        return self.outer.schedule.dense(step)

    def total(self, numbers: Tensor) -> Tensor:
        """See `Outer`."""
        if self.links.wide is None:
            return numbers
        return self.links.wide.sum_(numbers.cpu().clone()).to(numbers.device)

    @torch.no_grad()
    def share_gradients(self) -> None:
        """See `Outer`. Replicas reduce a part each, and hand it on within the island."""
        if self.links.wide is None:
            return
        team = self.links.team
        grads = [local(p.grad) for p in self.outer.parameters.values() if p.grad is not None]
        flat = torch.cat([g.detach().reshape(-1).to("cpu", torch.float32) for g in grads])
        shares = team.size if not self.sharded else 1
        cuts = [len(flat) * i // shares for i in range(shares + 1)]
        mine = team.rank if shares > 1 else 0
        part = flat[cuts[mine] : cuts[mine + 1]]
        self.links.wide.sum_(part)
        island = len(flat) * (team.size if self.sharded else 1)
        self._bytes += 2 * 4 * island * (self.links.islands - 1) // self.links.islands
        for source in range(shares if shares > 1 else 0):
            team.copy_from(flat[cuts[source] : cuts[source + 1]], source)
        for g, summed in zip(grads, flat.split([g.numel() for g in grads])):
            g.copy_(summed.view_as(g))

    def after_step(self, step: int, tokens: int, stop: bool, last: bool) -> Moment:
        """See `Outer`."""
        self.outer.launch(step, tokens)
        if self.dense(step - 1):
            self._hear(step - 1)
            return Moment(stop=stop)
        if self.outer.schedule.starts(step):
            self._renew_patience()
            if self.links.control is not None:
                lag = 2 * self.config.every if self.config.merge.rule == "pairs" else self.config.landing
                self._asked.append((step, lag, self.links.control.ask(stop)))
        landed = self.outer.land(step)
        if last:
            landed += self.outer.finish(step)
        agreed = stop and self.links.control is None
        while self._asked and sum(self._asked[0][:2]) <= step:
            begun, _, answers = self._asked.pop(0)
            agreed = any(answers.result()) or agreed
            self._hear(begun)
        moved = 0
        if landed:
            moved, self._moved_at = step - max(self._moved_at, self.outer.schedule.start_step), step
        return Moment([self._record(one) for one in landed], self._left_out(landed), agreed, moved)

    @contextmanager
    def published(self, ema: EMA | None) -> Iterator[None]:
        """See `Outer`: the average if there is one, else the anchors (in the dense phase the weights themselves, which
        all islands share); of NoLoCo and eager, the islands' mean."""
        apart = not self.outer.dense_now
        own = self.outer.averaged() if apart else nullcontext()
        with own if ema is None else ema.swapped_in(self.outer.model):
            if self.differ and apart:
                self._take_mean()
            yield

    def common_step(self) -> int | None:
        """See `Outer`: an island that answered at a step has saved whatever it saves before that."""
        return self._known

    def largest(self, value: float) -> float:
        """See `Outer`."""
        return value if self.links.control is None else max(self.links.control.gather(value))

    def verify(self, facts: Mapping[str, Any]) -> None:
        """See `Outer`."""
        if self.config.engine == "syncer":
            assert isinstance(self.exchange, Joined)
            self.exchange.join(self.outer)
        if self.links.control is None:
            return
        where = repr((self.outer.schedule, self.outer.fragments))
        own = {
            **facts,
            "fragments and shapes": hashlib.sha256(where.encode()).hexdigest(),
            "initial weights": None if self._resumed and self.differ else self.outer.fingerprint(),
        }
        everybody = self.links.control.gather(own)
        other = [(i, key) for i, theirs in enumerate(everybody) for key in own if theirs.get(key) != everybody[0][key]]
        if other:
            listed = "; ".join(f"{key} of island {i}" for i, key in other[:5])
            raise ValueError(
                f"the islands would never agree: {listed} differ(s) from island 0's; start all of them with the same "
                "options, tokenizer and initial weights"
            )

    def save(self, folder: Path) -> None:
        """Anchors, outer optimizers, residuals, messages in flight: one file per island, of shards one per process."""
        if self.sharded or self.links.team.is_main:
            packed.write(folder / self._file(), self._state())

    def load(self, folder: Path) -> None:
        """Raises ValueError if the file is another process's, or of another number of islands (`new_islands`)."""
        team, config = self.links.team, self.config
        path = folder / self._file()
        if not path.is_file():
            raise ValueError(f"--resume: {path} is not there: this outer step was saved by fewer processes per island")
        state = packed.read(path)
        own = {"island": self.links.island, "sharded": self.sharded}
        if self.sharded:
            own |= {"rank": team.rank, "processes": team.size}
        if config.new_islands:
            del own["island"]
        wrong = [f"{key} {state[key]} (here {value})" for key, value in own.items() if state[key] != value]
        if wrong:
            raise ValueError(f"--resume: {path} belongs to {', '.join(wrong)}")
        self.outer.load_state_dict(state["outer"], config.new_islands or config.engine != "islands")
        self._moved_at, self._known, self._bytes = state["moved_at"], state["known"], state["bytes"]
        self._resumed = True
        if config.new_islands:
            self._known = None if self.links.control is None else 0

    def forget(self) -> None:
        """See `Outer`: a probe makes no outer step."""
        self._bytes = 0

    def attach(self, run: Any) -> None:
        """See `Outer`: what it needs it has."""

    def close(self) -> None:
        """See `Outer`."""
        if isinstance(self.exchange, Joined):
            self.exchange.close()
        if self.links.wide is not None:
            self.links.wide.close()
        if self.links.control is not None:
            self.links.control.close()

    def _hear(self, step: int) -> None:
        """All islands have come to `step`."""
        if self._known is not None:
            self._known = step

    def _state(self) -> dict[str, Any]:
        team = self.links.team
        return {
            "island": self.links.island,
            "rank": team.rank,
            "processes": team.size,
            "sharded": self.sharded,
            "moved_at": self._moved_at,
            "known": self._known,
            "bytes": self._bytes,
            "outer": self.outer.state_dict(),
        }

    def _file(self) -> str:
        return f"outer-{self.links.team.rank if self.sharded else 0}.safetensors"

    def _renew_patience(self) -> None:
        now = time.monotonic()
        self._longest, self._clock = max(self._longest, now - self._clock), now
        if self.config.timeout is None:
            rounds = self.config.fragments * self._longest  # starts come `fragments` times a round
            self.links.patience.seconds = max(300.0, 5 * rounds)

    @torch.no_grad()
    def _take_mean(self) -> None:
        control, team = self.links.control, self.links.team
        assert control is not None
        for fragment in self.outer.fragments:
            flat = gather(fragment, self.outer.parameters, torch.device("cpu"))
            if self.sharded or team.is_main:
                control.sum_(flat).div_(self.links.islands)
            if not self.sharded:
                team.copy_from(flat)
            scatter(fragment, flat, self.outer.parameters)

    def _record(self, landed: Landed) -> dict[str, Any]:
        s = landed.stats
        dot = s.cosine * s.norm * s.merged_norm if s.norm * s.merged_norm > 0 else 0.0
        sums = [s.norm**2, s.merged_norm**2, dot, s.consensus**2, s.bytes_sent, *(n * n for n in s.norms)]
        numbers = torch.tensor(sums, dtype=torch.float64, device=self.links.team.device)
        norm2, merged2, dot, consensus2, sent, *squares = (
            self.links.team.all_reduce(numbers) if self.sharded else numbers
        ).tolist()
        self._bytes += int(sent)
        norms = [square**0.5 for square in squares]
        length = (norm2 * merged2) ** 0.5
        return {
            "fragment": landed.fragment,
            "round": landed.round,
            "staleness": landed.staleness,
            "exposed_seconds": landed.wait_seconds,
            "bytes_sent": int(sent),
            "bytes_total": self._bytes,
            "pseudo_gradient_norm": norm2**0.5,
            "merged_norm": merged2**0.5,
            "cosine_to_merged": dot / length if length > 0 else None,
            "cosine_between_islands": self._cosine(merged2, [norms[i] for i in s.contributors]),
            "consensus_distance": consensus2**0.5,
            "contributors": list(s.contributors),
        }

    def _cosine(self, merged2: float, norms: list[float]) -> float | None:
        """Mean inner product of two different islands' pseudo-gradients, over the mean product of their lengths.

        From |sum d|^2 = sum |d|^2 + sum over pairs, so for plain means only.
        """
        merge, count, squares = self.config.merge, len(norms), sum(n * n for n in norms)
        pairs = sum(norms) ** 2 - squares
        plain = (merge.rule, merge.weights, self.config.engine) == ("mean", "uniform", "islands")
        if count < 2 or pairs <= 0 or not plain:
            return None
        return (count * count * merged2 - squares) / pairs

    def _left_out(self, landed: list[Landed]) -> list[str]:
        if self.config.merge.rule == "pairs":
            return []
        asked = range(self.links.islands) if self.config.engine == "islands" else (self.links.island,)
        return [
            f"round {one.round} of fragment {one.fragment}: island(s) {sorted(missing)} left out (pseudo-gradient not "
            "finite or out of bounds)"
            for one in landed
            if (missing := set(asked) - set(one.stats.contributors))
        ]
