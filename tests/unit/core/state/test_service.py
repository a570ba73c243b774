"""Connections between ranks: what travels, who may call, and what happens when a peer stops talking."""

import errno
import gc
import os
import socket
import struct
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch

from ddp_zero.core.state import connections
from ddp_zero.core.state.connections import (
    BLOCK_BYTES,
    Address,
    Admission,
    WrongPeer,
    bound_host,
    call,
    decode_frame,
    encode_frame,
    greet,
    listen,
    own_hosts,
    receive_frame,
    receive_tree,
    send_frame,
    send_tree,
)
from ddp_zero.core.step.rank_shard import StateChanges

CPU = torch.device("cpu")
SECRET = b"0123456789abcdef"


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        for end in (one, other):
            end.settimeout(5)
        yield one, other


def meanwhile(talk: Callable[[], Any]) -> Callable[[], Any]:
    """Start something in a thread; returns a function that waits for it and returns its result or its error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(talk())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(10)
        return found[0]

    return result


# Frames and trees


def test_a_frame_survives_its_bytes() -> None:
    frame = {"piece": 3, "birth": [1, 2], "text": "é"}
    encoded = encode_frame(frame)
    assert decode_frame(encoded[8:]) == frame
    assert int.from_bytes(encoded[:8], "big") == len(encoded) - 8


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xff", b"null"])
def test_what_is_no_frame_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"Expected a frame|Expecting|decode"):
        decode_frame(body)


def test_a_tree_arrives_bit_for_bit_with_its_strides() -> None:
    big = torch.randn(300, 1000)
    tree = {
        "step": torch.tensor(3.0),
        "big": big,
        "transposed": big[:20, :30].t().contiguous().t(),
        "slice": big[::2, ::3],
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "bytes": {"codes": torch.arange(7, dtype=torch.int8), "shape": (7,)},
        "half": torch.randn(5).bfloat16(),
        "complex": torch.randn(5, dtype=torch.complex64).conj(),
        "empty": torch.empty(0, 3),
        "number": float("nan"),
    }
    with pair() as (one, other):
        done = meanwhile(lambda: send_tree(one, {"piece": 1}, tree))
        frame = receive_frame(other)
        found = receive_tree(other, frame, CPU)
        assert done() is None
        send_frame(one, {"end": 1})
        assert receive_frame(other) == {"end": 1}, "nothing is left on the connection"
    assert frame["piece"] == 1
    for key in ("big", "transposed", "channels"):
        assert found[key].stride() == tree[key].stride(), key  # type: ignore[attr-defined]
    for key in ("step", "big", "transposed", "slice", "channels", "half", "complex", "empty"):
        assert torch.equal(found[key], tree[key]), key  # type: ignore[arg-type]
    assert torch.equal(found["bytes"]["codes"], torch.arange(7, dtype=torch.int8))
    assert found["bytes"]["shape"] == (7,)


def test_a_tree_that_cannot_travel_sends_nothing() -> None:
    with pair() as (one, other):
        with pytest.raises(TypeError, match="Expected dense tensors"):
            send_tree(one, {}, {"odd": object()})
        other.settimeout(0.01)
        with pytest.raises(TimeoutError):
            other.recv(1)


@pytest.mark.parametrize("sent", [b"", b"\0\0\0", (5).to_bytes(8, "big") + b"{}"])
def test_a_truncated_message_ends_in_an_error(sent: bytes) -> None:
    with pair() as (one, other):
        one.sendall(sent)
        one.close()
        with pytest.raises(EOFError, match="the end of the connection"):
            receive_frame(other)


def test_a_frame_of_absurd_length_is_refused_before_it_is_allocated() -> None:
    with pair() as (one, other):
        one.sendall((1 << 60).to_bytes(8, "big"))
        with pytest.raises(ValueError, match="Expected a frame of at most"):
            receive_frame(other)


def test_a_truncated_tensor_ends_in_an_error() -> None:
    with pair() as (one, other):
        text_and_elements = meanwhile(lambda: send_tree(one, {}, [torch.ones(4)]))
        frame = receive_frame(other)
        text_and_elements()
        frame["tree"] = frame["tree"].replace("[4]", "[5]")
        one.close()
        with pytest.raises(EOFError):
            receive_tree(other, frame, CPU)


# Who may call


def admit(connection: socket.socket, secret: bytes) -> None:
    admission = Admission(secret)
    while not admission.is_proven:
        received = connection.recv(admission.missing)
        if not received:
            raise EOFError
        connection.sendall(admission.receive(received))


def test_an_admission_takes_bytes_as_they_come() -> None:
    for size in (1, 5, 100):
        with pair() as (one, other):
            called = meanwhile(lambda one=one: greet(one, SECRET))  # type: ignore[misc]
            admission = Admission(SECRET)
            while not admission.is_proven:
                other.sendall(admission.receive(other.recv(min(size, admission.missing))))
            assert called() is None
    with pytest.raises(WrongPeer, match="greeting"):
        Admission(SECRET).receive(b"G")


def test_both_ends_prove_the_secret() -> None:
    with pair() as (one, other):
        admitted = meanwhile(lambda: admit(other, SECRET))
        greet(one, SECRET)
        assert admitted() is None


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


def test_a_different_protocol_is_refused() -> None:
    with pair() as (one, other):
        admitted = meanwhile(lambda: admit(other, SECRET))
        one.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert isinstance(admitted(), WrongPeer)


# Addresses


def test_an_address_fits_its_block() -> None:
    hosts = ("2001:0db8:85a3:0000:0000:8a2e:0370:7334",) * 6
    address = Address(hosts, 65535, "ab" * 16, "r" * 500)
    block = address.encode()
    assert len(block) == BLOCK_BYTES
    assert Address.decode(block) == Address(hosts[:4], 65535, "ab" * 16, "r" * 120)


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


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_a_listener_answers_several_callers_and_ends_with_its_owner() -> None:
    before = set(threading.enumerate())
    echo: Echo | None = Echo()
    address = listen(echo, None, 5.0)  # type: ignore[arg-type]
    with call(address, 5.0) as one, call(address, 5.0) as other:
        for position, connection in enumerate((other, one, other)):
            send_frame(connection, {"position": position})
            assert receive_frame(connection) == {"position": position}
    assert wait_until(lambda: len(set(threading.enumerate()) - before) == 1)
    del echo
    gc.collect()
    assert wait_until(lambda: set(threading.enumerate()) <= before)
    with pytest.raises(OSError, match="refused"):
        call(address, 5.0)


def test_a_listener_outlives_a_shortage_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [errno.EMFILE, errno.ECONNABORTED]

    def fails_at_first(listener: socket.socket) -> Any:
        if failures:
            raise OSError(failures.pop(), "not now")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fails_at_first)
    monkeypatch.setattr(connections, "PAUSE_SECONDS", 0.01)
    echo = Echo()
    with call(listen(echo, None, 5.0), 5.0) as connection:
        send_frame(connection, {"is": "there"})
        assert receive_frame(connection) == {"is": "there"}
    assert not failures


def test_strangers_take_no_threads_and_no_descriptors_and_keep_nobody_out(caplog: pytest.LogCaptureFixture) -> None:
    echo = Echo()
    address = listen(echo, None, 60.0)
    target = (address.hosts[0], address.port)
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(target, 5)) for _ in range(100)]
        for connection in silent[:8]:
            connection.sendall(b"ddp")
        with call(address, 60.0) as one:
            send_frame(one, {"position": 1})
            assert receive_frame(one) == {"position": 1}
            assert len(set(threading.enumerate()) - threads) == 1  # threads of earlier tests may end meanwhile
            ends = len(os.listdir("/proc/self/fd")) - descriptors - 2 * 1  # of the one that was admitted
            assert ends <= len(silent) + connections.MOST_CALLERS
    told = [record for record in caplog.records if "was refused" in record.message]
    assert len(told) == 1, "a line a minute"


def test_a_caller_tries_again_if_room_was_made_for_others() -> None:
    """By a reset, where the listener had not read what it has sent."""
    with socket.create_server(("127.0.0.1", 0)) as port:

        def answer() -> None:
            for attempt in range(3):
                connection, _ = port.accept()
                with connection:
                    if attempt == 0:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                    elif attempt == 2:
                        admit(connection, SECRET)

        answered = meanwhile(answer)
        call(Address(("127.0.0.1",), port.getsockname()[1], SECRET.hex()), 10.0).close()
        assert answered() is None


def test_one_that_sends_a_byte_now_and_then_has_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.4)
    echo = Echo()
    address = listen(echo, None, 60.0)
    begun = time.monotonic()
    with socket.create_connection((address.hosts[0], address.port), 5) as slow, suppress(OSError):
        for letter in b"ddp_zero 1\n":
            slow.sendall(bytes([letter]))
            time.sleep(0.1)
        assert slow.recv(1) == b""
    assert time.monotonic() - begun < 10
    assert wait_until(lambda: not [one for one in threading.enumerate() if one.name == connections.NAME])


def test_a_job_on_one_machine_listens_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_caller_keeps_who_answers_until_it_hangs_up() -> None:
    before = set(threading.enumerate())
    echo: Echo | None = Echo()
    address = listen(echo, None, 5.0)  # type: ignore[arg-type]
    with call(address, 5.0) as connection:
        send_frame(connection, {"position": 1})
        receive_frame(connection)
        del echo
        gc.collect()
        send_frame(connection, {"position": 2})
        assert receive_frame(connection) == {"position": 2}
    assert wait_until(lambda: set(threading.enumerate()) <= before)


def test_a_fork_neither_closes_nor_keeps_the_port() -> None:
    echo = Echo()
    address = listen(echo, None, 5.0)
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
    with call(address, 5.0) as connection:
        send_frame(connection, {"position": 1})
        assert receive_frame(connection) == {"position": 1}
    alive = weakref.ref(echo)
    del echo
    assert wait_until(lambda: gc.collect() >= 0 and alive() is None)  # the thread that has answered may hold it still
    with pytest.raises(OSError, match="refused"):
        call(address, 5.0)
    os.close(write)
    os.waitpid(child, 0)


def test_a_rank_that_cannot_listen_says_why() -> None:
    with pytest.raises(ConnectionError, match="it cannot listen: no"):
        call(Address((), 0, "", "it cannot listen: no"), 1.0)


def test_a_silent_peer_is_given_up_within_the_time_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        with pytest.raises(OSError, match="timed out"):
            call(Address(("127.0.0.1", "127.0.0.1"), silent.getsockname()[1], "00" * 16), 0.4)
        assert time.monotonic() - begun < 5


# Changes


def test_changes_are_counted_once_and_parts_belong_to_the_whole() -> None:
    changes = StateChanges()
    changes.begin()
    changes.begin()
    with changes.one([]):
        assert changes.begun == 1
    assert changes.is_under_way
    changes.end()
    assert not changes.is_under_way
    with pytest.raises(KeyError), changes.one([]):
        raise KeyError(changes.is_under_way)
    assert (changes.begun, changes.is_under_way) == (2, False)
    changes.end()
    assert changes.begun == 2
    changes.wait_for_work()
