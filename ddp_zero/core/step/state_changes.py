"""Counts the changes of a rank's optimizer state, and keeps versions of it for a thread that answers other ranks.

A script runs ahead of its accelerators. When it has issued step 8, the device may not have begun it: its kernels stand
behind a collective that a peer has yet to join, perhaps the one that asks for the state of step 7. The device still
holds that state, and nothing can overwrite it before the peer goes on; values on the host (step counters, numbers) are
already those of step 8. So each change leaves a `StateVersion`, with copies of the host's values, which is valid until
the *device* begins the next change.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_zero.core.local.placement import tensors_in
from ddp_zero.core.step.state_order import State
from ddp_zero.values.tree import fill

_HOST = torch.device("cpu")
ON_HOST = (_HOST,)
_MOST_COPIED = 1024
"""Elements of a tensor on the host that is copied in each change."""


class _FirstWrite:
    """The beginning of a change on its devices: true once the change may have written to the state before it."""

    def __init__(self) -> None:
        self._has_begun = False
        self._events: dict[torch.device, torch.Event] = {}  # recorded on each device's stream just before the change

    def __bool__(self) -> bool:
        self._has_begun = self._has_begun or any(event.query() for event in list(self._events.values()))
        return self._has_begun

    def note(self, device: torch.device) -> None:
        """Note that the change begins on a device: for an accelerator, where its current stream is now."""
        if device.type == "cpu":
            self._has_begun = True
        elif device not in self._events:
            self._events[device] = torch.accelerator.current_stream(device).record_event()

    def wait(self) -> None:
        for event in self._events.values():
            event.synchronize()


class StateVersion:
    """The state that a change has left, until it `may_be_overwritten`.

    Attributes:
        values: the inner optimizer's state, by stepped tensor.
        next_write: true once the next change may have written to the state.
    """

    def __init__(self, values: State, work: Sequence[torch.Event], next_write: _FirstWrite) -> None:
        self.values = values
        self.next_write = next_write
        self._work_events = work

    @property
    def may_be_overwritten(self) -> bool:
        """True if the next change may have written to the state; else all that was read is of this version."""
        return bool(self.next_write)

    def wait(self) -> None:
        """Block until devices have done the work of this change, but not later work, which may need peers."""
        for event in self._work_events:
            event.synchronize()


class StateChanges:
    """Counts the changes of this rank's optimizer state, and keeps a version after each, for threads that read it.

    Every rank counts the same changes (steps, loads, moves to new owners), so ranks with equal counts hold shards of
    one state.

    Args:
        inner: the optimizer that holds the state.
    """

    def __init__(self, inner: Optimizer) -> None:
        self.begun = 0  # number of changes that have begun
        self.ended = 0  # number of changes that have ended
        self.await_peers: Callable[[int], None] | None = None  # called once, with the number of this rank's next step
        self.keeps_versions = False  # whether a thread may ask for versions
        self._inner = inner
        self._is_announced = False
        self._work_events: list[torch.Event] = []  # recorded after the work of the last change, on its streams
        self._first_write, self._next_write = _FirstWrite(), _FirstWrite()  # of the last change to begin, of the next
        self._versions: dict[int, StateVersion] = {}  # by count; devices may not have begun the changes after them
        self._version_lock = threading.Lock()

    # The script's thread

    @property
    def is_under_way(self) -> bool:
        return self.ended != self.begun

    @property
    def pending(self) -> int | None:
        """The first change that was issued and that the devices have not begun, or None."""
        versions = list(self._versions.items())
        return next((number + 1 for number, version in versions if not version.may_be_overwritten), None)

    @property
    def reached(self) -> int:
        """The number of the last change that this rank has begun or announced."""
        return self.begun + (self._is_announced and not self.is_under_way)

    def announce(self) -> None:
        """Announce a step that has begun, in which this rank may change its state later than other ranks."""
        self._is_announced = True
        await_peers, self.await_peers = self.await_peers, None
        if await_peers is not None:
            await_peers(self.begun + 1)

    def decline(self) -> None:
        """Take back `announce`: the step changes nothing, on any rank."""
        self._is_announced = False

    def abandon(self) -> None:
        """End a step that has failed; it counts as a change on every rank that had begun it, whatever was changed."""
        if self._is_announced:
            self.begin()
        self.end()

    def begin(self, devices: Sequence[torch.device] = ON_HOST) -> None:
        """Note that the state is about to change, on the host or by the current streams of these devices.

        Within a change, the same change goes on, on these devices.
        """
        if self.ended == self.begun:
            self._open(devices)
        for device in devices:
            self._first_write.note(device)

    def _open(self, devices: Sequence[torch.device]) -> None:
        """Count a new change, and keep the state before it as a version if devices may go on to read that."""
        keeps = self.keeps_versions and all(device.type != "cpu" for device in devices)
        if keeps:
            self._drop_overwritten()
        with self._version_lock:
            values, outlasts = _keep_values(self._inner.state) if keeps else ({}, False)
            if outlasts:
                self._versions[self.begun] = StateVersion(values, self._work_events, self._next_write)
            else:
                for first_write in (*(version.next_write for version in self._versions.values()), self._next_write):
                    first_write.note(_HOST)
                self._versions.clear()
            self._work_events = []
            self._first_write, self._next_write = self._next_write, _FirstWrite()
            # before the first write, or a reader could mix values of two steps unnoticed
            self.begun += 1

    def _drop_overwritten(self) -> None:
        """Drop the versions that later changes may have overwritten; may wait for a device to reach the last change."""
        last = self._versions.get(self.begun - 1)
        if last is not None and not last.may_be_overwritten and _has_new_tensors(last.values, self._inner.state):
            # an optimizer that puts new tensors into its state would keep as many states in memory as the script is
            # steps ahead. Wait without the lock: the device may wait for a peer that is asking for a version
            last.next_write.wait()
        for number in list(self._versions):
            if not self._versions[number].may_be_overwritten:
                break
            del self._versions[number]

    def end(self) -> None:
        """End the change, also if it has failed."""
        self._is_announced = False
        # last: a reader that sees equal counts takes all values for one state
        self.ended = self.begun

    def note_work(self, accelerators: Iterable[torch.device]) -> None:
        """Note that the current streams of these devices have been given work of the current or last change."""
        # a thread that copies state waits for these events, so that it never reads a state half stepped
        self._work_events += [torch.accelerator.current_stream(device).record_event() for device in accelerators]

    @contextmanager
    def changing(self, accelerators: Iterable[torch.device]) -> Iterator[None]:
        """A context for a change, or for a part of the change under way, with work on these devices."""
        is_part = self.is_under_way
        self.begin()
        try:
            yield
        finally:
            self.note_work(accelerators)
            if not is_part:
                self.end()

    # A reader's thread

    def version(self, count: int) -> StateVersion | None:
        """The state after change ``count``, which has ended here; None if a later change may have written to it."""
        with self._version_lock:
            if self.begun == count:
                return StateVersion(_keep_values(self._inner.state)[0], list(self._work_events), self._next_write)
            found = self._versions.get(count)
        return None if found is None or found.may_be_overwritten else found

    def wait_for_work(self) -> None:
        """Block until devices have done the work of the last change, but not later work, which may need peers."""
        # a copy of the list: the thread that steps may replace it meanwhile
        for event in list(self._work_events):
            event.synchronize()


def _keep_values(state: State) -> tuple[State, bool]:
    """A state to keep, and whether it stays valid until an accelerator runs the next step.

    For parameters that an accelerator steps, values on the host are copied. All other parameters are stepped by the
    host itself, and their states are kept without a copy.
    """
    can_keep = True

    def kept(value: Any) -> Any:
        nonlocal can_keep
        if not isinstance(value, Tensor):
            return fill(value, Tensor, kept) if isinstance(value, dict | list | tuple) else value
        if not value.is_cpu:
            return value
        if value.numel() > _MOST_COPIED:  # a class that steps on the host by itself, or an offloaded state
            can_keep = False
            return value
        return value.detach().clone()

    values: State = {}
    for key, held in state.items():
        is_by_device = isinstance(key, Tensor) and key.device.type != "cpu"  # `is_cpu` waits for a parameter in flight
        values[key] = kept(held) if is_by_device else held
    return values, can_keep


def _has_new_tensors(before: State, now: State) -> bool:
    """True if tensors on accelerators were replaced by others in the state, instead of changed in place."""
    for key, held in before.items():
        if isinstance(key, Tensor) and key.device.type != "cpu" and key in now:
            states = held, now[key]
            old, new = ([each for each in tensors_in(state, scalars=True) if not each.is_cpu] for state in states)
            if any(tensor is not other for tensor, other in zip(old, new, strict=False)):
                return True
    return False
