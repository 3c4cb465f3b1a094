"""Float64 oracle of the outer step, written from the formulas and sharing no code with `mdlm.training`.

All islands at once, flat numpy vectors, one loop over steps. Notation: theta local values, a anchor, d = a - theta.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Vector = Any
Code = Callable[[Vector], Vector]


def exact(x: Vector) -> Vector:
    return x.copy()


def int_code(x: Vector, bits: int, block: int = 128) -> Vector:
    """Symmetric uniform levels per block: x -> scale round(x top / scale) / top."""
    top = 2 ** (bits - 1) - 1
    out = np.zeros_like(x)
    for k in range(0, len(x), block):
        part = x[k : k + block]
        scale = np.max(np.abs(part))
        if scale > 0:
            out[k : k + block] = np.round(part / scale * top) / top * scale
    return out


def e3m0_code(x: Vector, block: int = 128) -> Vector:
    """Nearest of scale * {0, +-2^-6, ..., +-1}, by trying all."""
    levels = np.array([0.0] + [2.0**-k for k in range(7)])
    out = np.zeros_like(x)
    for k in range(0, len(x), block):
        part = x[k : k + block]
        scale = np.max(np.abs(part))
        if scale > 0:
            nearest = np.abs(np.abs(part)[:, None] / scale - levels).argmin(1)
            out[k : k + block] = np.sign(part) * levels[nearest] * scale
    return out


def codebook_code(x: Vector, bits: int) -> Vector:
    """Equal bins over mean +- 6 sigma, each value replaced by the mean of its bin. One block."""
    if len(x) == 0:
        return x.copy()
    sigma = x.std()
    width = 12 * sigma / 2**bits if sigma > 0 else 1.0
    bins = np.clip(np.floor((x - x.mean()) / width), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    out = np.zeros_like(x)
    for b in np.unique(bins):
        out[bins == b] = x[bins == b].mean()
    return out


def topk_code(x: Vector, density: float, inner: Code) -> Vector:
    """The largest magnitudes of one block."""
    keep = np.sort(np.argsort(-np.abs(x))[: max(1, math.ceil(density * len(x)))])
    out = np.zeros_like(x)
    out[keep] = inner(x[keep])
    return out


class Outer:
    """One outer optimizer's state."""

    def __init__(self, kind: str, lr: float, mu: float, beta2: float = 0.0, eps: float = 0.0) -> None:
        self.kind, self.lr, self.mu, self.beta2, self.eps = kind, lr, mu, beta2, eps
        self.m: Vector | float = 0.0
        self.v: Vector | float = 0.0
        self.count = 0

    def step(self, a: Vector, g: Vector) -> Vector:
        self.count += 1
        if self.kind == "sgd":
            return a - self.lr * g
        if self.kind == "adam":
            self.m = self.mu * self.m + (1 - self.mu) * g
            self.v = self.beta2 * self.v + (1 - self.beta2) * g * g
            mean = self.m / (1 - self.mu**self.count)
            square = self.v / (1 - self.beta2**self.count)
            return a - self.lr * mean / (np.sqrt(square) + self.eps)
        self.m = self.mu * self.m + g
        if self.kind == "heavy_ball":
            return a - self.lr * self.m
        assert self.kind == "nesterov"
        return a - self.lr * (g + self.mu * self.m)


@dataclass
class Setup:
    """One algorithm. `fragments`: (positions, first start); `merge(island, round, sent, anchors)` -> direction."""

    islands: int
    every: int
    fragments: Sequence[tuple[Vector, int]]
    outer: Callable[[], Outer]
    tau: int = 0
    alpha: float = 0.0
    overlap: str = "none"
    code: Code = exact
    pull_code: Code | None = None
    decay: float | None = None
    merge: Callable[[int, int, list[Vector], list[Vector]], Vector] | None = None


@dataclass
class _State:
    a: list[Vector]
    e: list[Vector]
    pull: Vector
    outer: list[Outer]
    flights: list[tuple[int, list[Vector], list[Vector]]] = field(default_factory=list)
    rounds: int = 0


