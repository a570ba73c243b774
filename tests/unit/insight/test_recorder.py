"""Events in a ring, sums over them, and what is written when one fails; no torch, no ranks."""

import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ddp_zero.core.comm import recorder as recorder_module
from ddp_zero.core.comm.recorder import RecentSpans, Recorder, note_failure, open_events, record_wait
from ddp_zero.insight import flight, record_format
from ddp_zero.tools.postmortem.records import read_folder
from tests import HANG


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> RecentSpans:
    """A small ring in place of the process's."""
    small = RecentSpans(8)
    for module in (recorder_module, flight):
        monkeypatch.setattr(module, "RECENT_SPANS", small)
    return small


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    flight.record_to(tmp_path / "records")
    yield tmp_path / "records"
    flight.record_to(None)


class Refers:
    """Something that must not outlive its users, such as a process group."""

    def name(self) -> str:
        return "rank 3 (global rank 7)"


class Device:
    """A clock whose device passes marks when it is told to; anything that would wait fails."""

    def __init__(self) -> None:
        self.marks = 0
        self.passed = 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def seconds(self, begun: int, ended: int) -> float | None:
        return float(ended - begun) if ended <= self.passed else None

    def is_on_side_stream(self, mark: int) -> bool:
        return mark > 2


def lose(message: str, peer: Refers) -> None:
    """Wait for a peer that is gone."""
    record_wait(message, peer.name)
    raise RuntimeError("lost")


def test_a_ring_holds_the_last_events_in_order(ring: RecentSpans) -> None:
    recorder = Recorder()
    for number in range(13):
        with recorder.label("sync", number):
            pass
    assert [event.bucket for event in ring.events()] == [5, 6, 7, 8, 9, 10, 11, 12]
    assert all(event.begun <= event.ended for event in ring.events())


def test_an_open_event_of_another_thread_stays_in_the_ring(ring: RecentSpans) -> None:
    recorder, begun, may_end = Recorder(), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert may_end.wait(HANG)

    thread = threading.Thread(target=recorder.sequence([(recorder.label("wait_sync", 1), wait)]))
    thread.start()
    assert begun.wait(HANG)
    for number in range(20):
        with recorder.label("sync", number):
            pass
    oldest = ring.events()[0]
    assert (oldest.phase, oldest.ended) == ("wait_sync", 0)
    may_end.set()
    thread.join()
    assert [event.phase for event in ring.events()] == ["sync"] * 8


def test_threads_have_events_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    large = RecentSpans(4096)
    monkeypatch.setattr(recorder_module, "RECENT_SPANS", large)
    recorder = Recorder()

    def work() -> None:
        for number in range(500):
            with recorder.label("sync", number):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = large.events()
    assert sorted(event.bucket for event in events) == sorted([*range(500)] * 4)
    assert recorder.totals["sync"] == sum(event.ended - event.begun for event in events)


def test_an_event_that_has_ended_refers_to_no_peer(ring: RecentSpans) -> None:
    peer = Refers()
    with Recorder().label("wait_sync", 2) as span:
        record_wait("the sync of bucket 2", peer.name)
        assert callable(span.peer)
    (event,) = span.events()
    assert (event.message, event.peer) == ("the sync of bucket 2", "")
    alive = weakref.ref(peer)
    with pytest.raises(RuntimeError, match="lost"), Recorder().label("wait_sync", 3) as span:
        lose("the sync of bucket 3", peer)
    (event,) = span.events()
    assert event.peer == "rank 3 (global rank 7)"
    del peer
    gc.collect()
    assert alive() is None


