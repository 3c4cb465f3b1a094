"""Islands for real: processes under `accelerate launch`, a launch per island, one killed, stopped, resumed."""

from __future__ import annotations

import ast
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import arguments, assert_same, records, tensors, write_texts

from mdlm.training.outer_config import PRESETS

WORKER = Path(__file__).with_name("island_worker.py")
LAUNCH = [
    sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=4", "--num_machines=1",
    "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0",
]  # fmt: skip
ROUNDS: dict[str, Any] = {
    "outer__preset": "diloco",
    "outer__islands": 2,
    "outer__every": 3,
    "outer__start_step": 2,
    "data__packing": "documents",
    "train__ema": 0.9,
    "train__micro_batch": 1,
    "checkpoint__every": 4,
    "checkpoint__keep_last": 5,
    "validation__every": 4,
}
"""Steps 0 and 1 are shared; exchanges land after 5 and 8; checkpoint 4 lies within a round."""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def plan(options: list[str], port: int | None = None, **rest: Any) -> dict[str, Any]:
    return {"options": options, "port": port, "accidents": [], "sgd": False, "fsdp": False, **rest}


def start(command: list[str], **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def reports(folder: Path, process: int) -> dict[int, dict[str, Any]]:
    return {r["run"]: r for r in map(json.loads, (folder / f"{process}.jsonl").read_text().splitlines())}


def model_weights(checkpoint: Path) -> dict[str, Any]:
    return {k: t for k, t in tensors(checkpoint).items() if k.startswith("model.safetensors")}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def launched(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several runs of one launch of four processes: two islands of two, and the identities with four islands."""
    folder = tmp_path_factory.mktemp("launched")
    averaging = {"outer__preset": "local_sgd", "outer__islands": 4, "outer__every": 1}
    same = {"optim__lr": 0.05, "optim__clip_norm": None}
    runs = [
        arguments(texts, folder / "straight", **ROUNDS),
        arguments(texts, folder / "resumed", resume=folder / "straight" / "checkpoint-4", **ROUNDS),
        arguments(texts, folder / "sharded", **{**ROUNDS, "checkpoint__every": 0}),
        arguments(texts, folder / "averaging", **averaging, **same),
        arguments(texts, folder / "parallel", **same),
        arguments(texts, folder / "accidents", outer__preset="diloco", outer__islands=4, outer__every=4),
    ]
    plans = [
        plan(options, port, fsdp=number == 2, sgd=number in (3, 4))
        for number, (options, port) in enumerate(zip(runs, free_ports(len(runs))))
    ]
    plans[5]["accidents"] = [["overflow", 1, 2], ["poison", 3, 3]]
    (folder / "plan.json").write_text(json.dumps(plans))
    process = start([*LAUNCH, str(WORKER), str(folder / "plan.json"), str(folder)])
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    for number in range(4):
        for report in reports(folder, number).values():
            assert report["error"] is None, report["error"]
    return folder


def test_islands_hold_the_same_bits_after_every_outer_step(launched: Path) -> None:
    """Of replicas all four processes, of shards those with the same rank within their island."""
    everybody = [reports(launched, process) for process in range(4)]
    replicas = [r[0]["hashes"] for r in everybody]
    assert list(replicas[0]) == ["5", "8"]
    assert replicas.count(replicas[0]) == 4
    shards = [r[2]["hashes"] for r in everybody]
    assert list(shards[0]) == ["5", "8"]
    assert shards[0] == shards[2]
    assert shards[1] == shards[3]
    assert shards[0] != shards[1]


def test_sharded_islands_equal_replicated_ones(launched: Path) -> None:
    replicas, shards = (model_weights(launched / name / "checkpoint-8") for name in ("straight", "sharded"))
    assert replicas.keys() == shards.keys()
    assert max((replicas[name] - shards[name]).abs().max() for name in replicas) < 1e-5


@pytest.mark.parametrize("island", ["", "island-1"])
def test_resuming_in_mid_round_changes_no_bit(launched: Path, island: str) -> None:
    assert_same(launched / "straight" / island / "checkpoint-8", launched / "resumed" / island / "checkpoint-8")


def test_islands_train_apart_in_mid_round_and_meet_at_the_end(launched: Path) -> None:
    one, two = (tensors(launched / "straight" / island / "checkpoint-4") for island in ("", "island-1"))
    raw = [name for name in one if name.startswith("train_state/model")]
    assert any((one[name] != two[name]).any() for name in raw)
    assert all((one[name] == two[name]).all() for name in model_weights(launched / "straight" / "checkpoint-4"))


def test_no_collective_crosses_islands_outside_the_outer_step(launched: Path) -> None:
    """Counted per process group by torch itself; the first two steps are shared by design."""
    for process in range(4):
        for run in (0, 2):
            steps = reports(launched, process)[run]["collectives"]
            worlds = set()
            for number, (before, after) in steps.items():
                busy = [ast.literal_eval(name[: name.index("]") + 1]) for name in after if after[name] > before[name]]
                worlds |= {count for name, count in after.items() if name.startswith("[0, 1, 2, 3]")}
                assert busy, "an island's own collectives are counted"
                crossing = [members for members in busy if {m // 2 for m in members} != {process // 2}]
                assert bool(crossing) == (int(number) <= 2), (number, crossing)
            assert len(worlds) == 1, "between the first step and the last the whole launch never met"


def test_exchanging_every_step_with_sgd_inside_is_data_parallel_training(launched: Path) -> None:
    """Outer learning rate 1, no momentum: the mean of the islands' weights after one step each."""
    averaged, parallel = (model_weights(launched / name / "checkpoint-8") for name in ("averaging", "parallel"))
    assert max((averaged[name] - parallel[name]).abs().max() for name in parallel) < 1e-6
    start = records(launched / "parallel", "train")[0]["loss"]
    assert records(launched / "parallel", "train")[-1]["loss"] < start - 0.05, "something was learnt"


def test_a_step_skipped_on_one_island_neither_stops_nor_shifts_the_others(launched: Path) -> None:
    """An overflow on island 1: its step counts as attempted, so all islands still exchange after steps 4 and 8."""
    everybody = [reports(launched, process)[5] for process in range(4)]
    assert [r["skipped"] for r in everybody] == [0, 1, 0, 0]
    assert all(list(r["hashes"]) == ["4", "8"] for r in everybody)
    assert [r["hashes"] for r in everybody].count(everybody[0]["hashes"]) == 4


def test_weights_that_are_not_finite_leave_the_round_and_are_reported(launched: Path) -> None:
    """Island 3's at the first exchange; it goes on from the mean of the others, and is heard again in the second."""
    for island in ("", "island-1", "island-2", "island-3"):
        contributors = [r["contributors"] for r in records(launched / "accidents" / island, "outer")]
        assert contributors == [[0, 1, 2], [0, 1, 2, 3]]
        (event,) = records(launched / "accidents" / island, "event")
        assert "island(s) [3] left out" in event["text"]


def test_what_is_reported_of_an_exchange(launched: Path) -> None:
    """Bytes: deltas of float32 to one other island, once each way, and a few numbers; a dense step sends as much."""
    values = sum(t.numel() for t in model_weights(launched / "straight" / "checkpoint-8").values())
    first, second = records(launched / "straight", "outer")
    assert (first["step"], first["staleness"], first["contributors"]) == (5, 0, [0, 1])
    assert first["bytes_sent"] == pytest.approx(4 * values, rel=0.01)
    assert second["bytes_total"] == pytest.approx(4 * 4 * values, rel=0.02)
    assert second["bytes_per_token"] == second["bytes_total"] / (8 * 8 * 24 / 2)
    assert 0 < first["cosine_between_islands"] < first["cosine_to_merged"] < 1
    assert first["merged_norm"] < first["pseudo_gradient_norm"]
    assert first["consensus_distance"] > 0
    assert first["exposed_seconds"] > 0
    both = [records(launched / "straight" / island, "outer")[0] for island in ("", "island-1")]
    assert both[0]["merged_norm"] == both[1]["merged_norm"]
    assert both[0]["pseudo_gradient_norm"] != both[1]["pseudo_gradient_norm"]


def test_validation_sees_the_anchors(launched: Path) -> None:
    """All islands report the same value in mid-round, where their own weights differ."""
    one, two = ([r["nats_per_token"] for r in records(launched / "straight" / island, "validation")]
                for island in ("", "island-1"))  # fmt: skip
    assert one == two
    assert len(one) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_preset_between_islands_trains_and_resumes_in_mid_round(texts: Path, tmp_path: Path) -> None:
    """Two islands in one launch; rounds of 4 steps; checkpoint 6 lies in the second, with what is in flight by then."""
    presets = [name for name, config in PRESETS.items() if config.engine == "islands"]
    runs: list[list[str]] = []
    for preset in presets:
        own = {"outer__preset": preset, "outer__islands": 2, "outer__every": 4, "checkpoint__keep_last": 9}
        own |= {"outer__fragments": 2} if PRESETS[preset].fragments > 1 else {}
        own |= {"checkpoint__every": 6, "train__steps": 12, "validation__every": 12}
        checkpoint = tmp_path / preset / "checkpoint-6"
        runs += [arguments(texts, tmp_path / preset, **own)]
        runs += [arguments(texts, tmp_path / f"{preset}-resumed", resume=checkpoint, **own)]
    (tmp_path / "plan.json").write_text(json.dumps([plan(o, port) for o, port in zip(runs, free_ports(len(runs)))]))
    two = ["--num_processes=2" if argument == "--num_processes=4" else argument for argument in LAUNCH]
    process = start([*two, str(WORKER), str(tmp_path / "plan.json"), str(tmp_path)])
    output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output
    everybody = [reports(tmp_path, process) for process in range(2)]
    for number, preset in enumerate(presets):
        assert [r[2 * number]["error"] for r in everybody] == [None, None]
        one, two_ = (r[2 * number]["hashes"] for r in everybody)
        mixed = PRESETS[preset].alpha > 0 or PRESETS[preset].overlap == "eager"  # (two islands of noloco are one pair)
        assert (one == two_) != mixed, preset
        for island in ("", "island-1"):
            ends = [tmp_path / name / island / "checkpoint-12" for name in (preset, f"{preset}-resumed")]
            assert_same(*ends)
        published = [model_weights(tmp_path / preset / island / "checkpoint-12") for island in ("", "island-1")]
        assert all(torch.equal(published[0][name], published[1][name]) for name in published[0]), preset


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_shards_resume_with_messages_in_flight_and_agree_on_penalties(texts: Path, tmp_path: Path) -> None:
    """FSDP2, 2 x 2 processes: streaming in 4 bits with residuals per shard; EDiT, whose norms are sums over shards."""
    streaming = {
        **ROUNDS, "outer__preset": "streaming", "outer__fragments": 2, "outer__every": 4, "outer__start_step": 1,
        "outer__compress__feedback": "classic", "checkpoint__every": 3, "train__steps": 9,
    }  # fmt: skip
    edit = {**ROUNDS, "outer__preset": "edit", "outer__every": 3, "outer__merge__clip": 0.05}
    runs = [
        arguments(texts, tmp_path / "streaming", **streaming),
        arguments(texts, tmp_path / "resumed", resume=tmp_path / "streaming" / "checkpoint-6", **streaming),
        arguments(texts, tmp_path / "sharded", **edit),
        arguments(texts, tmp_path / "replicated", **edit),
    ]
    plans = [plan(o, port, fsdp=number < 3) for number, (o, port) in enumerate(zip(runs, free_ports(4)))]
    (tmp_path / "plan.json").write_text(json.dumps(plans))
    process = start([*LAUNCH, str(WORKER), str(tmp_path / "plan.json"), str(tmp_path)])
    output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output
    assert [r["error"] for process in range(4) for r in reports(tmp_path, process).values()] == [None] * 16
    for island in ("", "island-1"):
        assert_same(*(tmp_path / name / island / "checkpoint-9" for name in ("streaming", "resumed")))
    shards, replicas = (model_weights(tmp_path / name / "checkpoint-8") for name in ("sharded", "replicated"))
    assert max((shards[name] - replicas[name]).abs().max() for name in replicas) < 2e-6


def _launch_per_island(folder: Path, plans: list[dict[str, Any]], islands: list[int], first: int) -> list[Any]:
    (folder / "plan.json").write_text(json.dumps(plans))
    command = [sys.executable, str(WORKER), str(folder / "plan.json"), str(folder), str(first)]
    return [start(command, ISLAND=str(island)) for island in islands]


@pytest.mark.timeout(900)
def test_a_launch_per_island_killed_stopped_and_resumed(texts: Path, tmp_path: Path) -> None:
    """Three islands, streaming: checkpoint 3 holds messages in flight, with residuals behind them.

    One island is killed in mid-round: the others say so and end. All resume; then one is told to stop, and all stop
    together at the next landing. All resume again, and end bit for bit as if nothing had been.
    """
    ports = free_ports(4)

    def options(output: str, port: int, **more: Any) -> list[str]:
        rounds = {**ROUNDS, "outer__islands": 3, "outer__every": 4, "outer__start_step": 1, "train__steps": 9}
        rounds |= {"outer__preset": "streaming", "outer__fragments": 2, "outer__compress__feedback": "classic"}
        meeting = {"outer__rendezvous": f"127.0.0.1:{port}", "outer__island": "{island}"}
        own = {"train__global_batch": 9, "checkpoint__every": 3, "validation__every": 0}
        return arguments(texts, tmp_path / output, **{**rounds, **meeting, **own, **more})

    plans = [
        plan(options("straight", ports[0])),
        plan(options("broken", ports[1]), accidents=[["kill", 2, 7]]),
        plan(options("broken", ports[2], resume="auto"), accidents=[["terminate", 1, 6]]),
        plan(options("broken", ports[3], resume="auto")),
    ]
    processes = _launch_per_island(tmp_path, plans, [0, 1, 2], 0)
    try:
        output, _ = processes[2].communicate(timeout=280)
        assert processes[2].returncode == -signal.SIGKILL, output
        processes[2] = _launch_per_island(tmp_path, plans, [2], 2)[0]
        for process in processes:
            output, _ = process.communicate(timeout=280)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for island in (0, 1):
        error = reports(tmp_path, island)[1]["error"]
        assert error.startswith("IslandLost: another island did not answer")
        assert "--resume auto" in error
        assert reports(tmp_path, island)[1]["steps"] >= 8, "it could train until it needed the lost one"
    assert [reports(tmp_path, island)[2]["steps"] for island in range(3)] == [8, 8, 8]
    for island in ("", "island-1", "island-2"):
        assert_same(tmp_path / "straight" / island / "checkpoint-9", tmp_path / "broken" / island / "checkpoint-9")
