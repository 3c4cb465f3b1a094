"""How long training takes when only a slow network joins the islands: a closed form of time, utilisation and bytes.

One round is H steps of t seconds and the exchanges of P fragments. With N parameters, W islands, b bits per value on
the wire and k copies of them per island and direction, a link of B bit/s:

    C       = N / P * b * k * overhead / B + hops * RTT / 2         one exchange
    allow   = (hidden + tau) * t                                    what training hides of it
    exposed = max(C - allow, C / layers where one exchange ends the backward of a step)
    round   = max(H t + P exposed, P C)                             the link carries one exchange after the other
    CU      = H t / round

With k = 1, overhead = 1, RTT = 0 and hidden = 2/3 (the backward's share of a step) this is the model behind the table
of Streaming DiLoCo (2501.18512), which it reproduces within a step of its grid of bandwidths (`tests/test_netsim.py`).
The last line of `round` and everything about stragglers and failures is ours. Read next: `plan.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

from mdlm.training.compress import codec
from mdlm.training.outer_config import OuterConfig

REALISTIC = 1.5
"""Measured exchanges take 1.08 to 1.92 times as long as a formula says: `realistic` numbers stretch them by this."""

Route = Literal["paper", "ring", "scatter", "gather", "pair"]


@dataclass(frozen=True)
class Setting:
    """The hardware and the model. Rates in bit/s, times in seconds."""

    parameters: float
    """N."""
    islands: int
    """W."""
    accelerators: int = 8
    """Per island."""
    layers: int = 24
    """Transformer layers."""
    tokens_per_step: float = 5e5
    """Tokens that one island trains on in one step."""
    flops: float = 4e14
    """FLOP/s that one accelerator really does (peak times utilisation within the island)."""
    step_seconds: float | None = None
    """Time of one step; None: 6 N tokens / FLOP/s of the island."""
    up: float = 1e9
    """Rate at which an island can send."""
    down: float | None = None
    """Rate at which it can receive; None: as it sends."""
    rtt: float = 0.05
    """Round-trip time between islands."""
    streams: int = 1
    """Parallel TCP connections of an island."""
    stream_rate: float | None = None
    """What one TCP connection carries at most (a long fat pipe is not filled by one); None: no limit."""
    overhead: float = 1.05
    """Bytes on the wire per byte of message: headers of the protocols."""
    straggler: float = 0.0
    """Coefficient of variation of one accelerator's step time, from step to step."""
    mtbf_hours: float | None = None
    """Mean time between failures of one accelerator; None: nothing fails."""
    restart_seconds: float = 600.0
    """From a failure to training again."""
    checkpoint_seconds: float = 1800.0
    """Time between checkpoints, half of which a failure costs on average."""
    elastic: bool = False
    """A failed island stops only itself (and rejoins at the next round); otherwise all wait for its restart."""

    def __post_init__(self) -> None:
        """Raises ValueError for a number out of range."""
        optional = {"step_seconds": self.step_seconds, "down": self.down, "stream_rate": self.stream_rate}
        positive = {name: value for name, value in optional.items() if value is not None}
        positive |= {name: getattr(self, name) for name in ("parameters", "islands", "accelerators", "layers", "up")}
        positive |= {name: getattr(self, name) for name in ("tokens_per_step", "flops", "streams", "overhead")}
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be positive")
        if min(self.rtt, self.straggler, self.restart_seconds, self.checkpoint_seconds) < 0:
            raise ValueError("rtt, straggler, restart_seconds and checkpoint_seconds must not be negative")
        if self.mtbf_hours is not None and not self.mtbf_hours > 0:
            raise ValueError(f"mtbf_hours is {self.mtbf_hours}; it must be positive, or None where nothing fails")

    @property
    def seconds(self) -> float:
        """Time of one inner step, without stragglers."""
        if self.step_seconds is not None:
            return self.step_seconds
        return 6 * self.parameters * self.tokens_per_step / (self.flops * self.accelerators)

    @property
    def rate(self) -> float:
        """Usable bit/s of an island's link, in the slower direction."""
        link = min(self.up, self.up if self.down is None else self.down)
        return link if self.stream_rate is None else min(link, self.streams * self.stream_rate)


