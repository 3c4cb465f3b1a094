"""The syncer under a clock of the test's own: quorum, grace, weights, late islands, trees; float64 oracles."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from mdlm.training.fragments import Piece
from mdlm.training.outer_config import MergeConfig, OuterConfig, SyncerConfig
from mdlm.training.syncer import MARGIN, Push, Syncer

PIECES = (Piece("embed", (3,), 0, 3, True), Piece("layer", (2, 2), 3, 7, False))
START = torch.arange(7, dtype=torch.float32)
PLAIN = OuterConfig(optimizer="sgd", lr=1.0)


def syncer(config: OuterConfig = PLAIN, fragments: int = 1, members: int = 3, **options: float) -> Syncer:
    config = dataclasses.replace(
        config,
        engine="syncer",
        fragments=fragments,
        syncer=SyncerConfig(**options),  # type: ignore[arg-type]
    )
    made = Syncer(config, [PIECES] * fragments, [START] * fragments)
    made.members = set(range(members))
    return made


def delta(seed: int) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=7), dtype=torch.float32)


def test_a_pool_is_merged_when_the_quorum_and_its_grace_are_over() -> None:
    s = syncer(quorum=2, grace=1.5)
    first = s.push(0, Push(0, 0, delta(0), 1.0), 10.0)
    assert s.next_due() is None
    assert s.merge_due(1e6) == []  # alone it would wait for ever
    second = s.push(0, Push(2, 0, delta(2), 1.0), 12.0)
    assert s.next_due() == 13.5
    assert s.merge_due(13.4) == []
    assert s.merge_due(13.5) == [0]
    expected = START.double() - (delta(0).double() + delta(2).double()) / 2
    for ticket in (first, second):
        assert ticket.answer is not None
        assert ticket.answer.anchor.double() == pytest.approx(expected.numpy(), abs=1e-6)
        assert ticket.answer.version == 1
        assert set(ticket.answer.shares) == {0, 2}


def test_nobody_waits_when_all_are_there() -> None:
    s = syncer(quorum=1, grace=100.0)
    for i in range(3):
        assert s.merge_due(float(i)) == []
        s.push(0, Push(i, 0, delta(i), 1.0), float(i))
    assert s.merge_due(2.0) == [0]


def test_without_a_grace_given_the_window_is_the_time_that_the_waiting_can_train() -> None:
    s = syncer(quorum=1)
    s.push(0, Push(0, 0, delta(0), 1.0, slack=10.0), 0.0)
    assert s.next_due() == MARGIN * 10
    s.push(0, Push(1, 0, delta(1), 1.0, slack=2.0), 1.0)
    assert s.next_due() == 1 + MARGIN * 2
    s = syncer(quorum=1)
    s.push(0, Push(0, 0, delta(0), 1.0), 5.0)
    assert s.merge_due(5.0) == [0]


def test_a_late_island_adds_its_own_progress_and_takes_back_nobody_elses() -> None:
    s = syncer(quorum=1, grace=0.0)
    s.push(0, Push(0, 0, delta(0), 1.0), 0.0)
    assert s.merge_due(0.0) == [0]
    late = s.push(0, Push(1, 0, delta(1), 1.0), 3.0)
    assert s.merge_due(3.0) == [0]
    assert late.answer is not None
    expected = START.double() - delta(0).double() - delta(1).double()
    assert late.answer.anchor.double() == pytest.approx(expected.numpy(), abs=1e-6)
    assert (late.answer.version, s.versions) == (2, [2])


def test_a_push_that_is_sent_again_is_merged_once() -> None:
    """An island that lost its connection after sending cannot know whether it arrived."""
    s = syncer(quorum=2, grace=0.0)
    s.push(0, Push(0, 0, delta(0), 1.0), 0.0)
    s.push(0, Push(0, 0, delta(0), 1.0), 0.1)  # still in the pool: replaced, and no quorum of its own
    assert s.merge_due(0.2) == []
    s.push(0, Push(1, 0, delta(1), 1.0), 0.3)
    assert s.merge_due(0.3) == [0]
    again = s.push(0, Push(0, 0, delta(0), 1.0), 0.4)
    assert again.answer is not None
    assert torch.equal(again.answer.anchor, s.anchors[0])
    assert s.next_due() is None


def test_a_lost_island_does_not_stop_the_others() -> None:
    s = syncer(quorum=3, grace=0.0)
    s.push(0, Push(0, 0, delta(0), 1.0), 0.0)
    s.push(0, Push(1, 0, delta(1), 1.0), 1.0)
    assert s.merge_due(50.0) == []
    s.members.discard(2)
    assert s.merge_due(51.0) == [0]


def test_weights_radial_merge_and_nesterov_follow_the_formula() -> None:
    """Embeddings: weighted mean; others: mean length times mean direction; then m = mu m + v, a = a - lr (v + mu m)."""
    config = OuterConfig(lr=0.7, momentum=0.9, merge=MergeConfig(rule="radial"))
    s = syncer(config, quorum=3)
    anchor, momentum = START.double().numpy(), np.zeros(7)
    for n in range(4):
        weights = np.array([1.0 + n, 2.5, 0.25])
        deltas = [delta(10 * n + i).double().numpy() for i in range(3)]
        for i in range(3):
            s.push(0, Push(i, n, delta(10 * n + i), weights[i]), float(n))
        assert s.merge_due(float(n)) == [0]
        w = weights / weights.sum()
        merged = sum(wi * d for wi, d in zip(w, deltas))
        lengths = [np.linalg.norm(d[3:]) for d in deltas]
        direction = sum(wi * d[3:] / length for wi, d, length in zip(w, deltas, lengths))
        merged[3:] = np.dot(w, lengths) * direction / np.linalg.norm(direction)
        momentum = 0.9 * momentum + merged
        anchor = anchor - 0.7 * (merged + 0.9 * momentum)
        assert s.anchors[0].double().numpy() == pytest.approx(anchor, abs=1e-4)


def test_a_push_that_is_not_finite_is_left_out_and_its_island_still_answered() -> None:
    s = syncer(quorum=2, grace=0.0)
    bad = delta(1)
    bad[2] = torch.nan
    s.push(0, Push(0, 0, delta(0), 1.0), 0.0)
    ticket = s.push(0, Push(1, 0, bad, 1.0), 0.0)
    s.merge_due(0.0)
    assert ticket.answer is not None
    assert (ticket.answer.shares[0], ticket.answer.shares[1]) == (1.0, 0.0)
    assert ticket.answer.anchor.double() == pytest.approx((START.double() - delta(0).double()).numpy(), abs=1e-6)
    s.push(0, Push(0, 1, bad, 1.0), 1.0)
    s.push(0, Push(1, 1, bad, 1.0), 1.0)
    s.merge_due(1.0)
    assert torch.equal(s.anchors[0], ticket.answer.anchor)


def test_fragments_have_pools_and_momenta_of_their_own() -> None:
    s = syncer(OuterConfig(lr=1.0, momentum=0.5), fragments=2, quorum=1, grace=0.0)
    s.push(0, Push(0, 0, delta(0), 1.0), 0.0)
    s.merge_due(0.0)
    assert torch.equal(s.anchors[1], START)
    s.push(1, Push(0, 0, delta(1), 1.0), 1.0)
    s.merge_due(1.0)
    assert s.anchors[1].double() == pytest.approx((START.double() - 1.5 * delta(1).double()).numpy(), abs=1e-5)


def test_halos_two_levels_of_delayed_nesterov() -> None:
    """Workers push to a local syncer, which reports every 3 pushes; the answer is mixed in, the way measured anew."""
    upper = syncer(OuterConfig(optimizer="delayed_nesterov", lr=0.3, momentum=0.5, buffer=2), members=1, grace=0.0)
    config = OuterConfig(optimizer="delayed_nesterov", lr=0.8, momentum=0.9, buffer=4)
    lower = syncer(config, members=2, grace=0.0, relay=3, mix=0.25)

    def step(a: np.ndarray, state: dict, g: np.ndarray, lr: float, mu: float, n: int) -> np.ndarray:
        state["d"], state["k"] = state["d"] + g, state["k"] + 1
        if state["k"] % n:
            return a - lr * g / n
        state["m"] = mu * state["m"] + state["d"] / n
        state["d"] = np.zeros(7)
        return a - lr * (mu * state["m"] + g / n)

    low = top = START.double().numpy()
    reference = low
    states = [{"d": np.zeros(7), "m": np.zeros(7), "k": 0} for _ in range(2)]
    for k in range(12):
        g = delta(k).double().numpy()
        lower.push(0, Push(k % 2, k // 2, delta(k), 1.0), float(k))
        assert lower.merge_due(float(k)) == [0]
        low = step(low, states[0], g, 0.8, 0.9, 4)
        sent: list[tuple[int, torch.Tensor]] = []
        lower.relay(lambda f, way, sent=sent: sent.append((f, way)))
        assert len(sent) == ((k + 1) % 3 == 0)
        for f, way in sent:
            assert way.double().numpy() == pytest.approx(reference - low, abs=1e-5)
            ticket = upper.push(f, Push(0, k // 3, way, 1.0), float(k))
            upper.merge_due(float(k))
            top = step(top, states[1], reference - low, 0.3, 0.5, 2)
            assert ticket.answer is not None
            lower.answered(f, ticket.answer.anchor)
            low = 0.75 * low + 0.25 * top
            reference = low
        assert lower.anchors[0].double().numpy() == pytest.approx(low, abs=1e-4)
    assert upper.anchors[0].double().numpy() == pytest.approx(top, abs=1e-4)


def test_one_report_at_a_time_and_it_keeps_serving_meanwhile() -> None:
    s = syncer(members=1, grace=0.0, relay=1, mix=1.0)
    sent: list[torch.Tensor] = []
    for k in range(3):
        s.push(0, Push(0, k, delta(k), 1.0), float(k))
        s.merge_due(float(k))
        s.relay(lambda f, way: sent.append(way))
    assert len(sent) == 1
    assert torch.equal(sent[0], START - (START - delta(0)))
    s.answered(0, START)
    assert torch.equal(s.anchors[0], START)  # mix 1: what it did meanwhile is overwritten
    s.push(0, Push(0, 3, delta(3), 1.0), 4.0)
    s.merge_due(4.0)
    s.relay(lambda f, way: sent.append(way))
    assert sent[1].double() == pytest.approx(delta(3).double().numpy(), abs=1e-6)


def test_a_restarted_syncer_goes_on_bit_for_bit_and_refuses_another_layout() -> None:
    config = OuterConfig(lr=0.7, momentum=0.9)
    one = syncer(config, quorum=1, grace=0.0)
    for k in range(3):
        one.push(0, Push(0, k, delta(k), 1.0), float(k))
        one.merge_due(float(k))
    two = syncer(config, quorum=1, grace=0.0)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for s in (one, two):
        assert s.push(0, Push(0, 2, delta(2), 1.0), 5.0).answer is not None  # known already
        s.push(0, Push(0, 3, delta(3), 1.0), 5.0)
        s.merge_due(5.0)
    assert torch.equal(one.anchors[0], two.anchors[0])
    assert two.versions == [4]
    with pytest.raises(ValueError, match="other fragments"):
        syncer(config, fragments=2).load_state_dict(one.state_dict())


def test_one_worker_three_seconds_late_each_round_costs_the_others_nothing() -> None:
    """Four islands, rounds of 10 s, the last one late by 3 s more each round: steps made within 1000 s, by the clock.

    A barrier would give everybody 13 s per round; here only the late one loses: 1/4 of 3/13 of all steps.
    """
    rounds = {True: [0] * 4, False: [0] * 4}
    for waiting in (True, False):
        s = syncer(members=4, quorum=4 if waiting else 1, grace=0.0)
        free, tickets, now = [10.0, 10.0, 10.0, 13.0], {}, 0.0
        while now < 1000:
            now = min(t for i, t in enumerate(free) if i not in tickets)
            for i in [i for i, t in enumerate(free) if t == now and i not in tickets]:
                tickets[i] = s.push(0, Push(i, rounds[waiting][i], delta(i), 1.0), now)
            s.merge_due(now)
            for i in [i for i, ticket in tickets.items() if ticket.answer is not None]:
                del tickets[i]
                rounds[waiting][i] += 1
                free[i] = now + (13.0 if i == 3 else 10.0)
    assert sum(rounds[False]) > 0.93 * 4 * 100
    assert sum(rounds[True]) < 0.78 * 4 * 100
