"""Codecs: flat float32 values to packed bytes and back.

A codec takes any number of values (none, one) of any magnitude, and its message has a length known beforehand, so
nobody has to announce sizes. Values are coded in blocks with their own scale, and a buffer cut at multiples of
`granule` gives the same values as a whole one. Values must be finite. Rounding is to nearest: deterministic, hence not
unbiased; `feedback.py` is what keeps errors from adding up. Read next: `feedback.py`, `project.py`, `exchange.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from mdlm.training.outer_config import CompressConfig


class Codec(Protocol):
    """Flat float32 values <-> bytes."""

    @property
    def granule(self) -> int:
        """Buffers may be cut at multiples of this many values without changing any code."""

    def wire_bytes(self, count: int) -> int:
        """Length of the message for `count` values."""

    def encode(self, values: Float32[Tensor, " values"]) -> UInt8[Tensor, " bytes"]:
        """The message; values are left as they are."""

    def decode(self, wire: UInt8[Tensor, " bytes"], count: int) -> Float32[Tensor, " values"]:
        """The values the message stands for, in a new buffer."""


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that `count` codes of `bits` bits take."""
    return (count * bits + 7) // 8


def pack(codes: Int64[Tensor, " codes"], bits: int) -> UInt8[Tensor, " bytes"]:
    """Codes in [0, 2^bits) side by side, lowest bits first; bits in [1, 8], or even and at most 16."""
    group = 8 if bits <= 8 else 4
    padded = torch.nn.functional.pad(codes, (0, -len(codes) % group)).view(-1, group)
    shifts = torch.arange(group, device=codes.device) * bits
    words = (padded << shifts).sum(1)  # no two codes share a bit
    wire = words.view(torch.uint8).view(-1, 8)[:, : group * bits // 8]
    return wire.reshape(-1)[: packed_bytes(len(codes), bits)]


def unpack(wire: UInt8[Tensor, " bytes"], count: int, bits: int) -> Int64[Tensor, " codes"]:
    """The `count` codes that `pack` wrote."""
    group = 8 if bits <= 8 else 4
    width = group * bits // 8
    groups = -(-count // group)
    full = torch.zeros(groups, 8, dtype=torch.uint8, device=wire.device)
    full[:, :width] = torch.nn.functional.pad(wire, (0, groups * width - len(wire))).view(groups, width)
    shifts = torch.arange(group, device=wire.device) * bits
    return ((full.view(torch.int64) >> shifts) & (2**bits - 1)).reshape(-1)[:count]


def _bytes(values: Tensor) -> UInt8[Tensor, " bytes"]:
    return values.contiguous().view(-1).view(torch.uint8)


def _as(wire: UInt8[Tensor, " bytes"], dtype: torch.dtype) -> Tensor:
    return wire.clone().view(dtype)  # a slice may begin at an address that the wider type does not allow


def _blocks(values: Float32[Tensor, " values"], block: int) -> Float32[Tensor, "blocks block"]:
    return torch.nn.functional.pad(values, (0, -len(values) % block)).view(-1, block)


@dataclass(frozen=True)
class Plain:
    """A narrower dtype, or float32 itself. Values beyond its range become its largest."""

    dtype: torch.dtype
    granule: int = 1

    def wire_bytes(self, count: int) -> int:
        """Item size times count."""
        return count * self.dtype.itemsize

    def encode(self, values: Float32[Tensor, " values"]) -> UInt8[Tensor, " bytes"]:
        """Rounded to nearest even."""
        largest = torch.finfo(self.dtype).max
        return _bytes(values.clamp(-largest, largest).to(self.dtype))

    def decode(self, wire: UInt8[Tensor, " bytes"], count: int) -> Float32[Tensor, " values"]:
        """Exact."""
        return _as(wire, self.dtype).to(torch.float32)


@dataclass(frozen=True)
class Scaled:
    """Blocks of values divided by their largest magnitude, which is sent in float32; what is left lies in [-1, 1].

    Subclasses say how numbers in [-1, 1] are written: `_codes` and `_numbers`, `bits` per value.
    """

    bits: int
    block: int

    @property
    def granule(self) -> int:
        """One block."""
        return self.block

    def wire_bytes(self, count: int) -> int:
        """Codes, and one float32 scale per block."""
        return packed_bytes(count, self.bits) + 4 * -(-count // self.block)

    def encode(self, values: Float32[Tensor, " values"]) -> UInt8[Tensor, " bytes"]:
        """Scales, then packed codes."""
        blocks = _blocks(values, self.block)
        scale = blocks.abs().amax(1, keepdim=True) if len(values) else blocks.new_zeros(0, 1)
        unit = torch.where(scale > 0, blocks / scale, 0.0)
        return torch.cat([_bytes(scale), pack(self._codes(unit).view(-1)[: len(values)], self.bits)])

    def decode(self, wire: UInt8[Tensor, " bytes"], count: int) -> Float32[Tensor, " values"]:
        """Code times scale."""
        blocks = -(-count // self.block)
        scale = _as(wire[: 4 * blocks], torch.float32)
        numbers = self._numbers(unpack(wire[4 * blocks :], count, self.bits))
        return (_blocks(numbers, self.block) * scale[:, None]).view(-1)[:count].contiguous()

    def _codes(self, unit: Float32[Tensor, "blocks block"]) -> Int64[Tensor, "blocks block"]:
        raise NotImplementedError

    def _numbers(self, codes: Int64[Tensor, " codes"]) -> Float32[Tensor, " codes"]:
        raise NotImplementedError


class Uniform(Scaled):
    """Evenly spaced levels, zero among them: error at most half a level, scale / (2^bits - 2)."""

    def _codes(self, unit: Float32[Tensor, "blocks block"]) -> Int64[Tensor, "blocks block"]:
        top = 2 ** (self.bits - 1) - 1
        return (unit * top).round().to(torch.int64) + top

    def _numbers(self, codes: Int64[Tensor, " codes"]) -> Float32[Tensor, " codes"]:
        top = 2 ** (self.bits - 1) - 1
        return (codes - top).to(torch.float32) / top


class Exponent(Scaled):
    """fp4 E3M0: a sign and a power of two, scale times {0, 2^-6, ..., 1/2, 1} (Streaming DiLoCo, 2501.18512).

    Rounded to the nearest value: the relative error is at most 1/3, below 2^-7 of the block's largest all of it.
    """

    def _codes(self, unit: Float32[Tensor, "blocks block"]) -> Int64[Tensor, "blocks block"]:
        mantissa, exponent = torch.frexp(unit.abs())  # unit = mantissa 2^exponent, mantissa in [1/2, 1)
        power = exponent.to(torch.int64) - 1 + (mantissa >= 0.75)  # 3/4 is halfway between 1/2 and 1
        code = torch.where(unit.abs() >= 2.0**-7, (power + 7).clamp(1, 7), 0)
        return code + 8 * (unit < 0)

    def _numbers(self, codes: Int64[Tensor, " codes"]) -> Float32[Tensor, " codes"]:
        code = codes & 7
        magnitude = torch.where(code > 0, torch.exp2((code - 7).to(torch.float32)), 0.0)
        return torch.where(codes >= 8, -magnitude, magnitude)


class Half(Scaled):
    """fp16 of the scaled values: fp16's own range would overflow at 65504."""

    def _codes(self, unit: Float32[Tensor, "blocks block"]) -> Int64[Tensor, "blocks block"]:
        return unit.to(torch.float16).view(torch.int16).to(torch.int64) & 0xFFFF

    def _numbers(self, codes: Int64[Tensor, " codes"]) -> Float32[Tensor, " codes"]:
        return codes.to(torch.int16).view(torch.float16).to(torch.float32)


@dataclass(frozen=True)
class CodeBook:
    """Statistical quantisation: equal bins over mean +- 6 standard deviations, each decoded as the mean of its values.

    As in hivemind's uniform 8-bit codec and MuLoCo (2505.23725). The bin means are sent with every block, so the sum of
    a block is kept, and the squared error never exceeds the squared values.
    """

    bits: int

    @property
    def granule(self) -> int:
        """One block: long enough that the table costs 1/8 bit per value."""
        return 256 * 2**self.bits

    def wire_bytes(self, count: int) -> int:
        """Codes, and a table of 2^bits float32 means per block."""
        return packed_bytes(count, self.bits) + 4 * 2**self.bits * -(-count // self.granule)

    def encode(self, values: Float32[Tensor, " values"]) -> UInt8[Tensor, " bytes"]:
        """Tables, then packed codes."""
        levels = 2**self.bits
        rows = -(-len(values) // self.granule)
        row = torch.arange(len(values), device=values.device) // self.granule
        x = values.to(torch.float64)

        def total(of: Tensor, key: Tensor, size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float64, device=values.device).index_add_(0, key, of)

        count = total(torch.ones_like(x), row, rows)
        centre = total(x, row, rows) / count
        spread = (total((x - centre[row]) ** 2, row, rows) / count).sqrt()
        width = torch.where(spread > 0, 12 * spread / levels, 1.0)
        codes = ((x - centre[row]) / width[row]).floor().to(torch.int64).add_(levels // 2).clamp_(0, levels - 1)
        key = row * levels + codes
        filled = total(torch.ones_like(x), key, rows * levels)
        table = total(x, key, rows * levels) / filled.clamp(min=1)
        return torch.cat([_bytes(table.to(torch.float32)), pack(codes, self.bits)])

    def decode(self, wire: UInt8[Tensor, " bytes"], count: int) -> Float32[Tensor, " values"]:
        """Each code's entry in its block's table."""
        levels = 2**self.bits
        size = 4 * levels * -(-count // self.granule)
        table = _as(wire[:size], torch.float32)
        row = torch.arange(count, device=wire.device) // self.granule
        return table[row * levels + unpack(wire[size:], count, self.bits)]


@dataclass(frozen=True)
class TopK:
    """Per block of 4096 values the `density` largest magnitudes, at least one, each with an index of 12 bits.

    SparseLoCo (2508.15706) keeps 64 of 4096. What is kept is written by another codec, in its own blocks: of a buffer
    cut at multiples of `granule` the same values are kept, but they may round differently.
    """

    density: float
    values: Codec
    granule: int = 4096

    def kept(self, count: int) -> int:
        """Number of values kept of `count`."""
        full, rest = divmod(count, self.granule)
        return full * self._of(self.granule) + self._of(rest)

    def _of(self, block: int) -> int:
        return min(block, max(1, math.ceil(self.density * block))) if block else 0

    def wire_bytes(self, count: int) -> int:
        """Indices and values."""
        kept = self.kept(count)
        return packed_bytes(kept, 12) + self.values.wire_bytes(kept)

    def select(self, values: Float32[Tensor, " values"]) -> Int64[Tensor, " kept"]:
        """Positions in the whole buffer of what is kept, ascending."""
        full = len(values) // self.granule * self.granule
        parts = []
        for start, stop in ((0, full), (full, len(values))):
            if stop > start:
                blocks = values[start:stop].abs().view(-1, min(self.granule, stop - start))
                best = blocks.topk(self._of(blocks.shape[1]), dim=1, sorted=False).indices.sort(dim=1).values
                offset = start + torch.arange(len(blocks), device=values.device)[:, None] * blocks.shape[1]
                parts.append((best + offset).view(-1))
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=values.device)

    def positions(self, codes: Int64[Tensor, " kept"], count: int) -> Int64[Tensor, " kept"]:
        """Positions in the whole buffer from indices inside the blocks."""
        block = torch.arange(len(codes), device=codes.device) // self._of(self.granule)
        return codes + block.clamp(max=max(0, (count - 1) // self.granule)) * self.granule

    def encode(self, values: Float32[Tensor, " values"]) -> UInt8[Tensor, " bytes"]:
        """Indices, then values."""
        where = self.select(values)
        return torch.cat([pack(where % self.granule, 12), self.values.encode(values[where])])

    def decode(self, wire: UInt8[Tensor, " bytes"], count: int) -> Float32[Tensor, " values"]:
        """Zero where nothing was kept."""
        kept = self.kept(count)
        cut = packed_bytes(kept, 12)
        where = self.positions(unpack(wire[:cut], kept, 12), count)
        return torch.zeros(count, device=wire.device).index_copy_(0, where, self.values.decode(wire[cut:], kept))


@dataclass(frozen=True)
class Sliced:
    """Another codec, slice by slice, so that its working memory does not grow with the buffer."""

    inner: Codec
    slice_blocks: int

    @property
    def granule(self) -> int:
        """The other codec's."""
        return self.inner.granule

    def _slices(self, count: int) -> list[int]:
        longest = self.granule * self.slice_blocks
        return [longest] * (count // longest) + ([count % longest] if count % longest else [])

    def wire_bytes(self, count: int) -> int:
        """The sum over slices."""
        return sum(map(self.inner.wire_bytes, self._slices(count)))

    def encode(self, values: Float32[Tensor, " values"]) -> UInt8[Tensor, " bytes"]:
        """The slices' messages, one after the other."""
        parts = [self.inner.encode(part) for part in values.split(self._slices(len(values)))]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8, device=values.device)

    def decode(self, wire: UInt8[Tensor, " bytes"], count: int) -> Float32[Tensor, " values"]:
        """The slices' values, one after the other."""
        slices = self._slices(count)
        wires = wire.split([self.inner.wire_bytes(n) for n in slices])
        parts = [self.inner.decode(part, n) for part, n in zip(wires, slices)]
        return torch.cat(parts) if parts else torch.zeros(0, device=wire.device)


SLICE = 2**24
"""Values per slice, about: some 0.3 GB of working memory."""


def codec(name: str, c: CompressConfig) -> Codec:
    """The codec called `name`, with the options of `c`."""
    simple: dict[str, Codec] = {
        "fp32": Plain(torch.float32),
        "fp16": Half(16, 4096),
        "bf16": Plain(torch.bfloat16),
        "int8": Uniform(8, 128),
        "int4": Uniform(4, 128),
        "fp4": Exponent(4, 128),
        "codebook": CodeBook(c.bits),
    }
    chosen = TopK(c.density, simple[c.values]) if name == "topk" else simple[name]
    return Sliced(chosen, max(1, SLICE // chosen.granule))
