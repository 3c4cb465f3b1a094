"""The training loop, from top to bottom: `train` puts the run together, steps, watches, saves and stops.

One optimizer step uses `global_batch` rows, split over processes and micro-batches. The split changes neither loss nor
gradient: the normalisers of all parts are summed before the first backward, and each part adds its numerator over that
sum. Noise, data order and learning rate are functions of the step, so a run needs no random state to go on exactly.
Read next: `setup.py` (before the first step), `snapshot.py` (saving and loading), `watch.py` (validation, previews).
"""

from __future__ import annotations

import dataclasses
import gc
import math
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mdlm.checkpoint import provenance
from mdlm.corpus import corpus_summary
from mdlm.flops import matmul_peak, train_flops_per_token
from mdlm.objective import NoisedBatch
from mdlm.rng import hash_counters
from mdlm.training.config import TrainConfig, as_dict
from mdlm.training.initial import COMPUTE
from mdlm.training.metrics import Metrics
from mdlm.training.noise_range import check_search, search_is_due, search_range
from mdlm.training.optim import set_learning_rate
from mdlm.training.setup import Run, build_objective, clear_output, set_up, shared_facts
from mdlm.training.snapshot import load, open_stream, save, undone
from mdlm.training.watch import check_preview, introduction, preview, validate

_SAME_KEYPRESS_SECONDS = 3.0


