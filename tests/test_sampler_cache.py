"""Caches: each computes what its paper says (float64 reference), the exact ones change nothing, nothing is shared.

Without a cache is the definition; the symptoms of public bugs give some tests their names.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import reference_cache as ref
import reference_model
import torch
from sampler_tools import MASK, VOCAB, Outcome, label, ragged_canvas, same_rows, tiny_model, unmask
from torch import Tensor

from mdlm.denoiser import ModelDenoiser
from mdlm.samplers.cache import CachePolicy, Feeder, NoCache
from mdlm.samplers.cache_feeder import StoredFeeder
from mdlm.samplers.cache_policies import (
    CACHES,
    BlockCache,
    DelayedCache,
    DualCache,
    IntervalCache,
    PrefixCache,
    cache_named,
)
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.driver import Run, row_keys
from mdlm.samplers.guidance import Guided
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.revise import Revision
from mdlm.samplers.select import Threshold, TopK
from mdlm.samplers.state import State, Step
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.windows import Blocks, whole

PROMPTS = [[3, 4, 5, 6, 7], [8, 3], [6], [4, 4, 4]]
"""None is empty: among masks alone all predictions of this model tie, and rounding decides."""
NEW = [9, 11, 5, 1]


def canvas(rows: slice = slice(None)) -> Canvas:
    return Canvas.from_prompts(PROMPTS[rows], NEW[rows])


def ragged() -> Canvas:
    return ragged_canvas()[[0, 2, 3, 4, 5]]  # all but the row without a prompt


def with_cache(strategy: Strategy, cache: CachePolicy) -> Strategy:
    return dataclasses.replace(strategy, cache=cache)


def blocks(cache: CachePolicy, length: int = 4, align: Any = "answer", threshold: float = 0.5) -> Strategy:
    return Strategy(select=Threshold(threshold), window=Blocks(length, align=align), cache=cache)


def same(left: Outcome, right: Outcome, counts: bool = False, tolerance: float = 1e-12) -> None:
    """Both wrote the same, log-probabilities up to rounding; with `counts` at the same cost."""
    for a, b in zip(left.rows(), right.rows(), strict=True):
        for name in ("tokens", "step_map", "nfe", "forwards", "finish") + (("tokens_fed",) if counts else ()):
            assert a[name] == b[name], name
        for x, y in zip(a["log_probs"], b["log_probs"], strict=True):
            assert x is y is None or abs(x - y) <= tolerance, (x, y)


def fed(outcome: Outcome) -> list[int]:
    return outcome.last.tokens_fed.tolist()


# --- what each cache computes

RULES: dict[str, tuple[str, CachePolicy, tuple[int, int]]] = {
    "none": ("none", NoCache(), (10**9, 10**9)),
    "prefix": ("prefix", PrefixCache(), (10**9, 10**9)),
    "prefix, refreshed": ("prefix", PrefixCache(refresh=2), (2, 10**9)),
    "dual": ("dual", DualCache(), (10**9, 10**9)),
    "dual, refreshed": ("dual", DualCache(refresh=3), (3, 10**9)),
    "delayed": ("delayed", DelayedCache(refresh=None), (10**9, 10**9)),
    "delayed, refreshed": ("delayed", DelayedCache(refresh=3), (3, 10**9)),
    "interval": ("interval", IntervalCache(prompt_refresh=4, answer_refresh=3, ratio=0.0), (4, 3)),
    "interval, a quarter": ("interval", IntervalCache(prompt_refresh=4, answer_refresh=3), (4, 3)),
    "interval, half": ("interval", IntervalCache(prompt_refresh=9, answer_refresh=9, ratio=0.5), (9, 9)),
    "block": ("block", BlockCache(), (10**9, 10**9)),
}


@pytest.mark.parametrize("shift", [False, True], ids=["", "shifted"])
@pytest.mark.parametrize("rule", RULES)
def test_a_cache_computes_what_its_paper_says(rule: str, shift: bool) -> None:
    name, policy, every = RULES[rule]
    by_blocks = name == "block"
    denoiser = tiny_model(shift_logits=shift, block_size=4 if by_blocks else None)
    weights = {key: value.double().numpy() for key, value in denoiser.model.state_dict().items()}
    config = denoiser.model.config
    shape = reference_model.Shape(2, 1, 2, block_size=config.block_size, shift=shift, eps=config.rms_norm_eps)
    outcome = unmask(denoiser, canvas(), blocks(policy, align="row" if by_blocks else "answer", threshold=0.75))
    lengths = set()
    for row, (prompt, new) in zip(outcome.rows(), zip(PROMPTS, NEW), strict=True):
        editable = list(range(len(prompt), len(prompt) + new))
        got = ref.unmask(
            weights,
            shape,
            prompt + [MASK] * new,
            editable,
            MASK,
            VOCAB,
            4,
            0.75,
            name,
            every,
            from_row_start=by_blocks,
            ratio=getattr(policy, "ratio", 0.0),
        )
        assert row["tokens"] == got.tokens
        assert [s for s in row["step_map"] if s >= 0] == [got.steps[i] for i in editable]
        assert (row["forwards"], row["tokens_fed"]) == (got.forwards, got.tokens_fed)
        for i in editable:  # float64 but for the rotary angles
            assert row["log_probs"][i] == pytest.approx(got.log_probs[i], abs=1e-5)
        lengths.add(row["forwards"])
    assert len(lengths) > 2, "rows should begin blocks and end in different steps"


@pytest.mark.parametrize("cache", ["prefix", "dual", "delayed", "interval"])
def test_approximate_caches_do_change_something(cache: str) -> None:
    """Else the tests above and below would show nothing."""
    denoiser = tiny_model()
    plain, cached = (unmask(denoiser, canvas(), blocks(cache_named(name), 4)) for name in ("none", cache))
    probabilities = [[x for x in o.last.log_probs.flatten().tolist() if x == x] for o in (plain, cached)]
    assert len(probabilities[0]) == len(probabilities[1])
    assert max(abs(a - b) for a, b in zip(*probabilities)) > 1e-3
    assert sum(fed(cached)) < sum(fed(plain))


def test_a_ratio_of_1_feeds_the_whole_answer_in_every_forward() -> None:
    everything = IntervalCache(prompt_refresh=10**6, answer_refresh=10**6, ratio=1.0)
    always = IntervalCache(prompt_refresh=10**6, answer_refresh=1, ratio=0.0)
    same(*(unmask(tiny_model(), canvas(), blocks(cache, 4)) for cache in (everything, always)), counts=True)


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_a_ratio_out_of_range_is_an_error(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"ratio is .*; it must lie in \[0, 1\]"):
        IntervalCache(ratio=ratio)


# --- where nothing may change

EXACT: dict[str, CachePolicy] = {
    "prefix": PrefixCache(refresh=1),
    "dual": DualCache(refresh=1),
    "delayed": DelayedCache(refresh=1),
    "interval": IntervalCache(prompt_refresh=1, answer_refresh=1),
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "confidence": {"block_length": 4},
    "threshold": {"threshold": 0.4, "block_length": 3},
    "ancestral": {"steps": 6, "block_length": 4},
    "first_hitting": {},
    "llada": {"steps": 2, "block_length": 4},
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cache", EXACT)
def test_with_and_without_a_cache_are_one_algorithm(cache: str, strategy: str, implementation: str) -> None:
    """Fast-dLLM #20: cached and uncached sampling were different algorithms. Refreshed every step they are the same."""
    denoiser = tiny_model()
    denoiser.model.set_attn_implementation(implementation)
    plain = build_strategy(strategy, **STRATEGIES[strategy])
    first, second = (unmask(denoiser, ragged(), with_cache(plain, c)) for c in (NoCache(), EXACT[cache]))
    same(first, second, counts=True)