def run(setup: Setup, start: Vector, inner: Callable[[int, int, Vector], Vector], steps: int) -> tuple[Vector, Vector]:
    """Local values and anchors of all islands after `steps`: two arrays [islands, values]."""
    s, k = setup, setup.islands
    theta = [start.astype(np.float64).copy() for _ in range(k)]
    states = []
    for where, _ in s.fragments:
        zero = np.zeros(len(where))
        states.append(
            _State(
                [start[where].copy() for _ in range(k)],
                [zero.copy() for _ in range(k)],
                zero.copy(),
                [s.outer() for _ in range(k)],
            )
        )
    delay = s.every if s.overlap in ("one_step", "eager") else s.tau
    for n in range(1, steps + 1):
        theta = [inner(i, n, theta[i]) for i in range(k)]
        for (where, first), state in zip(s.fragments, states):
            starts = n >= first and (n - first) % s.every == 0
            if starts:
                d = [state.a[i] - theta[i][where] for i in range(k)]
                u = [d[i] + state.e[i] for i in range(k)]
                sent = [s.code(x) for x in u]
                if s.decay is not None:
                    state.e = [s.decay * (u[i] - sent[i]) for i in range(k)]
                if s.merge is None:
                    average = sum(sent) / k
                    if s.pull_code is not None:
                        meant = average + state.pull
                        average = s.pull_code(meant)
                        if s.decay is not None:
                            state.pull = s.decay * (meant - average)
                    merged = [average] * k
                else:
                    merged = [s.merge(i, state.rounds, sent, state.a) for i in range(k)]
                state.flights.append((n, d, merged))
                state.rounds += 1
            due = state.flights[0] if state.flights and state.flights[0][0] == n - delay else None
            returns = s.overlap in ("one_step", "eager")  # local values return to the anchor at every start
            if (returns and not starts) or (not returns and due is None):
                continue
            for i in range(k):
                direction = None if due is None else due[2][i]
                if s.overlap == "eager":
                    fresh = state.flights[-1][1][i] / k
                    direction = fresh if due is None else due[2][i] + (state.flights[-1][1][i] - due[1][i]) / k
                if direction is not None:
                    state.a[i] = state.outer[i].step(state.a[i], direction)
                theta[i] = theta[i].copy()
                theta[i][where] = s.alpha * theta[i][where] + (1 - s.alpha) * state.a[i]
            if due is not None:
                state.flights.pop(0)
    anchors = np.zeros((k, len(start)))
    for (where, _), state in zip(s.fragments, states):
        for i in range(k):
            anchors[i, where] = state.a[i]
    return np.stack(theta), anchors


def radial_mean(vectors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """(sum w |v| / sum w) * unit(sum w unit(v)), unit(0) = 0; the weighted mean where directions cancel."""
    total = sum(weights)
    lengths = [float(np.sqrt((v * v).sum())) for v in vectors]
    direction = sum(w * (v / n if n > 0 else 0 * v) for w, v, n in zip(weights, vectors, lengths))
    size = float(np.sqrt((direction * direction).sum()))
    if size < 1e-6 * total:
        return sum(w * v for w, v in zip(weights, vectors)) / total
    return sum(w * n for w, n in zip(weights, lengths)) / total * direction / size


def quadratic_anchor(a: float, rate: float, every: int, lr: float, mu: float, rounds: int) -> float:
    """Anchor after `rounds` of Nesterov DiLoCo on rate/eta * x^2 / 2, `rate` = inner learning rate times curvature.

    d = kappa a with kappa = 1 - (1 - rate)^every, so (a, m) obey a linear recurrence: its matrix power.
    """
    kappa = 1 - (1 - rate) ** every
    matrix = np.array([[1 - lr * (1 + mu) * kappa, -lr * mu * mu], [kappa, mu]])
    return float((np.linalg.matrix_power(matrix, rounds) @ np.array([a, 0.0]))[0])
