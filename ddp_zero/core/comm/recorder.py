"""Events of this rank: the last few thousand in a ring, and for each optimizer sums over all of them.

An event costs about a microsecond. Errors are passed to the functions registered with `when_failing`.

Not chosen: a thread that samples (misses short waits, and knows nothing of messages); writing events as they come (each
step would pay for it).
"""

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter_ns
from typing import Any

CAPACITY = 4096
"""Capacity of a process's ring; a power of two."""
_PENDING = 4096  # intervals on a device that have not been read yet
SAMPLED = 64  # see `Recorder.when_ended`


class _Current(threading.local):
    span: "Span | None" = None  # the innermost event of each thread
    error = 0  # the id of the last error that has left an event


current = _Current()


class Span:
    """One event, within a `Label`, in a slot of the ring.

    Times are `time.perf_counter_ns`, 0 if there is none; ``number`` is -1 in an unused slot; ``counted`` is the time up
    to which the event is in the sums; ``message`` and ``peer`` name the last message waited for. ``adds_bytes``: they
    are added to the sums at its end.
    """

    __slots__ = (
        *("number", "phase", "bucket", "step", "begun", "ended", "counted", "sent", "received", "message", "peer"),
        *("failed", "outer", "recorder", "start_mark", "range", "adds_bytes"),
    )

    def __init__(self) -> None:
        self.number = self.bucket = -1
        self.phase = self.message = ""
        self.step = self.begun = self.counted = self.ended = self.sent = self.received = 0
        self.peer: str | Callable[[], str] = ""
        self.failed = self.adds_bytes = False
        self.outer: Span | None = None
        self.recorder: Recorder | None = None
        self.start_mark: object = None
        self.range: AbstractContextManager[object] | None = None  # of a profiler

    def as_row(self, origin: float) -> list[Any]:
        """The columns of a flight record, see `ddp_zero.insight.record_format`; ``origin`` is when the clock began."""
        ended = None if not self.ended else round(origin + self.ended * 1e-9, 6)
        optimizer = -1 if self.recorder is None else self.recorder.optimizer
        begun = round(origin + self.begun * 1e-9, 6)
        return [
            *(self.number, optimizer, self.step, self.phase, self.bucket, begun, ended),
            *(self.sent, self.received, self.message, name_of(self.peer), self.failed),
        ]


class Label:
    """A reusable context: each entry is an event, this thread's innermost one. Threads may be in it concurrently."""

    __slots__ = ("bucket", "phase", "recorder")

    def __init__(self, recorder: "Recorder", phase: str, bucket: int) -> None:
        self.recorder = recorder
        self.phase = phase
        self.bucket = bucket

    def __enter__(self) -> Span:
        recorder, ring = self.recorder, RING
        with ring.one_takes:  # threads get different numbers, and so different slots
            number = ring.taken
            ring.taken = number + 1
        span = ring.slots[number & ring.mask]
        if span.begun and not span.ended:
            number, span = ring.pass_over_unfinished()
        span.number = ring.newest = number
        span.recorder, span.phase, span.bucket, span.step = recorder, self.phase, self.bucket, recorder.step
        span.begun = span.ended = span.sent = span.received = 0
        span.message = span.peer = ""
        span.failed, span.start_mark, span.range, span.adds_bytes = False, None, None, False
        if recorder.is_profiling():
            span.range = recorder.open_range(span)
        span.outer = current.span
        current.span, current.error = span, 0
        if recorder.clock is not None:
            span.start_mark = recorder.clock.mark()
        span.begun = span.counted = perf_counter_ns()
        return span

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        span, recorder = current.span, self.recorder
        assert span is not None, "entered by this thread"
        span.ended = perf_counter_ns()
        current.span, span.outer = span.outer, None
        if error is None:
            span.peer = ""  # the function may refer to a process group, which must not outlive its users
        else:
            _note_failure(span, error)
        with recorder.one_adds:
            recorder.totals[span.phase] += span.ended - span.counted
        if span.start_mark is not None:
            recorder.add_device_time(span)
        if span.range is not None:
            span.range.__exit__(kind, error, traceback)
            span.range = None


Act = tuple[Label | None, Callable[..., object]]
"""A call, and the label of its event; None: it is none. It is given what its sequence is given."""


