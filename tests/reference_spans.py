"""Span-level selection and windows from their papers' rules, in plain Python on lists, one row at a time.

Shares no code with the product. Positions are numbers, probabilities are lists, ties go to the left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

Matrix = Sequence[Sequence[float]]


def entropy(p: Sequence[float]) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


def runs(positions: Sequence[int], max_len: int | None = None, max_gap: int = 0) -> list[list[int]]:
    """Groups of ascending positions with at most `max_gap` others between neighbours, at most `max_len` each."""
    groups: list[list[int]] = []
    for position in positions:
        near = bool(groups) and position - groups[-1][-1] <= max_gap + 1
        if near and (max_len is None or len(groups[-1]) < max_len):
            groups[-1].append(position)
        else:
            groups.append([position])
    return groups


def clad_step(confidence: dict[int, float], attention: Matrix, threshold: float, block: int) -> list[int]:
    """Positions CLAD commits. `confidence` of the undecided positions of the block; `attention[i][j]` by position."""
    best = max(sorted(confidence), key=lambda i: confidence[i])
    chosen = [i for i in sorted(confidence) if confidence[i] >= threshold or i == best]
    clusters = runs(chosen)
    count = len(clusters)
    if count == 1:
        return chosen

    def tie(i: int, j: int) -> float:
        return 0.0 if i == j else max(attention[i][j], attention[j][i])

    def one_way(a: int, b: int) -> float:
        return max(sum(tie(i, j) for j in clusters[b]) / len(clusters[b]) for i in clusters[a])

    score = [[0.0 if a == b else max(one_way(a, b), one_way(b, a)) for b in range(count)] for a in range(count)]
    partner = [max((b for b in range(count) if b != a), key=lambda b: score[a][b]) for a in range(count)]
    mean = [sum(score[a]) / (count - 1) for a in range(count)]
    dropped = set()
    for a in range(count):
        b = partner[a]
        if partner[b] != a or a > b:
            continue
        if count == 2:
            edge = score[a][b] >= 1.2 / block
        else:
            edge = score[a][b] >= mean[a] and score[a][b] >= mean[b]
        if edge:
            dropped.add(b if len(clusters[b]) <= len(clusters[a]) else a)
    return [i for k, cluster in enumerate(clusters) if k not in dropped for i in cluster]


def decode(
    tokens: list[int],
    start: int,
    block: int,
    forward: Callable[[list[int]], tuple[list[list[float]], Matrix]],
    choose: Callable[[dict[int, float], Matrix, int], list[int]],
    mask: int,
) -> tuple[list[int], list[int]]:
    """Greedy decoding of everything from `start` in blocks; tokens and the step of each (-1 before `start`).

    `forward` gives probabilities `[seq][vocab]` and attention `[seq][seq]`; `choose` gets the confidence of the block's
    undecided positions, the attention and the length of the block.
    """
    row = tokens[:start] + [mask] * (len(tokens) - start)
    steps, step = [-1] * len(row), 0
    for left in range(start, len(row), block):
        inside = range(left, min(left + block, len(row)))
        while any(steps[i] < 0 for i in inside):
            probs, attention = forward(row)
            confidence = {i: max(probs[i]) for i in inside if steps[i] < 0}
            for i in choose(confidence, attention, len(inside)):
                row[i], steps[i] = probs[i].index(max(probs[i])), step
            step += 1
    return row, steps


def independent_sets(edges: Sequence[Sequence[bool]], nodes: int) -> list[tuple[int, ...]]:
    """Every set of nodes without an edge inside."""
    return [
        group
        for size in range(nodes + 1)
        for group in itertools.combinations(range(nodes), size)
        if not any(edges[a][b] for a, b in itertools.combinations(group, 2))
    ]


def greedy_set(edges: Sequence[Sequence[bool]], priority: Sequence[float]) -> set[int]:
    """Nodes one after the other by descending priority, each unless a taken one conflicts."""
    taken: set[int] = set()
    for node in sorted(range(len(priority)), key=lambda n: (-priority[n], n)):
        if not any(edges[node][other] for other in taken):
            taken.add(node)
    return taken


def budgeted(units: list[list[int]], score: dict[int, float], entropies: dict[int, float], budget: float) -> set[int]:
    """Units by descending mean score as long as sum H - max H over all their positions fits; if the first does not fit,
    its positions by descending score as long as they do."""

    def cost(positions: Sequence[int]) -> float:
        values = [entropies[i] for i in positions]
        return sum(values) - max(values, default=0.0)

    ordered = sorted(units, key=lambda u: (-sum(score[i] for i in u) / len(u), u[0]))
    chosen: list[int] = []
    for unit in ordered:
        if cost(chosen + unit) > budget:
            break
        chosen += unit
    if not chosen:
        for i in sorted(ordered[0], key=lambda i: (-score[i], i)):
            if cost([*chosen, i]) > budget:
                break
            chosen.append(i)
    return set(chosen)


def adablock_end(
    tokens: dict[int, int],
    probs: dict[int, float],
    start: int,
    search: int,
    delimiters: set[int],
    least: float,
    length: int,
) -> int:
    """Where AdaBlock ends a block: `tokens` and `probs` are the predictions at the undecided positions."""
    found = [i for i in sorted(tokens) if start <= i < start + search and tokens[i] in delimiters]
    if found:
        best = max(found, key=lambda i: probs[i])
        if probs[best] >= least:
            return best + 1
    return start + length


def sliding(undecided: Sequence[bool], masks: int, length: int) -> tuple[int, int]:
    """DCD's window [left, right): from the first undecided position, as far right as both limits hold."""
    left = list(undecided).index(True)
    right = left
    while right < len(undecided) and right - left < length and sum(undecided[left : right + 1]) <= masks:
        right += 1
    return left, right


