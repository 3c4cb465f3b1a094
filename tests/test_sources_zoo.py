"""Sources by automata and by lists: laws, conditionals and entropies against enumeration written down independently."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import reference
import torch

from mdlm.eval import sources_zoo as zoo
from mdlm.eval.sources import ExactSource, TabularSource
from mdlm.eval.sources_automaton import AutomatonSource, ListedSource

Table = dict[tuple[int, ...], float]


def uniform(sequences: list[tuple[int, ...]]) -> Table:
    return {x: 1 / len(sequences) for x in sequences}


def hmm_table(source: AutomatonSource) -> Table:
    """Sum over every path of states, from the emissions and transitions that the definition names."""
    draw = torch.randn(2, 3 + 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2.0
    emit, move = draw[:, :3].softmax(1).tolist(), draw[:, 3:].softmax(1).tolist()
    table = {}
    for x in itertools.product(range(3), repeat=4):
        total = 0.0
        for path in itertools.product(range(2), repeat=4):
            weight = 0.5
            for i, state in enumerate(path):
                weight *= emit[state][x[i]] * (move[path[i - 1]][state] if i else 1.0)
            total += weight
        table[x] = total
    return table


def noisy_copy_table(source: ExactSource) -> Table:
    p = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(1).tolist()
    table = {}
    for x in itertools.product(range(3), repeat=4):
        table[x] = math.prod(p[i][x[i]] * (0.8 if x[i] == x[i + 2] else 0.1) for i in (0, 1))
    return table


def parity_table(source: ExactSource) -> Table:
    return uniform([x for x in itertools.product(range(2), repeat=5) if sum(x[:3]) % 2 == 0 and sum(x[3:]) % 2 == 0])


def dyck_table(source: ExactSource) -> Table:
    """Words from which removing neighbouring pairs leaves nothing, nested at most two deep."""
    found = []
    for x in itertools.product(range(4), repeat=6):
        word, depth = "".join("([)]"[symbol] for symbol in x), 0
        heights = [depth := depth + (1 if c in "([" else -1) for c in word]
        while "()" in word or "[]" in word:
            word = word.replace("()", "").replace("[]", "")
        if not word and max(heights) <= 2:
            found.append(x)
    assert len(found) == 4 * 2**3  # 5 balanced words of 6, of which one is three deep, times two kinds for each pair
    return uniform(found)


def template_table(source: ExactSource) -> Table:
    generator = torch.Generator().manual_seed(0)
    prior = torch.randn(2, dtype=torch.float64, generator=generator).softmax(0).tolist()
    body = torch.randint(0, 3, (2, 2), generator=generator).tolist()
    table = {}
    for x in itertools.product(range(3), repeat=5):
        p = 1.0
        for i in (0, 2, 4):
            p *= prior[x[i]] if x[i] < 2 else 0.0
            if i < 4 and x[i] < 2:
                p *= 0.9 if x[i + 1] == body[x[i]][1] else 0.05
        table[x] = p
    return table


def addition_table(source: ExactSource) -> Table:
    sums = [f"{a:02d}+{b:02d}={a + b:03d}" for a in range(100) for b in range(100)]
    return uniform([tuple("0123456789+=".index(c) for c in text) for text in sums])


def json_table(source: ExactSource) -> Table:
    """Built from Python values and written by `json`."""
    values = {"name": ["ann", "bob", "eve"], "age": list(range(1000)), "ok": [True, False]}
    tokens = {token: number for number, token in enumerate(zoo.JSON_TOKENS)}
    found = []
    for count in range(3):
        for keys in itertools.permutations(values, count):
            for chosen in itertools.product(*(values[key] for key in keys)):
                text, row = json.dumps(dict(zip(keys, chosen)), separators=(",", ":")), []
                while text:
                    token = next(t for t in tokens if text.startswith(t))
                    row.append(tokens[token])
                    text = text[len(token) :]
                if len(row) <= 9:
                    found.append(tuple(row + [tokens[" "]] * (9 - len(row))))
    return uniform(found)


def sudoku_table(source: ExactSource) -> Table:
    """Filled in cell by cell, refusing repeats."""
    grids: list[tuple[int, ...]] = [()]
    for cell in range(16):
        row, column = divmod(cell, 4)
        taken = [
            i
            for i in range(cell)
            if i // 4 == row or i % 4 == column or (i // 8, i % 4 // 2) == (row // 2, column // 2)
        ]
        grids = [(*g, s) for g in grids for s in range(4) if all(g[i] != s for i in taken)]
    assert len(grids) == 288
    return uniform(grids)


CASES: dict[str, tuple[ExactSource, Callable[[ExactSource], Table]]] = {
    "hmm": (zoo.hmm(4, states=2, vocab=3), hmm_table),
    "noisy_copy": (zoo.noisy_copy(4, vocab=3, error=0.2), noisy_copy_table),
    "parity": (zoo.parity(5, block=3), parity_table),
    "dyck": (zoo.dyck(6, depth=2), dyck_table),
    "templates": (zoo.templates(5, phrases=2, span=2, vocab=3, error=0.1), template_table),
    "addition": (zoo.addition(9), addition_table),
    "json": (zoo.json_objects(9), json_table),
    "sudoku": (zoo.sudoku(), sudoku_table),
}
TABLES = {name: {x: p for x, p in make(source).items() if p > 0} for name, (source, make) in CASES.items()}
each_case = pytest.mark.parametrize("name", CASES)


@each_case
def test_the_law_equals_enumeration(name: str) -> None:
    source, table = CASES[name][0], TABLES[name]
    sequences = torch.tensor(list(table))
    assert sum(table.values()) == pytest.approx(1.0)
    np.testing.assert_allclose(source.log_prob(sequences).numpy(), np.log(list(table.values())), atol=1e-9)
    torch.testing.assert_close(source.step_log_probs(sequences).sum(dim=1), source.log_prob(sequences))
    assert source.entropy() == pytest.approx(reference.entropy(table.values()), abs=1e-9 + 4 * source.entropy_error)
    assert (source.entropy_error > 0) == (name == "hmm")
    drawn = source.sample(200, torch.Generator().manual_seed(1))
    assert all(tuple(row) in table for row in drawn.tolist())


@each_case
def test_conditionals_of_partial_states_equal_enumeration(name: str) -> None:
    source, table = CASES[name][0], TABLES[name]
    rows, weights = np.array(list(table)), np.array(list(table.values()))
    choose, states, expected = random.Random(5), [], []
    for _ in range(120):
        kept = choose.random()
        state = [s if choose.random() < kept else None for s in choose.choice(list(table))]
        agrees = weights * np.all([(rows[:, i] == s) | (s is None) for i, s in enumerate(state)], axis=0)
        law = np.stack([(agrees[:, None] * (rows == symbol)).sum(0) for symbol in range(source.vocab)], axis=1)
        states.append([source.mask_token_id if s is None else s for s in state])
        expected.append(law / agrees.sum())
    got = source(torch.tensor(states))[..., : source.vocab].exp()
    np.testing.assert_allclose(got.numpy(), np.array(expected), atol=1e-9)


@each_case
def test_samples_follow_the_law(name: str) -> None:
    """Every symbol's frequency at every position, within 5 standard errors of its exact marginal."""
    source, n = CASES[name][0], 4000
    masked = torch.full((1, source.length), source.mask_token_id)
    p = source(masked)[0, :, : source.vocab].exp()
    drawn = source.sample(n, torch.Generator().manual_seed(3))
    share = torch.nn.functional.one_hot(drawn, source.vocab).double().mean(dim=0)
    assert bool(((share - p).abs() <= 5 * (p * (1 - p) / n).sqrt() + 1e-12).all())


