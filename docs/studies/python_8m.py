"""The sweep behind the shipped model: `python docs/studies/python_8m.py`; what came out is in `python-8m.md`.

Trains a quarter of the shipped model (192 wide, 4 layers) by its recipe, and with one change at a time, for the same
wall-clock time on one thread each, two runs side by side, and writes `python_8m.jsonl`: one JSON object a run, the
validation NELBO in bits per byte. `--only NAME ...` repeats some; runs that are in the file already are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SMALL = ["--model.hidden_size=192", "--model.num_hidden_layers=4", "--model.num_attention_heads=3"]
VARIANTS: dict[str, list[str]] = {
    "recipe": [],
    "AdamW 0.002": ["--optim.name=adamw", "--optim.lr=0.002", "--optim.muon_lr=null"],
    "AdamW 0.004": ["--optim.name=adamw", "--optim.lr=0.004", "--optim.muon_lr=null"],
    "Muon 0.01": ["--optim.muon_lr=0.01"],
    "vocabulary 2048": ["--tokenizer.vocab_size=2048"],
    "vocabulary 8192": ["--tokenizer.vocab_size=8192"],
    "no corruption warm-up": ["--train.corruption_warmup=0.0"],
    "corruption warm-up over 0.6": ["--train.corruption_warmup=0.6"],
    "256 wide, 2 layers": ["--model.hidden_size=256", "--model.num_hidden_layers=2", "--model.num_attention_heads=4"],
    "8 rows a step": ["--train.global_batch=8"],
}  # fmt: skip


def one_run(name: str, seconds: float, extra: list[str]) -> dict[str, Any]:
    """Train one variant for `seconds` of steps; its line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            f"--config={HERE.parents[1] / 'training' / 'recipes' / 'python_8m.yaml'}",
            f"--output_dir={folder}/run",
        ]
        flags += ["--train.steps=null", f"--train.max_seconds={seconds}", "--train.ema=0.99", "--train.log_every=20"]
        flags += ["--objective.warmup_steps=0", "--train.corruption_warmup=0.27", "--train.measure_peak=false"]
        flags += ["--lr_schedule.warmup_steps=0", "--lr_schedule.warmup_fraction=0.05", "--validation.every=100000"]
        flags += ["--lr_schedule.decay_fraction=0.5", "--checkpoint.every=0", *SMALL, *VARIANTS[name], *extra]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "mdlm.training", *flags]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: {' '.join(command)}\n{done.stderr[-3000:]}")
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    validation = [line for line in lines if line["kind"] == "validation"][-1]
    train = [line for line in lines if line["kind"] == "train"][-1]
    return {
        "variant": name,
        "flags": VARIANTS[name],
        "seconds": seconds,
        "steps": train["step"],
        "bits_per_byte": validation["bits_per_byte"],
        "nats_per_token": validation["nats_per_token"],
        "standard_error": validation["standard_error"],
        "tokens_per_second": train["tokens_per_second"],
    }


def main() -> None:
    """Runs the variants and adds lines to the file; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="training time of a run")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, help="variants to run, though they be in the file")
    parser.add_argument("--output", type=Path, default=HERE / "python_8m.jsonl", help="file to add lines to")
    args, extra = parser.parse_known_args()  # the rest is for mdlm.training
    args.output.touch()
    known = [json.loads(line)["variant"] for line in args.output.read_text(encoding="utf-8").splitlines()]
    names = args.only or [name for name in VARIANTS if name not in known]
    with ThreadPoolExecutor(2) as pool, args.output.open("a", encoding="utf-8") as file:
        for line in pool.map(lambda name: one_run(name, args.seconds, extra), names):
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
