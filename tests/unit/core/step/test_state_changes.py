"""What a thread reads of a rank's state while the script is ahead of its accelerator, which is a stand-in here."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ddp_zero.core.step.state_changes import StateChanges

DEVICE = torch.device("meta")  # whose tensors are not the host's


class Stream:
    """Reaches an event when the test says so, or when somebody waits for it."""

    def __init__(self) -> None:
        self.events: list[mock.Mock] = []
        self.waits: list[int] = []  # the events that somebody has waited for

    def record_event(self) -> Any:
        place = len(self.events)
        event = mock.Mock(**{"query.return_value": False})
        event.synchronize.side_effect = lambda: self._wait(place)
        self.events.append(event)
        return event

    def _wait(self, place: int) -> None:
        self.waits.append(place)
        self.reach(place)

    def reach(self, place: int) -> None:
        for event in self.events[: place + 1]:
            event.query.return_value = True


@pytest.fixture
def stream() -> Iterator[Stream]:
    made = Stream()
    with mock.patch("torch.accelerator.current_stream", return_value=made):
        yield made


class Run:
    """An optimizer over one parameter of the device, and its steps, in place or with new tensors."""

    def __init__(self, device: torch.device = DEVICE, **state: Any) -> None:
        self.param = nn.Parameter(torch.empty(3, device=device))
        self.inner = torch.optim.SGD([self.param])
        self.state: dict[str, Any] = {"step": torch.tensor(0.0), "calls": 0, "sum": torch.empty(3, device=device)}
        self.state.update(state)
        self.inner.state[self.param] = self.state
        self.changes = StateChanges(self.inner)
        self.changes.keeps_versions = True

    def step(self, in_place: bool = True) -> None:
        self.changes.begin((self.param.device,))
        self.state["step"] += 1
        self.state["calls"] += 1
        if not in_place:
            self.state["sum"] = torch.empty_like(self.state["sum"])
        self.changes.note_work([] if self.param.is_cpu else [DEVICE])
        self.changes.end()

    def seen(self, count: int) -> tuple[float, int] | None:
        """The steps and calls that a reader of this change finds; None if it is too late."""
        version = self.changes.version(count)
        if version is None:
            return None
        state = version.values[self.param]
        return None if version.may_be_overwritten else (state["step"].item(), state["calls"])


def test_a_state_is_there_until_the_device_begins_the_next_change(stream: Stream) -> None:
    run = Run()
    for _ in range(3):
        run.step()
    # events: the begin and the work of each step, of which the device has done only the first
    stream.reach(1)
    assert run.seen(1) == (1.0, 1)
    assert run.seen(3) == (3.0, 3)
    assert run.seen(0) is None
    assert run.changes.pending == 2
    version = run.changes.version(1)
    assert version is not None
    version.wait()
    assert stream.waits == [1], "no event of a later step"
    stream.reach(2)
    assert version.may_be_overwritten
    assert (run.seen(1), run.seen(2)) == (None, (2.0, 2))
    stream.reach(5)
    assert run.changes.pending is None


def test_on_the_host_a_state_is_there_until_the_next_change(stream: Stream) -> None:
    on_host, run = Run(torch.device("cpu")), Run()
    on_host.step()
    version = on_host.changes.version(1)
    assert version is not None
    assert not version.may_be_overwritten
    on_host.step()
    assert version.may_be_overwritten
    assert on_host.seen(1) is None
    run.step()
    run.step()
    with run.changes.changing([DEVICE]):  # a load: nothing of before is left
        pass
    assert (run.seen(0), run.seen(1), run.seen(2), run.seen(3)) == (None, None, None, (2.0, 2))


def test_a_class_that_puts_new_tensors_into_its_state_has_two_in_memory_at_most(stream: Stream) -> None:
    run = Run()
    for number in range(6):
        run.step(in_place=False)
        # the step before the last must have begun on the device: what it has replaced is free
        assert stream.waits == [2 * place for place in range(number)]
    run = Run()
    stream.waits.clear()
    for _ in range(6):
        run.step()
    assert not stream.waits, "one in place waits for nothing"
    assert run.seen(0) == (0.0, 0)


def test_a_large_state_on_the_host_is_not_copied(stream: Stream) -> None:
    run = Run(beside=torch.zeros(2000))
    run.step()
    before = run.changes.version(1)
    assert before is not None
    assert before.values[run.param]["beside"] is run.state["beside"]
    run.step()
    assert before.may_be_overwritten
    assert (run.seen(1), run.seen(2)) == (None, (2.0, 2))


def test_without_readers_no_versions_are_kept_and_no_events_are_queried(stream: Stream) -> None:
    run = Run()
    run.changes.keeps_versions = False
    for _ in range(3):
        run.step(in_place=False)
    assert run.changes.pending is None
    assert not stream.waits
    assert not any(event.query.called for event in stream.events)
