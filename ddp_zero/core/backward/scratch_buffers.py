"""Shared by all buckets: flat buffers that take turns, and on an accelerator the stream that reduces and steps."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ddp_zero.core.local.memory import return_pages
from ddp_zero.core.plan.buckets import BufferBytes

_WITHOUT_STREAMS = ("cpu", "meta")
_NOTHING = nullcontext()


class RunningOn:
    """A context in which work is issued on a stream, after everything issued on the current one so far."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream, self._index = stream, stream.device.index
        self._entered: list[bool] = []  # contexts may be nested

    def __enter__(self) -> None:
        current = torch.accelerator.current_stream(self._index)  # not of the device, which torch would look up
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
            self._running[device] = RunningOn(self._stream(device))
        return self._running[device]

    def record_use(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor from being reused before the side stream is done with its work."""
        if tensor.device.type not in _WITHOUT_STREAMS:
            tensor.record_stream(self._stream(tensor.device))

    def end_of_use(self, device: torch.device) -> list[torch.Event]:
        """Events that have happened once the current stream and the side stream have done all that they were given."""
        if device.type in _WITHOUT_STREAMS:
            return []
        current, side = torch.accelerator.current_stream(device.index), self._stream(device)
        return [side.record_event()] if current == side else [current.record_event(), side.record_event()]

    def join(self) -> None:
        """Make the current streams wait for the side streams; the host does not wait."""
        for device, stream in self._streams.items():
            # an order between streams only; memory freed from now on is safe by rule 3
            torch.accelerator.current_stream(device).wait_stream(stream)

    def _stream(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]


class Buffer:
    """Flat memory that buckets use one after the other, allocated for the first.

    On an accelerator it is ready for the stream on which it is lent, and stays untouched until both that stream and
    the side stream are done with it; see [Note: who owns memory on an accelerator].

    Args:
        side: the stream that uses it besides the current one.

    Attributes:
        memory: 1-D bytes.
        has_streams: whether `lend` and `give_back` do more than set ``is_lent``.
        is_lent: whether some bucket uses it.
    """

    def __init__(self, side: SideStream, nbytes: int, device: torch.device) -> None:
        self.is_lent, self.has_streams = False, device.type not in _WITHOUT_STREAMS
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        side.record_use(self.memory)  # now, so that it may be dropped at any time
        self._side, self._device = side, device
        self._last_use: list[torch.Event] = []

    def lend(self) -> None:
        """From now on a bucket uses it, on the current stream; its content is arbitrary."""
        self.is_lent = True
        # the borrower's stream, not the host: the last reader may still have the buffer in its queue
        for event in self._last_use:
            torch.accelerator.current_stream(self._device.index).wait_event(event)

    def give_back(self) -> None:
        """All work that uses it has been issued, on the current stream or the side stream."""
        self.is_lent = False
        if self.has_streams:
            # both streams: the reducer writes on the current one, the sum and the step read on the side stream
            self._last_use = self._side.end_of_use(self._device)

    def rest(self) -> None:
        """Give back its pages; nobody writes to it before it is lent, or pointed at, again."""
        if not self.is_lent:
            return_pages(self.memory)


def buffers_of(side: SideStream, needs: Sequence[tuple[torch.device, int, int]]) -> list[tuple[Buffer, Buffer | None]]:
    """The scratch of each bucket of the plan, and the buffer it is received into, if any is.

    ``needs``: its device, bytes of its gradients, and to receive into.
    """
    found: dict[int, tuple[Buffer, Buffer | None]] = {}
    for device in dict.fromkeys(device for device, _, _ in needs):
        places = [place for place, (one, _, _) in enumerate(needs) if one == device]
        sizes = BufferBytes.of([needs[place][1:] for place in places])
        scratches = {turn: Buffer(side, size, device) for turn, size in sizes.scratches.items()}
        receives = Buffer(side, sizes.received, device) if sizes.received else None
        found.update((place, (scratches[turn], receives)) for place, turn in zip(places, sizes.turns, strict=True))
    return [found[place] for place in range(len(needs))]
