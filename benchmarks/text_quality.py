"""How good is generated Python? Three numbers per text, none of which knows the model that wrote it.

- `nats`: mean -log p per token under a 3-gram model of the training text (`NGram`); lower is better.
- `syntax`: the share of its complete lines that `ast.parse` accepts (`parsed_share`); higher is better.
- `distinct_4`: the share of different ones among its 4-grams of tokens; higher is better. It must stand beside the
  first two: text that repeats itself is cheap for any n-gram model and parses well.

Read next: `sampling.py`.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mdlm.eval.generative import ngrams

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Order:
    """Counts of the runs of n tokens; a run is written as a number in base `vocab`."""

    runs: Ints
    counts: Ints
    histories: Ints
    """Runs without their last token."""
    totals: Ints
    """How often each history is followed by anything."""
    types: Ints
    """By how many different tokens."""


class NGram:
    """An n-gram model with Witten-Bell smoothing (Witten and Bell 1991; method C), without parameters:

        p(w | h) = (count(h w) + types(h) p(w | h')) / (count(h) + types(h)),    h' = h without its first token,

    where `types(h)` is the number of different tokens seen behind h. A history never seen is shortened; the last one,
    the empty one, falls back on 1 / vocab, so every token has mass.

    Args:
        tokens: the text as one row of ids below `vocab`.
        vocab: number of ids.
        order: n, 1 or more.

    Raises ValueError for ids out of range, text shorter than `order` tokens, and where vocab ** order does not fit into
    63 bits.
    """

    def __init__(self, tokens: Ints, vocab: int, order: int = 3) -> None:
        tokens = np.asarray(tokens, dtype=np.int64)
        if vocab**order >= 2**63:
            raise ValueError(f"runs of {order} of {vocab} tokens cannot be numbered in 63 bits; take a smaller order")
        if len(tokens) < order or tokens.min() < 0 or tokens.max() >= vocab:
            raise ValueError(f"need {order} or more ids of 0 .. {vocab - 1} to count, got {len(tokens)} tokens")
        self.vocab, self.order = vocab, order
        self.orders = [self._count(tokens, n) for n in range(1, order + 1)]

    def _count(self, tokens: Ints, n: int) -> _Order:
        runs, counts = np.unique(self._runs(tokens[None], n)[0], return_counts=True)
        histories, first, types = np.unique(runs // self.vocab, return_index=True, return_counts=True)
        return _Order(runs, counts, histories, np.add.reduceat(counts, first), types)

    def _runs(self, tokens: Ints, n: int) -> Ints:
        """[rows, seq - n + 1]: the number of the run that starts at each token."""
        seq = tokens.shape[1]
        number = np.zeros((len(tokens), seq - n + 1), dtype=np.int64)
        for place in range(n):
            number = number * self.vocab + tokens[:, place : seq - n + 1 + place]
        return number

    def nats(self, tokens: Ints, start: int) -> Floats:
        """-log p of each token from place `start` on, given the ones before it.

        Args:
            tokens: [rows, seq].
            start: `order` - 1 or more.

        Returns:
            [rows, seq - start].
        """
        tokens = np.asarray(tokens, dtype=np.int64)
        if start < self.order - 1:
            raise ValueError(f"start is {start}; a {self.order}-gram model needs {self.order - 1} tokens before it")
        prob = np.full((len(tokens), tokens.shape[1] - start), 1.0 / self.vocab)
        for n, order in enumerate(self.orders, start=1):
            run = self._runs(tokens, n)[:, start - n + 1 :]
            total, types = (_lookup(order.histories, of, run // self.vocab) for of in (order.totals, order.types))
            seen = total > 0
            weighed = _lookup(order.runs, order.counts, run) + types * prob
            prob = np.where(seen, weighed / np.where(seen, total + types, 1), prob)
        return -np.log(prob)


def _lookup(keys: Ints, values: Ints, wanted: Ints) -> Ints:
    """The value of each wanted key; 0 for keys there are not."""
    place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)


def parsed_share(prompt: str, text: str) -> float:
    """Of the lines completed in `text`, the share inside the longest run of whole lines, from the start of `prompt` on,
    that `ast.parse` accepts; 0 if `text` completes no line.

    `prompt` starts where a statement of the top level starts. The last line, which the end of the text cuts, does not
    count. What is still open at the end (a bracket, a string, `try:` without `except`) counts as not accepted from the
    line on where it opens, also in real text: compare with that, not with 1.
    """
    lines = (prompt + text).split("\n")[:-1]
    given = prompt.count("\n")
    for count in range(len(lines), given, -1):
        if _parses("\n".join(lines[:count]) + "\n"):
            return (count - given) / (len(lines) - given)
    return 0.0


def _parses(source: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of strings with odd escapes
            ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # ValueError: null bytes; the last: deep nesting
        return False
    return True


def distinct_share(tokens: Sequence[int], n: int = 4) -> float:
    """Share of different ones among the runs of n tokens; 1: none comes twice. Raises ValueError if there is none."""
    runs = ngrams(tokens, n)
    if not runs:
        raise ValueError(f"{len(tokens)} tokens hold no run of {n}")
    return len(set(runs)) / len(runs)
