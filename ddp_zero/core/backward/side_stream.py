"""The stream on which the step inside backward runs on an accelerator, next to the one of backward."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_WITHOUT_STREAMS = ("cpu", "meta")
_NOTHING = nullcontext()


class _Running:
    """A context in which work is issued on a stream, after everything issued on the current one so far."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream
        self._entered: list[bool] = []  # contexts may be nested

    def __enter__(self) -> None:
        current = torch.accelerator.current_stream(self._stream.device)
        self._entered.append(current != self._stream)
        if self._entered[-1]:
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
    3. what it has produced is read elsewhere only after `join`. Freed then, it goes back to the side stream, which
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
        return _NOTHING if device.type in _WITHOUT_STREAMS else _Running(self._stream(device))

    def keep(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor from being reused before the side stream is done with what it was given."""
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
            torch.accelerator.current_stream(device).wait_stream(stream)

    def _stream(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]
