"""Sources with exact probabilities: every conditional of every partial state against enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
import pytest
import reference
import torch
from scipy import stats

from mdlm.eval.sources import CopySource, ExactSource, MarkovSource, TabularSource, state_posteriors

LENGTH, VOCAB = 4, 3
Table = Mapping[tuple[int, ...], float]


def _cases() -> dict[str, tuple[ExactSource, Table]]:
    generator = torch.Generator().manual_seed(4)
    tabular = TabularSource.random(LENGTH, VOCAB, generator)
    markov = MarkovSource.random(LENGTH, VOCAB, generator)
    sparse = MarkovSource(
        torch.tensor([0.5, 0.5, 0.0]), torch.tensor([[0.0, 0.7, 0.3], [0.0, 0.0, 1.0], [0.6, 0.0, 0.4]]), LENGTH
    )
    copy = CopySource(torch.tensor([0.6, 0.3, 0.1]), LENGTH)
    holes = torch.rand((VOCAB,) * LENGTH, generator=generator).double()
    holes[holes < 0.6] = 0.0
    with_holes = TabularSource(holes / holes.sum())
    return {
        "tabular": (tabular, {x: float(tabular.joint[x]) for x in itertools.product(range(VOCAB), repeat=LENGTH)}),
        "tabular with impossible sequences": (
            with_holes,
            {x: float(with_holes.joint[x]) for x in itertools.product(range(VOCAB), repeat=LENGTH)},
        ),
        "markov": (markov, reference.chain_table(markov.initial.numpy(), markov.transition.numpy(), LENGTH)),
        "markov with impossible steps": (
            sparse,
            reference.chain_table(sparse.initial.numpy(), sparse.transition.numpy(), LENGTH),
        ),
        "copy": (copy, reference.copy_table(copy.probs.numpy(), LENGTH)),
    }


CASES = _cases()
each_case = pytest.mark.parametrize("name", CASES)


@each_case
def test_conditionals_of_every_possible_state_equal_enumeration(name: str) -> None:
    source, table = CASES[name]
    states, expected = [], []
    for tokens in itertools.product([*range(VOCAB), None], repeat=LENGTH):
        conditional = np.array(reference.table_conditional(table, tokens, VOCAB))
        if not np.isnan(conditional).any():
            states.append([VOCAB if t is None else t for t in tokens])
            expected.append(conditional)
    log_probs = source(torch.tensor(states))  # one batch: rows do not disturb each other
    assert log_probs.dtype == torch.float64
    assert log_probs.shape == (len(states), LENGTH, VOCAB + 1)
    np.testing.assert_allclose(log_probs[..., :VOCAB].exp().numpy(), np.array(expected), rtol=0, atol=1e-12)
    assert bool((log_probs[..., source.mask_token_id] == -math.inf).all())
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(len(states), LENGTH).double())
    assert len(states) > 50


@each_case
def test_log_prob_and_entropy_equal_enumeration(name: str) -> None:
    source, table = CASES[name]
    sequences = torch.tensor(list(table))
    np.testing.assert_allclose(source.log_prob(sequences).exp().numpy(), list(table.values()), rtol=0, atol=1e-13)
    assert sum(table.values()) == pytest.approx(1.0)
    assert source.entropy() == pytest.approx(reference.entropy(table.values()), rel=1e-12)


@each_case
def test_samples_follow_the_law(name: str) -> None:
    source, table = CASES[name]
    n = 20_000
    drawn = source.sample(n, torch.Generator().manual_seed(9))
    assert drawn.dtype == torch.int64
    assert drawn.shape == (n, LENGTH)
    code = (drawn * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(1).bincount(minlength=VOCAB**LENGTH)
    p = np.array([table[x] for x in itertools.product(range(VOCAB), repeat=LENGTH)])
    assert int(code[torch.tensor(p == 0)].sum()) == 0
    assert stats.chisquare(code.numpy()[p > 0], n * p[p > 0]).pvalue > 1e-4
    assert torch.equal(drawn, source.sample(n, torch.Generator().manual_seed(9)))


def test_a_symbol_of_probability_zero_is_not_drawn_even_by_the_number_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda n, **options: torch.zeros(n, dtype=torch.float64))
    generator, never_0 = torch.Generator(), torch.tensor([0.0, 1.0])
    assert CopySource(never_0, 2).sample(1, generator).tolist() == [[1, 1]]
    assert MarkovSource(never_0, torch.stack([never_0, never_0]), 2).sample(1, generator).tolist() == [[1, 1]]


@each_case
def test_the_chain_rule_holds_in_any_order(name: str) -> None:
    """Revealing position by position and adding up the conditionals gives the log-probability, in every order."""
    source, _ = CASES[name]
    x = source.sample(3, torch.Generator().manual_seed(2))
    for order in itertools.permutations(range(LENGTH)):
        tokens = torch.full_like(x, source.mask_token_id)
        total = torch.zeros(3, dtype=torch.float64)
        for position in order:
            total += source(tokens)[:, position].gather(1, x[:, position, None]).squeeze(1)
            tokens[:, position] = x[:, position]
        torch.testing.assert_close(total, source.log_prob(x))


@each_case
def test_at_selects_rows_in_row_major_order(name: str) -> None:
    source, _ = CASES[name]
    tokens = source.sample(6, torch.Generator().manual_seed(1))
    masked = torch.rand(6, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.5
    tokens = tokens.masked_fill(masked, source.mask_token_id)
    assert torch.equal(source(tokens, at=masked), source(tokens)[masked])
    assert source(tokens, at=torch.zeros_like(masked)).shape == (0, VOCAB + 1)
    everywhere = source(
        tokens, attention_mask=torch.ones_like(masked), position_ids=torch.arange(LENGTH).expand(6, LENGTH)
    )
    assert torch.equal(everywhere, source(tokens))


def test_a_long_chain_neither_underflows_nor_forgets() -> None:
    generator = torch.Generator().manual_seed(0)
    source = MarkovSource.random(256, 16, generator, scale=4.0)
    x = source.sample(8, generator)
    assert float(source.log_prob(x).mean()) == pytest.approx(-source.entropy(), rel=0.1)
    masked = torch.rand(8, 256, generator=generator) < torch.linspace(0.05, 1.0, 8)[:, None]
    log_probs = source(x.masked_fill(masked, source.mask_token_id))
    assert not bool(log_probs.isnan().any())
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(8, 256).double())
    # One masked position between neighbours: p(x | left, right) in closed form.
    alone = torch.zeros(8, 256, dtype=torch.bool)
    alone[:, 100] = True
    got = source(x.masked_fill(alone, source.mask_token_id), at=alone)
    weight = source.transition[x[:, 99]] * source.transition[:, x[:, 101]].T
    torch.testing.assert_close(got[:, :16].exp(), weight / weight.sum(1, keepdim=True), rtol=1e-10, atol=1e-14)


def test_posteriors_with_soft_evidence_equal_enumeration() -> None:
    """What a hidden Markov model needs: evidence that is neither 0/1 nor all ones."""
    generator = torch.Generator().manual_seed(3)
    source = MarkovSource.random(4, 3, generator)
    evidence = torch.rand(2, 4, 3, dtype=torch.float64, generator=generator)
    got = state_posteriors(source.initial, source.transition, evidence)
    got = got / got.sum(-1, keepdim=True)
    table = reference.chain_table(source.initial.numpy(), source.transition.numpy(), 4)
    for row in range(2):
        weighted = {x: p * math.prod(float(evidence[row, i, s]) for i, s in enumerate(x)) for x, p in table.items()}
        total = sum(weighted.values())
        law = {x: p / total for x, p in weighted.items()}
        expected = reference.table_conditional(law, [None] * 4, 3)
        np.testing.assert_allclose(got[row].numpy(), expected, atol=1e-12)


def test_impossible_states_are_an_error_unless_asked_for() -> None:
    joint = torch.zeros(2, 2, 2)
    joint[0, 0, 0] = joint[1, 1, 1] = 0.5
    state = torch.tensor([[0, 1, 2], [0, 2, 2]])
    with pytest.raises(ValueError, match="impossible='uniform'"):
        TabularSource(joint)(state)
    relaxed = TabularSource(joint, impossible="uniform")(state)
    assert relaxed[0, 2, :2].exp().tolist() == pytest.approx([0.5, 0.5])
    assert relaxed[1, 1].exp().tolist() == [1.0, 0.0, 0.0]  # the possible row is untouched
    cycle = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    torn = torch.tensor([[0, 3, 1, 3, 3]])  # 0 -> ? -> 1 cannot be; what follows the 1 is certain all the same
    with pytest.raises(ValueError, match="probability zero"):
        MarkovSource(torch.ones(3) / 3, cycle, 5)(torn)
    relaxed = MarkovSource(torch.ones(3) / 3, cycle, 5, impossible="uniform")(torn)
    assert relaxed[0, 1, :3].exp().tolist() == pytest.approx([1 / 3] * 3)
    assert relaxed[0, 3:, :3].exp().argmax(-1).tolist() == [2, 0]
    assert relaxed[0, 3:].exp().max(-1).values.tolist() == [1.0, 1.0]
    copy = CopySource(torch.tensor([0.5, 0.5]), 4)(torch.tensor([[0, 2, 1, 0]]))  # 0 != 1, the other pair is sound
    assert copy[0, 1].exp().tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.long), {}, "sequences of 4 tokens"),
        (torch.zeros(4, dtype=torch.long), {}, "sequences of 4 tokens"),
        (torch.full((1, 4), 4), {}, "tokens must lie in"),
        (torch.full((1, 4), -1), {}, "tokens must lie in"),
        (torch.zeros(1, 4, dtype=torch.long), {"attention_mask": torch.tensor([[1, 1, 1, 0]]).bool()}, "no padding"),
        (torch.zeros(1, 4, dtype=torch.long), {"position_ids": torch.tensor([[0, 1, 0, 1]])}, "one document"),
    ],
)
def test_calls_that_a_source_cannot_answer_are_refused(
    tokens: torch.Tensor, options: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CASES["markov"][0](tokens, **options)


def test_bad_definitions_are_refused() -> None:
    half = torch.tensor([0.5, 0.5])
    with pytest.raises(ValueError, match="equal size"):
        TabularSource(torch.ones(2, 3) / 6)
    with pytest.raises(ValueError, match="sum to 1"):
        TabularSource(torch.ones(2, 2))
    with pytest.raises(ValueError, match="sum to 1"):
        MarkovSource(half, torch.ones(2, 2), 3)
    with pytest.raises(ValueError, match="transition"):
        MarkovSource(half, torch.ones(3, 3) / 3, 3)
    with pytest.raises(ValueError, match="even length"):
        CopySource(half, 5)
    with pytest.raises(ValueError, match="'error' or 'uniform'"):
        CopySource(half, 4, impossible="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sum to 1"):
        CopySource(torch.tensor([1.5, -0.5]), 4)
