"""Tokenizers: round trips, byte counts, special tokens that text cannot forge, and clear refusals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mdlm.config import MDLMConfig
from mdlm.tokenization import (
    TokenizerConfig,
    bytes_are_exact,
    check_tokenizer,
    check_vocab,
    encode_texts,
    load_tokenizer,
    num_tokens,
    open_tokenizer,
    padded_vocab_size,
    prepare_tokenizer,
    token_bytes,
    train_bpe,
)

TEXTS = [
    "def f(x):\n    return x + 1\n" * 20,
    "The quick brown fox jumps over the lazy dog, whatever others may think: é ünïcode 漢字 🙂\n" * 20,
]
UNICODE = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerFast:
    return train_bpe(TEXTS, 320)


def word_level(**special: str) -> PreTrainedTokenizerFast:
    words = ["a", "b", "[UNK]", *dict.fromkeys(special.values())]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(dict.fromkeys(words))}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", **special)


def test_trained_bpe_has_the_size_and_the_special_tokens_asked_for(bpe):
    assert num_tokens(bpe) == len(bpe) == 320
    assert [bpe.mask_token_id, bpe.pad_token_id, bpe.eos_token_id] == [0, 1, 2]
    assert padded_vocab_size(bpe) == 320
    assert padded_vocab_size(train_bpe(TEXTS, 321)) == 384
    assert train_bpe(TEXTS, 320).get_vocab() == bpe.get_vocab()
    assert len(train_bpe(["ab"], 5000)) == 259, "two letters have nothing to merge twice"
    check_tokenizer(bpe)


@given(text=UNICODE)
@settings(max_examples=150)
def test_bpe_round_trip_and_bytes_on_any_text(bpe, text):
    (ids,) = encode_texts(bpe, [text])
    assert bpe.decode(ids) == text
    assert token_bytes(bpe)[ids].sum() == len(text.encode())


@given(words=st.lists(st.sampled_from(["<|mask|>", "<|pad|>", "<|eos|>", "x", " ", "\n"]), max_size=8))
@settings(max_examples=50)
def test_special_tokens_spelt_out_in_a_text_stay_text(bpe, words):
    text = "".join(words)
    (ids,) = encode_texts(bpe, [text])
    assert not set(ids.tolist()) & {0, 1, 2}
    assert bpe.decode(ids) == text
    assert token_bytes(bpe)[ids].sum() == len(text)
    assert bpe("a<|mask|>", add_special_tokens=False)["input_ids"][-1] == 0, "the caller's own use is untouched"


def test_encode_texts_is_the_tokenizer_itself_text_by_text(bpe):
    texts = ["", "a", *TEXTS, ""]
    encoded = encode_texts(bpe, texts)
    assert [e.tolist() for e in encoded] == [bpe(t, add_special_tokens=False)["input_ids"] for t in texts]
    assert encode_texts(bpe, []) == []


def test_long_texts_are_cut_between_lines_and_lose_nothing(bpe, monkeypatch):
    monkeypatch.setattr("mdlm.tokenization._PIECE", 5000)
    lines = "".join(f"The quick brown {i}\n    return x + 1\n" for i in range(2000))
    endless = "The quick" * 2000
    ids, others = encode_texts(bpe, [lines, endless])
    assert ids.tolist() == bpe(lines, add_special_tokens=False)["input_ids"], "cuts between lines change no token"
    assert bpe.decode(others) == endless


def test_text_that_cannot_be_encoded_is_refused_with_its_place(bpe):
    with pytest.raises(ValueError, match=r"here: character 1 of the text is the lone surrogate '\\ud83d'"):
        encode_texts(bpe, ["a\ud83d"], ["here"])
    with pytest.raises(ValueError, match="text 1: the text is None of type NoneType"):
        encode_texts(bpe, ["a", None])
    with pytest.raises(ValueError, match=r"text 0: .*lone surrogate"):
        train_bpe(["\ud800"], 300)


def test_a_mask_token_that_text_can_spell_is_refused():
    tokenizer = word_level(mask_token="a", pad_token="[PAD]", eos_token="[EOS]")
    with pytest.raises(ValueError, match="page 7: the text contains the mask token 'a'"):
        encode_texts(tokenizer, ["b", "b a"], ["page 6", "page 7"])


def test_training_a_tokenizer_needs_text_and_room():
    with pytest.raises(ValueError, match="no text to train a tokenizer on"):
        train_bpe(["", " \n"], 300)
    with pytest.raises(ValueError, match=r"vocab_size=258: .* at least 259"):
        train_bpe(TEXTS, 258)
    with pytest.raises(ValueError, match="training_bytes=0"):
        TokenizerConfig(training_bytes=0)


def test_open_tokenizer_trains_on_no_more_than_asked_or_loads(bpe, tmp_path):
    read = []

    def texts():
        for text in ("aa aa ", "bb bb ", "cc cc "):
            read.append(text)
            yield text

    tokenizer = open_tokenizer(TokenizerConfig(vocab_size=300, training_bytes=7), texts)
    assert read == ["aa aa ", "bb bb "]
    assert "Ġbb" in tokenizer.get_vocab() or "bb" in tokenizer.get_vocab()
    assert "cc" not in tokenizer.get_vocab()
    bpe.save_pretrained(tmp_path)
    loaded = open_tokenizer(TokenizerConfig(path=str(tmp_path)), texts)
    assert len(read) == 2
    assert loaded.get_vocab() == bpe.get_vocab()
    assert (loaded.mask_token_id, loaded.pad_token_id, loaded.eos_token_id) == (0, 1, 2)
    text = "x <|mask|>\n🙂 é"
    assert encode_texts(loaded, [text])[0].tolist() == encode_texts(bpe, [text])[0].tolist()


def test_a_tokenizer_that_is_not_there_is_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="the folder holds no tokenizer"):
        load_tokenizer(tmp_path)

    def offline(*_: object) -> None:
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", offline)
    with pytest.raises(FileNotFoundError, match=r"tokenizer 'org/name': no such folder, and not .* couldn't connect"):
        load_tokenizer("org/name")


def test_prepare_adds_what_is_missing_to_a_copy():
    bare = word_level()
    ready = prepare_tokenizer(bare)
    assert bare.mask_token_id is None
    assert len(bare) == 3
    assert (ready.mask_token, ready.pad_token, ready.eos_token) == ("<|mask|>", "<|pad|>", "<|eos|>")
    assert sorted((ready.mask_token_id, ready.pad_token_id, ready.eos_token_id)) == [3, 4, 5]
    assert num_tokens(ready) == 6
    assert padded_vocab_size(ready) == 64
    with pytest.raises(ValueError, match="has no mask and no pad and no eos token; pass it through"):
        check_tokenizer(bare)


def test_prepare_takes_a_mask_token_that_stands_in_the_vocabulary_and_keeps_pad_as_end():
    tokenizer = word_level(eos_token="[EOS]", sep_token="<|mdm_mask|>")
    tokenizer.sep_token = None
    tokenizer.pad_token = "[EOS]"
    ready = prepare_tokenizer(tokenizer)
    assert ready.mask_token == "<|mdm_mask|>"
    assert ready.pad_token_id == ready.eos_token_id
    assert num_tokens(ready) == num_tokens(tokenizer)


@pytest.mark.parametrize("name", ["eos_token", "pad_token", "unk_token", "bos_token", "cls_token", "sep_token"])
def test_a_mask_token_that_is_also_another_special_token_is_refused(name):
    tokenizer = word_level(mask_token="[M]", pad_token="[PAD]", eos_token="[EOS]")
    setattr(tokenizer, name, "[M]")
    with pytest.raises(ValueError, match=rf"the mask token '\[M\]' \(id \d\) is also the {name[:3]} token"):
        prepare_tokenizer(tokenizer)


def test_check_vocab_compares_sizes_and_special_ids(bpe):
    def config(**changes: int) -> MDLMConfig:
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
        ids = {"mask_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
        return MDLMConfig(**{"vocab_size": 320, "num_tokens": 320, **sizes, **ids, **changes})

    check_vocab(bpe, config())
    check_vocab(bpe, config(vocab_size=384, num_tokens=384))
    with pytest.raises(
        ValueError, match=r"the tokenizer has 320 tokens, the model 300 .*resize the model's embedding to"
    ):
        check_vocab(bpe, config(num_tokens=300))
    with pytest.raises(ValueError, match="mask_token_id is 0 in the tokenizer and 5 in the model"):
        check_vocab(bpe, config(mask_token_id=5))
    with pytest.raises(ValueError, match="eos_token_id is 2 in the tokenizer and 7 in the model"):
        check_vocab(bpe, config(eos_token_id=7))


def test_bytes_of_other_tokenizers_are_declared_estimates():
    sentencepiece = Tokenizer(models.BPE({"▁": 0, "▁the": 1, "<0x0A>": 2, "é": 3, "<s>": 4}, []))
    sentencepiece.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=sentencepiece, bos_token="<s>")
    assert token_bytes(tokenizer).tolist() == [1, 4, 1, 2, 0]
    assert not bytes_are_exact(tokenizer)
    wordpiece = Tokenizer(models.WordPiece({"[UNK]": 0, "un": 1, "##able": 2}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=wordpiece, unk_token="[UNK]")
    assert token_bytes(tokenizer).tolist() == [0, 2, 4]
    assert not bytes_are_exact(tokenizer)


def test_bytes_are_exact_only_where_nothing_touches_the_text(bpe):
    assert bytes_are_exact(bpe)
    normalised = train_bpe(TEXTS, 300)
    normalised.backend_tokenizer.normalizer = normalizers.NFC()
    assert not bytes_are_exact(normalised)
    spaced = train_bpe(TEXTS, 300)
    spaced.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert not bytes_are_exact(spaced)
    split = train_bpe(TEXTS, 300)
    split.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    assert bytes_are_exact(split)


def test_an_added_ordinary_token_counts_its_own_bytes():
    tokenizer = train_bpe(TEXTS, 300)
    tokenizer.add_tokens([AddedToken("漢字", special=False, normalized=False)])
    (ids,) = encode_texts(tokenizer, ["a漢字b"])
    assert tokenizer.convert_tokens_to_ids("漢字") in ids
    assert token_bytes(tokenizer)[ids].sum() == len("a漢字b".encode())
