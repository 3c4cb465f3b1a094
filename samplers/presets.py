"""`PRESETS`: name -> function of its own knobs -> `Strategy`. What a strategy takes is its function's signature.

Each function's docstring says what it is, from which paper, and when to use it; `Args:` are its knobs. Temperature,
truncation, seeds, end-of-sequence policy and the like belong to every strategy and are arguments of `generate`.
Read next: `generate.py`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Literal

from mdlm.samplers.ancestral import Ancestral, JointAncestral
from mdlm.samplers.arguments import checked, one_of
from mdlm.samplers.draw import Draw
from mdlm.samplers.presets_adaptive import (
    credit,
    dream,
    dus,
    dynamic,
    eb,
    entropy_threshold,
    factor,
    hierarchy,
    klass,
    llada2,
    pc,
    saber,
    sdar,
    spaced,
    swd,
    wedlm,
)
from mdlm.samplers.presets_cache import block_diffusion, fast_dllm
from mdlm.samplers.presets_revise import freedave, lopa, p2, prophet, remdm, t2m, t2t, wino
from mdlm.samplers.presets_span import adablock, clad, dapd, dcd, depcap, fast_dllm_v2, spans, swordsman
from mdlm.samplers.scores import SCORES, drawn_probability
from mdlm.samplers.scores import random as random_score
from mdlm.samplers.select import Quota, RandomOrder, Threshold, TopK
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.windows import Strides, window_of

Score = Literal["probability", "margin", "entropy", "random"]


def ancestral(steps: int = 64, block_length: int | None = None, noise: Literal["split", "joint"] = "split") -> Strategy:
    """MDLM's ancestral sampler (2406.07524, section 4): tokens appear at random times. Samples the model's own law as
    steps grow; with few steps, tokens revealed together are independent. For base models and for judging likelihood.

    Args:
        steps: time steps, per block if there are blocks; only those that reveal something cost a forward.
        block_length: None: the whole canvas at once.
        noise: `split`: reveal first, token second; `joint`: one float64 Gumbel race over tokens and mask, as published
            (ignores temperature and truncation).
    """
    kinds = {"split": Ancestral(steps), "joint": JointAncestral(steps)}
    one_of("noise", noise, kinds)
    return Strategy(select=kinds[noise], window=window_of(block_length), draw=Draw(temperature=1.0))  # type: ignore[arg-type]


def first_hitting(block_length: int | None = None) -> Strategy:
    """First-hitting sampler (Zheng et al., 2409.02908): one token at a time in random order, the limit of `ancestral`
    for infinitely many steps. Exact for an exact model; the slow end of every comparison.

    Args:
        block_length: None: the whole canvas at once.
    """
    return Strategy(select=RandomOrder(1), window=window_of(block_length), draw=Draw(temperature=1.0))


def semi_autoregressive(steps: int = 64, length: int = 64, stride: int = 32) -> Strategy:
    """MDLM's semi-autoregressive sampler (2406.07524, section 4.2): ancestral sampling of a first window, then of one
    stride after the other to its right. For long answers: what is far to the right waits, what is left is settled.

    Args:
        steps: time steps per window; only those that reveal something cost a forward.
        length: tokens of the first window.
        stride: tokens of each further one, at most `length`.
    """
    return Strategy(select=Ancestral(steps), window=Strides(length, stride), draw=Draw(temperature=1.0))


def confidence(
    score: Score = "probability", k: int = 1, steps: int | None = None, block_length: int | None = None
) -> Strategy:
    """The `k` best-scored positions per step. With k = 1 and tokens drawn after selection, exact for an exact model in
    whatever order; with larger k neighbours are committed together, which on local text is worse than a random choice.

    Args:
        score: `probability`, `margin` (p(1) - p(2)), `entropy` (lowest first) or `random`.
        k: tokens per step.
        steps: instead of k: as many per step as fill each block in so many steps.
        block_length: None: the whole canvas at once.
    """
    select = TopK(k) if steps is None else Quota(steps)
    if steps is not None and k != 1:
        raise ValueError(f"k={k} and steps={steps} contradict each other; give one of them")
    one_of("score", score, SCORES)
    return Strategy(score=SCORES[score], select=select, window=window_of(block_length))


def threshold(threshold: float = 0.9, score: Score = "probability", block_length: int | None = 32) -> Strategy:
    """Every position whose confidence reaches the threshold, at least one (Fast-dLLM, 2505.22618). The workhorse of
    fast greedy decoding: as many tokens per step as the model is sure of.

    Args:
        threshold: least probability (of the margin, or exp(-entropy), with those scores); above 1: one token a step.
        score: `probability`, `margin`, `entropy` or `random`.
        block_length: None: the whole canvas at once.
    """
    one_of("score", score, SCORES)
    return Strategy(score=SCORES[score], select=Threshold(threshold), window=window_of(block_length))


def llada(
    steps: int = 128, block_length: int | None = None, remasking: Literal["low_confidence", "random"] = "low_confidence"
) -> Strategy:
    """LLaDA's sampler (2502.09992, algorithms 4 and 5): tokens are drawn everywhere, the likeliest draws are committed,
    a fixed number per step. For parity with published results; at temperatures above 0 it is biased (see `Draw`).

    Args:
        steps: steps per block; the masks of a block are split evenly over them, the larger shares first.
        block_length: None: the whole answer is one block.
        remasking: what decides, `low_confidence` or `random`. (Nothing is masked again: the paper's word.)
    """
    scorers = {"low_confidence": drawn_probability, "random": random_score}
    one_of("remasking", remasking, scorers)
    return Strategy(
        score=scorers[remasking],
        select=Quota(steps),
        draw=Draw(before_select=True),
        window=window_of(block_length),
    )


PRESETS: dict[str, Callable[..., Strategy]] = {
    "ancestral": ancestral,
    "first_hitting": first_hitting,
    "semi_autoregressive": semi_autoregressive,
    "confidence": confidence,
    "threshold": threshold,
    "llada": llada,
    "dream": dream,
    "factor": factor,
    "eb": eb,
    "dynamic": dynamic,
    "sdar": sdar,
    "llada2": llada2,
    "entropy_threshold": entropy_threshold,
    "klass": klass,
    "swd": swd,
    "credit": credit,
    "saber": saber,
    "pc": pc,
    "wedlm": wedlm,
    "dus": dus,
    "spaced": spaced,
    "hierarchy": hierarchy,
    "remdm": remdm,
    "p2": p2,
    "t2t": t2t,
    "t2m": t2m,
    "wino": wino,
    "prophet": prophet,
    "freedave": freedave,
    "lopa": lopa,
    "clad": clad,
    "depcap": depcap,
    "dapd": dapd,
    "spans": spans,
    "adablock": adablock,
    "swordsman": swordsman,
    "dcd": dcd,
    "fast_dllm_v2": fast_dllm_v2,
    "fast_dllm": fast_dllm,
    "block_diffusion": block_diffusion,
}


def unknown_strategy(name: str) -> ValueError:
    """The error for a name that is not in `PRESETS`."""
    near = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return ValueError(f"there is no strategy {name!r}{hint} There are: {', '.join(PRESETS)}")


def build_strategy(name: str, **knobs: object) -> Strategy:
    """The strategy of this name with these knobs.

    Raises ValueError for an unknown name, and for knobs it does not take or values out of range, listing what it takes.
    """
    if name not in PRESETS:
        raise unknown_strategy(name)
    parameters = inspect.signature(PRESETS[name]).parameters
    unknown = [knob for knob in knobs if knob not in parameters]
    if unknown:
        takes = ", ".join(f"{knob}={parameter.default!r}" for knob, parameter in parameters.items())
        raise ValueError(f"strategy {name!r} does not take {', '.join(unknown)}; it takes {takes}")
    return PRESETS[name](**checked(PRESETS[name], knobs))
