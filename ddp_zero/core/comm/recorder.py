"""Events of this rank: the last few thousand in a ring buffer, and for each optimizer sums over all its events.

Each `Span` appends timestamps and annotations to a list of its own, by one call each. Events and sums are derived from
these lists when they are read. Errors are passed to the functions registered with `on_failure`.

Not chosen: a thread that samples (misses short waits, and knows nothing of messages); writing events as they come (each
step would pay for it).
"""

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, groupby, pairwise, repeat
from operator import attrgetter, is_, itemgetter
from time import perf_counter_ns
from typing import Any, NamedTuple

CAPACITY = 1024
"""Spans in a process's ring buffer: a few thousand events."""
MOST_UNREAD = 256  # spans that are not added up yet
SAMPLED = 64  # see `Recorder.on_step_ended`


class _Current(threading.local):
    span: "Span | None" = None  # the innermost span of each thread
    reported: tuple[int, str] = (0, "")  # time and text of the last error that was reported

    def __init__(self) -> None:
        _threads[threading.get_ident()] = self.__dict__  # called once by each thread


_threads: dict[int, dict[str, Any]] = {}
current = _Current()


@dataclass(slots=True)
class Event:
    """One event, as it is read. Times are `time.perf_counter_ns`; ``ended`` is 0 while it goes on.

    ``message`` and ``peer`` name the last message waited for, the peer only of a wait that goes on or has failed.
    """

    optimizer: int
    step: int
    phase: str
    bucket: int
    begun: int
    ended: int = 0
    sent: int = 0
    received: int = 0
    message: str = ""
    peer: str | Callable[[], str] = ""
    failed: bool = False

    def as_row(self, number: int, origin: float) -> list[Any]:
        """The columns of a flight record, see `ddp_zero.insight.record_format`; ``origin`` is when the clock began."""
        ended = None if not self.ended else round(origin + self.ended * 1e-9, 6)
        begun = round(origin + self.begun * 1e-9, 6)
        return [
            *(number, self.optimizer, self.step, self.phase, self.bucket, begun, ended),
            *(self.sent, self.received, self.message, name_of(self.peer), self.failed),
        ]


class Failure(NamedTuple):
    """Marks the event that goes on as failed, with the name of the peer that it waited for."""

    peer: str


@dataclass(slots=True, eq=False)
class Labels:
    """The labels of consecutive acts. ``phases`` begins with an empty phase, as that of an act without a label."""

    recorder: "Recorder"
    phases: Sequence[str]
    buckets: Sequence[int]


class Span:
    """Consecutive acts, with their times: a run of a `Recorder.sequence`, or the block that a `Label` encloses.

    Attributes:
        log: the time when the first act began, and the time when each act ended; before that time, of the same act,
            the messages that it waited for (str), bytes sent and received (tuple), errors (`Failure`). Extended by
            ``+=``, which makes no call.
        peer: the name, or a function that returns it, of the peer of the last message.
        marks: a device clock's marks, when the first act began and when acts with a label ended.
        range: the open range of a profiler.
    """

    labels: Labels
    step: int
    log: list[Any]
    outer: "Span | None" = None
    peer: str | Callable[[], str] = ""
    marks: list[Any] | None = None
    range: AbstractContextManager[object] | None = None

    def events(self) -> list[Event]:
        """The span's events so far, in order; events of another thread's span may still change."""
        labels, events, event = self.labels, list[Event](), None
        acts = zip(labels.phases[1:], labels.buckets, strict=True)
        for entry in [*self.log]:
            if isinstance(entry, int):
                if event is not None:
                    event.ended = entry
                    event.peer = event.peer if event.failed else ""
                phase, bucket = next(acts, ("", -1))
                event = Event(labels.recorder.optimizer, self.step, phase, bucket, entry) if phase else None
                events += [event] if event is not None else []
            elif event is None:
                continue
            elif isinstance(entry, str):
                event.message, event.peer = entry, self.peer
            elif isinstance(entry, Failure):
                event.failed, event.peer = True, entry.peer
            else:
                event.sent, event.received = event.sent + entry[0], event.received + entry[1]
        return events

    def unfinished(self) -> Event | None:
        """The event that goes on, if there is one."""
        events = self.events()
        return events[-1] if events and not events[-1].ended else None

    def newest_time(self) -> int:
        return next(entry for entry in reversed(self.log) if isinstance(entry, int))

    def note(self, error: BaseException) -> None:
        """Note an error in the event that goes on, if there is one, and report the error."""
        if (event := self.unfinished()) is not None:
            self.log.append(Failure(name_of(event.peer)))
            self._report(event, error)

    def fail(self, error: BaseException) -> None:
        """End the span with an error, which belongs to the event that goes on, if there is one."""
        labels = self.labels
        log = self.log
        event = self.unfinished()
        ended = perf_counter_ns()
        num = sum(isinstance(entry, int) for entry in log)  # of events that have begun
        recorder = labels.recorder
        if num <= len(labels.buckets):
            failure = [] if event is None else [Failure(name_of(event.peer))]
            shorter = Labels(recorder, labels.phases[: num + 1], labels.buckets[:num])
            # at once, or an interruption would leave a span whose times are not those of its labels
            self.labels = shorter
            self.log = [*log, *failure, ended]
            recorder.unread.append(self)
        if event is not None:
            self._report(event, error)

    def _report(self, event: Event, error: BaseException) -> None:
        """Report an error once, although it leaves each enclosing event as well."""
        (at, reported), text = current.reported, f"{id(error)} {type(error).__name__}: {error}"
        if reported != text or at < event.begun:
            current.reported = perf_counter_ns(), text
            self.labels.recorder.report(event, error)


