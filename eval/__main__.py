"""`mdlm eval CHECKPOINT`: the validation NELBO of a checkpoint with its standard error, beside the unigram baseline.

Prints one JSON line per result, with the protocol, the text, versions and commit; `--results FILE` appends it to a file
as well. Without `--data` the text held out by the training run is evaluated. `mdlm eval curves` and others are
commands of their own (`SUBCOMMANDS`). Read next: `likelihood.py`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from mdlm.chat import ExampleConfig, Records
from mdlm.checkpoint import STATE_FILE, STATE_FOLDER, provenance, read_state
from mdlm.data import DataConfig, open_data
from mdlm.denoiser import ModelDenoiser
from mdlm.eval.jsonl import append
from mdlm.eval.likelihood import NelboProtocol
from mdlm.eval.likelihood_block import with_own_blocks
from mdlm.eval.likelihood_text import Edge, EvaluationRows, TextProtocol, held_out_rows, open_rows
from mdlm.load import load_model, model_folder
from mdlm.objective import Masking
from mdlm.schedule import TimeSampling
from mdlm.shipped import corpus_difference


def evaluate(
    checkpoint: str,
    data: str | None = None,
    format: str = "auto",
    text_column: str = "text",
    records: Records = "text",
    packing: Literal["stream", "documents", "none"] | None = None,
    seq_len: int | None = None,
    stride: int | None = None,
    bos: Edge = "none",
    eos: Edge = "none",
    document_eos: bool = True,
    detokenizer: str = "none",
    rows: int | None = None,
    schedule: str = "linear",
    schedule_power: float | None = None,
    sampling: TimeSampling = "stratified",
    masking: Masking = "count",
    strata_rows: int = 4,
    samples: int = 1,
    eps: float = 0.0,
    steps: int | None = None,
    seed: int = 0,
    batch: int = 16,
    dtype: str = "float32",
    device: str = "auto",
    progress: str | None = None,
    resume: bool = False,
    results: str | None = None,
) -> dict[str, Any] | None:
    """NELBO in nats per token, bits per byte and as a perplexity bound, with its standard error.

    Several processes (`accelerate launch -m mdlm.eval ...`) share the rows and give the number of one; the first of
    them reports. Further commands have their own help: `mdlm eval curves` (quality against speed of strategies on
    sources with known probabilities), `mdlm eval variance` (noise of the estimators against their cost), `mdlm eval
    text` (generative perplexity of samples under a judge) and the others of `SUBCOMMANDS`.

    Args:
        checkpoint: a checkpoint folder, or the output_dir of a run (its newest checkpoint).
        data: text to evaluate in full, read as a stream: `builtin`, a file, folder, glob or dataset; default: the text
            that the training run held out.
        format: of `data`, as in training.
        text_column: key or column of `data` that holds the text.
        records: what a record of `data` is: text, messages or completion. Of the last two only the answers are masked
            and counted, with their one end token, as in the validation of fine-tuning; columns, turns and over-long
            examples as in the training of the checkpoint.
        packing: `stream`: documents wrapped; `documents`: wrapped, attention inside each; `none`: one document per
            window, padded. Default: as in training.
        seq_len: tokens per window; default: as in training, or the longest the model accepts.
        stride: new tokens per further window, the others being given as context; default: windows do not overlap.
        bos: start token before every window: none, given (not predicted) or scored.
        eos: end token behind every window, likewise.
        document_eos: end token behind every document.
        detokenizer: of old benchmark corpora: none, wikitext, ptb, lm1b, lambada, scientific_papers.
        rows: evaluate so many windows, spread evenly; default: all.
        schedule: noise schedule of the estimate (linear, cosine, polynomial); every one has the same expectation.
        schedule_power: of the polynomial schedule.
        sampling: of times: stratified, low_discrepancy, antithetic or uniform.
        masking: `count`: exactly as many masked tokens as the time says; `independent`: every token for itself.
        strata_rows: windows whose times are stratified together, and the unit of the standard error. LLaDA's protocol
            is 1, with `samples` 128.
        samples: draws of (t, mask) per window (LLaDA's mc_num).
        eps: times are drawn from (eps, 1]; above 0 the estimate is slightly biased.
        steps: of a discrete-time reverse process; default: continuous time.
        seed: of times and masks.
        batch: windows per forward; never changes the result.
        dtype: precision of the weights: float32, bfloat16, float16 or float64.
        device: auto, cpu, cuda, ...
        progress: JSON-lines file for finished batches, so that an interrupted evaluation can go on.
        resume: go on with `progress`.
        results: file to append the JSON line to.
    """
    from mdlm.eval.likelihood_run import evaluate_rows, launched_processes, own_device, weights_digest

    protocol = NelboProtocol(
        schedule=schedule,
        schedule_power=schedule_power,
        sampling=sampling,
        masking=masking,
        strata_rows=strata_rows,
        samples=samples,
        eps=eps,
        steps=steps,
        seed=seed,
    )
    folder = model_folder(checkpoint)
    model, tokenizer = load_model(folder, dtype, own_device(device))
    protocol = with_own_blocks(protocol, ModelDenoiser(model))
    trained = _training_data(folder)
    config = dataclasses.replace(trained or DataConfig(seq_len=model.config.max_position_embeddings), workers=0)
    if data is not None:
        config = _given_data(config, data, format, text_column, records)
    elif records != "text":
        raise ValueError(f"--records {records} says what --data holds; without it the run's own records are evaluated")
    elif trained is None:
        raise ValueError(f"{folder} holds no {STATE_FOLDER}/{STATE_FILE}, so its text is not known: give --data")
    text_protocol = TextProtocol(
        packing=packing or config.packing,
        seq_len=seq_len or config.seq_len,
        stride=stride,
        bos=bos,
        eos=eos,
        document_eos=document_eos,
        detokenizer=detokenizer,
        rows=rows if rows is not None else config.validation_rows,
    )
    if text_protocol.seq_len > model.config.max_position_embeddings:
        raise ValueError(
            f"--seq_len {text_protocol.seq_len} is longer than the model accepts "
            f"({model.config.max_position_embeddings})"
        )
    text = _rows(config, tokenizer, text_protocol, whole=data is not None and records == "text")
    identity = {
        "protocol": dataclasses.asdict(protocol),
        "text_protocol": dataclasses.asdict(text_protocol),
        "text": text.fingerprint,
        "weights": weights_digest(model),
        "dtype": dtype,
    }
    with launched_processes() as (rank, world):
        start = time.perf_counter()
        likelihood, unigram = evaluate_rows(
            ModelDenoiser(model),
            text,
            protocol,
            batch,
            identity=identity,
            progress=None if progress is None else Path(progress),
            resume=resume,
            rank=rank,
            world=world,
        )
        seconds = time.perf_counter() - start
    if rank:
        return None
    record = {
        "kind": "nelbo",
        "checkpoint": str(checkpoint),
        "step": read_state(folder)["step"] if trained is not None else None,
        **dataclasses.asdict(likelihood),
        "unigram_bits_per_byte": unigram,
        "bytes_are_exact": text.bytes_are_exact,
        "tokens_per_second": likelihood.tokens * samples / seconds,
        "text_protocol": identity["text_protocol"],
        "text": {"source": text.name, "fingerprint": text.fingerprint, **text.report},
        "data": dataclasses.asdict(config),
        "weights": identity["weights"],
        "device": str(model.device),
        "dtype": dtype,
        "processes": world,
        "corpus_difference": corpus_difference(folder) if config.source == "builtin" else None,
        **provenance(),
    }
    if results is not None:
        append(Path(results), [record])
    return record


def _given_data(config: DataConfig, source: str, format: str, text_column: str, records: Records) -> DataConfig:
    """`config` with other data, all of it to evaluate; what a run says about examples holds for its own kind only."""
    changes: dict[str, Any] = {
        "source": source, "format": format, "text_column": text_column, "records": records, "name": None,
        "split": "train", "streaming": False, "validation_source": None if records == "text" else source,
        "validation_split": None, "validation_rows": None,
    }  # fmt: skip
    if records != config.records:
        changes = {**{f.name: f.default for f in dataclasses.fields(ExampleConfig)}, **changes}
    if records != "text" and config.packing == "stream":
        changes["packing"] = "none"
    return dataclasses.replace(config, **changes)


def _rows(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, protocol: TextProtocol, whole: bool
) -> EvaluationRows:
    """The text's rows; what training held out of examples and of streamed text is cut as training cuts it."""
    if whole or (config.records == "text" and not config.streaming):
        return open_rows(config, tokenizer, protocol, whole)
    same = TextProtocol(packing=protocol.packing, seq_len=protocol.seq_len, rows=protocol.rows)
    if protocol != same:
        raise ValueError(
            "stride, bos, eos, document_eos and detokenizer are for plain text, not for examples, nor for text that "
            "was streamed: give plain text with --data"
        )
    config = dataclasses.replace(
        config, packing=protocol.packing, seq_len=protocol.seq_len, validation_rows=protocol.rows
    )
    return held_out_rows(open_data(config, tokenizer))


def _training_data(folder: Path) -> DataConfig | None:
    """The data configuration of the run that wrote this checkpoint; None for a folder without a training state."""
    if not (folder / STATE_FOLDER / STATE_FILE).is_file():
        return None
    data = DataConfig(**read_state(folder)["config"]["data"])
    return dataclasses.replace(data, chat_template=None)  # the tokenizer beside it keeps the template


def _lines(record: dict[str, Any] | None) -> list[str]:
    """What is printed: nothing where another process reports."""
    if record is None:
        return []
    difference = record["corpus_difference"]
    return [json.dumps(record), summary(record), *([] if difference is None else [difference])]


def summary(record: dict[str, Any]) -> str:
    """The result in one line for the eye."""
    error = record["standard_error"]
    spread = "" if error is None else f" ± {error * record['tokens'] / record['bytes'] / math.log(2):.3f}"
    unigram = record["unigram_bits_per_byte"]
    beside = "" if unigram is None else f" (unigram {unigram:.3f})"
    return (
        f"{record['bits_per_byte']:.3f}{spread} bits per byte{beside}, "
        f"{record['nats_per_token']:.3f} nats per token, perplexity <= {record['perplexity_bound']:.1f}, "
        f"{record['tokens']} tokens at {record['tokens_per_second']:.0f} tokens/s"
    )


SUBCOMMANDS = {
    "curves": "mdlm.eval.curve_report",
    "text": "mdlm.eval.generative",
    "variance": "mdlm.eval.likelihood_variance",
    "tasks": "mdlm.eval.harness_command",
    "calibration": "mdlm.eval.calibration",
    "plot": "mdlm.eval.plot_kinds",
}
"""First argument -> the module whose `main` takes the rest."""


def main(argv: list[str] | None = None) -> int:
    """Entry of `mdlm eval` and `python -m mdlm.eval`."""
    from mdlm.command import run_command

    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in SUBCOMMANDS:
        return int(importlib.import_module(SUBCOMMANDS[arguments[0]]).main(arguments[1:]))
    return run_command(evaluate, arguments, prog="mdlm eval", report=_lines)


if __name__ == "__main__":
    sys.exit(main())
