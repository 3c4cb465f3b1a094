"""The engines in the training loop: real runs in this process, and a few real processes for what only they can show."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import arguments, assert_same, configure, fresh_accelerate, records, tensors, write_texts

from mdlm.training.config import parse_config
from mdlm.training.loop import train
from mdlm.training.outer_config import OuterConfig, SyncerConfig
from mdlm.training.server import Server

WORKER = Path(__file__).with_name("train_worker.py")
TWO = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
       "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0", "-m", "mdlm.training"]  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    with fresh_accelerate():
        yield


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def launch(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def made(texts: Path, output: Path, **options: Any) -> Path:
    with fresh_accelerate():
        checkpoint = train(configure(texts, output, **options))
    assert checkpoint is not None
    return checkpoint


def test_primal_averaging_in_the_loop_resumes_bit_for_bit_and_publishes_the_average(
    texts: Path, tmp_path: Path
) -> None:
    gpa = {"outer__preset": "gpa", "outer__every": 4, "optim__name": "muon"}
    straight = made(texts, tmp_path / "a", checkpoint__every=3, checkpoint__keep_last=5, validation__every=8, **gpa)
    resumed = made(texts, tmp_path / "b", resume=tmp_path / "a" / "checkpoint-3", validation__every=8, **gpa)
    assert_same(straight, resumed)
    one, two = (records(path, "validation")[-1]["nats_per_token"] for path in (tmp_path / "a", tmp_path / "b"))
    assert one == two
    found = tensors(straight)
    raw = {k.split(":")[1]: t for k, t in found.items() if k.startswith("train_state/model.safetensors")}
    published = {k.split(":")[1]: t for k, t in found.items() if k.startswith("model.safetensors")}
    z = [t for k, t in found.items() if k.startswith("train_state/primal-0")]
    assert sum(t.numel() for t in z) == sum(t.numel() for t in raw.values())  # one buffer more
    assert max(float((published[name] - raw[name]).abs().max()) for name in raw) > 1e-4


def test_primal_averaging_that_forgets_at_once_is_the_plain_run(texts: Path, tmp_path: Path) -> None:
    plain = tensors(made(texts, tmp_path / "plain"))
    found = tensors(made(texts, tmp_path / "gpa", outer__preset="gpa", outer__momentum=0.0))
    for name, value in plain.items():
        if name.startswith("model.safetensors"):
            raw = found[name.replace("model.safetensors", "train_state/model.safetensors")]
            assert torch.equal(raw, value), name
            assert (found[name] - value).abs().max() < 1e-6


SIZES = {"model__hidden_size": 128, "train__steps": 6}
"""Above DDP's first bucket of 1 MB: two buckets."""


def test_gradients_sent_as_they_are_make_it_plain_ddp(texts: Path, tmp_path: Path) -> None:
    exact = {"outer__preset": "custom", "outer__engine": "gradients", "outer__every": 1}
    plain = tensors(made(texts, tmp_path / "plain", **SIZES))
    launch([*TWO, *arguments(texts, tmp_path / "exact", **SIZES, **exact)])
    found = tensors(tmp_path / "exact" / "checkpoint-6")
    models = [name for name in plain if name.startswith("model.safetensors")]
    assert max(float((plain[n] - found[n]).abs().max()) for n in models) < 5e-6
    values = sum(plain[n].numel() for n in models)
    (last,) = records(tmp_path / "exact", "outer")  # of 2 processes each sends half and gets half, twice
    assert 0 < last["bytes_sent"] / (6 * 4 * values) - 1 < 0.01


@pytest.mark.slow
def test_powersgd_with_several_buckets_resumes_bit_for_bit_with_its_residuals(texts: Path, tmp_path: Path) -> None:
    power = {**SIZES, "outer__preset": "powersgd", "outer__compress__rank": 1, "outer__start_step": 1}
    launch([*TWO, *arguments(texts, tmp_path / "whole", checkpoint__every=3, checkpoint__keep_last=5, **power)])
    launch([*TWO, *arguments(texts, tmp_path / "again", resume=tmp_path / "whole" / "checkpoint-3", **power)])
    assert_same(tmp_path / "whole" / "checkpoint-6", tmp_path / "again" / "checkpoint-6")
    values = sum(t.numel() for n, t in tensors(tmp_path / "whole" / "checkpoint-6").items() if n.startswith("model."))
    (last,) = records(tmp_path / "whole", "outer")
    assert last["bytes_sent"] < 0.1 * 6 * 4 * values


def test_an_island_of_a_syncer_is_killed_and_comes_back_while_the_other_goes_on(texts: Path, tmp_path: Path) -> None:
    """Two launches of their own and a syncer; kill -9 in mid-round, later --resume auto of that island alone."""
    server = Server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.serve)
    thread.start()
    address = f"127.0.0.1:{server.address[1]}"

    def island(i: int, kill_at: int, steps: int, **options: Any) -> subprocess.Popen[str]:
        outer = {"outer__preset": "decoupled", "outer__every": 4, "outer__fragments": 2, "outer__islands": 2}
        outer |= {"outer__rendezvous": address, "outer__island": i, "outer__tau": 1, "checkpoint__every": 4}
        command = arguments(texts, tmp_path / "run", train__steps=steps, **outer, **options)
        return subprocess.Popen(
            [sys.executable, str(WORKER), "kill" if kill_at else "none", str(kill_at), *command],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    try:
        first, second = island(0, 0, 40), island(1, 10, 16)
        said = second.communicate(timeout=200)[0]
        assert second.returncode == -signal.SIGKILL, said
        back = island(1, 0, 16, resume="auto")
        for process in (first, back):
            said = process.communicate(timeout=200)[0]
            assert process.returncode == 0, said
    finally:
        server.close()
        thread.join()
    ran = records(tmp_path / "run", "outer")
    assert [line["fragment"] for line in ran][:4] == [0, 1, 0, 1]
    assert sum(line["step"] <= 40 for line in ran) == len(ran) >= 19
    assert {line["step"] for line in records(tmp_path / "run" / "island-1", "train")} == set(range(1, 17))
    assert (tmp_path / "run" / "island-1" / "checkpoint-16").is_dir()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"engine": "gradients"}, "outer.every"),
        ({"engine": "gradients", "every": 1, "islands": 2}, "outer.islands"),
        ({"engine": "gradients", "every": 1, "overlap": "eager"}, "outer.overlap"),
        ({"engine": "primal", "lr": 0.5}, "outer.lr"),
        ({"engine": "primal", "interpolation": 0.0}, "outer.interpolation"),
        ({"interpolation": 0.5}, "no effect"),
        ({"syncer": SyncerConfig(quorum=2)}, "no effect"),
        ({"engine": "syncer", "start_step": 5}, "outer.start_step"),
        ({"engine": "syncer", "overlap": "eager"}, "outer.overlap"),
        ({"engine": "syncer", "preset": "decoupled", "islands": 2}, "outer.rendezvous"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)),
)
def test_options_that_an_engine_cannot_honour_are_named(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        OuterConfig(**options)


def test_engines_that_the_rest_of_the_run_does_not_allow(texts: Path, tmp_path: Path) -> None:
    for reason, given in (
        ("--train.ema", {"outer__preset": "gpa", "train__ema": 0.9}),
        ("fp16", {"outer__preset": "loco", "train__precision": "fp16"}),
        ("2 processes", {"outer__preset": "loco"}),
        ("server", {"outer__preset": "decoupled"}),
    ):
        with fresh_accelerate(), pytest.raises(ValueError, match=reason):
            train(parse_config(arguments(texts, tmp_path / "run", **given)))
