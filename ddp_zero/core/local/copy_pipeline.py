"""Pipelined copies of buckets to the host, where they are stepped, and back.

[Note: order of copies]
A few pinned staging buffers are used in turn: for a bucket's gradients on their way to the host, then for its new
parameters on their way back to the device. With three buffers A, B and C::

    bucket ready     0          1              2                 3
    to the host      0 -> A     1 -> B         2 -> C            wait for A; 3 -> A
    stepped          -          0              1                 2
    back to device   -          0 <- A         1 <- B            2 <- C

The host waits at two places only: for a bucket's copy right before its step, and for a buffer's copy back before the
buffer is reused. The order depends on the order of buckets alone, so it is the same on all ranks.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_zero.values.shapes import is_dense

_ALIGNMENT = 16  # bytes; fits any dtype

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Targets and sources of copies; both of a pair have one dtype and number of elements."""
Wait = Callable[[], object]
"""Blocks the host until the started copies are done."""


# Order


@dataclass(frozen=True)
class AwaitCopyBack:
    """Block until the new parameters have left this buffer."""

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


Action = AwaitCopyBack | CopyToHost | AwaitHost | StepAndCopyBack


class Schedule:
    """Decides, in plain ints, the actions when a bucket's gradients are ready; see [Note: order of copies].

    With one buffer nothing overlaps; from two on a bucket's copy overlaps with the step of the bucket before it; from
    four on more copies are in flight at once.
    """

    def __init__(self, buffers: int) -> None:
        if buffers < 1:
            raise ValueError(f"Expected at least 1 buffer, got {buffers}. [ZERO-103]")
        self.buffers = buffers
        # a bucket is stepped when this many later buckets are submitted, while its copy is in flight; from three
        # buffers on, a buffer is left for the copy back
        self.lag = 0 if buffers == 1 else max(1, buffers - 2)
        self._to_host: deque[tuple[int, int]] = deque()
        self._to_device: set[int] = set()
        self._next = 0

    def submit(self, bucket: int) -> list[Action]:
        """The actions once a bucket's gradients are ready, after all earlier actions."""
        buffer = self._next
        self._next = (self._next + 1) % self.buffers
        actions: list[Action] = []
        # the device still reads this buffer: new gradients must not overwrite parameters before they are copied back
        if buffer in self._to_device:
            self._to_device.discard(buffer)
            actions.append(AwaitCopyBack(buffer))
        actions.append(CopyToHost(bucket, buffer))
        self._to_host.append((bucket, buffer))
        while len(self._to_host) > self.lag:
            actions += self._step_oldest()
        return actions

    def drain(self) -> list[Action]:
        """The actions at the end of a step. Copies back may still be in flight afterwards."""
        actions: list[Action] = []
        while self._to_host:
            actions += self._step_oldest()
        return actions

    def abandon(self) -> list[Action]:
        """The waits after an error: no bucket is stepped, and no buffer is in use afterwards."""
        # copies in flight still write to these buffers: they must end before the memory is reused
        waits: list[Action] = [AwaitHost(bucket, buffer) for bucket, buffer in self._to_host]
        waits += [AwaitCopyBack(buffer) for buffer in sorted(self._to_device)]
        self._to_host.clear()
        self._to_device.clear()
        return waits

    def _step_oldest(self) -> list[Action]:
        bucket, buffer = self._to_host.popleft()
        self._to_device.add(buffer)
        return [AwaitHost(bucket, buffer), StepAndCopyBack(bucket, buffer)]


# Copies


class Transfer:
    """Copies between an accelerator and pinned host buffers, in both directions on the accelerator's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def buffer(self, nbytes: int) -> Tensor:
        """Pinned host memory, 1-D bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def to_host(self, pairs: Pairs) -> Wait:
        """Start copies from the device into a buffer, after the work enqueued on the device so far."""
        return self._start(pairs)

    def to_device(self, pairs: Pairs) -> Wait:
        """Start copies from a buffer to the device, before any work enqueued from now on."""
        return self._start(pairs)

    @torch.no_grad()
    def _start(self, pairs: Pairs) -> Wait:
        # asynchronous on the current stream (inside backward, the step's own): ordered after the kernels that write the
        # sources and before those that read the targets; only the host needs the event
        for target, source in merge_copies(pairs):
            target.copy_(source, non_blocking=True)
        return torch.accelerator.current_stream(self._device).record_event().synchronize


def transfer_for(device: torch.device) -> Transfer | None:
    """Copies between the host and a device; None for the CPU."""
    return None if device.type == "cpu" else Transfer(device)


def merge_copies(pairs: Pairs) -> list[tuple[Tensor, Tensor]]:
    """The same copies in fewer pieces: contiguous tensors adjacent on both sides become a single copy."""
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
            # only the first target's version counter of a piece is incremented: the caller tells autograd of changed
            # parameters
            pieces.append((one, other))
    return pieces


def _flat(tensor: Tensor, numel: int) -> Tensor:
    return tensor.as_strided((numel,), (1,))


def _follows(first: Tensor, second: Tensor) -> bool:
    """True if the second of two 1-D tensors begins at the end of the first, in the same storage."""
    return (
        first.is_contiguous()
        and first.dim() == 1
        and first.dtype == second.dtype
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.storage_offset() + first.numel() == second.storage_offset()
    )


# Buckets in flight


@dataclass(frozen=True)
class StepInputs:
    """The tensors that the host needs for the step of one offloaded parameter."""

    index: int  # of the parameter
    gradient: Tensor  # the reduced gradient, in the shape of the stepped tensor
    value: Tensor | None  # the parameter, or its owned part, that the stepped tensor is a copy of; None for a master
    stepped: Tensor  # the tensor on the host that the inner optimizer steps


