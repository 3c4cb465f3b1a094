"""From a record of fine-tuning data (chat, or prompt and completion) to tokens, and which of them are the answer.

Only the answer is supervised, that is noised and counted in the loss; the prompt is never noised (LLaDA, arXiv
2502.09992, section 2.3). Of chat messages the answer is what the chat template puts between `{% generation %}` and
`{% endgeneration %}`. Each stretch of prompt and of answer is tokenised for itself, so no token holds characters of
both and a prompt has the same tokens in training as when text is generated after it. (Tokenizers that put a space in
front of every text, as SentencePiece may, put one in front of each stretch too.)

Behind the answer stands one true end token, supervised unless `pad_supervision` is `none`; text that the template puts
behind the last answer is left out, since nobody can know it before the answer is written. An end token that the
template wrote there is the true one, and none is added. Padding is told apart from it by position, never by id: a
tokenizer whose pad token is its end token loses nothing. Read next: `data_examples.py`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from mdlm.data_pack import Tokens
from mdlm.readers import Document
from mdlm.tokenization import encode_texts

Records = Literal["text", "messages", "completion"]
PadSupervision = Literal["none", "eos_one", "eos_to_batch", "eos_to_length"]
TooLong = Literal["error", "truncate", "drop"]
Turns = Literal["all", "last"]

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ '### ' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\\n' }}{% endif %}"
)
"""`chat_template="plain"`: headers in plain text and the end token after every answer; needs no special token."""


@dataclass(frozen=True)
class ExampleConfig:
    """What a record of the data is and which of its tokens are learnt."""

    records: Literal["text", "messages", "completion"] = "text"
    """`text`: plain text, every token is learnt; `messages`: chats, a list of {"role", "content"} (or ShareGPT's
    {"from", "value"}), of which the assistant's tokens are learnt; `completion`: prompt and completion (two strings, or
    two lists of messages), of which the completion is learnt. All but `text` need `jsonl`, `parquet` or a dataset, and
    packing `none` or `documents`."""
    messages_column: str = "messages"
    """Key or column of the messages; in ShareGPT's records `conversations`."""
    prompt_column: str = "prompt"
    """Key or column of the prompt."""
    completion_column: str = "completion"
    """Key or column of the completion."""
    chat_template: str | None = None
    """`plain` (`mdlm.chat.PLAIN_TEMPLATE`) or a file with a Jinja template, which the checkpoint's tokenizer then
    keeps; null: the tokenizer's own."""
    turns: Literal["all", "last"] = "all"
    """Chats of several answers: learn `all`, each seeing what was said later, or only the `last`, as LLaDA does."""
    pad_supervision: Literal["none", "eos_one", "eos_to_batch", "eos_to_length"] = "eos_one"
    """What is learnt behind the answer. `none`: nothing (the model never learns to end, except where the template puts
    an end token into the answer); `eos_one`: one end token, the default: exact under packing, costs nothing;
    `eos_to_batch`: end tokens up to the longest row of the *global* batch, as LLaDA's fine-tuning does (the same in any
    split into micro-batches); `eos_to_length`: up to `seq_len`. The last two need packing `none`. Validation rows are
    never filled up: their loss is that of the answers, whatever is chosen here."""
    eos_random: int = 1
    """1 to so many end tokens behind each answer, drawn per example (Stable-DiffCoder, arXiv 2601.15892: 4)."""
    too_long: Literal["error", "truncate", "drop"] = "error"
    """An example longer than `seq_len`: an error, cut on the right (without end token, as it has not ended; dropped
    where only prompt would be left), or dropped. What is cut and dropped is counted and reported."""

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[str, ...]] = {
            "records": ("text", "messages", "completion"),
            "turns": ("all", "last"),
            "pad_supervision": ("none", "eos_one", "eos_to_batch", "eos_to_length"),
            "too_long": ("error", "truncate", "drop"),
        }
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise ValueError(f"{field}={getattr(self, field)!r}: choose one of {', '.join(values)}")
        if self.eos_random < 1:
            raise ValueError(
                f"eos_random={self.eos_random}: at least 1 is needed; for no end token: pad_supervision=none"
            )
        if self.eos_random > 1 and self.pad_supervision != "eos_one":
            raise ValueError(
                f"eos_random={self.eos_random} has no effect with pad_supervision={self.pad_supervision!r}; it is the "
                "number of end tokens of 'eos_one'"
            )
        if self.records == "text":
            for field in ("chat_template", "turns", "pad_supervision", "eos_random", "too_long"):
                if getattr(self, field) != getattr(ExampleConfig, field):
                    raise ValueError(
                        f"{field}={getattr(self, field)!r} has no effect with records='text': every token is learnt "
                        "and documents end with one end token; set records to messages or completion"
                    )

    @property
    def record_columns(self) -> tuple[str, ...]:
        """The columns that make up a record (of all kinds but `text`)."""
        return (self.messages_column,) if self.records == "messages" else (self.prompt_column, self.completion_column)


