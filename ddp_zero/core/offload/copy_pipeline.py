"""Buckets on their way to the host, where they are stepped, and back.

[Note: order of copies]
A few buffers are used in turn. A buffer is *coming* while a bucket's gradients are copied to the host, and *going*
while its new parameters are copied back. With three buffers::

    bucket arrives   0          1              2                 3
    to the host      0 -> A     1 -> B         2 -> C            A is back; 3 -> A
    stepped          -          0, A is going  1, B is going     2, C is going

The host waits at two places only: for a bucket's copy right before its step, and for a buffer to be back before it is
used again. What it does depends on nothing but the order of buckets, so all ranks do it in the same order.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ddp_zero.core.plan.shapes import is_dense

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Copies: the target and the source of each, of one dtype and number of elements."""


class Copies(Protocol):
    """Copies that were started."""

    def wait(self) -> None:
        """Block the host until they are done."""


class Transfer(Protocol):
    """Copies between one device and buffers on the host."""

    def buffer(self, nbytes: int) -> Tensor:
        """Memory on the host that the device can read and write by itself, 1-D bytes."""

    def to_host(self, pairs: Pairs) -> Copies:
        """Start copies from the device into a buffer, after what the device was given so far."""

    def to_device(self, pairs: Pairs) -> Copies:
        """Start copies from a buffer to the device, before what it is given from now on."""


class AcceleratorTransfer:
    """Copies on the accelerator's current stream, through pinned memory. The step inside backward has its own stream.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def buffer(self, nbytes: int) -> Tensor:
        """Pinned memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def to_host(self, pairs: Pairs) -> Copies:
        """Start copies; neighbours in memory travel as one."""
        return self._started(pairs)

    def to_device(self, pairs: Pairs) -> Copies:
        """Start copies; neighbours in memory travel as one."""
        return self._started(pairs)

    @torch.no_grad()
    def _started(self, pairs: Pairs) -> Copies:
        for target, source in merged(pairs):
            target.copy_(source, non_blocking=True)
        return _Recorded(torch.accelerator.current_stream(self._device).record_event())


class _Recorded:
    """Copies before an event of a stream."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Block the host until the event has happened."""
        self._event.synchronize()


def merged(pairs: Pairs) -> list[tuple[Tensor, Tensor]]:
    """The same copies in fewer pieces: contiguous tensors that lie end to end on both sides are one.

    Each piece keeps the version counter of its first target only; parameters in flat storage are told of a change by
    who asks for the copy.
    """
    pieces: list[tuple[Tensor, Tensor]] = []
    for target, source in pairs:
        if not (target.is_contiguous() and source.is_contiguous()):
            pieces.append((target, source))
            continue
        one, other = _flat(target, target.numel()), _flat(source, source.numel())
        if pieces and all(_follows(a, b) for a, b in zip(pieces[-1], (one, other), strict=True)):
            numel = pieces[-1][0].numel() + one.numel()
            pieces[-1] = (_flat(pieces[-1][0], numel), _flat(pieces[-1][1], numel))
        else:
            pieces.append((one, other))
    return pieces


def _flat(tensor: Tensor, numel: int) -> Tensor:
    return tensor.as_strided((numel,), (1,))


def _follows(first: Tensor, second: Tensor) -> bool:
    """Whether the second of two 1-D tensors begins where the first ends, in the same storage."""
    return (
        first.is_contiguous()
        and first.dim() == 1
        and first.dtype == second.dtype
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.storage_offset() + first.numel() == second.storage_offset()
    )


def transfer_for(device: torch.device) -> Transfer | None:
    """How to copy between the host and a device; None for the CPU, whose memory is the host's."""
    return None if device.type == "cpu" else AcceleratorTransfer(device)


@dataclass(frozen=True)
class AwaitBack:
    """Block until the new parameters in this buffer have left it."""

    buffer: int


@dataclass(frozen=True)
class CopyToHost:
    """Start the copy of a bucket's gradients into a buffer."""

    bucket: int
    buffer: int


@dataclass(frozen=True)
class AwaitHost:
    """Block until the gradients of a bucket are in its buffer."""

    bucket: int
    buffer: int


@dataclass(frozen=True)
class StepAndCopyBack:
    """Step a bucket, and start the copy of its new parameters out of its buffer."""

    bucket: int
    buffer: int


Action = AwaitBack | CopyToHost | AwaitHost | StepAndCopyBack


class Schedule:
    """Decides what happens when a bucket arrives.

    Args:
        buffers: how many there are, at least 1. With one nothing overlaps; from two on the copy of a bucket overlaps
            with the step of the one before it; from four on more copies are under way at once.
    """

    def __init__(self, buffers: int) -> None:
        if buffers < 1:
            raise ValueError(f"Expected at least 1 buffer, got {buffers}.")
        self.buffers = buffers
        self.lag = 0 if buffers == 1 else max(1, buffers - 2)
        self._coming: deque[tuple[int, int]] = deque()
        self._going: set[int] = set()
        self._next = 0

    def arrive(self, bucket: int) -> list[Action]:
        """What to do when the gradients of a bucket are there, after all that was returned before was done."""
        buffer, self._next = self._next, (self._next + 1) % self.buffers
        actions: list[Action] = []
        if buffer in self._going:
            self._going.discard(buffer)
            actions.append(AwaitBack(buffer))
        actions.append(CopyToHost(bucket, buffer))
        self._coming.append((bucket, buffer))
        while len(self._coming) > self.lag:
            actions += self._step_oldest()
        return actions

    def drain(self) -> list[Action]:
        """What to do at the end of a step. Copies back may be under way when it is over."""
        actions: list[Action] = []
        while self._coming:
            actions += self._step_oldest()
        return actions

    def abandon(self) -> list[Action]:
        """What to do after an error: no bucket is stepped, and no buffer is in use afterwards."""
        busy = self._going | {buffer for _, buffer in self._coming}
        waits: list[Action] = [AwaitHost(bucket, buffer) for bucket, buffer in self._coming]
        waits += [AwaitBack(buffer) for buffer in sorted(busy & self._going)]
        self._coming.clear()
        self._going.clear()
        return waits

    def _step_oldest(self) -> list[Action]:
        bucket, buffer = self._coming.popleft()
        self._going.add(buffer)
        return [AwaitHost(bucket, buffer), StepAndCopyBack(bucket, buffer)]


_ALIGNMENT = 16  # bytes; any dtype can be laid there


@dataclass(frozen=True)
class Load:
    """What has to travel for the step of one parameter.

    Attributes:
        index: the parameter.
        gradient: as reduced, in the shape of what is stepped.
        value: the parameter, or this rank's part of it, if what is stepped is a copy of it; None for a master.
        stepped: the tensor that the inner optimizer steps.
    """

    index: int
    gradient: Tensor
    value: Tensor | None
    stepped: Tensor


class Arrived:
    """Gradients that have arrived where they are stepped; a source of gradients for the step of a bucket.

    Args:
        gradients: by parameter index.
    """

    def __init__(self, gradients: dict[int, Tensor]) -> None:
        self._gradients = gradients

    def gradient(self, index: int) -> Tensor | None:
        """The gradient, in the dtype in which it was reduced; None if the parameter has none."""
        return self._gradients.get(index)

    def exact(self, index: int) -> None:
        """None: ``gradient`` is exact."""


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
