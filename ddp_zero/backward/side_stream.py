"""The stream on which the step inside backward runs on an accelerator, next to the one of backward."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """One stream per device on which the step has run; none on the CPU.

    Hazards that it prevents: the step must not begin before backward has used a parameter for the last time (`running`
    waits for the current stream); backward's stream must not continue with old parameters (`join`); and memory that the
    step reads must not be reused meanwhile (`keep`).
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        self._last_use: dict[int, torch.Event] = {}

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Issue work for a device on its side stream, after everything issued on the current one so far."""
        if device.type == "cpu":
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            yield

    def keep(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor that the side stream reads from being reused before it is done."""
        if tensor.device in self._streams:
            tensor.record_stream(self._streams[tensor.device])

    def leave(self, tensor: Tensor) -> None:
        """Record the last use of this tensor's memory; the next user calls `wait_for`."""
        if tensor.device.type != "cpu":
            current = torch.accelerator.current_stream(tensor.device)
            self._last_use[id(tensor)] = self._streams.get(tensor.device, current).record_event()

    def wait_for(self, tensor: Tensor) -> None:
        """Make the current stream wait for the last use of this tensor's memory."""
        event = self._last_use.pop(id(tensor), None)
        if event is not None:
            torch.accelerator.current_stream(tensor.device).wait_event(event)

    def join(self) -> None:
        """Make the current streams wait for the side streams; the host does not wait."""
        for device, stream in self._streams.items():
            torch.accelerator.current_stream(device).wait_stream(stream)
