"""The side stream's order with the current stream, with streams that keep a log instead of an accelerator."""

from threading import Thread
from typing import Any

import pytest
import torch

from ddp_zero.core.backward.scratch_buffers import Buffer, SideStream, memory_of

CPU, DEVICE = torch.device("cpu"), torch.device("cuda", 3)


class Stream:
    """Logs who waits for whom, and is current between enter and exit."""

    log: list[Any]
    current: "Stream"

    def __init__(self, device: Any, name: str = "side") -> None:
        self.device, self.name = device, name

    def __enter__(self) -> None:
        self.before, Stream.current = Stream.current, self
        self.log.append(f"enter {self.name}")

    def __exit__(self, *_: object) -> None:
        Stream.current = self.before
        self.log.append(f"exit {self.name}")

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self, event: str | None) -> str:
        return f"an event of {self.name}"


class Memory:
    device = DEVICE

    def __init__(self, numel: int, log: list[Any]) -> None:
        self.log, self.size = log, numel

    def numel(self) -> int:
        return self.size

    def record_stream(self, stream: Stream) -> None:
        self.log.append(f"kept for {stream.name}")


def _current_stream(device: Any = None) -> Stream:
    assert device in (DEVICE, DEVICE.index), "not of the current device, which need not be the parameters'"
    return Stream.current


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    Stream.log = []
    Stream.current = Stream(DEVICE, "main")
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", _current_stream)
    monkeypatch.setattr(torch, "empty", lambda numel, **_: Memory(numel, Stream.log))
    return Stream.log


def test_the_side_stream_waits_for_work_before_it_and_later_work_for_its_join(log: list[Any]) -> None:
    side = SideStream()
    with side.running(DEVICE):
        assert Stream.current.name == "side"
    side.join()
    assert log == ["side waits for main", "enter side", "exit side", "main waits for side"]


def test_nested_contexts_enter_once_and_leave_once(log: list[Any]) -> None:
    running = SideStream().running(DEVICE)
    for _ in range(2):
        with running:
            with running:
                assert Stream.current.name == "side"
            assert Stream.current.name == "side", "left by the outer one only"
        assert Stream.current.name == "main"
    assert log == ["side waits for main", "enter side", "exit side"] * 2


def test_a_context_is_left_after_an_error_too(log: list[Any]) -> None:
    with pytest.raises(ZeroDivisionError), SideStream().running(DEVICE):
        raise ZeroDivisionError
    assert Stream.current.name == "main"


def test_a_device_has_one_side_stream_and_the_cpu_none(log: list[Any]) -> None:
    side = SideStream()
    for _ in range(2):
        with side.running(CPU), side.running(torch.device("meta")):
            pass
    side.join()
    assert log == []
    with side.running(DEVICE):
        first: Any = Stream.current
    with side.running(DEVICE):
        assert first is Stream.current


def test_a_stream_that_an_exception_has_left_entered_is_not_taken_for_a_nested_context(log: list[Any]) -> None:
    running = SideStream().running(DEVICE)
    running.__enter__()  # left by an exception, on another thread than that of the next backward pass
    log.clear()
    thread = Thread(target=running.__enter__)
    thread.start()
    thread.join()
    assert log == ["side waits for side", "enter side"], "torch refuses to enter it again"


def test_a_buffer_is_lent_again_once_both_streams_have_done_with_it(log: list[Any]) -> None:
    side = SideStream()
    buffer = Buffer(side, 64, DEVICE)
    assert log == ["kept for side"], "when it is allocated, so that it may be dropped at any time"
    log.clear()
    buffer.lend()
    assert log == [], "a new one has no last use"
    with side.running(DEVICE):
        buffer.give_back()
    buffer.lend()
    assert log == ["side waits for main", "enter side", "exit side", "main waits for an event of side"]


def test_buckets_of_different_devices_have_scratches_of_their_own(log: list[Any]) -> None:
    other = torch.device("cuda", 1)
    found = memory_of(SideStream(), [(DEVICE, 64, 0), (other, 32, 8), (DEVICE, 48, 0)])
    assert len({id(memory.scratch) for memory in found}) == 3
    assert [memory.scratch.memory.numel() for memory in found] == [64, 32, 48]
    receives = [memory.receives for memory in found]
    assert [None if one is None else one.memory.numel() for one in receives] == [None, 16, None]
