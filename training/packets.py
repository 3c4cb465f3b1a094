"""Packets on a TCP connection: a few JSON-able facts and a buffer of bytes, with a checksum.

Not encrypted and not authenticated, like gloo: for private networks only. Read next: `server.py`.
"""

from __future__ import annotations

import json
import socket
import struct
import zlib
from typing import Any

import torch
from torch import Tensor

from mdlm.training.wire import Wire

_HEAD = struct.Struct("<4sIQI")
_MAGIC = b"mdlm"
_LONGEST_FACTS = 2**24


class PacketError(RuntimeError):
    """What arrived is not a packet of ours, or is damaged."""


def send(connection: socket.socket, facts: dict[str, Any], payload: Wire | None = None) -> int:
    """Sends one packet; returns its length in bytes. Raises OSError where the connection is gone."""
    text = json.dumps(facts).encode()
    body = memoryview(b"") if payload is None else payload.cpu().contiguous().numpy().data
    checksum = zlib.crc32(body, zlib.crc32(text))
    connection.sendall(_HEAD.pack(_MAGIC, len(text), len(body), checksum) + text)
    connection.sendall(body)
    return _HEAD.size + len(text) + len(body)


def receive(connection: socket.socket, longest: int = 2**40) -> tuple[dict[str, Any], Wire]:
    """The next packet.

    Args:
        connection: a connected socket.
        longest: bytes of payload that are accepted.

    Raises:
        PacketError: not a packet, or damaged, or too long.
        OSError: the connection is gone, or its time-out is over.
    """
    magic, text_size, size, checksum = _HEAD.unpack(_exactly(connection, _HEAD.size).numpy().tobytes())
    if magic != _MAGIC or text_size > _LONGEST_FACTS or size > longest:
        raise PacketError("something that does not speak this protocol is at the other end of the connection")
    text = _exactly(connection, text_size).numpy().tobytes()
    body = _exactly(connection, size)
    if zlib.crc32(body.numpy().data, zlib.crc32(text)) != checksum:
        raise PacketError("a packet arrived damaged (checksum differs)")
    return json.loads(text), body


def _exactly(connection: socket.socket, count: int) -> Wire:
    buffer = torch.empty(count, dtype=torch.uint8)
    view, filled = buffer.numpy().data, 0
    while filled < count:
        got = connection.recv_into(view[filled:])
        if got == 0:
            raise ConnectionResetError("the other end closed the connection")
        filled += got
    return buffer


def connect(address: tuple[str, int], timeout: float | None) -> socket.socket:
    """A connection that notices within some 10 s that the other machine has vanished."""
    connection = socket.create_connection(address, timeout=timeout)
    return tuned(connection)


def tuned(connection: socket.socket) -> socket.socket:
    """No delay for small packets; keep-alive probes."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def parse_address(text: str, flag: str) -> tuple[str, int]:
    """host:port -> (host, port). Raises ValueError naming the flag."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"--{flag} is {text!r}; it must be host:port")
    return host, int(port)


def floats(tensor: Tensor) -> Wire:
    """Float32 values as bytes."""
    return tensor.to(torch.float32).contiguous().view(-1).view(torch.uint8)
