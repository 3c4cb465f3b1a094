"""`mdlm eval CHECKPOINT`: the validation NELBO of a checkpoint with its standard error, beside the unigram baseline.

Prints one JSON line per result, with the protocol, the text, versions and commit; `--results FILE` appends it to a file
as well. Without `--data` the text held out by the training run is evaluated. `mdlm eval curves` and `mdlm eval text`
are commands of their own (`SUBCOMMANDS`). Read next: `likelihood.py`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from mdlm.checkpoint import STATE_FILE, STATE_FOLDER, provenance, read_state
from mdlm.data import Data, DataConfig, open_data
from mdlm.data_pack import PackedRows
from mdlm.denoiser import ModelDenoiser
from mdlm.eval.likelihood import NelboProtocol, accumulate, unigram_bits_per_byte
from mdlm.load import load_model, model_folder
from mdlm.tokenization import num_tokens


def evaluate(
    checkpoint: str,
    data: str | None = None,
    format: str = "auto",
    text_column: str = "text",
    packing: Literal["stream", "documents", "none"] | None = None,
    seq_len: int | None = None,
    rows: int | None = None,
    schedule: str = "linear",
    samples: int = 1,
    seed: int = 0,
    batch: int = 16,
    dtype: str = "float32",
    device: str = "auto",
    results: str | None = None,
) -> dict[str, Any]:
    """NELBO in nats per token, bits per byte and as a perplexity bound, with its standard error.

    Two further commands have their own help: `mdlm eval curves` (quality against speed of strategies on sources with
    known probabilities) and `mdlm eval text` (generative perplexity of samples under a judge).

    Args:
        checkpoint: a checkpoint folder, or the output_dir of a run (its newest checkpoint).
        data: text to evaluate in full: `builtin` (its held-out part), a file, folder, glob or dataset; default: the
            text that the training run held out.
        format: of `data`, as in training.
        text_column: key or column of `data` that holds the text.
        packing: how the text is cut into rows; default: as in training.
        seq_len: tokens per row; default: as in training, or the longest the model accepts.
        rows: evaluate so many rows, spread evenly; default: all.
        schedule: noise schedule of the estimate; every schedule has the same expectation.
        samples: draws of (t, mask) per row.
        seed: of times and masks.
        batch: rows per forward; never changes the result.
        dtype: precision of the weights: float32, bfloat16, float16 or float64.
        device: auto, cpu, cuda, ...
        results: file to append the JSON line to.
    """
    folder = model_folder(checkpoint)
    model, tokenizer = load_model(folder, dtype, device)
    trained = _training_data(folder)
    config = dataclasses.replace(trained or DataConfig(seq_len=model.config.max_position_embeddings), workers=0)
    if data is not None:
        config = dataclasses.replace(
            config,
            source=data,
            format=format,  # type: ignore[arg-type]
            text_column=text_column,
            name=None,
            split="train",
            streaming=False,
            validation_source=None if data == "builtin" else data,
            validation_split=None,
        )
    elif trained is None:
        raise ValueError(f"{folder} holds no {STATE_FOLDER}/{STATE_FILE}, so its text is not known: give --data")
    config = dataclasses.replace(
        config,
        validation_rows=rows if rows is not None else (None if data is not None else config.validation_rows),
        packing=packing or config.packing,
        seq_len=seq_len or config.seq_len,
    )
    if config.seq_len > model.config.max_position_embeddings:
        raise ValueError(
            f"--seq_len {config.seq_len} is longer than the model accepts ({model.config.max_position_embeddings})"
        )
    text = open_data(config, tokenizer)
    protocol = NelboProtocol(schedule=schedule, samples=samples, seed=seed)
    start = time.perf_counter()
    sums = accumulate(ModelDenoiser(model), text.validation_batches(batch), protocol)
    seconds = time.perf_counter() - start
    likelihood = sums.result(total_bytes=round(text.validation_bytes))
    record = {
        "kind": "nelbo",
        "checkpoint": str(checkpoint),
        "step": read_state(folder)["step"] if trained is not None else None,
        **dataclasses.asdict(likelihood),
        "unigram_bits_per_byte": _unigram(text, num_tokens(tokenizer)),
        "bytes_are_exact": text.bytes_are_exact,
        "tokens_per_second": likelihood.tokens * samples / seconds,
        "text": str(text.report),
        "data": dataclasses.asdict(config),
        "device": str(model.device),
        "dtype": dtype,
        **provenance(),
    }
    if results is not None:
        path = Path(results)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return record


def _training_data(folder: Path) -> DataConfig | None:
    """The data configuration of the run that wrote this checkpoint; None for a folder without a training state."""
    if not (folder / STATE_FOLDER / STATE_FILE).is_file():
        return None
    data = DataConfig(**read_state(folder)["config"]["data"])
    return dataclasses.replace(data, chat_template=None)  # the tokenizer beside it keeps the template


def _unigram(text: Data, vocab: int) -> float | None:
    """Bits per byte of the evaluated tokens under the training part's token frequencies; None while streaming."""
    held = text.validation
    if held is None or not isinstance(text.train, PackedRows):
        return None
    return unigram_bits_per_byte(_tokens(text.train), _tokens(held), round(text.validation_bytes), vocab)


def _tokens(rows: PackedRows) -> Iterator[Tensor]:
    from torch import from_numpy

    for number in range(rows.rows_per_epoch):
        yield from_numpy(rows.row(number).counted.astype("int64"))


def summary(record: dict[str, Any]) -> str:
    """The result in one line for the eye."""
    error = record["standard_error"]
    scale = record["bits_per_byte"] / record["nats_per_token"]
    spread = "" if error is None else f" ± {error * scale:.3f}"
    unigram = record["unigram_bits_per_byte"]
    beside = "" if unigram is None else f" (unigram {unigram:.3f})"
    return (
        f"{record['bits_per_byte']:.3f}{spread} bits per byte{beside}, "
        f"{record['nats_per_token']:.3f} nats per token, perplexity <= {record['perplexity_bound']:.1f}, "
        f"{record['tokens']} tokens at {record['tokens_per_second']:.0f} tokens/s"
    )


SUBCOMMANDS = {"curves": "mdlm.eval.curve_report", "text": "mdlm.eval.generative"}
"""First argument -> the module whose `main` takes the rest."""


def main(argv: list[str] | None = None) -> int:
    """Entry of `mdlm eval` and `python -m mdlm.eval`."""
    from mdlm.command import run_command

    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in SUBCOMMANDS:
        return int(importlib.import_module(SUBCOMMANDS[arguments[0]]).main(arguments[1:]))
    return run_command(
        evaluate, arguments, prog="mdlm eval", report=lambda record: [json.dumps(record), summary(record)]
    )


if __name__ == "__main__":
    sys.exit(main())
