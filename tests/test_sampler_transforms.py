"""Guidance, repetition penalty, suppressed tokens, and the strategy that a model's `generation_config` stores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM

from mdlm.config import MDLMConfig
from mdlm.denoiser import Denoiser, FunctionDenoiser, LogitsModelDenoiser
from mdlm.eval.sources import TabularSource
from mdlm.modeling import MDLMForMaskedLM
from mdlm.samplers import Canvas, Generation, Strategy, generate, stream
from mdlm.samplers.cache import Feeder, NoCache, WholeCanvas
from mdlm.samplers.guidance import Guided, guided_log_probs
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.revise import Revision
from mdlm.samplers.state import State, Step
from mdlm.samplers.transforms import OncePerStep, RepetitionPenalty

VOCAB, MASK = 13, 12
NAMES: list[tuple[str, dict[str, Any]]] = [
    ("threshold", {"threshold": 0.2, "block_length": None}),
    ("threshold", {"threshold": 0.0, "block_length": 4}),
    ("confidence", {"k": 3}),
    ("confidence", {"k": 3, "score": "random"}),
    ("llada", {"steps": 2}),
    ("ancestral", {"steps": 3}),
    ("ancestral", {"steps": 3, "noise": "joint"}),
    ("first_hitting", {}),
]
each_strategy = pytest.mark.parametrize(("name", "knobs"), NAMES)


class Watched:
    """A denoiser that depends on all tokens of a row, and keeps what it was asked."""

    mask_token_id, num_tokens, device = MASK, VOCAB, torch.device("cpu")

    def __init__(self, scale: float = 1.0, seed: int = 0) -> None:
        self.weights = scale * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
        self.calls: list[tuple[Tensor, Tensor | None]] = []

    def __call__(
        self,
        tokens: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        self.calls.append((tokens.clone(), attention_mask))
        real = torch.ones_like(tokens) if attention_mask is None else attention_mask.long()
        place = torch.arange(1, tokens.shape[1] + 1)
        given = (torch.nn.functional.one_hot(tokens, VOCAB) * (real * place)[..., None]).sum(dim=1, keepdim=True)
        logits = (given.float() @ self.weights) * torch.cos(place.float())[None, :, None]
        logits = logits.index_fill(-1, torch.tensor(MASK), -torch.inf).log_softmax(dim=-1)
        return logits if at is None else logits[at]


def same(a: Generation, b: Generation) -> bool:
    """Equal to the last bit, counts included."""
    rows = zip((*a.tokens, *a.step_map, *a.log_probs), (*b.tokens, *b.step_map, *b.log_probs))
    equal = all(torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0)) for x, y in rows)
    counts = zip((a.nfe, a.forwards, a.tokens_fed), (b.nfe, b.forwards, b.tokens_fed))
    return equal and all(torch.equal(x, y) for x, y in counts)


# Guidance


@given(st.integers(0, 10**6), st.floats(0, 5))
@settings(max_examples=30, deadline=None)
def test_both_printed_forms_of_guidance_are_what_is_computed(seed: int, weight: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    c, u = torch.randn(2, 3, 7, dtype=torch.float64, generator=generator).mul(3).log_softmax(dim=-1)
    guided = guided_log_probs(c, u, weight)
    for row in range(3):
        for form in (
            [float(u[row, t] + (weight + 1) * (c[row, t] - u[row, t])) for t in range(7)],
            [float(c[row, t] + weight * (c[row, t] - u[row, t])) for t in range(7)],
        ):
            total = math.log(sum(math.exp(x) for x in form))
            assert guided[row].tolist() == pytest.approx([x - total for x in form], abs=1e-9)


@pytest.mark.parametrize("weight", [0.25, 1.0, 4.0])
def test_no_nan_from_inf_minus_inf_at_the_mask_id_under_guidance(weight: float) -> None:
    c = torch.tensor([0.5, 0.3, 0.2, 0.0]).log()[None]
    u = torch.tensor([0.2, 0.3, 0.5, 0.0]).log()[None]
    probs = guided_log_probs(c, u, weight)[0].exp()
    expected = torch.tensor([0.5 ** (1 + weight) / 0.2**weight, 0.3, 0.2 ** (1 + weight) / 0.5**weight, 0.0])
    torch.testing.assert_close(probs, expected / expected.sum())


def test_a_token_that_only_the_unconditional_branch_excludes_takes_the_mass_that_its_limit_has() -> None:
    c = torch.tensor([0.5, 0.2, 0.3, 0.0, 0.0]).log()[None]
    u = torch.tensor([0.0, 0.0, 0.4, 0.6, 0.0]).log()[None]
    expected = torch.tensor([0.25, 0.04, 0.0, 0.0, 0.0]) / 0.29
    torch.testing.assert_close(guided_log_probs(c, u, 1.0)[0].exp(), expected)


def test_guidance_is_exact_on_a_source_with_known_conditionals() -> None:
    source = TabularSource.random(3, 4, torch.Generator().manual_seed(5))
    canvas = Canvas.from_prompts([[2, 1]], 1)
    run = stream(source, None, canvas, strategy="first_hitting", guidance=1.5, eos="ignore")
    last = list(run)[-1]
    token = int(last.tokens[0, 2])
    c = source.joint[2, 1] / source.joint[2, 1].sum()
    u = source.joint.sum(dim=(0, 1))
    law = c**2.5 / u**1.5
    assert float(last.log_probs[0, 2]) == pytest.approx(float((law / law.sum()).log()[token]), abs=1e-12)


@each_strategy
def test_guidance_of_weight_0_is_no_guidance_and_costs_one_evaluation(name: str, knobs: dict[str, Any]) -> None:
    prompts, base = [[1, 2], [3]], build_strategy(name, **knobs)
    plain = generate(Watched(), None, prompts, strategy=base, max_new_tokens=6)
    off = dataclasses.replace(base, cache=Guided(0.0, base.cache))
    assert same(plain, generate(Watched(), None, prompts, strategy=off, max_new_tokens=6))
    assert same(plain, generate(Watched(), None, prompts, strategy=base, max_new_tokens=6, guidance=0.0))


@each_strategy
def test_guidance_counts_what_the_model_was_really_asked(name: str, knobs: dict[str, Any]) -> None:
    watched = Watched()
    out = generate(watched, None, [[1, 2, 3], [4], []], strategy=name, max_new_tokens=5, guidance=2.0, **knobs)
    lengths = [8, 6, 5]
    calls = torch.zeros(3, dtype=torch.int64)
    for tokens, mask in watched.calls:
        width = tokens.shape[1] if mask is None else None
        for real in [width] * len(tokens) if mask is None else mask.sum(dim=-1).tolist():
            calls[lengths.index(real)] += 1
    assert out.nfe.tolist() == out.forwards.tolist() == calls.tolist()
    assert bool((out.nfe % 2 == 0).all())
    assert out.tokens_fed.tolist() == (calls * torch.tensor(lengths)).tolist()


def test_the_unconditional_branch_has_every_given_token_masked_and_keeps_what_is_written() -> None:
    watched = Watched()
    canvas = Canvas.from_rows(
        [torch.tensor([1, MASK, 0, 0, 3]), torch.tensor([5, 0])],
        [torch.tensor([False, False, True, True, False]), torch.tensor([False, True])],
    )
    frames = list(stream(watched, None, canvas, strategy="confidence", guidance=1.0, eos="ignore"))
    for step, frame in enumerate(frames[:-1]):
        (c, mask), (u, other) = watched.calls[2 * step : 2 * step + 2]
        assert torch.equal(c[0], frame.tokens[0])
        assert u[0].tolist() == [MASK, MASK, int(c[0, 2]), int(c[0, 3]), MASK]
        assert (mask is None) == (other is None)
        if len(c) == 2:
            assert mask is not None
            assert torch.equal(mask, other)
            assert u[1].tolist() == [MASK, MASK, *c[1, 2:].tolist()], "padding stays as it is"


def test_llada_8_guidance_works_without_an_attention_mask() -> None:
    watched = Watched()
    generate(watched, None, [[1, 2], [3, 4]], strategy="llada", steps=3, max_new_tokens=4, guidance=1.0)
    assert watched.calls
    assert all(mask is None for _, mask in watched.calls)

    def blind(tokens: Tensor) -> Tensor:
        return (
            torch.nn.functional.one_hot(tokens, VOCAB).float().sum(dim=1, keepdim=True).expand(-1, tokens.shape[1], -1)
        )

    denoiser = FunctionDenoiser(blind, MASK, VOCAB)  # refuses any padding
    out = generate(denoiser, None, [[1, 2], [3, 4]], strategy="llada", steps=3, max_new_tokens=4, guidance=1.0)
    assert out.new_tokens.tolist() == [4, 4]


@each_strategy
def test_a_guided_row_does_not_depend_on_its_batch(name: str, knobs: dict[str, Any]) -> None:
    prompts, seeds = [[1, 2, 3], [4], [5, 6]], [7, 8, 9]
    options: dict[str, Any] = {
        "strategy": name,
        "max_new_tokens": 5,
        "guidance": 1.5,
        "repetition_penalty": 2.0,
        **knobs,
    }
    together = generate(Watched(), None, prompts, seed=seeds, **options)
    for row in range(3):
        alone = generate(Watched(), None, prompts[row : row + 1], seed=seeds[row : row + 1], **options)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert int(alone.nfe[0]) == int(together.nfe[row])


class Logged:
    """A cache policy whose feeders remember the tokens they saw: state that branches must not share."""

    def __init__(self) -> None:
        self.feeders: list[LoggedFeeder] = []

    def start(self, denoiser: Denoiser) -> Feeder:
        self.feeders.append(LoggedFeeder(WholeCanvas(denoiser)))
        return self.feeders[-1]


@dataclasses.dataclass
class LoggedFeeder:
    base: WholeCanvas
    seen: list[Tensor] = dataclasses.field(default_factory=list)
    kept: list[int] = dataclasses.field(default_factory=list)

    def __call__(self, state: State, tokens: Tensor, at: Tensor, window: Tensor) -> Tensor:
        self.seen.append(tokens)
        return self.base(state, tokens, at, window)

    def keep(self, rows: Tensor) -> None:
        self.kept.append(len(rows))


def test_dllm_cache_branches_of_guidance_share_no_cache() -> None:
    policy = Logged()
    base = dataclasses.replace(build_strategy("threshold", threshold=0.0), cache=policy)
    plain = generate(
        Watched(), None, [[1, 2], [3]], strategy="threshold", threshold=0.0, max_new_tokens=5, guidance=1.0
    )
    out = generate(Watched(), None, [[1, 2], [3]], strategy=base, max_new_tokens=5, guidance=1.0)
    assert same(plain, out)
    conditional, unconditional = policy.feeders
    assert conditional.kept == unconditional.kept
    assert conditional.kept[-1] == 0
    assert all(t[0, 0] == 1 for t in conditional.seen)
    assert all(t[0, 0] == MASK for t in unconditional.seen)


@pytest.mark.parametrize("weight", [-0.1, math.inf, math.nan])
def test_guidance_out_of_range_is_an_error(weight: float) -> None:
    with pytest.raises(ValueError, match="must be 0"):
        generate(Watched(), None, [[1]], guidance=weight)


# Repetition penalty


def test_the_penalty_divides_the_probability_of_what_the_row_holds() -> None:
    plain, changed = [], []
    canvas = Canvas.from_rows(
        [torch.tensor([1, 4, 0, 7]), torch.tensor([2, 0])],
        [torch.tensor([False, False, True, False]), torch.tensor([False, True])],
    )

    def uneven(tokens: Tensor) -> Tensor:
        return torch.arange(VOCAB).double().mul(0.3).expand(*tokens.shape, VOCAB)

    denoiser = FunctionDenoiser(uneven, MASK, VOCAB, ragged_ok=True)
    weights = [math.exp(0.3 * token) for token in range(MASK)]
    for row, held in enumerate([{1, 4, 7}, {2}]):  # row 1 is padded with 0, which it does not hold
        penalised = [w / 3 if token in held else w for token, w in enumerate(weights)]
        changed.append([math.log(w / sum(penalised)) for w in penalised])
        plain.append(math.log(max(weights) / sum(weights)))
        out = generate(denoiser, None, canvas, strategy="confidence", repetition_penalty=3.0, eos="ignore")
        position = [2, 1][row]
        token = int(out.tokens[row][position])
        assert token == max(range(MASK), key=lambda t: changed[row][t])
        assert float(out.log_probs[row][position]) == pytest.approx(changed[row][token], abs=1e-12)


@each_strategy
def test_a_penalty_of_1_is_none(name: str, knobs: dict[str, Any]) -> None:
    options: dict[str, Any] = {"strategy": name, "max_new_tokens": 6, **knobs}
    plain = generate(Watched(), None, [[1], [2, 3]], **options)
    assert same(plain, generate(Watched(), None, [[1], [2, 3]], repetition_penalty=1.0, **options))


def the_the(tokens: Tensor) -> Tensor:
    """Every position wants 3 ("the") most, then 5, then 7."""
    logits = torch.zeros(*tokens.shape, VOCAB)
    logits[..., 3], logits[..., 5], logits[..., 7] = 6.0, 5.0, 4.0
    return logits


def test_the_the_two_positions_of_one_step_do_not_both_pick_a_token_that_the_penalty_forbids() -> None:
    denoiser = FunctionDenoiser(the_the, MASK, VOCAB)
    options: dict[str, Any] = {"strategy": "confidence", "k": 3, "max_new_tokens": 3}
    bug = dataclasses.replace(build_strategy("confidence", k=3), transforms=(RepetitionPenalty(1e6),))
    assert generate(denoiser, None, [[1]], strategy=bug, max_new_tokens=3).tokens[0].tolist() == [1, 3, 3, 3]
    out = generate(denoiser, None, [[1]], repetition_penalty=1e6, **options)
    assert out.tokens[0].tolist() == [1, 3, 5, 7]
    assert out.step_map[0].tolist() == [-1, 0, 1, 2]
    held = generate(denoiser, None, [[3, 5]], repetition_penalty=1.5, **options)
    assert held.tokens[0].tolist() == [3, 5, 3, 3, 3], "a mild penalty on a token already there is seen by all"
    assert held.nfe.tolist() == [1]


class Witness:
    """A reviser that changes nothing and notes what it was told."""

    reads_decided, max_edits = False, 1

    def __init__(self) -> None:
        self.told: list[list[bool]] = []

    def pending(self, state: State) -> Tensor:
        return torch.zeros_like(state.rows, dtype=torch.bool)

    def __call__(self, step: Step, committed: Tensor) -> Revision:
        self.told += committed.tolist()
        return Revision()


def test_revisers_are_told_what_was_written_not_what_was_chosen() -> None:
    witness = Witness()
    strategy = dataclasses.replace(build_strategy("confidence", k=3), revise=witness)
    denoiser = FunctionDenoiser(the_the, MASK, VOCAB)
    generate(denoiser, None, [[1]], strategy=strategy, max_new_tokens=3, repetition_penalty=1e6)
    expected = [[False, place == 1, place == 2, place == 3] for place in (1, 2, 3)]
    assert witness.told == expected


@each_strategy
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_escapes_a_harsh_penalty_whatever_the_strategy(
    name: str, knobs: dict[str, Any], temperature: float
) -> None:
    for seed in range(5):
        out = generate(
            Watched(0.02, seed),
            None,
            [[1, 2], [3]],
            strategy=name,
            seed=seed,
            max_new_tokens=8,
            repetition_penalty=1e12,
            temperature=temperature,
            **knobs,
        )
        for row in out.tokens:
            assert len(set(row.tolist())) == len(row)
        assert bool((out.nfe <= 8).all())


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(-3, 0)), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_one_step_admits_the_most_probable_commit_of_each_new_token(commits: list[tuple[int, int, int]]) -> None:
    commits = sorted(commits, key=lambda c: c[0])
    row = torch.tensor([c[0] for c in commits])
    tokens = torch.tensor([c[1] for c in commits])
    log_probs = torch.tensor([float(c[2]) for c in commits], dtype=torch.float64)
    state = SimpleNamespace(
        tokens=torch.tensor([[0, 9], [1, 9]]),
        masked=torch.tensor([[False, True], [False, True]]),
        lengths=torch.tensor([2, 1]),
    )
    step: Any = SimpleNamespace(state=state, log_probs=torch.zeros(1, 10))
    stay = OncePerStep()(step, row, torch.arange(len(commits)), tokens, log_probs)
    expected = []
    for index, (r, token, value) in enumerate(commits):
        rivals = [(-c[2], i) for i, c in enumerate(commits) if c[:2] == (r, token)]
        expected.append(token == r or (-value, index) == min(rivals))
    assert stay.tolist() == expected


@pytest.mark.parametrize("penalty", [0.9, 0.0, math.inf, math.nan])
def test_a_penalty_out_of_range_is_an_error(penalty: float) -> None:
    with pytest.raises(ValueError, match="must be 1"):
        generate(Watched(), None, [[1]], repetition_penalty=penalty)


# Suppressed tokens


class Successor(nn.Module):
    """Logits at i are sure of token i + 1, one more than token i (mod 6): a converted causal model, shifted."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        place = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        logits = torch.nn.functional.one_hot((input_ids[:, :1] + place + 1) % 6, VOCAB).float() * 5
        logits[..., 8] = 2.0
        return SimpleNamespace(logits=logits)


