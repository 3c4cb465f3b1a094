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


def window_of(block_length: int | None) -> Window:
    """Blocks of this length, or the whole canvas."""
    return whole if block_length is None else Blocks(block_length)


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
        if not self.length >= 1:  # NaN as well
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


@dataclass(frozen=True)
class SubBlocks:
    """Blocks of `length`, each cut into parts of `part` positions that are finished from left to right (Fast-dLLM v2,
    2509.26328). Differs from `Blocks(part)` where `part` does not divide `length`: a part ends with its block.

    Raises ValueError for values out of range.
    """

    length: int = 32
    part: int = 8
    align: Literal["answer", "row"] = "answer"

    def __post_init__(self) -> None:
        Blocks(self.length, self.align)
        if not 1 <= self.part <= self.length:
            raise ValueError(f"part is {self.part}; it must lie in 1 .. {self.length}, the length of the blocks")

    def __call__(self, state: State) -> tuple[Bool[Tensor, "batch seq"], Int64[Tensor, " batch"]]:
        """See `Window`."""
        origin = state.origin if self.align == "answer" else torch.zeros_like(state.origin)
        place = torch.arange(state.tokens.shape[1], device=origin.device) - origin[:, None]
        block, inside = place.div(self.length, rounding_mode="floor"), place.remainder(self.length)
        number = block * -(-self.length // self.part) + inside // self.part
        current = number.gather(1, leftmost(state)[:, None])
        return state.editable & (number == current), current[:, 0]


@dataclass(frozen=True)
class Strides:
    """A first block of `length` positions, then blocks of `stride` (MDLM's semi-autoregressive generation, 2406.07524,
    section 4.2). Everything before stays in sight: a canvas is as long as the model takes.

    Raises ValueError for values out of range.
    """

    length: int = 64
    stride: int = 32

    def __post_init__(self) -> None:
        Blocks(self.length)
        if not 1 <= self.stride <= self.length:
            raise ValueError(f"stride is {self.stride}; it must lie in 1 .. {self.length}, the length of the window")

    def __call__(self, state: State) -> tuple[Bool[Tensor, "batch seq"], Int64[Tensor, " batch"]]:
        """See `Window`."""
        place = torch.arange(state.tokens.shape[1], device=state.origin.device) - state.origin[:, None]
        number = ((place - self.length).div(self.stride, rounding_mode="floor") + 1).clamp(min=0)
        current = number.gather(1, leftmost(state)[:, None])
        return state.editable & (number == current), current[:, 0]


@dataclass(frozen=True)
class Sliding:
    """A window that starts at the leftmost undecided position of its row and reaches as far right as it holds at most
    `masks` undecided positions and `length` positions (Deferred Commitment Decoding, 2601.02076): a position that is
    not yet sure waits while others behind it are committed, instead of being forced at the end of a block.

    It counts as a new block after every `renew` tokens: then caches are refreshed and histories of predictions begin
    anew. None: never. Raises ValueError for values out of range.
    """

    masks: int = 16
    length: int = 128
    renew: int | None = 32

    def __post_init__(self) -> None:
        for name, value in (("masks", self.masks), ("length", self.length), ("renew", self.renew)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be 1 or more")

    def __call__(self, state: State) -> tuple[Bool[Tensor, "batch seq"], Int64[Tensor, " batch"]]:
        """See `Window`."""
        position = torch.arange(state.tokens.shape[1], device=state.tokens.device)
        start = leftmost(state)[:, None]
        near = (position >= start) & (position < start + self.length)
        window = state.editable & near & (state.masked.long().cumsum(dim=1) <= self.masks)
        if self.renew is None:
            return window, torch.zeros_like(state.rows)
        return window, (state.editable & ~state.masked).sum(dim=1) // self.renew
