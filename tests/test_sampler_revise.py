"""Samplers that take decisions back: ReMDM, P2, token editing, token-to-mask. Laws, parity with references, bounds."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import reference_revise as reference
import torch
from exact_law import exact_law, markov, sequences, source_law
from revise_tools import MASK, VOCAB, hashed, plain, ragged, run, same
from torch import Tensor

from mdlm.denoiser import FunctionDenoiser
from mdlm.samplers.ancestral import Ancestral
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.draw import Draw
from mdlm.samplers.driver import Run, row_keys
from mdlm.samplers.edit import EditTokens, MaskDoubtful, Unlikely
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.remdm import Cap, Planner, Plateau, Process, Remask, Rescale, Reveal, Standing, Unplanned, sigma_max
from mdlm.samplers.select import Threshold
from mdlm.samplers.state import State, Step
from mdlm.samplers.stop import EosStop
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.windows import Blocks
from mdlm.samplers.windows_planned import AdaBlock

# --- ReMDM -----------------------------------------------------------------------------------------------------------


def blank_step(t_steps: int, done: int, decided: Tensor | None = None) -> Step:
    """One row of the state of a run that has done so many steps."""
    decided = torch.zeros(1, 4).bool() if decided is None else decided
    canvas = Canvas.from_prompts([[]], decided.shape[1])
    state = Run(hashed(0), canvas, Strategy(select=Ancestral(t_steps)), row_keys(0, 1)).state
    assert isinstance(state, State)
    state.block_step[:] = done
    state.masked &= ~decided
    return Step(state, state.editable, state.masked, MASK)


@pytest.mark.parametrize(
    "process",
    [
        Process(8, Cap(0.0)),
        Process(8, Cap(0.3)),
        Process(8, Cap(1.0)),
        Process(8, Rescale(0.4)),
        Process(8, Rescale(1.0)),
        Process(40, Standing(0.05), Plateau()),
    ],
)
def test_one_step_from_the_true_marginal_keeps_the_mask_rate(process: Process) -> None:
    rates = [1.0]
    for done in range(process.steps):
        step = blank_step(process.steps, done)
        sigma, reveal = float(process.remask_probability(step)), float(process.reveal_probability(step))
        t, s = (float(rate) for rate in process.rates(step))
        assert t == pytest.approx(rates[-1], abs=1e-15)
        assert 0 <= sigma <= (min(1.0, s / (1 - t)) if t < 1 else 1.0) + 1e-15
        assert 0 <= reveal <= 1 + 1e-12
        after = t * (1 - reveal) + (1 - t) * sigma
        assert after == pytest.approx(s, abs=1e-12)
        rates.append(s)
    assert rates[-1] == 0


def test_sigma_max_is_the_largest_that_keeps_reveal_probabilities_below_one() -> None:
    t, s = torch.tensor([[0.4]]).double(), torch.tensor([[0.3]]).double()
    assert float(sigma_max(t, s)) == pytest.approx(0.5)  # alpha: .6 -> .7; (1 - .7) / .6
    assert float(sigma_max(torch.ones(1, 1).double(), torch.tensor([[0.5]]).double())) == 1
    assert float(sigma_max(torch.ones(1, 1).double(), torch.zeros(1, 1).double())) == 0


def test_the_loop_has_three_phases() -> None:
    process = Process(200, Standing(0.02), Plateau(0.55, 0.05, 0.9))
    seen = {done: blank_step(200, done) for done in range(200)}
    decided = {done: 1 - float(process.rates(step)[0]) for done, step in seen.items()}
    sigma = {done: float(process.remask_probability(step)) for done, step in seen.items()}
    for done in range(200):
        time = 1 - done / 200
        expected = 0.9 * (1 - time) / 0.45 if time > 0.55 else 0.9 if time >= 0.05 else 1 - 0.1 * time / 0.05
        assert decided[done] == pytest.approx(expected, abs=1e-9)
        assert sigma[done] == (pytest.approx(0.02) if 90 <= done < 190 else 0)


def joint_of(source) -> reference.Joint:
    return {tuple(s): float(p) for s, p in zip(sequences(source).tolist(), source_law(source))}


def sigma_reference(kind: str, eta: float):
    """sigma of each position, written from the paper in alphas."""

    def at_most(t: float, s: float) -> float:
        alpha_t, alpha_s = 1 - t, 1 - s
        return 1.0 if alpha_t == 0 and s > 0 else min(1.0, (1 - alpha_s) / alpha_t) if alpha_t > 0 else 0.0

    def sigma(t: float, s: float, state: reference.Partial) -> list[float]:
        if kind == "conf":
            weights = [0.0 if k is None else math.exp(-k[1]) for k in state]
            return [at_most(t, s) * w / max(sum(weights), 1e-300) for w in weights]
        value = {"cap": min(eta, at_most(t, s)), "rescale": eta * at_most(t, s), "loop": eta * (t == s)}[kind]
        return [value] * len(state)

    return sigma


@pytest.mark.parametrize(("kind", "eta"), [("cap", 0.2), ("rescale", 0.7), ("conf", None)])
def test_remdm_has_the_enumerated_law(kind: str, eta: float | None) -> None:
    source = markov(3)
    law = exact_law(source, build_strategy("remdm", sigma=kind, eta=eta, steps=4), history=kind == "conf")
    times = [1 - i / 4 for i in range(5)]
    expected, rates = reference.remdm_law(joint_of(source), 3, times, sigma_reference(kind, eta or 0.0))
    assert law.probs.tolist() == pytest.approx([expected[tuple(s)] for s in sequences(source).tolist()], abs=1e-12)
    if kind != "conf":
        assert rates == pytest.approx(times[1:], abs=1e-12)


def test_the_law_of_the_loop_is_the_enumerated_one() -> None:
    source = markov(3)
    law = exact_law(source, build_strategy("remdm", sigma="loop", eta=0.1, steps=5, t_on=0.6, t_off=0.4, alpha_on=0.7))
    times = [1, 1 - 0.7 * 0.2 / 0.4, 1 - 0.7, 1 - 0.7, 0.3 * 0.2 / 0.4, 0]
    expected, rates = reference.remdm_law(joint_of(source), 3, times, sigma_reference("loop", 0.1))
    assert law.probs.tolist() == pytest.approx([expected[tuple(s)] for s in sequences(source).tolist()], abs=1e-12)
    assert rates == pytest.approx(times[1:], abs=1e-12)


def test_more_steps_bring_remdm_to_the_sources_law() -> None:
    source = markov(3)
    p = source_law(source)
    remasked = [
        exact_law(source, build_strategy("remdm", sigma="rescale", eta=0.5, steps=n), history=False).kl(p)
        for n in (2, 4, 8)
    ]
    ancestral = [exact_law(source, Strategy(select=Ancestral(n), draw=Draw(1.0))).kl(p) for n in (2, 4, 8)]
    assert all(a > b for a, b in itertools.pairwise(remasked))
    assert all(a > b for a, b in itertools.pairwise(ancestral))


def test_sigma_zero_is_ancestral_bit_for_bit() -> None:
    base = Strategy(select=Ancestral(12), draw=Draw(temperature=1.0))
    process = Process(12, Cap(0.0))
    for seed in range(3):
        a = run(hashed(seed), ragged(), base, seed)
        same(a, run(hashed(seed), ragged(), dataclasses.replace(base, select=Reveal(process)), seed))
        same(
            a,
            run(
                hashed(seed), ragged(), dataclasses.replace(base, select=Reveal(process), revise=Remask(process)), seed
            ),
        )
        same(a, run(hashed(seed), ragged(), build_strategy("remdm", eta=0.0, steps=12), seed))
    blocks = dataclasses.replace(base, window=Blocks(4))
    same(
        run(hashed(1), ragged(), blocks, 1),
        run(hashed(1), ragged(), build_strategy("remdm", eta=0.0, steps=12, block_length=4), 1),
    )


def test_a_remdm_row_is_masked_again_and_ends_full() -> None:
    strategy = build_strategy("remdm", sigma="rescale", eta=1.0, steps=30, block_length=5)
    edits: list[int] = []
    frame = run(hashed(3), ragged(), strategy, watch=lambda at_work: edits.append(int(at_work.state.edits.sum())))
    assert max(edits) > 5
    assert not frame.masked.any()
    assert frame.step == 3 * 30
    assert bool((frame.nfe <= 3 * 30).all())
    assert int(frame.nfe[3]) == 0


# --- P2 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "eta"), [(6, 1.0), (12, 1.0), (25, 2.0), (7, 0.3), (1, 1.0)])
def test_p2_follows_the_reference_token_for_token(steps: int, eta: float) -> None:
    canvas, again = ragged(), 0
    strategy = dataclasses.replace(build_strategy("p2", steps=steps, eta=eta), draw=Draw(before_select=True))
    for seed in range(4):
        denoiser, counts = hashed(seed), []
        frame = run(denoiser, canvas, strategy, watch=lambda at_work: counts.append(at_work.frame().masked.sum(-1)))  # noqa: B023 - called at once
        for row in range(len(canvas)):
            n = int(canvas.lengths[row])
            flags = canvas.editable[row, :n].tolist()
            tokens, decided, remasked = reference.path_planning(
                plain(denoiser), canvas.tokens[row, :n].tolist(), flags, MASK, steps, eta
            )
            assert frame.tokens[row, :n].tolist() == tokens
            assert [sum(flags) - int(c[row]) for c in counts] == decided
            assert int(frame.nfe[row]) == (steps if any(flags) else 0)
            again += remasked
    assert (again > 0) == (steps > 1), "see Open-dLLM issue 7: decided tokens scored +inf were never masked again"


def test_p2_with_eta_zero_never_revises() -> None:
    planner = Planner(9, 0.0)
    base = Strategy(select=planner, draw=Draw(temperature=1.0, before_select=True))
    for seed in range(3):
        a = run(hashed(seed), ragged(), base, seed)
        same(a, run(hashed(seed), ragged(), dataclasses.replace(base, revise=Unplanned(planner)), seed))
        same(a, run(hashed(seed), ragged(), build_strategy("p2", steps=9, eta=0.0), seed))


def test_p2_at_full_temperature_revises_too() -> None:
    edits: list[int] = []
    run(hashed(5), ragged(), build_strategy("p2", steps=12), watch=lambda w: edits.append(int(w.state.edits.sum())))
    assert max(edits) > 0


# --- token to token --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [0.3, 0.6, 1.0])
@pytest.mark.parametrize(
    ("tau_mask", "tau_edit", "block", "post", "edits"),
    [(0.7, 0.5, 4, 16, 8), (0.5, 0.0, 5, 3, 8), (0.5, 0.0, None, 16, 1), (0.9, 0.6, 3, 0, 8), (0.6, 0.4, 32, 5, 0)],
)
def test_token_editing_follows_the_reference_in_a_ragged_batch(
    memory: float, tau_mask: float, tau_edit: float, block: int | None, post: int, edits: int
) -> None:
    """LLaDA2.1's public loop was limited to batch 1 (dllm PR 107: "sequences diverge")."""
    canvas = ragged()
    strategy = build_strategy(
        "t2t", tau_mask=tau_mask, tau_edit=tau_edit, block_length=block, post_steps=post, max_edits=edits
    )
    for seed in range(5):
        denoiser = hashed(seed, scale=9.0, memory=memory)
        frame = run(denoiser, canvas, strategy)
        for row in range(len(canvas)):
            n = int(canvas.lengths[row])
            flags = canvas.editable[row, :n].tolist()
            tokens, nfe = reference.llada21(
                plain(denoiser), canvas.tokens[row, :n].tolist(), flags, MASK, block, tau_mask, tau_edit, post, edits
            )
            assert frame.tokens[row, :n].tolist() == tokens
            assert int(frame.nfe[row]) == nfe


