"""Saving a run and going on from it: which part of `Run` is which file of a checkpoint.

A resumed run makes the same steps, bit for bit, as one that never stopped: everything random is a function of the step,
and weights, optimizer, average and data position are saved whole. The number of processes and the micro-batch may
change in between (sums are then rounded in another order); what may not change is in `fingerprint`, and is refused with
a reason. All functions here must be called by every process. Read next: `mdlm/checkpoint.py`, the folder on disk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdlm import checkpoint as ck
from mdlm.adapter import ADAPTER_FOLDER, adapter_weights, check_base, read_adapter, save_adapter
from mdlm.config import MDLMConfig
from mdlm.data import BatchStream, merge_states
from mdlm.training.config import as_dict
from mdlm.training.ema import EMA
from mdlm.training.initial import initial_folder
from mdlm.training.setup import Run, build_objective, fingerprint
from mdlm.training.state import (
    check_same_shapes,
    gather_all,
    named_optimizer_state,
    named_weights,
    restore_optimizer,
    restore_weights,
    shard_all,
)
from mdlm.training.zero import gather_weights

_OPTIMIZER = f"{ck.STATE_FOLDER}/optimizer.safetensors"
_RAW_WEIGHTS = f"{ck.STATE_FOLDER}/model.safetensors"


def save(run: Run) -> Path:
    """Writes `checkpoint-<step>` and deletes what is older than the newest `keep_last`. Returns its folder.

    The main process writes everything; the others help gathering, and add files of their own only through `run.parts`.
    """
    assert run.stream is not None
    folder, keep = Path(run.config.output_dir), run.team.is_main
    if run.uses_deepspeed:
        weights, optimizer = gather_weights(run.core, keep), {}
    else:
        weights = gather_all(saved_weights(run), keep)
        optimizer = gather_all(named_optimizer_state(run.core, run.raw_optimizer), keep)
    published = {**weights, **_published(run, keep)}
    position = merge_states(run.team.gather(run.stream.state_dict()))
    partial = ck.begin_checkpoint(folder, run.step) if keep else ck.partial_path(folder, run.step)
    if run.parts:
        run.team.barrier()  # the folder is there
        for part in run.parts:
            part.save(partial / ck.STATE_FOLDER)
        run.team.barrier()  # everybody has written
    if keep:
        lora, base = run.config.lora, initial_folder(run.config)
        ck.write_model(partial, run.core.config, published if lora.r is None else {}, run.tokenizer)
        if run.base is not None and base is not None:
            save_adapter(partial / ADAPTER_FOLDER, published, lora, base, run.base)
        if optimizer:
            ck.write_tensors(partial / _OPTIMIZER, optimizer)
        if _publishes_others(run):
            ck.write_tensors(partial / _RAW_WEIGHTS, weights)
        ck.commit_checkpoint(partial, _state(run, position))
        ck.prune_checkpoints(folder, _kept(run, folder))
    run.team.barrier()
    return ck.checkpoint_path(folder, run.step)


def _publishes_others(run: Run) -> bool:
    """Whether the weights that are published are not those that training goes on from."""
    return run.ema is not None or run.outer is not None


def _published(run: Run, keep: bool) -> dict[str, Tensor]:
    if run.outer is None:
        return {} if run.ema is None else gather_all(run.ema.average, keep)
    with run.published():
        return {name: tensor.clone() for name, tensor in gather_all(saved_weights(run), keep).items()}


def _kept(run: Run, folder: Path) -> int:
    """How many checkpoints to keep. With islands: back to the newest that all are known to have, at least, since an
    island that is ahead would otherwise delete the only one that they could all resume from."""
    last = run.config.checkpoint.keep_last
    common = None if run.outer is None else run.outer.common_step()
    if common is None:
        return last
    steps = [ck.step_of(path) for path in ck.list_checkpoints(folder)]
    back_to = max((step for step in steps if step < common), default=0)
    return max(last, sum(step >= back_to for step in steps))


def saved_weights(run: Run) -> dict[str, Tensor]:
    """The tensors that a checkpoint of the run holds: all of the model, or those of its adapter."""
    weights = named_weights(run.core)
    return weights if run.config.lora.r is None else adapter_weights(weights)


def _state(run: Run, position: dict[str, Any]) -> dict[str, Any]:
    scaler = run.accelerator.scaler
    return {
        "step": run.step,
        "total_steps": run.total_steps,
        "skipped_steps": run.skipped_steps,
        "bad_in_a_row": run.bad_in_a_row,
        "noise_range": [run.objective.eps, run.objective.t_max],
        "ema_updates": None if run.ema is None else run.ema.updates,
        "scaler": None if scaler is None else scaler.state_dict(),
        "data": position,
        "fingerprint": fingerprint(run.config, run.tokenizer, run.accelerator),
        "config": as_dict(run.config),
        **ck.provenance(),
    }


def load(run: Run, checkpoint: Path) -> None:
    """Brings a freshly set up run to where the checkpoint was made. Raises ValueError if it belongs to another run."""
    state = ck.read_state(checkpoint)
    _check_same_run(run, state, checkpoint)
    if not run.uses_deepspeed:
        _load_tensors(run, state, checkpoint)
    for part in run.parts:
        part.load(checkpoint / ck.STATE_FOLDER)
    if run.accelerator.scaler is not None and state["scaler"] is not None:
        run.accelerator.scaler.load_state_dict(state["scaler"])
    run.step = state["step"]
    run.skipped_steps, run.bad_in_a_row = state["skipped_steps"], state["bad_in_a_row"]
    if run.config.train.max_seconds is not None:
        run.total_steps = state["total_steps"]
        run.objective = build_objective(run.config, run.core, run.total_steps)
    elif run.total_steps != state["total_steps"]:
        run.accelerator.print(
            f"the run is now {run.total_steps} steps long instead of {state['total_steps']}: what is a fraction of it "
            "(learning rate, corruption warm-up) changes from here on"
        )
    if run.config.objective.search_range:
        eps, t_max = state["noise_range"]
        run.objective = dataclasses.replace(run.objective, eps=eps, t_max=t_max)
    run.position = state["data"]


def _load_tensors(run: Run, state: dict[str, Any], checkpoint: Path) -> None:
    if run.config.lora.r is None:
        published = ck.read_model_weights(checkpoint)
    else:
        assert run.base is not None, "an adapter has a base"
        check_base(run.base, checkpoint / ADAPTER_FOLDER, str(run.config.model.init_from))
        published = read_adapter(checkpoint / ADAPTER_FOLDER)
    own = saved_weights(run)
    check_same_shapes(own, published, str(checkpoint))
    raw = ck.read_tensors(checkpoint / _RAW_WEIGHTS) if _publishes_others(run) else published
    restore_weights(own, raw, str(checkpoint))
    restore_optimizer(run.core, run.raw_optimizer, ck.read_tensors(checkpoint / _OPTIMIZER), str(checkpoint))
    if run.ema is not None:
        average = {name: published[name] for name in run.ema.average}
        run.ema.load(shard_all(average, run.ema.average), state["ema_updates"])


def _check_same_run(run: Run, state: dict[str, Any], checkpoint: Path) -> None:
    own, before = fingerprint(run.config, run.tokenizer, run.accelerator), state["fingerprint"]
    changed = [f"{key} was {before.get(key)}, is {own[key]}" for key in own if own[key] != before.get(key)]
    saved = MDLMConfig.from_pretrained(checkpoint).to_dict()
    now = run.core.config.to_dict()
    volatile = {"dtype", "architectures", "transformers_version", "_name_or_path", "use_cache"}
    changed += [
        f"the model's {key} was {saved.get(key)}, is {now.get(key)}"
        for key in sorted(saved.keys() | now.keys())
        if key not in volatile and saved.get(key) != now.get(key)
    ]
    if changed:
        raise ValueError(
            f"--resume: {checkpoint} belongs to another run: {'; '.join(changed)}. Restore these options, or start a "
            f"new run from its weights with --model.init_from {checkpoint}"
        )


def open_stream(run: Run) -> BatchStream:
    """This process's training batches from where the run stands. Raises ValueError if the data is not the same."""
    return run.data.train_batches(
        run.micro_batch,
        rank=run.links.rank,
        world=run.links.world,
        state=run.position,
        global_batch=run.config.train.global_batch,
    )


@contextmanager
def undone(run: Run) -> Iterator[None]:
    """After the block, weights, optimizer, average, scaler and counters are as before it, bit for bit.

    Only for a run that has made no step, whose optimizer is empty.
    """
    assert not run.raw_optimizer.state, "the optimizer has a state already"
    scaler = run.accelerator.scaler
    scale = None if scaler is None else scaler.state_dict()
    weights = [p.detach().clone() for p in run.core.parameters()]
    yield
    with torch.no_grad():
        for p, before in zip(run.core.parameters(), weights, strict=True):
            p.copy_(before)
    run.raw_optimizer.state.clear()
    if run.ema is not None:
        run.ema = EMA(run.core, run.ema.decay)
    if run.outer is not None:
        run.outer.forget()
    if scaler is not None and scale is not None:
        scaler.load_state_dict(scale)
    run.step = run.skipped_steps = run.bad_in_a_row = 0
    run.unlogged.clear()