class Segment(NamedTuple):
    """A stretch of an example's text. `special`: special tokens spelt out in it are special tokens."""

    text: str
    supervised: bool
    special: bool


class Example(NamedTuple):
    """One encoded record; `dropped` says why it cannot be used. `eos_padding`: end tokens behind the first."""

    ids: Tokens
    supervised: npt.NDArray[np.bool_]
    text_bytes: int
    truncated: bool
    eos_padding: int
    dropped: str | None = None


def chat_tokenizer(tokenizer: PreTrainedTokenizerBase, template: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer with the chat template that `template` (see `ExampleConfig.chat_template`) means."""
    if template is None:
        return tokenizer
    if template != "plain" and not Path(template).is_file():
        raise FileNotFoundError(f"chat_template={template!r}: neither 'plain' nor a file with a Jinja template")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = PLAIN_TEMPLATE if template == "plain" else Path(template).read_text(encoding="utf-8")
    return tokenizer


def record_text(document: Document) -> str:
    """What a record says, without roles: text to train a tokenizer on."""
    parts: list[str] = []
    for value in json.loads(document.text).values():
        parts += [value] if isinstance(value, str) else [str(m["content"]) for m in _messages(value, document.where)]
    return "\n".join(parts)


@dataclass(frozen=True)
class ExampleEncoder:
    """Encodes records. Picklable, and the same for a record whatever stands beside it."""

    config: ExampleConfig
    tokenizer: PreTrainedTokenizerBase
    seq_len: int
    seed: int

    def __call__(self, documents: Sequence[Document]) -> list[Example]:
        """Raises ValueError that names the row of a record that is malformed, says nothing to learn or is too long."""
        split = [self._segments(document) for document in documents]
        coded: dict[bool, list[Tokens]] = {}
        for special in (False, True):
            chosen = [
                (s.text, d.where) for d, segments in zip(documents, split) for s in segments if s.special == special
            ]
            coded[special] = encode_texts(self.tokenizer, [c[0] for c in chosen], [c[1] for c in chosen], special)
        parts = {special: iter(ids) for special, ids in coded.items()}
        encoded = [[(s, next(parts[s.special])) for s in segments] for segments in split]
        return [self._assemble(document, pieces) for document, pieces in zip(documents, encoded)]

    def _assemble(self, document: Document, pieces: list[tuple[Segment, Tokens]]) -> Example:
        flags = [np.full(len(ids), s.supervised) for s, ids in pieces]
        ids, supervised = np.concatenate([i for _, i in pieces]), np.concatenate(flags)
        if not supervised.any():
            raise ValueError(f"{document.where}: nothing to learn: the answer has no token{self._no_answer()}")
        eos = self.tokenizer.eos_token_id
        end = int(np.flatnonzero(supervised)[-1]) + 1
        padding = 0
        if self.config.pad_supervision == "none":
            ids, supervised = ids[:end], supervised[:end]
        else:
            ended = ids[end - 1] == eos
            count = self._ends(document) - ended
            padding = self._ends(document) - 1
            ids = np.concatenate([ids[:end], np.full(count, eos, np.int32)])
            supervised = np.concatenate([supervised[:end], np.ones(count, bool)])
        text_bytes = sum(len(s.text.encode()) for s, _ in pieces if s.supervised)
        if len(ids) <= self.seq_len:
            return Example(ids, supervised, text_bytes, False, padding)
        if self.config.too_long == "error":
            raise ValueError(
                f"{document.where}: the example has {len(ids)} tokens, a row takes seq_len={self.seq_len}; raise "
                "seq_len, or choose what becomes of such examples: too_long=truncate or too_long=drop"
            )
        ids, supervised = ids[: self.seq_len], supervised[: self.seq_len]
        cut = Example(ids, supervised, text_bytes, True, 0)
        if self.config.too_long == "drop":
            return cut._replace(dropped=f"longer than seq_len={self.seq_len}")
        if not supervised.any():
            return cut._replace(dropped=f"the prompt alone fills seq_len={self.seq_len}")
        return cut

    def _ends(self, document: Document) -> int:
        if self.config.eos_random == 1:
            return 1
        digest = hashlib.blake2b(f"{self.seed} {document.text}".encode(), digest_size=6).digest()
        return 1 + int.from_bytes(digest, "big") * self.config.eos_random // 2**48

    def _no_answer(self) -> str:
        hint = "; remove the row, or check that its answer is not empty"
        return (
            hint + " and that its roles are those of the chat template" if self.config.records == "messages" else hint
        )

    def _segments(self, document: Document) -> list[Segment]:
        record = json.loads(document.text)
        if self.config.records == "messages":
            return self._chat(_messages(record[self.config.messages_column], document.where), document.where)
        prompt, completion = record[self.config.prompt_column], record[self.config.completion_column]
        if isinstance(prompt, str) and isinstance(completion, str):
            return [Segment(prompt, False, False), Segment(completion, True, False)]
        if isinstance(prompt, str) or isinstance(completion, str):
            raise ValueError(f"{document.where}: prompt and completion must be two strings or two lists of messages")
        first, second = _messages(prompt, document.where), _messages(completion, document.where)
        asked, _ = self._render(first, document.where, add_generation_prompt=True)
        whole, _ = self._render(first + second, document.where)
        if not whole.startswith(asked):
            raise ValueError(
                f"{document.where}: the chat template does not continue the prompt: {asked[-40:]!r} (with "
                f"add_generation_prompt) is no beginning of the whole chat; the answer cannot be told apart"
            )
        return [Segment(asked, False, True), Segment(whole[len(asked) :], True, True)]

    def _chat(self, messages: list[dict[str, Any]], where: str) -> list[Segment]:
        text, spans = self._render(messages, where)
        if not _MARKED.search(self.tokenizer.get_chat_template()):
            raise ValueError(
                f"{where}: the tokenizer's chat template has no {{% generation %}} ... {{% endgeneration %}} around "
                "the assistant's text, so the answer cannot be told from the prompt; add them (chat_template=FILE), "
                "use chat_template=plain, or records=completion"
            )
        spans = [(a, b) for a, b in spans if b > a]
        spans = spans[-1:] if self.config.turns == "last" else spans
        segments, at = [], 0
        for start, stop in spans:
            segments += [Segment(text[at:start], False, True), Segment(text[start:stop], True, True)]
            at = stop
        eos = self.tokenizer.eos_token
        if spans and text.startswith(eos, at) and self.config.pad_supervision != "none":
            segments[-1] = segments[-1]._replace(text=segments[-1].text + eos)
            at += len(eos)
        return [*segments, Segment(text[at:], False, True)]

    def _render(
        self, messages: list[dict[str, Any]], where: str, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"{where}: the record is a chat, but the tokenizer has no chat template; give one: chat_template=FILE, "
                "or chat_template=plain"
            )
        template = self.tokenizer.get_chat_template()
        try:
            rendered: Any = render_jinja_template(  # a pair, whatever its annotation says
                conversations=[messages],
                chat_template=template,
                return_assistant_tokens_mask=not add_generation_prompt and bool(_MARKED.search(template)),
                add_generation_prompt=add_generation_prompt,
                **cast(dict[str, Any], self.tokenizer.special_tokens_map),
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"{where}: the chat template does not take this chat: {error}") from error
        (text,), spans = rendered
        return text, list(spans[0]) if spans else []


SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "tool": "tool",
}  # fmt: skip
"""What `from` may be in records of ShareGPT -> the role of the chat template."""


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    """The messages of a chat as `role` and `content`. Raises ValueError that names the row."""

    def all_have(*keys: str) -> bool:
        return all(isinstance(m, dict) and all(isinstance(m.get(key), str) for key in keys) for m in value)

    if isinstance(value, list) and value and all_have("role", "content"):
        return value
    if isinstance(value, list) and value and all_have("from", "value"):
        strange = sorted({m["from"] for m in value} - SHAREGPT_ROLES.keys())
        if strange:
            raise ValueError(f"{where}: a message is from {strange[0]!r}; known are {', '.join(SHAREGPT_ROLES)}")
        return [{"role": SHAREGPT_ROLES[m["from"]], "content": m["value"]} for m in value]
    raise ValueError(
        f'{where}: a chat must be a list of {{"role": ..., "content": ...}} or {{"from": ..., "value": ...}}, all '
        f"strings, and hold at least one; found {value!r:.80}"
    )
