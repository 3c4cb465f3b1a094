"""Bytes between islands: the few calls an exchange needs of a network, and messages that say what they are.

`Transport` is all that a process group, or a simulation in one process, has to offer. Every message is sealed with what
it is and a checksum: islands that have lost step with each other then fail loudly instead of averaging different
fragments. Read next: `exchange.py`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import UInt8
from torch import Tensor

Wire = UInt8[Tensor, " bytes"]
_SEAL = struct.Struct("<iiiiqI")
OVERHEAD = _SEAL.size
"""Bytes that the seal adds to every message."""


class Transport(Protocol):
    """Islands that can reach each other. Buffers are uint8 in CPU memory; sizes are known on both sides."""

    @property
    def island(self) -> int:
        """This island's number, from 0."""

    @property
    def islands(self) -> int:
        """Number of islands."""

    def all_to_all(self, parts: Sequence[Wire], sizes: Sequence[int]) -> list[Wire]:
        """parts[j] goes to island j; returns what each island i sent here, `sizes[i]` bytes."""

    def all_gather(self, part: Wire, sizes: Sequence[int]) -> list[Wire]:
        """`part` goes to every island; returns each island i's part, `sizes[i]` bytes."""

    def swap(self, part: Wire, peer: int) -> Wire:
        """Sends `part` to one island and returns what it sends here, as many bytes; the peer calls it too."""


@dataclass(frozen=True)
class Tag:
    """What a message is."""

    fragment: int
    round: int
    stage: int
    sender: int


def seal(payload: Wire, tag: Tag) -> Wire:
    """The payload behind its tag, length and checksum; in CPU memory."""
    payload = payload.cpu().contiguous()
    head = _SEAL.pack(tag.fragment, tag.round, tag.stage, tag.sender, len(payload), zlib.crc32(payload.numpy().data))
    return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), payload])


def unseal(message: Wire, tag: Tag) -> Wire:
    """The payload. Raises RuntimeError if it is another message than `tag` says, or is damaged."""
    fragment, number, stage, sender, size, checksum = _SEAL.unpack(message[:OVERHEAD].numpy().tobytes())
    payload = message[OVERHEAD:]
    came = Tag(fragment, number, stage, sender)
    if came != tag or size != len(payload):
        raise RuntimeError(
            f"islands out of step: waited for {tag} of {len(payload)} bytes, got {came} of {size}; "
            "check that all islands run the same configuration and resumed from the same step"
        )
    if zlib.crc32(payload.numpy().data) != checksum:
        raise RuntimeError(f"{tag} arrived damaged (checksum differs)")
    return payload


class Line:
    """A transport as one exchange sees it: seals and opens messages, numbers the stages, counts the bytes sent."""

    def __init__(self, transport: Transport, fragment: int, round_number: int) -> None:
        self.transport = transport
        self.island, self.islands = transport.island, transport.islands
        self.fragment, self.round = fragment, round_number
        self.stage = 0
        self.bytes_sent = 0

    def _next(self) -> list[Tag]:
        self.stage += 1
        return [Tag(self.fragment, self.round, self.stage, i) for i in range(self.islands)]

    def all_to_all(self, parts: Sequence[Wire], sizes: Sequence[int]) -> list[Wire]:
        """`Transport.all_to_all` of payloads."""
        tags = self._next()
        sealed = [seal(part, tags[self.island]) for part in parts]
        self.bytes_sent += sum(len(s) for j, s in enumerate(sealed) if j != self.island)
        came = self.transport.all_to_all(sealed, [OVERHEAD + size for size in sizes])
        return [unseal(message, tag) for message, tag in zip(came, tags, strict=True)]

    def all_gather(self, part: Wire, sizes: Sequence[int]) -> list[Wire]:
        """`Transport.all_gather` of payloads."""
        tags = self._next()
        sealed = seal(part, tags[self.island])
        self.bytes_sent += len(sealed) * (self.islands - 1)
        came = self.transport.all_gather(sealed, [OVERHEAD + size for size in sizes])
        return [unseal(message, tag) for message, tag in zip(came, tags, strict=True)]

    def swap(self, part: Wire, peer: int) -> Wire:
        """`Transport.swap` of payloads."""
        tags = self._next()
        sealed = seal(part, tags[self.island])
        self.bytes_sent += len(sealed)
        return unseal(self.transport.swap(sealed, peer), tags[peer])