def entropy_end(entropies: dict[int, float], start: int, jump: float, shortest: int, longest: int) -> int:
    """Where Swordsman ends a block: before the first jump between neighbours that are both undecided."""
    for i in range(start + shortest, start + longest):
        if i in entropies and i - 1 in entropies and abs(entropies[i] - entropies[i - 1]) > jump:
            return i
    return start + longest


def influence_end(
    now: dict[int, list[float]],
    then: dict[int, list[float]],
    start: int,
    bounds: tuple[int, int],
    influence: float,
    most: float,
) -> int:
    """Where a block that follows the last one's influence ends: predictions by position, after and before that block,
    each known for 2 * longest positions from where its block began."""
    shortest, longest = bounds
    length, moved, uncertain = 0, 0.0, 0.0
    for count, i in enumerate(range(start, start + 2 * longest), start=1):
        compared = i in now and i in then
        if compared:
            moved += sum(p * math.log(p / q) for p, q in zip(now[i], then[i]) if p > 0)
        if i in now:
            uncertain += entropy(now[i])
        if (compared and moved / count >= influence) or (i in now and uncertain <= most):
            length = count
    return start + min(max(length, shortest), longest)


def decode_planned(
    row: list[int],
    editable: list[bool],
    forward: Callable[[list[int]], list[list[float]]],
    end_of: Callable[[dict[int, list[float]], int], int],
    threshold: float,
    mask: int,
) -> tuple[list[int], list[int], int]:
    """Greedy threshold decoding in blocks that `end_of(predictions of the undecided positions, start)` ends: tokens,
    step of each, number of forwards."""
    row = [mask if e else t for t, e in zip(row, editable)]
    steps, step, end = [-1] * len(row), 0, 0
    while True:
        undecided = [i for i, e in enumerate(editable) if e and steps[i] < 0]
        if not undecided:
            return row, steps, step
        probs = forward(row)
        if undecided[0] >= end:
            end = end_of({i: probs[i] for i in undecided}, undecided[0])
        inside = [i for i in undecided if i < end]
        best = max(inside, key=lambda i: max(probs[i]))
        for i in inside:
            if i == best or max(probs[i]) >= threshold:
                row[i], steps[i] = probs[i].index(max(probs[i])), step
        step += 1