@pytest.mark.parametrize("shift", [False, True], ids=["", "shifted"])
@pytest.mark.parametrize("window", [Blocks(4, align="row"), Blocks(3), Blocks(8, align="row"), whole], ids=label)
@pytest.mark.parametrize("select", [TopK(1), TopK(3), Threshold(0.4)], ids=label)
def test_the_block_cache_is_exact(select: Any, window: Any, shift: bool) -> None:
    """bd3lms #28: is the cache exact? In a block-causal model it is, whatever the windows."""
    denoiser = tiny_model(block_size=4, shift_logits=shift)
    plain = Strategy(select=select, window=window)
    first, second = (unmask(denoiser, ragged(), with_cache(plain, c)) for c in (NoCache(), BlockCache()))
    same(first, second, tolerance=1e-10)
    assert sum(fed(second)) < sum(fed(first))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_block_cache_is_exact_for_every_strategy(strategy: str) -> None:
    denoiser = tiny_model(block_size=4)
    plain = dataclasses.replace(build_strategy(strategy, **STRATEGIES[strategy]), window=Blocks(4, align="row"))
    first, second = (unmask(denoiser, ragged(), with_cache(plain, c)) for c in (NoCache(), BlockCache()))
    same(first, second, tolerance=1e-10)


@dataclass(frozen=True)
class MaskAgain:
    """Masks the leftmost written token again, up to twice: mostly one of a finished block."""

    reads_decided: bool = False
    max_edits: int = 2

    def pending(self, state: State) -> Tensor:
        return torch.zeros_like(state.rows, dtype=torch.bool)

    def __call__(self, step: Step, committed: Tensor) -> Revision:
        state = step.state
        held = state.editable & ~state.masked & (state.edits < 2)
        return Revision(remask=held & (held.cumsum(-1) == 1) & (state.step % 3 == 2))


