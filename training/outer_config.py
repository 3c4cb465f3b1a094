"""The options of the low-communication outer step, and the published methods as presets of them.

`PRESETS` is the table of methods: each is nothing but a setting of these options. Read next: `outer.py` (the step),
`merge.py`, `compress.py`, `exchange.py` (what the options select).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

import torch


def _require(condition: bool, flag: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"--outer.{flag} is {value!r}; it must be {allowed}")


@dataclass(frozen=True)
class MergeConfig:
    """How the islands' pseudo-gradients become one."""

    rule: Literal["mean", "radial", "edit", "pairs"] = "mean"
    """mean; radial: radial-directional averaging (Decoupled DiLoCo); edit: EDiT's penalty; pairs: NoLoCo's pairs."""
    weights: Literal["uniform", "tokens", "tokens2_per_step"] = "uniform"
    """An island's weight: 1, its tokens since its last exchange, or tokens^2 / steps. Count *masked* tokens."""
    max_norm_ratio: float | None = None
    """Leave out an island whose pseudo-gradient is longer than this multiple of the islands' median; null: never."""
    min_cosine: float | None = None
    """Leave out an island whose cosine to the sum of the others is below this, in [-1, 1]; needs 3 islands."""
    z_threshold: float = 3.0
    """edit: an island whose norm lies more than this many standard deviations above its average is left out."""
    z_decay: float = 0.02
    """edit: weight of the newest norm in the moving average and variance, in (0, 1]."""
    z_warmup: int = 120
    """edit: exchanges in which statistics are gathered and nobody is left out."""
    clip: float | None = None
    """Longest allowed merged pseudo-gradient, per parameter tensor; null: no clipping."""
    pull: float = 0.6
    """pairs: strength of the pull of an island's anchor towards its pair's mean (NoLoCo's gamma)."""
    pair_seed: int = 0
    """pairs: seed of the pairing."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the flag."""
        ratio, cosine, clip = self.max_norm_ratio, self.min_cosine, self.clip
        _require(ratio is None or ratio > 1, "merge.max_norm_ratio", ratio, "above 1, or null")
        _require(cosine is None or -1 <= cosine <= 1, "merge.min_cosine", cosine, "in [-1, 1], or null")
        _require(self.z_threshold > 0, "merge.z_threshold", self.z_threshold, "positive")
        _require(0 < self.z_decay <= 1, "merge.z_decay", self.z_decay, "in (0, 1]")
        _require(self.z_warmup >= 1, "merge.z_warmup", self.z_warmup, "1 or more")
        _require(clip is None or clip > 0, "merge.clip", clip, "positive, or null")
        _require(self.pull > 0, "merge.pull", self.pull, "positive")
        if self.rule == "pairs" and (ratio, cosine, clip, self.weights) != (None, None, None, "uniform"):
            raise ValueError("--outer.merge.rule pairs takes no norm, cosine or clip bound and no weights: pairs only")


@dataclass(frozen=True)
class CompressConfig:
    """What goes over the wire in place of float32 values."""

    codec: Literal["fp32", "fp16", "bf16", "int8", "int4", "fp4", "codebook", "topk"] = "fp32"
    """How values are written. fp4 is E3M0; codebook has 2^bits levels at bin means; topk keeps the largest."""
    bits: int = 4
    """Bits of the code book, in [2, 8]."""
    density: float = 0.015625
    """topk and cyclic_topk: share of the values that is kept, in (0, 1]."""
    values: Literal["fp32", "fp16", "bf16", "int8", "int4", "fp4", "codebook"] = "codebook"
    """topk: how the kept values are written."""
    projection: Literal["none", "low_rank", "cyclic_topk"] = "none"
    """Reduction to fewer values that all islands agree on, before the codec: factors of matrices, or shared indices."""
    rank: int = 32
    """low_rank: rank of the factors (with `adaptive`, the largest rank)."""
    adaptive: bool = False
    """low_rank: let the rank follow the effective rank of the merged pseudo-gradient, averaged over `window` rounds."""
    window: int = 5
    """low_rank: rounds over which the effective rank is averaged."""
    route: Literal["scatter", "gather"] = "scatter"
    """scatter: all-to-all, reduce, all-gather (each value coded twice); gather: everybody's code to everybody."""
    feedback: Literal["none", "classic", "loco"] = "none"
    """Error feedback: the part that was not sent is added to the next message; loco keeps its moving average."""
    decay: float = 1.0
    """classic: factor on the residual, in (0, 1]; loco: weight of the old residual, in [0, 1)."""
    reset_every: int = 0
    """loco: exchanges of a buffer after which its residual is dropped; 0: never."""
    store: Literal["fp32", "bf16", "int8"] = "fp32"
    """How residuals are kept in memory."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the flag."""
        _require(2 <= self.bits <= 8, "compress.bits", self.bits, "in [2, 8]")
        _require(0 < self.density <= 1, "compress.density", self.density, "in (0, 1]")
        _require(self.rank >= 1, "compress.rank", self.rank, "1 or more")
        _require(self.window >= 1, "compress.window", self.window, "1 or more")
        _require(self.reset_every >= 0, "compress.reset_every", self.reset_every, "0 or more")
        inside = 0 <= self.decay < 1 if self.feedback == "loco" else 0 < self.decay <= 1
        _require(inside, "compress.decay", self.decay, "in (0, 1] (with feedback loco: in [0, 1))")
        if self.codec == "topk" and self.route == "scatter":
            raise ValueError(
                "--outer.compress.codec topk needs --outer.compress.route gather: the mean of sparse messages is not "
                "sparse, and a second top-k would drop most of it"
            )
        if self.projection != "none" and (self.codec == "topk" or self.route == "gather"):
            raise ValueError(
                f"--outer.compress.projection {self.projection} shares its indices or factors, so it needs route "
                "scatter and a codec other than topk"
            )


