"""Speed against plain code, in one run: `python -m mdlm.eval.speed train-step | logits-at | processes | imports`.

On a shared machine absolute numbers swing threefold, so every measurement is a ratio: the two candidates take turns,
round after round, and their median times are compared. One JSON object per line, with machine, versions and commit.
The plain loop is what one would write first: the same architecture, the head on all rows, float32 loss on all rows.
Read next: `mdlm/objective.py`, whose loss is the fast path.
"""

from __future__ import annotations

import json
import os
import platform
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

    def __init__(self, config: MDLMConfig, batch: int, seq: int, compile: bool) -> None:
        torch.manual_seed(0)
        self.config, self.batch, self.seq = config, batch, seq
        self.model = MDLMForMaskedLM(config).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.objective = Objective(global_batch=batch, seed=0, mask_token_id=MASK, num_tokens=config.num_tokens)
        self.prepare(compile)

    def prepare(self, compile: bool) -> None:
        raise NotImplementedError

    def loss(self, number: int) -> Tensor:
        raise NotImplementedError

    def data(self, number: int) -> Batch:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(3, self.config.vocab_size, (self.batch, self.seq), generator=generator)
        return Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), torch.arange(self.batch) + number * self.batch)

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

    def _all_rows(self, noisy: Tensor, clean: Tensor, weight: Tensor) -> Tensor:
        logits = self.model(input_ids=noisy).logits.float()
        banned = torch.arange(logits.shape[-1]) == MASK
        log_probs = logits.masked_fill(banned, -1e9).log_softmax(-1)
        nll = -log_probs.gather(-1, clean[..., None])[..., 0]
        return (nll * weight).sum() / clean.numel()

    def loss(self, number: int) -> Tensor:
        clean = self.data(number).input_ids
        generator = torch.Generator().manual_seed(number)
        t = torch.rand(self.batch, 1, generator=generator) * 0.999 + 0.001
        masked = torch.rand(clean.shape, generator=generator) < t
        noisy = torch.where(masked, MASK, clean)
        return self.all_rows(noisy, clean, masked / t)


def train_step(
    vocab: int = 8192,
    layers: int = 6,
    width: int = 256,
    batch: int = 16,
    seq: int = 256,
    rounds: int = 12,
    compile: bool = True,
    burst: int = 3,
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
    """
    config = _config(vocab, layers, width, seq)
    candidates = {"plain": _Plain(config, batch, seq, compile), "ours": _Ours(config, batch, seq, compile)}
    peaks = [matmul_peak(torch.device("cpu"), torch.bfloat16)]
    seconds = alternate({name: bench.step for name, bench in candidates.items()}, rounds, burst=burst)
    peaks.append(matmul_peak(torch.device("cpu"), torch.bfloat16))
    tokens, peak = batch * seq, max(peaks)
    useful = train_flops_per_token(config, seq, head_share=0.5) * tokens
    return {
        "measurement": "train-step",
        "vocab": vocab,
        "layers": layers,
        "width": width,
        "batch": batch,
        "seq": seq,
        "compiled": compile,
        "tokens_per_s": {name: tokens / s for name, s in seconds.items()},
        "ratio": seconds["plain"] / seconds["ours"],
        "mfu": useful / seconds["ours"] / peak,
        "matmul_peak_flops": peak,
    }


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
        return lambda _: _run([sys.executable, *arguments])

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


def _run(arguments: list[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(arguments, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "train-step": train_step,
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
