"""Islands that come and go under torchft: three real processes, kill -9 of one in mid-round, its return."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from simulated_islands import Link, Network, on_islands
from toy_islands import Toy, flat, quadratic, quadratic_
from training_runs import arguments, records, state, tensors, write_texts

from mdlm.training import elastic
from mdlm.training.elastic import Quorums
from mdlm.training.exchange import Alone
from mdlm.training.outer import OuterStep
from mdlm.training.outer_config import OuterConfig
from mdlm.training.outer_optim import restore

WORKER = Path(__file__).with_name("train_worker.py")
needs_torchft = pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed")


def test_a_bystander_ends_where_those_are_who_took_part() -> None:
    """It takes over anchors, momentum and rounds in mid-exchange, sends nothing, and applies the result."""
    config = OuterConfig(every=2, fragments=2)
    model, other = Toy(), Toy(3)
    old, new = OuterStep(model, config, Alone()), OuterStep(other, config, Alone())
    for n in range(1, 6):
        quadratic_(model, 0, n)
        old.step(n)
    quadratic_(model, 0, 6)
    old.launch(6)
    (flight,) = old._flights[1]
    saved = old.state_dict()
    new.continue_from(saved["anchors"], saved["rounds"], saved["last"])
    for optimizer, theirs in zip(new.optimizers, saved["optimizers"]):
        restore(optimizer, theirs)
    nothing = new.bystander(1, flight.message.round)
    assert (nothing.weight, nothing.round, float(nothing.delta.abs().sum())) == (0.0, flight.message.round, 0.0)
    merged = flight.wait()
    new.witness(1, dataclasses.replace(merged))
    old.land(6)
    for a, b in zip(new.anchors, old.anchors):
        assert torch.equal(a, b)
    assert new.state_dict()["rounds"] == old.state_dict()["rounds"]
    held = flat(other)
    with old.averaged():
        assert (held == flat(model)).all()
    new.step(7)  # takes the next step, as the others do


class Fake:
    """torchft's manager and group as one island sees them: quorum after quorum from a plan, of places on networks."""

    generation = -1

    def __init__(self, plan: list[tuple[Network, int]]) -> None:
        self.plan, self.problem, self.committed = plan, None, []

    def start_quorum(self) -> None:
        self.generation, self.problem = self.generation + 1, None

    def errored(self) -> Exception | None:
        return self.problem

    def report_error(self, error: Exception) -> None:
        self.problem = error

    def should_commit(self) -> bool:
        self.committed.append(self.problem is None)
        return self.committed[-1]

    def participating_rank(self) -> int:
        return self.plan[self.generation][1]

    def num_participants(self) -> int:
        return self.plan[self.generation][0].islands

    def link(self, *_: Any) -> Link:
        network, place = self.plan[self.generation]
        return Link(network, place)