def test_editing_that_never_happens_is_threshold_decoding() -> None:
    for seed in range(3):
        a = run(hashed(seed), ragged(), build_strategy("threshold", threshold=0.6, block_length=4))
        same(a, run(hashed(seed), ragged(), build_strategy("t2t", tau_mask=0.6, tau_edit=1.0, block_length=4)))


def test_edits_per_position_are_bounded_where_tokens_call_for_each_others_replacement() -> None:
    seen: list[Tensor] = []
    strategy = build_strategy("t2t", tau_mask=0.0, tau_edit=0.0, post_steps=1000, max_edits=3, block_length=None)
    frame = run(hashed(2, memory=1.0), ragged(), strategy, watch=lambda w: seen.append(w.state.edits.max(-1).values))
    assert max(int(e.max()) for e in seen if e.numel()) == 3
    assert int(frame.nfe.max()) <= 1 + 3 * 12 + 1


def test_a_planned_window_is_edited_to_its_end_too() -> None:
    """`AdaBlock` that never finds its delimiter is blocks of one length, post-steps included."""
    canvas = Canvas.from_prompts([[1, 2], [], [3]], [10, 7, 13])
    strategy = build_strategy("t2t", tau_mask=0.5, tau_edit=0.3, block_length=4)
    planned = dataclasses.replace(strategy, window=AdaBlock(delimiters=(5,), length=4, share=0.0, least=1.0))
    for seed in range(3):
        same(run(hashed(seed), canvas, strategy), run(hashed(seed), canvas, planned))


