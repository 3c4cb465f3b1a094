"""Stop rules: which rows are finished though not everything in them is written.

A rule maps the `State` after a commit to the rows to end, and says where an ended row ends. Read next: `driver.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from mdlm.samplers.state import State


class StopRule(Protocol):
    """See the module's docstring."""

    @property
    def name(self) -> str:
        """What `Generation.finish` says."""

    def __call__(self, state: State) -> Int64[Tensor, " batch"]:
        """Length at which each row ends; -1: it goes on."""


def first_end(
    tokens: Int64[Tensor, "batch seq"], written: Bool[Tensor, "batch seq"], eos_token_ids: tuple[int, ...]
) -> Int64[Tensor, " batch"]:
    """Position of the first written end-of-sequence token of each row; -1 where there is none."""
    ends = written & torch.isin(tokens, torch.tensor(eos_token_ids, device=tokens.device))
    return torch.where(ends.any(dim=-1), ends.int().argmax(dim=-1), -1)


@dataclass(frozen=True)
class EosStop:
    """End a row at its first written end-of-sequence token once nothing left of it is undecided.

    Only where everything to the right is the row's own to write: an end inside a hole between given texts is a token
    like any other. An end token in the prompt is given, not written, and ends nothing.
    """

    eos_token_ids: tuple[int, ...]
    name: ClassVar[str] = "eos"
    at_end_tokens: ClassVar[bool] = True

    def __call__(self, state: State) -> Int64[Tensor, " batch"]:
        """See `StopRule`."""
        position = torch.arange(state.tokens.shape[1], device=state.tokens.device)
        given = ~state.editable & (position < state.lengths[:, None])
        after_given = position > torch.where(given, position, -1).amax(dim=-1, keepdim=True)
        end = first_end(state.tokens, state.editable & ~state.masked & after_given, self.eos_token_ids)
        undecided_before = (state.masked & (position < end[:, None])).any(dim=-1)
        return torch.where((end >= 0) & ~undecided_before, end + 1, -1)
