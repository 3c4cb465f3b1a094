"""Speed against plain code: `python -m mdlm.eval.speed train-step | memory | logits-at | processes | imports`.

On a shared machine absolute numbers swing threefold, so every measurement is a ratio: the two candidates take turns,
round after round, and their median times are compared. One JSON object per line, with machine, versions and commit.
The plain loop is what one would write first: the same architecture, the head on all rows, float32 loss on all rows.
Read next: `mdlm/objective.py`, whose loss is the fast path.
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mdlm
from mdlm.checkpoint import provenance
from mdlm.config import MDLMConfig
from mdlm.data import Batch
from mdlm.flops import matmul_peak, train_flops_per_token
from mdlm.modeling import MDLMForMaskedLM
from mdlm.objective import Objective

Step = Callable[[int], None]
RECIPES = Path(mdlm.__file__).parent / "training" / "recipes"


def machine() -> dict[str, Any]:
    """What the numbers depend on: processor, threads, versions, commit."""
    return {"processor": platform.machine(), "cpus": os.cpu_count(), "threads": torch.get_num_threads(), **provenance()}


def alternate(candidates: dict[str, Step], rounds: int, warmup: int = 5, burst: int = 3) -> dict[str, float]:
    """Median seconds per call of each candidate; they take turns in bursts, so a slow minute hits all alike."""
    number = 0
    for step in candidates.values():
        for _ in range(warmup):
            step(number)
            number += 1
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, step in candidates.items():
            for _ in range(burst):
                start = time.perf_counter()
                step(number)
                seconds[name].append(time.perf_counter() - start)
                number += 1
    return {name: statistics.median(times) for name, times in seconds.items()}


def _config(vocab: int, layers: int, width: int, seq: int) -> MDLMConfig:
    return MDLMConfig(
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        max_position_embeddings=seq,
        mask_token_id=MASK,
        pad_token_id=1,
        eos_token_id=2,
    )


MASK = 0
"""Id of the mask token in the random text."""


class _Bench:
    """One model with its optimizer and a stream of random batches; the subclasses differ in how they get the loss."""

    def __init__(self, config: MDLMConfig, batch: int, seq: int, compile: bool, packed: bool = False) -> None:
        torch.manual_seed(0)
        self.config, self.batch, self.seq = config, batch, seq
        self.model = MDLMForMaskedLM(config).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.objective = Objective(
            global_batch=batch, seed=0, mask_token_id=MASK, num_tokens=config.num_tokens, fused_head=True
        )
        self.packed = packed
        self.prepare(compile)

    def prepare(self, compile: bool) -> None:
        raise NotImplementedError

    def loss(self, number: int) -> Tensor:
        raise NotImplementedError

    def data(self, number: int) -> Batch:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(3, self.config.vocab_size, (self.batch, self.seq), generator=generator)
        rows = torch.arange(self.batch) + number * self.batch
        places = _documents(self.batch, self.seq, generator) if self.packed else None
        return Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), rows, position_ids=places)

    def step(self, number: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(number)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class _Ours(_Bench):
    def prepare(self, compile: bool) -> None:
        if compile:
            self.model.model.compile()

    def loss(self, number: int) -> Tensor:
        noised = self.objective.noise(self.data(number), number)
        terms = self.objective.numerator(self.model, noised)
        return terms.loss / self.objective.denominator(noised)


def _documents(batch: int, seq: int, generator: torch.Generator) -> Tensor:
    """Positions of rows that are packed with documents of 8 to seq/2 tokens, as many short ones as long ones (log)."""
    span = math.log(max(2.0, seq / 16))
    lengths = (8 * (torch.rand(batch, seq // 8 + 1, generator=generator) * span).exp()).long()
    starts = torch.zeros(batch, seq, dtype=torch.bool).index_fill_(1, torch.tensor([0]), True)
    ends = lengths.cumsum(dim=1)
    inside = ends < seq
    starts[torch.arange(batch)[:, None].expand_as(ends)[inside], ends[inside]] = True
    index = torch.arange(seq).expand(batch, seq)
    return index - (index * starts).cummax(dim=1).values


class _AllRows(_Ours):
    """Ours, but with the head on every row, and the masked ones picked afterwards."""

    def loss(self, number: int) -> Tensor:
        noised = self.objective.noise(self.data(number), number)
        logits = self.model(input_ids=noised.input_ids).logits[noised.masked].float()
        logits = logits.index_fill(1, torch.tensor([MASK]), float("-inf"))
        nll = F.cross_entropy(logits, noised.targets[noised.masked], reduction="none")
        return (nll * noised.weight[noised.masked]).sum() / self.objective.denominator(noised)


class _Plain(_Bench):
    """The first loop one would write, compiled as a whole."""

    def prepare(self, compile: bool) -> None:
        self.all_rows = torch.compile(self._all_rows) if compile else self._all_rows

    def _all_rows(self, noisy: Tensor, clean: Tensor, weight: Tensor, places: Tensor | None) -> Tensor:
        logits = self.model(input_ids=noisy, position_ids=places).logits.float()
        banned = torch.arange(logits.shape[-1]) == MASK
        log_probs = logits.masked_fill(banned, -1e9).log_softmax(-1)
        nll = -log_probs.gather(-1, clean[..., None])[..., 0]
        return (nll * weight).sum() / clean.numel()

    def loss(self, number: int) -> Tensor:
        data = self.data(number)
        clean = data.input_ids
        generator = torch.Generator().manual_seed(number)
        t = torch.rand(self.batch, 1, generator=generator) * 0.999 + 0.001
        masked = torch.rand(clean.shape, generator=generator) < t
        noisy = torch.where(masked, MASK, clean)
        return self.all_rows(noisy, clean, masked / t, data.position_ids)


_CANDIDATES: dict[str, type[_Bench]] = {"plain": _Plain, "ours": _Ours}


def train_step(
    vocab: int = 8192,
    layers: int = 6,
    width: int = 256,
    batch: int = 16,
    seq: int = 256,
    rounds: int = 12,
    compile: bool = True,
    burst: int = 3,
    packed: bool = False,
    memory: bool = False,
) -> dict[str, Any]:
    """A whole training step (noise, forward, backward, clipping, AdamW), bf16 autocast, against the plain loop.

    Args:
        vocab: rows of the embedding.
        layers: transformer blocks.
        width: hidden size.
        batch: rows a step.
        seq: tokens a row.
        rounds: turns each candidate takes.
        compile: compile both candidates.
        burst: steps a turn.
        packed: rows hold documents of mixed length, which do not see each other.
        memory: measure the peak memory too, of each candidate in a process of its own.
    """
    config = _config(vocab, layers, width, seq)
    candidates = {name: bench(config, batch, seq, compile, packed) for name, bench in _CANDIDATES.items()}
    peaks = [matmul_peak(torch.device("cpu"), torch.bfloat16)]
    seconds = alternate({name: bench.step for name, bench in candidates.items()}, rounds, burst=burst)
    peaks.append(matmul_peak(torch.device("cpu"), torch.bfloat16))
    tokens, peak = batch * seq, max(peaks)
    useful = train_flops_per_token(config, seq, head_share=0.5) * tokens
    result: dict[str, Any] = {
        "measurement": "train-step",
        "vocab": vocab,
        "layers": layers,
        "width": width,
        "batch": batch,
        "seq": seq,
        "packed": packed,
        "compiled": compile,
        "tokens_per_s": {name: tokens / s for name, s in seconds.items()},
        "ratio": seconds["plain"] / seconds["ours"],
        "mfu": useful / seconds["ours"] / peak,
        "matmul_peak_flops": peak,
    }
    if memory:
        sizes = [f"--{k}={v}" for k, v in dict(vocab=vocab, layers=layers, width=width, batch=batch, seq=seq).items()]
        sizes += [f"--compile={str(compile).lower()}", f"--packed={str(packed).lower()}"]
        peaks_of = {}
        for name in _CANDIDATES:
            command = [sys.executable, "-m", "mdlm.eval.speed", "memory", f"--candidate={name}", *sizes]
            peaks_of[name] = json.loads(_run(command))["peak_bytes"]
        result["peak_bytes"] = peaks_of
        result["memory_ratio"] = peaks_of["ours"] / peaks_of["plain"]
    return result


def memory(
    candidate: str,
    vocab: int = 8192,
    layers: int = 6,
    width: int = 256,
    batch: int = 16,
    seq: int = 256,
    compile: bool = True,
    packed: bool = False,
    steps: int = 4,
) -> dict[str, Any]:
    """Peak resident memory in bytes of a process that only makes training steps, the interpreter and torch included.

    Args:
        candidate: `plain` or `ours`.
        vocab, layers, width, batch, seq, compile, packed: as `train-step`.
        steps: training steps; the first ones hold the compiler too.
    """
    if candidate not in _CANDIDATES:
        raise ValueError(f"unknown candidate {candidate!r}; choose one of: {', '.join(_CANDIDATES)}")
    bench = _CANDIDATES[candidate](_config(vocab, layers, width, seq), batch, seq, compile, packed)
    for number in range(steps):
        bench.step(number)
    peak = _peak_bytes()
    return {"measurement": "memory", "candidate": candidate, "vocab": vocab, "seq": seq, "peak_bytes": peak}


def _peak_bytes() -> int:
    """Most memory this program has held. (`ru_maxrss` would count what its parent held when it started it.)"""
    status = Path("/proc/self/status")
    if status.is_file():
        return 1024 * next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def logits_at(
    vocab: int = 8192,
    layers: int = 6,
    width: int = 256,
    batch: int = 16,
    seq: int = 256,
    rounds: int = 12,
    compile: bool = True,
    burst: int = 3,
) -> dict[str, Any]:
    """The same training step with the head on the masked rows only, against the head on all rows.

    Args: as `train-step`.
    """
    config = _config(vocab, layers, width, seq)
    candidates = {"all_rows": _AllRows(config, batch, seq, compile), "masked_rows": _Ours(config, batch, seq, compile)}
    seconds = alternate({name: bench.step for name, bench in candidates.items()}, rounds, burst=burst)
    return {
        "measurement": "logits-at",
        "vocab": vocab,
        "layers": layers,
        "width": width,
        "compiled": compile,
        "seconds_per_step": seconds,
        "ratio": seconds["masked_rows"] / seconds["all_rows"],
    }


def imports(rounds: int = 5) -> dict[str, Any]:
    """Seconds of `import transformers`, `import mdlm`, and `mdlm --help`, each in a fresh interpreter.

    Args:
        rounds: fresh interpreters for each; medians are reported.
    """
    commands = {
        "import transformers": ["-c", "import transformers"],
        "import mdlm": ["-c", "import mdlm"],
        "mdlm --help": ["-m", "mdlm.cli", "--help"],
    }

    def fresh(arguments: list[str]) -> Step:
        def step(_: int) -> None:
            _run([sys.executable, *arguments])

        return step

    seconds = alternate({name: fresh(a) for name, a in commands.items()}, rounds, warmup=1, burst=1)
    return {"measurement": "imports", "seconds": seconds}


def processes(steps: int = 60, vocab: int = 2048) -> dict[str, Any]:
    """Tokens/s of two gloo processes (one core each) over one process on one core, through `accelerate launch`.

    Args:
        steps: optimizer steps of each run; the first third warms up.
        vocab: vocabulary of the byte-pair encoding trained for the run.
    """
    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, count in (("one", 1), ("two", 2)):
            rates[name] = _launched_rate(Path(folder) / name, count, steps, vocab)
    return {"measurement": "processes", "tokens_per_s": rates, "ratio": rates["two"] / rates["one"]}


def _launched_rate(folder: Path, count: int, steps: int, vocab: int) -> float:
    # Without `--multi_gpu` accelerate starts one process, whatever number is asked for; it needs no GPU.
    kind = ["--multi_gpu"] if count > 1 else ["--cpu"]
    arguments = [sys.executable, "-m", "accelerate.commands.launch", *kind, "--num_processes", str(count)]
    arguments += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "-m", "mdlm.training"]
    arguments += [f"--config={RECIPES / 'demo.yaml'}", f"--output_dir={folder}", f"--train.steps={steps}"]
    arguments += ["--train.max_seconds=null", f"--tokenizer.vocab_size={vocab}", "--train.compile=false"]
    arguments += ["--train.log_every=1", "--validation.every=0", "--preview.every=0"]
    _run(arguments, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [line["tokens_per_second"] for line in lines if line["kind"] == "train"]
    return statistics.median(rates[len(rates) // 3 :])


def _run(arguments: list[str], env: dict[str, str] | None = None) -> str:
    done = subprocess.run(arguments, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "train-step": train_step,
    "memory": memory,
    "logits-at": logits_at,
    "processes": processes,
    "imports": imports,
}


def measure(commands: Mapping[str, Callable[..., dict[str, Any]]], argv: list[str] | None) -> int:
    """Run the measurement that `argv` names and print its JSON line."""
    from jsonargparse import auto_cli

    result = auto_cli(dict(commands), args=argv, as_positional=False)
    print(json.dumps({**result, "machine": machine()}))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry of `python -m mdlm.eval.speed`."""
    return measure(COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
