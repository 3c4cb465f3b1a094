"""The search for the range of noise levels during a run (`mdlm/noise_range.py`), at the steps of its validation.

It is made before the step that follows, from the weights as they stand, so that a run resumed at that step makes the
same search again and goes on exactly as one that never stopped; in between the range is part of the checkpoint.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mdlm.noise_range import LEAST_UNITS, best_range, measure, merge
from mdlm.training.setup import Run
from mdlm.training.watch import published_model


def check_search(run: Run) -> None:
    """Raises ValueError if the validation text is too short for a search: before the first step."""
    if not run.config.objective.search_range:
        return
    blocks = run.data.validation_tokens // (run.core.config.block_size or run.config.data.seq_len)
    if blocks < 2 * LEAST_UNITS:  # the narrowest ranges hold half of them
        raise ValueError(
            f"--objective.search_range compares variances over rows or blocks of the validation text, and it has "
            f"{blocks}; it needs {2 * LEAST_UNITS}: raise --data.validation_rows or --data.validation_fraction"
        )


def search_is_due(run: Run) -> bool:
    """Whether the range is searched before the next step."""
    every = run.config.validation.every if run.config.objective.search_range else 0
    return bool(every) and run.step > 0 and run.step % every == 0 and not run.objective.in_warmup(run.step)


def search_range(run: Run) -> dict[str, Any]:
    """Sets the range of `run.objective`, the same on every process; each must call it. Returns what to log.

    Measured with the weights that are published, like the validation itself.
    """
    own = run.config.objective
    whole = dataclasses.replace(run.objective, eps=own.eps, t_max=own.t_max)
    rows = run.data.validation_batches(run.micro_batch, rank=run.team.rank, world=run.team.size)
    with published_model(run):
        costs = measure(whole, run.core, rows, run.accelerator.device)
    chosen, variance, before = best_range(whole, merge(run.team.gather(costs)))
    run.objective = dataclasses.replace(run.objective, eps=chosen.eps, t_max=chosen.t_max)
    return {"eps": chosen.eps, "t_max": chosen.t_max, "variance": variance, "variance_of_whole_range": before}
