"""The low-communication outer step: islands train apart and exchange a pseudo-gradient every H steps.

Per fragment: an anchor a (the value all islands last agreed on), an outer optimizer, and exchanges in flight. At the
start of an exchange d = a - local (positive: a descent direction) is sent; when the merged d lands, the outer optimizer
moves the anchor and local = alpha local + (1 - alpha) a. The inner optimizer's state stays where it is: it is kept, and
never exchanged. DiLoCo (2311.08105) is alpha = 0 and landing at once; Streaming DiLoCo (2501.18512) fragments, tau and
alpha; one island SNOO (2510.15830), or Lookahead (1907.08610) without momentum.

Nothing here knows about processes: how d becomes the merged d is the exchange's business (`exchange.py`), which is
passed in. Read next: `fragments.py` (which parameter when), `outer_config.py` (options), `exchange.py`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from mdlm.training.exchange import Alone, Exchange, Merged, Message, Stats
from mdlm.training.fragments import Schedule, gather, layout, local, scatter
from mdlm.training.outer_config import OuterConfig
from mdlm.training.outer_optim import OPTIMIZERS, restore

WEIGHTS: dict[str, Callable[[int, int], float]] = {
    "uniform": lambda tokens, steps: 1.0,
    "tokens": lambda tokens, steps: float(tokens),
    "tokens2_per_step": lambda tokens, steps: tokens * tokens / steps,
}
"""`--outer.merge.weights` -> function(tokens, steps since the fragment's last exchange) -> weight of this island."""


@dataclass(frozen=True)
class Landed:
    """What one landed exchange did, for the metrics."""

    fragment: int
    round: int
    staleness: int
    """Optimizer steps between the start of the exchange and its landing."""
    wait_seconds: float
    """Time this island stood still for it."""
    stats: Stats


@dataclass
class _Flight:
    """An exchange under way; the message is kept until the result is applied, so that it can be sent again."""

    step: int
    message: Message
    wait: Callable[[], Merged]


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters, tied ones once. Raises ValueError for state that merging would not cover."""
    saved = model.state_dict(keep_vars=True)
    floating = [name for name, b in model.named_buffers() if name in saved and b.is_floating_point()]
    if floating:
        raise ValueError(
            f"the model keeps floating-point buffers ({', '.join(floating[:3])}) that every island would update on its "
            "own; the outer step merges parameters only: replace such layers (running averages of a batch norm)"
        )
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


class OuterStep:
    """The outer step of one island (under sharding: of one process, for its shard of the parameters).

    Call `step` once after every *attempted* optimizer step, also after one that was skipped for an overflow: islands
    that count differently would send different fragments. The inner loop must not replace the parameters' tensors.

    Attributes:
        schedule: which fragment starts and lands when.
        fragments: places of the parameters in the flat buffers.
        anchors: per fragment a flat float32 buffer, whatever the dtype of the parameters.
        optimizers: per fragment the outer optimizer over the anchor's pieces.
    """

    def __init__(self, model: nn.Module, config: OuterConfig, exchange: Exchange | None = None) -> None:
        """Takes the parameters as they are as the first anchors; without an exchange the island is alone.

        Raises ValueError where the options do not suit the model.
        """
        self.config = config
        self.alone = exchange is None
        self.exchange: Exchange = Alone() if exchange is None else exchange
        self.schedule = Schedule(config.every, config.fragments, config.landing, config.start_step)
        self.model = model
        self.parameters = _trainable(model)
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        embeddings = frozenset(name for name, p in self.parameters.items() if id(p) in tables)
        self.fragments = layout(self.parameters, config.fragments, config.pattern, embeddings)
        home = local(next(iter(self.parameters.values()))).device
        self.device = torch.device("cpu") if config.offload else home
        self.anchors = [gather(f, self.parameters, self.device) for f in self.fragments]
        if config.offload and torch.cuda.is_available():
            self.anchors = [a.pin_memory() for a in self.anchors]
        self._pieces = [[p.of(a) for p in f] for f, a in zip(self.fragments, self.anchors)]
        self.optimizers = [OPTIMIZERS[config.optimizer](pieces, config) for pieces in self._pieces]
        self._flights: list[list[_Flight]] = [[] for _ in self.fragments]
        self._resets = config.overlap in ("one_step", "eager")  # local values return to the anchor at every start
        self._rounds = [0] * config.fragments
        self._tokens = [0] * config.fragments
        self._steps = [0] * config.fragments
        self._last: int | None = None

    def step(self, step: int, tokens: int = 0) -> list[Landed]:
        """Everything due at moment `step`, the number of optimizer steps attempted so far.

        Args:
            step: one more than at the last call.
            tokens: supervised (masked) tokens this island trained on in that step; needed by token weights.

        Raises whatever the exchange raises, before anything of that fragment has changed; `land` may then be called
        again, after `relaunch`.
        """
        self.launch(step, tokens)
        return self.land(step)

    def launch(self, step: int, tokens: int = 0) -> None:
        """The first half of `step`: sends the pseudo-gradients due."""
        if self._last is not None and step != self._last + 1:
            raise ValueError(f"the outer step was called with step {step} after {self._last}; it takes each step once")
        self._last = step
        if self.schedule.dense(step) or step == self.schedule.start_step:
            if step == self.schedule.start_step:
                self.reanchor()
            return
        self._tokens = [t + tokens for t in self._tokens]
        self._steps = [s + 1 for s in self._steps]
        for f in self.schedule.starts(step):
            self._begin(f, step)

    def land(self, step: int) -> list[Landed]:
        """The second half of `step`: waits for the exchanges due and applies them."""
        if self.schedule.dense(step):
            return []
        landed = []
        for f in self.schedule.starts(step) if self._resets else self.schedule.finishes(step):
            flights = self._flights[f]
            due = flights[0] if flights and flights[0].step == step - self.config.landing else None
            landed.append(self._land(f, due, step))
        return [report for report in landed if report is not None]

    def finish(self, step: int) -> list[Landed]:
        """The end of training: lands what is in flight, exchanges what is left of the round, and leaves all islands at
        the anchors, so that nothing is lost and nothing applied twice."""
        landed = []
        for f, flights in enumerate(self._flights if not self.schedule.dense(step) else []):
            while flights and not self._resets:
                landed.append(self._land(f, flights[0], step))
            if self._steps[f]:
                self._begin(f, step)
            while flights:
                landed.append(self._land(f, flights[0], step))
            scatter(self.fragments[f], self.anchors[f], self.parameters)
        return [report for report in landed if report is not None]

    def relaunch(self) -> None:
        """Sends every message in flight again after a failure; their results land when they were due."""
        self.exchange.rewind()
        flights = [(flight.step, f, flight) for f, queue in enumerate(self._flights) for flight in queue]
        for _, _, flight in sorted(flights, key=lambda item: item[:2]):
            flight.wait = self.exchange.start(flight.message)

    @property
    def dense_now(self) -> bool:
        """Whether the dense phase lasts: the anchors mean nothing yet."""
        return self.schedule.dense(self._last or 0)

    def reanchor(self) -> None:
        """Takes the parameters as they are as the anchors: the end of the dense phase."""
        for anchor, fragment in zip(self.anchors, self.fragments):
            anchor.copy_(gather(fragment, self.parameters, self.device))

    def adopt(self, anchors: Sequence[Tensor]) -> None:
        """Goes on from these anchors, as an island does that joins others: what it has in flight, and the round that it
        has begun, are dropped."""
        for own, anchor, fragment in zip(self.anchors, anchors, self.fragments):
            own.copy_(anchor)
            scatter(fragment, own, self.parameters)
        self._flights = [[] for _ in self.fragments]
        self._tokens, self._steps = [0] * len(self.fragments), [0] * len(self.fragments)

    def continue_from(self, anchors: Sequence[Tensor], rounds: Sequence[int], last: int | None) -> None:
        """`adopt` for an island that takes over where another stands: its rounds, and its last step."""
        self.adopt(anchors)
        self._rounds, self._last = list(rounds), last

    def bystander(self, fragment: int, number: int) -> Message:
        """What an island that joins in mid-exchange sends: nothing, with weight 0."""
        nothing = torch.zeros_like(self.anchors[fragment])
        return Message(fragment, number, self.fragments[fragment], nothing, self.anchors[fragment], 0.0)

    def witness(self, fragment: int, merged: Merged) -> None:
        """Applies an exchange in which this island was a bystander; its local values follow the anchor."""
        self._apply(fragment, merged.delta, merged.rolled_back)
        scatter(self.fragments[fragment], self.anchors[fragment], self.parameters)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the block the parameters hold the anchors (evaluate and save there); then their own values again."""
        kept = [local(p.detach()).clone() for p in self.parameters.values()]
        for fragment, anchor in zip(self.fragments, self.anchors):
            scatter(fragment, anchor, self.parameters)
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(self.parameters.values(), kept):
                    local(p.detach()).copy_(value)

    def fingerprint(self) -> str:
        """Hash of schedule, layout and anchors: islands that start with different ones would never agree again."""
        digest = hashlib.sha256(repr((self.schedule, self.fragments)).encode())
        for anchor in self.anchors:
            digest.update(anchor.cpu().numpy().data)
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Everything a resume needs, mid-round too: messages in flight are kept and sent again. Shares memory."""
        return {
            "islands": self.exchange.islands,
            "layout": [[(piece.name, piece.shape) for piece in fragment] for fragment in self.fragments],
            "last": self._last,
            "anchors": self.anchors,
            "optimizers": [{"state": optimizer.state_dict()["state"]} for optimizer in self.optimizers],
            "flights": [
                [(fl.step, fl.message.round, fl.message.delta, fl.message.weight) for fl in flights]
                for flights in self._flights
            ],
            "rounds": self._rounds,
            "tokens": self._tokens,
            "steps": self._steps,
            "exchange": self.exchange.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], new_islands: bool = False) -> None:
        """Takes over a saved state, and sends again what was in flight.

        Args:
            state: from `state_dict` of the same shard.
            new_islands: the set of islands has changed: anchors and outer optimizers are taken over, what belonged to
                the old islands (messages in flight, residuals, the unfinished round) is dropped, and training goes on
                from the anchors.

        Raises:
            ValueError: another layout; or another number of islands without `new_islands`.
        """
        own = [[(piece.name, piece.shape) for piece in fragment] for fragment in self.fragments]
        if [[(name, tuple(shape)) for name, shape in fragment] for fragment in state["layout"]] != own:
            raise ValueError("the saved outer step has other fragments or shapes: resume with the model, number of "
                             "fragments and sharding it was saved with")  # fmt: skip
        if state["islands"] != self.exchange.islands and not new_islands:
            raise ValueError(
                f"the outer step was saved with {state['islands']} islands and there are {self.exchange.islands} now; "
                "resume with as many, or ask for new islands to go on from the anchors"
            )
        for anchor, saved in zip(self.anchors, state["anchors"]):
            anchor.copy_(saved)
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            restore(optimizer, saved)
        self._last = state["last"]
        self._flights = [[] for _ in self.fragments]
        self._rounds = list(state["rounds"])
        self._tokens, self._steps = [0] * len(self.fragments), [0] * len(self.fragments)
        if new_islands:
            for fragment, anchor in zip(self.fragments, [] if self.dense_now else self.anchors):
                scatter(fragment, anchor, self.parameters)
            return
        self._tokens, self._steps = list(state["tokens"]), list(state["steps"])
        self.exchange.load_state_dict(state["exchange"])
        flights = [(step, f, n, delta, w) for f, saved in enumerate(state["flights"]) for step, n, delta, w in saved]
        for step, f, n, delta, weight in sorted(flights, key=lambda item: item[:2]):
            self._send(f, step, n, delta.to(self.device, copy=True), weight)

    def _begin(self, f: int, step: int) -> None:
        weight = WEIGHTS[self.config.merge.weights](self._tokens[f], self._steps[f])
        if weight <= 0:
            raise ValueError(
                f"--outer.merge.weights {self.config.merge.weights} needs the tokens of every step; there were "
                f"{self._tokens[f]} in the {self._steps[f]} steps since the last exchange of fragment {f}"
            )
        held = self._held(f)
        self._send(f, step, self._rounds[f], held.sub_(gather(self.fragments[f], self.parameters, self.device)), weight)
        self._rounds[f] += 1
        self._tokens[f] = self._steps[f] = 0

    def _send(self, f: int, step: int, number: int, delta: Tensor, weight: float) -> None:
        message = Message(f, number, self.fragments[f], delta, self.anchors[f], weight)
        self._flights[f].append(_Flight(step, message, self.exchange.start(message)))

    def _held(self, f: int) -> Float32[Tensor, " values"]:
        """The anchor as the parameters can hold it: its rounding to bfloat16, say, is not training progress."""
        held = self.anchors[f].clone()
        for piece in self.fragments[f]:
            piece.of(held).copy_(piece.of(held).to(self.parameters[piece.name].dtype))
        return held

    def _land(self, f: int, flight: _Flight | None, step: int) -> Landed | None:
        """Applies one exchange (None: its turn has come for the first time); the fragment's local values follow."""
        begun = time.perf_counter()
        merged = flight.wait() if flight else None
        waited = time.perf_counter() - begun
        direction = merged.delta if merged else None
        rolled_back = merged.rolled_back if merged else ()
        if self.config.overlap == "eager":
            direction = self._eager(f, flight, merged)
        if merged is not None and merged.anchor is not None:
            self.anchors[f].copy_(merged.anchor)
        elif direction is not None:
            self._apply(f, direction, rolled_back)
        values = self.anchors[f]
        if merged and merged.share > 0 and self.config.alpha > 0:
            now = gather(self.fragments[f], self.parameters, self.device)
            for i in rolled_back:
                piece = self.fragments[f][i]
                piece.of(now).copy_(piece.of(values))
            values = values.lerp(now, self.config.alpha)
        if direction is not None or self._resets:
            scatter(self.fragments[f], values, self.parameters)
        if flight is None or merged is None:
            return None
        self._flights[f].pop(0)
        return Landed(f, flight.message.round, step - flight.step, waited, merged.stats)

    def _eager(self, f: int, flight: _Flight | None, merged: Merged | None) -> Float32[Tensor, " values"] | None:
        """The landed mean without this island's part, which was used at its start, and with its newest part instead.

        Eager updates (2502.12996), algorithm 2. A part that is not finite was left out of the mean, and is left out.
        """
        newest = self._flights[f][-1]
        direction = None
        if flight is not None and merged is not None:
            own = flight.message.delta * merged.share if merged.share else torch.zeros_like(merged.delta)
            direction = merged.delta - own
        if newest is not flight and bool(newest.message.delta.isfinite().all()):
            part = newest.message.delta / self.exchange.islands
            direction = part if direction is None else direction + part
        return direction

    def _apply(self, f: int, direction: Float32[Tensor, " values"], rolled_back: tuple[int, ...]) -> None:
        """The outer optimizer moves the anchor, except the pieces that are rolled back."""
        if self.alone and self.config.optimizer == "sgd" and not self.config.landing and not rolled_back:
            # Lookahead as it is defined: in float32, a - 1 * (a - local) would not always give local back
            here = gather(self.fragments[f], self.parameters, self.device)
            self.anchors[f].lerp_(here.add_(self.anchors[f] - self._held(f)), self.config.lr)
            return
        for i, (piece, anchor) in enumerate(zip(self.fragments[f], self._pieces[f])):
            anchor.grad = None if i in rolled_back else piece.of(direction)
        self.optimizers[f].step()
        self.optimizers[f].zero_grad()
