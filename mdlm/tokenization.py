"""Tokenizers for masked diffusion: any Hugging Face tokenizer with a mask, a padding and an end token, or a new one.

The mask token is the state a noised position is in; it must be a token of its own that no text contains. Text is
therefore always encoded by `encode_texts`, in which special tokens spelt out in the text ("<|mask|>" on a web page)
stay plain text. Read next: `data.py`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import AddedToken, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mdlm.readers import check_text

if TYPE_CHECKING:
    from mdlm.config import MDLMConfig

MASK, PAD, EOS = "<|mask|>", "<|pad|>", "<|eos|>"
_KNOWN_MASKS = ("<|mdm_mask|>", MASK, "<mask>", "[MASK]")
_PIECE = 1 << 18  # characters a tokenizer gets at once: its memory is some hundred times the text
_BYTE_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True)
class TokenizerConfig:
    """Which tokenizer: an existing one, or a byte-level BPE trained on the training text."""

    path: str | None = None
    """Folder or hub name of a tokenizer; None = train one."""
    vocab_size: int = 4096
    """Size of a tokenizer trained here, its 3 special tokens included; little text gives fewer tokens."""
    training_bytes: int = 100_000_000
    """At most this much of the text is read to train one."""

    def __post_init__(self) -> None:
        if self.vocab_size < 259:
            raise ValueError(f"vocab_size={self.vocab_size}: 256 bytes and 3 special tokens need at least 259")
        if self.training_bytes < 1:
            raise ValueError(f"training_bytes={self.training_bytes} must be positive")


def open_tokenizer(config: TokenizerConfig, texts: Callable[[], Iterable[str]]) -> PreTrainedTokenizerBase:
    """The tokenizer `config` names, or one trained on `texts()` (called only if needed)."""
    if config.path is not None:
        return load_tokenizer(config.path)
    return train_bpe(_at_most(texts(), config.training_bytes), config.vocab_size)


def _at_most(texts: Iterable[str], limit: int) -> Iterator[str]:
    read = 0
    for text in texts:
        yield text
        read += len(text.encode())
        if read >= limit:
            return


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """`prepare_tokenizer` of a tokenizer in a folder or on the hub; FileNotFoundError where there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        place = (
            "the folder holds no tokenizer" if Path(path).is_dir() else "no such folder, and not to be had on the hub"
        )
        raise FileNotFoundError(f"tokenizer {str(path)!r}: {place}: {error}") from error
    return prepare_tokenizer(tokenizer)


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the special tokens <|mask|> (id 0), <|pad|> (1), <|eos|> (2).

    Every string round-trips, and a token's bytes are known exactly. With little text fewer than `vocab_size` tokens
    come out. The same texts give the same tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    TokenizerConfig(vocab_size=vocab_size)
    seen = 0

    def pieces() -> Iterator[str]:
        nonlocal seen
        for number, text in enumerate(texts):
            seen += not check_text(text, f"text {number}").isspace() and text != ""
            yield from _pieces(text)

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[MASK, PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(pieces(), trainer)
    if not seen:
        raise ValueError("no text to train a tokenizer on: every document is empty or only whitespace")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        mask_token=MASK,
        pad_token=PAD,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def prepare_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy of `tokenizer` that owns a mask, a padding and an end-of-document token.

    What is missing is added: a mask token that stands in the vocabulary under a usual name (<|mdm_mask|>, [MASK], ...)
    is taken, otherwise <|mask|>, <|pad|>, <|eos|> become new tokens and the model's embedding must be resized
    (`padded_vocab_size`). Raises ValueError where the mask is also another special token (`check_tokenizer`).
    """
    tokenizer = copy.deepcopy(tokenizer)
    vocabulary = tokenizer.get_vocab()
    missing: dict[str, str | AddedToken | Sequence[str | AddedToken]] = {}
    if tokenizer.mask_token_id is None:
        missing["mask_token"] = next((m for m in _KNOWN_MASKS if m in vocabulary), MASK)
    if tokenizer.pad_token_id is None:
        missing["pad_token"] = PAD
    if tokenizer.eos_token_id is None:
        missing["eos_token"] = EOS
    if missing:
        tokenizer.add_special_tokens(missing)
    check_tokenizer(tokenizer)
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """ValueError unless `tokenizer` has mask, padding and end tokens and the mask is no other special token.

    Padding may equal the end token, as in many public checkpoints: padding is never noised nor attended to.
    """
    named = {"mask": tokenizer.mask_token_id, "pad": tokenizer.pad_token_id, "eos": tokenizer.eos_token_id}
    absent = [name for name, token in named.items() if token is None]
    if absent:
        raise ValueError(
            f"the tokenizer has no {' and no '.join(absent)} token; pass it through "
            "mdlm.tokenization.prepare_tokenizer, which adds what is missing"
        )
    others = {
        "bos": tokenizer.bos_token_id,
        "unk": tokenizer.unk_token_id,
        "sep": tokenizer.sep_token_id,
        "cls": tokenizer.cls_token_id,
        **{name: token for name, token in named.items() if name != "mask"},
    }
    clash = [name for name, token in others.items() if token == tokenizer.mask_token_id]
    if clash:
        raise ValueError(
            f"the mask token {tokenizer.mask_token!r} (id {tokenizer.mask_token_id}) is also the {'/'.join(clash)} "
            "token; a noised position must not look like a real token: give the tokenizer a mask token of its own"
        )


def num_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the highest token id, special tokens included (`MDLMConfig.num_tokens`)."""
    return max(tokenizer.get_vocab().values()) + 1


def padded_vocab_size(tokenizer: PreTrainedTokenizerBase, multiple: int = 64) -> int:
    """`num_tokens` rounded up to a multiple (`MDLMConfig.vocab_size`): the rows beyond it can never be emitted."""
    return -(-num_tokens(tokenizer) // multiple) * multiple


def check_vocab(tokenizer: PreTrainedTokenizerBase, config: MDLMConfig) -> None:
    """ValueError unless a model of `config` knows every token of `tokenizer` and has the same special ids."""
    check_tokenizer(tokenizer)
    needed = num_tokens(tokenizer)
    has = config.vocab_size if config.num_tokens is None else config.num_tokens
    if needed > has:
        raise ValueError(
            f"the tokenizer has {needed} tokens, the model {has} (vocab_size={config.vocab_size}, "
            f"num_tokens={config.num_tokens}); resize the model's embedding to {padded_vocab_size(tokenizer)} and set "
            f"num_tokens={needed}, or use the tokenizer the model was made with"
        )
    pairs = (
        ("mask_token_id", tokenizer.mask_token_id, config.mask_token_id),
        ("pad_token_id", tokenizer.pad_token_id, config.pad_token_id),
        ("eos_token_id", tokenizer.eos_token_id, config.eos_token_id),
    )
    for name, of_tokenizer, of_model in pairs:
        if of_model is not None and of_model != of_tokenizer:
            raise ValueError(
                f"{name} is {of_tokenizer} in the tokenizer and {of_model} in the model; they must be the same token"
            )


def encode_texts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    places: Sequence[str] | None = None,
    special: bool = False,
) -> list[npt.NDArray[np.int32]]:
    """Token ids of each text, without any special token: one spelt out in the text is encoded as plain text.

    With `special` a special token spelt out is that token, as in the output of a chat template.

    Long texts are cut into pieces of about 262 144 characters, after a line where possible, and the pieces encoded in
    parallel. `places` names the texts in error messages. Raises ValueError for a text that is not a `str` UTF-8 can
    encode, and for one that yields the mask token all the same.
    """
    places = [f"text {i}" for i in range(len(texts))] if places is None else places
    pieces: list[str] = []
    counts = []
    for text, place in zip(texts, places):
        cut = list(_pieces(check_text(text, place)))
        pieces += cut
        counts.append(len(cut))
    if not pieces:
        return [np.zeros(0, np.int32) for _ in texts]
    encoded = iter(
        tokenizer(
            pieces,
            add_special_tokens=False,
            split_special_tokens=not special,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
    )
    result = []
    for count, place in zip(counts, places):
        parts = [np.asarray(next(encoded), dtype=np.int32) for _ in range(count)]
        ids = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        if (ids == tokenizer.mask_token_id).any():
            raise ValueError(
                f"{place}: the text contains the mask token {tokenizer.mask_token!r}, which this tokenizer cannot read "
                "as plain text; remove it from the text or give the tokenizer another mask token"
            )
        result.append(ids)
    return result


def _pieces(text: str) -> Iterator[str]:
    """Cuts of a long text that joined give it back; between two lines that are not blank, if one ends near enough."""
    start = 0
    while len(text) - start > _PIECE:
        end = start + _PIECE
        ends = [m.end() for m in re.finditer(r"(?<=\S)\n(?=\S)", text[end - 4096 : end + 1])]
        end = end - 4096 + ends[-1] if ends else end
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def bytes_are_exact(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the `token_bytes` of a text's tokens sum to its UTF-8 length for every text.

    So for byte-level BPE that neither normalises its input nor puts a space in front; otherwise the table is an
    estimate.
    """
    pipeline = _pipeline(tokenizer)
    if pipeline is None:
        return False
    steps = [pipeline["pre_tokenizer"], *((pipeline["pre_tokenizer"] or {}).get("pretokenizers") or [])]
    byte_level = [s for s in steps if s is not None and s["type"] == "ByteLevel"]
    decoder = pipeline["decoder"] or {"type": None}
    return (
        decoder["type"] == "ByteLevel"
        and pipeline["normalizer"] is None
        and bool(byte_level)
        and not any(s["add_prefix_space"] for s in byte_level)
    )


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> Int64[Tensor, " vocab"]:
    """UTF-8 bytes that each token id below `num_tokens` stands for; 0 for special tokens and unused ids.

    Byte-level BPE: exact (`bytes_are_exact`). SentencePiece and WordPiece: "▁" counts as one space, "<0x0A>" as one
    byte, "##" as nothing; a space that the tokenizer adds or drops at a word start is not seen, so there the sum over a
    text may miss its length and bytes are better counted from the text.
    """
    table = torch.zeros(num_tokens(tokenizer), dtype=torch.int64)
    special = set(tokenizer.all_special_ids)
    added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if not token.special}
    special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    pipeline = _pipeline(tokenizer)
    byte_level = pipeline is not None and "ByteLevel" in json.dumps(pipeline["decoder"])
    for token, index in tokenizer.get_vocab().items():
        if index in special:
            continue
        if index in added:
            table[index] = len(added[index].encode())
        elif byte_level:
            table[index] = len(token)  # one character of the byte alphabet is one byte
        elif _BYTE_FALLBACK.fullmatch(token):
            table[index] = 1
        else:
            table[index] = len(token.removeprefix("##").replace("▁", " ").encode())
    return table


def _pipeline(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """The fast tokenizer's description of itself without the vocabulary; None for a slow tokenizer."""
    if not tokenizer.is_fast:
        return None
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    return {key: description[key] for key in ("normalizer", "pre_tokenizer", "decoder")}
