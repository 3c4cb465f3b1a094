"""What a sampler is given (`Canvas`: tokens and which of them are to be written) and what it returns (`Generation`).

Prompting is infilling with an undecided tail: there is no other notion of a prompt. Read next: `driver.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Canvas:
    """Rows of tokens, some of them still to be written. Padding stands on the right.

    What `tokens` holds at editable positions does not matter. Everything else is given and never changes, a mask id or
    an end-of-sequence id among it included.

    Raises ValueError if shapes do not fit or padding is editable.
    """

    tokens: Int64[Tensor, "batch seq"]
    editable: Bool[Tensor, "batch seq"]
    lengths: Int64[Tensor, " batch"]

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2 or self.tokens.shape != self.editable.shape or self.tokens.numel() == 0:
            raise ValueError(
                f"a canvas needs tokens and editable flags of one shape [batch, seq], both above 0; got "
                f"{list(self.tokens.shape)} and {list(self.editable.shape)}"
            )
        if self.editable.dtype != torch.bool or self.tokens.dtype != torch.int64:
            raise ValueError(f"tokens must be int64 and editable bool, got {self.tokens.dtype}, {self.editable.dtype}")
        rows, seq = self.tokens.shape
        if self.lengths.shape != (rows,) or int(self.lengths.min()) < 1 or int(self.lengths.max()) > seq:
            raise ValueError(f"lengths must hold a number from 1 to {seq} for each of {rows} rows, got {self.lengths}")
        if bool((self.editable & ~self.real).any()):
            raise ValueError("positions beyond the length of their row are padding and cannot be editable")

    @property
    def real(self) -> Bool[Tensor, "batch seq"]:
        """True on tokens, False on padding."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> Canvas:
        """The same canvas on `device`."""
        return Canvas(self.tokens.to(device), self.editable.to(device), self.lengths.to(device))

    def __getitem__(self, rows: slice | Sequence[int]) -> Canvas:
        """These rows, without columns that are padding in all of them."""
        index = torch.arange(len(self))[rows] if isinstance(rows, slice) else torch.tensor(rows)
        lengths = self.lengths[index]
        columns = slice(int(lengths.max()))
        return Canvas(self.tokens[index][:, columns], self.editable[index][:, columns], lengths)

    @staticmethod
    def from_rows(tokens: Sequence[Tensor], editable: Sequence[Tensor]) -> Canvas:
        """Rows of any lengths: 1-d token ids and, of the same length, booleans."""
        if not tokens:
            raise ValueError("a canvas needs at least one row")
        ids = [torch.as_tensor(row, dtype=torch.int64) for row in tokens]
        flags = [torch.as_tensor(row, dtype=torch.bool) for row in editable]
        return Canvas(
            pad_sequence(ids, batch_first=True),
            pad_sequence(flags, batch_first=True),
            torch.tensor([len(row) for row in ids], device=ids[0].device),
        )

    @staticmethod
    def from_prompts(prompts: Sequence[Any], new_tokens: int | Sequence[int]) -> Canvas:
        """Prompts (ids; may be empty), each followed by `new_tokens` positions to write: one number, or one per row."""
        counts = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else list(new_tokens)
        if len(counts) != len(prompts) or min(counts, default=1) < 0:
            raise ValueError(f"new_tokens must be 0 or more, one number or one for each of {len(prompts)} prompts")
        tokens, editable = [], []
        for prompt, count in zip(prompts, counts):
            ids = torch.as_tensor(prompt, dtype=torch.int64)
            if ids.dim() != 1 or len(ids) + count == 0:
                raise ValueError(
                    f"a prompt must be a list of token ids, and an empty one needs new_tokens of 1 or more; got shape "
                    f"{list(ids.shape)} and new_tokens={count}"
                )
            tokens.append(torch.cat([ids, ids.new_zeros(count)]))
            editable.append(torch.arange(len(ids) + count, device=ids.device) >= len(ids))
        return Canvas.from_rows(tokens, editable)

    @staticmethod
    def from_padded(
        input_ids: Int64[Tensor, "batch seq"],
        attention_mask: Tensor | None = None,
        new_tokens: int = 0,
        editable: Bool[Tensor, "batch seq"] | None = None,
    ) -> Canvas:
        """A batch padded on either side (1 or True in `attention_mask` = token); padding is cut out of each row.

        `editable` marks positions to write within the given tokens, `new_tokens` adds some after them.
        """
        real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        if real.shape != input_ids.shape or input_ids.dim() != 2:
            raise ValueError(
                f"input_ids and attention_mask must have one shape [batch, seq], got {list(input_ids.shape)} and "
                f"{list(real.shape)}"
            )
        write = torch.zeros_like(real) if editable is None else editable
        tail = torch.ones(new_tokens, dtype=torch.bool, device=input_ids.device)
        return Canvas.from_rows(
            [torch.cat([ids[keep], ids.new_zeros(new_tokens)]) for ids, keep in zip(input_ids, real)],
            [torch.cat([flags[keep], tail]) for flags, keep in zip(write, real)],
        )

    @staticmethod
    def from_pieces(tokenizer: PreTrainedTokenizerBase, *rows: Sequence[str | int]) -> Canvas:
        """Text with holes: each row is a list of strings (given) and numbers (so many tokens to write).

        `Canvas.from_pieces(tokenizer, ["def add(a, b):", 8, "return c"])`.
        """
        tokens, editable = [], []
        for row in rows:
            ids: list[int] = []
            flags: list[bool] = []
            for piece in row:
                if (
                    not isinstance(piece, (str, int))
                    or isinstance(piece, bool)
                    or (isinstance(piece, int) and piece < 0)
                ):
                    raise ValueError(
                        f"a piece is {piece!r}; each row is a list of strings (given text) and numbers of 0 or more "
                        "(tokens to write)"
                    )
                given = [0] * piece if isinstance(piece, int) else tokenizer.encode(piece, add_special_tokens=False)
                ids += given
                flags += [isinstance(piece, int)] * len(given)
            tokens.append(torch.tensor(ids, dtype=torch.int64))
            editable.append(torch.tensor(flags, dtype=torch.bool))
        return Canvas.from_rows(tokens, editable)


