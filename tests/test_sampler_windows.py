"""Windows: against plain-Python references, as reductions to blocks and to none, and every row by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference_spans as ref
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_tools import EOS, MASK, HashDenoiser, preset, ragged_canvas, same_rows, tiny_model, unmask

from mdlm.samplers.cache_policies import DualCache, PrefixCache
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.draw import Draw
from mdlm.samplers.driver import Run, row_keys
from mdlm.samplers.edit import MaskDoubtful, Unlikely
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.select import Quota, RandomOrder, Threshold, TopK
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.windows import Blocks, PlanningWindow, Sliding, Strides, SubBlocks, Window, whole
from mdlm.samplers.windows_planned import AdaBlock, EntropyBlocks, InfluenceBlocks

HUGE = 10**6
PLANNED = [
    AdaBlock((3, 7), 4, 0.6, 0.2),
    EntropyBlocks(0.3, 2, 5),
    InfluenceBlocks(2, 5, 0.3, 1.0),
]
ALL = [*PLANNED, Sliding(3, 5, 4), Sliding(2, HUGE, None), SubBlocks(5, 2), SubBlocks(4, 3, "row"), Strides(4, 2)]
each_window = pytest.mark.parametrize("window", ALL, ids=str)


def forward_of(denoiser: Any) -> Any:
    """Probabilities of one row as lists."""

    def forward(row: list[int]) -> list[list[float]]:
        probs: list[list[float]] = denoiser(torch.tensor([row]))[0].double().exp().tolist()
        return probs

    return forward


def check_planned(window: Window, end_of: Any, canvas: Canvas, scale: float, threshold: float) -> None:
    """The product's rows are those of the reference, which sees one row at a time."""
    found = unmask(HashDenoiser(scale), canvas, Strategy(window=window, select=Threshold(threshold))).rows()
    for number, row in enumerate(found):
        length = int(canvas.lengths[number])
        editable = canvas.editable[number, :length].tolist()
        tokens, steps, forwards = ref.decode_planned(
            canvas.tokens[number, :length].tolist(),
            editable,
            forward_of(HashDenoiser(scale)),
            end_of(sum(editable)),
            threshold,
            MASK,
        )
        assert (row["tokens"], row["step_map"], row["nfe"]) == (tokens, steps, forwards)


def long_canvas() -> Canvas:
    """Rows whose blocks begin in different steps."""
    return Canvas.from_prompts([[3, 4, MASK], [], [EOS], [5, 6, 7, 8]], [23, 17, 1, 30])


CANVASES = pytest.mark.parametrize("canvas", [long_canvas(), ragged_canvas()], ids=["long", "ragged"])
SHAPES = pytest.mark.parametrize(("scale", "threshold"), [(8.0, 0.6), (12.0, 0.9), (3.0, 0.3), (8.0, 0.0)])


@CANVASES
@SHAPES
@pytest.mark.parametrize(("length", "share", "least"), [(4, 0.25, 0.3), (3, 0.6, 0.5), (9, 1.0, 0.0), (5, 0.5, 1.0)])
def test_adablock_equals_the_reference(
    canvas: Canvas, scale: float, threshold: float, length: int, share: float, least: float
) -> None:
    """Published code plans one block for the whole batch from its first row; here every row has its own."""
    delimiters = {3, 7}

    def end_of(answer: int) -> Any:
        def end(predicted: dict[int, list[float]], start: int) -> int:
            words = {i: p.index(max(p)) for i, p in predicted.items()}
            sure = {i: max(p) for i, p in predicted.items()}
            return ref.adablock_end(words, sure, start, int(share * answer), delimiters, least, length)

        return end

    check_planned(AdaBlock(tuple(delimiters), length, share, least), end_of, canvas, scale, threshold)


@CANVASES
@SHAPES
@pytest.mark.parametrize(("jump", "shortest", "longest"), [(0.3, 2, 6), (0.0, 1, 9), (0.6, 3, 100)])
def test_entropy_blocks_equal_the_reference(
    canvas: Canvas, scale: float, threshold: float, jump: float, shortest: int, longest: int
) -> None:
    def end_of(answer: int) -> Any:
        return lambda predicted, start: ref.entropy_end(
            {i: ref.entropy(p) for i, p in predicted.items()}, start, jump, shortest, longest
        )

    check_planned(EntropyBlocks(jump, shortest, longest), end_of, canvas, scale, threshold)


