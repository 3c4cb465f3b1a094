"""What a model folder says about sampling from it: `generation_config.json` with the special ids and the strategy.

Without a strategy of its own `generate` takes its default; a model with blocks was trained to write them one after the
other from the start of the row, so it names the strategy that does. Read next: `samplers/generate.py`.
"""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig
from transformers.configuration_utils import PreTrainedConfig


def generation_defaults(config: PreTrainedConfig) -> GenerationConfig:
    """Made from the model's config by hand: `transformers` would drop `strategy` when it reads such a file again."""
    block_size = getattr(config, "block_size", None)
    strategy: dict[str, Any] = {}
    if block_size is not None:
        strategy["strategy"] = {"name": "block_diffusion", "knobs": {"block_length": block_size}}
    return GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        **strategy,
    )
