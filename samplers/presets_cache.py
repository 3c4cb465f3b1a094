"""Presets whose point is a cache (`cache_policies.py`). Read next: `presets.py`."""

from __future__ import annotations

from typing import Literal

from mdlm.samplers.arguments import one_of
from mdlm.samplers.cache_policies import CACHES
from mdlm.samplers.select import Selector, Threshold
from mdlm.samplers.select_adaptive import Factor
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.windows import Blocks


def fast_dllm(
    threshold: float = 0.9,
    factor: float | None = None,
    block_length: int = 32,
    cache: Literal["prefix", "dual"] = "dual",
) -> Strategy:
    """Fast-dLLM as a whole (2505.22618): parallel decoding by confidence in blocks, under an approximate cache that is
    refreshed when a block begins. For large models that attend both ways; needs stored keys and values (our model).

    Args:
        threshold: least probability of a token that is committed; above 1: one token a step.
        factor: instead of the threshold, the rule of Theorem 1 with this factor.
        block_length: positions per block; longer ones are refreshed less often.
        cache: `prefix`: text left of the block is kept; `dual`: text right of it too.
    """
    one_of("cache", cache, ("prefix", "dual"))
    select: Selector = Threshold(threshold) if factor is None else Factor(factor)
    return Strategy(select=select, window=Blocks(block_length), cache=CACHES[cache]())


def block_diffusion(block_length: int = 32, threshold: float = 0.9) -> Strategy:
    """Block-causal models (BD3-LM, 2503.09573; SDAR, LLaDA2): decoding by confidence in blocks counted from the start
    of the row, as such models are trained, not from the end of the prompt. Give `generate` cache='block', their exact
    cache, with it: the same tokens for less.

    Args:
        block_length: the model's `block_size`, or a divisor of it.
        threshold: least probability of a token that is committed; above 1: one token a step.
    """
    return Strategy(select=Threshold(threshold), window=Blocks(block_length, align="row"))