def test_acts_in_sequence_leave_the_events_and_sums_of_their_labels(ring: RecentSpans) -> None:
    recorder, done = Recorder(), list[str]()

    def act(name: str, sent: int = 0) -> Callable[[], None]:
        def do() -> None:
            done.append(f"{name} {[event.phase for event in open_events()]}")
            recorder.add_bytes(sent, 2 * sent)

        return do

    labels = [recorder.label("reduce", 1), recorder.label("sync", 0)]
    run = recorder.sequence([(labels[0], act("a", 10)), (None, act("b", 1)), (labels[1], act("c", 100))])
    for _ in range(2):
        with recorder.label("step"):
            run()
    assert done == ["a ['reduce', 'step']", "b ['step']", "c ['sync', 'step']"] * 2
    events = ring.events()
    assert [(one.phase, one.bucket) for one in events] == [("step", -1), ("reduce", 1), ("sync", 0)] * 2
    assert [one.sent for one in events] == [0, 10, 100] * 2, "those of an act without a label are in the sums alone"
    assert all(one.begun <= one.ended for one in events)
    assert (recorder.totals["sent"], recorder.totals["received"]) == (222, 444), "each once"
    of_reduce = [one for one in events if one.phase == "reduce"]
    assert recorder.totals["reduce"] == sum(one.ended - one.begun for one in of_reduce)


@pytest.mark.parametrize("is_profiling", [False, True])
@pytest.mark.parametrize("clock", [None, Device()], ids=["host", "device"])
def test_consecutive_acts_with_one_label_are_one_event(ring: RecentSpans, clock: Any, is_profiling: bool) -> None:
    recorder, done = Recorder(), list[str]()
    recorder.clock = clock
    sync, step = recorder.label("sync", 0), recorder.label("local_step", 1)
    acts = [(sync, "a"), (sync, "b"), (None, "c"), (None, "d"), (step, "e"), (sync, "f")]

    def act(name: str) -> Callable[[], None]:
        return lambda: done.append(f"{name} {[event.phase for event in open_events()]}")

    with mock.patch.object(recorder, "is_profiling", return_value=is_profiling):
        run = recorder.sequence([(label, act(name)) for label, name in acts])
    run()
    assert done == ["a ['sync']", "b ['sync']", "c []", "d []", "e ['local_step']", "f ['sync']"]
    events = ring.events()
    assert [(one.phase, one.bucket) for one in events] == [("sync", 0), ("local_step", 1), ("sync", 0)]
    assert recorder.totals["sync"] == sum(one.ended - one.begun for one in events if one.phase == "sync")


def test_bytes_of_another_optimizer_within_a_sequence_count_for_that_optimizer(ring: RecentSpans) -> None:
    mine, other = Recorder(), Recorder()

    def act() -> None:
        mine.add_bytes(1, 2)
        other.add_bytes(10, 20)
        with other.label("sync", 4):
            other.add_bytes(100, 200)

    mine.sequence([(mine.label("reduce", 1), act)])()
    assert (mine.totals["sent"], mine.totals["received"]) == (1, 2)
    assert (other.totals["sent"], other.totals["received"]) == (110, 220)
    assert [(one.phase, one.sent) for one in ring.events()] == [("reduce", 1), ("sync", 100)]


def test_an_act_that_fails_ends_the_sequence_and_is_the_event_that_failed(ring: RecentSpans) -> None:
    recorder, done = Recorder(), list[int]()
    acts: list[tuple[Any, Callable[[], object]]] = [
        (recorder.label("reduce", 1), lambda: done.append(1)),
        (recorder.label("wait_reduce", 0), lambda: lose("the sync", Refers())),
        (recorder.label("sync", 0), lambda: done.append(2)),
    ]
    with pytest.raises(RuntimeError, match="lost"):
        recorder.sequence(acts)()
    assert done == [1]
    assert [(one.phase, one.failed) for one in ring.events()] == [("reduce", False), ("wait_reduce", True)]
    assert list(open_events()) == []


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
def test_an_error_is_noted_with_what_its_own_act_waited_for(ring: RecentSpans, error: BaseException) -> None:
    recorder = Recorder()

    def fail() -> None:
        recorder.add_bytes(3, 4)
        raise error

    acts: list[Any] = [
        (recorder.label("wait_reduce", 0), lambda: record_wait("the sum", Refers().name)),
        (None, lambda: record_wait("nothing with an event", Refers().name)),
        (recorder.label("local_step", 0), fail),
    ]
    with mock.patch.object(recorder, "report") as tell, pytest.raises(type(error)), recorder.label("step"):
        recorder.sequence(acts)()
    found = [(one.phase, one.message, one.peer, one.sent, one.failed) for one in ring.events()]
    assert found == [
        ("step", "", "", 0, True),
        ("wait_reduce", "the sum", "", 0, False),
        ("local_step", "", "", 3, True),
    ]
    (told,) = tell.call_args_list
    assert (told.args[0].phase, told.args[1]) == ("local_step", error), "once"
    assert all(one.ended for one in ring.events())
    assert recorder.totals["local_step"] == ring.events()[2].ended - ring.events()[2].begun
    assert recorder.totals["sent"] == 3