@dataclass(frozen=True)
class SyncerConfig:
    """Islands that do not wait for each other, but for a process that holds the anchors (`syncer.py`)."""

    quorum: int = 1
    """Islands without which a fragment is not merged (islands that are gone do not count)."""
    grace: float | None = None
    """Seconds that further islands are then waited for; null: as long as those that are there can go on training."""
    relay: int = 0
    """A syncer below another: pushes of a fragment after which it reports to that one; 0: it never does."""
    mix: float = 0.25
    """A syncer below another: weight of the answer in its new anchor, in (0, 1]."""
    upper_lr: float = 0.3
    """The upper syncer's learning rate; momentum and buffer are those of its optimizer, which is of the same kind."""
    upper_momentum: float = 0.5
    """The upper syncer's momentum."""
    upper_buffer: int = 2
    """The upper syncer's buffer (delayed_nesterov)."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the flag."""
        _require(self.quorum >= 1, "syncer.quorum", self.quorum, "1 or more")
        _require(self.grace is None or self.grace >= 0, "syncer.grace", self.grace, "0 or more, or null")
        _require(self.relay >= 0, "syncer.relay", self.relay, "0 or more")
        _require(0 < self.mix <= 1, "syncer.mix", self.mix, "in (0, 1]")
        _require(self.upper_lr > 0, "syncer.upper_lr", self.upper_lr, "positive")
        _require(0 <= self.upper_momentum < 1, "syncer.upper_momentum", self.upper_momentum, "in [0, 1)")
        _require(self.upper_buffer >= 1, "syncer.upper_buffer", self.upper_buffer, "1 or more")


