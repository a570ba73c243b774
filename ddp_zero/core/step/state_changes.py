"""Counts the changes of this rank's optimizer state, so that a thread can read it without a lock.

A reader notes the count while no change is under way, reads, and looks again: if no change has begun since, what it has
read is one state. Every rank counts the same changes (steps, loads, moves to new owners), so ranks with equal counts
hold shards of one state.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class StateChanges:
    """The count.

    Attributes:
        begun: how many changes have begun.
    """

    def __init__(self) -> None:
        self.begun = 0
        self._ended = 0
        self._work: list[torch.Event] = []

    @property
    def is_under_way(self) -> bool:
        """True from `begin` to `end`."""
        return self._ended != self.begun

    def begin(self) -> None:
        """The state is about to change; does nothing within a change."""
        if not self.is_under_way:
            self._work = []
            self.begun += 1

    def end(self) -> None:
        """The state has changed, or its change has failed."""
        self._ended = self.begun

    def note_work(self, devices: Iterable[torch.device]) -> None:
        """The current streams of these devices have been given work of the change that is under way."""
        accelerators = {device for device in devices if device.type != "cpu"}
        self._work += [torch.accelerator.current_stream(device).record_event() for device in accelerators]

    def wait_for_work(self) -> None:
        """Block until devices have done the work of the last change, but not what came after: that may need peers."""
        for event in list(self._work):
            event.synchronize()

    @contextmanager
    def one(self, devices: Iterable[torch.device]) -> Iterator[None]:
        """A change, or a part of the one that is under way, with work on these devices."""
        is_part = self.is_under_way
        self.begin()
        try:
            yield
        finally:
            self.note_work(devices)
            if not is_part:
                self.end()
