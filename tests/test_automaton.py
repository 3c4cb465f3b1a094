"""Automata over tokens accept what Python's own expressions match, token for token."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from constrain_tools import (
    EOS,
    PATTERNS,
    TEXTS,
    VOCAB,
    accepted_strings,
    accepts,
    automaton,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mdlm.samplers.automaton import byte_automaton, token_automaton, token_texts
from mdlm.tokenization import train_bpe

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