def test_dllm_37_tokens_are_suppressed_after_the_shift() -> None:
    denoiser = LogitsModelDenoiser(Successor(), MASK, VOCAB, shift=True)
    options: dict[str, Any] = {"strategy": "threshold", "max_new_tokens": 4}
    assert generate(denoiser, None, [[1, 2]], **options).tokens[0].tolist() == [1, 2, 3, 4, 5, 0]
    out = generate(denoiser, None, [[1, 2]], suppress_tokens=[4], **options)
    assert out.tokens[0].tolist() == [1, 2, 3, 8, 5, 0]
    first = generate(denoiser, None, [[1, 2], [1]], begin_suppress_tokens=[3, 4], **options)
    assert first.tokens[0].tolist() == [1, 2, 8, 4, 5, 0], "only the first answer position, not the one before or after"
    assert first.tokens[1].tolist() == [1, 2, 3, 4, 5]


@each_strategy
@pytest.mark.parametrize("guidance", [0.0, 2.0])
def test_what_is_suppressed_stays_so_under_guidance_and_penalty(
    name: str, knobs: dict[str, Any], guidance: float
) -> None:
    banned = [0, 2, 4, 6, 8, 10]
    out = generate(
        Watched(),
        None,
        [[2], [1, 4]],
        strategy=name,
        temperature=1.5,
        max_new_tokens=9,
        suppress_tokens=banned,
        begin_suppress_tokens=[1, 3],
        repetition_penalty=5.0,
        guidance=guidance,
        **knobs,
    )
    for row, prompt in zip(out.tokens, (1, 2)):
        assert not set(row[prompt:].tolist()) & {*banned, MASK}
        assert int(row[prompt]) not in (1, 3)


