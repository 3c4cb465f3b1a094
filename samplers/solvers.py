"""Which units to keep so that no two of them conflict: independent sets of the graphs in `conflicts.py`.

`matching` is exact where no unit has two conflicts (CLAD). `Greedy` takes units by priority, as Welsh and Powell colour
a graph (DAPD, DepCap). `Exact` finds the heaviest independent set of a small graph by looking at all. Weight is the
length of a unit. Read next: `spans.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from mdlm.samplers.conflicts import Graph

if TYPE_CHECKING:
    from mdlm.samplers.spans import Spans

Solver = Callable[[Graph, "Spans"], Bool[Tensor, "batch units"]]

EXACT_UNITS = 16
"""`Exact` looks at 2^16 sets at most."""


def matching(graph: Graph, spans: Spans) -> Bool[Tensor, "batch units"]:
    """Every unit without a conflict, and of each pair the longer one; of equally long ones the left. For graphs in
    which no unit has two conflicts (`Conflict.is_matching`)."""
    edges, length = graph.edges, spans.length
    number = torch.arange(length.shape[1], device=length.device)
    longer = length[:, None, :] > length[:, :, None]
    left = (length[:, None, :] == length[:, :, None]) & (number[None, :] < number[:, None])
    return (length > 0) & ~(edges & (longer | left)).any(dim=2)


@dataclass(frozen=True)
class Greedy:
    """Units by descending priority, each unless it conflicts with one taken before; equal priorities from the left.

    Computed in rounds, all rows at once: a unit whose rivals that are still open all come after it is taken, theirs are
    dropped. A round settles at least the first open unit; a chain of conflicts in order of priority needs one per link.
    """

    order: Literal["score", "length", "influence"] = "score"
    """`score`: mean score. `length`: longest first, then score. `influence`: the graph's influence times exp(score),
    most tied first (DAPD)."""

    def __post_init__(self) -> None:
        if self.order not in ("score", "length", "influence"):
            raise ValueError(f"order is {self.order!r}; it must be 'score', 'length' or 'influence'")

    def __call__(self, graph: Graph, spans: Spans) -> Bool[Tensor, "batch units"]:
        """See `Solver`."""
        priority = spans.unit_score("mean")
        if self.order == "influence":
            priority = graph.influence * priority.exp()
        order = priority.argsort(dim=1, descending=True, stable=True)
        if self.order == "length":
            order = order.gather(1, spans.length.gather(1, order).argsort(dim=1, descending=True, stable=True))
        place = order.argsort(dim=1)
        rivals = graph.edges & (place[:, None, :] < place[:, :, None])  # those that come before
        open_ = spans.length > 0
        taken = torch.zeros_like(open_)
        while bool(open_.any()):
            now = open_ & ~(rivals & open_[:, None, :]).any(dim=2)
            taken = taken | now
            open_ = open_ & ~now & ~(graph.edges & now[:, None, :]).any(dim=2)
        return taken


@dataclass(frozen=True)
class Exact:
    """The independent set with most tokens; of equal ones that with the leftmost units. For rows in which at most
    `EXACT_UNITS` units have a conflict.

    Raises ValueError for a row with more, unless `beyond` is `greedy`: then such rows are solved by `Greedy("length")`.
    """

    beyond: Literal["error", "greedy"] = "error"

    def __post_init__(self) -> None:
        if self.beyond not in ("error", "greedy"):
            raise ValueError(f"beyond is {self.beyond!r}; it must be 'error' or 'greedy'")

    def __call__(self, graph: Graph, spans: Spans) -> Bool[Tensor, "batch units"]:
        """See `Solver`."""
        tied = graph.edges.any(dim=2)
        count = tied.sum(dim=1)
        small = count <= EXACT_UNITS
        if self.beyond == "error" and not bool(small.all()):
            raise ValueError(
                f"a step has {int(count.max())} units with conflicts, an exact solution is computed up to "
                f"{EXACT_UNITS}; take Exact(beyond='greedy'), Greedy() or smaller blocks"
            )
        nodes = int(torch.where(small, count, 0).max())
        keep = (spans.length > 0) & ~tied
        if nodes:
            first = (~tied).long().argsort(dim=1, stable=True)[:, :nodes]  # the tied ones, from the left
            edges = graph.edges.gather(1, first[:, :, None].expand(-1, -1, tied.shape[1]))
            edges = edges.gather(2, first[:, None, :].expand(-1, nodes, -1))
            best = heaviest_set(edges, spans.length.gather(1, first) * tied.gather(1, first))
            keep = keep.scatter(1, first, keep.gather(1, first) | (best & tied.gather(1, first)))
        if bool(small.all()):
            return keep
        return torch.where(small[:, None], keep, Greedy("length")(graph, spans))


def heaviest_set(
    edges: Bool[Tensor, "batch nodes nodes"], weight: Int64[Tensor, "batch nodes"]
) -> Bool[Tensor, "batch nodes"]:
    """The independent set of largest weight, by a table over all 2^nodes sets; ties: the leftmost nodes.

    A set is a number whose highest bit is the first node. The table grows by one node at a time, from the right: a set
    that holds the new node is independent if the rest is and touches none of its neighbours.
    """
    batch, nodes = weight.shape
    independent = torch.ones(batch, 1, dtype=torch.bool, device=weight.device)
    total = weight.new_zeros(batch, 1)
    bit = 1 << torch.arange(nodes - 1, -1, -1, device=weight.device)
    neighbours = (edges * bit).sum(dim=2)
    for node in range(nodes - 1, -1, -1):  # at most EXACT_UNITS times
        sets = torch.arange(independent.shape[1], device=weight.device)
        free = (sets & neighbours[:, node, None]) == 0
        independent = torch.cat([independent, independent & free], dim=1)
        total = torch.cat([total, total + weight[:, node, None]], dim=1)
    total = total.masked_fill(~independent, -1)
    best = total.shape[1] - 1 - total.flip(1).argmax(dim=1)  # the largest number of equal ones
    return (best[:, None] & bit) != 0