def test_tokens_masked_again_invalidate_the_block_cache() -> None:
    denoiser = tiny_model(block_size=4)
    plain = Strategy(select=TopK(2), window=Blocks(4, align="row"), revise=MaskAgain())
    first, second = (unmask(denoiser, canvas(), with_cache(plain, c)) for c in (NoCache(), BlockCache()))
    assert max(first.frames[-1].step_map.flatten().tolist()) > 6, "blocks were returned to"
    same(first, second, tolerance=1e-10)


@pytest.mark.parametrize("shift", [False, True], ids=["", "shifted"])
@pytest.mark.parametrize("cache", ["block", "prefix", "dual", "delayed", "interval"])
def test_any_tokens_and_any_questions(cache: str, shift: bool) -> None:
    """Tokens change anywhere and go back, any positions are asked about, rows are left out: the block cache is right,
    and the others have fed every token as it is now."""
    denoiser = tiny_model(block_size=4 if cache == "block" else None, shift_logits=shift)
    rows = canvas()
    run = Run(denoiser, rows, blocks(cache_named(cache)), row_keys(0, len(rows)))
    assert isinstance(run.feed, StoredFeeder)
    generator = torch.Generator().manual_seed(5)

    def some(share: float) -> Tensor:
        return (torch.rand(rows.tokens.shape, generator=generator) < share) & rows.real

    tokens = run.state.tokens.clone()
    for step in range(90):
        fresh = torch.randint(1, VOCAB, tokens.shape, generator=generator)
        if step % 3 == 0:
            tokens = torch.where(some(0.06), fresh, torch.where(some(0.06), run.state.tokens, tokens))
        position = torch.arange(tokens.shape[1])
        run.state.block = torch.randint(0, 2 + step // 20, (len(rows),), generator=generator)
        window = rows.real & (position // 4 == run.state.block[:, None])
        at = some(0.4) & window
        if not bool(at.any()):
            continue
        got = run.feed(run.state, tokens, at, window)
        if cache == "block":
            torch.testing.assert_close(got, denoiser(tokens, attention_mask=rows.real, at=at), rtol=0, atol=1e-12)
        else:
            asked = at.any(-1)
            assert torch.equal(run.feed.memory["tokens"][asked][rows.real[asked]], tokens[asked][rows.real[asked]])


@pytest.mark.parametrize("cache", [PrefixCache(), DualCache()], ids=label)
@pytest.mark.parametrize("shift", [False, True], ids=["", "shifted"])
def test_the_first_step_of_every_block_is_the_uncached_forward(cache: CachePolicy, shift: bool) -> None:
    denoiser = tiny_model(shift_logits=shift)
    run = Run(denoiser, canvas(), blocks(cache), row_keys(0, len(PROMPTS)))
    watch = Watch(run.feed, denoiser)
    run.feed = watch
    while not run.done:
        run.advance()
    assert watch.begun >= 3 + 3 + 2 + 1
    assert watch.continued > 0


@dataclass
class Watch:
    """A feeder that compares another with the plain forward where a row's block begins."""

    feed: Feeder
    denoiser: ModelDenoiser
    begun: int = 0
    continued: int = 0

    def __call__(self, state: State, tokens: Tensor, at: Tensor, window: Tensor) -> Tensor:
        got = self.feed(state, tokens, at, window)
        real = torch.arange(tokens.shape[1]) < state.lengths[:, None]
        expected = self.denoiser(tokens, attention_mask=real, at=at)
        begins = (state.block_step == 0)[at.nonzero()[:, 0]]
        torch.testing.assert_close(got[begins], expected[begins], rtol=0, atol=1e-12)
        self.begun += int((state.block_step == 0).sum())
        self.continued += int((state.block_step > 0).sum())
        return got

    def keep(self, rows: Tensor) -> None:
        self.feed.keep(rows)


BRANCHED = [(BlockCache(), {"block_size": 4}), (DualCache(refresh=1), {})]


@pytest.mark.parametrize(("base", "options"), BRANCHED, ids=label)
def test_branches_of_guidance_do_not_share_a_cache(base: CachePolicy, options: dict[str, Any]) -> None:
    denoiser = tiny_model(**options)
    outcomes = [
        unmask(denoiser, canvas(), blocks(Guided(1.5, cache), align="row", threshold=0.9))
        for cache in (NoCache(), base)
    ]
    same(*outcomes, tolerance=1e-10)
    unguided = unmask(denoiser, canvas(), blocks(base, align="row", threshold=0.9))
    assert unguided.rows()[0]["log_probs"] != outcomes[0].rows()[0]["log_probs"]


# --- rows and requests are independent

ALL: dict[str, tuple[CachePolicy, dict[str, Any]]] = {
    name: (make(), {"block_size": 4} if name == "block" else {}) for name, make in CACHES.items()
}


@pytest.mark.parametrize("cache", ALL)
def test_requests_do_not_share_state(cache: str) -> None:
    """dLLM-Cache keeps its features in one object per process: two requests at a time read each other's."""
    policy, options = ALL[cache]
    denoiser, strategy = tiny_model(**options), blocks(policy)
    canvases = [canvas(slice(0, 2)), canvas(slice(1, 4))]
    runs = [Run(denoiser, c, strategy, row_keys(0, len(c))) for c in canvases]
    while not all(run.done for run in runs):
        for run in runs:
            if not run.done:
                run.advance()
    for run, alone in zip(runs, (unmask(denoiser, c, strategy) for c in canvases)):
        frame = run.frame()
        for name in ("tokens", "step_map", "nfe", "tokens_fed"):
            assert torch.equal(getattr(frame, name), getattr(alone.last, name)), name
        torch.testing.assert_close(frame.log_probs, alone.last.log_probs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("strategy", ["threshold", "ancestral"])
@pytest.mark.parametrize("cache", ALL)
def test_batches_run_and_rows_answer_as_alone(cache: str, strategy: str) -> None:
    """Fast-dLLM #7, #17, d2Cache #2: caches crashed for more than one row, or rows changed with their neighbours."""
    policy, options = ALL[cache]
    denoiser = tiny_model(**options)
    plan = with_cache(build_strategy(strategy, **STRATEGIES[strategy]), policy)
    rows = ragged()
    seeds = list(range(7, 7 + len(rows)))
    order = [3, 0, 1, 4, 2]
    together = unmask(denoiser, rows, plan, seeds)
    permuted = unmask(denoiser, rows[order], plan, [seeds[i] for i in order])
    for place, row in enumerate(order):
        alone = unmask(denoiser, rows[[row]], plan, [seeds[row]])
        same_rows(together.row(row), alone.row(0), exact=False)
        same_rows(permuted.row(place), alone.row(0), exact=False)


@pytest.mark.parametrize("cache", ALL)
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_padding_of_the_input_changes_nothing(cache: str, left: bool) -> None:
    policy, options = ALL[cache]
    denoiser, strategy = tiny_model(**options), blocks(policy)
    width = max(map(len, PROMPTS))
    ids, real = torch.full((len(PROMPTS), width), 2), torch.zeros((len(PROMPTS), width), dtype=torch.bool)
    for row, prompt in enumerate(PROMPTS):
        place = slice(width - len(prompt), width) if left else slice(0, len(prompt))
        ids[row, place], real[row, place] = torch.tensor(prompt, dtype=torch.int64), True
    padded = unmask(denoiser, Canvas.from_padded(ids, real, new_tokens=6), strategy)
    same(padded, unmask(denoiser, Canvas.from_prompts(PROMPTS, 6), strategy), counts=True)
