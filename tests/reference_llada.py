"""LLaDA's greedy sampler (2502.09992, algorithms 4 and 5; appendix B.4) in plain Python, from the paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Model = Callable[[list[int]], list[list[float]]]
"""Tokens of one row to logits per position."""


def quotas(masks: int, steps: int) -> list[int]:
    """How many tokens each step commits: as even as can be, the remainder to the first steps."""
    return [masks // steps + (1 if step < masks % steps else 0) for step in range(steps)]


def softmax(logits: Sequence[float], banned: Sequence[int]) -> list[float]:
    """Probabilities without the banned ids."""
    allowed = [-math.inf if token in banned else x for token, x in enumerate(logits)]
    top = max(allowed)
    weights = [math.exp(x - top) for x in allowed]
    return [w / sum(weights) for w in weights]


def decode(
    model: Model,
    prompt: Sequence[int],
    length: int,
    block: int,
    steps: int,
    mask: int,
    *,
    guidance: float = 0.0,
    never: Sequence[int] = (),
    last: Sequence[int] = (),
) -> tuple[list[int], list[int], int]:
    """The row, the step of each written token, and the steps that commit something.

    `steps` is per block. `never`: ids with a logit of -inf (`logits_eos_inf`). `last`: positions that predict such an
    id have a confidence of -inf (`confidence_eos_eot_inf`), and wait until nothing else is left. `guidance`: logits
    l_u + (w + 1)(l_c - l_u), where u sees the prompt masked.
    """
    row = [*prompt, *[mask] * length]
    undecided = set(range(len(prompt), len(row)))
    when = [-1] * len(row)
    now = 0
    for start in range(len(prompt), len(row), block):
        stop = min(start + block, len(row))
        for quota in quotas(stop - start, steps):
            if quota == 0:
                continue
            logits = model(row)
            if guidance:
                blind = model([mask if i < len(prompt) else token for i, token in enumerate(row)])
                logits = [
                    [u + (guidance + 1) * (c - u) if token != mask else -math.inf for token, (c, u) in enumerate(pair)]
                    for pair in (list(zip(c_row, u_row)) for c_row, u_row in zip(logits, blind))
                ]
            best: dict[int, tuple[float, int]] = {}
            for i in sorted(undecided):
                if start <= i < stop:
                    p = softmax(logits[i], [mask, *never])
                    token = max(range(len(p)), key=lambda v: (p[v], -v))
                    best[i] = (-math.inf if token in last else p[token], token)
            order = sorted(best, key=lambda i: (-best[i][0], i))
            for i in order[:quota]:
                row[i], when[i] = best[i][1], now
                undecided.discard(i)
            now += 1
    return row, when, now
