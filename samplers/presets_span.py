"""Presets that commit spans, and presets with windows of their own; see `presets.py` for the conventions."""

from __future__ import annotations

from typing import Literal

from mdlm.samplers.arguments import one_of
from mdlm.samplers.conflicts import CrossProbability, MutualTop1, ThresholdedAttention
from mdlm.samplers.phases import MovingThreshold, Relay
from mdlm.samplers.select import Threshold
from mdlm.samplers.solvers import Exact, Greedy, Solver, matching
from mdlm.samplers.spans import Clusters, Delimited, EntropyJumps, Runs, UnitRule, tokens
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.windows import Sliding, SubBlocks, window_of
from mdlm.samplers.windows_planned import AdaBlock, EntropyBlocks, InfluenceBlocks

CONFLICTS = ("attention", "none")
SOLVERS: dict[str, Solver] = {"matching": matching, "greedy": Greedy("length"), "exact": Exact()}
UNITS = ("runs", "tokens", "jumps", "chunks")


def clad(
    threshold: float = 0.7,
    block_length: int | None = 32,
    conflict: Literal["attention", "none"] = "attention",
    layers: int = 4,
    max_len: int | None = None,
    max_gap: int = 0,
) -> Strategy:
    """CLAD (Qi et al., 2605.29607): runs of sure positions are committed whole, but of two runs that attend to each
    other most only the longer one. A lower threshold than `threshold` at the same quality; at least half of what
    `threshold` would commit is committed. Needs a model that gives attention (`MDLMForMaskedLM`, or a public one loaded
    with `attn_implementation="eager"`).

    Args:
        threshold: least probability; published values lie between 0.70 and 0.75.
        block_length: None: the whole canvas at once.
        conflict: `none` commits every run, which is `threshold`.
        layers: attention is averaged over so many last layers (all, if there are fewer).
        max_len: cut longer runs; None: never.
        max_gap: positions inside a run that may be unsure (they stay undecided).
    """
    one_of("conflict", conflict, CONFLICTS)
    graph = None if conflict == "none" else MutualTop1(layers)
    select = Clusters(threshold, Runs(max_len, max_gap), conflict=graph)
    return Strategy(select=select, window=window_of(block_length))


def depcap(
    gamma: float = -16.0,
    threshold: float = 0.0,
    strict: bool = True,
    high: float = 0.95,
    block_length: int | None = 32,
    longest_block: int | None = None,
) -> Strategy:
    """DepCap (2604.15750): positions are committed by descending confidence unless one would as well write the other's
    token, log p_i(x_j) + log p_j(x_i) > gamma. Guards against writing a word twice; needs no attention.

    Args:
        gamma: nats; higher means fewer conflicts.
        threshold: least probability of a position that is committed; 0: conflicts alone decide.
        strict: False: the algorithm as printed, in which positions of at least `high` are never checked.
        high: see `strict`.
        block_length: length of a block, or of the shortest one with `longest_block`; None: the whole canvas at once.
        longest_block: experimental: blocks as long as the last block's influence reaches, up to this length.
    """
    window = window_of(block_length)
    if longest_block is not None:
        if block_length is None:
            raise ValueError("longest_block needs a block_length, that of the shortest block")
        window = InfluenceBlocks(block_length, longest_block)
    graph = CrossProbability(gamma, strict, high)
    return Strategy(select=Clusters(threshold, tokens, conflict=graph, solver=Greedy()), window=window)


def dapd(
    low: float = 0.001,
    high: float = 0.004,
    layers: float = 0.3,
    until: float = 0.5,
    threshold: float = 0.9,
    block_length: int | None = None,
) -> Strategy:
    """DAPD (2603.12996): positions that attend to each other are not committed together; the most tied and sure come
    first. For answers with independent parts. Needs a model that gives attention (see `clad`).

    Args:
        low: least attention (mean of both directions) that is a conflict, at the start.
        high: the same at the end; it rises with the fraction decided.
        layers: attention is averaged over this fraction of the layers, the last ones, or over so many.
        until: when only this fraction of the row is undecided, `threshold` takes over.
        threshold: least probability in that second phase.
        block_length: None: the whole canvas at once.
    """
    graph = ThresholdedAttention(low, high, layers)
    early = Clusters(0.0, tokens, conflict=graph, solver=Greedy("influence"))
    return Strategy(select=Relay(early, Threshold(threshold), until), window=window_of(block_length))


