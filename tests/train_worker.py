"""A training process for the tests: the real entry point, plus an accident at a given step.

`python train_worker.py kill 5 <options>`: this process is killed (SIGKILL) when it is about to make step 5; `slow 0`: a
step takes 0.2 s longer until the file named in MDLM_TEST_GO is there; `terminate 5`: it sends itself SIGTERM there, on
the last process only; `fsdp 0`: accelerate is made to believe that the CPU is an accelerator, since it offers FSDP2
there only, `zero 0` the same for DeepSpeed; `none 0`: no accident.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from mdlm.training import loop
from mdlm.training.__main__ import main
from mdlm.training.setup import Run


def run() -> int:
    """The exit status of `mdlm.training` with the accident arranged."""
    accident, at, options = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    if accident == "fsdp":
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    if accident == "zero":
        PartialState(cpu=True)
        torch.accelerator.is_available = lambda: True
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # it compiles C++ for a minute
    original = loop.optimizer_step

    def step(run: Run, stop: bool = False) -> loop.StepResult:
        if run.step == at and accident == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if accident == "slow" and not os.path.exists(os.environ["MDLM_TEST_GO"]):
            time.sleep(0.2)
        if run.step == at and accident == "terminate" and run.accelerator.is_last_process:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(run, stop)

    loop.optimizer_step = step
    return main(options)


if __name__ == "__main__":
    sys.exit(run())
