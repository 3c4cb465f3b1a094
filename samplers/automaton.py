"""Regular expressions over text as automata over tokens: `token_automaton`.

`interegular` makes the automaton over characters; here it is taken to bytes (tokens may end within a character) and
then to tokens: state after token = state after its bytes. Tokens that no state tells apart are one *class*, so that
what follows (`constrain.py`) works with few classes in place of the vocabulary. Read next: `constrain.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

Pending = bytes | tuple[int, int, int]
"""Bytes of an unfinished character that the pattern names; or, for one it does not name, the bounds of the next byte
and how many bytes are missing."""


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """A deterministic automaton over tokens. State 0 is the first; `states` itself stands for "no way to go on"."""

    next_state: Int64[Tensor, "states classes"]
    token_class: Int64[Tensor, " vocab"]
    accepting: Bool[Tensor, " states"]

    @property
    def states(self) -> int:
        """How many there are; every one of them can still reach acceptance."""
        return self.next_state.shape[0]

    def to(self, device: torch.device) -> TokenAutomaton:
        """The same on `device`."""
        return TokenAutomaton(self.next_state.to(device), self.token_class.to(device), self.accepting.to(device))


def token_automaton(
    pattern: str,
    texts: Sequence[bytes | None],
    eos_token_ids: Sequence[int] = (),
    banned: Sequence[int] = (),
) -> TokenAutomaton:
    """The automaton of all token sequences whose text matches `pattern` as a whole.

    Python syntax without anchors, back references and look-around; "." is any character but a newline, and text is
    valid UTF-8. An end-of-sequence token may follow a match, and after it any text may stand: it is cut off.

    Args:
        texts: the bytes of each token id; None for tokens that are no text (the mask, padding) and may not be written.
        eos_token_ids: tokens that end an answer; none: an answer fills all its positions.
        banned: ids that are never written.

    Raises ValueError for a pattern that cannot be read or that no sequence of these tokens matches, and for ids that do
    not exist; ImportError without `interegular`.
    """
    wrong = [token for token in (*eos_token_ids, *banned) if not 0 <= token < len(texts)]
    if wrong:
        raise ValueError(f"token ids {wrong} do not exist; there are 0 .. {len(texts) - 1}")
    table, accepting = _reduce(*byte_automaton(pattern))
    if len(table):
        next_state, accepting = _lift(table, accepting, texts, eos_token_ids, banned)
        columns, kind = np.unique(next_state, axis=1, return_inverse=True)
        table, accepting = _reduce(columns, accepting)
    if not len(table):
        raise ValueError(f"no sequence of the model's tokens matches {pattern!r}; widen the pattern")
    columns, token_class = np.unique(table, axis=1, return_inverse=True)
    token_class = token_class.reshape(-1)[kind.reshape(-1)]
    return TokenAutomaton(torch.from_numpy(columns), torch.from_numpy(token_class), torch.from_numpy(accepting))


def byte_automaton(pattern: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """`pattern` over the bytes of UTF-8: next state `[states, 256]` (-1: none), accepting `[states]`; starts in 0."""
    characters = _parse(pattern)
    from interegular.fsm import anything_else

    symbol_of: dict[Any, int] = {char: characters.alphabet[char] for char in characters.alphabet}
    other = symbol_of.pop(anything_else, None)
    named = {char.encode(): symbol for char, symbol in symbol_of.items()}
    beginnings = {code[:length] for code in named for length in range(1, len(code))}

    def step(pending: Pending, byte: int) -> tuple[Pending, int | None] | None:
        """What is pending after `byte`, and the symbol it completes; None if that is not UTF-8."""
        if isinstance(pending, bytes):
            code = pending + bytes([byte])
            if code in named:
                return b"", named[code]
            if code in beginnings:
                return code, None
            bounds = _after(code)
        else:
            low, high, missing = pending
            bounds = (0x80, 0xBF, missing - 1) if low <= byte <= high else None
        if bounds is None or other is None:
            return None
        return (b"", other) if bounds[2] == 0 else (bounds, None)

    numbers: dict[tuple[Any, Pending], int] = {(characters.initial, b""): 0}
    queue, rows = list(numbers), []
    steps: dict[Pending, list[tuple[Pending, int | None] | None]] = {}
    for state, pending in queue:  # grows while it is read
        if pending not in steps:
            steps[pending] = [step(pending, byte) for byte in range(256)]
        row = []
        for found in steps[pending]:
            after = None
            if found is not None:
                rest, symbol = found
                target = state if symbol is None else characters.map.get(state, {}).get(symbol)
                after = None if target is None else (target, rest)
            if after is not None and after not in numbers:
                numbers[after] = len(numbers)
                queue.append(after)
            row.append(-1 if after is None else numbers[after])
        rows.append(row)
    accepting = [pending == b"" and state in characters.finals for state, pending in queue]
    return np.array(rows, dtype=np.int64), np.array(accepting)


def _after(code: bytes) -> tuple[int, int, int] | None:
    """Bounds of the byte after `code` (the beginning of one character), bytes missing; None: not UTF-8 (RFC 3629)."""
    lead = code[0]
    if lead < 0x80:
        return 0, 0, 0
    if not 0xC2 <= lead <= 0xF4:
        return None
    length = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    low, high = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}.get(lead, (0x80, 0xBF))
    for byte in code[1:]:
        if not low <= byte <= high:
            return None
        low, high = 0x80, 0xBF
    return low, high, length - len(code)


def _parse(pattern: str) -> Any:
    """The automaton over characters."""
    try:
        from interegular import InvalidSyntax, Unsupported, parse_pattern
    except ImportError as error:
        raise ImportError(
            "regular expressions need the package interegular; pip install 'mdlm-torch[constrain]'"
        ) from error
    if re.search(r"\(\?<?[=!]", pattern):
        raise ValueError(f"the pattern {pattern!r} looks ahead or behind, which is not supported here; spell it out")
    try:
        re.compile(pattern)
        return parse_pattern(pattern).to_fsm().reduce()
    except (re.error, InvalidSyntax) as error:
        raise ValueError(f"the pattern {pattern!r} is no regular expression: {error}") from error
    except Unsupported as error:
        raise ValueError(
            f"the pattern {pattern!r} uses what is not supported here: {error}. It always matches the whole answer, so "
            "anchors are left out; back references and \\b are not possible"
        ) from error


def _lift(
    table: NDArray[np.int64],
    accepting: NDArray[np.bool_],
    texts: Sequence[bytes | None],
    eos_token_ids: Sequence[int],
    banned: Sequence[int],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """From bytes (number of states: none) to tokens: next state `[states, vocab]` (-1: none), accepting `[states]`."""
    dead, ended = len(table), len(table) + 1
    full = np.concatenate([table, np.full((1, 256), dead)]).astype(np.int32)
    order = sorted((token for token, text in enumerate(texts) if text), key=lambda token: -len(texts[token] or b""))
    spelt = [texts[token] or b"" for token in order]
    columns = []
    for place in range(len(spelt[0]) if spelt else 0):
        longer = next((n for n, text in enumerate(spelt) if len(text) <= place), len(spelt))
        columns.append(np.array([text[place] for text in spelt[:longer]]))
    numbers, queue, rows = {0: 0}, [0], []
    for state in queue:  # grows while it is read
        row = np.full(len(texts), dead, dtype=np.int32)
        if state == ended:
            row[[token for token, text in enumerate(texts) if text]] = ended
            row[list(eos_token_ids)] = ended
        else:
            at = np.full(len(order), state, dtype=np.int32)
            for column in columns:
                at[: len(column)] = full[at[: len(column)], column]
            row[order] = at
            row[list(eos_token_ids)] = ended if accepting[state] else dead
        row[list(banned)] = dead
        for found in np.unique(row[row != dead]).tolist():
            if found not in numbers:
                numbers[found] = len(numbers)
                queue.append(found)
        rows.append(row)
    renumber = np.full(ended + 1, -1)
    renumber[list(numbers)] = list(numbers.values())
    return renumber[np.stack(rows)], np.array([state == ended or bool(accepting[state]) for state in queue])


def _reduce(next_state: NDArray[np.int64], accepting: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The smallest automaton of the same language; "none" (-1 before) is its number of states. Empty: no language."""
    next_state, accepting = _trim(next_state, accepting)
    return _minimise(next_state, accepting) if len(next_state) else (next_state, accepting)