def spans(
    budget: float | None = 0.1,
    threshold: float = 0.7,
    units: Literal["runs", "tokens", "jumps", "chunks"] = "runs",
    reach: Literal["token", "min", "mean"] = "token",
    conflict: Literal["attention", "none"] = "none",
    solver: Literal["matching", "greedy", "exact"] = "matching",
    max_len: int | None = None,
    max_gap: int = 0,
    jump: float = 0.5,
    delimiters: tuple[int | str, ...] = (),
    layers: int = 4,
    block_length: int | None = 32,
) -> Strategy:
    """Whole spans, best first, as long as the sum of their entropies without the largest stays within a budget: for an
    exact model and tokens sampled at temperature 1, each step costs at most `budget` nats of divergence (the guarantee
    of `eb`, kept for spans; this package's own). With `units="tokens"` and `threshold=0` it is the entropy-bounded
    sampler by confidence.

    Args:
        budget: nats per step; None: no budget.
        threshold: least probability; of what, says `reach`.
        units: `runs` of adjacent positions, single `tokens`, runs cut at `jumps` of entropy, or `chunks` that end at
            one of the `delimiters`.
        reach: `token`: each position must reach the threshold; `min`, `mean`: the span's least or mean score.
        conflict: `attention`: drop spans as `clad` does.
        solver: how conflicts are settled: `matching`, `greedy` (longest first) or `exact` (an error beyond 16 spans
            with a conflict).
        max_len: cut longer runs into such pieces; None: never. For `runs`.
        max_gap: unsure positions allowed inside a run. For `runs`.
        jump: nats. For `jumps`.
        delimiters: tokens, as ids or as text. For `chunks`.
        layers: of how many last layers attention is read. For `conflict="attention"`.
        block_length: None: the whole canvas at once.
    """
    one_of("units", units, UNITS)
    one_of("conflict", conflict, CONFLICTS)
    one_of("solver", solver, SOLVERS)
    if delimiters and units != "chunks":
        raise ValueError(f"delimiters end chunks, but units is {units!r}; take units='chunks' or leave them out")
    if solver != "matching" and conflict == "none":
        raise ValueError(f"solver {solver!r} settles conflicts, but conflict is 'none'; take conflict='attention'")
    rule: UnitRule
    if units == "chunks":
        rule = Delimited(delimiters)
    elif units == "jumps":
        rule = EntropyJumps(jump)
    else:
        rule = tokens if units == "tokens" else Runs(max_len, max_gap)
    graph = None if conflict == "none" else MutualTop1(layers)
    settle = None if graph is None else SOLVERS[solver]
    select = Clusters(threshold, rule, reach, graph, settle, budget)
    return Strategy(select=select, window=window_of(block_length))


def adablock(
    delimiters: tuple[int | str, ...] = ("\n",),
    threshold: float = 0.9,
    block_length: int = 32,
    share: float = 0.25,
    least: float = 0.3,
) -> Strategy:
    """AdaBlock-dLLM (2509.26432): blocks end at line ends, or whatever `delimiters` are, so that a block is a step of
    the text; inside, `threshold`.

    Args:
        delimiters: tokens that end a block, as ids or as text, which needs the tokenizer.
        threshold: least probability inside a block.
        block_length: of a block without a delimiter.
        share: a delimiter is looked for in the next fraction of the answer.
        least: probability it must have.
    """
    return Strategy(select=Threshold(threshold), window=AdaBlock(delimiters, block_length, share, least))


def swordsman(
    jump: float = 0.5,
    shortest_block: int = 8,
    longest_block: int = 64,
    first_threshold: float = 0.9,
    last_threshold: float = 0.8,
) -> Strategy:
    """Swordsman (2602.04399): a block ends where the entropy of neighbouring positions jumps; inside, the threshold
    moves with what is done. The paper's thresholds are not published; these are ours.

    Args:
        jump: nats.
        shortest_block: positions.
        longest_block: positions.
        first_threshold: least probability in an undecided block.
        last_threshold: least probability in a block that is almost done.
    """
    select = MovingThreshold(first_threshold, last_threshold)
    return Strategy(select=select, window=EntropyBlocks(jump, shortest_block, longest_block))


def dcd(threshold: float = 0.9, masks: int = 16, length: int = 128, renew: int = 32) -> Strategy:
    """Deferred Commitment Decoding (2601.02076): a sliding window instead of blocks, so that an unsure position at a
    block's end is not forced.

    Args:
        threshold: least probability.
        masks: undecided positions in the window.
        length: positions in the window.
        renew: after so many tokens caches and histories begin anew.
    """
    return Strategy(select=Threshold(threshold), window=Sliding(masks, length, renew))


def fast_dllm_v2(
    threshold: float = 0.9,
    block_length: int = 32,
    part_length: int = 8,
    align: Literal["answer", "row"] = "answer",
) -> Strategy:
    """Fast-dLLM v2 (2509.26328): blocks cut into parts that are finished from left to right. For block-causal models;
    the strategy brings no cache.

    Args:
        threshold: least probability; above 1: one token a step.
        block_length: the model's block size.
        part_length: of a part.
        align: count blocks from the `answer`'s first position, or from the `row`'s, as block-causal models are trained.
    """
    return Strategy(select=Threshold(threshold), window=SubBlocks(block_length, part_length, align))