def test_an_island_lost_in_mid_exchange_is_left_out_and_nothing_is_applied_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of islands 4, 6 and 7, number 6 loses its link in the second exchange: the others make it again, as two."""
    config = OuterConfig(engine="torchft", every=2, islands=8)
    three, two = Network(3), Network(2)
    fakes = {
        4: Fake([(three, 0), (three, 0), (two, 0)]),
        6: Fake([(three, 1)] * 2),
        7: Fake([(three, 2)] * 2 + [(two, 1)]),
    }
    monkeypatch.setattr(elastic, "Gloo", lambda group, rank, size, patience: group.link())
    three.victim = 1

    def work(place: int) -> tuple[np.ndarray, list[list[int]], list[str]]:
        number = (4, 6, 7)[place]
        quorums = object.__new__(Quorums)
        vars(quorums).update(
            config=config, island=number, islands=1, members=[], news=[], _patience=None, _generation=-1, _real=None,
            _taken=None, _group=fakes[number], _manager=fakes[number],
        )  # fmt: skip
        model = Toy()
        outer, there = OuterStep(model, config, quorums), []
        try:
            for n in range(1, 5):
                quadratic_(model, place, n)
                if n == 4:
                    three.cut_at = 2  # after the first all-to-all of the second exchange's link: numbers, parts, facts
                there += [list(one.stats.contributors) for one in outer.step(n)]
        except ConnectionError:
            return flat(model), there, ["lost"]
        return flat(model), there, quorums.news

    first, lost, last = on_islands(3, work)
    assert lost[2] == ["lost"]
    assert (first[0] == last[0]).all()
    assert first[1] == [[4, 6, 7], [4, 7]]
    assert sum("lost in mid-exchange" in text for text in first[2]) == 1
    assert fakes[4].committed == [True, False, True]
    a, m = flat(Toy()), np.zeros(88)
    for taking, steps in (([0, 1, 2], (1, 2)), ([0, 2], (3, 4))):
        moved = []
        for place in taking:
            theta = a
            for n in steps:
                theta = quadratic(place, n, theta)
            moved.append(a - theta)
        d = sum(moved) / len(moved)
        m = 0.9 * m + d
        a = a - 0.7 * (d + 0.9 * m)
    assert first[0] == pytest.approx(a, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"overlap": "eager", "lr": 0.1}, "outer.overlap"),
        ({"start_step": 3}, "outer.start_step"),
        ({"preset": "diloco", "islands": 2}, "torchft_lighthouse"),
    ],
    ids=["eager", "dense", "address"],
)
def test_what_torchft_cannot_honour_is_named(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        OuterConfig(engine="torchft", **options)


def wait_for(condition: Any, seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


@needs_torchft
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_of_three_islands_is_killed_in_mid_round_and_comes_back(tmp_path: Path) -> None:
    """The others go on without it; it joins at a round's end with their anchors, optimizers and step."""
    texts = write_texts(tmp_path / "texts")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    go = tmp_path / "go"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "MDLM_TEST_GO": str(go)}
    lighthouse = subprocess.Popen(
        [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", address, "--min_replicas", "1",
         "--join_timeout_ms", "2000", "--heartbeat_timeout_ms", "1000"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def island(i: int, accident: str, at: int, **options: Any) -> subprocess.Popen[bytes]:
        outer = {"outer__preset": "diloco", "outer__engine": "torchft", "outer__every": 4, "outer__islands": 3}
        outer |= {"outer__rendezvous": address, "outer__island": i}
        run = {"train__steps": 400, "train__global_batch": 9, "train__log_every": 1}
        command = arguments(texts, tmp_path / "run", **run, **outer, **options)
        with (tmp_path / f"log-{i}-{accident}").open("w") as log:
            return subprocess.Popen(
                [sys.executable, str(WORKER), accident, str(at), *command], env=variables, stdout=log, stderr=log
            )

    def folder(i: int) -> Path:
        return tmp_path / "run" / f"island-{i}" if i else tmp_path / "run"

    def seen(i: int) -> list[str]:
        if not (folder(i) / "metrics.jsonl").is_file():
            return []
        return [line["text"] for line in records(folder(i), "event")]

    everybody = "islands that exchange from here on: [0, 1, 2]"
    processes = [island(0, "slow", 0), island(1, "slow", 0), island(2, "slow", 0)]
    try:
        wait_for(lambda: any(everybody in text for text in seen(0)))
        processes[2].kill()
        assert processes[2].wait() == -signal.SIGKILL
        wait_for(lambda: any("here on: [0, 1]" in text for text in seen(0)))
        went_on = len(records(folder(0), "outer"))
        wait_for(lambda: len(records(folder(0), "outer")) >= went_on + 2)
        processes[2] = island(2, "slow", 0, overwrite="true")
        wait_for(lambda: sum(everybody in text for text in seen(0)) == 2)
        go.touch()
        for i, process in enumerate(processes):
            assert process.wait(timeout=400) == 0, (tmp_path / f"log-{i}-slow").read_text()
    finally:
        for process in [*processes, lighthouse]:
            process.kill()
            process.wait()
    ends = [folder(i) / "checkpoint-400" for i in range(3)]
    models = [{k: t for k, t in tensors(end).items() if k.startswith("model.safetensors")} for end in ends]
    for model in models[1:]:
        assert all(torch.equal(model[name], value) for name, value in models[0].items())
    lives = [line["step"] for line in records(folder(2), "train")]  # of both: the first one's lines are kept
    (gap,) = [i for i in range(1, len(lives)) if lives[i] != lives[i - 1] + 1]
    back = lives[gap]
    assert back > lives[gap - 1] + 4  # not from the beginning, nor where it was killed
    assert lives[gap:] == list(range(back, 401))
    assert (back - 1) % 4 == 0  # at a round's end
    assert all(state(end)["step"] == 400 for end in ends)
    adam = [t for k, t in tensors(ends[2]).items() if k.endswith("/step")]
    assert {int(t) for t in adam} == {400}  # the inner optimizer came with it
    last = records(folder(0), "outer")[-1]
    assert last["contributors"] == [0, 1, 2]
