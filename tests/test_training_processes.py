"""Real processes, really started, killed and interrupted: one and two of them (gloo), DDP and FSDP2."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import arguments, assert_same, configure, fresh_accelerate, records, state, tensors, write_texts

from mdlm.training.loop import train

WORKER = Path(__file__).with_name("train_worker.py")
LAUNCH = [
    sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
    "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0",
]  # fmt: skip
OPTIONS: dict[str, Any] = {
    "train__ema": 0.9,
    "optim__name": "muon",
    "train__micro_batch": 2,
    "data__packing": "documents",
    "checkpoint__every": 3,
    "checkpoint__keep_last": 5,
    "validation__every": 8,
    "preview__every": 4,
    "preview__length": 6,
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    with fresh_accelerate():
        yield


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **variables}


def launch(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, timeout=240, check=False
    )


def worker(accident: str, at: int, *options: str, start: list[str]) -> list[str]:
    return [*start, str(WORKER), accident, str(at), *options]


@pytest.fixture(scope="module")
def straight(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of one process that made all steps without a break."""
    output = tmp_path_factory.mktemp("straight") / "run"
    with fresh_accelerate():
        checkpoint = train(configure(texts, output, **OPTIONS))
    assert checkpoint is not None
    return checkpoint


def test_one_process_killed_and_resumed_equals_one_that_was_not(texts: Path, tmp_path: Path, straight: Path) -> None:
    output = tmp_path / "run"
    killed = launch(worker("kill", 5, *arguments(texts, output, **OPTIONS), start=[sys.executable]))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-3"]
    with fresh_accelerate():
        resumed = train(configure(texts, output, resume="auto", **OPTIONS))
    assert resumed is not None
    assert_same(straight, resumed)


def test_two_processes_killed_stopped_and_resumed_equal_two_that_were_not(
    texts: Path, tmp_path: Path, straight: Path
) -> None:
    """One chain of launches: a run in one piece, as a user starts it; the same run in three pieces."""
    whole = launch([*LAUNCH, "-m", "mdlm.training", *arguments(texts, tmp_path / "whole", **OPTIONS)])
    assert whole.returncode == 0, whole.stderr
    expected = tmp_path / "whole" / "checkpoint-8"
    assert "2 process(es) x 2 x 2" in whole.stdout

    output = tmp_path / "pieces"
    killed = launch(worker("kill", 5, *arguments(texts, output, **OPTIONS), start=LAUNCH))
    assert killed.returncode != 0
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-3"]

    resume = arguments(texts, output, resume="auto", **OPTIONS)
    stopped = launch(worker("terminate", 3, *resume, start=LAUNCH))
    assert stopped.returncode == 0, stopped.stderr
    assert "stopped by a signal at step 5" in stopped.stdout  # only one of the two processes was told
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-5"]

    finished = launch([*LAUNCH, "-m", "mdlm.training", *resume])
    assert finished.returncode == 0, finished.stderr
    assert_same(expected, output / "checkpoint-8")
    assert [line["step"] for line in records(output, "train")] == list(range(1, 9))

    # the same global batches as one process: equal up to rounding, and so are loss and validation
    assert_same(straight, expected, tolerance=2e-6)
    for kind, key in (("train", "loss"), ("train", "grad_norm"), ("validation", "nats_per_token")):
        one, two = ([line[key] for line in records(path.parent, kind)] for path in (straight, expected))
        assert two == pytest.approx(one, rel=2e-6)


def test_sharded_processes_go_on_from_one_and_back(texts: Path, tmp_path: Path, straight: Path) -> None:
    """FSDP2 on two processes takes over a checkpoint of one, shards it, trains on, and saves whole tensors again."""
    options = {**OPTIONS, "checkpoint__every": 0, "validation__every": 4}
    fsdp = ["--use_fsdp", "--fsdp_version=2", "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP"]
    start = [argument for argument in LAUNCH if argument != "--multi_gpu"] + fsdp
    middle = straight.parent / "checkpoint-3"
    command = arguments(texts, tmp_path / "run", resume=middle, **options)
    sharded = launch(worker("fsdp", 0, *command, start=start))
    assert sharded.returncode == 0, sharded.stderr
    assert_same(straight, tmp_path / "run" / "checkpoint-8", tolerance=5e-6)
    one, two = (records(path, "validation")[-1]["nats_per_token"] for path in (straight.parent, tmp_path / "run"))
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed_equals_one_process_and_resumes(texts: Path, tmp_path: Path) -> None:
    options = {"train__micro_batch": 2, "checkpoint__every": 4, "checkpoint__keep_last": 5}
    with fresh_accelerate():
        expected = train(configure(texts, tmp_path / "one", **options))
    assert expected is not None
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    zero = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
    whole = launch(worker("zero", 0, *arguments(texts, tmp_path / "zero", **options), start=start), **zero)
    assert whole.returncode == 0, whole.stderr
    one, two = ({k: t for k, t in tensors(path).items() if k.startswith("model")} for path in
                (expected, tmp_path / "zero" / "checkpoint-8"))  # fmt: skip
    assert one.keys() == two.keys()
    assert all((one[name] - two[name]).abs().max() < 2e-6 for name in one)
    middle = tmp_path / "zero" / "checkpoint-4"
    command = arguments(texts, tmp_path / "again", resume=middle, **options)
    again = launch(worker("zero", 0, *command, start=start), **zero)
    assert again.returncode == 0, again.stderr
    assert_same(tmp_path / "zero" / "checkpoint-8", tmp_path / "again" / "checkpoint-8")


def test_ctrl_c_saves_on_all_processes(texts: Path, tmp_path: Path) -> None:
    """The terminal sends SIGINT to launcher and workers, and the launcher once more to the workers."""
    output = tmp_path / "run"
    command = [*LAUNCH, "-m", "mdlm.training", *arguments(texts, output, train__steps=100_000)]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_for_steps(process, output)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    step = records(output, "event")[-1]["step"]
    assert state(output / f"checkpoint-{step}")["step"] == step


def wait_for_steps(process: subprocess.Popen[Any], output: Path) -> None:
    deadline = time.monotonic() + 120
    while not (output / "metrics.jsonl").is_file() or not records(output, "train"):
        assert time.monotonic() < deadline, "no step was made"
        assert process.poll() is None
        time.sleep(0.05)


def test_a_process_told_to_stop_finishes_its_step_saves_and_exits_with_0(texts: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    command = arguments(texts, output, train__steps=100_000)
    process = subprocess.Popen(
        [sys.executable, "-m", "mdlm.training", *command], env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        wait_for_steps(process, output)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    step = records(output, "event")[-1]["step"]
    assert f"stopped by a signal at step {step} of 100000" in out
    assert state(output / f"checkpoint-{step}")["step"] == step
    assert all(torch.isfinite(tensor).all() for tensor in tensors(output / f"checkpoint-{step}").values())
