"""Frames and trees on a connection between ranks.

A frame is a length in 8 bytes, and a JSON text of that length. A tree is a frame with its text, then the elements of
its tensors in the order of memory, sent from the tensors' own memory and received into it. Nothing is pickled. The
time-out of a connection limits how long its peer may make no progress.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch

from ddp_zero.core.comm.requests import Frame
from ddp_zero.core.state.device_reads import bytes_of
from ddp_zero.values.tree import Flat, Tree, allocate, rebuild, specs_in

_LENGTH = struct.Struct("!Q")
_MOST_FRAME_BYTES = 1 << 30
MOST_REQUEST_BYTES = 1 << 16
"""Maximum length of a frame that holds a request."""
_CHUNK_BYTES = 4 << 20
_SMALL_BYTES = 64 << 10  # of parts that travel together


class Connection(Protocol):
    """A socket, or a `core.comm.requests.Connection`. Errors are OSError."""

    def sendall(self, memory: memoryview, /) -> None: ...

    def recv_into(self, memory: memoryview, /) -> int: ...


def send_frame(connection: Connection, frame: Mapping[str, Any]) -> None:
    """Send one frame. Raises OSError if the peer is gone or makes no progress."""
    _send_joined(connection, [memoryview(encode_frame(frame))])


def send_tree(connection: Connection, frame: Mapping[str, Any], tree: Flat) -> None:
    """Send a frame, with the tree's text added as ``"tree"``, and the elements of its tensors.

    Raises OSError if the peer makes no progress.
    """
    text, tensors = tree
    head = encode_frame({**frame, "tree": text})
    _send_joined(connection, chain([memoryview(head)], *map(bytes_of, tensors)))


def receive_frame(connection: Connection, max_bytes: int = _MOST_FRAME_BYTES) -> Frame:
    """Receive one frame; takes memory only as its bytes arrive.

    Raises EOFError or OSError if the peer is gone, ValueError if the bytes are no frame or more than ``max_bytes``.
    """
    head = bytearray(_LENGTH.size)
    receive_into(connection, memoryview(head))
    (length,) = _LENGTH.unpack(head)
    if length > max_bytes:
        raise ValueError(f"Expected a frame of at most {max_bytes} bytes, got {length}.")
    body = bytearray()
    while missing := length - len(body):
        piece = bytearray(min(missing, _CHUNK_BYTES))
        receive_into(connection, memoryview(piece))
        body += piece
    return decode_frame(bytes(body))


def receive_tree(connection: Connection, frame: Frame, device: torch.device) -> Tree:
    """Receive a tree from `send_tree`; accelerator tensors to ``device``, the rest to the CPU."""
    text = str(frame["tree"])
    specs = specs_in(text)
    tensors, memories = allocate(specs)
    _receive_joined(connection, memories)
    kinds = [spec.device_type for spec in specs]
    arrived = [one if kind == "cpu" else one.to(device) for one, kind in zip(tensors, kinds, strict=True)]
    return rebuild(text, arrived)


def encode_frame(frame: Mapping[str, Any]) -> bytes:
    """The frame as bytes, with its length."""
    body = json.dumps(frame).encode()
    return _LENGTH.pack(len(body)) + body


def decode_frame(body: bytes) -> Frame:
    """The frame in these bytes, which do not include the length. Raises ValueError unless they are JSON of a dict."""
    try:
        frame = json.loads(body)
    except RecursionError as error:
        raise ValueError(f"Expected a frame, got JSON that is too deep: {error}") from error
    if not isinstance(frame, dict):
        raise ValueError(f"Expected a frame that holds a dict, got {type(frame).__name__}.")
    return frame


def receive_into(connection: Connection, memory: memoryview) -> None:
    """Fill memory from a connection. Raises EOFError if the peer closes it early."""
    while memory:
        received = connection.recv_into(memory)
        if not received:
            raise EOFError(f"Expected {len(memory)} more bytes, got the end of the connection")
        memory = memory[received:]


def _send_joined(connection: Connection, parts: Iterable[memoryview]) -> None:
    """Send blocks of bytes in order, consecutive small ones as one message."""
    # small parts in one message, so that a busy peer wakes up once; large ones from their own memory, without a copy
    joined = bytearray()
    for part in parts:
        if len(joined) + len(part) <= _SMALL_BYTES:
            joined += part
            continue
        if joined:
            connection.sendall(memoryview(joined))
        connection.sendall(part)
        joined = bytearray()
    if joined:
        connection.sendall(memoryview(joined))


def _receive_joined(connection: Connection, parts: Iterable[memoryview]) -> None:
    """Receive blocks that `_send_joined` has sent, into memory of the same sizes."""
    small, size = list[memoryview](), 0
    for part in parts:
        if size + len(part) > _SMALL_BYTES:
            _receive_small(connection, small)
            small, size = [], 0
        if len(part) > _SMALL_BYTES:
            receive_into(connection, part)
        else:
            small.append(part)
            size += len(part)
    _receive_small(connection, small)


def _receive_small(connection: Connection, parts: Sequence[memoryview]) -> None:
    joined = memoryview(bytearray(sum(map(len, parts))))
    receive_into(connection, joined)
    for part in parts:
        part[:], joined = joined[: len(part)], joined[len(part) :]
