"""Confidence-adaptive samplers in plain Python floats, one row at a time: what `mdlm.samplers` is compared with.

Written from the papers' formulas; shares no code with the product. A model is a function from the row (ids, the mask
id where undecided) to one list of probabilities per position, with 0 at the mask id. Positions are 0-based.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = list[int]
Probs = list[list[float]]
Model = Callable[[Row], Probs]
Law = Sequence[float]


def best(p: Law) -> int:
    """The most probable token, the lowest id of equal ones."""
    return max(range(len(p)), key=lambda v: (p[v], -v))


def top1(p: Law) -> float:
    """The largest probability."""
    return max(p)


def margin(p: Law) -> float:
    """Difference of the two largest."""
    first, second = sorted(p, reverse=True)[:2]
    return first - second


def entropy(p: Law) -> float:
    """In nats."""
    return -sum(x * math.log(x) for x in p if x > 0)


def kl(p: Law, q: Law) -> float:
    """KL(p || q) in nats; q must be positive where p is."""
    return sum(x * math.log(x / y) for x, y in zip(p, q) if x > 0)


def ranked(scores: dict[int, float]) -> list[int]:
    """Positions, best score first, equal ones from the left."""
    return sorted(scores, key=lambda i: (-scores[i], i))


@dataclass
class View:
    """One step inside a block."""

    step: int
    """Steps done in this block."""
    block: list[int]
    """Its editable positions."""
    laws: dict[int, Law]
    """Of every undecided one."""
    time: int = 0
    """Steps done in this row."""

    def score(self, function: Callable[[Law], float]) -> dict[int, float]:
        """By position."""
        return {i: function(p) for i, p in self.laws.items()}


Rule = Callable[[View], Sequence[int]]


@dataclass
class Result:
    """What became of a row."""

    tokens: Row
    step_map: list[int]
    steps: int


def decode(
    model: Model,
    tokens: Row,
    editable: Sequence[bool],
    mask: int,
    block_length: int | None,
    rule: Callable[[], Rule],
    pick: Callable[[int, int, Law], int] | None = None,
) -> Result:
    """Block after block, each with a fresh `rule`; `pick(step, position, law)` draws a token (greedy by default)."""
    row = [mask if flag else token for token, flag in zip(tokens, editable)]
    undecided = [i for i, flag in enumerate(editable) if flag]
    step_map, step = [-1] * len(row), 0
    first = undecided[0] if undecided else 0
    length = len(row) if block_length is None else block_length
    while undecided:
        number = (undecided[0] - first) // length
        block = [i for i, flag in enumerate(editable) if flag and (i - first) // length == number]
        choose, inner = rule(), 0
        while any(i in undecided for i in block):
            law = model(row)
            chosen = choose(View(inner, block, {i: law[i] for i in block if i in undecided}, step))
            assert chosen, "a rule of this file always commits something"
            for i in chosen:
                row[i] = best(law[i]) if pick is None else pick(step, i, law[i])
                step_map[i] = step
                undecided.remove(i)
            inner, step = inner + 1, step + 1
    return Result(row, step_map, step)


# Rules without memory.


def factor(view: View, f: float, compat: bool) -> Sequence[int]:
    """Fast-dLLM, Theorem 1. Published: the test is >= and the loop that looks for the first failure cannot tell a
    failure of the last candidate from none."""
    confidence = view.score(top1)
    order = ranked(confidence)
    if not compat:
        n = 1
        for k in range(2, len(order) + 1):
            if (k + 1) * (1 - confidence[order[k - 1]]) < f:
                n = k
        return order[:n]
    needed = [-1.0] + [1 - f / (n + 1) for n in range(2, len(order) + 1)]
    index = 0
    for index in range(len(order)):
        if confidence[order[index]] < needed[index]:
            break
    return order[: index + 1] if index in (0, len(order) - 1) else order[:index]


def entropy_budget(view: View, gamma: float, score: Callable[[Law], float]) -> Sequence[int]:
    """EB-Sampler: try every prefix length and keep the longest that fits."""
    order, h = ranked(view.score(score)), view.score(entropy)
    fitting = [
        n for n in range(1, len(order) + 1) if sum(h[i] for i in order[:n]) - max(h[i] for i in order[:n]) <= gamma
    ]
    return order[: max([1, *fitting])]


def dynamic(view: View, threshold: float, quotas: Sequence[int]) -> Sequence[int]:
    """SDAR: all above the threshold if enough, else the quota of this step."""
    confidence, quota = view.score(top1), quotas[view.step]
    sure = [i for i in confidence if confidence[i] > threshold]
    return sure if len(sure) >= quota else ranked(confidence)[:quota]


def even_quotas(masks: int, steps: int) -> list[int]:
    """LLaDA: masks split evenly over steps, the remainder to the first ones."""
    return [masks // steps + (1 if s < masks % steps else 0) for s in range(steps)]


def hierarchy(view: View, threshold: float, low: float) -> Sequence[int]:
    """dInfer: best of each run above `low`, all above `threshold`, the best of all."""
    confidence = view.score(top1)
    runs: list[list[int]] = []
    for i in sorted(confidence):
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    chosen = {ranked(confidence)[0]} | {i for i in confidence if confidence[i] > threshold}
    for run in runs:
        head = ranked({i: confidence[i] for i in run})[0]
        if confidence[head] > low:
            chosen.add(head)
    return sorted(chosen)


def dilated(view: View, base: int) -> Sequence[int]:
    """DUS: the first round that has an undecided position; stride = block length // base^round, at least 1."""
    start = view.block[0]
    length = view.block[-1] - start + 1
    for number in range(1, length + 2):
        stride = max(1, length // base**number)
        chosen = [i for i in view.laws if (i - start) % stride == 0]
        if chosen:
            return chosen
    raise AssertionError("stride 1 holds every position")


def spaced(chosen: Sequence[int], scores: dict[int, float], spacing: int) -> Sequence[int]:
    """One after the other, best first, unless one taken before is too near."""
    taken: list[int] = []
    for i in ranked({i: scores[i] for i in chosen}):
        if all(abs(i - j) >= spacing for j in taken):
            taken.append(i)
    return taken


def dream_quota(masks: int, step: int, steps: int, eps: float) -> int:
    """Dream: int(masks * (1 - s/t)) on linspace(1, eps, steps + 1), all in the last step; here at least one."""
    t, s = (1 + (eps - 1) * k / steps for k in (step, step + 1))
    return masks if step == steps - 1 else max(1, int(masks * (1 - s / t)))


def calibrated(p: Law, offset: int, frequency: Sequence[float], lam: float, alpha: float) -> float:
    """PC-Sampler's score, as printed."""
    token = best(p)
    return math.exp(-lam * offset) * min(-p[token] * math.log(frequency[token]), alpha)


# Rules with memory; one object per block.


@dataclass
class Klass:
    """KLASS: KL(now || previous) below `tau_kl` in each of the last n steps; the first step of a block has none."""

    threshold: float
    tau_kl: float
    n: int
    quota: int
    previous: dict[int, Law] = field(default_factory=dict)
    past: dict[int, list[float]] = field(default_factory=dict)

    def __call__(self, view: View) -> Sequence[int]:
        for i, p in view.laws.items():
            moved = kl(p, self.previous[i]) if i in self.previous else 1e30
            self.past.setdefault(i, []).append(moved)
        self.previous = dict(view.laws)
        confidence = view.score(top1)
        ready = [
            i
            for i in confidence
            if confidence[i] > self.threshold
            and len(self.past[i]) >= self.n
            and all(moved < self.tau_kl for moved in self.past[i][-self.n :])
        ]
        return ready or ranked(confidence)[: self.quota]


@dataclass
class Swd:
    """SWD as printed: score * exp(-lam * KL), then a threshold, at least one."""

    score: Callable[[Law], float]
    lam: float
    direction: str
    first: str
    threshold: float
    previous: dict[int, Law] = field(default_factory=dict)

    def __call__(self, view: View) -> Sequence[int]:
        weighted = {}
        for i, p in view.laws.items():
            allowed = [v for v in range(len(p)) if p[v] > 0]
            before = self.previous.get(i)
            if before is None and self.first == "uniform":
                before = [1 / len(allowed) if v in allowed else 0.0 for v in range(len(p))]
            moved = 0.0
            if before is not None:
                moved = kl(before, p) if self.direction == "prev_now" else kl(p, before)
            weighted[i] = self.score(p) * math.exp(-self.lam * moved)
        self.previous = dict(view.laws)
        chosen = [i for i in weighted if weighted[i] >= self.threshold]
        return chosen or ranked(weighted)[:1]


@dataclass
class Credit:
    """CreditDecoding with a dense table: fade, add, fuse, threshold. `drawn` is what greedy picks after fusion."""

    alpha: float
    gamma: float
    decay: float
    threshold: float
    table: dict[int, list[float]] = field(default_factory=dict)
    fused: dict[int, Law] = field(default_factory=dict)

    def __call__(self, view: View) -> Sequence[int]:
        for i, p in view.laws.items():
            credit = [self.decay * x for x in self.table.get(i, [0.0] * len(p))]
            credit[best(p)] += top1(p) ** self.gamma
            self.table[i] = credit
            weight = [x * (1 + e) ** self.alpha for x, e in zip(p, credit)]
            self.fused[i] = [x / sum(weight) for x in weight]
        confidence = {i: top1(self.fused[i]) for i in view.laws}
        chosen = [i for i in confidence if confidence[i] >= self.threshold]
        return chosen or ranked(confidence)[:1]


def saber(model: Model, tokens: Row, editable: Sequence[bool], mask: int, least: int, most: int) -> Any:
    """Saber on the whole canvas, greedy; also says how often something was taken back.

    Backtracking judges what is written (its probability now against one step ago, or against its commit), never what
    was committed in the same step, and no position more than `most` times.
    """
    row = [mask if flag else token for token, flag in zip(tokens, editable)]
    undecided = {i for i, flag in enumerate(editable) if flag}
    committed: dict[int, float] = {}
    last: dict[int, float] = {}
    step_map, edits, step, taken_back = [-1] * len(row), [0] * len(row), 0, 0
    while undecided:
        law = model(row)
        bar = sum(committed.values()) / len(committed) if committed else 1.0
        confidence = {i: top1(law[i]) for i in undecided}
        chosen = [i for i in confidence if confidence[i] > bar]
        if len(chosen) < least:
            chosen = ranked(confidence)[:least]
        held = sorted(committed)
        for i in chosen:
            row[i], step_map[i], committed[i] = best(law[i]), step, confidence[i]
            undecided.remove(i)
        if most:
            now = {i: law[i][row[i]] for i in held}
            fall = {i: last.get(i, committed[i]) - now[i] for i in held if edits[i] < most}
            r = min(max(least // 2, math.ceil(len(chosen) / 8)), len(chosen) - 1)
            gone = ranked(fall)[:r] if undecided else []
            last = {i: now[i] for i in held if i not in gone}
            for i in gone:
                row[i], step_map[i] = mask, -1
                edits[i] += 1
                taken_back += 1
                undecided.add(i)
                del committed[i]
        step += 1
    return Result(row, step_map, step), taken_back