@CANVASES
@SHAPES
@pytest.mark.parametrize(("influence", "most"), [(0.5, 0.0), (0.1, 2.0), (0.9, 1.0)])
def test_influence_blocks_equal_the_reference(
    canvas: Canvas, scale: float, threshold: float, influence: float, most: float
) -> None:
    shortest, longest = 2, 6

    def end_of(answer: int) -> Any:
        memory: dict[int, list[float]] = {}

        def end(predicted: dict[int, list[float]], start: int) -> int:
            now = {i: p for i, p in predicted.items() if i < start + 2 * longest}
            then = dict(memory)
            memory.clear()
            memory.update(now)
            return ref.influence_end(now, then, start, (shortest, longest), influence, most)

        return end

    check_planned(InfluenceBlocks(shortest, longest, influence, most), end_of, canvas, scale, threshold)


def test_influence_decides_some_length() -> None:
    canvas = Canvas.from_prompts([[3, 4]], 60)
    counts = {
        influence: int(
            unmask(
                HashDenoiser(), canvas, Strategy(window=InfluenceBlocks(2, 12, influence, 0.0), select=Threshold(0.0))
            ).last.nfe[0]
        )
        for influence in (0.0, 2.8, HUGE)
    }
    assert counts[0.0] < counts[2.8] < counts[HUGE] == 30, "a block a step: long, some, the shortest"


@settings(max_examples=60, deadline=None)
@given(undecided=st.lists(st.booleans(), min_size=1, max_size=16), masks=st.integers(1, 6), length=st.integers(1, 9))
def test_sliding_windows_equal_the_reference(undecided: list[bool], masks: int, length: int) -> None:
    """Published DCD moves one window for all rows of a batch."""
    undecided = [*undecided, True]
    rows = [undecided, undecided[::-1], [True] * len(undecided)]
    state = unstarted(torch.tensor(rows))
    window, number = Sliding(masks, length, 3)(state)
    for row, flags in enumerate(rows):
        left, right = ref.sliding(flags, masks, length)
        assert window[row].nonzero()[:, 0].tolist() == list(range(left, right))
        assert int(number[row]) == (len(flags) - sum(flags)) // 3


def unstarted(masked: torch.Tensor) -> Any:
    """A state in which these positions are undecided."""
    canvas = Canvas(
        torch.zeros_like(masked, dtype=torch.int64),
        torch.ones_like(masked),
        torch.tensor([masked.shape[1]] * len(masked)),
    )
    state = Run(HashDenoiser(), canvas, Strategy(), row_keys(0, len(masked))).state
    state.masked = masked
    return state


def test_a_sliding_window_does_not_force_its_last_position() -> None:
    """Blocks of 4 commit everything of a block before anything behind it; the window goes past a doubtful position."""
    canvas = Canvas.from_prompts([[3]], 40)
    found = unmask(HashDenoiser(), canvas, build_strategy("dcd", threshold=0.7, masks=4, length=40)).last
    steps = found.step_map[0, 1:].reshape(10, 4)
    assert bool((steps[:-1].amax(dim=1) > steps[1:].amin(dim=1)).any())
    blocks = unmask(HashDenoiser(), canvas, build_strategy("threshold", threshold=0.7, block_length=4)).last
    steps = blocks.step_map[0, 1:].reshape(10, 4)
    assert bool((steps[:-1].amax(dim=1) < steps[1:].amin(dim=1)).all())


def test_sub_blocks_are_parts_of_blocks() -> None:
    canvas = Canvas.from_prompts([[3, 4]], 12)
    one = Strategy(window=SubBlocks(5, 2), select=Threshold(0.0))
    steps = unmask(HashDenoiser(), canvas, one).last.step_map[0, 2:].tolist()
    assert steps == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 6, 6], "parts 2, 2, 1, 2, 2, 1, 2: a part ends with its block"
    row = Strategy(window=SubBlocks(5, 2, "row"), select=Threshold(0.0))
    steps = unmask(HashDenoiser(), canvas, row).last.step_map[0, 2:].tolist()
    assert steps == [0, 0, 1, 2, 2, 3, 3, 4, 5, 5, 6, 6], "counted from the start of the row"


def test_strides_follow_a_longer_first_window() -> None:
    canvas = Canvas.from_prompts([[3, 4]], 11)
    found = unmask(HashDenoiser(), canvas, Strategy(window=Strides(5, 2), select=Threshold(0.0)))
    assert found.last.step_map[0, 2:].tolist() == [0] * 5 + [1] * 2 + [2] * 2 + [3] * 2


# --- reductions -----------------------------------------------------------------------------------------------------

SELECTS = pytest.mark.parametrize("select", [Threshold(0.6), TopK(2), Quota(3)], ids=str)


