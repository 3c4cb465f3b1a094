"""Constrained unmasking against brute force over all strings, and its promise that every answer is accepted."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mdlm.config import MDLMConfig
from mdlm.denoiser import FunctionDenoiser
from mdlm.modeling import MDLMForMaskedLM
from mdlm.samplers import Canvas, Generation, generate
from mdlm.samplers.automaton import TokenAutomaton, byte_automaton, token_automaton, token_texts
from mdlm.samplers.constrain import Constraint
from mdlm.samplers.draw import Draw
from mdlm.samplers.driver import Run, row_keys
from mdlm.samplers.edit import EditTokens
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.select import TopK
from mdlm.samplers.state import Step
from mdlm.samplers.stop import EosStop
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.windows import Blocks
from mdlm.tokenization import train_bpe

TEXTS: list[bytes | None] = [b"a", b"b", b"ab", b"1", b"\xc3", b"\xa9", None, None]
EOS, MASK, VOCAB = 6, 7, 8
PATTERNS = ["a*", "(ab|b)+1?", "(ab)*", "[ab]*1[ab]*", "é*a?b*", "(a|b|1){2,3}", "a.b|.", "(?s:.*)", "[^b]+"]
STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("threshold", {"threshold": 0.3, "block_length": 2}),
    ("threshold", {"threshold": 0.0, "block_length": None}),
    ("confidence", {"k": 2}),
    ("confidence", {"k": 1, "score": "entropy", "block_length": 3}),
    ("llada", {"steps": 2}),
    ("llada", {"steps": 2, "remasking": "random"}),
    ("ancestral", {"steps": 3}),
    ("first_hitting", {}),
    ("first_hitting", {"block_length": 2}),
]
each_strategy = pytest.mark.parametrize(("name", "knobs"), STRATEGIES)


def random_model(seed: int, scale: float = 1.5, dtype: torch.dtype = torch.float32) -> FunctionDenoiser:
    """Logits that depend on the place and on all tokens to the left of it."""
    vocab = VOCAB
    weights = scale * torch.randn(3, vocab, vocab, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def logits(tokens: Tensor) -> Tensor:
        here = torch.nn.functional.one_hot(tokens, vocab).to(dtype)
        left = here.cumsum(dim=1).sin() @ weights[0]
        place = torch.arange(tokens.shape[1]).to(dtype)[:, None]
        return (
            left
            + torch.nn.functional.pad(here, (0, 0, 1, -1)) @ weights[1]
            + (weights[2, 0] * (place + 1)).cos() * scale
        )

    return FunctionDenoiser(logits, vocab - 1, vocab, ragged_ok=True)


def matches(pattern: str, tokens: list[int], ends: tuple[int, ...] = (EOS,)) -> bool:
    """Whether an answer is accepted: what stands before its first end-of-sequence token, read as text, matches."""
    text = b""
    for token in tokens:
        if token in ends:
            break
        piece = TEXTS[token]
        if piece is None:
            return False
        text += piece
    try:
        decoded = text.decode()
    except UnicodeDecodeError:
        return False
    return re.fullmatch(pattern, decoded) is not None


def accepted_strings(pattern: str, fixed: list[int | None], ends: tuple[int, ...] = (EOS,)) -> list[tuple[int, ...]]:
    """All strings with these tokens (None: any) that are accepted; never with the mask id."""
    choices = [range(MASK) if token is None else [token] for token in fixed]
    return [
        string
        for string in itertools.product(*choices)
        if matches(pattern, list(string), ends) and (EOS in ends or EOS not in string)
    ]


def automaton(pattern: str, ends: tuple[int, ...] = (EOS,)) -> TokenAutomaton:
    return token_automaton(pattern, TEXTS, ends)


def accepts(machine: TokenAutomaton, tokens: list[int]) -> bool:
    state = 0
    for token in tokens:
        state = int(machine.next_state[state, machine.token_class[token]])
        if state == machine.states:
            return False
    return bool(machine.accepting[state])


# The automaton


@pytest.mark.parametrize("pattern", [*PATTERNS, "(?i:AB)*", "[^é]*", "[\u00e0-\u00ff]+", "1{0}a?"])
@pytest.mark.parametrize("ends", [(EOS,), ()])
def test_the_automaton_accepts_what_python_s_expressions_match(pattern: str, ends: tuple[int, ...]) -> None:
    machine = automaton(pattern, ends)
    for length in range(5):
        wanted = set(accepted_strings(pattern, [None] * length, ends))
        for string in itertools.product(range(VOCAB), repeat=length):
            assert accepts(machine, list(string)) == (string in wanted), (string, pattern)


def test_any_character_is_any_valid_utf_8_and_nothing_else() -> None:
    table, accepting = byte_automaton("(?s:.)")
    edges = [0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xEC, 0xED, 0xEE]
    edges += [0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]
    tails = [0x7F, 0x80, 0xBF, 0xC0]
    for length in range(1, 5):
        for code in itertools.product(*[edges, edges, tails, tails][:length]):
            state = 0
            for byte in code:
                state = int(table[state, byte]) if state >= 0 else -1
            try:
                valid = len(bytes(code).decode()) == 1
            except UnicodeDecodeError:
                valid = False
            assert (state >= 0 and bool(accepting[state])) == valid, bytes(code)


def test_a_pattern_that_allows_everything_has_one_state() -> None:
    ascii_only: list[bytes | None] = [b"a", b"\n", b"bc", None, None]
    assert token_automaton("(?s:.*)", ascii_only, (3,)).states == 1
    assert token_automaton("(a|[^a])*", ascii_only, ()).states == 1


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "no regular expression"),
        ("a**", "no regular expression"),
        ("^a$", "anchors are left out"),
        (r"(a)\1", "not supported"),
        ("(?<=a)b", "not supported"),
        ("(?=ab).*b", "not supported"),
        ("xyz", "no sequence of the model's tokens"),
        (r"\xff", "no sequence of the model's tokens"),
    ],
)
def test_patterns_that_cannot_be_used_say_why(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        automaton(pattern)


@pytest.mark.parametrize("ids", [{"eos_token_ids": (VOCAB,)}, {"banned": (-1,)}])
def test_ids_that_do_not_exist_are_an_error(ids: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"do not exist; there are 0 \.\. 7"):
        token_automaton("a*", TEXTS, **ids)


def test_banned_ids_lead_nowhere_before_and_after_the_end() -> None:
    machine = token_automaton("[ab]*", TEXTS, (EOS,), banned=(0,))
    assert accepts(machine, [1, EOS, 3])
    assert not accepts(machine, [0])
    assert not accepts(machine, [1, EOS, 0])


def test_the_bytes_of_byte_level_tokens_sum_to_the_text() -> None:
    tokenizer = train_bpe(["naïve café, 東京 — and\n\ttabs  and spaces " * 4], 300)
    texts = token_texts(tokenizer, 300)
    for text in ["café 東京\n", "\x00\x7f ÿ🙂", " a  b"]:
        assert b"".join(texts[i] or b"?" for i in tokenizer.encode(text)) == text.encode()
    assert [texts[i] for i in tokenizer.all_special_ids] == [None] * 3


def test_the_bytes_of_sentencepiece_tokens() -> None:
    vocab = {"<unk>": 0, "▁a": 1, "b": 2, "<0xC3>": 3, "<0xA9>": 4, "▁": 5}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert token_texts(tokenizer, 8) == [None, b" a", b"b", b"\xc3", b"\xa9", b" ", None, None]


def test_a_tokenizer_that_puts_spaces_between_tokens_is_refused() -> None:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="depends on the one before"):
        token_texts(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"), 3)


# The dynamic programme against brute force


class Checked(Run):
    """A run that compares every step with brute force over all strings of the answer."""

    pattern = ""
    ends: tuple[int, ...] = (EOS,)
    prompt_lengths: list[int] = []  # noqa: RUF012 - set by the test
    steps_checked = 0

    def _draw(self, step: Step) -> Tensor:
        tokens = super()._draw(step)
        assert self.paths is not None
        state, rows = self.state, step.index[0]
        for row in range(len(state.rows)):
            start, end = self.prompt_lengths[int(state.rows[row])], int(state.lengths[row])
            fixed = [None if m else int(t) for t, m in zip(state.tokens[row, start:end], state.masked[row, start:end])]
            strings = accepted_strings(self.pattern, fixed, self.ends)
            mine = (rows == row).nonzero()[:, 0].tolist()
            places = [int(step.index[1][i]) - start for i in mine]
            raw = {place: self.paths.raw[i].double().tolist() for place, i in zip(places, mine)}
            weights: dict[tuple[int, ...], float] = {}
            for string in strings:
                seen = tuple(string[place] for place in places)
                weights[seen] = sum(raw[place][string[place]] for place in places)
            drawn = tuple(int(tokens[i]) for i in mine)
            assert drawn in weights, "what is drawn cannot be completed to an accepted answer"
            if self.strategy.draw.temperature == 0:
                assert weights[drawn] == pytest.approx(max(weights.values()), abs=1e-5)
            if not self.strategy.select.blind:
                total = math.log(sum(math.exp(w) for w in weights.values()))
                for nth, i in enumerate(mine):
                    law = [0.0] * VOCAB
                    for seen, weight in weights.items():
                        law[seen[nth]] += math.exp(weight - total)
                    assert step.log_probs[i].exp().tolist() == pytest.approx(law, abs=1e-5)
        self.steps_checked += 1
        return tokens


@given(
    pattern=st.sampled_from(PATTERNS),
    strategy=st.sampled_from(STRATEGIES),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.3, 2.0, 8.0]),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    ends=st.sampled_from([(EOS,), ()]),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_every_step_is_the_brute_force_answer_over_all_strings(
    pattern: str,
    strategy: tuple[str, dict[str, Any]],
    seed: int,
    scale: float,
    temperature: float,
    ends: tuple[int, ...],
    lengths: list[int],
) -> None:
    lengths = [n for n in lengths if accepted_strings(pattern, [None] * n, ends)]
    if not lengths:
        return
    base = build_strategy(strategy[0], **strategy[1])
    base = dataclasses.replace(base, draw=dataclasses.replace(base.draw, temperature=temperature))
    stop = (EosStop(ends),) if ends else ()
    full = dataclasses.replace(base, constraint=Constraint(automaton(pattern, ends)), stop=stop)
    prompts = [[1] * (row % 2) for row in range(len(lengths))]
    canvas = Canvas.from_prompts(prompts, lengths)
    run = Checked(random_model(seed, scale), canvas, full, row_keys(seed, len(canvas)))
    run.pattern, run.ends, run.prompt_lengths = pattern, ends, [len(p) for p in prompts]
    while not run.done:
        run.advance()
    assert run.steps_checked
    frame = run.frame()
    for row, prompt in enumerate(prompts):
        tokens = frame.tokens[row, len(prompt) : int(frame.ends[row])].tolist()
        assert matches(pattern, tokens, ends), (pattern, tokens)


@pytest.mark.parametrize(("pattern", "temperature"), [("(ab|b)+1?", 1.0), ("[ab]*1[ab]*", 0.7), ("é*a?b*", 1.4)])
@pytest.mark.parametrize("before", [True, False])
def test_what_is_drawn_at_once_has_the_law_of_the_product_given_the_pattern(
    pattern: str, temperature: float, before: bool
) -> None:
    model, rows = random_model(3, 0.7), 6000
    strategy = Strategy(
        select=TopK(9),
        draw=Draw(temperature=temperature, before_select=before),
        constraint=Constraint(automaton(pattern)),
    )
    canvas = Canvas.from_prompts([[0]] * rows, 3)
    run = Run(model, canvas, strategy, row_keys(5, rows))
    run.advance()
    assert run.done
    counts = Counter(tuple(row) for row in run.frame().tokens[:, 1:].tolist())
    log_probs = model(torch.tensor([[0, MASK, MASK, MASK]]))[0, 1:].double() / temperature
    strings = accepted_strings(pattern, [None] * 3)
    law = torch.tensor([sum(float(log_probs[i, t]) for i, t in enumerate(s)) for s in strings]).softmax(dim=0)
    common = law * rows >= 5
    expected = torch.cat([law[common], law[~common].sum()[None]]) * rows
    found = [counts[s] for s, often in zip(strings, common) if often]
    found.append(rows - sum(found))
    keep = expected > 0
    assert sum(counts[s] for s in strings) == rows
    assert stats.chisquare(torch.tensor(found)[keep], expected[keep], sum_check=False).pvalue > 1e-4


# Every output is accepted


@each_strategy
@pytest.mark.parametrize("temperature", [0.0, 0.2, 3.0])
@pytest.mark.parametrize("eos", ["stop", "defer"])
def test_parallel_commits_are_accepted_at_every_temperature(
    name: str, knobs: dict[str, Any], temperature: float, eos: str
) -> None:
    base = build_strategy(name, **knobs)
    if eos == "defer" and base.select.blind:
        return
    for number, pattern in enumerate(["(ab|1)+b", "é+(a|é)*", "[^1]*11", "((a|b)1?){2,9}"]):
        strategy = dataclasses.replace(base, constraint=Constraint(automaton(pattern)))
        out = generate(
            random_model(number),
            None,
            [[EOS, MASK], [1], []],
            strategy=strategy,
            max_new_tokens=11,
            temperature=temperature,
            eos=eos,  # type: ignore[arg-type]
            eos_token_id=EOS,
            seed=number,
        )
        for row, prompt in zip(out.tokens, (2, 1, 0)):
            assert matches(pattern, row[prompt:].tolist()), (pattern, row)


@pytest.mark.parametrize(
    "options",
    [{"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}, {"temperature": 1e-3}, {"temperature": 50.0}],
)
def test_truncation_gives_way_where_it_would_leave_no_accepted_answer(options: dict[str, Any]) -> None:
    strategy = Strategy(select=TopK(4), constraint=Constraint(automaton("(ab|b)+1")))
    for seed in range(10):
        out = generate(
            random_model(seed, 6.0),
            None,
            [[1], [3]],
            strategy=strategy,
            max_new_tokens=8,
            eos_token_id=EOS,
            **{"temperature": 1.0, **options},
        )
        assert all(matches("(ab|b)+1", row[1:].tolist()) for row in out.tokens)


def test_a_very_unlikely_answer_is_found_though_its_probability_underflows() -> None:
    def sure(tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, VOCAB)
        logits[..., 0], logits[..., 1] = 150.0, -150.0
        return logits

    model = FunctionDenoiser(sure, MASK, VOCAB)
    for temperature in (0.0, 1.0, 0.1):
        strategy = Strategy(select=TopK(7), constraint=Constraint(automaton("b{40}")))
        out = generate(model, None, [[]], strategy=strategy, max_new_tokens=40, temperature=temperature, eos="ignore")
        assert out.tokens[0].tolist() == [1] * 40


def test_penalty_guidance_suppression_and_constraint_hold_together() -> None:
    strategy = dataclasses.replace(
        build_strategy("threshold", threshold=0.0, block_length=4), constraint=Constraint(automaton("[ab1]*1[ab]*"))
    )
    for seed in range(10):
        out = generate(
            random_model(seed),
            None,
            [[1], [3, 0]],
            strategy=strategy,
            max_new_tokens=8,
            temperature=1.0,
            eos_token_id=EOS,
            suppress_tokens=[2],
            guidance=1.0,
            repetition_penalty=4.0,
        )
        for row, prompt in zip(out.tokens, (1, 2)):
            assert 2 not in row[prompt:]
            assert matches("[ab1]*1[ab]*", row[prompt:].tolist())


def test_only_the_answer_is_constrained_not_a_hole_before_given_text() -> None:
    canvas = Canvas.from_rows(
        [torch.tensor([3, 0, 0, 3, 0, 0, 0])], [torch.tensor([False, True, True, False, True, True, True])]
    )

    def ones(tokens: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(torch.full_like(tokens, 3), VOCAB).float()

    strategy = Strategy(select=TopK(2), constraint=Constraint(automaton("a*", ())))
    out = generate(FunctionDenoiser(ones, MASK, VOCAB), None, canvas, strategy=strategy, eos="ignore")
    assert out.tokens[0].tolist() == [3, 3, 3, 3, 0, 0, 0]


# Laws of every component


def same(a: Generation, b: Generation) -> bool:
    rows = zip((*a.tokens, *a.step_map, *a.log_probs), (*b.tokens, *b.step_map, *b.log_probs))
    return torch.equal(a.nfe, b.nfe) and all(torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0)) for x, y in rows)


@each_strategy
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.7}])
def test_a_pattern_that_allows_everything_is_no_constraint_to_the_last_bit(
    name: str, knobs: dict[str, Any], options: dict[str, Any]
) -> None:
    texts: list[bytes | None] = [b"a", b"b", b"\n", b"c", b"d d", b"e", None, None]
    base = build_strategy(name, **knobs)
    free = dataclasses.replace(base, constraint=Constraint(token_automaton("(?s:.*)", texts, (EOS,))))
    for seed in range(3):
        common: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": EOS, "seed": seed, **options}
        model = random_model(seed, dtype=torch.float64 if seed else torch.float32)
        plain = generate(model, None, [[1], [2, 3]], strategy=base, **common)
        assert same(plain, generate(model, None, [[1], [2, 3]], strategy=free, **common))


@each_strategy
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constrained_row_does_not_depend_on_its_batch(name: str, knobs: dict[str, Any], temperature: float) -> None:
    strategy = dataclasses.replace(build_strategy(name, **knobs), constraint=Constraint(automaton("(ab|b|é)+1?")))
    prompts, seeds = [[1, 2, 3, 0], [4], [5, 6]], [7, 8, 9]
    canvas = Canvas.from_prompts(prompts, [3, 9, 6])
    options: dict[str, Any] = {"strategy": strategy, "temperature": temperature, "eos_token_id": EOS}
    together = generate(random_model(1), None, canvas, seed=seeds, **options)
    for row in range(3):
        alone = generate(random_model(1), None, canvas[[row]], seed=seeds[row : row + 1], **options)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert torch.equal(alone.log_probs[0].nan_to_num(9.0), together.log_probs[row].nan_to_num(9.0))
        assert int(alone.nfe[0]) == int(together.nfe[row])


# What cannot be


def test_too_few_masks_to_reach_acceptance_raise_before_anything_is_written() -> None:
    calls = []

    def function(tokens: Tensor) -> Tensor:
        calls.append(tokens)
        return torch.zeros(*tokens.shape, VOCAB)

    strategy = Strategy(constraint=Constraint(automaton("(ab){4}1")))
    canvas = Canvas.from_prompts([[1], [1]], [5, 4])
    model = FunctionDenoiser(function, MASK, VOCAB, ragged_ok=True)
    with pytest.raises(ValueError, match="row 1 has 4 positions"):
        generate(model, None, canvas, strategy=strategy, eos_token_id=EOS)
    assert not calls
    exact = Strategy(constraint=Constraint(automaton("a?b", ())))
    with pytest.raises(ValueError, match="row 0 has 3 positions"):
        generate(model, None, [[1]], strategy=exact, max_new_tokens=3, eos="ignore")


def test_a_model_that_rules_out_every_accepted_answer_is_an_error() -> None:
    def function(tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, VOCAB).index_fill(-1, torch.tensor([3]), -torch.inf)

    strategy = Strategy(constraint=Constraint(automaton("a*1")))
    with pytest.raises(ValueError, match="probability 0 to every answer"):
        generate(FunctionDenoiser(function, MASK, VOCAB), None, [[1]], strategy=strategy, max_new_tokens=3)


class EndsAnywhere:
    name = "anywhere"

    def __call__(self, state: Any) -> Tensor:
        return torch.full_like(state.rows, -1)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (build_strategy("ancestral", noise="joint"), "draws tokens itself"),
        (Strategy(revise=EditTokens()), "replaces tokens"),
        (Strategy(stop=(EndsAnywhere(),)), "may end an answer anywhere"),
    ],
)
def test_components_that_go_behind_the_constraint_s_back_are_refused(strategy: Strategy, message: str) -> None:
    strategy = dataclasses.replace(strategy, constraint=Constraint(automaton("a*")))
    with pytest.raises(ValueError, match=message):
        generate(random_model(0), None, [[1]], strategy=strategy, max_new_tokens=3)


# Through `generate`, with text


@pytest.mark.parametrize("eos", ["stop", "ban", "ignore"])
def test_generate_with_a_regular_expression_writes_text_that_matches(tiny_config: MDLMConfig, eos: Any) -> None:
    tokenizer = train_bpe(["dates like 2024-05-17 and 1999-12-31, names like Zoë " * 3], 290)
    torch.manual_seed(0)
    config = MDLMConfig(
        **{
            **tiny_config.to_dict(),
            "vocab_size": 320,
            "num_tokens": 290,
            "mask_token_id": tokenizer.mask_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        }
    )
    model = MDLMForMaskedLM(config).eval()
    pattern = r"(\d{4}-\d\d-\d\d(, |;))*\d{4}-\d\d-\d\d( Zoë)?[.!]+"
    for strategy in ("threshold", "llada", "first_hitting"):
        out = generate(
            model,
            tokenizer,
            ["today is ", "", "a longer prompt: "],
            strategy=strategy,
            max_new_tokens=24,
            temperature=1.0,
            regex=pattern,
            eos=eos,
        )
        for text in out.text:
            assert re.fullmatch(pattern, text), text


def test_a_regular_expression_needs_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="needs a tokenizer"):
        generate(random_model(0), None, [[1]], regex="a*")


def test_a_greedy_answer_is_the_most_probable_match_not_the_nearest_to_the_greedy_text() -> None:
    """Position by position "1" is likeliest first, and then only "b" may follow, which is nearly impossible."""

    def function(tokens: Tensor) -> Tensor:
        logits = torch.full((*tokens.shape, VOCAB), -20.0)
        logits[:, 0, 3], logits[:, 0, 0] = 1.0, 0.0
        logits[:, 1, 0] = 2.0
        return logits

    strategy = Strategy(select=TopK(2), window=Blocks(2), constraint=Constraint(automaton("1b|aa", ())))
    out = generate(FunctionDenoiser(function, MASK, VOCAB), None, [[]], strategy=strategy, max_new_tokens=2)
    assert out.tokens[0].tolist() == [0, 0]
