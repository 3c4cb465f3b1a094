"""How much training is lost when one island is late in every round? Islands of a syncer, over real TCP.

    python benchmarks/late_island.py --late 3 --seconds 60

Steps are pauses of a given length, so that it does not matter what else the machine does; exchanges, syncer and network
are real. Printed per method, as JSON lines: steps of all islands together over those of a run in which nobody is late.
`barrier` is the decoupled preset with a quorum of all islands: what waiting for everybody costs.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
import threading
import time

import torch
from jsonargparse import auto_cli
from torch import nn

from mdlm.training.outer import OuterStep
from mdlm.training.outer_config import PRESETS, OuterConfig, SyncerConfig
from mdlm.training.served import Served
from mdlm.training.server import Server

METHODS: dict[str, OuterConfig] = {
    "decoupled": PRESETS["decoupled"],
    "halos": PRESETS["halos"],
    "barrier": dataclasses.replace(PRESETS["decoupled"], syncer=SyncerConfig(quorum=10**6, grace=0.0)),
}


def steps_made(
    config: OuterConfig, islands: int, late: float, seconds: float, step_seconds: float, width: int
) -> list[int]:
    """Steps of every island within `seconds`, the last of which pauses for `late` more seconds in every round."""
    server = Server(("127.0.0.1", 0))
    serving = threading.Thread(target=server.serve)
    serving.start()
    made = [0] * islands
    together = threading.Barrier(islands)
    start = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    ending = time.monotonic()  # set again when all have joined

    def train(island: int) -> None:
        nonlocal ending
        model = copy.deepcopy(start)
        served = Served(config, server.address, island, islands)
        outer = OuterStep(model, config, served)
        served.join(outer.fragments, outer.anchors)
        if together.wait() == 0:
            ending = time.monotonic() + seconds
        together.wait()
        for n in range(1, 10**9):
            time.sleep(step_seconds + (late if island == islands - 1 and n % config.every == 0 else 0.0))
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.999)
            outer.step(n, tokens=1000)
            if time.monotonic() > ending:
                break
            made[island] = n
        served.close()

    threads = [threading.Thread(target=train, args=(i,)) for i in range(islands)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.close()
    serving.join()
    return made


def measure(
    islands: int = 4, late: float = 3.0, seconds: float = 60.0, step_seconds: float = 0.25, width: int = 128
) -> None:
    """Runs every method with and without the late island.

    Args:
        islands: number of islands.
        late: seconds by which the last of them is late in every round.
        seconds: length of each run.
        step_seconds: seconds of a step.
        width: of the model's four square matrices.
    """
    for name, config in METHODS.items():
        usual = steps_made(config, islands, 0.0, seconds, step_seconds, width)
        slow = steps_made(config, islands, late, seconds, step_seconds, width)
        kept = sum(slow) / sum(usual)
        print(json.dumps({"method": name, "every": config.every, "usual": usual, "late": slow, "kept": round(kept, 4)}))
        sys.stdout.flush()


if __name__ == "__main__":
    auto_cli(measure)
