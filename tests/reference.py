"""Independent float64 references of the diffusion maths: plain Python and numpy, slow, no code shared with the product.

Every quantity is written from its definition: expectations are sums over all mask configurations, integrals over time
are Gauss-Legendre quadratures, derivatives are not needed (the loss weight is integrated as a measure on alpha).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

MASK64 = (1 << 64) - 1
Alpha = Callable[[float], float]
Nll = Callable[[tuple[int, ...]], Mapping[int, float]]
"""Masked positions -> negative log-probability of the true token at each of them."""

ALPHAS: dict[str, Alpha] = {
    "linear": lambda t: 1.0 - t,
    "cosine": lambda t: 1.0 - math.cos(0.5 * math.pi * (1.0 - t)),
    "polynomial": lambda t: 1.0 - t**2,
}


def splitmix_hash(*counters: int) -> int:
    """The counter hash of `mdlm/rng.py` in unbounded integers, as an unsigned 64-bit number."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
        return x ^ (x >> 31)

    state = 0
    for counter in counters:
        inner = mix(((counter & MASK64) + 0x9E3779B97F4A7C15) & MASK64)
        state = mix(((state ^ inner) + 0x9E3779B97F4A7C15) & MASK64)
    return state


def configurations(positions: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every set of masked positions."""
    for size in range(len(positions) + 1):
        yield from itertools.combinations(positions, size)


def process_probability(masked: Sequence[int], n: int, p: float) -> float:
    """Of one mask configuration when each of n positions is masked with probability p."""
    return p ** len(masked) * (1.0 - p) ** (n - len(masked))


def forced_probability(masked: Sequence[int], n: int, p: float) -> float:
    """The same when an empty draw is replaced by one position chosen uniformly."""
    if not masked:
        return 0.0
    extra = (1.0 - p) ** n / n if len(masked) == 1 else 0.0
    return process_probability(masked, n, p) + extra


def masked_nll(nll: Nll, positions: Sequence[int], p: float) -> float:
    """E over mask configurations of the summed negative log-likelihood of the masked tokens."""
    return sum(
        process_probability(masked, len(positions), p) * sum(nll(masked).values())
        for masked in configurations(positions)
        if masked
    )


def order_averaged_nelbo(nll: Nll, positions: Sequence[int]) -> float:
    """The continuous-time NELBO in closed form, without time: sum over M of (|M|-1)! (n-|M|)! / n! * nll(M).

    It is the integral over the mask probability p of p^(k-1) (1-p)^(n-k), and holds for every schedule.
    """
    n = len(positions)
    return sum(
        math.factorial(len(masked) - 1)
        * math.factorial(n - len(masked))
        / math.factorial(n)
        * sum(nll(masked).values())
        for masked in configurations(positions)
        if masked
    )


def quadrature(f: Callable[[float], float], low: float, high: float, nodes: int = 40) -> float:
    """Gauss-Legendre integral of f over [low, high]."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    half = 0.5 * (high - low)
    return float(sum(half * wi * f(low + half * (xi + 1.0)) for xi, wi in zip(x, w, strict=True)))


def discrete_nelbo(nll: Nll, positions: Sequence[int], alpha: Alpha, steps: int) -> float:
    """NELBO of a reverse process with `steps` equal time steps: its expected KL terms, one by one."""
    total = 0.0
    for i in range(1, steps + 1):
        before, here = alpha((i - 1) / steps), alpha(i / steps)
        total += (before - here) / (1.0 - here) * masked_nll(nll, positions, 1.0 - here)
    return total


def table_conditional(
    table: Mapping[tuple[int, ...], float], tokens: Sequence[int | None], vocab: int
) -> list[list[float]]:
    """p(symbol at each position | the revealed tokens), from the table of whole sequences; None = masked.

    A list of NaN where the revealed tokens have probability zero together.
    """
    agreeing = {x: p for x, p in table.items() if all(t is None or t == xi for t, xi in zip(tokens, x, strict=True))}
    total = sum(agreeing.values())
    if total == 0.0:
        return [[math.nan] * vocab for _ in tokens]
    return [
        [sum(p for x, p in agreeing.items() if x[i] == symbol) / total for symbol in range(vocab)]
        for i in range(len(tokens))
    ]


def table_nll(table: Mapping[tuple[int, ...], float], x: tuple[int, ...], vocab: int) -> Nll:
    """The exact denoiser's negative log-probabilities of x's masked tokens."""

    def nll(masked: tuple[int, ...]) -> dict[int, float]:
        tokens = [None if i in masked else symbol for i, symbol in enumerate(x)]
        conditional = table_conditional(table, tokens, vocab)
        return {i: -math.log(conditional[i][x[i]]) for i in masked}

    return nll


def chain_table(initial: np.ndarray, transition: np.ndarray, length: int) -> dict[tuple[int, ...], float]:
    """All sequences of a Markov chain with their probabilities."""
    table = {}
    for x in itertools.product(range(len(initial)), repeat=length):
        p = float(initial[x[0]])
        for a, b in itertools.pairwise(x):
            p *= float(transition[a, b])
        table[x] = p
    return table


def copy_table(probs: np.ndarray, length: int) -> dict[tuple[int, ...], float]:
    """All sequences of a source whose second half repeats an independent first half."""
    half = length // 2
    table = {}
    for x in itertools.product(range(len(probs)), repeat=length):
        table[x] = math.prod(float(probs[s]) for s in x[:half]) if x[:half] == x[half:] else 0.0
    return table


def entropy(probabilities: Iterable[float]) -> float:
    """-sum p log p, nats."""
    return -sum(p * math.log(p) for p in probabilities if p > 0.0)


def allowed_log_softmax(logits: np.ndarray, mask_token_id: int, num_tokens: int) -> np.ndarray:
    """Log-probabilities [..., num_tokens] over the tokens that may be emitted, in float64."""
    x = logits[..., :num_tokens].astype(np.float64).copy()
    x[..., mask_token_id] = -np.inf
    top = x.max(axis=-1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(axis=-1, keepdims=True))
