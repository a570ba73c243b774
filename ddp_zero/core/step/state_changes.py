"""The changes of one rank's optimizer state, counted, and the state that each has left, for a thread that reads it.

A script runs ahead of its accelerators. When it has issued step 8, the device may not have begun it: its kernels stand
behind a collective that a peer has yet to join, perhaps the one that asks for the state of step 7. The device still
holds that state, and nothing can overwrite it before the peer goes on; values on the host (step counters, numbers) are
already those of step 8. So each change leaves a `StateVersion`, with the host's values of then, which is good until the
*device* begins the next change.
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


class _Reach:
    """The progress of a change: true once it may have written to the state of before."""

    def __init__(self) -> None:
        self._is_there = False
        self._begun: dict[torch.device, torch.Event] = {}  # reached by the stream that makes the change, before that

    def __bool__(self) -> bool:
        self._is_there = self._is_there or any(event.query() for event in list(self._begun.values()))
        return self._is_there

    def note(self, device: torch.device) -> None:
        """The change begins on a device: for an accelerator, once its current stream has come to this point."""
        if device.type == "cpu":
            self._is_there = True
        elif device not in self._begun:
            self._begun[device] = torch.accelerator.current_stream(device).record_event()

    def wait(self) -> None:
        for event in self._begun.values():
            event.synchronize()


class StateVersion:
    """The state that a change has left, until it `is_over`.

    Attributes:
        values: the inner optimizer's state, by stepped tensor.
        successor: the next change.
    """

    def __init__(self, values: State, work: Sequence[torch.Event], successor: _Reach) -> None:
        self.values = values
        self.successor = successor
        self._work = work

    @property
    def is_over(self) -> bool:
        """True if the next change may have written to it; if not, all that was read until now is of this version."""
        return bool(self.successor)

    def wait(self) -> None:
        """Block until devices have done the work of its change, but not later work: that may need peers."""
        for event in self._work:
            event.synchronize()


class StateChanges:
    """Counts the changes of this rank's optimizer state, and keeps the states that they leave, for readers in threads.

    Every rank counts the same changes (steps, loads, moves to new owners), so ranks with equal counts hold shards of
    one state.

    Args:
        inner: the optimizer that holds the state.
    """

    def __init__(self, inner: Optimizer) -> None:
        self.begun = 0  # changes
        self.ended = 0
        self.await_peers: Callable[[int], None] | None = None  # called once, with the number of this rank's next step
        self.is_read = False  # whether a thread may ask for versions
        self._inner = inner
        self._is_announced = False
        self._work: list[torch.Event] = []
        self._reach, self._next_reach = _Reach(), _Reach()  # of the last change that has begun, and of the next one
        self._left: dict[int, StateVersion] = {}  # by count; changes have begun since, but not yet on the devices
        self._version_lock = threading.Lock()

    # The script's thread

    @property
    def is_under_way(self) -> bool:
        return self.ended != self.begun

    @property
    def pending(self) -> int | None:
        """A change that was issued, and that the devices have not begun; None if there is none."""
        return next((number + 1 for number, version in list(self._left.items()) if not version.is_over), None)

    @property
    def reached(self) -> int:
        """The number of the last change that this rank has come to, before or after its first write."""
        return self.begun + (self._is_announced and not self.is_under_way)

    def announce(self) -> None:
        """A step has begun, in which this rank may change its state later than others."""
        self._is_announced = True
        await_peers, self.await_peers = self.await_peers, None
        if await_peers is not None:
            await_peers(self.begun + 1)

    def decline(self) -> None:
        """The step that has begun changes nothing, on any rank."""
        self._is_announced = False

    def abandon(self) -> None:
        """The step has failed; it counts as a change on every rank on which it had begun, whatever it has changed."""
        if self._is_announced:
            self.begin()
        self.end()

    def begin(self, devices: Sequence[torch.device] = ON_HOST) -> None:
        """The state is about to change, on the host or by the current streams of these devices.

        Within a change, it goes on there.
        """
        if self.ended == self.begun:
            self._open(devices)
        for device in devices:
            self._reach.note(device)

    def _open(self, devices: Sequence[torch.device]) -> None:
        keeps = self.is_read and all(device.type != "cpu" for device in devices)
        if keeps:
            self._drop_old()
        with self._version_lock:
            values, outlasts = _values_now(self._inner.state) if keeps else ({}, False)
            if outlasts:
                self._left[self.begun] = StateVersion(values, self._work, self._next_reach)
            else:
                for reach in (*(version.successor for version in self._left.values()), self._next_reach):
                    reach.note(_HOST)
                self._left.clear()
            self._work = []
            self._reach, self._next_reach = self._next_reach, _Reach()
            # before the first write, or a reader could mix values of two steps unnoticed
            self.begun += 1

    def _drop_old(self) -> None:
        last = self._left.get(self.begun - 1)
        if last is not None and not last.is_over and _are_replaced(last.values, self._inner.state):
            # an optimizer that puts new tensors into its state would have as many states in memory as the script is
            # steps ahead. Not within the lock: the peer that this waits for may be asking
            last.successor.wait()
        for number in list(self._left):
            if not self._left[number].is_over:
                break
            del self._left[number]

    def end(self) -> None:
        """The state has changed, or its change has failed."""
        self._is_announced = False
        # last: a reader that sees equal counts takes all values for one state
        self.ended = self.begun

    def note_work(self, accelerators: Iterable[torch.device]) -> None:
        """The current streams of these devices have been given work of the change that is under way, or was last."""
        # a thread that copies state waits for these events, so that it never reads a state half stepped
        self._work += [torch.accelerator.current_stream(device).record_event() for device in accelerators]

    @contextmanager
    def one(self, accelerators: Iterable[torch.device]) -> Iterator[None]:
        """A change, or a part of the one that is under way, with work on these devices."""
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
        """The state that a change has left, which has ended here; None if a later one may have written to it."""
        with self._version_lock:
            if self.begun == count:
                return StateVersion(_values_now(self._inner.state)[0], list(self._work), self._next_reach)
            found = self._left.get(count)
        return None if found is None or found.is_over else found

    def wait_for_work(self) -> None:
        """Block until devices have done the work of the last change, but not later work: that may need peers."""
        # a copy: the thread that steps may replace the list meanwhile
        for event in list(self._work):
            event.synchronize()


def _values_now(state: State) -> tuple[State, bool]:
    """The state, and whether it outlasts steps that an accelerator has yet to run.

    Of parameters that an accelerator steps, values that the host has are copied. All others are stepped on the host, as
    they are read.
    """
    can_keep = True

    def kept(value: Any) -> Any:
        nonlocal can_keep
        if not isinstance(value, Tensor):
            return fill(value, Tensor, kept) if isinstance(value, dict | list | tuple) else value
        if not value.is_cpu:
            return value
        if value.numel() > _MOST_COPIED:  # a class that steps on the host by itself, or a state that is parked there
            can_keep = False
            return value
        return value.detach().clone()

    values: State = {}
    for key, held in state.items():
        is_by_device = isinstance(key, Tensor) and key.device.type != "cpu"  # `is_cpu` waits for a parameter in flight
        values[key] = kept(held) if is_by_device else held
    return values, can_keep


def _are_replaced(before: State, now: State) -> bool:
    """True if the state has other tensors on accelerators in the places of those that it had."""
    for key, held in before.items():
        if isinstance(key, Tensor) and key.device.type != "cpu" and key in now:
            old, new = (
                [one for one in tensors_in(state, scalars=True) if not one.is_cpu] for state in (held, now[key])
            )
            if any(one is not other for one, other in zip(old, new, strict=False)):
                return True
    return False
