"""Presets that commit as many tokens per step as the predictions allow, and Dream's; see `presets.py` for the
conventions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from mdlm.samplers.arguments import one_of
from mdlm.samplers.draw import Draw
from mdlm.samplers.history import Credit, Direction, Stability, StableThreshold
from mdlm.samplers.saber import Backtrack, RisingBar
from mdlm.samplers.scores import (
    SCORES,
    DistancePenalty,
    PositionCalibrated,
    Scorer,
    Tempered,
    drawn_probability,
    margin,
    negative_entropy,
)
from mdlm.samplers.select import Threshold, TopK
from mdlm.samplers.select_adaptive import (
    Dilated,
    Dynamic,
    EntropyBudget,
    Factor,
    Hierarchy,
    MinSpacing,
    ShrinkingQuota,
    ShrinkingReveal,
)
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.windows import Sliding, window_of

Score = Literal["probability", "margin", "entropy", "random"]
Confidence = Literal["probability", "margin", "entropy"]


def _score(name: str, random: bool = False) -> Scorer:
    allowed = [score for score in SCORES if random or score != "random"]
    one_of("score", name, allowed)
    return SCORES[name]


def dream(
    alg: Literal["origin", "maskgit_plus", "topk_margin", "entropy"] = "origin",
    steps: int = 512,
    eps: float = 1e-3,
    alg_temp: float = 0.0,
    score_tempered: bool = False,
    block_length: int | None = None,
) -> Strategy:
    """Dream's samplers (2508.15487): a share of what is left per step, at random or the best scored. For parity with
    published results; at temperatures above 0 all but `origin` draw tokens before they rank positions, which is biased
    (see `Draw`). The shift of Dream's logits belongs to its `Denoiser`.

    Args:
        alg: `origin`: each position at random; `maskgit_plus`: likeliest drawn token first; `topk_margin`: largest
            p(1) - p(2) first; `entropy`: lowest first.
        steps: 1 or more, per block if there are blocks; beyond the number of masks they cost nothing.
        eps: end of the time grid, in [0, 0.5].
        alg_temp: 0: the best positions; above: drawn in proportion to exp(score / alg_temp). Not for `origin`.
        score_tempered: score what tokens are drawn from, after temperature and truncation, as published; off: the
            model's own probabilities, which do not tie near 1. Not for `origin`.
        block_length: None: the whole canvas at once.
    """
    scorers: dict[str, Scorer] = {
        "maskgit_plus": drawn_probability,
        "topk_margin": margin,
        "entropy": negative_entropy,
    }
    if alg == "origin":
        if alg_temp != 0 or score_tempered:
            raise ValueError("alg='origin' ranks nothing: it takes neither alg_temp nor score_tempered")
        return Strategy(select=ShrinkingReveal(steps, eps), window=window_of(block_length))
    one_of("alg", alg, ("origin", *scorers))
    score = scorers[alg]
    return Strategy(
        score=Tempered(score) if score_tempered else score,
        select=ShrinkingQuota(steps, eps, alg_temp, linear=alg != "entropy"),
        draw=Draw(before_select=True),
        window=window_of(block_length),
    )


def factor(factor: float = 1.0, compat: bool = False, block_length: int | None = 32) -> Strategy:
    """Fast-dLLM's factor rule (2505.22618, Theorem 1): as many of the surest tokens as their number allows, so that
    greedy tokens committed together are the joint argmax. Adapts where a threshold is fixed.

    Args:
        factor: 0 or more; 0: one token a step, 1: what the theorem allows, larger: faster and unsafe.
        compat: the published off-by-one, for parity.
        block_length: None: the whole canvas at once.
    """
    return Strategy(select=Factor(factor, compat), window=window_of(block_length))


def eb(gamma: float = 0.1, score: Score = "entropy", block_length: int | None = None) -> Strategy:
    """Entropy-bounded sampler (EB, 2505.24857): the longest prefix whose dependence is at most gamma. The adaptive rule
    with a guarantee: at temperature 1 a run of an exact model loses at most gamma nats of KL per step.

    Args:
        gamma: budget per step in nats, 0 or more; 0.01 to 1 is usual. 0: only certain tokens join the first.
        score: what sorts: `entropy` (lowest first), `probability`, `margin` or `random`.
        block_length: None: the whole canvas at once.
    """
    return Strategy(score=_score(score, random=True), select=EntropyBudget(gamma), window=window_of(block_length))


def dynamic(
    threshold: float = 0.9,
    quota: int = 1,
    steps: int | None = None,
    score: Confidence = "probability",
    block_length: int | None = 32,
) -> Strategy:
    """Everything above the threshold if that is at least the quota, else the quota's best: a threshold with a speed
    that is kept whatever the model says. `sdar` and `llada2` are its published forms.

    Args:
        threshold: probability (margin, exp(-entropy)) to exceed; 0 or more, above 1: never.
        quota: least tokens per step, 1 or more.
        steps: instead of quota: at most so many steps per block, its masks split evenly over them.
        score: `probability`, `margin` or `entropy`.
        block_length: None: the whole canvas at once.
    """
    if steps is not None and quota != 1:
        raise ValueError(f"quota={quota} and steps={steps} contradict each other; give one of them")
    return Strategy(score=_score(score), select=Dynamic(threshold, quota, steps), window=window_of(block_length))


def sdar(threshold: float = 0.85, steps: int = 4, block_length: int | None = 4) -> Strategy:
    """SDAR's dynamic decoding (2510.06303): tokens are drawn everywhere at temperature 1, then `dynamic` on the drawn
    tokens' probabilities. For block-causal models with small blocks; biased (see `Draw`).

    Args:
        threshold: probability to exceed; 0 or more, above 1: never.
        steps: most steps per block, 1 or more.
        block_length: 4 or 8 as the model was trained; None: the whole canvas at once.
    """
    return Strategy(
        score=drawn_probability,
        select=Dynamic(threshold, steps=steps),
        draw=Draw(temperature=1.0, before_select=True),
        window=window_of(block_length),
    )


def llada2(threshold: float = 0.95, quota: int = 1, block_length: int | None = 32) -> Strategy:
    """LLaDA2.0's threshold decoding (2512.15745): every drawn token above the threshold, else the `quota` likeliest.

    Args:
        threshold: probability to exceed; 0.95 is published, 0.85 is faster and worse.
        quota: tokens in a step in which nothing exceeds it, 1 or more.
        block_length: 32 and 16 are as good as each other, 64 is worse; None: the whole canvas at once.
    """
    return Strategy(
        score=drawn_probability,
        select=Dynamic(threshold, quota),
        draw=Draw(before_select=True),
        window=window_of(block_length),
    )


def entropy_threshold(max_entropy: float = 0.45, block_length: int | None = 32) -> Strategy:
    """Every position with entropy of at most `max_entropy`, at least one: the rule of dParallel (2509.26488) and
    d3LLM. For models distilled to be sure early; a budget per token, where `eb` bounds a whole step.

    Args:
        max_entropy: nats, 0 or more; 0.45 to 0.5 is published.
        block_length: None: the whole canvas at once.
    """
    if not max_entropy >= 0:
        raise ValueError(f"max_entropy is {max_entropy}; it must be 0 or more (nats)")
    return Strategy(score=negative_entropy, select=Threshold(math.exp(-max_entropy)), window=window_of(block_length))


def klass(
    threshold: float = 0.6, tau_kl: float = 0.015, n: int = 2, quota: int = 1, block_length: int | None = 64
) -> Strategy:
    """KLASS (2511.05664): commit what is sure and has stopped moving, so the threshold may be low. Needs a few steps
    per block before it commits in parallel: for long blocks.

    Args:
        threshold: probability to exceed; published: 0.6 (LLaDA, GSM8K), 0.9 (Dream, MATH).
        tau_kl: KL between consecutive predictions in nats; 0.001 to 0.015 is published.
        n: steps in a row that must stay below it, 1 or more.
        quota: tokens in a step in which nothing is ready, 1 or more.
        block_length: None: the whole canvas at once.
    """
    return Strategy(select=StableThreshold(threshold, tau_kl, n, quota), window=window_of(block_length))


def swd(
    lam: float = 1.0,
    threshold: float | None = 0.7,
    k: int = 1,
    score: Confidence = "probability",
    direction: Direction = "prev_now",
    first: Literal["uniform", "skip"] = "uniform",
    block_length: int | None = 32,
) -> Strategy:
    """Stability-weighted decoding (SWD, 2604.17068): a score counts less while its prediction still moves. A heuristic
    against tokens that flicker, no guarantee; any other selector takes `Stability(score)` as its score.

    Args:
        lam: weight of the movement (nats of KL), 0 or more; 0: none. The paper's value is unknown and 1 can hurt: tune.
        threshold: commit every weighted score of at least this; None: the `k` best.
        k: tokens per step if there is no threshold, 1 or more.
        score: `probability`, `margin` or `entropy`.
        direction: `prev_now`: KL(previous || now); `now_prev`: the other way round.
        first: in a block's first step, compare with the `uniform` law or `skip` the weighting.
        block_length: None: the whole canvas at once.
    """
    if threshold is not None and k != 1:
        raise ValueError(f"threshold={threshold} and k={k} contradict each other; give k with threshold=None")
    return Strategy(
        score=Stability(_score(score), lam, direction, first),
        select=TopK(k) if threshold is None else Threshold(threshold),
        window=window_of(block_length),
    )


def credit(
    alpha: float = 0.7, gamma: float = 0.2, decay: float = 0.8, threshold: float = 0.9, block_length: int | None = 32
) -> Strategy:
    """CreditDecoding (2510.06133): tokens that have led for some steps gain probability and pass the threshold sooner.
    Faster than `threshold` where the model wavers little; changes what is drawn as well.

    Args:
        alpha: weight of the credit, 0 or more; 0: `threshold`.
        gamma: exponent of the probability that is credited, 0 or more.
        decay: what is left of the credit after a step, in [0, 1].
        threshold: least probability after fusion; above 1: one token a step.
        block_length: None: the whole canvas at once.
    """
    fusion = Credit(alpha, gamma, decay)
    return Strategy(
        select=Threshold(threshold), transforms=() if alpha == 0 else (fusion,), window=window_of(block_length)
    )


def saber(least: int = 2, backtrack: bool = True, max_edits: int = 8, block_length: int | None = None) -> Strategy:
    """Saber (2510.18165): commit what is surer than commits have been on average, then take back what has become
    doubtful. For code; the model must be able to doubt tokens that it sees.

    Args:
        least: least commits per step, 1 or more; at least `least` // 2 of them are taken back if there are others.
        backtrack: whether anything is taken back.
        max_edits: how often a position may be taken back, 0 or more.
        block_length: None: the whole canvas at once (published: 256).
    """
    return Strategy(
        select=RisingBar(least),
        revise=Backtrack(least, max_edits) if backtrack else None,
        window=window_of(block_length),
    )


def pc(
    frequencies: Sequence[float] | None = None,
    lam: float = 0.25,
    alpha: float = 10.0,
    k: int = 1,
    block_length: int | None = None,
) -> Strategy:
    """Position-calibrated confidence (PC-Sampler, later UNCODE; 2508.13021): near tokens first, common ones later, so
    that punctuation does not fix the structure before the words. For one or few tokens per step.

    Args:
        frequencies: count or frequency of each token id in text like what is to be written (a tensor will do); None:
            all alike.
        lam: preference for the start, 0 or more: 0 (Sudoku), 0.25 (code, mathematics), 1 (Countdown).
        alpha: cap of p * -log f in nats, above 0.
        k: tokens per step, 1 or more.
        block_length: None: the whole canvas at once.
    """
    table = None if frequencies is None else torch.as_tensor(frequencies, dtype=torch.float64)
    return Strategy(score=PositionCalibrated(table, lam, alpha), select=TopK(k), window=window_of(block_length))


def wedlm(max_entropy: float = 0.4, penalty: float = 0.02, masks: int = 16) -> Strategy:
    """WeDLM's rule (2512.22737): among the next `masks` undecided positions, every one with entropy + penalty *
    distance to the first of at most `max_entropy`. Fills from the left, so an exact prefix cache grows early. (Only the
    rule: that tokens change places is a matter of WeDLM's model.)

    Args:
        max_entropy: nats, 0 or more.
        penalty: nats per position, 0 or more; 0.02 in code, 0.1 in the paper (with 6 masks).
        masks: undecided positions in the window, 1 or more; it slides on as they are decided, and is at most 8 times as
            long.
    """
    if not max_entropy >= 0:
        raise ValueError(f"max_entropy is {max_entropy}; it must be 0 or more (nats)")
    return Strategy(
        score=DistancePenalty(negative_entropy, penalty),
        select=Threshold(math.exp(-max_entropy)),
        window=Sliding(masks, 8 * masks, renew=None),
    )


def dus(base: int = 2, block_length: int | None = 32) -> Strategy:
    """Dilated unmasking (DUS, 2506.19037): positions far apart first, then halfway between; log(block length) steps per
    block whatever the model says. The fastest end of every comparison; good on local text, bad on copies at a distance.

    Args:
        base: ratio of the strides of two rounds, 2 or more; the block length or more: all at once.
        block_length: None: the whole canvas at once.
    """
    return Strategy(select=Dilated(base), window=window_of(block_length))


def spaced(gamma: float = 0.1, spacing: int = 2, score: Score = "entropy", block_length: int | None = None) -> Strategy:
    """`eb`, but no two commits of a step closer than `spacing`: dilation as a filter (2506.19037), against neighbours
    that are decided without seeing each other. Keeps the bound of `eb`.

    Args:
        gamma: budget per step in nats, 0 or more.
        spacing: least distance of two commits of one step, 1 (no filter) or more.
        score: what sorts: `entropy`, `probability`, `margin` or `random`.
        block_length: None: the whole canvas at once.
    """
    select = MinSpacing(EntropyBudget(gamma), spacing)
    return Strategy(score=_score(score, random=True), select=select, window=window_of(block_length))


def hierarchy(threshold: float = 0.9, low: float = 0.4, block_length: int | None = 32) -> Strategy:
    """dInfer's hierarchical decoding (2510.08666): `threshold`, and the best position of each run of masks, so that
    what is left is divided. Faster than `threshold` where masks are scattered.

    Args:
        threshold: probability to exceed anywhere; 0 or more.
        low: probability to exceed as the best of a run; 0 or more.
        block_length: None: the whole canvas at once.
    """
    return Strategy(select=Hierarchy(threshold, low), window=window_of(block_length))
