"""The last few thousand events of this process, in slots that are made once and used again."""

import itertools
import threading
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any, Protocol

CAPACITY = 4096
"""A power of two."""


class Adds(Protocol):
    """What a span reports to: a `ddp_zero.record.recorder.Recorder`."""

    optimizer: int
    clock: Any

    def ended(self, span: "Span", error: BaseException | None) -> None:
        """Add up an event that has ended, by an error if there is one that no event within it has reported."""


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
        thread: `threading.get_ident`.
        counted: up to when its time was added up already; by default, not at all.
    """

    __slots__ = (
        *(
            "begun",
            "bucket",
            "counted",
            "ended",
            "failed",
            "message",
            "number",
            "outer",
            "peer",
            "phase",
            "received",
            "recorder",
        ),
        *("sent", "start_mark", "step", "thread"),
    )

    def __init__(self) -> None:
        self.number = self.bucket = -1
        self.phase = self.message = ""
        self.step = self.begun = self.counted = self.ended = self.sent = self.received = self.thread = 0
        self.peer: str | Callable[[], str] = ""
        self.failed = False
        self.outer: Span | None = None
        self.recorder: Adds | None = None
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
        """The slot of the oldest event, for a new one."""
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


_current = threading.local()
