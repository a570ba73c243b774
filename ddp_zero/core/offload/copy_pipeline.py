"""Buckets on their way to the host, where they are stepped, and back: carries out what the `Schedule` says."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddp_zero.core.offload.schedule import AwaitBack, AwaitHost, CopyToHost, Schedule, StepAndCopyBack
from ddp_zero.core.offload.state_placement import Arrived, Load
from ddp_zero.core.offload.transfer import Copies, Pairs, Transfer
from ddp_zero.core.plan.shapes import is_dense

_ALIGNMENT = 16  # bytes; any dtype can be laid there


@dataclass
class _Buffer:
    """Memory that a bucket travels through, first one way and then the other.

    Attributes:
        memory: 1-D bytes.
        copies: those under way.
        loads: what the bucket that is coming has sent.
        windows: the gradient and the value of each load in the memory.
    """

    memory: Tensor | None = None
    copies: Copies | None = None
    loads: Sequence[Load] = ()
    windows: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)

    def room(self, nbytes: int, transfer: Transfer) -> Tensor:
        """So much memory at least; what was there before is lost."""
        if self.memory is None or self.memory.numel() < nbytes:
            self.memory = None  # not two at once
            self.memory = transfer.buffer(nbytes)
        return self.memory

    def wait(self) -> None:
        """Wait for the copies under way."""
        copies, self.copies = self.copies, None
        if copies is not None:
            copies.wait()


class Passage:
    """The buffers of one device and what is in them.

    Args:
        transfer: copies between host and device.
        buffers: how many buffers.
    """

    def __init__(self, transfer: Transfer, buffers: int) -> None:
        self._transfer = transfer
        self._schedule = Schedule(buffers)
        self._buffers = [_Buffer() for _ in range(buffers)]
        self._current: _Buffer | None = None  # whose bucket is being stepped

    def arrive(self, bucket: int, loads: Callable[[], Sequence[Load]]) -> Iterator[tuple[int, Arrived]]:
        """See `Residence.arrive`. The loads are asked for when there is a buffer for them."""
        for action in self._schedule.arrive(bucket):
            if isinstance(action, AwaitBack):
                self._buffers[action.buffer].wait()
            elif isinstance(action, CopyToHost):
                self._send(self._buffers[action.buffer], loads())
            elif isinstance(action, AwaitHost):
                self._buffers[action.buffer].wait()
            else:
                yield from self._stepped(action)

    def drain(self) -> Iterator[tuple[int, Arrived]]:
        """See `Residence.drain`."""
        for action in self._schedule.drain():
            if isinstance(action, StepAndCopyBack):
                yield from self._stepped(action)
            else:
                self._buffers[action.buffer].wait()

    def show(self, pairs: Pairs) -> None:
        """Start copies of stepped tensors to the parameters, through the buffer of the bucket that is being stepped.

        Args:
            pairs: memory of a parameter, and what was stepped for it.
        """
        buffer = self._current
        assert buffer is not None, "within the step of a bucket"
        windows = _laid_out([target for target, _ in pairs], buffer, self._transfer)
        torch._foreach_copy_(windows, [stepped for _, stepped in pairs])  # rounded on the host
        targets = [target for target, _ in pairs]
        buffer.copies = self._transfer.to_device(list(zip(targets, windows, strict=True)))

    @property
    def is_stepping(self) -> bool:
        """Whether a bucket is being stepped."""
        return self._current is not None

    def abandon(self) -> None:
        """Wait for what is under way, which may still write, and forget it."""
        self._schedule.abandon()
        self._current = None
        for buffer in self._buffers:
            buffer.wait()
            buffer.loads, buffer.windows = (), []

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.memory.numel() for buffer in self._buffers if buffer.memory is not None)

    @torch.no_grad()
    def _send(self, buffer: _Buffer, loads: Sequence[Load]) -> None:
        values = [load.value for load in loads if load.value is not None]
        sources = [*(load.gradient for load in loads), *values]
        targets = _laid_out(sources, buffer, self._transfer)
        of_values = iter(targets[len(loads) :])
        buffer.loads = loads
        buffer.windows = [
            (window, None if load.value is None else next(of_values))
            for load, window in zip(loads, targets, strict=False)
        ]
        if sources:
            buffer.copies = self._transfer.to_host(list(zip(targets, sources, strict=True)))

    @torch.no_grad()
    def _stepped(self, action: StepAndCopyBack) -> Iterator[tuple[int, Arrived]]:
        buffer = self._buffers[action.buffer]
        loads, windows = buffer.loads, buffer.windows
        for load, (_, value) in zip(loads, windows, strict=True):
            if value is not None:
                load.stepped.copy_(value)
        self._current = buffer
        yield action.bucket, Arrived({load.index: window for load, (window, _) in zip(loads, windows, strict=True)})
        self._current = None
        buffer.loads, buffer.windows = (), []


def needed_bytes(sizes: Sequence[tuple[int, int]]) -> int:
    """Bytes of a buffer for tensors of these numbers of elements and bytes per element, in this order."""
    end = 0
    for numel, itemsize in sizes:
        end = end + -end % itemsize + numel * itemsize
    return end + -end % _ALIGNMENT


def _laid_out(likes: Sequence[Tensor], buffer: _Buffer, transfer: Transfer) -> list[Tensor]:
    """Windows of a buffer for these tensors, in their shapes; end to end, so that neighbours stay neighbours."""
    if not likes:
        return []
    memory = buffer.room(needed_bytes([(like.numel(), like.element_size()) for like in likes]), transfer)
    windows, end = [], 0
    for like in likes:
        start = end + -end % like.element_size()
        end = start + like.nbytes
        run = memory[start:end].view(like.dtype)
        is_whole = is_dense(like.shape, like.stride())
        windows.append(run.as_strided(like.shape, like.stride()) if is_whole else run.view(like.shape))
    return windows