def test_an_end_token_that_may_still_be_edited_ends_nothing() -> None:
    def logits(tokens: Tensor) -> Tensor:
        """End (7) where only masks are seen; once anything is written, 3 everywhere."""
        fresh = (tokens == MASK).all(dim=-1)
        want = torch.where(fresh, 7, 3)[:, None].expand_as(tokens)
        return 9.0 * torch.nn.functional.one_hot(want, VOCAB).double()

    denoiser = FunctionDenoiser(logits, MASK, VOCAB)
    strategy = build_strategy("t2t", tau_mask=0.9, tau_edit=0.5, block_length=2)
    strategy = dataclasses.replace(strategy, stop=(EosStop((7,)),))
    at_work = Run(denoiser, Canvas.from_prompts([[]], 4), strategy, row_keys(0, 1))
    while not at_work.done:
        at_work.advance()
    assert at_work.frame().tokens.tolist() == [[3, 3, 3, 3]]
    assert at_work.finish == ["length"]


# --- token to mask ---------------------------------------------------------------------------------------------------

DOUBTS = {
    "low_prob": lambda threshold: lambda p, x: p[x] < (math.log(threshold) if threshold else -math.inf),
    "other": lambda threshold: lambda p, x: reference.best(p) != x and max(p) > math.log(threshold),
    "logit_diff": lambda threshold: lambda p, x: max(p) - p[x] > threshold,
}


