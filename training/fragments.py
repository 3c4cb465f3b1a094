"""Which parameter is exchanged at which step: the schedule and the layout of the low-communication outer step.

Both are pure functions of what every island knows (the step number, the model's parameter names and sizes), so that
islands never have to agree on them at run time: a joiner that counts from another step, or walks the fragments in
another order, would otherwise deadlock the exchange. Read next: `outer.py`, which acts on them.

Source: Streaming DiLoCo (2501.18512), section 3.1: fragments of layers, strided, their exchanges evenly staggered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float32
from torch import Tensor
from torch.distributed.tensor import DTensor

Pattern = Literal["strided", "balanced"]


@dataclass(frozen=True)
class Schedule:
    """When each fragment is exchanged. Steps count *attempted* optimizer steps; `step` = n is the moment after n.

    Fragment f of P starts at start_step + (f + 1) * every // P and every `every` steps from there, so the last one
    starts at multiples of `every`; the result lands `tau` steps later.
    """

    every: int
    """Optimizer steps between two exchanges of the same parameter (H)."""
    fragments: int = 1
    """Number of fragments (P), at most `every`."""
    tau: int = 0
    """Steps between the start of an exchange and the use of its result, at most `every`."""
    start_step: int = 0
    """Length of the dense phase, in which every step is shared by all islands and no outer step is made."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the number that is out of range."""
        if self.every < 1:
            raise ValueError(f"every is {self.every}; an exchange takes place every 1 or more steps")
        if not 1 <= self.fragments <= self.every:
            raise ValueError(f"fragments is {self.fragments}; it must lie in [1, every = {self.every}]")
        if not 0 <= self.tau <= self.every:
            raise ValueError(f"tau is {self.tau}; it must lie in [0, every = {self.every}]")
        if self.start_step < 0:
            raise ValueError(f"start_step is {self.start_step}; it must be 0 or more")

    def _age(self, fragment: int, step: int) -> int:
        """Steps since the first start of the fragment; negative before it."""
        return step - self.start_step - (fragment + 1) * self.every // self.fragments

    def dense(self, step: int) -> bool:
        """Whether the optimizer step that follows moment `step` belongs to the dense phase."""
        return step < self.start_step

    def starts(self, step: int) -> tuple[int, ...]:
        """Fragments whose exchange starts at moment `step`, in the order in which they must be sent."""
        return tuple(
            f for f in range(self.fragments) if self._age(f, step) >= 0 and self._age(f, step) % self.every == 0
        )

    def finishes(self, step: int) -> tuple[int, ...]:
        """Fragments whose result is used at moment `step`."""
        return self.starts(step - self.tau)

    def round(self, fragment: int, step: int) -> int:
        """Number of the exchange of that fragment (from 0) that started last at or before `step`; -1: none yet."""
        return max(-1, self._age(fragment, step) // self.every)


@dataclass(frozen=True)
class Piece:
    """One parameter's place in the flat buffer of its fragment (under sharding: of this process's shard)."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    embedding: bool
    """An embedding table (or a head tied to one): radial merging leaves these to the plain mean."""

    def of(self, flat: Tensor) -> Tensor:
        """The parameter's part of the flat buffer, in its own shape; shares memory."""
        return flat[self.start : self.stop].view(self.shape)


Fragment = tuple[Piece, ...]


def local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor, sharing its memory; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def unit_of(name: str) -> tuple[str, bool]:
    """The unit a parameter belongs to, and whether it is a layer.

    A layer is everything below the first number in the dotted name ("model.layers.3.mlp.up.weight" ->
    "model.layers.3"); any other parameter is a unit of its own.
    """
    found = re.match(r"(?:.*?\.)?\d+(?=\.|$)", name)
    return (found.group(0), True) if found else (name, False)


def _strided(layers: Sequence[str], rest: Sequence[str], sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Layer i to fragment i mod (P - 1); embeddings, head and final norm form the last fragment."""
    groups = count - 1 if rest and layers and count > 1 else count
    owner = {unit: i % groups for i, unit in enumerate(layers)}
    return owner | {unit: (count - 1 if layers else i % count) for i, unit in enumerate(rest)}


def _balanced(layers: Sequence[str], rest: Sequence[str], sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Largest unit first, each into the fragment that is smallest so far (as in Decoupled DiLoCo, 2604.21428)."""
    load = [0] * count
    owner = {}
    for unit in sorted([*layers, *rest], key=lambda u: -sizes[u]):
        owner[unit] = load.index(min(load))
        load[owner[unit]] += sizes[unit]
    return owner


Assign = Callable[[Sequence[str], Sequence[str], Mapping[str, int], int], dict[str, int]]
PATTERNS: dict[str, Assign] = {"strided": _strided, "balanced": _balanced}
"""Name -> function(layers, other units, sizes, number of fragments) -> unit -> fragment."""


def layout(
    parameters: Mapping[str, Tensor], count: int, pattern: Pattern = "strided", embeddings: frozenset[str] = frozenset()
) -> list[Fragment]:
    """The parameters cut into `count` fragments, each parameter in exactly one; the same on every process.

    Give each tied parameter once. Sharded parameters are balanced by their whole size, so that all shards agree.

    Args:
        parameters: name -> parameter (a `DTensor` where sharded).
        count: number of fragments (P).
        pattern: `strided` over layers or `balanced` by size.
        embeddings: names of the embedding tables.

    Raises:
        ValueError: fewer layers and other parameters than fragments.
    """
    units = {name: unit_of(name) for name in parameters}
    layers = list(dict.fromkeys(unit for unit, is_layer in units.values() if is_layer))
    rest = list(dict.fromkeys(unit for unit, is_layer in units.values() if not is_layer))
    sizes = dict.fromkeys([*layers, *rest], 0)
    for name, parameter in parameters.items():
        sizes[units[name][0]] += parameter.numel()
    if count == 1:
        owner = dict.fromkeys(sizes, 0)
    else:
        owner = PATTERNS[pattern](layers, rest, sizes, count)
    if len(set(owner.values())) != count:
        most = len(layers) + 1 if pattern == "strided" and layers and rest else len(sizes)
        raise ValueError(
            f"{count} fragments asked for, but the model ({len(layers)} layers, {len(rest)} other parameters) "
            f"gives at most {most} with pattern {pattern!r}; lower the number of fragments"
        )
    fragments: list[list[Piece]] = [[] for _ in range(count)]
    filled = [0] * count
    for name, parameter in parameters.items():
        part, f = local(parameter), owner[units[name][0]]
        piece = Piece(name, tuple(part.shape), filled[f], filled[f] + part.numel(), name in embeddings)
        fragments[f].append(piece)
        filled[f] = piece.stop
    return [tuple(pieces) for pieces in fragments]


def length(fragment: Fragment) -> int:
    """Number of values in the fragment's flat buffer."""
    return fragment[-1].stop


@torch.no_grad()
def gather(fragment: Fragment, parameters: Mapping[str, Tensor], device: torch.device) -> Float32[Tensor, " values"]:
    """The fragment's parameters as one new flat float32 buffer on `device`."""
    flat = torch.empty(length(fragment), dtype=torch.float32, device=device)
    for piece in fragment:
        piece.of(flat).copy_(local(parameters[piece.name].detach()))
    return flat


@torch.no_grad()
def scatter(fragment: Fragment, flat: Float32[Tensor, " values"], parameters: Mapping[str, Tensor]) -> None:
    """Writes a flat buffer into the parameters, in place: their memory is never replaced, so views of it stay valid."""
    for piece in fragment:
        local(parameters[piece.name].detach()).copy_(piece.of(flat))