@pytest.mark.parametrize("argument", ["suppress_tokens", "begin_suppress_tokens"])
@pytest.mark.parametrize("token", [-1, VOCAB])
def test_ids_that_do_not_exist_cannot_be_suppressed(argument: str, token: int) -> None:
    with pytest.raises(ValueError, match=r"do not exist; the model knows 0 \.\. 12"):
        generate(Watched(), None, [[1]], **{argument: [3, token]})


def test_a_list_that_suppresses_everything_says_so() -> None:
    with pytest.raises(ValueError, match="allow more tokens"):
        generate(Watched(), None, [[1]], suppress_tokens=list(range(MASK)))


# The stored strategy


@pytest.mark.parametrize("load", [MDLMForMaskedLM.from_pretrained, AutoModelForMaskedLM.from_pretrained])
def test_a_stored_strategy_survives_saving_and_is_what_generate_uses(
    tmp_path: Path, tiny_config: MDLMConfig, load: Callable[[Path], Any]
) -> None:
    torch.manual_seed(0)
    model = MDLMForMaskedLM(tiny_config).eval()
    model.generation_config.strategy = {"name": "confidence", "knobs": {"k": 3, "score": "entropy"}}
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.generation_config.eos_token_id == tiny_config.eos_token_id
    named = model.generate([[5, 6]], strategy="confidence", k=3, score="entropy", max_new_tokens=9, eos="ignore")
    assert same(named, loaded.generate([[5, 6]], max_new_tokens=9, eos="ignore"))
    assert named.nfe.tolist() == [3]
    assert loaded.generate([[5, 6]], max_new_tokens=9, eos="ignore", k=9).nfe.tolist() == [1], "knobs of the call win"
    other = loaded.generate([[5, 6]], strategy="first_hitting", max_new_tokens=9, eos="ignore")
    assert other.nfe.tolist() == [9]