def _trim(next_state: NDArray[np.int64], accepting: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Without states from which no acceptance can be reached; "none" is now the number of states."""
    alive = accepting.copy()
    while True:
        more = alive | np.append(alive, False)[next_state].any(axis=1)
        if bool((more == alive).all()):
            break
        alive = more
    kept = np.flatnonzero(alive)
    renumber = np.full(len(alive) + 1, len(kept))
    renumber[kept] = np.arange(len(kept))
    return renumber[next_state[kept]] if alive[0] else next_state[:0], accepting[kept]


def _minimise(
    next_state: NDArray[np.int64], accepting: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The same language with as few states as possible (Moore's partition refinement); state 0 stays the first."""
    part = accepting.astype(np.int64)
    while True:
        with_dead = np.append(part, -1)
        signature = np.concatenate([part[:, None], with_dead[next_state]], axis=1)
        _, first, finer = np.unique(signature, axis=0, return_index=True, return_inverse=True)
        finer = finer.reshape(-1)
        if len(first) == len(np.unique(part)):
            break
        part = finer
    order = first[np.argsort(first)]  # state 0 is the first of its part
    renumber = np.empty(len(first), dtype=np.int64)
    renumber[np.argsort(first)] = np.arange(len(first))
    return np.append(renumber[finer], len(first))[next_state[order]], accepting[order]


def token_texts(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> list[bytes | None]:
    """The bytes that each of `num_tokens` ids adds to a text; None for special tokens and ids that are none.

    Byte-level BPE exactly; SentencePiece with "▁" as a space (its decoder drops one at the start of an answer). Raises
    ValueError where the text of a token depends on its neighbours (WordPiece).
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = "" if backend is None else json.dumps(json.loads(backend.to_str())["decoder"])
    byte_level = "ByteLevel" in decoder
    if "WordPiece" in decoder:
        raise ValueError(
            "this tokenizer puts spaces between tokens when it decodes, so the text of a token depends on the one "
            "before it; a regular expression needs a byte-level or SentencePiece tokenizer"
        )
    byte_of = _byte_alphabet()
    special = set(tokenizer.all_special_ids)
    added = tokenizer.added_tokens_decoder
    texts: list[bytes | None] = [None] * num_tokens
    for token, index in tokenizer.get_vocab().items():
        if index >= num_tokens or index in special or (index in added and added[index].special):
            continue
        if index in added:
            texts[index] = added[index].content.encode()
        elif byte_level:
            texts[index] = bytes(byte_of[char] for char in token)
        elif re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            texts[index] = bytes([int(token[3:5], 16)])
        else:
            texts[index] = token.replace("▁", " ").encode()
    return texts


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes: printable ones stand for themselves, the others follow from
    U+0100 on in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
