"""Regular expressions through `generate`, with a tokenizer and text."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from constrain_tools import (
    PATTERNS,
    accepted_strings,
    automaton,
    random_model,
)
from transformers import PreTrainedTokenizerBase

from mdlm.config import MDLMConfig
from mdlm.denoiser import FunctionDenoiser
from mdlm.modeling import MDLMForMaskedLM
from mdlm.samplers import Canvas, Regex, constrain, generate
from mdlm.samplers.constrain import Constraint
from mdlm.samplers.driver import Run, row_keys
from mdlm.samplers.strategy import Strategy
from mdlm.tokenization import train_bpe

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


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerBase:
    return train_bpe(["yes no maybe, yes or no: maybe not 2024 " * 3], 300)


def toy(tokenizer: PreTrainedTokenizerBase) -> FunctionDenoiser:
    size = len(tokenizer)
    table = torch.randn(64, size, generator=torch.Generator().manual_seed(5))
    return FunctionDenoiser(
        lambda tokens: table[: tokens.shape[1]].expand(len(tokens), -1, -1), tokenizer.mask_token_id, size
    )


def test_an_expression_made_once_writes_the_same_and_is_built_once(
    words: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    real = constrain.token_automaton
    monkeypatch.setattr(constrain, "token_automaton", lambda *given: built.append(given) or real(*given))
    model, pattern = toy(words), "(yes|no|maybe)( (yes|no))*"
    options = {"max_new_tokens": 10, "temperature": 1.0}
    once = Regex(pattern, words)
    for seed in range(3):
        kept = generate(model, words, ["a", "b"], regex=once, seed=seed, **options)
        anew = generate(model, words, ["a", "b"], regex=pattern, seed=seed, **options)
        assert kept.text == anew.text
        assert all(re.fullmatch(pattern, text) for text in kept.text)
    assert len(built) == 4, "once for the object, three times for the texts"
    generate(model, words, ["a"], regex=once, eos="ban", **options)
    generate(model, words, ["a"], regex=once, eos="ban", **options)
    assert len(built) == 5, "other end tokens are another automaton, which is kept as well"


def test_an_expression_for_another_tokenizer_is_refused(words: PreTrainedTokenizerBase) -> None:
    other = train_bpe(["quite another text, with other words " * 3], 290)
    with pytest.raises(ValueError, match=r"Regex\('a\+'\) was made for another tokenizer"):
        generate(toy(words), words, ["x"], regex=Regex("a+", other), max_new_tokens=3)
    same_words = train_bpe(["yes no maybe, yes or no: maybe not 2024 " * 3], 300)
    assert (
        generate(toy(words), words, ["x"], regex=Regex("yes+", same_words), max_new_tokens=4).text[0].startswith("ye")
    )


def test_begin_suppress_counts_in_the_check_before_anything_is_written(words: PreTrainedTokenizerBase) -> None:
    """All tokens an answer may begin with are suppressed there: an error now, not a NaN or a dead end later."""
    first = [index for token, index in words.get_vocab().items() if token.startswith("y")]
    with pytest.raises(ValueError, match="the tokens suppressed at the start; give it more or fewer"):
        generate(toy(words), words, ["x"], regex="yes", begin_suppress_tokens=first, max_new_tokens=5)
    out = generate(toy(words), words, ["x"], regex="yes|no", begin_suppress_tokens=first, max_new_tokens=5)
    assert out.text == ["no"]
    with pytest.raises(ValueError, match="no sequence of the model's tokens matches"):
        generate(toy(words), words, ["x"], regex="yes", suppress_tokens=first, max_new_tokens=5)


@pytest.mark.parametrize("suppressed", [(), (0,), (0, 2), (3,), (0, 1, 2)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_check_says_what_brute_force_says(pattern: str, suppressed: tuple[int, ...]) -> None:
    for length in (1, 2, 3):
        possible = [s for s in accepted_strings(pattern, [None] * length) if s[0] not in suppressed]
        constraint = Constraint(automaton(pattern), suppressed)
        canvas = Canvas.from_prompts([[1]], length)
        if possible:
            Run(random_model(0), canvas, Strategy(constraint=constraint), row_keys(0, 1))
        else:
            with pytest.raises(ValueError, match="no sequence of so many tokens"):
                Run(random_model(0), canvas, Strategy(constraint=constraint), row_keys(0, 1))
