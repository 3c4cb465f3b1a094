"""`generate` and `stream`: every kind of prompt, seeds and batches, what `Generation` says, and refusals that help."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from sampler_tools import EOS, MASK, VOCAB, HashDenoiser, denoiser_for, few_steps
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mdlm.config import MDLMConfig
from mdlm.denoiser import as_denoiser
from mdlm.modeling import MDLMForMaskedLM
from mdlm.samplers import PRESETS, Canvas, Generation, Strategy, generate, stream
from mdlm.samplers.cache import NoCache
from mdlm.samplers.draw import Draw
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.select import Threshold
from mdlm.tokenization import num_tokens, padded_vocab_size, train_bpe


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_bpe(["def add(a, b):\n    return a + b\n# the sum of two numbers\n"] * 8, vocab_size=290)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> MDLMForMaskedLM:
    torch.manual_seed(0)
    config = MDLMConfig(
        vocab_size=padded_vocab_size(tokenizer),
        num_tokens=num_tokens(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
        mask_token_id=tokenizer.mask_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return MDLMForMaskedLM(config).eval()


def same(left: Generation, right: Generation) -> None:
    for name in ("tokens", "step_map"):
        assert [row.tolist() for row in getattr(left, name)] == [row.tolist() for row in getattr(right, name)]
    for mine, theirs in zip(left.log_probs, right.log_probs, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True, atol=1e-4, rtol=0)  # a float32 model
    for name in ("nfe", "forwards", "tokens_fed"):
        assert torch.equal(getattr(left, name), getattr(right, name))
    assert left.text == right.text
    assert left.finish == right.finish


# Prompts.


def test_every_kind_of_prompt_is_the_same_row(tokenizer: PreTrainedTokenizerFast, model: MDLMForMaskedLM) -> None:
    text = "def add(a, b):"
    ids = tokenizer.encode(text, add_special_tokens=False)
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.0, "eos": "ignore", "seed": 4}
    expected = generate(model, tokenizer, text, **options)
    assert expected.tokens[0][: len(ids)].tolist() == ids
    assert len(expected.tokens[0]) == len(ids) + 6
    for prompt in ([text], ids, [ids], tuple(ids), torch.tensor(ids), torch.tensor([ids]), [torch.tensor(ids)]):
        same(generate(model, tokenizer, prompt, **options), expected)
    same(model.generate(text, tokenizer=tokenizer, **options), expected)
    same(generate(as_denoiser(model), tokenizer, text, **options), expected)
    written = expected.tokens[0][len(ids) :].tolist()
    assert expected.text == [tokenizer.decode(written, skip_special_tokens=True)]
    without = generate(model, None, ids, **options)
    assert without.text == [""]
    assert without.tokens[0].tolist() == expected.tokens[0].tolist()
    canvas = generate(model, tokenizer, Canvas.from_prompts([ids], 6), **options)
    assert canvas.tokens[0].tolist() == expected.tokens[0].tolist()
    assert canvas.text[0].startswith(text)


def test_prompts_of_different_lengths_and_none_at_all(
    tokenizer: PreTrainedTokenizerFast, model: MDLMForMaskedLM
) -> None:
    prompts = ["def add(a, b):", "", "# the sum"]
    out = generate(model, tokenizer, prompts, max_new_tokens=5, eos="ignore", seed=[3, 1, 2], temperature=1.0)
    assert len(out) == 3
    for number, prompt in enumerate(prompts):
        given = tokenizer.encode(prompt, add_special_tokens=False)
        assert out.tokens[number][: len(given)].tolist() == given
        alone = generate(
            model, tokenizer, prompt, max_new_tokens=5, eos="ignore", seed=[[3, 1, 2][number]], temperature=1.0
        )
        assert alone.tokens[0].tolist() == out.tokens[number].tolist()


def test_chats_go_through_the_template(tokenizer: PreTrainedTokenizerFast, model: MDLMForMaskedLM) -> None:
    chat = [{"role": "user", "content": "add"}, {"role": "user", "content": "two numbers"}]
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        generate(model, tokenizer, chat, max_new_tokens=2)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    try:
        text = "user: add\nuser: two numbers\nassistant: "
        expected = generate(model, tokenizer, text, max_new_tokens=2)
        same(generate(model, tokenizer, chat, max_new_tokens=2), expected)
        both = generate(model, tokenizer, [chat, chat[:1]], max_new_tokens=2, eos="ignore")
        assert both.tokens[0].tolist()[: len(expected.tokens[0])] == expected.tokens[0].tolist()
        assert tokenizer.decode(both.tokens[1][:-2]) == "user: add\nassistant: "
    finally:
        tokenizer.chat_template = None


def test_infilling_keeps_the_pieces(tokenizer: PreTrainedTokenizerFast, model: MDLMForMaskedLM) -> None:
    canvas = Canvas.from_pieces(tokenizer, ["def add(a, b):", 4, " return a + b"], [2, "# the sum", 1])
    out = generate(model, tokenizer, canvas, temperature=1.0, eos="ban")
    before, after = (tokenizer.encode(t, add_special_tokens=False) for t in ("def add(a, b):", " return a + b"))
    assert out.tokens[0][: len(before)].tolist() == before
    assert out.tokens[0][len(before) + 4 :].tolist() == after
    assert out.text[0].startswith("def add(a, b):")
    assert out.text[0].endswith(" return a + b")
    assert "# the sum" in out.text[1]
    assert out.new_tokens.tolist() == [4, 3]
    assert (out.step_map[0] >= 0).tolist() == [False] * len(before) + [True] * 4 + [False] * len(after)


# Seeds and batches.


@pytest.mark.parametrize("name", ["threshold", "ancestral", "llada", "eb"])
def test_batch_size_never_changes_a_result(name: str) -> None:
    prompts = [[3, 4], [5], [], [6, 7, 8, 2], [3, 4]]
    for seed in (7, [9, 9, 1, 2, 9]):
        whole, *others = (
            generate(
                HashDenoiser(2.0),
                None,
                prompts,
                strategy=few_steps(name),
                max_new_tokens=6,
                temperature=1.0,
                batch_size=size,
                seed=seed,
                eos_token_id=EOS,
            )
            for size in (16, 1, 2, 4)
        )
        for other in others:
            same(other, whole)
        first, last = whole.tokens[0].tolist(), whole.tokens[4].tolist()
        assert (first == last) == isinstance(seed, list)  # the same prompt: its own seed decides, or its place


def test_seeds_of_any_size_are_taken_or_refused() -> None:
    for seed in (-1, 2**63 - 1, -(2**63)):
        generate(HashDenoiser(), None, [[3]], max_new_tokens=1, seed=seed)
        generate(HashDenoiser(), None, [[3]], max_new_tokens=1, seed=[seed])
    for wrong in (2**63, [2**64]):
        with pytest.raises(ValueError, match="64 bits"):
            generate(HashDenoiser(), None, [[3]], max_new_tokens=1, seed=wrong)


# What is returned.


@pytest.mark.parametrize("name", [name for name in PRESETS if build_strategy(name).revise is None])
def test_log_probs_are_those_of_the_step_in_which_a_token_was_written(name: str) -> None:
    """Recomputed from the step map: the canvas before that step, one forward, untempered."""
    strategy = few_steps(name)
    if name == "credit" or not isinstance(strategy.cache, NoCache):
        pytest.skip("its distributions are not the model's answer alone")
    canvas = Canvas.from_prompts([[3, MASK], [4]], 6)
    denoiser = denoiser_for(strategy, canvas, scale=3.0)
    out = generate(denoiser, None, canvas, strategy=strategy, temperature=0.7, top_p=0.9, eos="ignore")
    for tokens, steps, log_probs in zip(out.tokens, out.step_map, out.log_probs):
        assert bool(log_probs[steps < 0].isnan().all())
        for step in range(int(steps.max()) + 1):
            at = (steps == step)[None]
            if not bool(at.any()):
                continue
            before = tokens.masked_fill(steps >= step, MASK)[None]
            expected = denoiser(before, at=at).gather(-1, tokens[steps == step][:, None])[:, 0]
            torch.testing.assert_close(log_probs[steps == step], expected.double(), atol=1e-5, rtol=0)


def test_counts_and_finish() -> None:
    denoiser = HashDenoiser()
    strategy = Strategy(select=Threshold(0.0))
    out = generate(denoiser, None, [[3, 4], [5]], strategy=strategy, max_new_tokens=4, eos="ignore")
    assert out.nfe.tolist() == out.forwards.tolist() == [1, 1]
    assert out.tokens_fed.tolist() == [6, 5]
    assert out.new_tokens.tolist() == [4, 4]
    assert out.tokens_per_forward.tolist() == [4.0, 4.0]
    assert out.finish == ["length", "length"]
    one = generate(denoiser, None, [[3]], max_new_tokens=1, eos="ignore")
    assert (len(one.tokens[0]), one.nfe.tolist(), one.step_map[0].tolist()) == (2, [1], [-1, 0])
    given = Canvas.from_prompts([[3, MASK, EOS]], 0)
    none = generate(denoiser, None, given, eos_token_id=EOS)
    assert (none.tokens[0].tolist(), none.nfe.tolist(), none.finish) == ([3, MASK, EOS], [0], ["length"])
    assert none.tokens_per_forward.tolist() == [0.0]


def test_suppressed_tokens_are_never_written() -> None:
    for name, temperature in itertools.product(("threshold", "ancestral", "llada"), (0.0, 1.0)):
        out = generate(
            HashDenoiser(3.0),
            None,
            [[3, 4]] * 5,
            strategy=few_steps(name),
            max_new_tokens=8,
            temperature=temperature,
            suppress_tokens=[3, 5, 8],
            eos="ban",
            eos_token_id=[EOS, 7],
        )
        written = torch.cat([row[2:] for row in out.tokens])
        assert set(written.tolist()) <= {2, 4, 6}
        log_probs = torch.cat([row[2:] for row in out.log_probs])
        assert bool((log_probs > -5).all())  # normalised over three tokens
    with pytest.raises(ValueError, match="no token may be written"):
        generate(HashDenoiser(), None, [[3]], max_new_tokens=2, suppress_tokens=range(1, VOCAB))


# Streaming.


@pytest.mark.parametrize("name", PRESETS)
def test_the_last_frame_is_what_generate_returns(name: str) -> None:
    prompts, strategy = [[3, 4], [5]], few_steps(name)
    denoiser = denoiser_for(strategy, Canvas.from_prompts(prompts, 5))
    options: dict[str, Any] = {"strategy": strategy, "max_new_tokens": 5, "seed": 2, "eos_token_id": EOS}
    out = generate(denoiser, None, prompts, **options)
    frames = list(stream(denoiser, None, prompts, **options))
    assert bool((frames[0].step_map == -1).all())
    assert [frame.step for frame in frames] == sorted(frame.step for frame in frames)
    for number, (row, steps) in enumerate(zip(out.tokens, out.step_map)):
        assert frames[-1].tokens[number, : len(row)].tolist() == row.tolist()
        assert frames[-1].step_map[number, : len(row)].tolist() == steps.tolist()
    for name_of_count in ("nfe", "forwards", "tokens_fed"):
        assert torch.equal(getattr(frames[-1], name_of_count), getattr(out, name_of_count))
    assert frames[-1].ends.tolist() == [len(row) for row in out.tokens]


def test_a_frame_does_not_change_when_the_run_goes_on() -> None:
    frames = stream(HashDenoiser(), None, [[3]], max_new_tokens=4, strategy="confidence", eos="ignore")
    first = next(frames)
    before = first.tokens.clone()
    list(frames)
    assert torch.equal(first.tokens, before)


# Refusals.


def floats() -> Tensor:
    return torch.zeros(1, 3)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[3]], {"strategy": "thresold"}, "no strategy 'thresold'; did you mean 'threshold'?"),
        ([[3]], {"strategy": "zzz"}, "There are: ancestral, first_hitting, "),
        ([[3]], {"strategy": "threshold", "gamma": 0.1}, "does not take gamma; it takes threshold=0.9, score="),
        ([[3]], {"strategy": Strategy(), "k": 2}, "takes no further knobs, got k"),
        ([[3]], {"strategy": "threshold", "threshold": -1.0}, "threshold is -1.0; it must be 0 or more"),
        ([[3]], {"strategy": "confidence", "k": 0}, "k is 0; it must be 1 or more"),
        ([[3]], {"strategy": "confidence", "k": 2, "steps": 2}, "k=2 and steps=2 contradict"),
        ([[3]], {"strategy": "confidence", "score": "best"}, "one of probability, margin, entropy, random"),
        ([[3]], {"strategy": "llada", "remasking": "high"}, "one of low_confidence, random"),
        ([[3]], {"strategy": "threshold", "block_length": 0}, "block_length is 0; it must be 1 or more"),
        ([[3]], {"temperature": -0.1}, "temperature is -0.1; it must be 0"),
        ([[3]], {"temperature": math.nan}, "temperature is nan"),
        ([[3]], {"top_p": 0.0}, r"top_p is 0.0; it must lie in \(0, 1\]"),
        ([[3]], {"top_k": 0}, "top_k is 0; it must be 1 or more"),
        ([[3]], {"min_p": 1.5}, r"min_p is 1.5; it must lie in \[0, 1\]"),
        ([[3]], {"draw": "first"}, "draw is 'first'; it must be 'after_select' or 'before_select'"),
        ([[3]], {"eos": "never"}, "eos is 'never'; it must be one of stop, defer, ignore, ban"),
        ([[3]], {"eos_token_id": 99}, r"token ids \[99\] do not exist; the model knows 0 .. 8"),
        ([[3]], {"suppress_tokens": [-1]}, r"token ids \[-1\] do not exist"),
        ([[3]], {"eos": "defer", "eos_token_id": 1, "strategy": "ancestral"}, "without looking"),
        ([[3]], {"max_new_tokens": 0}, "max_new_tokens is 0; it must be 1 or more"),
        ([[3]], {"batch_size": 0}, "batch_size is 0; it must be 1 or more"),
        ([[3]], {"seed": [1, 2]}, "2 seeds for 1 rows"),
        ([[3, 9]], {}, "token ids from 3 to 9, the model knows 0 .. 8; is this the model's tokenizer?"),
        ([[-1]], {}, "token ids from -1 to -1"),
        ("text", {}, "prompt 0 is text, which needs a tokenizer"),
        ([[{"role": "user", "content": "x"}]], {}, "needs a tokenizer"),
        ([3.5], {}, "prompt 0 is a float; give text, a chat or token ids"),
        ({"a": 1}, {}, "prompts are a dict; give text, chats, token ids or a Canvas"),
        (None, {}, "prompts are a NoneType"),
        ([], {}, "no prompts"),
        (floats(), {}, r"must hold ids as \[seq\] or \[batch, seq\]"),
        (torch.zeros(1, 1, 3).long(), {}, r"must hold ids as \[seq\] or \[batch, seq\], got \[1, 1, 3\]"),
    ],
)
def test_wrong_calls_say_what_is_allowed(prompts: Any, options: dict[str, Any], message: str) -> None:
    options = {"max_new_tokens": 3, **options}
    with pytest.raises(ValueError, match=message):
        generate(HashDenoiser(), None, prompts, **options)
    if "batch_size" not in options and not message.startswith("token ids from"):
        with pytest.raises(ValueError, match=message):
            stream(HashDenoiser(), None, prompts, **options)  # at the call, not at the first frame


def test_an_answer_longer_than_the_model_takes(tokenizer: PreTrainedTokenizerFast, model: MDLMForMaskedLM) -> None:
    with pytest.raises(ValueError, match="65 tokens long, the model takes at most 64; shorten the prompt"):
        generate(model, tokenizer, [[5] * 5], max_new_tokens=60)
    with pytest.raises(ValueError, match="str is not a model nor a Denoiser"):
        generate("a/path", tokenizer, "text")


def test_the_default_strategy_is_the_threshold_and_the_stored_one_comes_before_it(
    tokenizer: PreTrainedTokenizerFast, model: MDLMForMaskedLM
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "eos": "ignore"}
    same(generate(model, tokenizer, "a", **options), generate(model, tokenizer, "a", strategy="threshold", **options))
    assert Strategy().draw == Draw(temperature=0.0)


# Canvases.


def test_padding_of_either_side_is_cut_out_of_a_canvas() -> None:
    ids = torch.tensor([[9, 9, 5, 6], [1, 2, 3, 9]])
    real = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    write = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 1]]).bool()
    canvas = Canvas.from_padded(ids, real, new_tokens=2, editable=write)
    assert canvas.lengths.tolist() == [4, 5]
    assert canvas.tokens[0, :2].tolist() == [5, 6]
    assert canvas.tokens[1, :3].tolist() == [1, 2, 3]
    assert canvas.editable.tolist() == [[False, True, True, True, False], [False, True, False, True, True]]
    part = canvas[[0]]
    assert part.tokens.shape == (1, 4)
    assert canvas[1:].lengths.tolist() == [5]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Canvas.from_prompts([[]], 0), "an empty one needs new_tokens of 1 or more"),
        (lambda: Canvas.from_prompts([[1]], [1, 2]), "one for each of 1 prompts"),
        (lambda: Canvas.from_prompts([[1]], -1), "new_tokens must be 0 or more"),
        (lambda: Canvas.from_prompts([[[1]]], 1), "list of token ids"),
        (lambda: Canvas.from_rows([], []), "at least one row"),
        (lambda: Canvas(torch.zeros(1, 2).long(), torch.zeros(1, 3).bool(), torch.tensor([2])), "of one shape"),
        (lambda: Canvas(torch.zeros(1, 2), torch.zeros(1, 2).bool(), torch.tensor([2])), "int64 and editable bool"),
        (lambda: Canvas(torch.zeros(1, 2).long(), torch.zeros(1, 2).bool(), torch.tensor([3])), "from 1 to 2"),
        (lambda: Canvas(torch.zeros(1, 2).long(), torch.ones(1, 2).bool(), torch.tensor([1])), "cannot be editable"),
        (lambda: Canvas.from_padded(torch.zeros(1, 2).long(), torch.ones(1, 3)), "one shape"),
    ],
)
def test_canvases_that_make_no_sense_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
