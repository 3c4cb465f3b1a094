"""Independent references of WINO, Prophet and LoPA: plain Python over one row, written from the papers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reference_revise import Model, Row, best, blocks, passing


def wino(
    model: Model,
    tokens: Row,
    editable: Sequence[bool],
    mask: int,
    block_length: int | None,
    tau_wide: float,
    tau_narrow: float,
    max_edits: int,
) -> tuple[Row, int, int]:
    """WINO (2507.18578) with each decided token judged by masking it; the row, its evaluations, its forwards."""
    x = [mask if flag else token for token, flag in zip(tokens, editable)]
    decided = [not flag for flag in editable]
    edits = [0] * len(x)
    nfe = forwards = 0
    for block in blocks(editable, block_length):
        before = 0
        while open_ := [i for i in block if not decided[i]]:
            log_probs = model(x)
            written = [i for i in block if decided[i]]
            alone = {}
            for i in written:
                left_out = list(x)
                left_out[i] = mask
                alone[i] = model(left_out)[i][x[i]]
            nfe, forwards = nfe + 1 + len(written), forwards + 1
            cap = min(max(math.floor(0.7 * len(open_)), 5), 20)
            order = sorted(open_, key=lambda i: (-max(log_probs[i]), i))
            commit = [i for i in order[:cap] if max(log_probs[i]) > math.log(tau_wide)] or order[:1]
            fails = [i for i in written if alone[i] < math.log(tau_narrow) and edits[i] < max_edits]
            number = len(fails) if len(fails) < before else max(before - 1, 0)
            number = number if len(commit) > 1 else 0
            for i in commit:
                x[i], decided[i] = best(log_probs[i]), True
            for i in sorted(fails, key=lambda i: (alone[i], i))[:number]:
                x[i], decided[i] = mask, False
                edits[i] += 1
            before = len(commit)
    return x, nfe, forwards


def prophet(
    model: Model,
    tokens: Row,
    editable: Sequence[bool],
    mask: int,
    block_length: int | None,
    gaps: Sequence[float],
    region: tuple[int, int] | None,
) -> tuple[Row, int]:
    """One token at a time until the mean gap of the two best log-probabilities is large enough."""
    x = [mask if flag else token for token, flag in zip(tokens, editable)]
    decided = [not flag for flag in editable]
    nfe = 0
    first = list(editable).index(True) if any(editable) else 0
    inside = [region is None or region[0] <= i - first < region[1] for i in range(len(x))]
    for block in blocks(editable, block_length):
        while open_ := [i for i in block if not decided[i]]:
            log_probs = model(x)
            nfe += 1
            top = {i: sorted(log_probs[i], reverse=True)[:2] for i in open_}
            counted = [top[i][0] - top[i][1] for i in open_ if inside[i]]
            answered = all(decided[i] for i in range(len(x)) if inside[i])
            mean = sum(counted) / len(counted) if counted else math.inf if answered else -math.inf
            share = 3 * (len(block) - len(open_)) // len(block)
            all_at_once = mean >= gaps[share]
            for i in open_ if all_at_once else [max(open_, key=lambda i: (max(log_probs[i]), -i))]:
                x[i], decided[i] = best(log_probs[i]), True
    return x, nfe


def lopa(
    model: Model,
    tokens: Row,
    editable: Sequence[bool],
    mask: int,
    block_length: int | None,
    branches: int,
    tau: float,
) -> tuple[Row, int, int]:
    """LoPA (2512.16229) over threshold decoding: the row, its evaluations, its forwards."""
    x = [mask if flag else token for token, flag in zip(tokens, editable)]
    nfe = forwards = 0
    for block in blocks(editable, block_length):
        open_, log_probs = list(block), None
        while open_:
            if log_probs is None:
                log_probs = model(x)
                nfe, forwards = nfe + 1, forwards + 1
            anchor = passing(log_probs, open_, tau)
            for i in anchor:
                x[i] = best(log_probs[i])
            open_ = [i for i in open_ if i not in anchor]
            further = sorted(open_, key=lambda i: (-max(log_probs[i]), i))[:branches] if len(open_) > 1 else []
            tried = []
            for extra in [None, *further]:
                y = list(x)
                if extra is not None:
                    y[extra] = best(log_probs[extra])
                left = [i for i in open_ if i != extra]
                if left and branches:
                    then = model(y)
                    tried.append((sum(math.exp(max(then[i])) for i in left) / len(left), y, left, then))
            nfe, forwards = nfe + len(tried), forwards + (len(tried) > 0)
            log_probs = None
            if tried:
                _, x, open_, log_probs = max(tried, key=lambda t: t[0])
    return x, nfe, forwards
