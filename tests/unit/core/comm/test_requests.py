"""Questions by the job's store, between two listeners of one process, and the connections on which answers come."""

import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from ddp_zero.core.comm import requests
from ddp_zero.core.comm.requests import Connection, Listener, Request
from ddp_zero.core.state import receive_into
from tests import HANG
from tests.unit.threads import wait_until

SIZES = (1, 4087, 4088, 4089, 4096, 100_000, (4 << 20) + 4088, (9 << 20) + 5)


class Echo:
    """Answers a question with itself, and by a connection if it asks for that."""

    def answer(self, request: Request) -> None:
        request.answer(request.frame)
        if "bytes" in request.frame:
            with request.connection(HANG) as connection:
                connection.sendall(memoryview(bytes(request.frame["bytes"])))


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, 1, True)


@pytest.fixture
def pair(store: TCPStore) -> Iterator[tuple[Listener, Listener]]:
    both = Listener(store), Listener(store)
    yield both
    for one in both:
        one.close()


@pytest.mark.parametrize("read", [1000, 4088, 5 << 20])
def test_a_connection_is_a_stream_of_bytes(read: int) -> None:
    store, sent = HashStore(), [os.urandom(size) for size in SIZES if read > 1000 or size < 1 << 20]

    def send() -> None:
        connection = Connection(PrefixStore("connection", store), 0, HANG)
        for part in sent:
            connection.sendall(memoryview(part))
        connection.recv_into(memoryview(bytearray(1)))

    with ThreadPoolExecutor(1) as other:
        done = other.submit(send)
        connection, found = Connection(PrefixStore("connection", store), 1, HANG), bytearray()
        while len(found) < sum(map(len, sent)):
            part = bytearray(read)
            found += part[: connection.recv_into(memoryview(part))]
        connection.sendall(memoryview(b"1"))
        done.result(HANG)
    assert found == b"".join(sent)


def test_a_connection_that_breaks_is_an_error_of_the_system(pair: tuple[Listener, Listener]) -> None:
    asks, answers = pair

    class HangsUp(Echo):
        def answer(self, request: Request) -> None:
            request.answer({})
            with request.connection(HANG) as connection:
                connection.sendall(memoryview(b"1"))
                raise ConnectionAbortedError

    hangs_up = HangsUp()
    _, key = asks.ask(answers.register(hangs_up), {})
    with pytest.raises(ConnectionError), asks.connection_to(key, HANG) as connection:
        receive_into(connection, memoryview(bytearray(2)))


def test_concurrent_requests_are_answered_and_leave_no_key_in_the_store(
    pair: tuple[Listener, Listener], store: TCPStore
) -> None:
    echo = Echo()
    addresses = [one.register(echo) for one in pair]

    def ask(number: int) -> None:
        asks, address = pair[number % 2], addresses[(number + 1) % 2]
        request = {"bytes": 5000} if number % 4 < 2 else {"number": number}
        frame, key = asks.ask(address, request)
        assert frame == request
        if "bytes" in request:
            with asks.connection_to(key, HANG) as connection:
                receive_into(connection, memoryview(bytearray(5000)))

    ask(0)  # makes the counts of requests
    ask(1)
    before = store.num_keys()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(16)))
    assert wait_until(lambda: store.num_keys() <= before)


def test_an_exception_of_a_signal_handler_leaves_no_number_without_a_request(
    pair: tuple[Listener, Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the number and the request that the listener then waits for."""
    asks, answers = pair
    echo = Echo()
    address, completes = answers.register(echo), Listener.set

    def interrupt(*_: Any) -> None:
        raise TimeoutError("of a signal handler")

    def interrupted(listener: Listener, key: str, frame: dict[str, Any]) -> None:
        if "/request/" in key:
            signal.raise_signal(signal.SIGALRM)
        completes(listener, key, frame)

    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Listener, "set", interrupted)
            with pytest.raises(TimeoutError, match="of a signal handler"):
                asks.ask(address, {"n": 1})
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert asks.ask(address, {"n": 2})[0] == {"n": 2}


def test_a_listener_ends_with_the_last_object_and_is_then_refused(pair: tuple[Listener, Listener]) -> None:
    asks, answers = pair
    objects = [Echo(), Echo()]
    addresses = [answers.register(one) for one in objects]
    del objects[0]
    gc.collect()
    assert asks.ask(addresses[1], {"n": 1})[0] == {"n": 1}
    objects.clear()
    assert wait_until(lambda: gc.collect() >= 0 and not answers.thread.is_alive())
    begun = time.monotonic()
    with pytest.raises(ConnectionRefusedError, match="its process has ended"):
        asks.ask(addresses[1], {})
    assert time.monotonic() - begun < requests.ANSWER_SECONDS


def test_a_request_without_answer_is_an_error(pair: tuple[Listener, Listener], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "ANSWER_SECONDS", 0.3)
    with pytest.raises(ConnectionRefusedError, match=r"no answer in 0\.3 s"):
        pair[0].ask("nobody/1", {})


def test_a_listener_answers_after_its_longest_wait(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "LONGEST_WAIT", timedelta(seconds=0.2))
    listener, echo = Listener(store), Echo()
    address = listener.register(echo)
    time.sleep(0.7)
    assert listener.ask(address, {"n": 1})[0] == {"n": 1}
    monkeypatch.undo()
    listener.close()


@pytest.mark.parametrize("request_", [{"bytes": "many"}, {"bytes": -1}])
def test_a_question_that_cannot_be_answered_ends_with_one_line(
    request_: dict[str, Any],
    pair: tuple[Listener, Listener],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracebacks: list[object] = []
    monkeypatch.setattr(threading, "excepthook", tracebacks.append)
    asks, answers = pair
    echo = Echo()
    address = answers.register(echo)
    _, key = asks.ask(address, request_)
    with pytest.raises(ConnectionError), asks.connection_to(key, HANG) as connection:
        connection.recv_into(memoryview(bytearray(1)))
    assert wait_until(lambda: sum("ZERO-513" in record.message for record in caplog.records) == 1)
    assert not tracebacks
    assert asks.ask(address, {"n": 1})[0] == {"n": 1}


def test_a_fork_neither_answers_nor_ends_the_listener(pair: tuple[Listener, Listener]) -> None:
    asks, answers = pair
    echo = Echo()
    address = answers.register(echo)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 advises against forking with threads
        child = os.fork()
    if child == 0:
        del echo
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert asks.ask(address, {"n": 1})[0] == {"n": 1}


def test_a_listener_ends_when_its_store_does() -> None:
    store = TCPStore("127.0.0.1", 0, 1, True)
    listener, echo = Listener(TCPStore("127.0.0.1", store.port, 1, False)), Echo()
    listener.register(echo)
    del store
    assert wait_until(lambda: not listener.thread.is_alive())
    listener.close()
