"""Independent references of the samplers that revise: plain Python over one row, float64, written from the papers.

`model(tokens)` gives log-probabilities, one list per position. Nothing here comes from `mdlm.samplers`.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

Row = list[int]
Model = Callable[[Row], list[list[float]]]


def best(log_probs: Sequence[float]) -> int:
    """The most probable token, the lowest id of equal ones."""
    return max(range(len(log_probs)), key=lambda v: (log_probs[v], -v))


def blocks(editable: Sequence[bool], length: int | None) -> list[list[int]]:
    """Editable positions block by block, counted from the first editable one."""
    where = [i for i, flag in enumerate(editable) if flag]
    if not where or length is None:
        return [where] if where else []
    grouped: dict[int, list[int]] = defaultdict(list)
    for i in where:
        grouped[(i - where[0]) // length].append(i)
    return [grouped[b] for b in sorted(grouped)]


def passing(log_probs: list[list[float]], open_: list[int], tau: float) -> list[int]:
    """Open positions whose best probability reaches tau; the best (leftmost) one if there is none."""
    found = [i for i in open_ if max(log_probs[i]) >= (math.log(tau) if tau > 0 else -math.inf)]
    return found or ([max(open_, key=lambda i: (max(log_probs[i]), -i))] if open_ else [])


def llada21(
    model: Model,
    tokens: Row,
    editable: Sequence[bool],
    mask: int,
    block_length: int | None,
    tau_mask: float,
    tau_edit: float,
    post_steps: int,
    max_edits: int,
) -> tuple[Row, int]:
    """LLaDA2.1 (2602.08676): masks above tau_mask and wrong tokens above tau_edit change together; then post-steps."""
    x = [mask if flag else token for token, flag in zip(tokens, editable)]
    decided = [not flag for flag in editable]
    edits = [0] * len(x)
    nfe = 0
    for block in blocks(editable, block_length):
        post = 0
        while True:
            open_ = [i for i in block if not decided[i]]
            if not open_:
                post += 1
                if post > post_steps or tau_edit >= 1:
                    break
            log_probs = model(x)
            nfe += 1
            change = {i: best(log_probs[i]) for i in passing(log_probs, open_, tau_mask)}
            edited = False
            for i in block:
                v = best(log_probs[i])
                sure = tau_edit == 0 or log_probs[i][v] > math.log(tau_edit)
                if decided[i] and v != x[i] and sure and edits[i] < max_edits and tau_edit < 1:
                    change[i], edited = v, True
                    edits[i] += 1
            for i, v in change.items():
                x[i], decided[i] = v, True
            if not open_ and not edited:
                break
    return x, nfe


def token_to_mask(
    model: Model,
    tokens: Row,
    editable: Sequence[bool],
    mask: int,
    block_length: int | None,
    tau_mask: float,
    doubtful: Callable[[list[float], int], bool],
    max_edits: int,
) -> tuple[Row, int]:
    """Commit above tau_mask, and mask doubtful tokens of the block that the forward has seen."""
    x = [mask if flag else token for token, flag in zip(tokens, editable)]
    decided = [not flag for flag in editable]
    edits = [0] * len(x)
    nfe = 0
    for block in blocks(editable, block_length):
        while open_ := [i for i in block if not decided[i]]:
            log_probs = model(x)
            nfe += 1
            again = [i for i in block if decided[i] and edits[i] < max_edits and doubtful(log_probs[i], x[i])]
            for i in passing(log_probs, open_, tau_mask):
                x[i], decided[i] = best(log_probs[i]), True
            for i in again:
                x[i], decided[i] = mask, False
                edits[i] += 1
    return x, nfe


def path_planning(
    model: Model, tokens: Row, editable: Sequence[bool], mask: int, steps: int, eta: float
) -> tuple[Row, list[int], int]:
    """P2 with greedy draws: the row, the number decided after each step, how often a token was masked again."""
    x = [mask if flag else token for token, flag in zip(tokens, editable)]
    where = [i for i, flag in enumerate(editable) if flag]
    decided = {i: False for i in where}
    counts, again = [], 0
    for step in range(steps):
        log_probs = model(x)
        score = {i: eta * log_probs[i][x[i]] if decided[i] else max(log_probs[i]) for i in where}
        keep = sorted(where, key=lambda i: (-score[i], i))[: (step + 1) * len(where) // steps]
        for i in where:
            if i in keep and not decided[i]:
                x[i], decided[i] = best(log_probs[i]), True
            elif i not in keep and decided[i]:
                x[i], decided[i] = mask, False
                again += 1
        counts.append(sum(decided.values()))
    return x, counts, again


Joint = dict[tuple[int, ...], float]
Partial = tuple[tuple[int, float] | None, ...]
"""Of each position the token and its probability when it was written, None while masked."""


def marginal(joint: Joint, known: Partial, position: int, vocab: int) -> list[float]:
    """p(token at a position | what is known), by summing the table."""
    mass = [0.0] * vocab
    for sequence, p in joint.items():
        if all(k is None or k[0] == v for k, v in zip(known, sequence)):
            mass[sequence[position]] += p
    total = sum(mass)
    return [m / total for m in mass]


def remdm_law(joint: Joint, vocab: int, times: Sequence[float], sigma: Callable[[float, float, Partial], list[float]]):
    """The exact law of ReMDM along the mask rates `times` (1 ... 0), and the mean mask rate after each step.

    `sigma(t, s, state)` of each position. Reveal and remask of one step look at the state before it, all positions are
    independent given it.
    """
    length = len(next(iter(joint)))
    law: dict[Partial, float] = {(None,) * length: 1.0}
    rates = []
    for t, s in itertools.pairwise(times):
        after: dict[Partial, float] = defaultdict(float)
        for state, weight in law.items():
            options: list[list[tuple[tuple[int, float] | None, float]]] = []
            for i, (known, again) in enumerate(zip(state, sigma(t, s, state))):
                if known is not None:
                    options.append([(known, 1 - again), (None, again)])
                    continue
                reveal = ((1 - s) - (1 - again) * (1 - t)) / t
                p = marginal(joint, state, i, vocab)
                options.append([(None, 1 - reveal)] + [((v, p[v]), reveal * p[v]) for v in range(vocab)])
            for outcome in itertools.product(*options):
                chance = math.prod(p for _, p in outcome)
                if chance > 0:
                    after[tuple(what for what, _ in outcome)] += weight * chance
        law = after
        rates.append(sum(w * sum(k is None for k in state) for state, w in law.items()) / length)
    final: Joint = defaultdict(float)
    for state, weight in law.items():
        assert all(k is not None for k in state) or weight < 1e-12
        final[tuple(-1 if k is None else k[0] for k in state)] += weight
    return final, rates
