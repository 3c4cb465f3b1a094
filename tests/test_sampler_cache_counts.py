"""What caches cost (counted, against formulas and against the model's own calls), and what a user may get wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from sampler_tools import MASK, VOCAB, HashDenoiser, tiny_model, unmask
from test_sampler_cache import ALL, NEW, PROMPTS, STRATEGIES, blocks, canvas, ragged, with_cache
from torch import Tensor

from mdlm.denoiser import FunctionDenoiser, ModelDenoiser
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
from mdlm.samplers.generate import generate
from mdlm.samplers.guidance import Guided
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.select import Threshold
from mdlm.samplers.select_adaptive import Factor
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.windows import Blocks


@dataclass(frozen=True)
class Counting(ModelDenoiser):
    """Counts rows and real tokens of every call."""

    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def __call__(self, tokens: Tensor, **options: Any) -> Tensor:
        self._count(tokens, options["attention_mask"])
        return super().__call__(tokens, **options)

    def feed(self, tokens: Tensor, kv: Any, **options: Any) -> Tensor:
        self._count(tokens, options["attention_mask"])
        return super().feed(tokens, kv, **options)

    def _count(self, tokens: Tensor, real: Tensor | None) -> None:
        self.rows.append(len(tokens))
        self.tokens.append(tokens.numel() if real is None else int(real.sum()))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("guidance", [0.0, 1.0])
@pytest.mark.parametrize("cache", ALL)
def test_counts_are_those_of_the_model(cache: str, guidance: float, strategy: str) -> None:
    """bd3lms #29: the forward that stores a finished block was not counted."""
    policy, options = ALL[cache]
    counting = Counting(tiny_model(**options).model)
    plan = with_cache(build_strategy(strategy, **STRATEGIES[strategy]), Guided(guidance, policy))
    last = unmask(counting, ragged(), plan).last
    assert int(last.forwards.sum()) == sum(counting.rows)
    assert int(last.tokens_fed.sum()) == sum(counting.tokens)
    assert torch.equal(last.forwards, last.nfe)


PROMPT, ANSWER, BLOCK = 6, 12, 4
"""Of one row, unmasked one token a step: 12 steps, 3 blocks."""


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        ("none", 12 * 18),
        ("prefix", 3 * 18 + 3 * (12 + 8 + 4)),  # a whole forward a block, then window and suffix
        ("dual", 3 * 18 + 9 * 4),
        ("delayed", 18 + sum(range(1, 12)) + 11),  # 11 .. 1 masks, and the token just written (refreshed once, below)
        ("interval", 18 + 12 + 43),
    ],
)
def test_tokens_fed_of_one_row(cache: str, expected: int) -> None:
    """Fast-dLLM #11: is the dual cache cheaper than the prefix cache? Counted, not guessed."""
    row = Canvas.from_prompts([list(range(3, 9))], ANSWER)
    policy = IntervalCache(ratio=0.0) if cache == "interval" else cache_named(cache)
    last = unmask(tiny_model(), row, blocks(policy, BLOCK, threshold=1.1)).last
    if cache == "delayed":  # forward 9 feeds all 18 instead of 4 masks and a token
        expected += 18 - 5
    if cache == "interval":  # forwards 2-6: 3, 2, 1 masks + 1 new; 4 + 1, 3 + 1; 7: the answer; 8-12: 1 + 1, 4 + 1, ...
        expected = 18 + (4 + 3 + 2 + 5 + 4) + 12 + (2 + 5 + 4 + 3 + 2)
    assert last.tokens_fed.tolist() == [expected]
    assert last.forwards.tolist() == [12]


def test_the_forward_that_stores_a_finished_block_is_counted() -> None:
    """bd3lms #29. Positions 6, 7 end block 1; blocks 2, 3 are whole; 16, 17 are block 4. Each block is fed in each of
    its steps, what lies before it once more in the step in which it begins."""
    row = Canvas.from_prompts([list(range(3, 9))], ANSWER)
    strategy = blocks(BlockCache(), BLOCK, align="row", threshold=1.1)
    last = unmask(tiny_model(block_size=4), row, strategy).last
    assert last.tokens_fed.tolist() == [(8 + 4) + (4 + 4 * 4) + (4 + 4 * 4) + (4 + 2 * 2)]
    assert last.forwards.tolist() == [12]


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_block_that_its_first_forward_finishes_costs_one_forward(cache: str) -> None:
    """Fast-dLLM code: at least one more forward in every block, though nothing was left to decide."""
    row = Canvas.from_prompts([list(range(3, 9))], ANSWER)
    last = unmask(tiny_model(), row, blocks(cache_named(cache), BLOCK, threshold=0.0)).last
    assert last.forwards.tolist() == [3]
    assert last.tokens_fed.tolist() == [3 * 18]


