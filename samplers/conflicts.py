"""Which spans must not be committed in the same step: three conflict graphs.

`MutualTop1` is CLAD's (Qi et al., 2605.29607): each span and the one it attends to most, if both agree.
`CrossProbability` is DepCap's (2604.15750, eq. 6): two positions either of which would as well say the other's token;
it needs no attention. `ThresholdedAttention` is DAPD's (2603.12996): every pair above a threshold. Edges join different
units only. Read next: `solvers.py`, which picks spans without an edge between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mdlm.attention_rows import layer_count

if TYPE_CHECKING:
    from mdlm.samplers.spans import Spans


class Graph(NamedTuple):
    """Conflicts between the units of each row."""

    edges: Bool[Tensor, "batch units units"]
    """Symmetric, False on the diagonal and at unused columns."""
    influence: Float[Tensor, "batch units"]
    """How strongly a unit is tied to the others; what that means is the graph's own."""


class Conflict(Protocol):
    """Makes the graph of one step's units."""

    @property
    def attention_layers(self) -> int | float | None:
        """Of how many last layers it reads attention (`mdlm.attention_rows.layer_count`); None: it reads none."""

    @property
    def is_matching(self) -> bool:
        """Whether no unit ever has two conflicts."""

    def __call__(self, spans: Spans) -> Graph:
        """The conflicts."""


def attention_between(spans: Spans) -> Float[Tensor, "batch slots slots"]:
    """Attention from each member's prediction to each member; 0 in unused slots."""
    if spans.step.attention is None:
        raise ValueError(
            "this conflict graph reads attention, but the selector around it does not ask for any; give the selector "
            "an attribute attention_layers with the number of layers"
        )
    return spans.step.attention(spans.dense(spans.used))


def different(spans: Spans) -> Bool[Tensor, "batch units units"]:
    """Pairs of two different units that exist."""
    real = spans.length > 0
    own = torch.eye(real.shape[1], dtype=torch.bool, device=real.device)
    return real[:, :, None] & real[:, None, :] & ~own


@dataclass(frozen=True)
class MutualTop1:
    """CLAD's sparse graph: an edge where two units are each other's strongest.

    With R = max(A, A^T) the symmetrised attention, a token's tie to a unit is the mean of R over the unit's members, a
    unit's tie to another the maximum over its tokens, made symmetric by the larger of the two. An edge joins mutual
    strongest partners; if there are only two units, which always are, their tie must be at least `pair_scale` / block
    length. (The published rule also wants a tie of at least the mean of either unit's ties, which a maximum always is.)
    Equal ties: the left partner. Raises ValueError for values out of range.
    """

    layers: int | float = 4
    """Mean over so many last layers (all, if there are fewer), or over this fraction of them."""
    pair_scale: float = 1.2
    is_matching: ClassVar[bool] = True

    def __post_init__(self) -> None:
        layer_count(self.layers, 1)
        if self.pair_scale < 0:
            raise ValueError(f"pair_scale is {self.pair_scale}; it must be 0 or more")

    @property
    def attention_layers(self) -> int | float:
        """See `Conflict`."""
        return self.layers

    def __call__(self, spans: Spans) -> Graph:
        """See `Conflict`. The block length is that of the row's window."""
        attention = attention_between(spans)
        tie = torch.maximum(attention, attention.mT)
        length = spans.length.clamp(min=1).to(tie.dtype)
        to_unit = tie @ spans.member_of.to(tie.dtype) / length[:, None, :]  # [batch, slots, units]
        to_unit = to_unit.masked_fill(~spans.used[:, :, None], -torch.inf)
        between = torch.full_like(to_unit, -torch.inf)
        between.scatter_reduce_(1, spans.unit[:, :, None].expand_as(to_unit), to_unit, "amax")
        between = torch.maximum(between, between.mT).masked_fill(~different(spans), -torch.inf)

        units = (spans.length > 0).sum(dim=1, keepdim=True)
        strongest, partner = between.max(dim=2).values, between.argmax(dim=2)  # argmax: the left one of equal ties
        number = torch.arange(partner.shape[1], device=partner.device)
        mutual = partner.gather(1, partner) == number
        block = spans.step.window.sum(dim=1, keepdim=True).to(tie.dtype)
        enough = (units > 2) | (strongest >= self.pair_scale / block)
        edge = mutual & enough & (strongest > -torch.inf)
        edges = torch.zeros_like(between, dtype=torch.bool).scatter_(2, partner[:, :, None], edge[:, :, None])
        return Graph(edges, strongest.clamp(min=0.0))


@dataclass(frozen=True)
class CrossProbability:
    """DepCap's graph: i and j conflict if log p_i(x_j) + log p_j(x_i) > `gamma`, x being the predicted tokens; units
    conflict if any of their members do. Such pairs write a word twice.

    With `strict=False` units that all reach `high` never conflict with each other. That is the paper's algorithm as
    printed, under a greedy solver by score: it commits every candidate of at least `high` unchecked, so two positions
    at .96 may both write the same token.
    """

    gamma: float = -16.0
    """Nats."""
    strict: bool = True
    high: float = 0.95
    """Probability; of no effect with `strict`."""
    attention_layers: ClassVar[None] = None
    is_matching: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.high <= 1:
            raise ValueError(f"high is {self.high}; it must lie in (0, 1]")
        if math.isnan(self.gamma):
            raise ValueError("gamma is NaN; it must be a number of nats")

    def __call__(self, spans: Spans) -> Graph:
        """See `Conflict`."""
        step, prediction = spans.step, spans.prediction
        token = step.predicted[prediction]
        says = step.log_probs[prediction[:, :, None], token[:, None, :]]
        between = spans.pair_max(says + says.mT, -torch.inf)
        edges = (between > self.gamma) & different(spans)
        if not self.strict:
            sure = spans.unit_score("min") >= math.log(self.high)
            edges = edges & ~(sure[:, :, None] & sure[:, None, :])
        return Graph(edges, edges.sum(dim=2).to(says.dtype))


@dataclass(frozen=True)
class ThresholdedAttention:
    """DAPD's graph: units conflict if the mean of the attention in both directions exceeds a threshold for any pair of
    their members. The threshold rises linearly from `low` to `high` with the fraction of the row that is decided (how
    it moves between its published ends is our reading).

    The influence of a unit is the sum of its members' attention to all others. Raises ValueError for values out of
    range.
    """

    low: float = 0.001
    high: float = 0.004
    layers: int | float = 0.3
    is_matching: ClassVar[bool] = False

    def __post_init__(self) -> None:
        layer_count(self.layers, 1)
        if not 0 <= self.low <= self.high:
            raise ValueError(f"low is {self.low} and high {self.high}; they must obey 0 <= low <= high")

    @property
    def attention_layers(self) -> int | float:
        """See `Conflict`."""
        return self.layers

    def __call__(self, spans: Spans) -> Graph:
        """See `Conflict`."""
        attention, state = attention_between(spans), spans.step.state
        tie = ((attention + attention.mT) / 2).masked_fill(spans.unit[:, :, None] == spans.unit[:, None, :], 0.0)
        done = 1 - state.masked.sum(dim=1) / state.editable.sum(dim=1)
        threshold = self.low + (self.high - self.low) * done
        edges = (spans.pair_max(tie, 0.0) > threshold[:, None, None]) & different(spans)
        return Graph(edges, spans.total(tie.sum(dim=2)))
