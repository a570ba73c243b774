"""What travels on a connection: frames of JSON, and the elements of tensors behind them.

A *frame* is its length, 8 bytes, and so many bytes of JSON. A *tree* (see `local.tree`) is a frame with its text, then
the elements of its tensors in the order of memory, sent from where they are and received where they stay. Nothing is
pickled. Time-outs are of the socket: how long a peer may make no progress.
"""

import json
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_zero.core.local.tree import TensorSpec, Tree, as_bytes, flatten, memory_of, specs_in, unflatten
from ddp_zero.core.plan.shapes import is_dense

_LENGTH = struct.Struct("!Q")
_MOST_FRAME_BYTES = 1 << 30
_CHUNK_BYTES = 4 << 20

Frame = dict[str, Any]


def send_frame(connection: socket.socket, frame: Mapping[str, Any]) -> None:
    """Send one frame.

    Raises:
        OSError: if the peer is gone or makes no progress.
    """
    _send_joined(connection, [memoryview(encode_frame(frame))])


def send_tree(connection: socket.socket, frame: Mapping[str, Any], tree: Tree) -> None:
    """Send a frame, to which the tree's text is added as ``"tree"``, and the elements of its tensors.

    Raises:
        TypeError: for a value that cannot be sent; then nothing has been sent.
        OSError: if the peer is gone or makes no progress.
    """
    text, tensors = flatten(tree)
    kept = [_in_memory_order(tensor) for tensor in tensors]  # as long as they are sent
    head = encode_frame({**frame, "tree": text})
    _send_joined(connection, [memoryview(head), *(memory_of(one) for one in kept)])


def receive_frame(connection: socket.socket) -> Frame:
    """Receive one frame.

    Raises:
        EOFError: if the peer has closed the connection; OSError if it is gone or makes no progress; ValueError for what
            is no frame.
    """
    head = bytearray(_LENGTH.size)
    receive_into(connection, memoryview(head))
    (length,) = _LENGTH.unpack(head)
    if length > _MOST_FRAME_BYTES:
        raise ValueError(f"Expected a frame of at most {_MOST_FRAME_BYTES} bytes, got one of {length}.")
    body = bytearray(length)
    receive_into(connection, memoryview(body))
    return decode_frame(bytes(body))


def receive_tree(connection: socket.socket, frame: Frame, device: torch.device) -> Tree:
    """Receive what `send_tree` has sent, after its frame.

    Args:
        connection: the connection.
        frame: the frame, received already.
        device: of tensors that were on an accelerator at the sender; those from the CPU stay on the CPU.
    """
    text = str(frame["tree"])
    return unflatten(text, [_receive_tensor(connection, spec, device) for spec in specs_in(text)])


def encode_frame(frame: Mapping[str, Any]) -> bytes:
    """A frame as bytes."""
    body = json.dumps(frame).encode()
    return _LENGTH.pack(len(body)) + body


def decode_frame(body: bytes) -> Frame:
    """A frame from its bytes, without their length.

    Raises:
        ValueError: if they are no JSON of a dict.
    """
    frame = json.loads(body)
    if not isinstance(frame, dict):
        raise ValueError(f"Expected a frame that holds a dict, got {type(frame).__name__}.")
    return frame


def receive_into(connection: socket.socket, memory: memoryview) -> None:
    """Fill memory with what arrives.

    Raises:
        EOFError: if the peer closes the connection before; OSError if it is gone or makes no progress.
    """
    while memory:
        arrived = connection.recv_into(memory)
        if not arrived:
            raise EOFError(f"Expected {len(memory)} more bytes, got the end of the connection")
        memory = memory[arrived:]


def _send_joined(connection: socket.socket, parts: Iterable[memoryview]) -> None:
    """Send small parts in one message, so that a busy peer wakes up once, and large ones from where they are."""
    joined = bytearray()
    for part in parts:
        if len(joined) + len(part) <= _CHUNK_BYTES // 64:
            joined += part
            continue
        _send_all(connection, memoryview(joined))
        _send_all(connection, part)
        joined = bytearray()
    _send_all(connection, memoryview(joined))


def _send_all(connection: socket.socket, memory: memoryview) -> None:
    for begin in range(0, len(memory), _CHUNK_BYTES):  # the time-out of a socket is that of one call
        connection.sendall(memory[begin : begin + _CHUNK_BYTES])


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a tensor as bytes in CPU memory, in the order that `_receive_tensor` expects."""
    tensor = tensor.detach().cpu()
    if tensor.numel() and is_dense(tensor.shape, tensor.stride()):
        return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return as_bytes(tensor)


def _receive_tensor(connection: socket.socket, spec: TensorSpec, device: torch.device) -> Tensor:
    """Receive a tensor into its own memory, on an accelerator by way of the CPU."""
    stride: Sequence[int] | None = spec.stride
    if stride is None:
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
    else:
        tensor = torch.empty_strided(spec.shape, tuple(stride), dtype=spec.dtype, device="cpu")
    if tensor.numel():
        receive_into(connection, memory_of(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)))
    return tensor if spec.device_type == "cpu" else tensor.to(device)
