"""Block diffusion from its definition, with loops: each block alone behind its clean past, one model run per block.

Shares no code with the product. A row is lists of tokens, positions and documents (None: padding), as in
`reference_model.py`. Also the law of block-clipped noise, by enumeration and quadrature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from reference import quadrature

Documents = Sequence[int | None]
Predict = Callable[[list[int], list[int], list[int | None]], np.ndarray]
"""Tokens, positions and documents of a row to log-probabilities [row, token], float64."""


def blocks(positions: Sequence[int], documents: Documents, block_size: int) -> list[list[int]]:
    """The places of every block of a row, in reading order; blocks are counted from the start of each document."""
    found: dict[tuple[int, int], list[int]] = {}
    for place, (position, document) in enumerate(zip(positions, documents, strict=True)):
        if document is not None:
            found.setdefault((document, position // block_size), []).append(place)
    return list(found.values())


def past(block: list[int], positions: Sequence[int], documents: Documents, block_size: int) -> list[int]:
    """The places of the same document that lie in blocks before this one."""
    document, number = documents[block[0]], positions[block[0]] // block_size
    return [i for i, d in enumerate(documents) if d == document and positions[i] // block_size < number]


def block_nll(
    predict: Predict,
    tokens: Sequence[int],
    positions: Sequence[int],
    documents: Documents,
    masked: Sequence[bool],
    mask_token_id: int,
    block_size: int,
) -> dict[int, float]:
    """-log p of every masked token: its block as it is noised, behind the clean tokens of the blocks before."""
    out = {}
    for block in blocks(positions, documents, block_size):
        before = past(block, positions, documents, block_size)
        places = sorted(before + block)
        ids = [mask_token_id if i in block and masked[i] else tokens[i] for i in places]
        log_probs = predict(ids, [positions[i] for i in places], [documents[i] for i in places])
        for i in block:
            if masked[i]:
                out[i] = -float(log_probs[places.index(i), tokens[i]])
    return out


def linear_weight(t: float, maskable: int, masked: int) -> float:
    """1/t times the ratio of the process's probability to that of the process with a forced mask."""
    if masked == 0:
        return 0.0
    return 1.0 / t * (maskable * t / (maskable * t + 1.0 - t) if masked == 1 else 1.0)


def clipped_law(n: int, k: int, floor: float, eps: float = 0.0, t_max: float = 1.0) -> float:
    """Probability of one set of k of n masked tokens: u = max(t, floor), t uniform; a uniform one if none is masked."""

    def at(u: float) -> float:
        return u**k * (1.0 - u) ** (n - k) + ((1.0 - u) ** n / n if k == 1 else 0.0)

    low = min(max(floor, eps), t_max)
    inside = quadrature(at, low, t_max) if low < t_max else 0.0
    return ((low - eps) * at(max(floor, eps)) + inside) / (t_max - eps)


def nelbo_set_weight(n: int, k: int) -> float:
    """(k-1)! (n-k)! / n!: what the NELBO weighs the summed loss of one set of k of n masked tokens by."""
    return math.factorial(k - 1) * math.factorial(n - k) / math.factorial(n)
