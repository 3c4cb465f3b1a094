"""Make the package's model folder out of a finished run, and measure what its card says.

    python benchmarks/shipped_model.py runs/python-8m mdlm/builtin_models/python-8m

The weights are the run's averaged ones in bfloat16. Beside them: tokenizer, `corpus.json` (the training text, file by
file), `train_state/state.json` (configuration and step, so that `mdlm eval` knows the held-out text), `figures.json`
and the model card `README.md`, whose numbers come from `figures.json`. Measured are the NELBO of all held-out text by
the folder as it is shipped, and on the same text the unigram and the 3-gram model of the training text.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sampling import ORDER, training_tokens
from text_quality import NGram

from mdlm.checkpoint import STATE_FILE, STATE_FOLDER, provenance, read_model_weights, read_state, write_model
from mdlm.config import MDLMConfig
from mdlm.convert import new_folder
from mdlm.corpus import manifest
from mdlm.data import DataConfig, open_data
from mdlm.eval.__main__ import evaluate
from mdlm.load import load_model, model_folder
from mdlm.samplers import generate
from mdlm.shipped import CORPUS_FILE
from mdlm.tokenization import load_tokenizer

FIGURES = "figures.json"
PROMPTS = ("def ", "import ", "class ")
CARD = Path(__file__).with_name("shipped_model.md")
"""The card with `{name}` where a figure goes."""


def write_folder(run: Path, target: Path) -> None:
    """The model in `target`, which must not exist; everything but figures and card."""
    source = model_folder(run)
    state = read_state(source)
    config = MDLMConfig.from_pretrained(source)
    weights = {name: weight.to(torch.bfloat16) for name, weight in read_model_weights(source).items()}
    state["config"]["data"]["validation_rows"] = None
    state["config"]["output_dir"] = "runs/" + target.name
    kept = {name: state[name] for name in ("format", "step", "total_steps", "config")}
    with new_folder(target) as folder:
        write_model(folder, config, weights, load_tokenizer(source))
        (folder / CORPUS_FILE).write_text(json.dumps(manifest(), indent=0) + "\n", encoding="utf-8")
        files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
        (folder / STATE_FOLDER).mkdir()
        text = json.dumps({**kept, "files": files}, indent=1) + "\n"
        (folder / STATE_FOLDER / STATE_FILE).write_text(text, encoding="utf-8")


def ngram_bits(folder: Path, order: int) -> float:
    """Bits per byte of the held-out text under the `order`-gram model of the training text, both as tokens."""
    model, tokenizer = load_model(folder)
    config = DataConfig(**read_state(folder)["config"]["data"])
    data = open_data(config, tokenizer)
    judge = NGram(training_tokens(tokenizer), model.config.vocab_size, order)
    held_out = np.concatenate([batch.input_ids[batch.maskable].numpy() for batch in data.validation_batches(64)])
    begin = np.full(order - 1, tokenizer.eos_token_id)
    nats = judge.nats(np.concatenate([begin, held_out])[None], start=order - 1).sum()
    return float(nats) / math.log(2) / data.validation_bytes


def training_figures(run: Path) -> dict[str, Any]:
    """What the run's metrics say: steps, tokens, hours of steps, validation along the way."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    config = read_state(model_folder(run))["config"]
    a_step = config["train"]["global_batch"] * config["data"]["seq_len"]
    seconds = sum(a_step * config["train"]["log_every"] / line["tokens_per_second"] for line in train)
    return {
        "steps": train[-1]["step"],
        "tokens": train[-1]["step"] * a_step,
        "hours": seconds / 3600,
        "seed": config["seed"],
        "validation": [
            {name: line[name] for name in ("step", "bits_per_byte")} for line in lines if line["kind"] == "validation"
        ],
    }


def measure(run: Path, folder: Path, samples: int) -> dict[str, Any]:
    """Everything the card needs."""
    record = evaluate(str(folder), dtype="bfloat16", samples=samples)
    assert record is not None
    corpus = json.loads((folder / CORPUS_FILE).read_text())
    return {
        **training_figures(run),
        "parameters": sum(weight.numel() for weight in load_model(folder)[0].parameters()),
        "python": corpus["python"],
        "corpus": {name: corpus[name] for name in ("documents", "bytes", "sha256")},
        "bits_per_byte": record["bits_per_byte"],
        "standard_error": record["standard_error"] * record["tokens"] / record["bytes"] / math.log(2),
        "nats_per_token": record["nats_per_token"],
        "held_out_tokens": record["tokens"],
        "unigram": record["unigram_bits_per_byte"],
        "trigram": ngram_bits(folder, ORDER),
        "samples": written(folder),
        **provenance(),
    }


def written(folder: Path) -> list[str]:
    """What the model makes of three prompts."""
    model, tokenizer = load_model(folder)
    out = generate(model, tokenizer, list(PROMPTS), strategy="ancestral", max_new_tokens=64, temperature=0.8, seed=0)
    return [prompt + text for prompt, text in zip(PROMPTS, out.text)]


def card(figures: dict[str, Any]) -> str:
    """The model card with these figures."""
    along = figures["validation"]
    rows = {
        "steps_row": " | ".join(str(line["step"]) for line in along),
        "steps_rule": "---|" * (len(along) - 1) + "---",
        "bits_row": " | ".join(f"{line['bits_per_byte']:.2f}" for line in along),
        "samples": "\n\n".join("\n".join("    " + line for line in text.split("\n")) for text in figures["samples"]),
    }
    values = {name: value for name, value in figures.items() if name != "samples"}
    return CARD.read_text(encoding="utf-8").format(**values, **figures["corpus"], **rows)


def main(argv: list[str] | None = None) -> int:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the finished run")
    parser.add_argument("target", type=Path, help="folder to make; it must not exist")
    parser.add_argument("--samples", type=int, default=4, help="draws of noise per row in the evaluation")
    given = parser.parse_args(argv)
    write_folder(given.run, given.target)
    figures = measure(given.run, given.target, given.samples)
    (given.target / FIGURES).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    (given.target / "README.md").write_text(card(figures), encoding="utf-8")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
