"""Requests between two ranks beside training, by the job's store; large answers come on a Gloo group of these two.

A thread of each process, its listener, waits in the store for a key. A rank that asks sets the key, with the request,
and finds the answer under a key of its own. If the answer is large, both ranks build a group for it alone, and drop it
afterwards: no rank listens at a port, nothing is posted for a request that never comes, and a connection that breaks
ends a single answer.
"""

import json
import os
import re
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore  # type: ignore[attr-defined]

from ddp_zero.core.comm.groups import job_store_of
from ddp_zero.core.comm.serving import has_failed, start_serving, watch_script_end
from ddp_zero.core.comm.tracing import logger

NAME = "ddp_zero state"
ANSWER_SECONDS = 10.0
"""Time for an answer: a rank that gives none is taken to be gone."""

_CONNECT_SECONDS = 30.0
_POLL_SECONDS = 0.001, 0.02
LONGEST_WAIT = timedelta(days=20)  # more milliseconds are too many for poll(2)
_CLOSING_SECONDS, _LAST_SECONDS = 10.0, 30.0  # milliseconds, but on a machine that is very busy
_CHUNK_BYTES = 4 << 20
_HEAD_BYTES = 4 << 10
_LENGTH_BYTES = 8
_SENT, _NEVER_SENT = 0, 1  # tags of messages

Frame = dict[str, Any]


class Connection:
    """Bytes from one rank to another, as on a socket. Errors are OSError, TimeoutError among them.

    A block is a message of fixed size, with the block's length and its first bytes, and messages with the rest: a
    receiver must know the size of a message, and a small block is a single one.

    Args:
        store: a store that only this connection uses.
        rank: this end's rank in the group of two: 0 or 1.
        time_out: seconds without progress after which it breaks.
    """

    def __init__(self, store: Store, rank: int, time_out: float) -> None:
        self._other = 1 - rank
        self._limit = timedelta(seconds=time_out)
        self._head = memoryview(bytearray(_HEAD_BYTES))
        self._staged = memoryview(b"")  # received bytes that `recv_into` has not returned yet
        self._missing = 0  # bytes of the present block that are not received yet
        with _as_os_errors():
            # messages would inherit this short time-out for connecting: each wait is given the connection's
            self._gloo: Any = dist.ProcessGroupGloo(
                store, rank, 2, min(self._limit, timedelta(seconds=_CONNECT_SECONDS))
            )

    def sendall(self, memory: memoryview) -> None:
        if memory.readonly:
            memory = memoryview(bytearray(memory))
        first = memory[: _HEAD_BYTES - _LENGTH_BYTES]
        head = memoryview(bytearray(_HEAD_BYTES))
        head[:_LENGTH_BYTES] = len(memory).to_bytes(_LENGTH_BYTES, "big")
        head[_LENGTH_BYTES : _LENGTH_BYTES + len(first)] = first
        with _as_os_errors():
            parts = [head, *_chunks(memory[len(first) :])]
            self._wait([self._gloo.send([_tensor(part)], self._other, _SENT) for part in parts])

    def recv_into(self, memory: memoryview) -> int:
        """Receive into the beginning of this memory. Returns the number of bytes."""
        if not self._staged and not self._missing:
            self._begin_block()
        if not self._staged:
            # receive as many messages as fit, or stage a single message that later calls return in parts
            fits = self._missing if self._missing <= len(memory) else len(memory) // _CHUNK_BYTES * _CHUNK_BYTES
            target = memory[:fits] if fits else memoryview(bytearray(min(self._missing, _CHUNK_BYTES)))
            self._missing -= len(target)
            self._receive(target)
            if fits:
                return fits
            self._staged = target
        part = self._staged[: len(memory)]
        memory[: len(part)] = part
        self._staged = self._staged[len(part) :]
        return len(part)

    def abort(self) -> None:
        """End sends and receives of other threads on this connection, with an error there."""
        with suppress(AttributeError, RuntimeError):  # the connection is closed, or broken already
            # Gloo's own `abort` ends no wait; a wait that times out ends all others of its group
            self._gloo.recv([torch.empty(1)], self._other, _NEVER_SENT).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        self._gloo = None

    def _begin_block(self) -> None:
        self._receive(self._head)
        length = int.from_bytes(self._head[:_LENGTH_BYTES], "big")
        self._staged = self._head[_LENGTH_BYTES : _LENGTH_BYTES + length]
        self._missing = length - len(self._staged)

    def _receive(self, memory: memoryview) -> None:
        with _as_os_errors():
            self._wait([self._gloo.recv([_tensor(part)], self._other, _SENT) for part in _chunks(memory)])

    def _wait(self, posted: Sequence[Any]) -> None:
        # posted all at once: the other end stands still between two messages otherwise
        for work in posted:
            work.wait(self._limit)