@pytest.mark.parametrize("name", zoo.SOURCES)
def test_every_named_source_at_its_usual_length(name: str) -> None:
    """Typical -log p is the entropy; revealing in a random order adds up to it, so conditionals fit together."""
    source = zoo.build_source(name, seed=1)
    x = source.sample(64, torch.Generator().manual_seed(2))
    nats = -source.log_prob(x)
    error = float(nats.std()) / 8 + source.entropy_error
    assert abs(float(nats.mean()) - source.entropy()) <= 4 * error + 1e-6
    order = torch.randperm(source.length, generator=torch.Generator().manual_seed(4))
    tokens, total = torch.full_like(x[:4], source.mask_token_id), torch.zeros(4).double()
    for position in order.tolist():
        total += source(tokens)[:, position].gather(1, x[:4, position, None])[:, 0]
        tokens[:, position] = x[:4, position]
    torch.testing.assert_close(total, source.log_prob(x[:4]))


def test_an_hmm_of_256_symbols_does_not_underflow() -> None:
    source = zoo.hmm(256, states=3, vocab=5)
    x = source.sample(4, torch.Generator().manual_seed(0))
    masked = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.7
    log_probs = source(x.masked_fill(masked, source.mask_token_id))
    assert not bool(log_probs.isnan().any())
    assert bool(source.log_prob(x).isfinite().all())


