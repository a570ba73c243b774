"""What one optimizer's steps took: seconds by phase and bytes, added up as events end."""

import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ddp_zero.record import flight
from ddp_zero.record.ring import Span, moves, open_spans

_PENDING = 4096  # intervals on a device whose ends nobody has asked for

_optimizers = itertools.count()


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
        span = flight.RING.take()
        span.phase, span.bucket, span.step, span.recorder = phase, bucket, self.step, self
        span.begun = span.ended = span.sent = span.received = 0
        span.message = span.peer = ""
        span.failed = False
        span.thread = threading.get_ident()
        return span

    def ended(self, span: Span, error: BaseException | None) -> None:
        """Add up an event that has ended; write the flight record if there is an error."""
        phase = span.phase
        with self._one_adds:
            self.totals[phase] = self.totals.get(phase, 0) + span.ended - span.counted
        if self.clock is not None and span.start_mark is not None:
            self._pending.append((Interval(phase, span.step), span.start_mark, self.clock.mark()))
            span.start_mark = None
        if error is not None:
            where = phase if span.bucket < 0 else f"{phase} of bucket {span.bucket}"
            flight.write(f"an error in {where}", f"{type(error).__name__}: {error}")

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