@dataclass(frozen=True)
class Method:
    """What is exchanged, and when."""

    name: str
    every: int = 1
    """H."""
    fragments: int = 1
    """P."""
    tau: float = 0.0
    """Steps that go on during an exchange."""
    bits: float = 16.0
    """Per value on the wire."""
    hidden: float = 0.0
    """Share of a step behind which an exchange hides besides: 2/3 where it runs during the backward."""
    route: Route = "scatter"
    """Who sends to whom; `paper` counts each value once."""

    def copies(self, islands: int) -> float:
        """How often an island sends (or receives) each value, k."""
        if islands == 1:
            return 0.0
        both = 2 * (islands - 1) / islands
        return {"paper": 1.0, "ring": both, "scatter": both, "gather": islands - 1.0, "pair": 1.0}[self.route]

    def hops(self, islands: int) -> float:
        """Messages that must wait for one another."""
        if islands == 1:
            return 0.0
        return {"paper": 0.0, "ring": 2.0 * (islands - 1), "scatter": 3.0, "gather": 1.0, "pair": 1.0}[self.route]


@dataclass(frozen=True)
class Forecast:
    """What a method does in a setting. Bytes are sent per island; `realistic` stretches exchanges by `REALISTIC`."""

    method: str
    step_seconds: float
    """Per inner step, exchanges, stragglers and failures included."""
    utilisation: float
    """Share of the time of a round in which an island computes, stragglers and failures apart."""
    realistic_utilisation: float
    exchange_seconds: float
    exposed_seconds: float
    """Per round."""
    bytes_per_round: float
    bytes_per_step: float
    bytes_per_token: float
    straggling: float
    """Factor on the time."""
    goodput: float
    """Share of the time that failures leave."""
    steps: float
    hours: float
    realistic_hours: float


@lru_cache(maxsize=256)
def largest_of(count: int) -> tuple[float, float]:
    """Mean and standard deviation of the largest of `count` standard normal numbers."""
    if count == 1:
        return 0.0, 1.0
    normal, width = NormalDist(), 0.01
    grid = [-8.0 + width * i for i in range(1601)]
    powers = [normal.cdf(x) ** count for x in grid]
    weights = [b - a for a, b in zip(powers, powers[1:])]  # noqa: RUF007 - a list of floats
    middle = [x + width / 2 for x in grid[:-1]]
    mean = sum(w * x for w, x in zip(weights, middle))
    return mean, math.sqrt(max(0.0, sum(w * (x - mean) ** 2 for w, x in zip(weights, middle))))


def _straggling(s: Setting, every: int) -> float:
    """Slowest accelerator of every step within an island, slowest island of every round among islands."""
    mean, spread = largest_of(s.accelerators)
    inside = 1 + s.straggler * mean
    return inside + s.straggler * spread / math.sqrt(every) * largest_of(s.islands)[0]


def _goodput(s: Setting, round_seconds: float) -> float:
    """Time that failures leave: each costs the restart and the work since the last safe point."""
    if s.mtbf_hours is None:
        return 1.0
    per_second = s.accelerators * s.islands / (s.mtbf_hours * 3600)
    if s.elastic:
        return 1 / (1 + per_second / s.islands * (s.restart_seconds + round_seconds / 2))
    return 1 / (1 + per_second * (s.restart_seconds + s.checkpoint_seconds / 2))


def _round(s: Setting, m: Method, stretch: float) -> tuple[float, float, float]:
    """Seconds of one round, of one exchange, and of what is exposed of all exchanges of the round."""
    compute = m.every * s.seconds
    bits = s.parameters / m.fragments * m.bits * m.copies(s.islands)
    exchange = stretch * (bits * s.overhead / s.rate + m.hops(s.islands) * s.rtt / 2)
    exposed = max(0.0, exchange - (m.hidden + m.tau) * s.seconds)
    if m.fragments == 1 and m.tau == 0:
        exposed = max(exposed, exchange / s.layers)
    whole = max(compute + m.fragments * exposed, m.fragments * exchange)
    return whole, exchange, whole - compute