def _tensor(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _chunks(memory: memoryview) -> Iterator[memoryview]:
    return (memory[begin : begin + _CHUNK_BYTES] for begin in range(0, len(memory), _CHUNK_BYTES))


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Turn errors of Gloo and of the store into the OSError that a socket would raise."""
    try:
        yield
    except RuntimeError as error:
        kind = TimeoutError if re.search("timed out|timeout", str(error), re.IGNORECASE) else ConnectionError
        raise kind(str(error).partition("\n")[0]) from error


class Request:
    """A request of another rank.

    Attributes:
        frame: the content of the request.
    """

    def __init__(self, listener: "Listener", key: str, frame: Frame) -> None:
        self.frame = frame
        self._listener, self._key = listener, key

    def answer(self, frame: Frame) -> None:
        self._listener.set(_answer_key(self._key), frame)

    @contextmanager
    def connection(self, time_out: float) -> Iterator[Connection]:
        """A connection to send to the rank that asks; the answer has told it to build its end."""
        with self._listener.connection(self._key, 1, time_out) as connection:
            yield connection
            connection.recv_into(memoryview(bytearray(1)))  # a connection that is closed loses what is under way


class RequestHandler(Protocol):
    """An object that answers requests of other ranks."""

    def answer(self, request: Request) -> None:
        """Answer a request, in a thread of its own."""


class Listener:
    """A thread that takes requests of other ranks, for as long as some object of this process can answer them.

    A process has a single listener: `listen` finds it.

    Args:
        store: the job's store.
        has_server: whether the store's server may run in this process.
    """

    def __init__(self, store: Store, has_server: bool = False) -> None:
        self.store = store  # kept alive: on one rank it has the server, which `destroy_process_group` would end
        self.is_closed = False
        self._name = uuid.uuid4().hex
        # two clients: while one thread waits on a client, no other thread can use that client
        self._client, listening = _client_of(store), _client_of(store)
        self._is_remote = isinstance(store, TCPStore)
        self._has_server = has_server
        self._process = os.getpid()
        self._handlers: dict[int, weakref.ref[RequestHandler]] = {}
        self._count = 0
        self._connections = set[Connection]()
        self._idle_clients = list[Store]()  # reused: see `_spare_client`
        if self._is_remote:
            self._client.add(_OPEN_LISTENERS, 1)
        self.thread = threading.Thread(target=self._listen, args=[listening], name=f"{NAME} listener", daemon=True)
        self.thread.start()

    # Asking

    def ask(self, address: str, request: Frame) -> tuple[Frame, str]:
        """The answer of a rank, and the key of the connection that it may offer. Raises OSError if the rank is gone."""
        key = self.post(address, request)
        return self.await_answer(key, address, time.monotonic() + ANSWER_SECONDS), key

    def post(self, address: str, request: Frame) -> str:
        """Send a request, without waiting. Returns the key of the answer."""
        key = uuid.uuid4().hex
        listener, _, number = address.partition("/")
        with _as_os_errors():
            _whole(partial(self._enqueue, listener, {"to": int(number), "key": key, "asks": request}))
        return key

    def await_answer(self, key: str, address: str, deadline: float) -> Frame:
        """Wait for the answer with this key. Raises ConnectionRefusedError if the rank is gone."""
        answered, closed = [_answer_key(key)], [_closed_key(address.partition("/")[0])]
        pause, longest = _POLL_SECONDS
        with _as_os_errors():
            while not self._client.check(answered):
                if pause == longest and self._client.check(closed):
                    raise ConnectionRefusedError("no answer: its process has ended")
                if time.monotonic() > deadline:
                    message = f"no answer in {ANSWER_SECONDS:g} s: its process is gone, or runs no Python code"
                    raise ConnectionRefusedError(message)
                time.sleep(pause)
                pause = min(2 * pause, longest)
            return self._pop(_answer_key(key))

    @contextmanager
    def connection_to(self, key: str, time_out: float) -> Iterator[Connection]:
        """The connection that an answer has offered, to receive from."""
        with self.connection(key, 0, time_out) as connection:
            yield connection
            connection.sendall(memoryview(bytearray(1)))
        with _as_os_errors():
            for rank in range(2):
                self._client.delete_key(f"{key}/0/{rank}")  # Gloo's addresses

    @contextmanager
    def connection(self, key: str, rank: int, time_out: float) -> Iterator[Connection]:
        # a client for each open connection: it waits for the other's address, and two ranks may ask each other at once
        client = self._spare_client()
        connection = Connection(PrefixStore(key, client), rank, time_out)
        self._connections.add(connection)
        try:
            if has_failed.is_set():
                raise ConnectionAbortedError("the script has failed")
            yield connection
        finally:
            self._connections.remove(connection)
            connection.close()
        self._idle_clients.append(client)

    def _spare_client(self) -> Store:
        # kept: the store's server looks up the name of whoever connects, and serves nobody until a name server answers
        with suppress(IndexError):
            return self._idle_clients.pop()
        return _client_of(self.store)

    def has_left(self, address: str) -> bool:
        """True if a rank has left: it sends no more requests, or waits for ranks that have left."""
        with _as_os_errors():
            return bool(self._client.check([_left_key(address)]))

    def note_left(self, address: str) -> None:
        with _as_os_errors():
            self._client.set(_left_key(address), "")

    def set(self, key: str, frame: Frame) -> None:
        with _as_os_errors():
            self._client.set(key, json.dumps(frame))

    def _enqueue(self, listener: str, request: Frame) -> None:
        # numbered by the store: several ranks may send a request at the same time. The listener waits for each number
        self.set(_request_key(listener, self._client.add(_request_count_key(listener), 1)), request)

    def _pop(self, key: str) -> Frame:
        frame: Frame = json.loads(self._client.get(key))
        self._client.delete_key(key)
        return frame

    # Being asked

    def register(self, handler: RequestHandler) -> str:
        """Let other ranks send requests to an object, held weakly. Returns the address of the object."""
        self._count += 1
        self._handlers[self._count] = weakref.ref(handler)
        weakref.finalize(handler, self._forget, self._count).atexit = False
        return f"{self._name}/{self._count}"

    def _forget(self, number: int) -> None:
        with _listeners_lock:
            self._handlers.pop(number, None)
            if self._handlers or self.is_closed or self._process != os.getpid():
                return
            self.is_closed = True
        with suppress(RuntimeError):  # the interpreter is about to end
            start_serving(NAME, self._wake_to_close)

    def close(self) -> None:
        """End the thread before the interpreter ends; after an error of the script, break all connections too."""
        self.is_closed = True
        self._wake_to_close()
        self.thread.join(_LAST_SECONDS)
        if has_failed.is_set():
            for connection in list(self._connections):
                connection.abort()

    def _wake_to_close(self) -> None:
        with suppress(OSError, RuntimeError):  # the store is gone, and with it the thread
            self._client.set(_closed_key(self._name), "")
            if self._is_remote:
                self._enqueue(self._name, {})

    def _listen(self, listening: Store) -> None:
        number = 1
        with suppress(RuntimeError):  # the job's store is gone, and with it the job
            while self._has_request(listening, _request_key(self._name, number)):
                if request := self._pop(_request_key(self._name, number)):
                    with suppress(RuntimeError):  # no more threads can start
                        start_serving(NAME, partial(self._serve, request))
                number += 1
            self._await_others()

    def _has_request(self, listening: Store, key: str) -> bool:
        while not self.is_closed:
            if not self._is_remote:  # its `wait` polls a file as often, and cannot be interrupted
                if listening.check([key]):
                    return True
                time.sleep(_POLL_SECONDS[1])
                continue
            try:
                listening.wait([key], LONGEST_WAIT)
                return not self.is_closed
            except dist.DistStoreError:  # `LONGEST_WAIT` has passed
                continue
        return False

    def _await_others(self) -> None:
        """Keep the store's server, on its rank, until no other rank waits on it: torch would print errors there."""
        if self._is_remote:
            others = self._client.add(_OPEN_LISTENERS, -1)
            deadline = time.monotonic() + _CLOSING_SECONDS
            while self._has_server and others > 0 and time.monotonic() < deadline:
                if has_failed.wait(_POLL_SECONDS[1]):
                    return
                others = self._client.add(_OPEN_LISTENERS, 0)

    def _serve(self, request: Frame) -> None:
        reference = self._handlers.get(request["to"])
        handler = None if reference is None else reference()
        try:
            if handler is not None:
                handler.answer(Request(self, request["key"], request["asks"]))
        except (OSError, EOFError):
            pass  # the rank that asks has closed the connection, or reports the error itself
        except Exception as error:
            logger.warning(
                "A call for optimizer state was refused: %s. [ZERO-513]", f"{type(error).__name__}: {error}".rstrip(".")
            )


_OPEN_LISTENERS = "listeners"
_listeners_lock = threading.RLock()  # reentrant: a finalizer may run while the lock is held
_listeners: "weakref.WeakSet[Listener]" = weakref.WeakSet()


def listen(group: ProcessGroup, handler: RequestHandler) -> tuple[Listener, str]:
    """Let other ranks of the job send requests to an object, held weakly. Returns its listener and its address.

    Raises RuntimeError if the group has no store.
    """
    store = job_store_of(group)
    while True:
        # without the lock: a finalizer in the thread that it starts would wait for it
        listener = _listener_in(store)
        with _listeners_lock:
            address = listener.register(handler)
            if not listener.is_closed:  # a finalizer may have closed it meanwhile
                break
    watch_script_end(_close_listeners)
    return listener, address


def _listener_in(store: Store) -> Listener:
    for listener in list(_listeners):
        if listener.store is store and not listener.is_closed and listener._process == os.getpid():
            return listener
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)  # the server is in torchrun's agent
    listener = Listener(store, has_server=dist.get_rank() == 0 and not is_agents)
    _listeners.add(listener)
    return listener


def _close_listeners() -> None:
    for listener in list(_listeners):
        if listener._process == os.getpid():
            listener.close()


def _whole(call: Callable[[], None]) -> None:
    """Make a call to its end, whatever a signal handler raises: Python raises that in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        call()
        return
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except Exception as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    threading.Thread(target=run, name=NAME, daemon=True).start()
    outcome.result()


def _client_of(store: Any) -> Store:
    """A further client of the store, with its own connection."""
    limit = timedelta(seconds=ANSWER_SECONDS)
    if isinstance(store, TCPStore):  # a clone of a store whose server is gone would try until that store's time-out
        client: Store = TCPStore(store.host, store.port, None, False, limit, wait_for_workers=False)
    else:
        client = store.clone()
        client.set_timeout(limit)
    return PrefixStore("ddp_zero/listener", client)


def _request_count_key(listener: str) -> str:
    return f"{listener}/requests"


def _request_key(listener: str, number: int) -> str:
    return f"{listener}/request/{number}"


def _closed_key(listener: str) -> str:
    return f"{listener}/closed"


def _left_key(address: str) -> str:
    return f"{address}/left"


def _answer_key(key: str) -> str:
    return f"answer/{key}"
