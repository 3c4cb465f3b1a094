"""`python -m mdlm.training.layer_b`: a tiny model trained on a source whose probabilities are known (layer B).

What a strategy does with an oracle (layer A) shows the strategy's own error; what it does with a trained model shows
what is left of that in practice. Samples are written as text, one character per symbol, and trained on by the ordinary
loop. `mdlm eval curves --model OUTPUT --sources [NAME]` then measures, with the source as judge. Run twice, it keeps
what is trained. Read next: `eval/sources_text.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from mdlm.eval.sources import ExactSource
from mdlm.eval.sources_text import as_lines, symbol_tokenizer
from mdlm.eval.sources_zoo import build_source
from mdlm.training.config import TrainConfig, parse_config

SAMPLES_FILE, TOKENIZER_FOLDER = "samples.txt", "tokenizer"


def recipe(
    output: Path, source: ExactSource, steps: int, batch: int, width: int, layers: int, seed: int
) -> TrainConfig:
    """The training run: every sample seen once, no validation (the source itself judges), one checkpoint."""
    options: dict[str, Any] = {
        "output_dir": output,
        "seed": seed,
        "resume": "auto",
        "data.source": output / SAMPLES_FILE,
        "data.format": "lines",
        "data.packing": "none",
        "data.seq_len": source.length + 1,
        "data.validation_fraction": 0.0,
        "tokenizer.path": output / TOKENIZER_FOLDER,
        "model.hidden_size": width,
        "model.num_hidden_layers": layers,
        "model.num_attention_heads": max(1, width // 32),
        "model.qk_norm": "true",
        "objective.masking": "count",
        "train.steps": steps,
        "train.global_batch": batch,
        "train.precision": "fp32",
        "train.ema": 0.99,
        "train.log_every": max(1, steps // 20),
        "train.measure_peak": "false",
        "optim.name": "muon",
        "optim.lr": 4e-3,
        "optim.muon_lr": 0.02,
        "lr_schedule.kind": "wsd",
        "lr_schedule.warmup_fraction": 0.05,
        "lr_schedule.decay_fraction": 0.5,
        "lr_schedule.final": 0.0,
        "validation.every": 0,
        "checkpoint.every": 0,
        "checkpoint.keep_last": 1,
    }
    return parse_config([f"--{name}={value}" for name, value in options.items()])


def layer_b(
    source: str,
    output: str,
    length: int | None = None,
    steps: int = 900,
    batch: int = 64,
    width: int = 96,
    layers: int = 3,
    seed: int = 0,
    source_seed: int = 0,
) -> dict[str, Any]:
    """Train a tiny model on samples of a source; nothing is done where that is finished already.

    Args:
        source: name in `mdlm.eval.sources_zoo.SOURCES`.
        output: folder of the run.
        length: of all sequences; default: the source's own.
        steps: optimizer steps.
        batch: sequences per step; `steps * batch` are drawn.
        width: of the model, a multiple of 32.
        layers: of the model.
        seed: of weights, noise and samples.
        source_seed: of a random source, as in `mdlm eval curves`.

    Raises:
        ValueError: an unknown source, sizes that cannot be, or an output that was made with other settings.
    """
    from mdlm.training.loop import train

    built = build_source(source, length, source_seed)
    if min(steps, batch, layers) < 1 or width < 32 or width % 32:
        raise ValueError(
            f"steps, batch and layers must be at least 1 and width a multiple of 32, got {steps}, {batch}, {layers} "
            f"and {width}"
        )
    folder = Path(output)
    settings = {
        "source": source,
        "length": built.length,
        "steps": steps,
        "batch": batch,
        "width": width,
        "layers": layers,
        "seed": seed,
        "source_seed": source_seed,
    }
    made = folder / "layer_b.json"
    if made.exists() and json.loads(made.read_text(encoding="utf-8")) != settings:
        raise ValueError(f"{folder} holds a model that was trained with other settings; give another --output")
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        drawn = built.sample(steps * batch, torch.Generator().manual_seed(seed))
        (folder / SAMPLES_FILE).write_text("\n".join(as_lines(built, drawn)) + "\n", encoding="utf-8")
        symbol_tokenizer(built).save_pretrained(str(folder / TOKENIZER_FOLDER))
        made.write_text(json.dumps(settings), encoding="utf-8")
    checkpoint = train(recipe(folder, built, steps, batch, width, layers, seed))
    return {"output": output, "checkpoint": None if checkpoint is None else str(checkpoint), **settings}


def main(argv: list[str] | None = None) -> int:
    """Entry of `python -m mdlm.training.layer_b`."""
    from mdlm.command import run_command

    return run_command(layer_b, argv, "mdlm.training.layer_b", lambda record: [json.dumps(record)])


if __name__ == "__main__":
    sys.exit(main())
