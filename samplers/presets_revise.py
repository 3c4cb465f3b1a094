"""Presets that revise what they wrote, or look beyond the next step; see `presets.py` for the conventions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from mdlm.samplers.arguments import one_of
from mdlm.samplers.cache import CachePolicy, NoCache
from mdlm.samplers.draw import Draw
from mdlm.samplers.early_exit import EarlyExit
from mdlm.samplers.edit import Behind, Doubt, EditTokens, MaskDoubtful, Outvoted, Unlikely
from mdlm.samplers.lookahead import Lookahead
from mdlm.samplers.remdm import (
    Cap,
    MaskRate,
    Planner,
    Plateau,
    Process,
    Remask,
    Rescale,
    Reveal,
    Sigma,
    Standing,
    Unplanned,
    by_confidence,
    even,
)
from mdlm.samplers.select import Quota, Selector, Threshold, TopK
from mdlm.samplers.speculate import Speculative
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.windows import window_of
from mdlm.samplers.wino import MaskedInTurn, NarrowOut, Shadows, WideIn

DEFAULT_ETA = {"cap": 0.008, "rescale": 0.01, "loop": 0.02}
"""ReMDM's `eta` by rule: cap and loop as published."""

DEFAULT_DOUBT = {"low_prob": 0.1, "other": 0.9, "logit_diff": 0.3}
"""Thresholds of token-to-mask revision by rule."""


def remdm(
    sigma: Literal["cap", "rescale", "conf", "loop"] = "cap",
    eta: float | None = None,
    steps: int = 128,
    block_length: int | None = None,
    t_on: float = 0.55,
    t_off: float = 0.05,
    alpha_on: float = 0.9,
) -> Strategy:
    """ReMDM (2503.00307): ancestral sampling that masks decided tokens again at random and keeps the mask rate, so more
    steps buy quality even beyond the number of tokens. For base models; combine with `top_p` 0.9 as the paper does.

    Args:
        sigma: probability of masking again: `cap` min(eta, largest possible), `rescale` eta times the largest possible,
            `conf` the largest possible shared by softmax(-probability at commit), `loop` eta on a plateau of the mask
            rate and 0 elsewhere.
        eta: strength in [0, 1]; None: 0.008 (cap), 0.01 (rescale), 0.02 (loop). 0: nothing is masked again; `conf`
            takes none.
        steps: time steps, per block if there are blocks; only those that reveal something cost a forward.
        block_length: None: the whole canvas at once.
        t_on: time at which the plateau of `loop` begins (time runs from 1 to 0).
        t_off: time at which it ends.
        alpha_on: share of decided positions on it.
    """
    plateau = Plateau(t_on, t_off, alpha_on)
    one_of("sigma", sigma, ("cap", "rescale", "conf", "loop"))
    if sigma != "loop" and plateau != Plateau():
        raise ValueError(f"t_on, t_off and alpha_on shape the plateau of sigma='loop'; sigma={sigma!r} has none")
    rule: Sigma
    if sigma == "conf":
        if eta is not None:
            raise ValueError(f"sigma='conf' takes no eta, got {eta}; its strength is the largest possible")
        rule = by_confidence
    else:
        rules: dict[str, Callable[[float], Sigma]] = {"cap": Cap, "rescale": Rescale, "loop": Standing}
        rule = rules[sigma](DEFAULT_ETA[sigma] if eta is None else eta)
    rate: MaskRate = plateau if sigma == "loop" else even
    process = Process(steps, rule, rate)
    return Strategy(
        select=Reveal(process),
        revise=None if eta == 0 else Remask(process),
        window=window_of(block_length),
        draw=Draw(temperature=1.0),
    )


def p2(steps: int = 64, eta: float = 1.0, block_length: int | None = None) -> Strategy:
    """P2 self-planning (2502.03540): every step keeps the best share of all positions, so a decided token that has
    become unlikely makes room for another. The model must predict decided positions too, not copy them.

    Args:
        steps: steps per block; each costs a forward.
        eta: weight of the log-probability of decided tokens; 0: nothing is taken back, larger: more is.
        block_length: None: the whole canvas at once.
    """
    planner = Planner(steps, eta)
    return Strategy(
        select=planner,
        revise=Unplanned(planner),
        window=window_of(block_length),
        draw=Draw(temperature=1.0, before_select=True),
    )


def t2t(
    tau_mask: float = 0.7,
    tau_edit: float = 0.5,
    block_length: int | None = 32,
    post_steps: int = 16,
    max_edits: int = 8,
) -> Strategy:
    """LLaDA2.1's threshold decoding with token editing (2602.08676). Its quality mode is the default, its speed mode
    `tau_mask=0.5, tau_edit=0`. For models trained to correct wrong tokens.

    Args:
        tau_mask: commit every mask whose best token has at least this probability, and one in any case.
        tau_edit: replace a decided token where another one has a probability above this; 1: never.
        block_length: None: the whole canvas at once.
        post_steps: most steps of editing after the last mask of a block.
        max_edits: most edits per position.
    """
    return Strategy(
        select=Threshold(tau_mask),
        window=window_of(block_length),
        revise=EditTokens(tau_edit, post_steps, max_edits),
    )


