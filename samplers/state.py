"""What the components of a sampler see: `State` (the rows still being unmasked) and `Step` (one step over them).

Whether a position is decided is a flag of its own (`State.masked`), never a comparison with the mask id, which prompts
may contain. Per-position numbers come in two layouts: *dense* `[batch, seq]` for decisions, and *packed* `[rows]` or
`[rows, vocab]` for predictions, one entry for each position asked for, in row-major order. Read next: `driver.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from mdlm.attention_rows import Attention
from mdlm.passes import entropies, largest
from mdlm.rng import counter_uniform
from mdlm.samplers.draw import Draw

# Purposes of noise: one position at one step may need several independent numbers.
NOISE_ORDER, NOISE_TOKEN, NOISE_REVEAL, NOISE_REMASK, NOISE_RANK = 1, 2, 3, 4, 5

NOISE_STATE = 6


class Memory(Protocol):
    """What a component remembers between steps; lives in `State.memory`, so no two runs share it."""

    def keep(self, rows: Int64[Tensor, " batch"]) -> Memory:
        """The memory of these rows, called when finished rows leave the batch."""


@dataclass
class RowMemory:
    """A memory of tensors whose first axis is the batch."""

    tensors: dict[str, Tensor]

    def keep(self, rows: Int64[Tensor, " batch"]) -> RowMemory:
        """See `Memory`."""
        return RowMemory({name: tensor[rows] for name, tensor in self.tensors.items()})

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor


@dataclass
class State:
    """The unfinished rows, in the order of the canvas; one entry per row on the first axis of every tensor."""

    rows: Int64[Tensor, " batch"]
    """Number of the row in the canvas."""
    keys: Int64[Tensor, " batch"]
    """Key of the row's noise; depends on its seed and on nothing else."""
    tokens: Int64[Tensor, "batch seq"]
    """The canvas as the denoiser sees it: undecided positions hold the mask id."""
    editable: Bool[Tensor, "batch seq"]
    masked: Bool[Tensor, "batch seq"]
    """Editable and not decided."""
    lengths: Int64[Tensor, " batch"]
    origin: Int64[Tensor, " batch"]
    """First editable position: blocks are counted from here."""
    step_map: Int64[Tensor, "batch seq"]
    log_probs: Float[Tensor, "batch seq"]
    """Log-probability of each written token when it was written; NaN elsewhere."""
    edits: Int64[Tensor, "batch seq"]
    """How often a decision at this position has been revised."""
    nfe: Int64[Tensor, " batch"]
    forwards: Int64[Tensor, " batch"]
    tokens_fed: Int64[Tensor, " batch"]
    block: Int64[Tensor, " batch"]
    """Number of the window that the row is in; -1 before the first step."""
    block_step: Int64[Tensor, " batch"]
    """Steps done in this window."""
    window: Bool[Tensor, "batch seq"]
    """Window of the last step; nowhere before the first."""
    step: int = 0
    """Steps done."""
    memory: dict[Hashable, Memory] = field(default_factory=dict)
    """By component."""

    def keep(self, rows: Int64[Tensor, " batch"]) -> State:
        """These rows only."""
        values = {name: value[rows] for name, value in vars(self).items() if isinstance(value, Tensor)}
        memory = {component: kept.keep(rows) for component, kept in self.memory.items()}
        return State(**values, step=self.step, memory=memory)

    def remember(self, component: Hashable, initial: Callable[[], Memory]) -> Memory:
        """The component's memory, made by `initial` at its first use in this run."""
        if component not in self.memory:
            self.memory[component] = initial()
        return self.memory[component]

    def uniform(self, purpose: int, dense: bool = True) -> Float64[Tensor, "..."]:
        """Uniform numbers in (0, 1) of this step: one per position `[batch, seq]`, or one per row `[batch]`."""
        if not dense:
            return counter_uniform(self.keys, purpose, self.step)
        position = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return counter_uniform(self.keys[:, None], purpose, self.step, position)

    def uniform_at(
        self, purpose: int, row: Int64[Tensor, " rows"], position: Int64[Tensor, " rows"]
    ) -> Float64[Tensor, " rows"]:
        """`uniform(purpose)[row, position]`, and no other number is computed."""
        return counter_uniform(self.keys[row], purpose, self.step, position)


@dataclass
class Step:
    """One step: the window, what may be committed, and the predictions at the positions asked for."""

    state: State
    window: Bool[Tensor, "batch seq"]
    """Positions that take part in this step, decided ones included."""
    candidates: Bool[Tensor, "batch seq"]
    """Undecided positions of the window: what may be committed."""
    mask_token_id: int
    at: Bool[Tensor, "batch seq"] | None = None
    """Positions with a prediction; every candidate, unless the selector chose without looking."""
    log_probs: Float[Tensor, "rows vocab"] = field(default_factory=lambda: torch.empty(0, 1))
    """Untempered log-probabilities at `at` after all transforms, packed."""
    drawn: Int64[Tensor, " rows"] | None = None
    """Token drawn for each prediction before positions are selected; None if they are drawn afterwards."""
    attention: Attention | None = None
    """Attention of the step's forward between any positions (`mdlm.attention_rows`); None unless the selector reads
    attention (`attention_layers`)."""
    draw: Draw = field(default_factory=Draw)
    """How tokens are drawn, for scores of what is drawn from."""
    shared: dict[Hashable, Tensor] = field(default_factory=dict, init=False)
    """What several parts of a strategy need of this step and one of them has computed; by component."""

    @cached_property
    def index(self) -> tuple[Int64[Tensor, " rows"], Int64[Tensor, " rows"]]:
        """Row in the batch and position of each packed prediction."""
        assert self.at is not None
        row, position = self.at.nonzero(as_tuple=True)
        return row, position

    @cached_property
    def best(self) -> tuple[Float[Tensor, " rows"], Int64[Tensor, " rows"]]:
        """Largest log-probability of each prediction and its token (the lowest id of equal ones)."""
        return largest(self.log_probs)

    @cached_property
    def entropy(self) -> Float[Tensor, " rows"]:
        """Entropy of each prediction in nats; 0, not NaN, where one token has all the mass."""
        return entropies(self.log_probs)

    @property
    def predicted(self) -> Int64[Tensor, " rows"]:
        """The token each prediction stands for: the drawn one, or the most probable if none is drawn yet."""
        return self.best[1] if self.drawn is None else self.drawn

    def dense(self, packed: Tensor, fill: float | int | bool) -> Tensor:
        """Packed values `[rows]` at their positions `[batch, seq]`, `fill` elsewhere."""
        assert self.at is not None
        out = torch.full(self.window.shape, fill, dtype=packed.dtype, device=packed.device)
        return out.masked_scatter_(self.at, packed)

    def packed(self, dense: Tensor) -> Tensor:
        """The entries of a dense tensor `[batch, seq]` at the predictions `[rows]`."""
        return dense[self.index]

    def of(self, tokens: Int64[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """Log-probability of one token per prediction."""
        return self.log_probs.gather(-1, tokens[:, None])[:, 0]

    def remember(self, component: Hashable, initial: Callable[[], Memory]) -> Memory:
        """See `State.remember`."""
        return self.state.remember(component, initial)
