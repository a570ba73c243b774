"""Shared by all buckets: flat buffers that take turns, and on an accelerator the stream that reduces and steps."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_zero.core.local.memory import return_pages
from ddp_zero.core.plan.buckets import BufferBytes

_WITHOUT_STREAMS = ("cpu", "meta")
_NOTHING = nullcontext()


class RunningOn:
    """A context in which work is issued on a stream, after everything issued on the current one so far."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream
        self._index = stream.device.index
        self._thread = self._nested = 0  # the thread that is within it, and how often once more

    def __enter__(self) -> None:
        thread = get_ident()
        if self._thread == thread:
            self._nested += 1
            return
        # gradients that backward has issued so far must be written before this stream reads them. The stream that is
        # current on *this* device: an event's own `record()` takes the current device, which may be another one
        self._stream.wait_stream(torch.accelerator.current_stream(self._index))
        self._stream.__enter__()
        # last: where a signal interrupts this before, torch refuses to enter the stream again, instead of a race
        self._thread = thread

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._nested:
            self._nested -= 1
            return
        self._thread = 0
        self._stream.__exit__(kind, error, traceback)


class SideStream:
    """One stream per device on which gradients are reduced and the step is taken; none on the CPU.

    [Note: who owns memory on an accelerator]
    The caching allocator hands freed memory to the stream on which it was *allocated*, whoever still uses it. So:

    1. memory that only the side stream uses is allocated there, within `running`, and may simply be dropped;
    2. memory of other streams that it reads or writes is `keep`-ed: freed, it is not reused before the side stream is
       done with it. A `Buffer` does so when it is allocated, and orders one use after the other;
    3. its results are read elsewhere only after `join`. Freed then, they go back to the side stream, which
       waits for the current one whenever it is entered;
    4. a collective is started and waited for on the side stream. Its memory is a `Buffer`, or obeys rule 1: process
       groups hold them until `wait`, not until that stream has read the result.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        self._running: dict[torch.device, RunningOn] = {}

    def running(self, device: torch.device) -> AbstractContextManager[object]:
        """The context, for any number of times, in which work for a device is issued on its side stream.

        It comes after everything issued on the current stream so far.
        """
        if device.type in _WITHOUT_STREAMS:
            return _NOTHING
        if device not in self._running:
            self._running[device] = RunningOn(self.stream(device))
        return self._running[device]

    def record_use(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor from being reused before the side stream is done with its work."""
        if tensor.device.type not in _WITHOUT_STREAMS:
            tensor.record_stream(self.stream(tensor.device))

    def join(self) -> None:
        """Make the current streams wait for the side streams; the host does not wait."""
        for device, stream in self._streams.items():
            # an order between streams only; memory freed from now on is safe by rule 3
            torch.accelerator.current_stream(device).wait_stream(stream)

    def stream(self, device: torch.device) -> torch.Stream:
        """The side stream of an accelerator."""
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]


class Buffer:
    """Flat memory that buckets use one after the other, allocated for the first.

    On an accelerator it is ready for the stream on which it is lent, and stays untouched until that stream and the side
    stream are done with it; see [Note: who owns memory on an accelerator].

    Attributes:
        memory: 1-D bytes.
        has_streams: whether `lend` and `give_back` do more than set ``is_lent``.
        is_lent: whether some bucket uses it.
    """

    def __init__(self, side: SideStream, nbytes: int, device: torch.device) -> None:
        self.is_lent = False
        self.has_streams = device.type not in _WITHOUT_STREAMS
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        side.record_use(self.memory)  # now, so that it may be dropped at any time
        self._device = device
        self._stream = side.stream(device) if self.has_streams else None
        self._last_use: torch.Event | None = None

    def lend(self) -> None:
        """From now on a bucket uses it, on the current stream; its content is arbitrary."""
        self.is_lent = True
        if self._last_use is not None:
            # the borrower's stream, not the host: the last reader may still have the buffer in its queue
            torch.accelerator.current_stream(self._device.index).wait_event(self._last_use)

    def give_back(self) -> None:
        """All work that uses it has been issued; called on the side stream, which is behind the current stream."""
        self.is_lent = False
        if self._stream is not None:
            # behind all that the current stream has written there: this stream waited for it when it was entered
            self._last_use = self._stream.record_event(self._last_use)

    def rest(self) -> None:
        """Give back its pages; nobody writes to it before it is lent, or pointed at, again."""
        if not self.is_lent:
            return_pages(self.memory)


class BucketMemory(NamedTuple):
    """The memory of a bucket of the plan.

    Attributes:
        scratch: its gradients are filled into it.
        receives: it is received into this; None: no bucket needs such a buffer.
        received_at: its place there, in bytes.
        starts_early: see `BufferBytes`.
    """

    scratch: Buffer
    receives: Buffer | None
    received_at: int
    starts_early: bool


def memory_of(side: SideStream, needs: Sequence[tuple[torch.device, int, int]]) -> list[BucketMemory]:
    """The memory of each bucket of the plan.

    ``needs``: its device, bytes of its gradients, and to receive into.
    """
    found: dict[int, BucketMemory] = {}
    for device in dict.fromkeys(device for device, _, _ in needs):
        places = [place for place, (one, _, _) in enumerate(needs) if one == device]
        sizes = BufferBytes.of([needs[place][1:] for place in places])
        scratches = {turn: Buffer(side, size, device) for turn, size in sizes.scratches.items()}
        receives = Buffer(side, sizes.received, device) if sizes.received else None
        of_buckets = zip(places, sizes.turns, sizes.received_at, sizes.starts_early, strict=True)
        for place, turn, received_at, starts_early in of_buckets:
            found[place] = BucketMemory(scratches[turn], receives, received_at, starts_early)
    return [found[place] for place in range(len(needs))]
