"""Time on an accelerator: events on its streams, recorded as work is issued and read when they have happened."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mark:
    """An event on a stream."""

    event: torch.Event
    is_beside: bool


def has_streams(device: torch.device) -> bool:
    """Whether `StreamClock` can measure time on a device."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "default_stream")


class StreamClock:
    """Marks the current stream of a device. Nothing here waits for the device.

    Args:
        device: an accelerator that `has_streams`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)

    def mark(self) -> Mark:
        """An event behind everything that was issued to the current stream so far."""
        current = torch.accelerator.current_stream(self._device)
        event = torch.Event(self._device, enable_timing=True)
        event.record(current)
        return Mark(event, current != self._module.default_stream(self._device))

    def seconds(self, begun: Mark, ended: Mark) -> float | None:
        """The time between two marks, or None if the device has not passed both yet."""
        if not (begun.event.query() and ended.event.query()):
            return None
        return float(begun.event.elapsed_time(ended.event)) * 1e-3

    def is_beside(self, mark: Mark) -> bool:
        """Whether the mark is on a stream other than the device's default one, as the step inside backward is."""
        return mark.is_beside
