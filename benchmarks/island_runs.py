"""One training run on an emulated slow network: the methods compared, their commands, the curve that comes out.

Every island is one process with one thread in its own namespace. Read next: `slow_network.py`, which runs many.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from network import LINK, Network, address

PORT = 29555
BASE = {
    "data.source": "builtin",
    "data.seq_len": 64,
    "data.validation_rows": 128,
    "tokenizer.vocab_size": 512,
    "model.hidden_size": 192,
    "model.num_hidden_layers": 4,
    "model.num_attention_heads": 3,
    "model.qk_norm": True,
    "train.precision": "fp32",
    "train.measure_peak": False,
    "lr_schedule.kind": "constant",
    "checkpoint.every": 0,
}
ROWS = 8
"""Rows of 64 tokens per island and step."""
PARAMETERS = 1.87e6


@dataclass(frozen=True)
class Method:
    """One way to train on several islands."""

    options: Mapping[str, Any]
    bits: float
    """Bits per parameter on the wire in one exchange, about; for the estimate of the duration only."""
    every: int = 1
    """Steps between two exchanges of a parameter."""
    overlapped: bool = False
    """Whether training goes on during an exchange."""
    one_world: bool = True
    """All islands in one process group (DDP); else one launch per island."""


_GRADIENTS = {"outer.preset": "custom", "outer.engine": "gradients", "outer.every": 1}
_DILOCO = {"outer.preset": "diloco", "outer.every": 20}
_STREAMING = {
    "outer.preset": "streaming",
    "outer.every": 20,
    "outer.fragments": 4,
    "outer.tau": 2,
    "outer.lr": 0.7,
    "outer.compress.codec": "int4",
}
METHODS: dict[str, Method] = {
    "ddp": Method({}, bits=32),
    "ddp_bf16": Method({**_GRADIENTS, "outer.compress.codec": "bf16"}, bits=16),
    "powersgd": Method({"outer.preset": "powersgd"}, bits=3),
    "loco": Method({"outer.preset": "loco"}, bits=4.25),
    "diloco": Method(_DILOCO, bits=32, every=20, one_world=False),
    "diloco_int8": Method({**_DILOCO, "outer.compress.codec": "int8"}, bits=8.25, every=20, one_world=False),
    "streaming_int4": Method(_STREAMING, bits=4.25, every=20, overlapped=True, one_world=False),
    "muloco_int4": Method(
        {**_STREAMING, "optim.name": "muon", "outer.momentum": 0.6},
        bits=4.25,
        every=20,
        overlapped=True,
        one_world=False,
    ),
}
"""Name -> options. The outer options are the presets', with rounds short enough for runs of a few hundred steps."""
BASELINES = ("ddp", "ddp_bf16")
"""What speed-ups are measured against; the first gives the target."""


@dataclass(frozen=True)
class Case:
    """One run."""

    islands: int
    mbit: float | None
    method: str
    lr: float
    seed: int
    steps: int
    target: float | None

    @property
    def key(self) -> str:
        """What a run is recognised by; the target is not part of it."""
        rate = "unshaped" if self.mbit is None else f"{self.mbit:g}mbit"
        return f"{self.islands}x-{rate}-{self.method}-lr{self.lr:g}-seed{self.seed}-{self.steps}"


def arguments(options: Mapping[str, Any]) -> list[str]:
    """The command line of one training process."""
    return [f"--{name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in options.items()]


def commands(case: Case, start: Path, folder: Path, every: int) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Command and environment of every island's process; validation every `every` steps."""
    method = METHODS[case.method]
    for island in range(case.islands):
        options = {
            **{name: v for name, v in BASE.items() if not name.startswith(("model.", "tokenizer."))},
            "model.init_from": start,
            "output_dir": folder / "run",
            "train.global_batch": ROWS * case.islands,
            "train.steps": case.steps,
            "train.log_every": every,
            "validation.every": every,
            "optim.lr": case.lr,
            "seed": case.seed,
            **method.options,
        }
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LINK, "TP_SOCKET_IFNAME": LINK}
        if not method.one_world:
            options |= {
                "outer.rendezvous": f"{address(0)}:{PORT}",
                "outer.island": island,
                "outer.islands": case.islands,
            }
        else:
            environment |= {"RANK": str(island), "LOCAL_RANK": "0", "WORLD_SIZE": str(case.islands)}
            environment |= {"MASTER_ADDR": address(0), "MASTER_PORT": str(PORT)}
        yield [sys.executable, "-m", "mdlm.training", *arguments(options)], environment


def follow(path: Path, alive: Callable[[], bool]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Records of a metrics file as they are written, each with the moment it was seen; ends when nobody is `alive`."""
    seen = 0
    while True:
        last = not alive()
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
        for line in lines[seen:]:
            yield time.monotonic(), json.loads(line)
        seen = len(lines)
        if last:
            return
        time.sleep(0.01)


def measure(case: Case, start: Path, folder: Path, every: int) -> dict[str, Any]:
    """Makes one run on a network of its own. Raises RuntimeError with the end of the log if a process fails.

    Returns `curve`: [step, seconds without validations, MB sent by island 0, validation nats per token] at every
    validation, counted from the moment before the first step; and what is needed to judge it. A message that is under
    way while islands validate gets that time for nothing: at most one exchange per validation.
    """
    one_world = METHODS[case.method].one_world
    with Network(case.islands, case.mbit) as network:
        rates = network.verified()
        folder.mkdir(parents=True, exist_ok=True)
        logs = [(folder / f"{i}.log").open("w") for i in range(case.islands)]
        processes = [
            network.start(i, command, environment, log)
            for i, ((command, environment), log) in enumerate(zip(commands(case, start, folder, every), logs))
        ]
        curve: list[list[float]] = []
        clock = sent = 0.0
        reached = False
        for moment, record in follow(
            folder / "run" / "metrics.jsonl", lambda: all(p.poll() is None for p in processes)
        ):
            if record["kind"] == "start":
                resumed, before = moment, network.sent_bytes(0)
            elif record["kind"] == "train":
                clock += moment - resumed
                sent, before = sent + network.sent_bytes(0) - before, network.sent_bytes(0)
            elif record["kind"] == "validation":
                if one_world:  # whose validation is shared out, and is not to be counted
                    before = network.sent_bytes(0)
                resumed = moment
                curve.append([record["step"], clock, sent / 1e6, record["nats_per_token"]])
                reached = case.target is not None and record["nats_per_token"] <= case.target
                if reached or record["step"] == case.steps:
                    break
        if not reached:
            for island, process in enumerate(processes):
                if process.wait(timeout=120):
                    text = (folder / f"{island}.log").read_text()
                    raise RuntimeError(f"{case.key}: island {island} failed:\n{text[-3000:]}")
        network.stop()
        for log in logs:
            log.close()
    return {"curve": curve, "measured_mbit": rates, "load": os.getloadavg()[0]}


def prepare(folder: Path, steps: int) -> Path:
    """The common start: a checkpoint that one process trained alone, made once and kept in `folder`."""
    done = folder / f"checkpoint-{steps}"
    if not done.is_dir():
        options = {
            **BASE,
            "output_dir": folder,
            "overwrite": True,
            "train.global_batch": 4 * ROWS,
            "train.steps": steps,
            "train.log_every": 50,
            "train.corruption_warmup": 0.5,
            "validation.every": steps,
            "optim.name": "muon",
            "optim.lr": 4e-3,
            "optim.muon_lr": 0.02,
            "lr_schedule.warmup_fraction": 0.05,
        }
        subprocess.run([sys.executable, "-m", "mdlm.training", *arguments(options)], check=True)
    return done