def test_an_error_that_an_act_notes_and_keeps_to_itself_ends_nothing(ring: RecentSpans) -> None:
    recorder, done = Recorder(), list[int]()
    acts: list[Any] = [
        (recorder.label("local_step", 0), lambda: note_failure(ValueError("kept"))),
        (None, lambda: note_failure(ValueError("of the step"))),
        (recorder.label("sync", 0), lambda: done.append(1)),
    ]
    with recorder.label("step"):
        recorder.sequence(acts)()
    assert done == [1]
    assert [(one.phase, one.failed) for one in ring.events()] == [("step", True), ("local_step", True), ("sync", False)]


def test_a_sequence_passes_its_argument_to_all_acts_and_marks_their_ends_on_a_device(ring: RecentSpans) -> None:
    for clock in (None, Device()):
        recorder, done = Recorder(), list[int]()
        recorder.clock = clock
        labels = [recorder.label("local_step"), None, recorder.label("sync")]
        recorder.sequence([(label, done.append) for label in labels])(7)
        assert done == [7, 7, 7]
        assert [event.phase for event in ring.events()][-2:] == ["local_step", "sync"]
    assert isinstance(clock, Device)
    assert recorder.take_intervals() == [], "not passed yet"
    clock.passed = clock.marks
    assert [(one.phase, one.seconds) for one in recorder.take_intervals()] == [("local_step", 1.0), ("sync", 1.0)]
    assert recorder.take_intervals() == []