class Ring:
    """Slots for the last ``capacity`` events of all threads, a power of two."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        assert capacity.bit_count() == 1, f"a capacity of {capacity}, not a power of two"
        self.slots = [Span() for _ in range(capacity)]
        self.mask = capacity - 1
        self.taken = 0  # numbers given to events
        self.one_takes = threading.Lock()
        self.newest = -1

    def pass_over_unfinished(self) -> tuple[int, Span]:
        """The next slot whose event has ended, and the number of a new one there; any slot if none has ended."""
        for _ in self.slots:  # at most once around: abandoned events never end, and outer ones end after later ones
            with self.one_takes:
                number, self.taken = self.taken, self.taken + 1
            slot = self.slots[number & self.mask]
            if slot.ended or not slot.begun:
                break
        return number, slot

    def events(self) -> list[Span]:
        """Events of the ring, oldest first. Other threads' may still change."""
        return sorted((slot for slot in self.slots if slot.number >= 0 and slot.begun), key=lambda slot: slot.number)

    def newest_time(self) -> int:
        """Time of the newest begin or end, as `time.perf_counter_ns`; 0 if there is none."""
        return max((max(slot.begun, slot.ended) for slot in self.slots if slot.number >= 0), default=0)


def note_failure(error: BaseException) -> None:
    """Note an error that does not leave this thread's innermost event."""
    if current.span is not None:
        _note_failure(current.span, error)


def _note_failure(span: Span, error: BaseException) -> None:
    span.failed, span.peer = True, name_of(span.peer)
    is_new, current.error = current.error != id(error), id(error)
    if is_new and span.recorder is not None:
        # once per error: it leaves each enclosing event as well
        span.recorder.tell(span, error)


def one_by_one(acts: Iterable[Act], *given: Any) -> None:
    """Do these acts, in this order, each within its label."""
    for label, act in acts:
        if label is None:
            act(*given)
        else:
            with label:
                act(*given)


def name_of(peer: str | Callable[[], str]) -> str:
    """The name of a rank, if it can still be found."""
    try:
        return peer() if callable(peer) else peer
    except Exception as error:  # of a process group that is gone
        return f"unknown ({type(error).__name__})"


def waits_for(message: str, peer: Callable[[], str]) -> None:
    """Record the message that this thread's innermost event waits for; ``peer`` is called only for a record."""
    span = current.span
    if span is not None:
        # a function, not a name: naming a rank costs more than the event, and is needed only after a failure
        span.message, span.peer = message, peer


def open_spans() -> Iterator[Span]:
    """This thread's unfinished events, innermost first."""
    span = current.span
    while span is not None:
        yield span
        span = span.outer