@pytest.mark.parametrize("memory", [0.5, 1.0])
@pytest.mark.parametrize(
    ("doubt", "threshold", "block", "edits"),
    [("low_prob", 0.1, 4, 3), ("low_prob", 0.9, None, 2), ("other", 0.6, 5, 3), ("logit_diff", 0.3, 32, 1)],
)
def test_token_to_mask_follows_the_reference(
    memory: float, doubt: str, threshold: float, block: int | None, edits: int
) -> None:
    canvas, revised = ragged(), 0
    strategy = build_strategy("t2m", doubt=doubt, threshold=threshold, block_length=block, max_edits=edits)
    for seed in range(4):
        denoiser = hashed(seed, scale=9.0, memory=memory)
        frame = run(denoiser, canvas, strategy)
        for row in range(len(canvas)):
            n = int(canvas.lengths[row])
            flags = canvas.editable[row, :n].tolist()
            tokens, nfe = reference.token_to_mask(
                plain(denoiser),
                canvas.tokens[row, :n].tolist(),
                flags,
                MASK,
                block,
                0.7,
                DOUBTS[doubt](threshold),
                edits,
            )
            assert frame.tokens[row, :n].tolist() == tokens
            assert int(frame.nfe[row]) == nfe
            assert nfe <= sum(flags) * (1 + edits)
            revised += nfe > sum(flags)
    assert revised > 0 or doubt != "low_prob" or threshold < 0.5


@pytest.mark.parametrize("knobs", [{"threshold": 0.0}, {"doubt": "other", "threshold": 1.0}, {"max_edits": 0}])
def test_doubt_that_never_arises_is_threshold_decoding(knobs: dict) -> None:
    for seed in range(3):
        a = run(hashed(seed), ragged(), build_strategy("threshold", threshold=0.7, block_length=4))
        same(a, run(hashed(seed), ragged(), build_strategy("t2m", block_length=4, **knobs)))


# --- all of them -----------------------------------------------------------------------------------------------------

EVERY = [
    ("remdm", {"sigma": "cap", "eta": 0.3, "steps": 20}),
    ("remdm", {"sigma": "rescale", "eta": 0.9, "steps": 15, "block_length": 4}),
    ("remdm", {"sigma": "conf", "steps": 15}),
    ("remdm", {"sigma": "loop", "eta": 0.1, "steps": 40}),
    ("p2", {"steps": 15}),
    ("p2", {"steps": 9, "eta": 3.0, "block_length": 5}),
    ("t2t", {"tau_mask": 0.5, "tau_edit": 0.0, "block_length": 4}),
    ("t2m", {"doubt": "low_prob", "threshold": 0.6, "block_length": 4}),
    ("t2m", {"doubt": "logit_diff"}),
]