@dataclass(frozen=True)
class OuterConfig:
    """The outer step between islands. The pseudo-gradient is anchor - local everywhere: a descent direction."""

    preset: Literal[
        "none",
        "custom",
        "local_sgd",
        "diloco",
        "streaming",
        "eager",
        "diloco_x",
        "muloco",
        "noloco",
        "sparse_loco",
        "edit",
        "decoupled",
        "halos",
        "powersgd",
        "loco",
        "gpa",
    ] = "none"
    """The published method whose values the options below take where they are not given; custom: the defaults shown
    here; none: no outer step."""
    engine: Literal["islands", "torchft", "syncer", "gradients", "primal"] = "islands"
    """islands: all exchange with each other; torchft: the same, but an island may be lost and come back (extra `ft`;
    `rendezvous` is a `torchft_lighthouse`); syncer: each with a process of its own kind (`python -m
    mdlm.training.server`, whose address is `rendezvous`), and none waits for another; gradients: one island, whose
    processes exchange compressed gradients in every step; primal: one island, primal averaging instead of rounds."""
    islands: int = 1
    """Groups of processes that train apart. With several in one launch they are equal parts of its processes, in
    order of rank; 1 without a rendezvous: the outer step of one island (SNOO, Lookahead)."""
    rendezvous: str | None = None
    """host:port where the islands meet if each has a launch of its own; island 0 listens there, or the syncer."""
    island: int | None = None
    """With a rendezvous: the number of this launch's island, from 0."""
    timeout: float | None = None
    """Seconds an island is waited for; null: five times the longest round so far, 300 at least (1800 in the first)."""
    new_islands: bool = False
    """On a resume from another number of islands: all go on from the anchors of island 0's checkpoint."""
    every: int = 100
    """Optimizer steps between two exchanges of the same parameter (H)."""
    start_step: int = 0
    """Length of the dense phase, in which all islands share every step; early training needs frequent exchange."""
    optimizer: Literal["sgd", "nesterov", "heavy_ball", "adam", "delayed_nesterov"] = "nesterov"
    """Outer optimizer. nesterov is torch's look-ahead form: m = mu m + d; anchor -= lr (d + mu m)."""
    lr: float = 0.7
    """Outer learning rate."""
    momentum: float = 0.9
    """Outer momentum (adam: beta1); unused by sgd."""
    beta2: float = 0.99
    """adam: decay of the second moment."""
    eps: float = 0.1
    """adam: added to the root of the second moment; DiLoCo found 0.1 necessary."""
    buffer: int = 1
    """delayed_nesterov: momentum is renewed every this many rounds (N)."""
    spread: float = 0.0
    """delayed_nesterov: share c of the momentum applied in the rounds between, in [0, 1 / buffer]."""
    fragments: int = 1
    """Number of fragments (P), whose exchanges are staggered evenly over the round."""
    pattern: Literal["strided", "balanced"] = "strided"
    """Fragments strided over layers (embeddings and head apart), or balanced by size."""
    overlap: Literal["none", "streaming", "one_step", "eager"] = "none"
    """streaming: land tau steps later; one_step: one round later; eager: one round later, own part at once."""
    tau: int = 0
    """streaming: steps between the start of an exchange and the use of its result."""
    alpha: float = 0.0
    """streaming: weight kept on the *local* value when a result lands, in [0, 1); 0 overwrites it."""
    interpolation: float = 0.7
    """primal: weight of the average where gradients are taken (GPA's mu_y), in (0, 1]; it keeps momentum^(1 / every)
    of its past in every step (mu_x)."""
    offload: bool = False
    """Keep anchors and outer optimizer state in CPU memory (pinned where there is a CUDA device)."""
    merge: MergeConfig = field(default_factory=MergeConfig)
    """How the islands' pseudo-gradients become one."""
    compress: CompressConfig = field(default_factory=CompressConfig)
    """What goes over the wire."""
    syncer: SyncerConfig = field(default_factory=SyncerConfig)
    """When the syncer merges."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the flag. Model-dependent bounds are checked where the model is known."""
        self._check_launch()
        self._check_engine()
        _require(self.every >= 1, "every", self.every, "1 or more")
        _require(self.start_step >= 0, "start_step", self.start_step, "0 or more")
        _require(self.lr > 0, "lr", self.lr, "positive")
        _require(0 <= self.momentum < 1, "momentum", self.momentum, "in [0, 1)")
        _require(0 <= self.beta2 < 1, "beta2", self.beta2, "in [0, 1)")
        _require(self.eps > 0, "eps", self.eps, "positive")
        _require(self.buffer >= 1, "buffer", self.buffer, "1 or more")
        _require(0 <= self.spread <= 1 / self.buffer, "spread", self.spread, f"in [0, 1 / buffer = {1 / self.buffer}]")
        _require(1 <= self.fragments <= self.every, "fragments", self.fragments, f"in [1, every = {self.every}]")
        _require(0 <= self.tau < self.every, "tau", self.tau, f"in [0, every = {self.every})")
        _require(0 <= self.alpha < 1, "alpha", self.alpha, "in [0, 1)")
        if self.overlap != "streaming" and (self.tau or self.alpha):
            raise ValueError(
                f"--outer.tau ({self.tau}) and --outer.alpha ({self.alpha}) belong to --outer.overlap streaming; "
                f"with {self.overlap!r} both must be 0"
            )
        if self.overlap == "eager" and (self.merge.rule, self.merge.weights) != ("mean", "uniform"):
            raise ValueError(
                "--outer.overlap eager needs merge.rule mean and merge.weights uniform: its own share is 1/K"
            )
        if self.merge.rule == "pairs":
            if self.optimizer not in ("sgd", "heavy_ball") or self.overlap != "none":
                raise ValueError("--outer.merge.rule pairs needs --outer.optimizer heavy_ball (or sgd) and no overlap")
            if self.compress.projection != "none":
                raise ValueError("--outer.merge.rule pairs takes no projection: islands share no factors")
            growth = pair_growth(self.momentum if self.optimizer == "heavy_ball" else 0.0, self.merge.pull)
            _require(
                growth < 1, "merge.pull", self.merge.pull, f"smaller: anchors drift apart ({growth:.2f} per round)"
            )
        m = self.merge
        if (
            self.compress.projection != "none"
            and (m.rule, m.clip, m.max_norm_ratio, m.min_cosine) != ("mean",) + (None,) * 3
        ):
            raise ValueError(
                f"--outer.compress.projection {self.compress.projection} needs --outer.merge.rule mean without clip, "
                "norm or cosine bounds: it averages coordinates, not pseudo-gradients"
            )

    def _check_launch(self) -> None:
        _require(self.islands >= 1, "islands", self.islands, "1 or more")
        _require(self.timeout is None or self.timeout > 0, "timeout", self.timeout, "positive, or null")
        if (self.rendezvous is None) != (self.island is None):
            raise ValueError(
                f"--outer.rendezvous ({self.rendezvous}) and --outer.island ({self.island}) belong together: give both "
                "for a launch per island, none for one launch of all islands"
            )
        if self.rendezvous is not None and self.island is not None:
            well_formed = re.fullmatch(r"[^:\s]+:\d+", self.rendezvous) is not None
            _require(well_formed, "rendezvous", self.rendezvous, "host:port")
            _require(0 <= self.island < self.islands, "island", self.island, f"in [0, islands = {self.islands})")

    def _check_engine(self) -> None:
        _require(0 < self.interpolation <= 1, "interpolation", self.interpolation, "in (0, 1]")
        engine, usual = (
            self.engine,
            {f.name: f.default for f in fields(self) if not is_dataclass(getattr(self, f.name))},
        )
        if engine != "syncer" and self.syncer != SyncerConfig():
            raise ValueError(f"--outer.syncer options have no effect with --outer.engine {engine}; it must be syncer")
        free = {"preset", "engine", "timeout", "start_step", "every"}
        if engine == "primal":
            free |= {"momentum", "interpolation"}
            _require(self.start_step == 0, "start_step", self.start_step, "0 with --outer.engine primal")
            _require(self.compress == CompressConfig(), "compress", self.compress, "left alone with engine primal")
        if engine in ("gradients", "primal"):
            _require(self.merge == MergeConfig(), "merge", self.merge, f"left alone with --outer.engine {engine}")
            for name in sorted(usual.keys() - free):
                _require(
                    getattr(self, name) == usual[name], name, getattr(self, name), f"left alone with engine {engine}"
                )
        elif self.interpolation != usual["interpolation"]:
            raise ValueError("--outer.interpolation has no effect without --outer.engine primal")
        if engine == "gradients":
            _require(self.every == 1, "every", self.every, "1 with --outer.engine gradients: they travel in every step")
        if engine in ("syncer", "torchft"):
            if self.rendezvous is None and self.preset != "none" and self.islands > 1:
                server = "python -m mdlm.training.server" if engine == "syncer" else "torchft_lighthouse"
                raise ValueError(
                    f"--outer.engine {engine} needs --outer.rendezvous host:port (of a {server}) and --outer.island"
                )
            rules, overlaps = {"mean", "radial"}, {"none", "streaming"}
            if engine == "torchft":
                rules, overlaps = {"mean", "radial", "edit"}, {"none"}
            else:
                projection = self.compress.projection
                _require(projection == "none", "compress.projection", projection, "none with engine syncer")
            _require(self.start_step == 0, "start_step", self.start_step, f"0 with engine {engine}: no step is shared")
            for name, value, allowed in (("overlap", self.overlap, overlaps), ("merge.rule", self.merge.rule, rules)):
                _require(value in allowed, name, value, f"{' or '.join(sorted(allowed))} with engine {engine}")
            _require(not self.new_islands, "new_islands", True, f"left alone with engine {engine}: islands come and go")

    @property
    def landing(self) -> int:
        """Steps between the start of an exchange and its landing: 0, tau, or a whole round."""
        return self.every if self.overlap in ("one_step", "eager") else self.tau


