"""The stream on which the step inside backward runs on an accelerator, next to the one of backward."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_WITHOUT_STREAMS = ("cpu", "meta")


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

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Issue work for a device on its side stream, after everything issued on the current one so far."""
        if device.type in _WITHOUT_STREAMS:
            yield
            return
        stream, current = self._stream(device), torch.accelerator.current_stream(device)
        if current == stream:
            yield
            return
        stream.wait_stream(current)
        with stream:
            yield

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