@pytest.mark.parametrize(("name", "knobs"), EVERY)
def test_a_row_does_not_depend_on_its_neighbours(name: str, knobs: dict) -> None:
    canvas, denoiser, strategy = ragged(), hashed(11, scale=9.0), build_strategy(name, **knobs)
    seeds = [5, 6, 7, 8, 9]
    whole = run(denoiser, canvas, strategy, seeds)
    assert torch.equal(whole.tokens[~canvas.editable], canvas.tokens[~canvas.editable])
    assert not whole.masked.any()
    order = [4, 2, 0, 3, 1]
    shuffled = run(denoiser, canvas[order], strategy, [seeds[i] for i in order])
    for place, row in enumerate(order):
        alone = run(denoiser, canvas[[row]], strategy, [seeds[row]])
        n = int(canvas.lengths[row])
        for field in ("tokens", "step_map", "log_probs"):
            expected = getattr(alone, field)[0].nan_to_num(7.0)
            assert torch.equal(getattr(whole, field)[row, :n].nan_to_num(7.0), expected), field
            assert torch.equal(getattr(shuffled, field)[place, :n].nan_to_num(7.0), expected), field
        for field in ("nfe", "forwards", "tokens_fed"):
            assert (
                int(getattr(whole, field)[row]) == int(getattr(alone, field)[0]) == int(getattr(shuffled, field)[place])
            )


@pytest.mark.parametrize(("name", "knobs"), EVERY)
def test_no_block_is_left_masked_by_a_model_that_wants_the_mask_or_says_nothing(name: str, knobs: dict) -> None:
    """unturtle issue 47: block decoding ended with positions still masked."""

    def adversary(kind: str) -> FunctionDenoiser:
        def logits(tokens: Tensor) -> Tensor:
            out = torch.zeros(*tokens.shape, VOCAB).double()
            if kind == "mask":
                out[..., MASK] = torch.inf
            elif kind == "contrary":  # whatever stands there is impossible
                out.scatter_(-1, tokens[..., None], -torch.inf)
            elif kind == "sure":
                out[..., 4] = torch.inf
            return out

        return FunctionDenoiser(logits, MASK, VOCAB, ragged_ok=True)

    for kind in ("mask", "contrary", "sure", "flat"):
        frame = run(adversary(kind), ragged(), build_strategy(name, **knobs), most_steps=300)
        assert not frame.masked.any()
        assert not bool((frame.tokens[frame.step_map >= 0] == MASK).any())


def test_commits_less_remasks_are_the_masks_there_were() -> None:
    canvas, log = ragged(), []
    strategy = build_strategy("t2m", threshold=0.8, block_length=4)
    at_work = Run(hashed(4), canvas, strategy, row_keys(0, len(canvas)))
    while not at_work.done:
        before, rows = at_work.frame().masked.clone(), at_work.state.rows.clone()
        edits = at_work.state.edits.clone()
        at_work.advance()
        after = at_work.frame().masked
        kept = [int((rows == r).nonzero()) for r in at_work.state.rows]
        remasks = int((at_work.state.edits - edits[kept]).sum())
        log.append((int((before & ~after).sum()), int((~before & after).sum()), remasks))
    assert sum(c for c, _, _ in log) - sum(r for _, r, _ in log) == int(canvas.editable.sum())
    assert all(r == counted for _, r, counted in log)


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("remdm", {"sigma": "both"}, "cap, rescale, conf, loop"),
        ("remdm", {"sigma": "conf", "eta": 0.1}, "takes no eta"),
        ("remdm", {"eta": 1.5}, r"\[0, 1\]"),
        ("remdm", {"t_on": 0.4}, "sigma='cap' has none"),
        ("remdm", {"sigma": "loop", "t_on": 0.4, "t_off": 0.5}, "t_off not above t_on"),
        ("remdm", {"steps": 0}, "1 or more"),
        ("p2", {"eta": -1.0}, "0 or more"),
        ("t2t", {"post_steps": -1}, "0 or more"),
        ("t2m", {"doubt": "no"}, "low_prob, other, logit_diff"),
        ("t2m", {"threshold": -0.1}, "0 or more"),
    ],
)
def test_wrong_knobs_say_what_is_allowed(name: str, knobs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_strategy(name, **knobs)


def test_components_refuse_what_they_cannot_do() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        EditTokens(max_edits=-1)
    assert Strategy(select=Threshold(0.5), revise=MaskDoubtful(Unlikely(0.2))).revise is not None
