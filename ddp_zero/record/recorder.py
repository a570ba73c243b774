"""What happens on this rank, as events: the last few thousand in a ring, and for each optimizer sums over all of them.

An event costs about a microsecond. Errors are passed on to who asked for them with `when_failing`.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any, Protocol

CAPACITY = 4096
"""Of the ring of a process; a power of two."""
_PENDING = 4096  # intervals on a device whose ends nobody has asked for


class Span:
    """A slot: one event, from `__enter__` to `__exit__`. Get one from `Recorder.span`.

    Attributes:
        number: how many events this process had recorded before; -1 in a slot that was never used.
        phase: what was done, such as ``wait_reduce``.
        bucket: of which bucket, or -1.
        step: during which step, counted from 1.
        begun, ended: `time.perf_counter_ns`; 0 if it has not.
        sent, received: bytes of messages posted meanwhile.
        message: what was waited for last, such as ``the sync of bucket 3``.
        peer: the rank whose message is waited for, by name, or a function that returns it; empty once it has arrived.
        failed: whether an error has ended it.
        counted: up to when its time was added up already; by default, not at all.
    """

    __slots__ = (
        *("number", "phase", "bucket", "step", "begun", "ended", "counted", "sent", "received", "message", "peer"),
        *("failed", "outer", "recorder", "start_mark"),
    )

    def __init__(self) -> None:
        self.number = self.bucket = -1
        self.phase = self.message = ""
        self.step = self.begun = self.counted = self.ended = self.sent = self.received = 0
        self.peer: str | Callable[[], str] = ""
        self.failed = False
        self.outer: Span | None = None
        self.recorder: Recorder | None = None
        self.start_mark: object = None

    def __enter__(self) -> "Span":
        self.outer = getattr(_current, "span", None)
        _current.span, _current.error = self, 0
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.ended = perf_counter_ns()
        _current.span = self.outer
        self.outer = None
        if error is None:
            self.peer = ""  # the function may refer to a process group, which must not outlive its users
            is_new = False
        else:
            self.failed, self.peer = True, name_of(self.peer)
            is_new, _current.error = getattr(_current, "error", 0) != id(error), id(error)
        if self.recorder is not None:
            self.recorder.ended(self, error if is_new else None)

    def start(self) -> "Span":
        """Begin without being what this thread is in, so that a different thread may call `stop`."""
        recorder = self.recorder
        if recorder is not None and recorder.clock is not None:
            self.start_mark = recorder.clock.mark()
        self.begun = self.counted = perf_counter_ns()
        return self

    def stop(self) -> None:
        """End what `start` has begun."""
        self.ended = perf_counter_ns()
        if self.recorder is not None:
            self.recorder.ended(self, None)


class Ring:
    """Slots for the last `capacity` events of all threads.

    Args:
        capacity: a power of two.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        if capacity < 1 or capacity & (capacity - 1):
            raise ValueError(f"Expected a power of two as the capacity of a ring, got {capacity}.")
        self._slots = [Span() for _ in range(capacity)]
        self._mask = capacity - 1
        self._numbers = itertools.count()  # `next` is atomic
        self.newest = -1

    def take(self) -> Span:
        """The slot of the oldest event that has ended, for a new one; of the oldest, if none has."""
        number = next(self._numbers)
        slot = self._slots[number & self._mask]
        for _ in self._slots:  # as often as there are slots: events that were given up never end
            if slot.ended or not slot.begun:  # else it goes on, and may be what others are within
                break
            number = next(self._numbers)
            slot = self._slots[number & self._mask]
        slot.number = self.newest = number
        return slot

    def events(self) -> list[Span]:
        """What the ring holds, oldest first. Events of other threads may go on meanwhile."""
        return sorted((slot for slot in self._slots if slot.number >= 0 and slot.begun), key=lambda slot: slot.number)

    def newest_time(self) -> int:
        """When the newest event began or ended, by `time.perf_counter_ns`; 0 if there is none."""
        return max((max(slot.begun, slot.ended) for slot in self._slots if slot.number >= 0), default=0)


def name_of(peer: str | Callable[[], str]) -> str:
    """The name of a rank, as far as it can still be found."""
    try:
        return peer() if callable(peer) else peer
    except Exception as error:  # of a process group that is gone
        return f"unknown ({type(error).__name__})"


def waits_for(message: str, peer: Callable[[], str]) -> None:
    """Note in this thread's innermost event which message it waits for now, and from whom.

    Args:
        message: such as ``the sync of bucket 3``.
        peer: returns the name of a rank; called only if the record is written before the wait has ended.
    """
    span = getattr(_current, "span", None)
    if span is not None:
        span.message, span.peer = message, peer


def open_spans() -> Iterator[Span]:
    """This thread's events that have not ended, innermost first."""
    span = getattr(_current, "span", None)
    while span is not None:
        yield span
        span = span.outer


