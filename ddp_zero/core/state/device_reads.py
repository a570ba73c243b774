"""Reads accelerators' memory in a thread that must not wait for work that the script has issued.

The script's streams may stand behind a collective that a peer has yet to join, and the peer may be waiting for this
very answer. So this file issues nothing on the script's streams and waits for none of them; it neither allocates nor
frees memory of a device or pinned memory, which can wait for the whole device; and it computes nothing on a device: it
copies bytes, on a stream of its own, through pinned memory allocated before.
"""

import threading
from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch import Tensor

from ddp_zero.values.shapes import is_dense
from ddp_zero.values.tree import as_bytes, memory_of

_CHUNK_BYTES = 4 << 20


class _Reader:
    """Copies a device's memory to the host, for one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        # torch hands out a few streams in turn; this priority is rare, so that no stream of the script's is this stream
        self._stream = torch.Stream(device, priority=-1)
        self._pinned = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._lock = threading.Lock()

    def chunks(self, memory: Tensor) -> Iterator[memoryview]:
        """Chunks of 1-D bytes on the device; each is read when the iterator comes to it."""
        for part in memory.split(_CHUNK_BYTES):
            with self._lock, self._stream:
                staged = self._pinned[: part.numel()]
                staged.copy_(part)
                copied = bytearray(memory_of(staged))
            yield memoryview(copied)


_reader_of = cache(_Reader)


def prepare(devices: Iterable[torch.device]) -> None:
    """Allocate the stream and pinned memory for each device, on the script's thread, which may wait for a device."""
    for device in devices:
        _reader_of(device)


def begin_thread(devices: Iterable[torch.device]) -> None:
    """Set the device of a new thread that reads: torch would otherwise take memory on device 0 for the thread."""
    for device in devices:
        torch.accelerator.set_device_index(device)


@torch.no_grad()
def bytes_of(tensor: Tensor) -> Iterable[memoryview]:
    """A tensor's elements as bytes: in the order of memory if it is dense, else in logical order."""
    tensor = tensor.detach()
    if not tensor.numel():
        return []
    is_whole = is_dense(tensor.shape, tensor.stride())
    if tensor.is_cpu:
        return [memory_of(_span(tensor) if is_whole else as_bytes(tensor))]
    chunks = _reader_of(tensor.device).chunks(_span(tensor))
    return chunks if is_whole else [memory_of(as_bytes(_on_host(chunks, tensor)))]


def _span(tensor: Tensor) -> Tensor:
    """The memory from a tensor's first to its last element, as bytes."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,)).view(torch.uint8)


def _on_host(chunks: Iterable[memoryview], tensor: Tensor) -> Tensor:
    held = bytearray()
    for chunk in chunks:
        held += chunk
    return torch.frombuffer(held, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
