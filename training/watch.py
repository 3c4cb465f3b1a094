"""Looking at a run while it trains: the NELBO on held-out text, always under the same noise, and samples.

Both see the averaged weights where there is an average, since these are the model that is saved. Read next: `loop.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from accelerate.utils import gather_object
from torch.distributed.fsdp import FSDPModule

from mdlm.denoiser import ModelDenoiser
from mdlm.eval.likelihood import NelboProtocol, accumulate, merge
from mdlm.training.setup import Run


@contextmanager
def published_model(run: Run) -> Iterator[None]:
    """Within the block `run.core` is in evaluation mode and holds the weights that would be published."""
    run.core.eval()
    try:
        with nullcontext() if run.ema is None else run.ema.swapped_in(run.core):
            yield
    finally:
        run.core.train()
        for module in run.core.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # without a backward FSDP2 keeps gathered weights, here those of the average


def validate(run: Run) -> dict[str, Any]:
    """NELBO of the validation rows, shared out over the processes; each must call it.

    The noise is a function of the row alone: values of different steps, runs and process counts can be compared.
    """
    accelerator, data = run.accelerator, run.data
    batches = data.validation_batches(run.micro_batch, rank=accelerator.process_index, world=accelerator.num_processes)
    with published_model(run):
        part = accumulate(
            ModelDenoiser(run.core),
            batches,
            NelboProtocol(samples=run.config.validation.draws),
            token_bytes=data.token_bytes if data.bytes_are_exact else None,
        )
    result = merge(gather_object([part])).result(None if data.bytes_are_exact else round(data.validation_bytes))
    return {
        "nats_per_token": result.nats_per_token,
        "standard_error": result.standard_error,
        "bits_per_byte": result.bits_per_byte,
        "perplexity_bound": result.perplexity_bound,
        "tokens": result.tokens,
    }


def preview(run: Run) -> list[str]:
    """One sample after each prompt."""
    return []
