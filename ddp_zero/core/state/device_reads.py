"""The bytes of accelerators' memory, for a thread that must not wait for work that the script has issued.

The script's streams may stand behind a collective that a peer has yet to join, and the peer may be waiting for this
very answer. So nothing here is issued on them or waits for them; nothing allocates or frees memory of a device or
pinned memory, which can wait for the whole device; and nothing is computed there: bytes are copied, on a stream of this
file's own, through pinned memory that was there before.
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
    """Copies a device's memory to the host; of any number of threads, one at a time."""

    def __init__(self, device: torch.device) -> None:
        # torch hands out a few streams in turn: others of this priority are rare, so that none of the script's is this
        self._stream = torch.Stream(device, priority=-1)
        self._pinned = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._one_reads = threading.Lock()

    def chunks(self, memory: Tensor) -> Iterator[memoryview]:
        """1-D bytes on the device, in turn; they are read when they are asked for."""
        for part in memory.split(_CHUNK_BYTES):
            with self._one_reads, self._stream:
                staged = self._pinned[: part.numel()]
                staged.copy_(part)
                copied = bytearray(memory_of(staged))
            yield memoryview(copied)


_reader_of = cache(_Reader)


def prepare(devices: Iterable[torch.device]) -> None:
    """Make the stream and memory for reads of these devices; on the script's thread, which may wait for a device."""
    for device in devices:
        _reader_of(device)


def begin_thread(devices: Iterable[torch.device]) -> None:
    """In a new thread that reads: its device is one of these, or it would take memory on the first one for itself."""
    for device in devices:
        torch.accelerator.set_device_index(device)


@torch.no_grad()
def bytes_of(tensor: Tensor) -> Iterable[memoryview]:
    """A tensor's elements, in the order of memory if it is dense, else in logical order; wherever it is."""
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
