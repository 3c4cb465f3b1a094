"""Samplers that look further than one step: WINO, Prophet, FreeDave, LoPA. Parity, losslessness, counts, bounds."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import reference_speculate as reference
import torch
from revise_tools import MASK, VOCAB, hashed, plain, ragged, run, same
from sampler_tools import HashDenoiser, ragged_canvas, same_rows, tiny_model, unmask
from torch import Tensor

from mdlm.denoiser import FunctionDenoiser, ModelDenoiser
from mdlm.samplers.automaton import token_automaton
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.constrain import Constraint
from mdlm.samplers.draw import Draw
from mdlm.samplers.driver import Run, row_keys
from mdlm.samplers.early_exit import EarlyExit
from mdlm.samplers.generate import generate
from mdlm.samplers.lookahead import Lookahead
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.select import Quota, RandomOrder, Threshold, TopK
from mdlm.samplers.speculate import Speculative
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.wino import MaskedInTurn, WideIn


def rows_of(canvas: Canvas):
    """Number, length, tokens and flags of each row."""
    for row in range(len(canvas)):
        n = int(canvas.lengths[row])
        yield row, n, canvas.tokens[row, :n].tolist(), canvas.editable[row, :n].tolist()


# --- shadow rows -----------------------------------------------------------------------------------------------------


def judged(denoiser: ModelDenoiser, tokens: Tensor, real: Tensor, at: Tensor, shadows: Tensor) -> Tensor:
    """Leave-one-out predictions by masking each token in turn, one row at a time."""
    out = []
    for row, position in shadows.nonzero().tolist():
        alone = tokens[row : row + 1].clone()
        alone[0, position] = denoiser.mask_token_id
        out.append(denoiser(alone, attention_mask=real[row : row + 1])[0, position])
    return torch.stack(out)


@pytest.mark.parametrize("block_size", [None, 4])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_shadows_leave_out_exactly_their_token_in_a_network_of_one_layer(
    attention: str, block_size: int | None
) -> None:
    denoiser = tiny_model(num_hidden_layers=1, block_size=block_size)
    denoiser.model.set_attn_implementation(attention)
    canvas = ragged_canvas()
    tokens, real = canvas.tokens, canvas.real
    torch.manual_seed(1)
    shadows = canvas.editable & (torch.rand(tokens.shape) < 0.6)
    at = canvas.editable & ~shadows
    tokens = tokens.masked_fill(at, denoiser.mask_token_id)
    plainly, by_shadow = denoiser.with_shadows(tokens, at=at, shadows=shadows, attention_mask=real)
    torch.testing.assert_close(plainly, denoiser(tokens, attention_mask=real, at=at), atol=1e-12, rtol=0)
    torch.testing.assert_close(by_shadow, judged(denoiser, tokens, real, at, shadows), atol=1e-10, rtol=0)


def test_shadows_do_not_change_what_the_canvas_predicts_at_any_depth() -> None:
    denoiser, canvas = tiny_model(num_hidden_layers=3), ragged_canvas()
    at = canvas.editable
    plainly, by_shadow = denoiser.with_shadows(canvas.tokens, at=at, shadows=at, attention_mask=canvas.real)
    expected = denoiser(canvas.tokens, attention_mask=canvas.real, at=at)
    torch.testing.assert_close(plainly, expected, atol=1e-12, rtol=0)
    exact = judged(denoiser, canvas.tokens, canvas.real, at, at)
    assert float((by_shadow.exp() - exact.exp()).abs().max()) > 1e-6, "deeper networks leak, as documented"


def test_wino_by_shadows_is_wino_by_masking_where_shadows_are_exact() -> None:
    denoiser, canvas = tiny_model(num_hidden_layers=1, initializer_range=0.6), ragged_canvas()
    a = unmask(denoiser, canvas, build_strategy("wino", tau_wide=0.3))
    b = unmask(denoiser, canvas, build_strategy("wino", tau_wide=0.3, verify="masked"))
    for row in range(len(canvas)):
        left, right = a.row(row), b.row(row)
        assert left["tokens"] == right["tokens"]
        assert left["forwards"] == right["forwards"] == left["nfe"]
        decided = right["nfe"] - right["forwards"]  # a row of copies for each; in the other, a token
        assert left["tokens_fed"] == left["forwards"] * a.lengths[row] + decided
        assert right["tokens_fed"] == right["nfe"] * a.lengths[row]
    assert any(b.row(row)["nfe"] > b.row(row)["forwards"] for row in range(len(canvas)))


def test_a_model_without_shadow_rows_is_refused_at_the_start() -> None:
    canvas = ragged()
    with pytest.raises(ValueError, match="verify='masked'"):
        Run(hashed(0), canvas, build_strategy("wino"), row_keys(0, len(canvas)))
    flexible, shifted = tiny_model(), tiny_model(shift_logits=True)
    flexible.model.config._attn_implementation = "flex_attention"
    for denoiser in (flexible, shifted):
        with pytest.raises(ValueError, match="verify='masked'"):
            Run(denoiser, canvas, build_strategy("wino"), row_keys(0, len(canvas)))


# --- WINO ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "wide", "narrow", "edits"), [(9, 0.3, 0.9, 16), (None, 0.1, 0.6, 16), (12, 0.2, 1.0, 1)]
)
@pytest.mark.parametrize("memory", [0.3, 1.0])
def test_wino_follows_the_reference_in_a_ragged_batch(
    memory: float, block: int | None, wide: float, narrow: float, edits: int
) -> None:
    """The public code indexed the flattened batch, so that it was right for one row only."""
    canvas, revised = ragged(new=(14, 7, 16, 0)), 0
    strategy = build_strategy(
        "wino", tau_wide=wide, tau_narrow=narrow, block_length=block, verify="masked", max_edits=edits
    )
    for seed in range(4):
        denoiser, found = hashed(seed, memory=memory), []
        frame = run(denoiser, canvas, strategy, watch=lambda w: found.append(int(w.state.edits.sum())))  # noqa: B023
        revised += max(found)
        for row, n, tokens, flags in rows_of(canvas):
            expected, nfe, forwards = reference.wino(plain(denoiser), tokens, flags, MASK, block, wide, narrow, edits)
            assert frame.tokens[row, :n].tolist() == expected
            assert (int(frame.nfe[row]), int(frame.forwards[row])) == (nfe, forwards)
            assert forwards <= sum(flags), "a block of n positions takes at most n steps"
    assert revised > 0


def test_wide_in_keeps_to_its_share() -> None:
    sure = FunctionDenoiser(lambda tokens: torch.arange(VOCAB).double().expand(*tokens.shape, VOCAB) * 3, MASK, VOCAB)
    for masks, expected in ((40, 20), (20, 14), (6, 5), (3, 3)):
        at_work = Run(sure, Canvas.from_prompts([[]], masks), Strategy(select=WideIn(0.5)), row_keys(0, 1))
        at_work.advance()
        assert masks - int(at_work.frame().masked.sum()) == expected


def test_wino_that_is_never_narrow_is_its_base() -> None:
    for seed in range(3):
        a = run(hashed(seed), ragged(), Strategy(select=WideIn(0.6)))
        same(a, run(hashed(seed), ragged(), build_strategy("wino", tau_narrow=0.0, block_length=None)))


# --- Prophet ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "gaps", "region"),
    [
        (None, (1.2, 1.0, 0.8), None),
        (4, (1.5, 0.9, 0.2), None),
        (None, (1.5, 1.2, 1.0), (2, 4)),
        (3, (9.0, 1.0, 0.5), (5, 7)),
    ],
)
def test_prophet_follows_the_reference(
    block: int | None, gaps: tuple[float, float, float], region: tuple[int, int] | None
) -> None:
    canvas, early = ragged(), 0
    strategy = build_strategy(
        "prophet", gap_early=gaps[0], gap_middle=gaps[1], gap_late=gaps[2], region=region, block_length=block
    )
    for seed in range(5):
        denoiser = hashed(seed, scale=9.0)
        frame = run(denoiser, canvas, strategy)
        for row, n, tokens, flags in rows_of(canvas):
            expected, nfe = reference.prophet(plain(denoiser), tokens, flags, MASK, block, gaps, region)
            assert frame.tokens[row, :n].tolist() == expected
            assert int(frame.nfe[row]) == nfe
            early += nfe < sum(flags)
    assert early > 0


def test_an_early_exit_that_never_comes_is_its_base() -> None:
    never = {"gap_early": math.inf, "gap_middle": math.inf, "gap_late": math.inf}
    for temperature in (0.0, 1.0):
        draw = Draw(temperature=temperature)
        for steps, base in ((None, TopK(1)), (4, Quota(4))):
            a = run(hashed(1), ragged(), Strategy(select=base, draw=draw), 3)
            exits = dataclasses.replace(build_strategy("prophet", steps=steps, **never), draw=draw)
            same(a, run(hashed(1), ragged(), exits, 3))


def test_an_exit_writes_the_most_probable_tokens_at_every_temperature() -> None:
    canvas, draw = ragged(), Draw(temperature=3.0)
    at_once = dataclasses.replace(build_strategy("prophet", gap_early=0.0), draw=draw)
    frame = run(hashed(2), canvas, at_once, 1)
    assert frame.nfe.tolist() == [1, 1, 1, 0, 1]
    for row, n, tokens, flags in rows_of(canvas):
        x = [MASK if flag else token for token, flag in zip(tokens, flags)]
        log_probs = plain(hashed(2))(x)
        expected = [max(range(VOCAB), key=lambda v: log_probs[i][v]) if flags[i] else x[i] for i in range(n)]
        assert frame.tokens[row, :n].tolist() == expected


def test_rows_that_do_not_exit_draw_as_if_nobody_did() -> None:
    draw = Draw(temperature=1.0)
    base = Strategy(select=TopK(1), draw=draw)
    exits = dataclasses.replace(base, select=EarlyExit(TopK(1), (2.0, math.inf, math.inf)))
    seen = {True: 0, False: 0}
    for seed in range(12):
        a, b = run(hashed(seed, scale=9.0), ragged(), base, seed), run(hashed(seed, scale=9.0), ragged(), exits, seed)
        for row in (0, 1, 2, 4):
            stays = int(b.nfe[row]) == int(a.nfe[row])
            seen[stays] += 1
            if stays:
                assert torch.equal(a.tokens[row], b.tokens[row])
    assert min(seen.values()) > 0


# --- FreeDave --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [4, None])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_number_of_drafts_writes_the_references_tokens(temperature: float, k: int, block: int | None) -> None:
    canvas, draw = ragged(), Draw(temperature=temperature)
    for seed, memory in ((0, 0.1), (1, 0.5), (2, 1.0)):
        denoiser = hashed(seed, memory=memory)
        base = run(
            denoiser, canvas, dataclasses.replace(build_strategy("confidence", k=k, block_length=block), draw=draw)
        )
        for drafts in (1, 2, 3, 5, 20):
            strategy = dataclasses.replace(
                build_strategy("freedave", drafts=drafts, k=k, block_length=block), draw=draw
            )
            frame = run(denoiser, canvas, strategy)
            assert frame.step == base.step
            for field in ("tokens", "step_map", "log_probs"):
                assert torch.equal(getattr(frame, field).nan_to_num(7), getattr(base, field).nan_to_num(7)), field
            if drafts == 1:
                same(frame, base)
            assert bool((frame.forwards <= base.forwards).all())
            assert bool((frame.nfe <= drafts * base.nfe).all())


@pytest.mark.parametrize(("drafts", "k"), [(1, 1), (2, 1), (4, 1), (5, 2), (40, 1)])
def test_where_predictions_never_change_every_guess_is_accepted(drafts: int, k: int) -> None:
    """The first forward has nothing to guess from; each further one answers `drafts` steps, the last fewer."""
    n = 13
    frame = run(
        hashed(3, memory=0.0), Canvas.from_prompts([[]], n), Strategy(select=TopK(k), cache=Speculative(drafts, k))
    )
    steps = -(-n // k)
    assert frame.step == int(frame.nfe[0]) == steps
    assert int(frame.forwards[0]) == 1 + -(-(steps - 1) // drafts)
    assert int(frame.tokens_fed[0]) == steps * n


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("threshold", {"threshold": 0.5, "block_length": 4}),
        ("t2m", {"threshold": 0.6, "block_length": 5}),
        ("t2t", {"tau_mask": 0.5, "tau_edit": 0.3, "block_length": 5}),
        ("p2", {"steps": 12}),
        ("remdm", {"sigma": "rescale", "eta": 0.8, "steps": 15}),
        ("llada", {"steps": 4}),
        ("first_hitting", {}),
    ],
)
def test_speculation_is_lossless_behind_every_strategy(name: str, knobs: dict) -> None:
    strategy = build_strategy(name, **knobs)
    for seed in range(3):
        a = run(hashed(seed, scale=9.0), ragged(), strategy, seed)
        b = run(hashed(seed, scale=9.0), ragged(), dataclasses.replace(strategy, cache=Speculative(4)), seed)
        for field in ("tokens", "step_map", "log_probs"):
            assert torch.equal(getattr(a, field).nan_to_num(7), getattr(b, field).nan_to_num(7)), field
        assert bool((b.forwards <= a.forwards).all())


# --- LoPA ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [0.2, 0.6, 1.0])
@pytest.mark.parametrize(("branches", "tau", "block"), [(1, 0.7, 4), (3, 0.6, None), (10, 0.8, 5), (4, 2.0, 32)])
def test_lopa_follows_the_reference(memory: float, branches: int, tau: float, block: int | None) -> None:
    canvas = ragged()
    strategy = build_strategy("lopa", branches=branches, threshold=tau, block_length=block)
    for seed in range(3):
        denoiser = hashed(seed, scale=9.0, memory=memory)
        frame = run(denoiser, canvas, strategy)
        for row, n, tokens, flags in rows_of(canvas):
            expected, nfe, forwards = reference.lopa(plain(denoiser), tokens, flags, MASK, block, branches, tau)
            assert frame.tokens[row, :n].tolist() == expected
            assert (int(frame.nfe[row]), int(frame.forwards[row])) == (nfe, forwards)
            assert nfe <= (branches + 1) * sum(flags) + len(flags)


def test_lookahead_without_branches_is_its_anchor() -> None:
    for seed in range(3):
        a = run(hashed(seed), ragged(), build_strategy("threshold", threshold=0.6, block_length=4))
        same(a, run(hashed(seed), ragged(), build_strategy("lopa", branches=0, threshold=0.6, block_length=4)))


@pytest.mark.parametrize("before_select", [False, True])
def test_lookahead_evaluates_the_tokens_that_are_then_drawn(before_select: bool) -> None:
    """Were the branch filled with other tokens than those written, every step would cost a forward more."""
    canvas, draw = ragged(), Draw(temperature=1.0, before_select=before_select)
    strategy = dataclasses.replace(build_strategy("lopa", threshold=0.6, block_length=None), draw=draw)
    frame = run(hashed(4), canvas, strategy, 2)
    steps = frame.step_map.max(dim=-1).values + 1
    assert torch.equal(frame.forwards, steps)  # one to begin with, one per step but the last


def test_lookahead_says_what_it_needs() -> None:
    canvas = ragged()
    at_work = Run(hashed(0), canvas, Strategy(select=Lookahead(Threshold(0.9), 2)), row_keys(0, len(canvas)))
    with pytest.raises(ValueError, match="cache=Speculative"):
        at_work.advance()
    with pytest.raises(ValueError, match="RandomOrder"):
        Lookahead(RandomOrder(1))


# --- all of them -----------------------------------------------------------------------------------------------------

EVERY = [
    ("wino", {"verify": "masked", "tau_wide": 0.2, "block_length": 6}),
    ("prophet", {"gap_early": 2.0, "gap_middle": 1.0, "gap_late": 0.5}),
    ("freedave", {"drafts": 3, "block_length": 5}),
    ("freedave", {"drafts": 4, "k": 2}),
    ("lopa", {"branches": 3, "threshold": 0.6, "block_length": 6}),
]


@pytest.mark.parametrize(("name", "knobs"), EVERY)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_counts_are_what_the_denoiser_saw_and_rows_are_independent(name: str, knobs: dict, temperature: float) -> None:
    canvas = ragged_canvas()
    strategy = dataclasses.replace(build_strategy(name, **knobs), draw=Draw(temperature=temperature))
    denoiser, seeds = HashDenoiser(9.0), [3, 1, 4, 1, 5, 9]
    whole = unmask(denoiser, canvas, strategy, seeds)
    assert denoiser.rows_fed == int(whole.last.nfe.sum())
    assert denoiser.tokens_fed == int(whole.last.tokens_fed.sum())
    order = [5, 2, 0, 4, 1, 3]
    shuffled = unmask(HashDenoiser(9.0), canvas[order], strategy, [seeds[i] for i in order])
    for place, row in enumerate(order):
        alone_denoiser = HashDenoiser(9.0)
        alone = unmask(alone_denoiser, canvas[[row]], strategy, [seeds[row]])
        assert alone_denoiser.calls == int(alone.last.forwards[0])
        same_rows(alone.row(0), whole.row(row))
        same_rows(alone.row(0), shuffled.row(place))


@pytest.mark.parametrize(("name", "knobs"), EVERY)
def test_two_runs_side_by_side_do_not_see_each_other(name: str, knobs: dict) -> None:
    strategy, canvas = build_strategy(name, **knobs), ragged_canvas()
    runs = [Run(HashDenoiser(9.0), canvas, strategy, row_keys(seed, len(canvas))) for seed in (0, 1)]
    while not all(r.done for r in runs):
        for r in runs:
            if not r.done:
                r.advance()
    for seed, r in enumerate(runs):
        expected = unmask(HashDenoiser(9.0), canvas, strategy, seed).last
        assert torch.equal(r.frame().tokens, expected.tokens)
        assert torch.equal(r.frame().nfe, expected.nfe)


@pytest.mark.parametrize("name", ["wino", "freedave", "lopa"])
def test_a_cache_cannot_replace_what_the_strategy_asks_with(name: str) -> None:
    with pytest.raises(ValueError, match="leave cache out"):
        generate(tiny_model(), None, [[3, 4]], strategy=name, max_new_tokens=4, cache="none")


@pytest.mark.parametrize("name", ["wino", "freedave", "prophet"])
def test_guidance_works_with_them(name: str) -> None:
    out = generate(tiny_model(), None, [[3, 4], [5]], strategy=name, max_new_tokens=6, guidance=0.5)
    alone = generate(tiny_model(), None, [[5]], strategy=name, max_new_tokens=6, guidance=0.5, seed=[0])
    assert out.tokens[1].tolist() == alone.tokens[0].tolist()
    assert int(out.nfe[1]) == int(alone.nfe[0])


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("wino", {"verify": "no"}, "'shadow' or 'masked'"),
        ("wino", {"tau_narrow": -1.0}, "0 or more"),
        ("wino", {"max_edits": -1}, "0 or more"),
        ("prophet", {"gap_late": -1.0}, "0 or more, in nats"),
        ("prophet", {"region": (3, 3)}, "first, last"),
        ("freedave", {"drafts": 0}, "1 or more"),
        ("lopa", {"branches": -1}, "0 or more"),
    ],
)
def test_wrong_knobs_say_what_is_allowed(name: str, knobs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_strategy(name, **knobs)


def test_components_refuse_what_they_cannot_do() -> None:
    with pytest.raises(ValueError, match="chooses without looking"):
        EarlyExit(RandomOrder(1))
    with pytest.raises(ValueError, match="not above most"):
        WideIn(least=9, most=5)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        WideIn(share=1.5)
    assert MaskedInTurn() == MaskedInTurn()


@pytest.mark.parametrize(("name", "knobs"), [*EVERY, ("p2", {"steps": 6}), ("t2m", {"threshold": 0.6})])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_beside_a_constraint_they_write_what_it_accepts_or_are_refused(
    name: str, knobs: dict, temperature: float
) -> None:
    texts: list[bytes | None] = [None, *(bytes([96 + i]) for i in range(1, MASK)), None]
    constraint = Constraint(token_automaton("(ab|c)*", texts))
    strategy = build_strategy(name, **knobs)
    draw = dataclasses.replace(strategy.draw, temperature=temperature)
    strategy = dataclasses.replace(strategy, draw=draw, constraint=constraint)
    canvas = Canvas.from_prompts([[], [1]], [8, 5])
    if temperature and name in ("prophet", "lopa"):
        with pytest.raises(ValueError, match="take temperature 0"):
            run(hashed(0), canvas, strategy)
        return
    for seed in range(3):
        tokens = run(hashed(seed), canvas, strategy, seed).tokens
        for row, start, end in ((0, 0, 8), (1, 1, 6)):
            text = "".join(chr(96 + t) for t in tokens[row, start:end].tolist())
            assert re.fullmatch("(ab|c)*", text), text