def test_nothing_is_committed_unconditionally_at_the_start_of_a_block() -> None:
    """Fast-dLLM code (Dream): because of the shifted logits the first token of each block was written from the whole
    forward, sure or not, and from row 0 only."""
    denoiser = tiny_model(shift_logits=True)
    outcome = unmask(denoiser, canvas(), blocks(DualCache(), BLOCK, threshold=1.1))
    for row in range(len(PROMPTS)):
        steps = [s for s in outcome.row(row)["step_map"] if s >= 0]
        assert sorted(steps) == list(range(NEW[row])), "one token a step, in every row"
    assert any(outcome.row(0)["step_map"][5 + start] % BLOCK for start in (0, 4)), "not always the first of its block"


# --- what a user may get wrong


@pytest.mark.parametrize("cache", [name for name in CACHES if name != "none"])
def test_a_denoiser_without_the_capability_is_refused_when_the_run_starts(cache: str) -> None:
    function = FunctionDenoiser(lambda tokens: torch.zeros(*tokens.shape, VOCAB), MASK, VOCAB)
    for denoiser in (function, HashDenoiser()):
        with pytest.raises(ValueError, match=f"stores keys and values, which {type(denoiser).__name__} cannot"):
            Run(denoiser, canvas(), blocks(cache_named(cache)), row_keys(0, len(PROMPTS)))


def test_the_block_cache_needs_a_block_causal_model() -> None:
    with pytest.raises(ValueError, match="BlockCache needs a block-causal model"):
        BlockCache().start(tiny_model())


def test_a_model_whose_attention_cannot_is_refused_when_the_run_starts() -> None:
    denoiser = tiny_model()
    denoiser.model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="flex_attention cannot attend to stored keys and values"):
        DualCache().start(denoiser)


@pytest.mark.parametrize("policy", [PrefixCache, DualCache, DelayedCache])
def test_intervals_below_one_are_refused(policy: Any) -> None:
    with pytest.raises(ValueError, match="refresh is 0; it must be 1"):
        policy(refresh=0)


def test_intervals_of_the_interval_cache_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="answer_refresh is -1"):
        IntervalCache(answer_refresh=-1)


def test_generate_takes_a_cache_by_name() -> None:
    model = tiny_model().model
    options: dict[str, Any] = {"strategy": "confidence", "block_length": 4, "max_new_tokens": 8, "eos": "ignore"}
    plain, dual = (generate(model, None, [[3, 4]], cache=name, **options) for name in (None, "dual"))
    assert plain.tokens_fed.tolist() == [8 * 10]
    assert dual.tokens_fed.tolist() == [2 * 10 + 6 * 4]
    guided = generate(model, None, [[3, 4]], cache="dual", guidance=0.5, **options)
    assert guided.tokens_fed.tolist() == [2 * (2 * 10 + 6 * 4)]
    with pytest.raises(ValueError, match="cache is 'duel'; it must be one of none, prefix, dual"):
        generate(model, None, [[3, 4]], cache="duel", **options)  # type: ignore[arg-type]


def test_presets_are_these_compositions() -> None:
    assert build_strategy("fast_dllm") == Strategy(select=Threshold(0.9), window=Blocks(32), cache=DualCache())
    factor = build_strategy("fast_dllm", factor=1.0, cache="prefix", block_length=8)
    assert factor == Strategy(select=Factor(1.0), window=Blocks(8), cache=PrefixCache())
    with pytest.raises(ValueError, match="cache is 'none'; it must be one of prefix, dual"):
        build_strategy("fast_dllm", cache="none")


def test_block_diffusion_is_the_same_with_its_cache() -> None:
    model = tiny_model(block_size=4).model
    options: dict[str, Any] = {"strategy": "block_diffusion", "block_length": 4, "max_new_tokens": 9, "threshold": 0.6}
    plain, cached = (generate(model, None, PROMPTS, eos="ignore", cache=name, **options) for name in (None, "block"))
    assert [row.tolist() for row in plain.tokens] == [row.tolist() for row in cached.tokens]
    assert bool((cached.tokens_fed < plain.tokens_fed).all())
