"""Connections of snapshots: who may call, and what happens when a peer stops talking."""

import asyncio
import errno
import gc
import hmac
import os
import socket
import struct
import threading
import time
import warnings
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ddp_zero.core.state import receive_frame, send_frame
from ddp_zero.core.state.frames import encode_frame
from ddp_zero.snapshots import connections
from ddp_zero.snapshots.connections import Address, WrongPeer, bound_host, call, greet, listen, own_hosts
from ddp_zero.snapshots.copies import Keeper
from tests import HANG
from tests.unit.threads import meanwhile, pair, wait_until

SECRET = b"0123456789abcdef"


# Who may call


def admit(connection: socket.socket, secret: bytes) -> None:
    connection.setblocking(False)
    asyncio.run(connections.admit(connection, secret))


def test_a_greeting_may_come_in_pieces() -> None:
    with pair() as (one, other), pair() as (near, far):
        admitted = meanwhile(lambda: admit(far, SECRET))
        called = meanwhile(lambda: greet(one, SECRET))
        for byte in other.recv(27, socket.MSG_WAITALL):
            near.sendall(bytes([byte]))
        other.sendall(near.recv(48, socket.MSG_WAITALL))
        for byte in other.recv(32, socket.MSG_WAITALL):
            near.sendall(bytes([byte]))
        other.sendall(near.recv(1))
        assert admitted() is None
        assert called() is None


def test_a_wrong_secret_is_refused_on_both_ends() -> None:
    with pair() as (one, other):
        admitted = meanwhile(lambda: admit(other, SECRET))
        with pytest.raises(WrongPeer, match="does not know the secret"):
            greet(one, b"x" * 16)
        one.close()
        assert isinstance(admitted(), EOFError)


def test_a_caller_that_cannot_prove_it_is_refused() -> None:
    with pair() as (one, other):
        admitted = meanwhile(lambda: admit(other, SECRET))
        one.sendall(b"ddp_zero 1\n" + b"n" * 16)
        theirs = one.recv(48, socket.MSG_WAITALL)
        one.sendall(theirs[16:])  # the proof of who answers is not that of who calls
        assert isinstance(admitted(), WrongPeer)


# Addresses


def test_own_hosts_begin_with_the_interface_that_gloo_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_hosts("localhost")[0] == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    assert own_hosts("127.0.0.1")[0] == "127.0.0.1"
    assert len(set(own_hosts(None))) == len(own_hosts(None)) >= 1


# Listening


class Echo:
    """Answers every frame with itself."""

    def answer(self, connection: socket.socket) -> None:
        while True:
            send_frame(connection, receive_frame(connection))


def threads_of_listeners() -> set[threading.Thread]:
    """All threads but the thread that waits for the end of the script, once in each process."""
    return {thread for thread in threading.enumerate() if thread.name != "ddp_zero end"}


def test_a_listener_answers_several_callers_and_ends_with_its_owner() -> None:
    before = threads_of_listeners()
    echo: Echo | None = Echo()
    address = listen(echo, None, HANG)  # type: ignore[arg-type]
    with call(address, HANG) as one, call(address, HANG) as other:
        for position, connection in enumerate((other, one, other)):
            send_frame(connection, {"position": position})
            assert receive_frame(connection) == {"position": position}
    assert wait_until(lambda: len(threads_of_listeners() - before) == 1)
    del echo
    gc.collect()
    assert wait_until(lambda: threads_of_listeners() <= before)
    with pytest.raises(OSError, match="refused"):
        call(address, HANG)


MALFORMED: dict[str, bytes] = {
    "an absurd length": (1 << 30).to_bytes(8, "big"),
    "no dict": (4).to_bytes(8, "big") + b"null",
    "too deep": (60000).to_bytes(8, "big") + b"[" * 60000,
    **{
        str(frame): encode_frame(frame)
        for frame in (
            *({"rank": None}, {"rank": [1]}, {"wants": "copy", "rank": 1, "nbytes": float("inf")}, {"rank": "x"}),
        )
    },
}
"""Requests of callers that know the secret."""


