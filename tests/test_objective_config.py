"""Options of the loss that cannot be right are refused with what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from mdlm.objective import ObjectiveConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "linaer"}, "did you mean 'linear'"),
        ({"schedule": "linear", "schedule_power": 2.0}, "has no power"),
        ({"sampling": "sobol"}, "unknown sampling"),
        ({"masking": "counts"}, "did you mean 'count'"),
        ({"weighting": "elbo"}, "did you mean 'nelbo'"),
        ({"reduction": "mean"}, "unknown reduction"),
        ({"weighting": "llada", "schedule": "cosine"}, "use weighting 'nelbo'"),
        ({"eps": 1.0}, "eps"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"warmup_start": 0.0}, "warmup_start"),
    ],
)
def test_options_that_cannot_be_right_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**options)


def test_ids_and_global_batch_that_cannot_be_right_are_refused() -> None:
    config = ObjectiveConfig()
    with pytest.raises(ValueError, match="mask id"):
        config.build(global_batch=8, seed=0, mask_token_id=20, num_tokens=20)
    with pytest.raises(ValueError, match="global_batch"):
        config.build(global_batch=0, seed=0, mask_token_id=3, num_tokens=20)