def test_a_model_without_a_stored_strategy_uses_the_default(tmp_path: Path, tiny_config: MDLMConfig) -> None:
    model = MDLMForMaskedLM(tiny_config).eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    loaded = MDLMForMaskedLM.from_pretrained(tmp_path)
    plain = model.generate([[5, 6]], strategy="threshold", max_new_tokens=4)
    assert same(plain, loaded.generate([[5, 6]], max_new_tokens=4))


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ("confidence", 'must be {"name": NAME}'),
        ({"knobs": {}}, 'must be {"name": NAME}'),
        ({"name": "confidence", "k": 3}, 'must be {"name": NAME}'),
        ({"name": "confidence", "knobs": [3]}, 'must be {"name": NAME}'),
        ({"name": "confidense"}, "did you mean 'confidence'"),
        ({"name": 7}, "there is no strategy '7'"),
        ({"name": "confidence", "knobs": {"kk": 3}}, "does not take kk"),
        ({"name": "confidence", "knobs": {"k": 0}}, "must be 1 or more"),
        ({"name": "confidence", "knobs": {"k": "many"}}, "stored in the model's generation_config"),
    ],
)
def test_a_stored_strategy_that_makes_no_sense_says_what_is_allowed(
    tiny_config: MDLMConfig, stored: Any, message: str
) -> None:
    model = MDLMForMaskedLM(tiny_config).eval()
    model.generation_config.strategy = stored
    with pytest.raises(ValueError) as caught:
        model.generate([[5, 6]], max_new_tokens=4)
    assert message in str(caught.value)
    assert "generation_config" in str(caught.value)
    model.generate([[5, 6]], max_new_tokens=4, strategy=Strategy(cache=NoCache()))