def moves(sent: int, received: int) -> None:
    """Note in this thread's innermost event the bytes of messages that it has posted."""
    span = getattr(_current, "span", None)
    if span is not None:
        span.sent += sent
        span.received += received


class DeviceClock(Protocol):
    """Measures time on a device without waiting for it."""

    def mark(self) -> Any:
        """A point in the work that was issued to the device; None where time on the host is what counts."""

    def seconds(self, begun: Any, ended: Any) -> float | None:
        """The time between two marks, or None if the device has not passed both yet."""

    def is_beside(self, mark: Any) -> bool:
        """Whether the mark is on a stream that the training loop does not wait for."""


class Recorder:
    """Records events of one optimizer, and adds them up.

    Attributes:
        optimizer: a number that tells this process's optimizers apart.
        step: the number of the step under way, from 1.
        totals: sums so far: nanoseconds on the host by phase; bytes as ``sent`` and ``received``.
        at_end, before: ``totals`` at the end of the last step and of the one before it.
        ended_at, began_at: when these two were, by `time.perf_counter_ns`.
        skipped: steps that were not taken.
        clock: for work on a device; None: the host's time is what counts.
        when_ended: called at the end of each step, or None.
    """

    def __init__(self) -> None:
        self.when_ended: Callable[[], None] | None = None
        self.optimizer = next(_optimizers)
        self.step = 1
        self.totals: dict[str, int] = {"sent": 0, "received": 0}
        self.at_end: dict[str, int] = {}
        self.before: dict[str, int] = {}
        self.ended_at = self.began_at = 0
        self.skipped = 0
        self.clock: DeviceClock | None = None
        self._pending: deque[tuple[Interval, Any, Any]] = deque(maxlen=_PENDING)
        self._one_adds = threading.Lock()

    def span(self, phase: str, bucket: int = -1) -> Span:
        """An event, which lasts from `Span.__enter__` to `Span.__exit__`."""
        span = RING.take()
        span.phase, span.bucket, span.step, span.recorder = phase, bucket, self.step, self
        span.begun = span.ended = span.sent = span.received = 0
        span.message = span.peer = ""
        span.failed = False
        return span

    def ended(self, span: Span, error: BaseException | None) -> None:
        """Add up an event that has ended; pass its error on, if there is one."""
        phase = span.phase
        with self._one_adds:
            self.totals[phase] = self.totals.get(phase, 0) + span.ended - span.counted
        if self.clock is not None and span.start_mark is not None:
            self._pending.append((Interval(phase, span.step), span.start_mark, self.clock.mark()))
            span.start_mark = None
        if error is not None:
            where = phase if span.bucket < 0 else f"{phase} of bucket {span.bucket}"
            for tell in _told_of_errors:
                tell(f"an error in {where}", f"{type(error).__name__}: {error}")

    def moved(self, sent: int, received: int) -> None:
        """Add bytes of parameters and gradients whose messages were posted."""
        with self._one_adds:
            self.totals["sent"] += sent
            self.totals["received"] += received
        moves(sent, received)

    def step_ended(self, now: int, stepped: bool) -> None:
        """A step has ended, or was not taken. What this thread is in counts up to now, and from now in the next.

        Args:
            now: `time.perf_counter_ns`.
            stepped: whether it was taken.
        """
        for span in open_spans():
            if span.recorder is self:
                self.totals[span.phase] = self.totals.get(span.phase, 0) + now - span.counted
                span.counted = now
        self.step += 1
        self.skipped += not stepped
        self.before, self.at_end = self.at_end, self.totals.copy()
        self.began_at, self.ended_at = self.ended_at, now
        if self.when_ended is not None:
            self.when_ended()

    def on_device(self) -> list["Interval"]:
        """The intervals that the device has passed since the last call, in order.

        Does not wait: those that the device has not passed are returned by a later call, unless they are too many.
        """
        found: list[Interval] = []
        while self._pending and self.clock is not None:
            interval, begun, ended = self._pending[0]
            seconds = self.clock.seconds(begun, ended)
            if seconds is None:
                break
            found.append(replace(interval, seconds=seconds, is_beside=self.clock.is_beside(begun)))
            self._pending.popleft()
        return found


@dataclass(frozen=True)
class Interval:
    """Time on a device.

    Attributes:
        phase, step: see `Span`.
        seconds: how long.
        is_beside: whether it was on a stream that the training loop does not wait for.
    """

    phase: str
    step: int
    seconds: float = 0.0
    is_beside: bool = False


def when_failing(tell: Callable[[str, str], object]) -> None:
    """Have a function called with a reason and an error, as text, when an event ends with an error."""
    _told_of_errors.append(tell)


RING = Ring()
"""The events of this process."""

_current = threading.local()
_optimizers = itertools.count()
_told_of_errors: list[Callable[[str, str], object]] = []