class HostGradients:
    """The gradients of one bucket that were copied to the host, by parameter index."""

    def __init__(self, gradients: dict[int, Tensor]) -> None:
        self._gradients = gradients

    def gradient(self, index: int) -> Tensor | None:
        return self._gradients.get(index)

    def in_accumulation_dtype(self, index: int) -> None:
        """None: ``gradient`` already has that dtype."""


@dataclass
class _StagingBuffer:
    """Pinned memory for one bucket on its way to the host and back."""

    memory: Tensor | None = None
    copies: Wait | None = None  # waits for the copies in flight
    inputs: Sequence[StepInputs] = ()  # with views of the buffer as gradients and values

    def wait(self) -> None:
        wait, self.copies = self.copies, None
        if wait is not None:
            wait()

    def views_like(self, likes: Sequence[Tensor], transfer: Transfer) -> list[Tensor]:
        """Views of the buffer in the shapes of these tensors, end to end, so that adjacent tensors stay adjacent."""
        if not likes:
            return []
        starts, end = [], 0
        for like in likes:
            starts.append(end + -end % like.element_size())
            end = starts[-1] + like.nbytes
        nbytes = end + -end % _ALIGNMENT
        if self.memory is None or self.memory.numel() < nbytes:
            self.memory = None  # free the old memory first
            self.memory = transfer.buffer(nbytes)
        windows = []
        for like, start in zip(likes, starts, strict=True):
            run = self.memory[start : start + like.nbytes].view(like.dtype)
            is_whole = is_dense(like.shape, like.stride())
            windows.append(run.as_strided(like.shape, like.stride()) if is_whole else run.view(like.shape))
        return windows


class CopyPipeline:
    """The staging buffers of one device, and the buckets in them."""

    def __init__(self, transfer: Transfer, buffers: int) -> None:
        self._transfer = transfer
        self._schedule = Schedule(buffers)
        self._buffers = [_StagingBuffer() for _ in range(buffers)]
        self._current: _StagingBuffer | None = None  # holds the bucket that is being stepped

    def submit(self, bucket: int, inputs: Callable[[], Sequence[StepInputs]]) -> Iterator[tuple[int, HostGradients]]:
        """See `StatePlacement.submit`. Calls ``inputs`` once a buffer is free."""
        yield from self._perform(self._schedule.submit(bucket), inputs)

    def drain(self) -> Iterator[tuple[int, HostGradients]]:
        yield from self._perform(self._schedule.drain(), tuple)

    def copy_back(self, pairs: Pairs) -> None:
        """Start copies of (parameter's memory, stepped tensor) pairs through the buffer of the bucket being stepped."""
        buffer = self._current
        assert buffer is not None, "within the step of a bucket"
        # this overwrites the bucket's gradients, which its step has consumed: one buffer serves both directions
        windows = buffer.views_like([target for target, _ in pairs], self._transfer)
        torch._foreach_copy_(windows, [stepped for _, stepped in pairs])  # rounded on the host
        targets = [target for target, _ in pairs]
        buffer.copies = self._transfer.to_device(list(zip(targets, windows, strict=True)))

    @property
    def is_stepping(self) -> bool:
        return self._current is not None

    def abandon(self) -> None:
        """Wait for copies in flight, which may still write, and forget them."""
        self._schedule.abandon()
        self._current = None
        for buffer in self._buffers:
            buffer.wait()
            buffer.inputs = ()

    @property
    def nbytes(self) -> int:
        return sum(buffer.memory.numel() for buffer in self._buffers if buffer.memory is not None)

    def _perform(
        self, actions: Sequence[Action], inputs: Callable[[], Sequence[StepInputs]]
    ) -> Iterator[tuple[int, HostGradients]]:
        """Perform the actions in order; yields each bucket that is on the host, with its gradients, to be stepped."""
        for action in actions:
            buffer = self._buffers[action.buffer]
            if isinstance(action, CopyToHost):
                # called only when a buffer is free: earlier, the inputs would hold their gradients for longer
                self._send(buffer, inputs())
            elif isinstance(action, StepAndCopyBack):
                yield from self._step(action.bucket, buffer)
            else:
                buffer.wait()

    @torch.no_grad()
    def _send(self, buffer: _StagingBuffer, inputs: Sequence[StepInputs]) -> None:
        """Start to copy gradients, and values of parameters, from the device into a staging buffer."""
        values = [each.value for each in inputs if each.value is not None]
        sources = [*(each.gradient for each in inputs), *values]
        targets = buffer.views_like(sources, self._transfer)
        value_targets = iter(targets[len(inputs) :])
        # gradients on the device are not held: their memory is free once the stream has copied them, before the step
        buffer.inputs = [
            StepInputs(each.index, view, None if each.value is None else next(value_targets), each.stepped)
            for each, view in zip(inputs, targets, strict=False)
        ]
        if sources:
            buffer.copies = self._transfer.to_host(list(zip(targets, sources, strict=True)))

    @torch.no_grad()
    def _step(self, bucket: int, buffer: _StagingBuffer) -> Iterator[tuple[int, HostGradients]]:
        """Yield a bucket whose copies are in the buffer, to be stepped by the caller, and free the buffer."""
        for each in buffer.inputs:
            if each.value is not None:
                each.stepped.copy_(each.value)
        self._current = buffer
        yield bucket, HostGradients({each.index: each.gradient for each in buffer.inputs})
        self._current = None
        buffer.inputs = ()