def t2m(
    doubt: Literal["low_prob", "other", "logit_diff"] = "low_prob",
    threshold: float | None = None,
    tau_mask: float = 0.7,
    block_length: int | None = 32,
    max_edits: int = 3,
    ratio: float | None = None,
) -> Strategy:
    """Threshold decoding that masks doubtful tokens again (2604.18738) instead of replacing them: the position is
    predicted anew beside others that are still open.

    Args:
        doubt: `low_prob`: the written token has a probability below the threshold; `other`: another token has one above
            it; `logit_diff`: the written token's logit lies further below the best one.
        threshold: None: 0.1 (low_prob), 0.9 (other), 0.3 nats (logit_diff).
        tau_mask: commit every mask whose best token has at least this probability, and one in any case.
        block_length: None: the whole canvas at once.
        max_edits: how often a position may be masked again.
        ratio: mask at most this share of a block's decided tokens in one step, the most doubtful; None: all of them.
    """
    rules: dict[str, Callable[[float], Doubt]] = {"low_prob": Unlikely, "other": Outvoted, "logit_diff": Behind}
    one_of("doubt", doubt, rules)
    if threshold is not None and not threshold >= 0:
        raise ValueError(f"threshold is {threshold}; it must be 0 or more")
    rule = rules[doubt](DEFAULT_DOUBT[doubt] if threshold is None else threshold)
    return Strategy(
        select=Threshold(tau_mask), window=window_of(block_length), revise=MaskDoubtful(rule, max_edits, ratio)
    )


def wino(
    tau_wide: float = 0.6,
    tau_narrow: float = 0.9,
    block_length: int | None = 128,
    verify: Literal["shadow", "masked"] = "shadow",
    max_edits: int = 16,
) -> Strategy:
    """WINO (2507.18578): commits at a low threshold, then masks again what the model, not seeing it, would not write.
    Fast greedy decoding that can repair itself; a block of n positions takes at most n steps.

    Args:
        tau_wide: commit probabilities above this, at most 70 % of the block's masks and 20 (5 are always allowed), at
            least one.
        tau_narrow: mask again where the leave-one-out probability is below this; 0: never.
        block_length: None: the whole canvas at once.
        verify: how a token is left out: `shadow` feeds one more token per decided position (needs our own model under
            `eager` or `sdpa`; exact for one layer), `masked` one more row per decided position (any model; exact).
        max_edits: how often a position may be masked again.
    """
    if verify not in ("shadow", "masked"):
        raise ValueError(f"verify is {verify!r}; it must be 'shadow' or 'masked'")
    narrow = NarrowOut(tau_narrow, max_edits)
    judge: CachePolicy = Shadows() if verify == "shadow" else MaskedInTurn()
    return Strategy(
        select=WideIn(tau_wide),
        window=window_of(block_length),
        revise=narrow,
        cache=judge if narrow.reads_decided else NoCache(),
    )


def prophet(
    steps: int | None = None,
    gap_early: float = 7.5,
    gap_middle: float = 5.0,
    gap_late: float = 2.5,
    region: tuple[int, int] | None = None,
    block_length: int | None = None,
) -> Strategy:
    """Prophet (2508.19982): decodes by confidence until the two best tokens lie far enough apart everywhere, then
    writes the rest at once by its most probable tokens. Cheap, and the fewer the surprises of a text the better.

    Args:
        steps: as many commits per step as fill each block in so many steps; None: one.
        gap_early: mean gap in nats that ends a block of which less than a third is decided; infinite: never.
        gap_middle: likewise for less than two thirds.
        gap_late: likewise after that.
        region: (first, last + 1), counted from the first position to write: average over these (where the answer is
            expected) instead of all that is undecided.
        block_length: None: the whole canvas at once.
    """
    base: Selector = TopK(1) if steps is None else Quota(steps)
    exit_ = EarlyExit(base, (gap_early, gap_middle, gap_late), None if region is None else (region[0], region[1]))
    return Strategy(select=exit_, window=window_of(block_length))


def freedave(drafts: int = 4, k: int = 1, block_length: int | None = 32) -> Strategy:
    """FreeDave's lossless self-speculation (2510.00294) over `confidence`: the same tokens in fewer forwards, each of
    up to `drafts` evaluations. Worth it where a forward of one row leaves the machine idle.

    Args:
        drafts: canvases per forward, the row's own included; 1: no speculation.
        k: tokens per step.
        block_length: None: the whole canvas at once.
    """
    return Strategy(select=TopK(k), window=window_of(block_length), cache=Speculative(drafts, k))


def lopa(branches: int = 4, threshold: float = 0.9, block_length: int | None = 32) -> Strategy:
    """LoPA (2512.16229): threshold decoding that tries `branches` further commits in one forward and keeps the one that
    leaves the rest surest, so that more passes the threshold in the next step. Each forward has 1 + branches rows.

    Args:
        branches: further positions tried per step, one at a time; 0: threshold decoding.
        threshold: commit every probability of at least this, and one in any case.
        block_length: None: the whole canvas at once.
    """
    return Strategy(
        select=Lookahead(Threshold(threshold), branches), window=window_of(block_length), cache=Speculative(drafts=1)
    )
