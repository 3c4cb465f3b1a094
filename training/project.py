"""Projections: fewer values that mean the same on all islands, so that their mean can be taken before decoding.

A codec compresses each island's message on its own; the mean of such messages is as long as the whole buffer. Here all
islands share a basis (the factors of a matrix, or the positions of the largest values), and only coordinates are
averaged: the traffic does not grow with the number of islands, and the coordinates may go through any codec.
Functions are pure: memories come in and go out. Read next: `exchange.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from mdlm.training.compress import Plain, TopK, pack, packed_bytes, unpack
from mdlm.training.fragments import Fragment
from mdlm.training.outer_config import CompressConfig

GROWTH = 1.25
"""Head room of the adaptive rank over the effective rank: without it the rank could never grow again."""


class Peers(Protocol):
    """What a projection needs of the other islands."""

    @property
    def island(self) -> int:
        """This island's number."""

    @property
    def islands(self) -> int:
        """How many there are."""

    def mean(self, values: Float32[Tensor, " values"]) -> tuple[Tensor, Tensor]:
        """The weighted mean of the islands' buffers, the same on all; and what this island's own message decodes to."""

    def tell(self, wire: UInt8[Tensor, " bytes"], teller: int, size: int) -> UInt8[Tensor, " bytes"]:
        """The teller's message of `size` bytes, on every island."""


Projected = tuple[Tensor, Tensor, dict[str, Any]]
"""The merged buffer; the part of this island's buffer that it holds; the memory for the next round."""


def effective_rank(factor: Float32[Tensor, "columns rank"]) -> float:
    """exp of the entropy of the normalised singular values (Roy & Vetterli, 2007); 0 for zeros, at most `rank`."""
    values = torch.linalg.svdvals(factor.to(torch.float64))
    if float(values.sum()) == 0.0:
        return 0.0
    share = values / values.sum()
    return math.exp(float(-(share * share.clamp(min=1e-300).log()).sum()))


@dataclass(frozen=True)
class LowRank:
    """Factors of each matrix: PowerSGD (1905.13727) on pseudo-gradients, with DiLoCoX's adaptive rank (2506.21263).

    With Q the basis left by the last round and M_i island i's matrix: P = orthonormalised mean of M_i Q, then
    R = mean of M_i^T P; merged P R^T; of M_i the part P P^T M_i was sent. Tensors for which this would not be shorter
    go uncompressed with the first message. Shards of a matrix are factored apart.

    The factorisation is computed on every island: bit-equal results need islands with the same linear-algebra library.
    """

    rank: int
    adaptive: bool
    window: int

    def __call__(
        self,
        values: Float32[Tensor, " values"],
        fragment: Fragment,
        round_number: int,
        memory: Mapping[str, Any] | None,
        peers: Peers,
    ) -> Projected:
        """One exchange. `memory`: "bases" (tensor number -> basis), "ranks" (tensor number -> last effective ranks)."""
        bases = {} if memory is None else memory["bases"]
        ranks = {} if memory is None else memory["ranks"]
        plan = {i: self._rank(piece.shape, ranks.get(i, [])) for i, piece in enumerate(fragment)}
        matrices = {i: self._matrix(fragment[i].of(values)) for i, rank in plan.items() if rank}
        first = [
            matrices[i] @ self._basis(bases.get(i), matrices[i].shape[1], plan[i], (round_number, i), values.device)
            if i in matrices
            else piece.of(values)
            for i, piece in enumerate(fragment)
        ]
        left, left_sent = (self._split(x, first) for x in peers.mean(torch.cat([x.reshape(-1) for x in first])))
        factors = {i: torch.linalg.qr(left[i]).Q for i in matrices}
        second = [matrices[i].T @ factors[i] for i in matrices]
        flat = torch.cat([x.reshape(-1) for x in second]) if second else values[:0]
        right, right_sent = (dict(zip(matrices, self._split(x, second))) for x in peers.mean(flat))
        merged, sent = torch.empty_like(values), torch.empty_like(values)
        for i, piece in enumerate(fragment):
            for whole, raw, factor in ((merged, left, right), (sent, left_sent, right_sent)):
                part = factors[i] @ factor[i].T if i in matrices else raw[i]
                piece.of(whole).copy_(part.view(piece.shape))
        spectra = {i: [*ranks.get(i, []), effective_rank(right[i])][-self.window :] for i in matrices}
        return merged, sent, {"bases": right, "ranks": spectra}

    @staticmethod
    def _matrix(tensor: Tensor) -> Float32[Tensor, "rows columns"]:
        return tensor.reshape(tensor.shape[0], -1)

    @staticmethod
    def _split(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
        return [part.view(x.shape) for part, x in zip(flat.split([x.numel() for x in like]), like)]

    def _rank(self, shape: tuple[int, ...], history: list[float]) -> int:
        """Rank for a tensor of that shape; 0: send it as it is."""
        rows = shape[0] if len(shape) > 1 else 0
        columns = math.prod(shape[1:])
        rank = min(self.rank, rows, columns)
        if self.adaptive and history:
            rank = min(rank, max(1, math.ceil(GROWTH * sum(history) / len(history))))
        return rank if rank * (rows + columns) < rows * columns else 0

    @staticmethod
    def _basis(
        old: Tensor | None, columns: int, rank: int, key: tuple[int, int], device: torch.device
    ) -> Float32[Tensor, "columns rank"]:
        """The last round's directions, longest first, and random ones where more are wanted; unit length."""
        generator = torch.Generator().manual_seed(key[0] * 1_000_003 + key[1])
        fresh = torch.randn(columns, rank, generator=generator).to(device)
        if old is None or not bool(old.any()):
            return fresh
        directions = torch.linalg.svd(old, full_matrices=False).U[:, :rank]
        return torch.cat([directions, fresh[:, directions.shape[1] :] / math.sqrt(columns)], dim=1)


@dataclass(frozen=True)
class CyclicTopK:
    """Everybody sends the values at the positions where one island, in turn, has its largest (ScaleCom's CLT-k).

    Source: Chen et al., ScaleCom (NeurIPS 2020). Meant to be used with error feedback `loco`, its low-pass filter.
    """

    density: float

    def __call__(
        self,
        values: Float32[Tensor, " values"],
        fragment: Fragment,
        round_number: int,
        memory: Mapping[str, Any] | None,
        peers: Peers,
    ) -> Projected:
        """One exchange; there is no memory."""
        sparse = TopK(self.density, Plain(torch.float32))
        kept = sparse.kept(len(values))
        leader = round_number % peers.islands
        own = pack(sparse.select(values) % sparse.granule, 12)
        told = peers.tell(own if peers.island == leader else own[:0], leader, packed_bytes(kept, 12))
        where = sparse.positions(unpack(told, kept, 12).to(values.device), len(values))
        mean, sent = peers.mean(values[where])
        zeros = torch.zeros_like(values)
        return zeros.index_copy(0, where, mean), zeros.index_copy(0, where, sent), {}


PROJECTIONS: dict[str, Callable[[CompressConfig], LowRank | CyclicTopK]] = {
    "low_rank": lambda c: LowRank(c.rank, c.adaptive, c.window),
    "cyclic_topk": lambda c: CyclicTopK(c.density),
}
"""`--outer.compress.projection` -> function(options) -> projection."""


def projection(c: CompressConfig) -> LowRank | CyclicTopK | None:
    """As the options say; None: values go to the codec as they are."""
    return None if c.projection == "none" else PROJECTIONS[c.projection](c)
