"""Samplers that remember predictions (SWD, KLASS, CreditDecoding) or judge what they wrote (Saber): parity with
plain-Python references, reductions, isolation of memories, and what SWD's divergence does not say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import reference_samplers as reference
import torch
from exact_law import exact_law, markov, source_law
from jaxtyping import Bool, Float
from sampler_tools import MASK, DriftDenoiser, HashDenoiser, ragged_canvas, same_rows, unmask
from torch import Tensor

from mdlm.denoiser import Denoiser, FunctionDenoiser
from mdlm.eval.sources import TabularSource
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.draw import Draw
from mdlm.samplers.driver import Run, row_keys
from mdlm.samplers.history import Credit, Stability, StableThreshold
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.revise import Revision
from mdlm.samplers.scores import SCORES, negative_entropy, probability
from mdlm.samplers.select import Looking, Threshold, TopK
from mdlm.samplers.select_adaptive import EntropyBudget, Factor
from mdlm.samplers.state import State, Step
from mdlm.samplers.strategy import Strategy, Transform
from mdlm.samplers.transforms import RepetitionPenalty
from mdlm.samplers.windows import Blocks, Sliding

SAMPLE = Draw(temperature=1.0)
MODELS: dict[str, Callable[[], Denoiser]] = {
    "jumpy": lambda: HashDenoiser(9.0, seed=1),
    "steady": lambda: DriftDenoiser(6.0, seed=2, coupling=0.4),
    "drifting": lambda: DriftDenoiser(6.0, seed=3, coupling=2.0),
}
each_model = pytest.mark.parametrize("model", MODELS)
each_length = pytest.mark.parametrize("block_length", [None, 1, 4])
FUNCTIONS: dict[str, Callable[[reference.Law], float]] = {
    "probability": reference.top1,
    "margin": reference.margin,
    "entropy": lambda p: math.exp(-reference.entropy(p)),
}


def check_parity(
    strategy: Strategy, denoiser: Denoiser, block_length: int | None, rule: Callable[[], reference.Rule]
) -> int:
    """Tokens, steps and NFE of every row of a batch are those of the reference; the number of steps saved."""
    canvas, saved = ragged_canvas(), 0
    outcome = unmask(denoiser, canvas, strategy)
    for number, length in enumerate(canvas.lengths.tolist()):
        expected = reference.decode(
            lambda row: denoiser(torch.tensor([row]))[0].exp().tolist(),
            canvas.tokens[number, :length].tolist(),
            canvas.editable[number, :length].tolist(),
            MASK,
            block_length,
            rule,
        )
        found = outcome.row(number)
        assert found["tokens"] == expected.tokens
        assert found["step_map"] == expected.step_map
        assert found["nfe"] == expected.steps
        saved += int(canvas.editable[number].sum()) - expected.steps
    return saved


# Parity, greedy token for token.


@each_model
@each_length
@pytest.mark.parametrize("n", [1, 2, 3])
def test_klass_is_the_reference(model: str, block_length: int | None, n: int) -> None:
    saved = 0
    for threshold, tau_kl, quota in ((0.3, 0.05, 1), (0.5, 0.4, 2), (0.5, 1e-4, 1)):
        strategy = build_strategy(
            "klass", threshold=threshold, tau_kl=tau_kl, n=n, quota=quota, block_length=block_length
        )
        fewer = check_parity(
            strategy,
            MODELS[model](),
            block_length,
            lambda knobs=(threshold, tau_kl, n, quota): reference.Klass(*knobs),  # type: ignore[misc]
        )
        saved += fewer if quota == 1 else 0
    assert saved > 0 or model != "steady" or block_length is not None, "the gate must open sometimes"


@each_model
@each_length
@pytest.mark.parametrize("score", FUNCTIONS)
@pytest.mark.parametrize("direction", ["prev_now", "now_prev"])
@pytest.mark.parametrize("first", ["uniform", "skip"])
def test_swd_is_the_reference(model: str, block_length: int | None, score: str, direction: str, first: str) -> None:
    for lam, threshold in ((0.3, 0.3), (2.0, 0.2)):
        strategy = build_strategy(
            "swd",
            lam=lam,
            threshold=threshold,
            score=score,
            direction=direction,
            first=first,
            block_length=block_length,
        )
        check_parity(
            strategy,
            MODELS[model](),
            block_length,
            lambda knobs=(FUNCTIONS[score], lam, direction, first, threshold): reference.Swd(*knobs),  # type: ignore
        )


@each_model
@each_length
def test_credit_is_the_reference(model: str, block_length: int | None) -> None:
    denoiser = MODELS[model]()
    for alpha, gamma, decay, threshold in ((0.7, 0.2, 0.8, 0.6), (3.0, 1.0, 1.0, 0.9), (2.0, 0.0, 0.0, 0.5)):
        strategy = build_strategy(
            "credit", alpha=alpha, gamma=gamma, decay=decay, threshold=threshold, block_length=block_length
        )
        outcome, canvas = unmask(denoiser, ragged_canvas(), strategy), ragged_canvas()
        for number, length in enumerate(canvas.lengths.tolist()):
            rules: list[reference.Credit] = []

            def rule(
                knobs: tuple[float, float, float, float] = (alpha, gamma, decay, threshold),
                rules: list[reference.Credit] = rules,
            ) -> reference.Rule:
                rules.append(reference.Credit(*knobs))
                return rules[-1]

            expected = reference.decode(
                lambda row: denoiser(torch.tensor([row]))[0].exp().tolist(),
                canvas.tokens[number, :length].tolist(),
                canvas.editable[number, :length].tolist(),
                MASK,
                block_length,
                rule,
                lambda step, i, law, rules=rules: reference.best(rules[-1].fused[i]),
            )
            found = outcome.row(number)
            assert (found["tokens"], found["step_map"]) == (expected.tokens, expected.step_map)


@each_model
@pytest.mark.parametrize("max_edits", [0, 1, 8])
@pytest.mark.parametrize("least", [1, 2, 4])
def test_saber_is_the_reference(model: str, max_edits: int, least: int) -> None:
    rows, denoiser, taken_back = [([1, 3], 25), ([], 9), ([4], 16)], MODELS[model](), 0
    canvas = Canvas.from_prompts([prompt for prompt, _ in rows], [count for _, count in rows])
    outcome = unmask(denoiser, canvas, build_strategy("saber", least=least, max_edits=max_edits))
    for number, length in enumerate(canvas.lengths.tolist()):
        expected, back = reference.saber(
            lambda row: denoiser(torch.tensor([row]))[0].exp().tolist(),
            canvas.tokens[number, :length].tolist(),
            canvas.editable[number, :length].tolist(),
            MASK,
            least,
            max_edits,
        )
        found = outcome.row(number)
        assert found["tokens"] == expected.tokens
        assert found["step_map"] == expected.step_map
        assert found["nfe"] == expected.steps
        taken_back += back
    assert (taken_back > 0) == (max_edits > 0) or least == 1


# Reductions: the effect off is the base, bit for bit.

REDUCTIONS: dict[str, tuple[Strategy, Strategy]] = {
    "swd without weight": (
        build_strategy("swd", lam=0.0, threshold=0.6, block_length=5),
        build_strategy("threshold", threshold=0.6, block_length=5),
    ),
    "swd without weight under a budget": (
        Strategy(score=Stability(negative_entropy, 0.0), select=EntropyBudget(0.5)),
        Strategy(score=negative_entropy, select=EntropyBudget(0.5)),
    ),
    "swd in blocks of one, first step skipped": (
        build_strategy("swd", first="skip", threshold=0.6, block_length=1),
        build_strategy("threshold", threshold=0.6, block_length=1),
    ),
    "no credit": (
        build_strategy("credit", alpha=0.0, threshold=0.6, block_length=5),
        build_strategy("threshold", threshold=0.6, block_length=5),
    ),
    "no gate": (
        build_strategy("klass", tau_kl=math.inf, n=1, threshold=0.6, block_length=5),
        build_strategy("threshold", threshold=0.6, block_length=5),
    ),
    "nothing is ever at rest": (
        build_strategy("klass", tau_kl=0.0, quota=2, block_length=5),
        Strategy(select=TopK(2), window=Blocks(5)),
    ),
    "nothing may be taken back": (
        build_strategy("saber", max_edits=0),
        build_strategy("saber", backtrack=False),
    ),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reduction(name: str, temperature: float) -> None:
    for denoiser in (HashDenoiser(7.0, seed=11), DriftDenoiser(5.0, seed=12)):
        left, right = (
            unmask(
                denoiser,
                ragged_canvas(),
                dataclasses.replace(strategy, draw=dataclasses.replace(strategy.draw, temperature=temperature)),
            )
            for strategy in REDUCTIONS[name]
        )
        assert repr(left.rows()) == repr(right.rows())


# The divergence itself.


@dataclass(frozen=True)
class Script(Looking):
    """Commits the positions of a list, one entry per step, and notes the scores it was shown."""

    positions: tuple[tuple[int, ...], ...]
    seen: list[list[float]] = field(default_factory=list, compare=False)

    def __call__(self, scores: Float[Tensor, "batch seq"], step: Step) -> Bool[Tensor, "batch seq"]:
        self.seen.append(scores[0].tolist())
        flags = torch.zeros_like(step.candidates)
        flags[:, list(self.positions[step.state.step])] = True
        return flags


def two_laws() -> FunctionDenoiser:
    """Position 1 is (.5, .5) while position 0 is masked, then (.9, .1)."""

    def logits(tokens: Tensor) -> Tensor:
        p = torch.full((*tokens.shape, 3), 0.5, dtype=torch.float64)
        p[tokens[:, 0] != 2, 1] = torch.tensor([0.9, 0.1, 0.0], dtype=torch.float64)
        return p.log()

    return FunctionDenoiser(logits, 2, 3)


@pytest.mark.parametrize(("direction", "moved"), [("prev_now", 0.5108), ("now_prev", 0.3681)])
def test_the_two_directions_differ(direction: str, moved: float) -> None:
    script = Script(((0,), (1,)))
    score = Stability(probability, 2.0, direction)  # type: ignore[arg-type]
    unmask(two_laws(), Canvas.from_prompts([[]], 2), Strategy(score=score, select=script))
    assert script.seen[0] == pytest.approx([math.log(0.5)] * 2)  # the uniform law itself: nothing has moved
    assert script.seen[1][1] == pytest.approx(math.log(0.9) - 2 * moved, abs=2e-4)


def test_a_token_that_becomes_impossible_or_possible_costs_much_and_no_nan() -> None:
    def logits(tokens: Tensor) -> Tensor:
        p = torch.full((*tokens.shape, 4), 0.5, dtype=torch.float64)
        p[:, :, 2] = 0.0
        p[tokens[:, 0] != 3, 1] = torch.tensor([0.0, 0.5, 0.5, 0.0], dtype=torch.float64)
        return p.log()

    for direction in ("prev_now", "now_prev"):
        script = Script(((0,), (1,)))
        score = Stability(probability, 1.0, direction)  # type: ignore[arg-type]
        unmask(FunctionDenoiser(logits, 3, 4), Canvas.from_prompts([[]], 2), Strategy(score=score, select=script))
        assert script.seen[1][1] == pytest.approx(math.log(0.5) - 0.5e4, rel=1e-3)


def test_what_stands_still_may_yet_depend_on_a_masked_neighbour() -> None:
    """SWD's theorem bounds the dependence on masked context from below. A is independent of B and C, and B = C: after A
    is known neither B nor C has moved (KL 0), and yet I(B; C) = ln 2 is lost by committing both."""
    joint = torch.zeros(2, 2, 2, dtype=torch.float64)
    for a in range(2):
        for b in range(2):
            joint[a, b, b] = (0.9, 0.1)[a] / 2
    source = TabularSource(joint, impossible="uniform")
    script = Script(((0,), (1, 2)))
    weighted = Strategy(score=Stability(probability, 1e6, first="skip"), select=script, draw=SAMPLE)
    unmask(source, Canvas.from_prompts([[]], 3), weighted)
    assert script.seen[1][1:] == pytest.approx([math.log(0.5)] * 2)
    stable = Strategy(score=Stability(probability, 1e6, first="skip"), select=Script(((0,), (1, 2))), draw=SAMPLE)
    law = exact_law(source, stable)
    assert law.kl(source_law(source)) == pytest.approx(math.log(2))


@pytest.mark.parametrize("score", [Stability(probability), Stability(negative_entropy, 3.0, "now_prev", "skip")])
def test_one_token_a_step_stays_exact_whatever_has_moved(score: Stability) -> None:
    source = markov(4)
    law = exact_law(source, Strategy(score=score, select=TopK(1), draw=SAMPLE))
    assert law.kl(source_law(source)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("select", [TopK(2), Threshold(0.2), Factor(1.0), EntropyBudget(0.5)])
@pytest.mark.parametrize("score", SCORES)
def test_stability_weighs_any_score_under_any_selector(score: str, select: Looking) -> None:
    strategy = Strategy(score=Stability(SCORES[score], 0.5), select=select, window=Blocks(4))  # type: ignore[arg-type]
    assert not bool(unmask(DriftDenoiser(), ragged_canvas(), strategy).last.masked.any())


# Memories belong to one run, one row, one block.

REMEMBERING = {
    "klass": {"threshold": 0.3, "tau_kl": 0.4},
    "swd": {"threshold": 0.2},
    "credit": {"threshold": 0.6, "alpha": 2.0},
    "saber": {},
}


@pytest.mark.parametrize("name", REMEMBERING)
def test_public_bug_requests_do_not_share_what_is_remembered(name: str) -> None:
    """dInfer #31 and its credit table, keyed by block bounds and left over from the last request: one strategy object,
    used twice and interleaved, gives what it gives alone, in any batch."""
    strategy = build_strategy(name, block_length=4, **REMEMBERING[name])  # type: ignore[arg-type]
    canvas, other = ragged_canvas(), Canvas.from_prompts([[1, 2], [3]], [9, 6])
    model = DriftDenoiser(6.0, seed=4, coupling=1.5)
    first = unmask(model, canvas, strategy)
    runs = [Run(model, c, strategy, row_keys(0, len(c))) for c in (other, canvas)]
    while not all(run.done for run in runs):
        for run in runs:
            if not run.done:
                run.advance()
    for mine, again in zip(first.last.tokens, runs[1].frame().tokens):
        assert torch.equal(mine, again)
    assert torch.equal(first.last.step_map, runs[1].frame().step_map)
    seeds = list(range(len(canvas)))
    together, order = unmask(model, canvas, strategy, seeds), [5, 3, 0, 2, 4, 1]
    shuffled = unmask(model, canvas[order], strategy, order)
    for place, number in enumerate(order):
        same_rows(together.row(number), shuffled.row(place))
        same_rows(together.row(number), unmask(model, canvas[[number]], strategy, [number]).row(0))


def test_public_bug_klass_history_does_not_leak_into_the_next_block() -> None:
    """A model that never wavers: each block still needs one step to see that nothing moves."""
    law = torch.tensor([0.8, 0.1, 0.1, 0.0], dtype=torch.float64)
    denoiser = FunctionDenoiser(lambda tokens: law.log().expand(*tokens.shape, 4), 3, 4)
    for n, expected in ((1, [0, 1, 1, 1, 2, 3, 3, 3]), (2, [0, 1, 2, 2, 3, 4, 5, 5])):
        strategy = build_strategy("klass", n=n, block_length=4)
        assert unmask(denoiser, Canvas.from_prompts([[]], 8), strategy).last.step_map[0].tolist() == expected


def test_klass_waits_while_predictions_move() -> None:
    canvas = Canvas.from_prompts([[]], 16)
    still = unmask(DriftDenoiser(9.0, coupling=0.05), canvas, build_strategy("klass", threshold=0.3))
    moving = unmask(DriftDenoiser(9.0, coupling=9.0), canvas, build_strategy("klass", threshold=0.3))
    assert int(still.last.nfe[0]) < 8
    assert int(moving.last.nfe[0]) > 12


def test_credit_begins_anew_with_every_block_and_fades() -> None:
    """A constant law (.6, .4): with decay b the leader's credit after k steps is .6^g (1 + b + ... + b^(k-1))."""
    law = torch.tensor([0.6, 0.4, 0.0], dtype=torch.float64)
    denoiser = FunctionDenoiser(lambda tokens: law.log().expand(*tokens.shape, 3), 2, 3)
    alpha, gamma, decay = 0.7, 0.5, 0.8
    strategy = Strategy(select=TopK(1), transforms=(Credit(alpha, gamma, decay),), window=Blocks(3))
    last = unmask(denoiser, Canvas.from_prompts([[]], 6), strategy).last
    for position, k in enumerate([1, 2, 3, 1, 2, 3]):
        credit = 0.6**gamma * sum(decay**j for j in range(k))
        lead = 0.6 * (1 + credit) ** alpha
        assert float(last.log_probs[0, position]) == pytest.approx(math.log(lead / (lead + 0.4)), rel=1e-12)


