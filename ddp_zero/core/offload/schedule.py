"""Which bucket is copied, stepped and copied back when, in plain ints.

A few buffers are used in turn. A buffer is *coming* while a bucket's gradients are copied to the host, and *going*
while its new parameters are copied back. With three buffers::

    bucket arrives   0          1              2                 3
    to the host      0 -> A     1 -> B         2 -> C            A is back; 3 -> A
    stepped          -          0, A is going  1, B is going     2, C is going

The host waits at two places only: for a bucket's copy right before its step, and for a buffer to be back before it is
used again. What it does depends on nothing but the order of buckets, so all ranks do it in the same order.
"""

from collections import deque
from dataclasses import dataclass


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