class Label(Labels):
    """A reusable context, also for several threads at once: each entry is an event, its thread's innermost event."""

    __slots__ = ()

    @property
    def phase(self) -> str:
        return self.phases[1]

    @property
    def bucket(self) -> int:
        return self.buckets[0]

    def __enter__(self) -> Span:
        recorder, span = self.recorder, Span()
        span.labels, span.step, span.outer = self, recorder.step, current.span
        if recorder.is_profiling():
            span.range = recorder.open_range(self)
        if recorder.clock is not None:
            span.marks = [recorder.clock.mark()]
        span.log = [perf_counter_ns()]
        RECENT_SPANS.spans.append(span)
        current.span = span
        return span

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        span: Any = current.span
        recorder = self.recorder
        if error is None:
            span.log += (perf_counter_ns(),)
            recorder.unread.append(span)
        else:
            span.fail(error)
        # the peer's function may refer to a process group, which must not outlive its users
        current.span, span.outer, span.peer = span.outer, None, ""
        if recorder.unread[MOST_UNREAD:]:
            recorder.add_up()
        if span.marks is not None:
            span.marks.append(recorder.clock.mark())
            recorder.marked.append(span)
        if span.range is not None:
            span.range.__exit__(kind, error, traceback)
            span.range = None


Act = tuple[Label | None, Callable[..., object]]
"""The label of an event, or None for no event, and a function, called with the arguments of its sequence."""


class RecentSpans:
    """The last ``capacity`` spans of all threads, and those that have not ended."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.spans: deque[Span] = deque(maxlen=capacity)  # other threads append: copied before it is iterated

    def _all(self) -> Iterable[Span]:
        """All spans in the order in which they began; spans that go on but were pushed out of the buffer come first."""
        unfinished = [span for thread in [*_threads.values()] for span in _enclosing(thread.get("span"))]
        return dict.fromkeys([*reversed(unfinished), *self.spans])

    def events(self) -> list[Event]:
        """Events of the buffered spans, oldest first; events of other threads may still change."""
        return sorted(chain.from_iterable(span.events() for span in self._all()), key=attrgetter("begun"))

    def newest_time(self) -> int:
        """Time of the newest begin or end, as `time.perf_counter_ns`; 0 if there is none."""
        return max((span.newest_time() for span in self._all()), default=0)


def note_failure(error: BaseException) -> None:
    """Note an error that does not leave this thread's innermost event."""
    span = next((span for span in _enclosing(current.span) if span.unfinished() is not None), None)
    if span is not None:
        span.note(error)


def run_acts(acts: Iterable[Act], *given: Any) -> None:
    """Run these acts, in this order, each within its label; consecutive acts with one label within it together."""
    for label, labelled in groupby(acts, itemgetter(0)):
        with nullcontext() if label is None else label:
            for _, act in labelled:
                act(*given)


def name_of(peer: str | Callable[[], str]) -> str:
    """The name of a rank, if it can still be found."""
    try:
        return peer() if callable(peer) else peer
    except Exception as error:  # of a process group that is gone
        return f"unknown ({type(error).__name__})"