def test_sums_of_a_loop_that_takes_no_steps_take_bounded_memory(
    ring: RecentSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MOST_UNREAD", 10)
    recorder = Recorder()
    for _ in range(25):
        with recorder.label("sync"):
            recorder.add_bytes(1, 2)
    assert len(recorder.unread) <= 10
    assert (recorder.totals["sent"], recorder.totals["received"]) == (25, 50)


def test_an_event_that_goes_on_counts_in_both_steps_by_its_parts(ring: RecentSpans) -> None:
    recorder, ended = Recorder(), []
    recorder.on_step_ended = lambda: ended.append(recorder.step)
    with recorder.label("step") as span:
        time.sleep(0.002)
        now = time.perf_counter_ns()
        recorder.step_ended(now, stepped=True)
        (event,) = span.events()
        assert 2e6 < recorder.totals_at_end["step"] == now - event.begun
        time.sleep(0.001)
    recorder.step_ended(time.perf_counter_ns(), stepped=False)
    (event,) = span.events()
    assert recorder.totals_at_end["step"] == event.ended - event.begun
    assert recorder.totals_at_begin["step"] < recorder.totals_at_end["step"]
    assert (recorder.step, recorder.skipped, ended) == (3, 1, [2, 3])


def test_an_error_writes_one_record_with_the_event_that_failed(ring: RecentSpans, folder: Path) -> None:
    flight.identify(1, [0, 1, 2], 600.0)
    recorder = Recorder()
    with pytest.raises(RuntimeError, match="lost"), recorder.label("step"), recorder.label("wait_sync", 4):
        lose("the sync of bucket 4", Refers())
    (record,) = read_folder(folder)
    assert (record.rank, set(record.members) >= {0, 1, 2}) == (1, True)
    assert (record.reason, record.error) == ("an error in wait_sync of bucket 4", "RuntimeError: lost")
    outer, inner = record.events
    assert (outer.phase, outer.ended, outer.failed) == ("step", None, False), "written where the error was first seen"
    assert (inner.phase, inner.bucket, inner.failed, inner.peer_rank) == ("wait_sync", 4, True, 7)
    assert abs(inner.begun - time.time()) < HANG
    assert any("test_recorder" in line for line in record.stacks["MainThread"])
    assert not list(folder.glob("*.tmp"))


def test_without_a_writable_folder_the_error_is_raised_alone(ring: RecentSpans, tmp_path: Path) -> None:
    assert flight.write("a test") is None
    (tmp_path / "file").write_text("not a folder")
    flight.record_to(tmp_path / "file")
    try:
        with pytest.raises(ValueError, match="the error itself"), Recorder().label("sync"):
            raise ValueError("the error itself")
    finally:
        flight.record_to(None)


def test_overdue_is_told_after_three_quarters_of_the_time_out_without_an_event(ring: RecentSpans) -> None:
    assert flight.overdue(time.perf_counter_ns(), 1.0) is None, "no event yet"
    label = Recorder().label("wait_sync", 1)
    span = label.__enter__()
    assert flight.overdue(span.newest_time() + 700_000_000, 1.0) is None
    assert flight.overdue(span.newest_time() + 760_000_000, 1.0) == "no event for 0.8 s of a time-out of 1.0 s"
    label.__exit__(None, None, None)
    assert flight.overdue(span.newest_time() + 700_000_000, 1.0) is None


def test_intervals_of_a_device_are_read_when_it_has_passed_them(ring: RecentSpans) -> None:
    recorder = Recorder()
    recorder.clock = device = Device()
    for bucket in range(2):
        with recorder.label("wait_reduce", bucket):
            pass
    recorder.step_ended(time.perf_counter_ns(), stepped=True)
    with recorder.label("join_streams"):
        pass
    assert recorder.take_intervals() == []
    device.passed = 4
    assert [(one.phase, one.step, one.seconds, one.is_on_side_stream) for one in recorder.take_intervals()] == [
        ("wait_reduce", 1, 1.0, False),
        ("wait_reduce", 1, 1.0, True),
    ]
    device.passed = 6
    assert [one.phase for one in recorder.take_intervals()] == ["join_streams"]
    assert recorder.take_intervals() == []


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"version": 99, "fields": []})])
def test_read_folder_refuses_other_files_with_their_name(content: Any, tmp_path: Path) -> None:
    (tmp_path / "attempt-0-rank-00000.json").write_text(content)
    with pytest.raises(
        ValueError, match=rf"Expected a flight record of version {record_format.VERSION} in .*rank-00000\.json"
    ):
        read_folder(tmp_path)


def test_the_record_of_a_wait_that_ends_well_is_withdrawn_and_that_of_an_error_stays(
    ring: RecentSpans, folder: Path
) -> None:
    recorder = Recorder()
    with recorder.label("wait_sync", 1):
        path = flight.write("no event for 9.0 s of a time-out of 12.0 s")
    assert path is not None
    flight.withdraw(path)
    assert not path.exists()
    assert flight.write("an error in step", "ValueError: no") == path
    flight.withdraw(path)
    assert path.exists()


def test_an_exception_that_ends_the_process_is_written_once(ring: RecentSpans, folder: Path) -> None:
    with Recorder().label("step"):
        pass
    flight.note_end(SystemExit(0))
    flight.note_end(KeyboardInterrupt())
    flight.note_end(None)
    assert not folder.exists()
    leaving = SystemExit(1)
    leaving.__context__ = ValueError("a broken file")
    flight.note_end(leaving)
    (record,) = read_folder(folder)
    assert (record.reason, record.error) == (record_format.UNCAUGHT, "ValueError: a broken file")
    flight.write("an error in step", "KeyError: 'x'")
    flight.note_end(KeyError("x"))
    assert read_folder(folder)[0].reason == "an error in step", "the event that failed says more"