@SELECTS
@pytest.mark.parametrize(
    "window",
    [
        Sliding(HUGE, HUGE, None),
        SubBlocks(HUGE, HUGE),
        Strides(HUGE, 1),
        AdaBlock((EOS,), HUGE, 0.0),
        EntropyBlocks(1e9, 1, HUGE),
        InfluenceBlocks(100, 100),
    ],
    ids=str,
)
def test_a_window_as_long_as_the_answer_is_none(window: Window, select: Any) -> None:
    shared = {"select": select, "draw": Draw(temperature=1.0)}
    ours = unmask(HashDenoiser(), ragged_canvas(), Strategy(window=window, **shared), seed=4)
    assert ours.rows() == unmask(HashDenoiser(), ragged_canvas(), Strategy(window=whole, **shared), seed=4).rows()


@pytest.mark.parametrize(
    "window",
    [
        Sliding(1, HUGE, None),
        Sliding(HUGE, 1),
        SubBlocks(8, 1),
        Strides(1, 1),
        AdaBlock((EOS,), 1, 0.0),
        EntropyBlocks(0.0, 1, 1),
        InfluenceBlocks(1, 1),
    ],
    ids=str,
)
def test_a_window_of_one_decodes_from_left_to_right(window: Window) -> None:
    shared = {"select": Threshold(0.1), "draw": Draw(temperature=1.0)}
    ours = unmask(HashDenoiser(), ragged_canvas(), Strategy(window=window, **shared), seed=4)
    blocks = unmask(HashDenoiser(), ragged_canvas(), Strategy(window=Blocks(1), **shared), seed=4)
    assert ours.rows() == blocks.rows()
    for row, editable in zip(ours.last.step_map, ragged_canvas().editable):
        assert row[editable].tolist() == list(range(int(editable.sum())))


@SELECTS
@pytest.mark.parametrize("length", [1, 3, 4])
def test_blocks_without_a_signal_are_fixed_blocks_and_cost_the_same(length: int, select: Any) -> None:
    """Same tokens, evaluations and tokens fed: planning asks for nothing of its own."""
    canvas = long_canvas()
    shared = {"select": select, "draw": Draw(temperature=1.0)}
    fixed = unmask(HashDenoiser(), canvas, Strategy(window=Blocks(length), **shared), seed=1)
    for window in (
        AdaBlock((3,), length, 0.0),
        AdaBlock((3,), length, 1.0, 1.0),
        EntropyBlocks(0.0, length, length),
        EntropyBlocks(1e9, 1, length),
        InfluenceBlocks(length, length, 0.0, 1e9),
        SubBlocks(length, length),
        Strides(length, length),
    ):
        assert unmask(HashDenoiser(), canvas, Strategy(window=window, **shared), seed=1).rows() == fixed.rows(), window


def test_the_presets_reduce_to_threshold() -> None:
    canvas = long_canvas()
    plain = unmask(HashDenoiser(), canvas, build_strategy("threshold", threshold=0.7, block_length=8)).rows()
    for name, knobs in (
        ("adablock", {"threshold": 0.7, "block_length": 8, "share": 0.0}),
        ("swordsman", {"first_threshold": 0.7, "last_threshold": 0.7, "shortest_block": 8, "longest_block": 8}),
        ("fast_dllm_v2", {"threshold": 0.7, "block_length": 8, "part_length": 8}),
    ):
        assert unmask(HashDenoiser(), canvas, preset(name, **knobs)).rows() == plain, name
    free = unmask(HashDenoiser(), canvas, build_strategy("threshold", threshold=0.7, block_length=None)).rows()
    assert unmask(HashDenoiser(), canvas, build_strategy("dcd", threshold=0.7, masks=99, length=99)).rows() == free


# --- rows, progress, other components -------------------------------------------------------------------------------


@each_window
def test_windows_of_rows_do_not_depend_on_each_other(window: Window) -> None:
    canvas, order = ragged_canvas(), [4, 2, 0, 5, 1, 3]
    strategy = Strategy(window=window, select=Threshold(0.6), draw=Draw(temperature=1.0))
    together = unmask(HashDenoiser(), canvas, strategy, seed=list(range(6)))
    moved = unmask(HashDenoiser(), canvas[order], strategy, seed=order)
    for place, row in enumerate(order):
        alone = unmask(HashDenoiser(), canvas[[row]], strategy, seed=[row])
        same_rows(together.row(row), alone.row(0))
        same_rows(together.row(row), moved.row(place))