@pytest.mark.parametrize("request_bytes", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_request_ends_its_conversation_with_one_line(
    request_bytes: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracebacks: list[object] = []
    monkeypatch.setattr(threading, "excepthook", tracebacks.append)
    keeper = Keeper(tmp_path, mock.Mock(), 1.0)
    address = listen(keeper, None, HANG)
    with call(address, HANG) as connection:
        connection.sendall(request_bytes)
        connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):  # it may hang up before it has read everything
            while connection.recv(1 << 16):
                pass
    wait_until(lambda: all(thread.name != connections.NAME for thread in threading.enumerate()))
    assert not tracebacks
    lines = [record for record in caplog.records if "ZERO-513" in record.message]
    assert len(lines) == 1
    assert all(record.exc_info is None and "\n" not in record.message for record in lines)
    with call(address, HANG):
        pass  # it listens on


def test_a_listener_accepts_again_after_a_shortage_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [errno.EMFILE, errno.ECONNABORTED]

    def fails_at_first(listener: socket.socket) -> Any:
        if failures:
            raise OSError(failures.pop(), "not now")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fails_at_first)
    monkeypatch.setattr(connections, "PAUSE_SECONDS", 0.01)
    echo = Echo()
    with call(listen(echo, None, HANG), HANG) as connection:
        send_frame(connection, {"is": "there"})
        assert receive_frame(connection) == {"is": "there"}
    assert not failures


def test_a_caller_tries_again_if_room_was_made_for_others() -> None:
    """By a reset, where the listener had not read what it has sent; or after the proof, before the welcome."""
    with socket.create_server(("127.0.0.1", 0)) as port:

        def answer() -> None:
            for attempt in range(4):
                connection, _ = port.accept()
                with connection:
                    if attempt == 0:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                    elif attempt == 2:
                        theirs, own = connection.recv(27, socket.MSG_WAITALL)[11:], b"n" * 16
                        connection.sendall(own + hmac.digest(SECRET, b"answers" + theirs + own, "sha256"))
                        connection.recv(32, socket.MSG_WAITALL)
                    elif attempt == 3:
                        admit(connection, SECRET)

        answered = meanwhile(answer)
        call(Address(("127.0.0.1",), port.getsockname()[1], SECRET.hex()), HANG).close()
        assert answered() is None


def test_a_client_that_trickles_bytes_gets_no_longer_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.4)
    echo = Echo()
    address = listen(echo, None, HANG)
    gone = suppress(BrokenPipeError, ConnectionResetError)
    with socket.create_connection((address.hosts[0], address.port), HANG) as slow, gone:
        for letter in b"ddp_zero 1\n":
            slow.sendall(bytes([letter]))
            time.sleep(0.1)
        assert slow.recv(1) == b""
    assert wait_until(lambda: not [one for one in threading.enumerate() if one.name == connections.NAME])


def test_a_job_on_one_machine_is_bound_to_its_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert bound_host("localhost") in ("127.0.0.1", "::1")
    assert bound_host("10.1.2.3") is None
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert bound_host(None) == "127.0.0.1"
    monkeypatch.delenv("MASTER_ADDR")
    assert bound_host(None) is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert bound_host("10.1.2.3") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert bound_host("10.1.2.3") is None
    with connections.open_port("127.0.0.1") as port:
        assert port.getsockname()[0] == "127.0.0.1"


def test_an_open_connection_keeps_its_answering_object_alive() -> None:
    before = set(threading.enumerate())
    echo: Echo | None = Echo()
    address = listen(echo, None, HANG)  # type: ignore[arg-type]
    with call(address, HANG) as connection:
        send_frame(connection, {"position": 1})
        receive_frame(connection)
        del echo
        gc.collect()
        send_frame(connection, {"position": 2})
        assert receive_frame(connection) == {"position": 2}
    assert wait_until(lambda: set(threading.enumerate()) <= before)


def test_a_fork_neither_closes_nor_keeps_the_port() -> None:
    echo = Echo()
    address = listen(echo, None, HANG)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 advises against forking with threads
        child = os.fork()
    if child == 0:
        del echo
        gc.collect()
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    with call(address, HANG) as connection:
        send_frame(connection, {"position": 1})
        assert receive_frame(connection) == {"position": 1}
    alive = weakref.ref(echo)
    del echo
    assert wait_until(lambda: gc.collect() >= 0 and alive() is None)  # the thread that has answered may hold it still
    with pytest.raises(OSError, match="refused"):
        call(address, HANG)
    os.close(write)
    os.waitpid(child, 0)


def test_a_silent_peer_is_given_up_within_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, limits = socket.create_connection, list[float]()

    def noted(target: tuple[str, int], time_out: float) -> socket.socket:
        limits.append(time_out)
        return connect(target, time_out)

    monkeypatch.setattr(socket, "create_connection", noted)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(OSError, match="timed out"):
            call(Address(("127.0.0.1", "127.0.0.1"), silent.getsockname()[1], "00" * 16), 0.4)
    assert len(limits) == 2
    assert max(limits) <= 0.2, "half of it for each address"
