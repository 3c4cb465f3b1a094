"""One source per kind of structure, by name: what strategies are compared on, because each rewards another one.

Local dependence (markov, hmm), equality at a distance (copy, noisy_copy), a global constraint (parity), nesting
(dyck), spans that are nearly certain once begun (templates), constraints (sudoku), carries (addition), a format (json).
`SOURCES` maps names to functions of a length and a seed. Read next: `curves.py`.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Hashable

import torch

from mdlm.eval.sources import CopySource, ExactSource, MarkovSource
from mdlm.eval.sources_automaton import AutomatonSource, ListedSource

Moves = dict[int, tuple[float, Hashable]]


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def markov(length: int = 64, seed: int = 0, vocab: int = 8, scale: float = 2.0) -> MarkovSource:
    """A random first-order chain: dependence that fades with distance."""
    return MarkovSource.random(length, vocab, _seeded(seed), scale, "uniform")


def hmm(length: int = 64, seed: int = 0, states: int = 6, vocab: int = 8, scale: float = 2.0) -> AutomatonSource:
    """A random hidden Markov model: symbols are noisy signs of a chain nobody sees. Its entropy is an estimate."""
    draw = torch.randn(states, vocab + states, dtype=torch.float64, generator=_seeded(seed)) * scale
    emission, transition = draw[:, :vocab].softmax(dim=1), draw[:, vocab:].softmax(dim=1)
    kernel = emission[:, :, None] * transition[:, None, :]
    return AutomatonSource(torch.full((states,), 1 / states), [kernel] * length, impossible="uniform")


def copy(length: int = 64, seed: int = 0, vocab: int = 8) -> CopySource:
    """The second half repeats the first: equality at a distance, never broken."""
    probs = torch.randn(vocab, dtype=torch.float64, generator=_seeded(seed)).softmax(dim=0)
    return CopySource(probs, length, "uniform")


def noisy_copy(length: int = 64, seed: int = 0, vocab: int = 8, error: float = 0.05) -> AutomatonSource:
    """Like `copy`, but a copied symbol is another one with probability `error`: every sequence is possible. Each place
    has a law of its own: with one for all, ties would send selectors to the left, that is to the first half."""
    if length % 2:
        raise ValueError(f"a copy needs an even length, got {length}")
    half = length // 2
    probs = torch.randn(half, vocab, dtype=torch.float64, generator=_seeded(seed)).softmax(dim=1).tolist()

    def rules(step: int, state: Hashable) -> Moves:
        if state is None:
            return {symbol: (p, symbol) for symbol, p in enumerate(probs[step // 2])}
        return {symbol: (1 - error if symbol == state else error / (vocab - 1), None) for symbol in range(vocab)}

    order = [position for i in range(half) for position in (i, half + i)]
    return AutomatonSource.from_rules(None, rules, length, vocab, order=order, impossible="uniform")


def parity(length: int = 64, seed: int = 0, block: int = 8) -> AutomatonSource:
    """Bits of which every `block` in a row sum to an even number: any block - 1 of them are independent."""

    def rules(step: int, state: Hashable) -> Moves:
        last = (step + 1) % block == 0 or step + 1 == length
        sums = {bit: (bit + int(state)) % 2 for bit in (0, 1)}  # type: ignore[call-overload]
        return {bit: (float(not last or total == 0), total) for bit, total in sums.items()}

    return AutomatonSource.from_rules(0, rules, length, 2, impossible="uniform")


def dyck(length: int = 32, seed: int = 0, kinds: int = 2, depth: int = 4) -> AutomatonSource:
    """Balanced brackets of some kinds, nested at most `depth` deep, all equally likely. Symbol k opens, kinds + k
    closes. The states are the open brackets, so the depth is bounded where a grammar's is not."""
    if length % 2:
        raise ValueError(f"balanced brackets need an even length, got {length}")

    def rules(step: int, state: Hashable) -> Moves:
        assert isinstance(state, tuple)
        moves: Moves = {kind: (1.0, (*state, kind)) for kind in range(kinds)} if len(state) < depth else {}
        if state:
            moves[kinds + state[-1]] = (1.0, state[:-1])
        return moves

    return AutomatonSource.from_rules((), rules, length, 2 * kinds, lambda state: state == (), impossible="uniform")


def templates(
    length: int = 64, seed: int = 0, phrases: int = 6, span: int = 7, vocab: int = 16, error: float = 0.01
) -> AutomatonSource:
    """Phrases of `span` symbols one after the other, drawn with unequal probabilities. The first symbol says which
    phrase it is; each further one is the phrase's own but for an `error`: nearly certain once begun. (A `span` that
    is a power of 2 would favour strategies with such strides: they would write all first symbols first.)"""
    generator = _seeded(seed)
    prior = torch.randn(phrases, dtype=torch.float64, generator=generator).softmax(dim=0).tolist()
    body = torch.randint(0, vocab, (phrases, span), generator=generator).tolist()

    def rules(step: int, state: Hashable) -> Moves:
        place = step % span
        if place == 0:
            return {phrase: (p, phrase if span > 1 else None) for phrase, p in enumerate(prior)}
        own, after = body[int(state)][place], state if place + 1 < span else None  # type: ignore[call-overload]
        return {symbol: (1 - error if symbol == own else error / (vocab - 1), after) for symbol in range(vocab)}

    return AutomatonSource.from_rules(None, rules, length, vocab, impossible="uniform")


