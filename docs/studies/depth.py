"""The depth study: `python docs/studies/depth.py`, about five minutes of one core; what came out is in `depth.md`.

Trains a deep, narrow model (`depth.yaml`) once per variant of the block and learning rate, with the same data, noise
and seed, and measures the gradient at the start for several depths. The text is a chain of words (`write_texts`), which
is learned beyond its word frequencies within 200 steps; natural text is not. Writes `depth.jsonl`, one JSON object a
line, and the plots beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from mdlm.config import MDLMConfig
from mdlm.eval.plots import line_plot
from mdlm.modeling import MDLMForMaskedLM
from mdlm.training.config import parse_config
from mdlm.training.loop import TrainingDiverged, train

HERE = Path(__file__).resolve().parent
VARIANTS: dict[str, dict[str, str]] = {
    "pre": {},
    "post": {"norm_placement": "post"},
    "span": {"norm_placement": "span"},
    "pre, sdd": {"linear": "sdd"},
    "post, sdd": {"norm_placement": "post", "linear": "sdd"},
}


WORDS = (
    "the cat sat on a mat and saw one dog run to red house while it was raining over green hills where old men sing of "
    "ships that never came home"
)


def write_texts(folder: Path) -> str:
    """Texts in which a word is followed by the next of `WORDS` with probability 0.9, else by any; their pattern."""
    folder.mkdir()
    draws, words = random.Random(0), WORDS.split()
    for number in range(20):
        place, text = 0, []
        for _ in range(3000):
            place = (place + 1) % len(words) if draws.random() < 0.9 else draws.randrange(len(words))
            text.append(words[place])
        (folder / f"{number}.txt").write_text(" ".join(text), encoding="utf-8")
    return str(folder / "*.txt")


def at_start(variant: str, layers: int, width: int = 64) -> dict[str, Any]:
    """Gradient norm of the first layer over that of the last at the initial weights, for random tokens."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"vocab_size": 64, "hidden_size": width, "num_attention_heads": 2, **VARIANTS[variant]}
    model = MDLMForMaskedLM(MDLMConfig(num_hidden_layers=layers, initializer_range=width**-0.5, **options))
    tokens, targets = torch.randint(0, 64, (2, 8, 32))
    F.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten()).backward()
    first, last = (
        sum(float(p.grad.square().sum()) for p in model.model.layers[n].parameters() if p.grad is not None) ** 0.5
        for n in (0, -1)
    )
    return {"kind": "start", "variant": variant, "layers": layers, "gradient_ratio": first / last}


def one_run(variant: str, rate: float, extra: list[str]) -> Iterator[dict[str, Any]]:
    """The lines of one training run: loss and gradient norm along the way, then the validation NELBO."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--config={HERE / 'depth.yaml'}", f"--output_dir={folder}/run", f"--optim.lr={rate}"]
        flags += [f"--data.source={write_texts(Path(folder) / 'texts')}", *extra]
        flags += [f"--model.{name}={value}" for name, value in VARIANTS[variant].items()]
        common = {"variant": variant, "lr": rate}
        diverged = False
        try:
            train(parse_config(flags))
        except TrainingDiverged:
            diverged = True
        for line in map(json.loads, (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()):
            if line["kind"] == "train":
                kept = {name: line[name] for name in ("step", "masked_nll", "grad_norm")}
                yield {"kind": "train", **common, **kept}
            elif line["kind"] == "validation":
                kept = {name: line[name] for name in ("nats_per_token", "standard_error", "bits_per_byte")}
                yield {"kind": "validation", **common, **kept}
        if diverged:
            yield {"kind": "diverged", **common}


def draw(lines: list[dict[str, Any]], folder: Path) -> None:
    """The three plots."""
    start: dict[str, list[tuple[float, float]]] = defaultdict(list)
    loss: dict[str, list[tuple[float, float]]] = defaultdict(list)
    norm: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in lines:
        if line["kind"] == "start":
            start[line["variant"]].append((line["layers"], line["gradient_ratio"]))
        elif line["kind"] == "train" and line["masked_nll"] is not None:
            name = f"{line['variant']}, rate {line['lr']:g}"
            loss[name].append((line["step"], line["masked_nll"]))
            norm[name].append((line["step"], line["grad_norm"]))
    common = {"x_label": "step", "x_log": False}
    line_plot(
        start, folder / "depth_start.svg", title="First layer's gradient over the last one's, initial weights",
        x_label="layers", y_label="ratio", x_log=True, y_log=True,
    )  # fmt: skip
    line_plot(loss, folder / "depth_loss.svg", title="Loss on masked tokens", y_label="nats per masked token", **common)
    line_plot(
        norm, folder / "depth_gradient.svg", title="Gradient norm before clipping", y_label="norm", y_log=True, **common
    )


def main() -> None:
    """Runs everything and writes files; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE, help="folder of depth.jsonl and the plots")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 1e-2], help="learning rates")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="blocks to compare")
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], help="layers of the start")
    args, extra = parser.parse_known_args()  # the rest is for mdlm.training, e.g. --train.steps=20
    args.output.mkdir(parents=True, exist_ok=True)
    lines = [at_start(variant, layers) for variant in args.variants for layers in args.depths]
    with (args.output / "depth.jsonl").open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
        for rate in args.rates:
            for variant in args.variants:
                for line in one_run(variant, rate, extra):
                    lines.append(line)
                    file.write(json.dumps(line) + "\n")
                file.flush()
    draw(lines, args.output)


if __name__ == "__main__":
    main()
