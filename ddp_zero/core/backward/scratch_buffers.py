"""Shared by all buckets: flat buffers that are lent, and on an accelerator the stream that reduces and steps."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_zero.core.local.memory import return_pages
from ddp_zero.core.plan.buckets import RECV_BUFFERS, SCRATCHES

_WITHOUT_STREAMS = ("cpu", "meta")
_NOTHING = nullcontext()


class RunningOn:
    """A context in which work is issued on a stream, after everything issued on the current one so far."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream
        self._entered: list[bool] = []  # contexts may be nested

    def __enter__(self) -> None:
        current = torch.accelerator.current_stream(self._stream.device)
        self._entered.append(current != self._stream)
        if self._entered[-1]:
            # gradients that backward has issued so far must be written before this stream reads them
            self._stream.wait_stream(current)
            self._stream.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._entered.pop():
            self._stream.__exit__(kind, error, traceback)


class SideStream:
    """One stream per device on which gradients are reduced and the step is taken; none on the CPU.

    [Note: who owns memory on an accelerator]
    The caching allocator hands freed memory to the stream on which it was *allocated*, whoever still uses it. So:

    1. memory that only the side stream uses is allocated there, within `running`, and may simply be dropped;
    2. memory of other streams that it reads or writes is `keep`-ed: freed, it is not reused before the side stream is
       done with it. `BufferPool` does so for its buffers when it allocates them, and orders one use after the other;
    3. its results are read elsewhere only after `join`. Freed then, they go back to the side stream, which
       waits for the current one whenever it is entered;
    4. a collective is started and waited for on the side stream. Its buffers belong to a pool, or obey rule 1: process
       groups hold them until `wait`, not until that stream has read the result.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def running(self, device: torch.device) -> AbstractContextManager[object]:
        """A context, for any number of times, in which work for a device is issued on its side stream.

        It comes after everything issued on the current stream so far.
        """
        return _NOTHING if device.type in _WITHOUT_STREAMS else RunningOn(self._stream(device))

    def keep(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor from being reused before the side stream is done with its work."""
        if tensor.device.type not in _WITHOUT_STREAMS:
            tensor.record_stream(self._stream(tensor.device))

    def end_of_use(self, device: torch.device) -> list[torch.Event]:
        """Events that have happened once the current stream and the side stream have done all that they were given."""
        if device.type in _WITHOUT_STREAMS:
            return []
        return [stream.record_event() for stream in {torch.accelerator.current_stream(device), self._stream(device)}]

    def join(self) -> None:
        """Make the current streams wait for the side streams; the host does not wait."""
        for device, stream in self._streams.items():
            # an order between streams only; memory freed from now on is safe by rule 3
            torch.accelerator.current_stream(device).wait_stream(stream)

    def _stream(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]


@dataclass
class PoolStatistics:
    """The most that a pool has held, in bytes and in buffers."""

    held_bytes: int = 0
    most_bytes: int = 0
    most_lent: int = 0


class BufferPool:
    """Lends 1-D byte tensors and takes them back.

    A buffer's size is the largest expected one, halved as often as the request still fits. So buckets of about the same
    size share buffers, and a small one never costs a large buffer unless that is free anyway. `lend` never refuses:
    ``keep_bytes`` bounds idle buffers, not lent ones.

    On an accelerator, a buffer is ready for the stream that borrows it and stays untouched until both that stream and
    the side stream are done with it; see [Note: who owns memory on an accelerator].

    Args:
        side: the stream that uses buffers besides the current one.
        keep_bytes: free buffers are dropped before the pool would hold more than this.
        when_dropped: called when a buffer is dropped, for whoever keeps views of it.
    """

    def __init__(
        self, side: SideStream, largest_bytes: int, keep_bytes: int, when_dropped: Callable[[], object] = bool
    ) -> None:
        self._side = side
        self._largest_bytes = largest_bytes
        self._keep_bytes = keep_bytes
        self._free: list[Tensor] = []
        self._last_use: dict[int, list[torch.Event]] = {}  # of free buffers, by id
        self._lent = 0
        self._used: set[int] = set()
        self._when_dropped = when_dropped
        self.statistics = PoolStatistics()

    def lend(self, nbytes: int, device: torch.device) -> Tensor:
        """A buffer of at least ``nbytes`` bytes on a device; its content is arbitrary."""
        place, least = -1, 0
        for at, buffer in enumerate(self._free):
            size = buffer.numel()
            if size >= nbytes and (place < 0 or size < least) and buffer.device == device:
                place, least = at, size
        if place >= 0:
            chosen = self._free.pop(place)
        else:
            size = self._size_for(nbytes)
            self._drop_free(self._keep_bytes - size)
            chosen = torch.empty(size, dtype=torch.uint8, device=device)
            self._side.keep(chosen)  # now, so that it may be dropped at any time
            self.statistics.held_bytes += size
            self.statistics.most_bytes = max(self.statistics.most_bytes, self.statistics.held_bytes)
        # the borrower's stream, not the host: the last reader may still have the buffer in its queue
        for event in self._last_use.pop(id(chosen), ()) if self._last_use else ():
            torch.accelerator.current_stream(device).wait_event(event)
        self._lent += 1
        self._used.add(id(chosen))
        if self._lent > self.statistics.most_lent:
            self.statistics.most_lent = self._lent
        return chosen

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer; all work that uses it has been issued, on the current stream or the side stream."""
        self._lent -= 1
        if buffer.device.type != "cpu":
            # both streams: the reducer writes on the current one, the sum and the step read on the side stream
            self._last_use[id(buffer)] = self._side.end_of_use(buffer.device)
        self._free.append(buffer)

    def trim(self) -> None:
        """At the end of an iteration: drop the free buffers that it did not use, and those beyond ``keep_bytes``."""
        unused = [buffer for buffer in self._free if id(buffer) not in self._used]
        self._free = [buffer for buffer in self._free if id(buffer) in self._used]
        for buffer in unused:
            self._last_use.pop(id(buffer), None)
            # before the memory is free: prepared sums are looked up by address
            self._when_dropped()
        self.statistics.held_bytes -= sum(buffer.numel() for buffer in unused)
        self._drop_free(self._keep_bytes)
        self._used.clear()

    def rest(self) -> None:
        """Give back the pages of free buffers, which nobody writes to before they are lent or pointed at again."""
        for buffer in self._free:
            return_pages(buffer)

    def _size_for(self, nbytes: int) -> int:
        size = max(nbytes, self._largest_bytes)
        while size // 2 >= nbytes and size // 2 > 0:
            size //= 2
        return size + -size % 16  # any dtype can be laid over it

    def _drop_free(self, limit: int) -> None:
        while self._free and self.statistics.held_bytes > limit:
            smallest = min(range(len(self._free)), key=lambda position: self._free[position].numel())
            dropped = self._free.pop(smallest)
            self._when_dropped()
            self._last_use.pop(id(dropped), None)
            self.statistics.held_bytes -= dropped.numel()


def pools_for(
    sizes: Sequence[int], side: SideStream, when_dropped: Callable[[], object] = bool
) -> tuple[BufferPool, BufferPool]:
    """Empty pools of scratches, and of receive buffers, for buckets of so many bytes."""
    largest = max(sizes, default=1)
    return (
        BufferPool(side, largest, SCRATCHES * largest, when_dropped),
        BufferPool(side, largest, RECV_BUFFERS * largest, when_dropped),
    )