def wavering(dtype: torch.dtype) -> FunctionDenoiser:
    """Leads with token 0, 5, 0, 9, ... as the row fills; forbids every seventh token."""

    def logits(tokens: Tensor) -> Tensor:
        left = int((tokens == 40).sum())
        generator = torch.Generator().manual_seed(left)
        values = 3 * torch.randn(*tokens.shape, 41, generator=generator, dtype=torch.float64)
        values[..., [0, 5, 0, 9][left % 4]] += 8.0
        values[..., 1::7] = -torch.inf
        return values.to(dtype)

    return FunctionDenoiser(logits, 40, 41)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [1e-4, 0.7, 3.0, 2e3])
def test_the_fused_law_is_normalised_to_the_last_digits(alpha: float, dtype: torch.dtype) -> None:
    """Against a softmax over everything in float64, from nothing to a bonus of thousands of nats."""
    denoiser, credit, gamma, decay = wavering(dtype), torch.zeros(12, 41, dtype=torch.float64), 0.2, 0.8
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12

    def check(step: Step, committed: Tensor) -> None:
        masked = torch.where(step.candidates, 40, 3)  # `wavering` looks at how many masks there are
        plain = denoiser(masked, at=step.candidates).double()
        position = step.index[1]
        credit.mul_(decay)
        credit[position, plain.argmax(dim=-1)] += (gamma * plain.amax(dim=-1)).exp()
        expected = (plain + alpha * credit[position].log1p()).log_softmax(dim=-1)
        assert step.log_probs.dtype == dtype
        torch.testing.assert_close(step.log_probs.double(), expected, rtol=tolerance, atol=tolerance)
        assert float(step.log_probs.max()) < 1e-12

    strategy = Strategy(select=TopK(1), transforms=(Credit(alpha, gamma, decay),), observers=(check,))
    unmask(denoiser, Canvas.from_prompts([[]], 12), strategy)