def forecast(s: Setting, m: Method, tokens: float) -> Forecast:
    """Time, utilisation and bytes of training on `tokens` tokens, those of all islands together."""
    whole, exchange, exposed = _round(s, m, 1.0)
    slow = _round(s, m, REALISTIC)[0]
    compute = m.every * s.seconds
    straggling, goodput = _straggling(s, m.every), _goodput(s, whole)
    steps = tokens / (s.tokens_per_step * s.islands)
    sent = s.parameters * m.bits * m.copies(s.islands) / 8
    extra = (straggling - 1) * compute
    hours = steps / m.every * (whole + extra) / goodput / 3600
    return Forecast(
        method=m.name,
        step_seconds=(whole + extra) / m.every / goodput,
        utilisation=compute / whole,
        realistic_utilisation=compute / slow,
        exchange_seconds=exchange,
        exposed_seconds=exposed,
        bytes_per_round=sent,
        bytes_per_step=sent / m.every,
        bytes_per_token=sent / (m.every * s.tokens_per_step),
        straggling=straggling,
        goodput=goodput,
        steps=steps,
        hours=hours,
        realistic_hours=steps / m.every * (slow + extra) / _goodput(s, slow) / 3600,
    )


def bandwidth_for(s: Setting, m: Method, utilisation: float) -> float:
    """Smallest link rate (bit/s, both directions) that gives the compute utilisation; inf if latency alone forbids it.

    Raises ValueError unless the utilisation lies in (0, 1).
    """
    if not 0 < utilisation < 1:
        raise ValueError(f"utilisation is {utilisation}; it must lie in (0, 1)")
    from dataclasses import replace

    def reached(rate: float) -> bool:
        there = replace(s, up=rate, down=None, stream_rate=None)
        return m.every * s.seconds / _round(there, m, 1.0)[0] >= utilisation

    low, high = 1.0, 1e18
    if not reached(high):
        return math.inf
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def bits_per_value(config: OuterConfig, s: Setting) -> float:
    """Bits on the wire per parameter that an exchange of these options takes, scales and tables included."""
    c = config.compress
    many = 2**24
    bits = 8 * codec(c.codec, c).wire_bytes(many) / many
    if c.projection == "cyclic_topk":
        return c.density * bits + c.density * 12 / 2  # indices go once, values both ways
    if c.projection == "low_rank":
        width = math.sqrt(s.parameters / (12 * s.layers))  # a layer has about 12 width^2 parameters
        return bits * min(1.0, 2 * c.rank / width)
    return bits + 32 if config.merge.rule == "pairs" else bits  # pairs send their anchors too


def method_of(name: str, config: OuterConfig, s: Setting) -> Method:
    """The outer step's options as this model sees them."""
    if config.engine == "syncer":  # a message to the syncer, the anchor back in float32
        return Method(name, config.every, config.fragments, config.tau, 32.0, route="pair")
    route: Route = "pair" if config.merge.rule == "pairs" else config.compress.route
    tau = config.every if config.overlap in ("one_step", "eager") else config.tau
    return Method(name, config.every, config.fragments, tau, bits_per_value(config, s), route=route)


DATA_PARALLEL = Method("data parallel, bf16", hidden=2 / 3, route="ring")
"""Gradients of every step in bfloat16, reduced in a ring during the backward."""

SCENARIOS: dict[str, Setting] = {
    # two laptops on a home network; a CPU step
    "laptops": Setting(1e7, 2, 1, layers=6, tokens_per_step=8e3, flops=1e11, up=1e8, rtt=0.002),
    # four flats with a GPU each; 20 Mbit/s up
    "homes": Setting(1.5e8, 4, 1, layers=12, tokens_per_step=1e5, flops=4e13, up=2e7, down=1e8, rtt=0.03),
    # eight sites with eight accelerators each
    "sites": Setting(1e9, 8, 8, mtbf_hours=5e4),
    # regions of a cloud
    "regions": Setting(1e10, 4, 512, layers=48, tokens_per_step=4e6, up=1e10, rtt=0.06, mtbf_hours=5e4, straggler=0.02),
    # 10^5 accelerators in 16 places; failures decide
    "planet": Setting(
        1e11, 16, 6250, layers=108, tokens_per_step=6e6, up=1e11, rtt=0.1, mtbf_hours=5e4, straggler=0.02, elastic=True
    ),
}
"""Named settings to start from."""