def pair_growth(momentum: float, pull: float) -> float:
    """Growth per round of the mean squared distance between NoLoCo's anchors, without gradients; below 1: they agree.

    With x an anchor's distance from the mean, m its momentum and j its partner, m' = mu m + g (x - x_j) / 2 and
    x' = x - m'. Partners being independent, the second moments (E x^2, E x m, E m^2) obey a linear recurrence, whose
    spectral radius this is. At momentum 0 it is 1 - g + g^2 / 2.
    """
    momentum_square = torch.tensor([pull * pull / 2, momentum * pull, momentum * momentum], dtype=torch.float64)
    cross = torch.tensor([pull / 2, momentum, 0.0], dtype=torch.float64)
    square = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64) - 2 * cross + momentum_square
    moments = torch.stack([square, cross - momentum_square, momentum_square])
    return float(torch.linalg.eigvals(moments).abs().max())


_METHODS: dict[str, OuterConfig] = {
    # Post-local SGD, 1808.07217: plain averaging; set start_step to the first decay of the learning rate
    "local_sgd": OuterConfig(every=16, optimizer="sgd", lr=1.0),
    # DiLoCo, 2311.08105
    "diloco": OuterConfig(every=500),
    # Streaming DiLoCo, 2501.18512
    "streaming": OuterConfig(
        every=100,
        lr=0.4,
        fragments=8,
        overlap="streaming",
        tau=1,
        alpha=0.5,
        compress=CompressConfig(codec="fp4"),
    ),
    # Eager updates, 2502.12996
    "eager": OuterConfig(every=30, lr=0.4, overlap="eager"),
    # DiLoCoX, 2506.21263. Learning rate and momentum are ours: a whole round of delay is unstable at 0.7 and 0.9
    "diloco_x": OuterConfig(
        every=125,
        lr=0.4,
        momentum=0.6,
        overlap="one_step",
        compress=CompressConfig(codec="int4", projection="low_rank", rank=64, adaptive=True, feedback="classic"),
    ),
    # MuLoCo, 2505.23725: Muon is the inner optimizer (--optim.name muon)
    "muloco": OuterConfig(every=30, lr=0.7, momentum=0.6),
    # NoLoCo, 2506.10911: its code's learning rate and heavy ball; the pull is the one that agrees fastest
    "noloco": OuterConfig(every=100, optimizer="heavy_ball", lr=0.7, momentum=0.3, merge=MergeConfig(rule="pairs")),
    # SparseLoCo, 2508.15706: 64 of 4096 values at 2 bits; error feedback in place of outer momentum
    "sparse_loco": OuterConfig(
        every=30,
        optimizer="sgd",
        lr=1.0,
        compress=CompressConfig(codec="topk", bits=2, route="gather", feedback="classic", decay=0.95),
    ),
    # Decoupled DiLoCo, 2604.21428: values of the paper but for the number of fragments (24), which is the model's
    "decoupled": OuterConfig(
        engine="syncer",
        every=24,
        fragments=4,
        pattern="balanced",
        overlap="streaming",
        tau=2,
        merge=MergeConfig(rule="radial", weights="tokens2_per_step"),
    ),
    # HALoS, 2506.04531: its code's values; rates times the buffers, as delayed Nesterov divides by them
    "halos": OuterConfig(
        engine="syncer",
        every=8,
        optimizer="delayed_nesterov",
        lr=3.2,
        buffer=16,
        syncer=SyncerConfig(grace=0.0, relay=32),
    ),
    # PowerSGD, 1905.13727: rank 4; warm-up of ours
    "powersgd": OuterConfig(
        engine="gradients",
        every=1,
        start_step=10,
        compress=CompressConfig(projection="low_rank", rank=4, feedback="classic"),
    ),
    # LoCo, 2407.04480
    "loco": OuterConfig(
        engine="gradients",
        every=1,
        compress=CompressConfig(codec="int4", feedback="loco", decay=0.8, reset_every=1024, store="int8"),
    ),
    # GPA, 2512.17131
    "gpa": OuterConfig(engine="primal", every=32),
    # EDiT, 2412.07210
    "edit": OuterConfig(every=128, lr=0.7, momentum=0.8, merge=MergeConfig(rule="edit", clip=10.0)),
}

PRESETS = {name: replace(config, preset=name) for name, config in _METHODS.items()}  # type: ignore[arg-type]
"""Method -> options. Each is a starting point: tune the outer learning rate for the number of islands."""


def preset_values(name: str) -> dict[str, Any]:
    """What a preset changes, by dotted option name ("outer.compress.codec"): the parser's defaults under it."""
    values = dict(_differences(PRESETS[name], OuterConfig(), "outer.")) if name in PRESETS else {}
    values.pop("outer.preset", None)
    return values | ({"optim.name": "muon"} if name == "muloco" else {})


def _differences(config: Any, default: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for f in fields(config):
        own, usual = getattr(config, f.name), getattr(default, f.name)
        if is_dataclass(own):
            yield from _differences(own, usual, f"{prefix}{f.name}.")
        elif own != usual:
            yield prefix + f.name, own