class Recorder:
    """Records events of one optimizer, and adds them up: nanoseconds on the host by phase, bytes sent and received."""

    def __init__(self) -> None:
        self.when_ended: Callable[[], None] | None = None  # after the first three steps and every `SAMPLED`-th
        self.optimizer = next(_optimizers)  # tells this process's optimizers apart
        self.step = 1  # under way
        self.totals: dict[str, int] = defaultdict(int, sent=0, received=0)
        self.at_end: dict[str, int] = {}  # `totals` at the end of the last step
        self.before: dict[str, int] = {}  # and of the one before it
        self.ended_at = self.began_at = 0  # when these two were
        self.skipped = 0
        self.snapshots: dict[str, float] = {}  # kept by `ddp_zero.snapshots`
        self.clock: Any = None  # `insight.stats.StreamClock`; without one the host's time counts
        self._pending: deque[tuple[Interval, Any, Any]] = deque(maxlen=_PENDING)
        self.one_adds = threading.Lock()

    def label(self, phase: str, bucket: int = -1) -> Label:
        """A reusable context: an event and, under a profiler, a range as ``ddp_zero::local_step (bucket 3)``."""
        return Label(self, phase, bucket)

    def sequence(self, acts: Iterable[Act]) -> Callable[..., None]:
        """A function that does these acts, in this order, and leaves the events and sums of their labels.

        A label as a context costs the host six calls. Here the event of an act begins when the act before has ended.
        Only a sequence that is made under a profiler shows it ranges.
        """
        acts = tuple(acts)
        if self.is_profiling():
            return partial(one_by_one, acts)
        labels = [label for label, _ in acts if label is not None]
        num, add_device_time = len(labels), self.add_device_time
        phases = [label.phase for label in labels]

        def run(*given: Any) -> None:
            ring, clock, outer, place = RING, self.clock, current.span, 0
            slots, mask, step = ring.slots, ring.mask, self.step
            with ring.one_takes:
                number = ring.taken
                ring.taken = number + num
            times, sent, received = [0] * num, 0, 0
            mark: object = None
            if clock is not None:
                mark = clock.mark()
            now = perf_counter_ns()
            try:
                for label, act in acts:
                    if label is None:
                        act(*given)
                        continue
                    span = slots[number & mask]
                    taken, number = number, number + 1
                    if span.begun and not span.ended:
                        taken, span = ring.pass_over_unfinished()
                    span.number = ring.newest = taken
                    span.recorder, span.phase, span.bucket, span.step = self, label.phase, label.bucket, step
                    span.begun = span.ended = span.sent = span.received = 0
                    span.message = span.peer = ""
                    span.failed, span.start_mark, span.range, span.adds_bytes = False, mark, None, True
                    span.outer = outer
                    span.begun = span.counted = now
                    current.span, current.error = span, 0
                    act(*given)
                    span.ended = now = perf_counter_ns()
                    current.span, span.outer = outer, None
                    span.peer = ""
                    times[place], place = now - span.counted, place + 1
                    sent, received = sent + span.sent, received + span.received
                    if clock is not None:
                        mark = add_device_time(span)
            except BaseException as error:
                if current.span is not outer and label is not None:
                    sent, received = sent + span.sent, received + span.received
                    label.__exit__(type(error), error, error.__traceback__)
                raise
            finally:
                with self.one_adds:
                    totals = self.totals
                    for phase, taken in zip(phases, times, strict=True):
                        totals[phase] += taken
                    totals["sent"] += sent
                    totals["received"] += received

        return run

    def is_profiling(self) -> bool:
        """True under a profiler; never in this torch-free base class."""
        return False

    def open_range(self, span: Span) -> AbstractContextManager[object]:
        """An open range of the profiler."""
        raise NotImplementedError("Expected a recorder that knows a profiler, got a plain one.")

    def add_device_time(self, span: Span) -> object:
        """Mark the end of an event on its device; returns the mark."""
        mark, span_mark = None, span.start_mark
        if self.clock is not None:
            # only marks: reading the clock here would wait for the device
            mark = self.clock.mark()
            self._pending.append((Interval(span.phase, span.step), span_mark, mark))
        span.start_mark = None
        return mark

    def tell(self, span: Span, error: BaseException) -> None:
        where = span.phase if span.bucket < 0 else f"{span.phase} of bucket {span.bucket}"
        for tell in _told_of_errors:
            tell(f"an error in {where}", f"{type(error).__name__}: {error}")

    def add_bytes(self, sent: int, received: int) -> None:
        """Add bytes of parameters and gradients whose messages were posted."""
        span = current.span
        if span is not None and span.adds_bytes and span.recorder is not self:
            span = None  # of another optimizer, in whose sequence this one's messages are sent
        if span is not None:
            span.sent += sent
            span.received += received
        if span is None or not span.adds_bytes:
            with self.one_adds:
                self.totals["sent"] += sent
                self.totals["received"] += received

    def step_ended(self, now: int, stepped: bool) -> None:
        """End a step, taken or skipped. Open events of this thread count up to now, and from now in the next step."""
        for span in open_spans():
            if span.recorder is self:
                self.totals[span.phase] += now - span.counted
                span.counted = now
        self.step += 1
        self.skipped += not stepped
        self.before, self.at_end = self.at_end, self.totals.copy()
        self.began_at, self.ended_at = self.ended_at, now
        if self.when_ended is not None and ((ended := self.step - 1) <= 3 or ended % SAMPLED == 0):
            self.when_ended()

    def on_device(self) -> list["Interval"]:
        """Intervals completed on the device since the last call, in order.

        Does not wait: a later call returns the remaining ones, unless they exceed the capacity.
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
    """Time on a device; ``is_beside`` if the training loop did not wait for its stream."""

    phase: str
    step: int
    seconds: float = 0.0
    is_beside: bool = False


def when_failing(tell: Callable[[str, str], object]) -> None:
    """Register a function of a reason and an error, as text, to be called when an event ends with an error."""
    _told_of_errors.append(tell)


RING = Ring()
"""Events of this process."""

_optimizers = itertools.count()
_told_of_errors: list[Callable[[str, str], object]] = []