def test_a_contradiction_leaves_other_parts_alone() -> None:
    source = zoo.parity(8, block=4)
    state = torch.tensor([[1, 0, 0, 0, 1, 2, 1, 1]])  # the first block is odd; the second must be completed by a 1
    assert source(state)[0, 5].exp().tolist() == pytest.approx([0, 1, 0])
    copies = zoo.noisy_copy(4, vocab=3, error=0.0)
    torn = torch.tensor([[0, 2, 1, 3]])
    assert copies(torn)[0, 3].exp().tolist() == pytest.approx([0, 0, 1, 0])
    assert float(copies.log_prob(torch.tensor([[0, 2, 1, 2]]))) == -math.inf
    steps = copies.step_log_probs(torch.tensor([[0, 2, 1, 2]]))
    assert steps.isinf().sum() == 1  # one broken copy is one impossible step
    grid = zoo.sudoku()
    assert float(grid.log_prob(torch.zeros(1, 16, dtype=torch.int64))) == -math.inf


def test_step_log_probs_by_conditionals_are_the_chain_rule() -> None:
    source = TabularSource.random(3, 2, torch.Generator().manual_seed(0))
    x = torch.tensor(list(itertools.product(range(2), repeat=3)))
    joint, steps = source.joint, source.step_log_probs(x).exp()
    torch.testing.assert_close(steps[:, 0], joint.sum((1, 2))[x[:, 0]])
    torch.testing.assert_close(steps[:, 1], joint.sum(2)[x[:, 0], x[:, 1]] / joint.sum((1, 2))[x[:, 0]])
    torch.testing.assert_close(steps.log().sum(1), source.log_prob(x))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: zoo.build_source("markof"), "did you mean 'markov'"),
        (lambda: zoo.build_source("sudoku", 9), "16 cells"),
        (lambda: zoo.build_source("addition", 10), "3 d \\+ 3"),
        (lambda: zoo.build_source("dyck", 7), "even length"),
        (lambda: zoo.build_source("noisy_copy", 7), "even length"),
        (lambda: zoo.build_source("json", 1), "no sequence"),
        (lambda: AutomatonSource(torch.ones(1), []), "one kernel"),
        (lambda: AutomatonSource(torch.ones(2), [torch.ones(1, 2, 1)]), "states after a step"),
        (lambda: AutomatonSource(torch.ones(1), [-torch.ones(1, 2, 1)]), "0 or more"),
        (lambda: AutomatonSource(torch.ones(1), [torch.ones(1, 2, 1)], order=[1]), "each position"),
        (lambda: ListedSource(torch.zeros(2, 3, dtype=torch.int64), 2), "all different"),
        (lambda: ListedSource(torch.full((1, 3), 2), 2), "symbols must lie"),
    ],
)
def test_bad_definitions_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