@dataclass(frozen=True)
class Generation:
    """What was written, and what it cost. Lists and tensors have one entry per row of the canvas."""

    tokens: list[Int64[Tensor, " row"]]
    """The whole row, given tokens included; ends after the first end-of-sequence token of an answer."""
    text: list[str]
    """What was written after the prompt, or, where the call was given a `Canvas`, the whole row; special tokens left
    out. Empty strings without a tokenizer."""
    nfe: Int64[Tensor, " batch"]
    """Number of function evaluations: how often the denoiser was asked about a state of this row. Both branches of
    guidance and every speculative branch count."""
    forwards: Int64[Tensor, " batch"]
    """Model calls that held this row; several branches in one call are one forward, refreshing a cache is one."""
    tokens_fed: Int64[Tensor, " batch"]
    """Tokens of this row that went through the model, padding not counted."""
    step_map: list[Int64[Tensor, " row"]]
    """Step at which each token was (last) written, from 0; -1 on given tokens and behind an early end."""
    log_probs: list[Float[Tensor, " row"]]
    """Log-probability in nats, untempered, of each token under the marginal it was drawn from; NaN where `step_map` is
    -1."""
    finish: list[str]
    """Why the row ended: `length` (everything is written), `eos`, or the name of another stop rule."""

    @property
    def new_tokens(self) -> Int64[Tensor, " batch"]:
        """Tokens written per row: positions with a step."""
        return torch.tensor([int((steps >= 0).sum()) for steps in self.step_map])

    @property
    def tokens_per_forward(self) -> Float[Tensor, " batch"]:
        """Written tokens over forwards; 0 where nothing had to be written."""
        return self.new_tokens / self.forwards.clamp(min=1)

    def __len__(self) -> int:
        return len(self.tokens)

    def as_dict(self, row: int) -> dict[str, Any]:
        """One row as plain values for JSON (None where a log-probability is NaN)."""
        log_probs = self.log_probs[row].tolist()
        return {
            "text": self.text[row],
            "tokens": self.tokens[row].tolist(),
            "step_map": self.step_map[row].tolist(),
            "log_probs": [None if value != value else value for value in log_probs],
            "nfe": int(self.nfe[row]),
            "forwards": int(self.forwards[row]),
            "tokens_fed": int(self.tokens_fed[row]),
            "finish": self.finish[row],
        }

    @staticmethod
    def join(parts: Sequence[Generation]) -> Generation:
        """The rows of several generations one after the other."""
        return Generation(
            tokens=[row for part in parts for row in part.tokens],
            text=[row for part in parts for row in part.text],
            nfe=torch.cat([part.nfe for part in parts]),
            forwards=torch.cat([part.forwards for part in parts]),
            tokens_fed=torch.cat([part.tokens_fed for part in parts]),
            step_map=[row for part in parts for row in part.step_map],
            log_probs=[row for part in parts for row in part.log_probs],
            finish=[row for part in parts for row in part.finish],
        )
