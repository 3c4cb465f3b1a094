"""Looking at a run while it trains: what it is, the NELBO on held-out text, always under the same noise, and samples.

Both see the averaged weights where there is an average, since these are the model that is saved. Read next: `loop.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from mdlm.corpus import corpus_summary
from mdlm.denoiser import ModelDenoiser
from mdlm.eval.likelihood import NelboProtocol, accumulate, merge
from mdlm.samplers import generate
from mdlm.samplers.ancestral import Ancestral
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.windows import Blocks
from mdlm.shipped import corpus_difference
from mdlm.training.initial import initial_folder
from mdlm.training.setup import Run


@contextmanager
def published_model(run: Run) -> Iterator[None]:
    """Within the block `run.core` is in evaluation mode and holds the weights that would be published."""
    run.core.eval()
    try:
        with run.published():
            yield
    finally:
        run.core.train()
        for module in run.core.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # without a backward FSDP2 keeps gathered weights, here those of the average


def validate(run: Run) -> dict[str, Any]:
    """NELBO of the validation rows, shared out over the processes (of the island: each measures
    all rows, so that none waits for another); each must call it.

    The noise is a function of the row alone: values of different steps, runs and process counts can be compared.
    """
    team, data = run.team, run.data
    batches = data.validation_batches(run.micro_batch, rank=team.rank, world=team.size)
    with published_model(run):
        part = accumulate(
            ModelDenoiser(run.core),
            batches,
            NelboProtocol(samples=run.config.validation.draws),
            token_bytes=data.token_bytes if data.bytes_are_exact else None,
        )
    result = merge(team.gather(part)).result(None if data.bytes_are_exact else round(data.validation_bytes))
    return {
        "nats_per_token": result.nats_per_token,
        "standard_error": result.standard_error,
        "bits_per_byte": result.bits_per_byte,
        "perplexity_bound": result.perplexity_bound,
        "tokens": result.tokens,
    }


def introduction(run: Run) -> str:
    """What is trained on what, in a few lines."""
    parameters = sum(p.numel() for p in run.core.parameters())
    trained = sum(p.numel() for p in run.core.parameters() if p.requires_grad)
    share = "" if trained == parameters else f", {trained / 1e6:.2f} M of them trained"
    batch = run.config.train
    start = f"from step {run.step} of {run.resumed_from}" if run.resumed_from else "from step 0"
    lines = [str(run.data.report_for(batch.global_batch))]
    if run.config.data.source == "builtin":
        corpus = corpus_summary()
        lines.append(f"built-in corpus of {corpus['python']}: {corpus['bytes']} bytes, sha256 {corpus['sha256']}")
        initial = initial_folder(run.config)
        difference = None if initial is None else corpus_difference(Path(initial))
        lines += [] if difference is None else [difference]
    return "\n".join(
        [
            f"{parameters / 1e6:.2f} M parameters{share}; {batch.global_batch} rows of {run.config.data.seq_len} "
            f"tokens a step = {run.links.world} process(es) x {run.accumulation} x {run.micro_batch}; "
            f"{run.total_steps} steps, {start}; {run.accelerator.device.type}, {batch.precision}",
            *lines,
        ]
    )


def check_preview(run: Run) -> None:
    """Raises ValueError if a preview would not fit into the model: before the first step, not at the first preview."""
    options, limit = run.config.preview, run.core.config.max_position_embeddings
    if not options.every:
        return
    longest = max(len(run.tokenizer.encode(prompt, add_special_tokens=False)) for prompt in options.prompts)
    if longest + options.length > limit:
        raise ValueError(
            f"--preview.length {options.length} after a prompt of {longest} tokens is longer than the model takes, "
            f"{limit} (--model.max_position_embeddings, by default --data.seq_len); lower --preview.length"
        )


def preview(run: Run) -> list[str]:
    """Each prompt with a sample after it, drawn by ancestral sampling at temperature 1; every process must call it.

    A model with blocks writes them one by one, in as many steps together.
    """
    options, size = run.config.preview, run.core.config.block_size
    strategy = build_strategy("ancestral", steps=options.steps)
    if size is not None:
        steps = max(1, round(options.steps * size / options.length))
        strategy = replace(strategy, select=Ancestral(steps), window=Blocks(size, align="row"))
    with published_model(run), torch.compiler.set_stance("force_eager"):  # rows and shapes differ from call to call
        out = generate(
            run.core,
            run.tokenizer,
            list(options.prompts),
            strategy=strategy,
            max_new_tokens=options.length,
            seed=run.config.seed,
        )
    return [prompt + text for prompt, text in zip(options.prompts, out.text)]
