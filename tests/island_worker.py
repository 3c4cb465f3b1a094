"""One process of one or several training runs with islands, one after the other, for `test_islands.py`.

`python island_worker.py plan.json report-folder [first]`: the plan is a list of runs, each with `options` (a command
line; `{island}` is filled in), `port` (of this run's process group, or null), `accidents` (of [kind, island, step]:
`kill` and `terminate` before a step, `overflow`: a gradient that is not finite in it, `poison`: weights that are not
finite after it), `sgd` (plain SGD inside), `fsdp`. Runs before number `first` are left out. What each run saw goes
into `report-folder/<process>.jsonl`.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import nn
from training_runs import fresh_accelerate

from mdlm.training import loop, wrap
from mdlm.training.config import OptimConfig, parse_config
from mdlm.training.fragments import local
from mdlm.training.islands import Islands
from mdlm.training.setup import Run


def plain_sgd(core: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """SGD on all parameters, in a group as the loop expects it."""
    groups = [{"params": list(core.parameters()), "base_lr": config.lr, "name": "decay", "algorithm": "sgd"}]
    return torch.optim.SGD(groups, lr=config.lr)


def weights_hash(core: nn.Module) -> str:
    digest = hashlib.sha256()
    for p in core.parameters():
        digest.update(local(p.detach()).contiguous().numpy().data)
    return digest.hexdigest()[:16]


def sequence_numbers() -> dict[str, int]:
    """Collectives so far, per process group of this process, by its members."""
    if not dist.is_initialized():
        return {}
    return {
        f"{dist.get_process_group_ranks(group)} {group.group_name}": group._get_sequence_number_for_group()
        for group in dist.distributed_c10d._world.pg_map
    }


def one_run(number: int, plan: dict[str, Any], island: int) -> dict[str, Any]:
    """Trains; what happened."""
    if plan["port"]:
        os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(plan["port"]), "False"
    os.environ["ACCELERATE_USE_FSDP"] = "true" if plan["fsdp"] else "false"
    if plan["fsdp"]:
        os.environ |= {"FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    original_step, original_after, original_build = loop.optimizer_step, Islands.after_step, wrap.build_optimizer
    report: dict[str, Any] = {"run": number, "hashes": {}, "collectives": {}, "error": None, "steps": 0}

    def step(run: Run, stop: bool = False) -> loop.StepResult:
        here = {kind for kind, island, when in plan["accidents"] if (island, when) == (run.links.island, run.step)}
        for kind, number in (("kill", signal.SIGKILL), ("terminate", signal.SIGTERM)):
            if kind in here:
                os.kill(os.getpid(), number)
        if "overflow" in here:
            parameter = next(run.core.parameters())
            handle = parameter.register_hook(lambda gradient: gradient * float("inf"))
        before = sequence_numbers()
        result = original_step(run, stop or "terminate" in here)
        if "overflow" in here:
            handle.remove()
        if "poison" in here:
            with torch.no_grad():
                next(run.core.parameters()).fill_(float("nan"))
        report["collectives"][run.step] = [before, sequence_numbers()]
        report["steps"], report["skipped"] = run.step, run.skipped_steps
        return result

    def after_step(self: Islands, *arguments: Any) -> Any:
        moment = original_after(self, *arguments)
        if moment.records:
            report["hashes"][arguments[0]] = weights_hash(self.outer.model)
        return moment

    try:
        loop.optimizer_step, Islands.after_step = step, after_step  # type: ignore[method-assign]
        if plan["sgd"]:
            wrap.build_optimizer = plain_sgd  # type: ignore[assignment]
        with fresh_accelerate() if not plan["fsdp"] else fresh_accelerate_after():
            loop.train(parse_config([option.replace("{island}", str(island)) for option in plan["options"]]))
    except (RuntimeError, ValueError) as error:
        report["error"] = f"{type(error).__name__}: {error}"
    finally:
        loop.optimizer_step, Islands.after_step = original_step, original_after  # type: ignore[method-assign]
        wrap.build_optimizer = original_build
        gc.collect()  # what is left of a run that failed hangs up, as at the end of a process
    return report


def fresh_accelerate_after() -> Any:
    """`fresh_accelerate` without forgetting what was arranged before."""
    manager = fresh_accelerate()

    class After:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: Any) -> None:
            with manager:
                pass

    return After()


def main() -> int:
    plans, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    process = int(os.environ.get("RANK", os.environ.get("ISLAND", "0")))
    with (folder / f"{process}.jsonl").open("a") as file:
        for number, plan in enumerate(plans):
            if number >= first:
                file.write(json.dumps(one_run(number, plan, process)) + "\n")
                file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