@pytest.mark.parametrize("place", [0, 1])
def test_credit_beside_a_penalty_leaves_a_law(place: int) -> None:
    totals: list[float] = []
    transforms: list[Transform] = [RepetitionPenalty(5.0)]
    transforms.insert(place, Credit())
    strategy = Strategy(
        select=TopK(1),
        transforms=tuple(transforms),
        observers=(lambda step, committed: totals.extend(step.log_probs.exp().sum(dim=-1).tolist()),),
    )
    unmask(wavering(torch.float64), Canvas.from_prompts([[0, 5]], 6), strategy)
    assert totals == pytest.approx([1.0] * len(totals), abs=1e-12)


def test_windows_that_overlap_begin_anew_with_their_number_too() -> None:
    """A sliding window counts as a new block after every second token; positions stay in sight across that."""
    law = torch.tensor([0.8, 0.2, 0.0], dtype=torch.float64)
    denoiser = FunctionDenoiser(lambda tokens: law.log().expand(*tokens.shape, 3), 2, 3)
    window = Sliding(masks=3, length=9, renew=2)
    klass = Strategy(select=StableThreshold(0.6, n=1), window=window)
    last = unmask(denoiser, Canvas.from_prompts([[]], 8), klass).last
    assert last.step_map[0].tolist() == [0, 1, 1, 2, 3, 4, 4, 5]
    credit = Strategy(select=TopK(1), transforms=(Credit(1.0, 0.0, 1.0),), window=window)
    last = unmask(denoiser, Canvas.from_prompts([[]], 6), credit).last
    for position, k in enumerate([1, 2, 1, 2, 1, 2]):
        lead = 0.8 * (1 + k)
        assert float(last.log_probs[0, position]) == pytest.approx(math.log(lead / (lead + 0.2)), rel=1e-12)
    strategy = dataclasses.replace(credit, draw=SAMPLE, select=TopK(1), window=Sliding(5, 20, renew=3))
    for seed in range(5):
        assert not bool(unmask(HashDenoiser(seed=seed), ragged_canvas(), strategy).last.masked.any())


