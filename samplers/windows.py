"""Windows: the part of each row that a step works on, and the number of that part (blocks are left in order).

A window maps the `State` to (positions `[batch, seq]`, block number `[batch]`); it must hold an undecided position of
every unfinished row. Windows that look at predictions first are `PlanningWindow`s (`windows_planned.py`). Read next:
`driver.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from mdlm.samplers.state import State, Step

Window = Callable[[State], tuple[Bool[Tensor, "batch seq"], Int64[Tensor, " batch"]]]


@runtime_checkable
class PlanningWindow(Protocol):
    """A window whose extent depends on predictions.

    In the step in which a row's block begins it returns the block's *horizon*: how far the block could reach. The
    driver asks for predictions there, in the same forward that the step needs anyway, and then calls `plan`.
    """

    def __call__(self, state: State) -> tuple[Bool[Tensor, "batch seq"], Int64[Tensor, " batch"]]:
        """As any window: the block that a row is in, or the horizon of its next one (under a new number)."""

    def plan(self, step: Step) -> Bool[Tensor, "batch seq"]:
        """Called in every step once its predictions are known: the window, narrowed where a block begins. It must
        still hold an undecided position of every row that had one."""


def whole(state: State) -> tuple[Bool[Tensor, "batch seq"], Int64[Tensor, " batch"]]:
    """Everything editable at once."""
    return state.editable, torch.zeros_like(state.rows)


def leftmost(state: State) -> Int64[Tensor, " batch"]:
    """First undecided position of each row."""
    return state.masked.int().argmax(dim=-1)


@dataclass(frozen=True)
class Blocks:
    """Blocks of `length` positions from left to right, each finished before the next (LLaDA's semi-autoregressive
    sampling). `length` 1 decodes from left to right; a length of the whole answer or more is no blocks at all."""

    length: int
    align: Literal["answer", "row"] = "answer"
    """Count from the first editable position, or from the start of the row (block-causal models were trained so)."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"block_length is {self.length}; it must be 1 or more")
        if self.align not in ("answer", "row"):
            raise ValueError(f"align is {self.align!r}; it must be 'answer' or 'row'")

    def __call__(self, state: State) -> tuple[Bool[Tensor, "batch seq"], Int64[Tensor, " batch"]]:
        """See `Window`."""
        origin = state.origin if self.align == "answer" else torch.zeros_like(state.origin)
        position = torch.arange(state.tokens.shape[1], device=origin.device)
        block = (position - origin[:, None]).div(self.length, rounding_mode="floor")
        current = block.gather(1, leftmost(state)[:, None])
        return state.editable & (block == current), current[:, 0]