def record_wait(message: str, peer: Callable[[], str]) -> None:
    """Record the message that this thread's innermost event waits for; ``peer`` is called only if that is read."""
    span = current.span
    if span is not None:
        # a function, not a name: naming a rank costs more than the event, and is needed only after a failure
        span.log.append(message)
        span.peer = peer


def open_events() -> Iterator[Event]:
    """This thread's unfinished events, innermost first."""
    return (event for span in _enclosing(current.span) if (event := span.unfinished()) is not None)


def _enclosing(span: Span | None) -> Iterator[Span]:
    while span is not None:
        yield span
        span = span.outer


class Recorder:
    """Records events of one optimizer, and adds them up: nanoseconds on the host by phase, bytes sent and received."""

    def __init__(self) -> None:
        self.on_step_ended: Callable[[], None] | None = None  # after the first three steps and every `SAMPLED`-th
        self.optimizer = next(_optimizers)  # tells this process's optimizers apart
        self.step = 1  # under way
        self.totals_at_end: dict[str, int] = {}  # `totals` at the end of the last step
        self.totals_at_begin: dict[str, int] = {}  # `totals` at its beginning, the end of the step before
        self.ended_at = self.began_at = 0  # the times of these totals
        self.skipped = 0
        self.snapshots: dict[str, float] = {}  # kept by `ddp_zero.snapshots`
        self.clock: Any = None  # `insight.stats.StreamClock`; without one the host's time counts
        self._sums: dict[str, int] = defaultdict(int, sent=0, received=0)  # without `unread`
        self.unread: list[Span] = []  # ended spans that are not added up yet
        self.marked: deque[Span] = deque(maxlen=CAPACITY)  # spans whose marks have not been read
        self._sums_lock = threading.RLock()  # a signal handler may read the sums

    def label(self, phase: str, bucket: int = -1) -> Label:
        """A reusable context: an event and, under a profiler, a range as ``ddp_zero::local_step (bucket 3)``."""
        return Label(self, ("", phase), (bucket,))

    def sequence(self, acts: Iterable[Act]) -> Callable[..., None]:
        """A function that runs these acts, in this order, and records the events and sums of their labels.

        Consecutive acts with the same label, or without one, are one event. A run costs the host one span, and a
        timestamp for each event. Only a sequence that is made under a profiler opens the profiler's ranges.
        """
        acts = tuple(acts)
        if self.is_profiling():
            return partial(run_acts, acts)
        ends = [*(label is not following for (label, _), (following, _) in pairwise(acts)), True]
        ended = [label for (label, _), is_end in zip(acts, ends, strict=False) if is_end]
        labels = Labels(
            self,
            ("", *("" if label is None else label.phase for label in ended)),
            [-1 if label is None else label.bucket for label in ended],
        )
        steps = [(act, is_end) for (_, act), is_end in zip(acts, ends, strict=False)]

        def run(*given: Any) -> None:
            outer, span, clock = current.span, Span(), perf_counter_ns
            span.labels, span.step, span.outer = labels, self.step, outer
            span.log = log = [clock()]
            RECENT_SPANS.spans.append(span)
            current.span = span
            try:
                if self.clock is not None:
                    self._run_marked(span, steps, given)
                else:
                    for act, is_end in steps:
                        act(*given)
                        if is_end:
                            log += (clock(),)
                self.unread.append(span)
            except BaseException as error:
                span.fail(error)
                raise
            finally:
                current.span, span.outer, span.peer = outer, None, ""
                if self.unread[MOST_UNREAD:]:  # of a loop that takes no steps
                    self.add_up()

        return run

    def _run_marked(
        self, span: Span, steps: Iterable[tuple[Callable[..., object], bool]], given: tuple[Any, ...]
    ) -> None:
        """Run acts, and mark the ends of events on their device."""
        mark, phases = self.clock.mark, iter(span.labels.phases[1:])
        span.marks = marks = [mark()]
        try:
            for act, is_end in steps:
                act(*given)
                if not is_end:
                    continue
                span.log.append(perf_counter_ns())
                if next(phases):
                    marks.append(mark())
        finally:
            self.marked.append(span)

    @property
    def totals(self) -> dict[str, int]:
        """The sums so far, with those of this thread's open events."""
        return self.totals_at(perf_counter_ns())

    def totals_at(self, now: int) -> dict[str, int]:
        """`totals` at a time that has just passed."""
        with self._sums_lock:
            self.add_up()
            totals = self._sums.copy()
        span = current.span
        while span is not None:
            if span.labels.recorder is self:
                for event in span.events():
                    totals[event.phase] += (event.ended or now) - event.begun
                    totals["sent"] += event.sent
                    totals["received"] += event.received
            span = span.outer
        return totals

    def add_up(self) -> None:
        """Move the ended spans from `unread` to the sums."""
        with self._sums_lock:
            spans = self.unread[:]
            del self.unread[: len(spans)]  # other threads append
            self._add_spans(spans)

    def _add_spans(self, spans: Iterable[Span]) -> None:
        """Add up ended spans, those with the same phases at once: a bucket costs half as much then."""
        sums, moved = self._sums, list[Any]()
        runs: dict[Sequence[str], list[list[int]]] = defaultdict(list)  # times, by the phases between them
        for span in spans:
            types = [*map(type, span.log)]
            runs[span.labels.phases].append([*compress(span.log, map(is_, types, repeat(int)))])
            moved += compress(span.log, map(is_, types, repeat(tuple)))
        for phases, times in runs.items():
            for phase, (begun, ended) in zip(phases[1:], pairwise(map(sum, zip(*times, strict=False))), strict=False):
                sums[phase] += ended - begun
        sums.pop("", None)
        for direction, numbers in zip(("sent", "received"), zip(*moved, strict=True), strict=False):
            sums[direction] += sum(numbers)

    def is_profiling(self) -> bool:
        """True under a profiler; never in this torch-free base class."""
        return False

    def open_range(self, label: Label) -> AbstractContextManager[object]:
        """An open range of the profiler."""
        raise NotImplementedError("Expected a recorder that knows a profiler, got a plain one.")

    def report(self, event: Event, error: BaseException) -> None:
        where = event.phase if event.bucket < 0 else f"{event.phase} of bucket {event.bucket}"
        for callback in _failure_callbacks:
            callback(f"an error in {where}", f"{type(error).__name__}: {error}")

    def add_bytes(self, sent: int, received: int) -> None:
        """Add bytes of parameters and gradients whose messages were posted."""
        span = current.span
        if span is not None and span.labels.recorder is self:
            span.log.append((sent, received))
        else:  # no event is open, or an event of another optimizer, in which this optimizer's messages are sent
            with self._sums_lock:
                self._sums["sent"] += sent
                self._sums["received"] += received

    def step_ended(self, now: int, stepped: bool) -> None:
        """End a step, taken or skipped. Open events of this thread count up to now, and from now in the next step."""
        self.step += 1
        self.skipped += not stepped
        self.totals_at_begin, self.totals_at_end = self.totals_at_end, self.totals_at(now)
        self.began_at, self.ended_at = self.ended_at, now
        if self.on_step_ended is not None and ((ended := self.step - 1) <= 3 or ended % SAMPLED == 0):
            self.on_step_ended()

    def take_intervals(self) -> list["Interval"]:
        """The intervals that the device has completed since the last call, in order.

        Does not wait: a later call returns the remaining intervals, unless they exceed the capacity.
        """
        intervals: list[Interval] = []
        while self.marked and self.clock is not None:
            span = self.marked[0]
            marks = [*pairwise(span.marks or ())]
            seconds = [*itertools.starmap(self.clock.seconds, marks)]
            if None in seconds:
                break
            intervals += [
                Interval(phase, span.step, taken, self.clock.is_on_side_stream(begun))
                for phase, taken, (begun, _) in zip(filter(None, span.labels.phases), seconds, marks, strict=False)
            ]
            self.marked.popleft().marks = None
        return intervals


@dataclass(frozen=True)
class Interval:
    """The time of an event on a device; ``is_on_side_stream`` if the training loop did not wait for its stream."""

    phase: str
    step: int
    seconds: float = 0.0
    is_on_side_stream: bool = False


def on_failure(callback: Callable[[str, str], object]) -> None:
    """Register a function of a reason and an error, as text, to be called when an event ends with an error."""
    _failure_callbacks.append(callback)


RECENT_SPANS = RecentSpans()
"""The last spans of this process."""

_optimizers = itertools.count()
_failure_callbacks: list[Callable[[str, str], object]] = []