@dataclass(frozen=True)
class MaskAgain:
    """Masks position 0 again after step 1."""

    reads_decided: ClassVar[bool] = True
    max_edits: ClassVar[int] = 1

    def pending(self, state: State) -> Bool[Tensor, " batch"]:
        return torch.zeros_like(state.rows, dtype=torch.bool)

    def __call__(self, step: Step, committed: Bool[Tensor, "batch seq"]) -> Revision:
        flags = torch.zeros_like(committed)
        flags[:, 0] = step.state.step == 1
        return Revision(remask=flags)


def test_credit_and_movement_come_from_masked_predictions_only() -> None:
    """A decided position predicts what it holds; masked again, it has no credit and no past from then."""

    def logits(tokens: Tensor) -> Tensor:
        p = torch.tensor([0.6, 0.4, 0.0], dtype=torch.float64).expand(*tokens.shape, 3).clone()
        p[tokens != 2] = torch.tensor([0.01, 0.99, 0.0], dtype=torch.float64)
        return p.log()

    canvas, denoiser = Canvas.from_prompts([[]], 3), FunctionDenoiser(logits, 2, 3)
    strategy = Strategy(
        select=Script(((0,), (1,), (0,), (2,))), revise=MaskAgain(), transforms=(Credit(1.0, 0.0, 0.5),)
    )
    last = unmask(denoiser, canvas, strategy).last
    lead = 0.6 * (1 + 1 + 0.25)
    assert float(last.log_probs[0, 0]) == pytest.approx(math.log(lead / (lead + 0.4)), rel=1e-12)
    script = Script(((0,), (1,), (0,), (2,)))
    score = Stability(probability, 1.0, first="skip")
    unmask(denoiser, canvas, Strategy(score=score, select=script, revise=MaskAgain()))
    assert script.seen[2][0] == pytest.approx(math.log(0.6))


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("klass", {"n": 0}, "1 or more"),
        ("klass", {"tau_kl": -1.0}, "0 or more"),
        ("klass", {"quota": 0}, "1 or more"),
        ("swd", {"lam": -1.0}, "positive"),
        ("swd", {"lam": math.inf}, "positive"),
        ("swd", {"direction": "back"}, "'prev_now' or 'now_prev'"),
        ("swd", {"first": "none"}, "'uniform' or 'skip'"),
        ("swd", {"k": 3}, "contradict"),
        ("swd", {"score": "random"}, "probability, margin, entropy"),
        ("credit", {"alpha": -1.0}, "0 or more"),
        ("credit", {"decay": 1.5}, r"\[0, 1\]"),
        ("saber", {"least": 0}, "1 or more"),
        ("saber", {"max_edits": -1}, "0 or more"),
    ],
)
def test_a_knob_out_of_range_names_what_is_allowed(name: str, knobs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_strategy(name, **knobs)


def test_the_gate_is_closed_for_the_first_steps_only() -> None:
    canvas = Canvas.from_prompts([[]], 12)
    strategy = Strategy(select=StableThreshold(0.0, math.inf, n=3))
    assert unmask(HashDenoiser(), canvas, strategy).last.nfe.tolist() == [3]