def sudoku(length: int = 16, seed: int = 0) -> ListedSource:
    """The 288 full grids of 4 x 4 Sudoku, row by row, all equally likely."""
    if length != 16:
        raise ValueError(f"a 4 x 4 grid has 16 cells, got length {length}")
    rows = list(itertools.permutations(range(4)))

    def groups(grid: tuple[tuple[int, ...], ...]) -> bool:
        columns = list(zip(*grid))
        boxes = [grid[r][c : c + 2] + grid[r + 1][c : c + 2] for r in (0, 2) for c in (0, 2)]
        return all(len(set(group)) == 4 for group in [*columns, *boxes])

    tops = [pair for pair in itertools.product(rows, repeat=2) if len(set(pair[0][:2] + pair[1][:2])) == 4]
    grids = [top + bottom for top in tops for bottom in tops if groups(top + bottom)]
    return ListedSource(torch.tensor(grids).reshape(-1, 16), 4, impossible="uniform")


PLUS, EQUALS = 10, 11


def addition(length: int = 15, seed: int = 0) -> AutomatonSource:
    """`a+b=c` in decimal with leading zeros, a and b uniform with d digits each and c with d + 1: length 3 d + 3.

    The automaton goes from the last digits to the first, as one adds by hand: its state is the carry, or the sum.
    """
    digits, rest = divmod(length - 3, 3)
    if digits < 1 or rest:
        raise ValueError(f"a sum of two numbers with d digits has length 3 d + 3 (6, 9, 12, 15, ...), got {length}")
    a, plus, b, equals, c = 0, digits, digits + 1, 2 * digits + 1, 2 * digits + 2
    kinds, order = ["plus", "equals"], [plus, equals]
    for back in range(1, digits + 1):
        kinds += ["digit", "digit", "sum"]
        order += [a + digits - back, b + digits - back, c + digits + 1 - back]
    kinds, order = [*kinds, "carry"], [*order, c]

    def rules(step: int, state: Hashable) -> Moves:
        assert isinstance(state, int)
        kind = kinds[step]
        if kind == "digit":
            return {digit: (1.0, state + digit) for digit in range(10)}
        if kind == "sum":
            return {state % 10: (1.0, state // 10)}
        return {{"plus": PLUS, "equals": EQUALS, "carry": state}[kind]: (1.0, state)}

    return AutomatonSource.from_rules(0, rules, length, 12, order=order, impossible="uniform")


JSON_TOKENS = (
    "{",
    "}",
    ":",
    ",",
    '"name"',
    '"age"',
    '"ok"',
    '"ann"',
    '"bob"',
    '"eve"',
    "true",
    "false",
    *"0123456789",
    " ",
)
_NAME, _AGE, _OK, _DIGIT, _PAD = 4, 5, 6, 12, 22


def json_objects(length: int = 24, seed: int = 0) -> AutomatonSource:
    """Objects like `{"age":41,"name":"eve"}`, keys at most once and in any order, numbers of one to three digits
    without leading zero, filled up with spaces. Symbols: `JSON_TOKENS`. All that fit are equally likely."""

    def rules(step: int, state: Hashable) -> Moves:
        assert isinstance(state, tuple)
        place, used, key = state
        keys: Moves = {k: (1.0, ("colon", used | {k}, k)) for k in (_NAME, _AGE, _OK) if k not in used}
        if place == "start":
            return {0: (1.0, ("first", used, 0))}
        if place == "first":
            return {**keys, 1: (1.0, ("end", frozenset(), 0))}
        if place == "key":
            return keys
        if place == "colon":
            return {2: (1.0, ("value", used, key))}
        if place == "value":
            if key == _AGE:
                more = {_DIGIT + d: (1.0, ("digit 2", used, 0)) for d in range(1, 10)}
                return {_DIGIT: (1.0, ("after", used, 0)), **more}
            words = range(7, 10) if key == _NAME else range(10, 12)
            return {word: (1.0, ("after", used, 0)) for word in words}
        if place == "end":
            return {_PAD: (1.0, state)}
        close: Moves = {1: (1.0, ("end", frozenset(), 0))}
        if len(used) < 3:
            close[3] = (1.0, ("key", used, 0))
        if place == "after":
            return close
        later = "digit 3" if place == "digit 2" else "after"
        return {**close, **{_DIGIT + d: (1.0, (later, used, 0)) for d in range(10)}}

    return AutomatonSource.from_rules(
        ("start", frozenset(), 0),
        rules,
        length,
        len(JSON_TOKENS),
        lambda state: isinstance(state, tuple) and state[0] == "end",
        impossible="uniform",
    )


SOURCES: dict[str, Callable[..., ExactSource]] = {
    "markov": markov,
    "hmm": hmm,
    "copy": copy,
    "noisy_copy": noisy_copy,
    "parity": parity,
    "dyck": dyck,
    "templates": templates,
    "sudoku": sudoku,
    "addition": addition,
    "json": json_objects,
}
"""Name -> function of `length` (default: its usual one) and `seed`; states of probability zero predict uniformly."""


def build_source(name: str, length: int | None = None, seed: int = 0) -> ExactSource:
    """The source of this name. Raises ValueError for an unknown name, or a length it cannot have."""
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"there is no source {name!r}{hint} There are: {', '.join(SOURCES)}")
    return SOURCES[name](seed=seed) if length is None else SOURCES[name](length=length, seed=seed)