class TrainingDiverged(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


class StopSignals:
    """Within the block SIGTERM and Ctrl-C only set `received`, so that the step in progress can be finished and saved.

    A second Ctrl-C, some seconds later, interrupts at once. (One keypress reaches a worker of `accelerate launch`
    twice: from the terminal and from its launcher.)
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._since = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > _SAME_KEYPRESS_SECONDS:
            raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class StepResult:
    """What one step tells the loop; the same on every process (with islands: of the island)."""

    grad_norm: float
    """L2 norm of the global batch's gradient before clipping."""
    skipped: bool
    """Loss or gradient was not finite: nothing was updated."""
    stop: bool
    """Some process was asked to stop."""
    seconds: float
    masked_tokens: int
    """Supervised in this step, by all processes that share it."""


def train(config: TrainConfig) -> Path | None:
    """`start` and `train_to_end`."""
    return train_to_end(start(config))


def start(config: TrainConfig) -> Run:
    """The run as it stands before its next step: set up, resumed if asked for, its length known, its folder ready.

    Raises ValueError or FileNotFoundError for what the user can put right; nothing has been trained or deleted then.
    """
    run = set_up(config)
    check_preview(run)
    check_search(run)
    if run.resumed_from is not None:
        load(run, run.resumed_from)
    else:
        fix_length(run)
    run.stream = open_stream(run)
    if run.outer is not None:
        run.outer.verify(shared_facts(run))
    clear_output(run)
    return run


def train_to_end(run: Run) -> Path | None:
    """Makes all steps that are left. Returns the last checkpoint written; None if there was nothing left to do.

    Raises `TrainingDiverged` if it breaks down.
    """
    try:
        if run.step >= run.total_steps:
            run.accelerator.print(f"nothing to do: {run.resumed_from} is at step {run.step} of {run.total_steps}")
            return None
        flops, peak = _arithmetic(run)
        config = as_dict(run.config)
        metrics = Metrics(
            run.accelerator, Path(run.config.output_dir), config, run.step, run.total_steps, main=run.team.is_main
        )
        with metrics, StopSignals() as signals:
            metrics.say(introduction(run))
            corpus = {"corpus": corpus_summary()} if run.config.data.source == "builtin" else {}
            metrics.log("start", run.step, {"config": config, **provenance(), "matmul_peak": peak, **corpus})
            return _loop(run, metrics, signals, Rates(flops, peak))
    finally:
        finish(run)


def finish(run: Run) -> None:
    """Stops data workers, closes trackers and leaves the process group. The model can still be used afterwards.

    The DDP wrapper goes first: were it the last to hold the group, its destructor would wait for gloo's threads with
    Python's lock held, which such a thread may be waiting for, and the process would hang at its exit.
    """
    if run.stream is not None:
        run.stream.close()
    if run.outer is not None:
        run.outer.close()
    run.model = run.core
    run.accelerator.free_memory()
    gc.collect()
    run.accelerator.end_training()


def _loop(run: Run, metrics: Metrics, signals: StopSignals, rates: Rates) -> Path:
    every = run.config
    saved: Path | None = None
    if run.step == 0 and every.validation.at_start:
        metrics.log("validation", run.step, validate(run))
    while run.step < run.total_steps:
        if search_is_due(run):
            metrics.log("noise_range", run.step, search_range(run))
        result = optimizer_step(run, stop=signals.received is not None)
        rates.add(run, result)
        metrics.step(run.step)
        last = run.step == run.total_steps
        stop = result.stop if run.outer is None else _outer_step(run, metrics, result, last)
        if run.step % every.train.log_every == 0 or last:
            metrics.log("train", run.step, rates.summary(run))
        check_divergence(run)
        if run.drift is not None and run.step % every.drift.every == 0:
            metrics.log("drift", run.step, run.drift.measure(run.step))
        if (every.checkpoint.every and run.step % every.checkpoint.every == 0) or last or stop:
            saved = save(run)
        if stop:
            break
        if every.validation.every and (run.step % every.validation.every == 0 or last):
            metrics.log("validation", run.step, validate(run))
        if every.preview.every and (run.step % every.preview.every == 0 or last):
            for text in preview(run):
                metrics.log("preview", run.step, {"text": text})
                metrics.say(f"--- step {run.step}\n{text}\n---")
    assert saved is not None, "the last step is always saved"
    if run.step < run.total_steps:
        metrics.log("event", run.step, {"text": "stopped by a signal"})
        metrics.say(f"stopped by a signal at step {run.step} of {run.total_steps}; --resume auto goes on from {saved}")
    return saved


def _outer_step(run: Run, metrics: Metrics, result: StepResult, last: bool) -> bool:
    """What the outer step does after an optimizer step; whether all islands stop now."""
    assert run.outer is not None
    moment = run.outer.after_step(run.step, result.masked_tokens, result.stop, last)
    read = run.step * run.config.train.global_batch * run.config.data.seq_len / run.links.islands
    for record in moment.records:
        metrics.log("outer", run.step, {**record, "bytes_per_token": record["bytes_total"] / read})
    for event in moment.events:
        metrics.log("event", run.step, {"text": event})
        metrics.say(f"step {run.step}: {event}")
    if moment.moved and run.ema is not None:
        with run.outer.published(None):
            run.ema.update(run.core, moment.moved)
    return moment.stop


def optimizer_step(run: Run, stop: bool = False) -> StepResult:
    """Noise, forward and backward of this process's share of a global batch, then one update, the same everywhere.

    If loss or gradient is not finite the update is left out and counted in `run`; under DeepSpeed, which applies it
    before anybody can look, raises `TrainingDiverged`.
    """
    started = time.perf_counter()
    accelerator, config = run.accelerator, run.config.optim
    dense = run.outer is not None and run.outer.dense(run.step)
    noised, shared, denominator = noise_global_batch(run, stop, dense)
    whole, stop_votes = shared[0], shared[1]  # normaliser of all rows of this step; of the island's: `denominator`
    scale = run.team.size / whole  # DDP and FSDP2 average over processes; a sum is wanted
    set_learning_rate(run.optimizer, run.config.lr_schedule.factor(run.step, run.total_steps))
    sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
    for index, micro in enumerate(noised):
        last = index == len(noised) - 1
        accelerator.sync_gradients = last
        if run.config.lora.dropout:
            torch.manual_seed(int(hash_counters(run.config.seed, run.step, index, run.links.rank)))
        with nullcontext() if last else accelerator.no_sync(run.model):
            terms = run.objective.numerator(run.model, micro)
            # 0 * loss is NaN if the loss is not finite, which spoils the gradient on every process: no vote is needed
            accelerator.backward(terms.loss * (scale + 0.0 * terms.loss.detach()).float())
        sums += torch.stack([terms.loss.detach().double() / denominator, terms.nll_sum, terms.masked_count.double()])
    if dense:
        assert run.outer is not None
        run.outer.share_gradients()
    limit = math.inf if config.clip_norm is None else config.clip_norm
    norm = _whole(accelerator.clip_grad_norm_(run.model.parameters(), limit), accelerator.device)
    grad_norm, votes, masked = torch.stack([norm, stop_votes, shared[2]]).tolist()  # the step's one wait
    skipped = not math.isfinite(grad_norm)
    if skipped and run.uses_deepspeed and not run.optimizer.step_was_skipped:
        raise TrainingDiverged(_what_to_do(run, "the gradient was not finite, and DeepSpeed has already applied it"))
    if not skipped or accelerator.scaler is not None:  # an fp16 scaler leaves the update out itself, and must know
        run.optimizer.step()
    run.optimizer.zero_grad()
    if not skipped and run.ema is not None and (run.outer is None or dense):  # later it follows the anchors
        run.ema.update(run.core)
    run.step += 1
    run.skipped_steps += skipped
    run.bad_in_a_row = run.bad_in_a_row + 1 if skipped else 0
    if not skipped:
        run.unlogged.append(sums)
    return StepResult(grad_norm, skipped, votes > 0, time.perf_counter() - started, int(masked))


def noise_global_batch(run: Run, stop: bool, dense: bool) -> tuple[list[NoisedBatch], Tensor, Tensor]:
    """This process's noised micro-batches; (normaliser, stop votes, masked tokens) of the step; the team's normaliser.

    The numbers travel in one small all-reduce, the only one of the step besides the gradients'. In a dense step they
    are those of all islands, else of this one, which trains on its part of the global batch by itself.
    """
    assert run.stream is not None
    noised = [run.objective.noise(next(run.stream), run.step) for _ in range(run.accumulation)]
    denominator = sum((run.objective.denominator(micro) for micro in noised), torch.zeros((), dtype=torch.float64))
    masked = sum((micro.masked.sum() for micro in noised), torch.zeros((), dtype=torch.int64))
    numbers = torch.tensor([float(denominator), float(stop), float(masked)], dtype=torch.float64)
    shared = run.team.all_reduce(numbers.to(run.accelerator.device))
    own = torch.where(shared[0] > 0, shared[0], 1.0)  # nothing maskable: loss 0, not 0 / 0
    if dense:
        assert run.outer is not None
        shared = run.outer.total(shared)
    shared[0] = torch.where(shared[0] > 0, shared[0], 1.0)
    moved = [micro.to(run.accelerator.device, non_blocking=True) for micro in noised]
    return moved, shared, own


def _whole(norm: Tensor | float, device: torch.device) -> Tensor:
    """FSDP2's norm is sharded, DeepSpeed's a number."""
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return torch.as_tensor(whole, dtype=torch.float64, device=device)


def check_divergence(run: Run) -> None:
    """Raises `TrainingDiverged` after `max_bad_steps` skipped steps in a row."""
    limit = run.config.train.max_bad_steps
    if run.bad_in_a_row >= limit:
        what = f"loss or gradient was not finite in {limit} steps in a row, up to step {run.step}; none was applied"
        raise TrainingDiverged(_what_to_do(run, what))


def _what_to_do(run: Run, what: str) -> str:
    return (
        f"{what}. Resume from the last checkpoint with a lower --optim.lr (now {run.config.optim.lr}) or "
        "--optim.clip_norm, a longer --lr_schedule.warmup_steps, or --train.precision fp32; if it breaks at the same "
        "step again, look at the data there"
    )


def fix_length(run: Run) -> None:
    """With `max_seconds`: measures a step, undoes its effect, and sets `total_steps` to what fits, alike everywhere."""
    limit = run.config.train.max_seconds
    if limit is None:
        return
    started = time.perf_counter()
    run.objective = dataclasses.replace(run.objective, warmup_steps=0)  # in which fewer rows would reach the head
    with undone(run):
        run.stream = open_stream(run)
        _seconds_per_step(run, 3)  # compiles and fills caches
        rough = _seconds_per_step(run, 5)
        per_step = _seconds_per_step(run, max(5, math.ceil(0.02 * limit / rough)))
        run.stream.close()
    used = time.perf_counter() - started
    fitting = max(1, int(_largest(run, limit - used) / per_step))
    run.total_steps = fitting if run.config.train.steps is None else min(fitting, run.config.train.steps)
    run.objective = build_objective(run.config, run.core, run.total_steps)


def _seconds_per_step(run: Run, steps: int) -> float:
    return _largest(run, sum(optimizer_step(run).seconds for _ in range(steps)) / steps)


def _largest(run: Run, value: float) -> float:
    """The largest of the processes' values, on every process."""
    shared = torch.tensor(value, dtype=torch.float64, device=run.accelerator.device)
    largest = run.team.all_reduce(shared, largest=True).item()
    return largest if run.outer is None else run.outer.largest(largest)


class Rates:
    """Sums over the steps since the last line of metrics."""

    def __init__(self, flops: Callable[[float], float], peak: float | None) -> None:
        """`flops`: share of masked tokens -> FLOPs per token; `peak`: FLOP/s of all processes together."""
        self._flops, self._peak = flops, peak
        self._steps, self._seconds, self._grad_norm = 0, 0.0, math.nan

    def add(self, run: Run, result: StepResult) -> None:
        """Counts one step."""
        self._steps += 1
        self._seconds += result.seconds
        self._grad_norm = result.grad_norm

    def summary(self, run: Run) -> dict[str, Any]:
        """The metrics since the last call; joins the processes' losses, so every process must call it."""
        good = len(run.unlogged)
        sums = torch.stack(run.unlogged).sum(0) if good else torch.zeros(3, dtype=torch.float64)
        loss, nll, masked = run.team.all_reduce(sums.to(run.accelerator.device)).tolist()
        run.unlogged.clear()
        islands = run.links.islands  # their speeds are taken to be alike: nobody asks across islands
        step_tokens = run.config.train.global_batch * run.config.data.seq_len
        speed = self._steps * step_tokens / self._seconds
        share = masked / (good * step_tokens / islands) if good else 0.0
        eta = (run.total_steps - run.step) * self._seconds / self._steps
        self._steps, self._seconds = 0, 0.0
        return {
            "loss": loss / good if good else math.nan,
            "masked_nll": nll / masked if masked else math.nan,
            "masked_share": share,
            "max_time": run.objective.max_time(run.step - 1),
            "lr": run.optimizer.param_groups[0]["lr"],
            "grad_norm": self._grad_norm,
            "tokens": run.step * step_tokens,
            "tokens_per_second": speed,
            "mfu": None if self._peak is None else speed / islands * self._flops(share) / self._peak,
            "eta_seconds": eta,
            "skipped_steps": run.skipped_steps,
        }


def _arithmetic(run: Run) -> tuple[Callable[[float], float], float | None]:
    """FLOPs per token as a function of the share of masked tokens, and the matmul peak of all processes, measured."""
    config, seq_len = run.core.config, run.config.data.seq_len

    def flops(head_share: float) -> float:
        views = 1 + run.objective.complementary
        return views * train_flops_per_token(config, seq_len, head_share / views)

    frozen = any(not p.requires_grad for p in run.core.parameters())  # whose gradients cost nothing: no honest MFU
    if not run.config.train.measure_peak or frozen:
        return flops, None
    run.team.barrier()  # processes that share a machine measure what is left of it to each
    own = matmul_peak(run.accelerator.device, COMPUTE[run.config.train.precision])
    peak = torch.tensor(own, dtype=torch.float64, device=run.accelerator.device)
    return flops, run.team.all_reduce(peak).item()