@each_window
def test_a_block_is_finished_before_what_lies_right_of_its_end(window: Window) -> None:
    found = unmask(HashDenoiser(), long_canvas(), Strategy(window=window, select=TopK(1))).last
    assert found.nfe.tolist() == [23, 17, 1, 30], "one token in every step"
    if not isinstance(window, Sliding):
        steps = found.step_map[3, 4:].tolist()
        ends = [i for i in range(1, 31) if sorted(steps[:i]) == list(range(i))]
        assert max(b - a for a, b in zip([0, *ends], ends)) <= 18, "blocks end"


@pytest.mark.parametrize("window", PLANNED, ids=str)
def test_windows_that_plan_need_a_selector_that_looks(window: Window) -> None:
    assert isinstance(window, PlanningWindow)
    with pytest.raises(ValueError, match=f"{type(window).__name__} sizes its blocks by predictions, but RandomOrder"):
        unmask(HashDenoiser(), long_canvas(), Strategy(window=window, select=RandomOrder()))


@each_window
def test_tokens_taken_back_in_an_earlier_block_are_written_again(window: Window) -> None:
    strategy = Strategy(window=window, select=Threshold(0.3), revise=MaskDoubtful(Unlikely(0.9), max_edits=2))
    canvas = long_canvas()
    found = unmask(HashDenoiser(3.0), canvas, strategy)
    assert not bool(found.last.masked.any())
    taken = sum(int((~a.masked & b.masked).sum()) for a, b in zip(found.frames, found.frames[1:]))
    assert taken > 0, "something was masked again"


@pytest.mark.parametrize("cache", [PrefixCache(), DualCache()], ids=str)
@each_window
def test_windows_work_under_caches(window: Window, cache: Any) -> None:
    canvas = Canvas.from_prompts([[3, 4, 5], [6]], [13, 9])
    strategy = Strategy(window=window, select=Threshold(0.3), cache=cache)
    together = unmask(tiny_model(), canvas, strategy)
    assert not bool(together.last.masked.any())
    for row in range(2):
        same_rows(together.row(row), unmask(tiny_model(), canvas[[row]], strategy).row(0), exact=False)


def test_two_runs_of_one_strategy_do_not_share_blocks() -> None:
    strategy = Strategy(window=PLANNED[0], select=Threshold(0.6))
    canvases = [Canvas.from_prompts([[3, 4]], 20), Canvas.from_prompts([[7, 8, 5]], 26)]
    runs = [Run(HashDenoiser(), canvas, strategy, row_keys(0, 1)) for canvas in canvases]
    while not all(run.done for run in runs):
        for run in runs:
            if not run.done:
                run.advance()
    for run, canvas in zip(runs, canvases):
        assert torch.equal(run.frame().tokens, unmask(HashDenoiser(), canvas, strategy).last.tokens)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sliding(0), "masks is 0; it must be 1 or more"),
        (lambda: Sliding(length=0), "length is 0"),
        (lambda: Sliding(renew=0), "renew is 0"),
        (lambda: SubBlocks(4, 5), r"part is 5; it must lie in 1 \.\. 4"),
        (lambda: SubBlocks(0, 1), "block_length is 0"),
        (lambda: SubBlocks(4, 2, "left"), "align is 'left'"),  # type: ignore[arg-type]
        (lambda: Strides(4, 5), r"stride is 5; it must lie in 1 \.\. 4"),
        (lambda: AdaBlock(()), "delimiters is empty"),
        (lambda: AdaBlock((3,), 0), "block_length is 0"),
        (lambda: AdaBlock((3,), share=1.5), r"share is 1.5; it must lie in \[0, 1\]"),
        (lambda: AdaBlock((3,), least=-0.1), "least is -0.1"),
        (lambda: EntropyBlocks(-1.0), "jump is -1.0"),
        (lambda: EntropyBlocks(0.5, 9, 8), "1 <= shortest <= longest"),
        (lambda: InfluenceBlocks(0, 8), "1 <= shortest <= longest"),
        (lambda: InfluenceBlocks(entropy=math.nan), "entropy is nan"),
    ],
)
def test_wrong_values_say_what_is_allowed(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("window", PLANNED, ids=str)
def test_a_row_kept_for_edits_stays_in_its_last_block(window: Any) -> None:
    state = unstarted(torch.tensor([[False] * 6]))
    state.block = torch.tensor([3])
    bounds = window._bounds(state)
    bounds["start"], bounds["end"] = torch.tensor([2]), torch.tensor([5])
    positions, number = window(state)
    assert positions[0].nonzero()[:, 0].tolist() == [2, 3, 4]
    assert number.tolist() == [3]
