"""Connections on which ranks ask each other for optimizer state: addresses, frames, proofs, listening, and leaving.

Every rank listens at its own port, in a daemon thread. A caller must prove that it knows the optimizer's secret,
exchanged between ranks at construction; then a thread serves it until it hangs up. Elements travel unencrypted.

`multiprocessing.connection` is not used: its `Listener.accept` proves one caller after the other without a time-out, so
one silent stranger keeps out every rank; it knows no IPv6, and up to Python 3.11 its proof is HMAC-MD5.
"""

import asyncio
import errno
import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from ddp_zero.core.comm.script_end import script_has_failed, watch_worker
from ddp_zero.core.comm.tracing import logger
from ddp_zero.core.local.tree import TensorSpec, Tree, flatten, memory_of, rebuild, specs_in
from ddp_zero.core.state.device_reads import bytes_of

# Addresses

_SIOCGIFADDR = 0x8915
_MOST_HOSTS = 4


@dataclass(frozen=True)
class Address:
    """The addresses at which a rank can be called."""

    hosts: tuple[str, ...]  # addresses of its machine, to be tried in this order
    port: int  # port at all hosts; 0 if the rank cannot be called
    secret: str = field(repr=False)  # shared secret of the handshake, in hexadecimal
    reason: str = ""  # why the rank cannot be called, or ""

    def as_text(self) -> str:
        return json.dumps([self.hosts, self.port, self.secret, self.reason])

    @staticmethod
    def of_text(text: str) -> "Address":
        hosts, *others = json.loads(text)
        return Address(tuple(hosts), *others)


def own_hosts(store_host: str | None) -> tuple[str, ...]:
    """Addresses of this machine at which other ranks may reach it, the likeliest first. Sends no packet.

    Candidates: Gloo's interfaces (``GLOO_SOCKET_IFNAME``), the interface towards the job's store (or ``MASTER_ADDR``),
    the host's name, and the default route.
    """
    found = list(dict.fromkeys(_candidates(store_host or os.environ.get("MASTER_ADDR"))))
    return tuple(found[:_MOST_HOSTS]) or ("127.0.0.1",)


def bound_host(store_host: str | None) -> str | None:
    """The address to listen at if it is unambiguous; None for all interfaces.

    Gloo's interface, if it is told to use a single one; the loopback, if the job's store is there: all ranks are on
    this machine then, unless a port is forwarded to it.
    """
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces and "," not in interfaces:
        with suppress(OSError):
            return _address_of_interface(interfaces)
    host = store_host or os.environ.get("MASTER_ADDR") or ""
    is_local = host == "localhost" or host == "::1" or host.startswith("127.")
    return own_hosts(store_host)[0] if is_local else None


def _candidates(store_host: str | None) -> Iterator[str]:
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        with suppress(OSError):
            yield _address_of_interface(name)
    if store_host:
        with suppress(OSError):
            yield _address_towards(store_host)
    with suppress(OSError):
        yield socket.gethostbyname(socket.gethostname())
    with suppress(OSError):
        yield _address_towards("192.0.2.1")  # a network reserved for documentation: finds the default route


def _address_towards(host: str) -> str:
    """The address of the interface that packets to a host leave by."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _address_of_interface(name: str) -> str:
    import fcntl  # not on every system

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))[20:24])


# Frames: a length of 8 bytes and so many bytes of JSON. A tree is a frame with its text, then the elements of its
# tensors in the order of memory, sent from their own memory and received into it. Nothing is pickled. The time-out of
# a socket is how long its peer may make no progress.

_LENGTH = struct.Struct("!Q")
_MOST_FRAME_BYTES = 1 << 30
MOST_REQUEST_BYTES = 1 << 16
"""Maximum length of a frame that asks for something."""
_CHUNK_BYTES = 4 << 20

Frame = dict[str, Any]


def send_frame(connection: socket.socket, frame: Mapping[str, Any]) -> None:
    """Send one frame. Raises OSError if the peer is gone or makes no progress."""
    _send_joined(connection, [memoryview(encode_frame(frame))])


def send_tree(connection: socket.socket, frame: Mapping[str, Any], tree: Tree) -> None:
    """Send a frame, with the tree's text added as ``"tree"``, and the elements of its tensors.

    Raises TypeError for a value that cannot be sent, before sending anything; OSError if the peer makes no progress.
    """
    text, tensors = flatten(tree)
    head = encode_frame({**frame, "tree": text})
    _send_joined(connection, chain([memoryview(head)], *map(bytes_of, tensors)))


def receive_frame(connection: socket.socket, most: int = _MOST_FRAME_BYTES) -> Frame:
    """Receive one frame of at most so many bytes; takes memory as they arrive.

    Raises EOFError or OSError if the peer is gone, ValueError for other bytes than a frame.
    """
    head = bytearray(_LENGTH.size)
    receive_into(connection, memoryview(head))
    (length,) = _LENGTH.unpack(head)
    if length > most:
        raise ValueError(f"Expected a frame of at most {most} bytes, got {length}.")
    body = bytearray()
    while missing := length - len(body):
        piece = bytearray(min(missing, _CHUNK_BYTES))
        receive_into(connection, memoryview(piece))
        body += piece
    return decode_frame(bytes(body))


def receive_tree(connection: socket.socket, frame: Frame, device: torch.device) -> Tree:
    """Receive a tree from `send_tree`; accelerator tensors to ``device``, the rest to the CPU."""
    text = str(frame["tree"])
    return rebuild(text, [_receive_tensor(connection, spec, device) for spec in specs_in(text)])


def encode_frame(frame: Mapping[str, Any]) -> bytes:
    """The frame as bytes, with its length."""
    body = json.dumps(frame).encode()
    return _LENGTH.pack(len(body)) + body


def decode_frame(body: bytes) -> Frame:
    """A frame from its bytes, without their length. Raises ValueError unless they are JSON of a dict."""
    try:
        frame = json.loads(body)
    except RecursionError as error:
        raise ValueError(f"Expected a frame, got JSON that is too deep: {error}") from error
    if not isinstance(frame, dict):
        raise ValueError(f"Expected a frame that holds a dict, got {type(frame).__name__}.")
    return frame


def receive_into(connection: socket.socket, memory: memoryview) -> None:
    """Fill memory from a connection. Raises EOFError if the peer closes it early."""
    while memory:
        received = connection.recv_into(memory)
        if not received:
            raise EOFError(f"Expected {len(memory)} more bytes, got the end of the connection")
        memory = memory[received:]


def _send_joined(connection: socket.socket, parts: Iterable[memoryview]) -> None:
    # small parts in one message, so that a busy peer wakes up once; large ones from their own memory, without a copy
    joined = bytearray()
    for part in parts:
        if len(joined) + len(part) <= _CHUNK_BYTES // 64:
            joined += part
            continue
        send_all(connection, memoryview(joined))
        send_all(connection, part)
        joined = bytearray()
    send_all(connection, memoryview(joined))


def send_all(connection: socket.socket, memory: memoryview) -> None:
    """Send memory. Raises OSError if the peer is gone or makes no progress."""
    for begin in range(0, len(memory), _CHUNK_BYTES):  # a socket's time-out is for the whole of one sendall
        connection.sendall(memory[begin : begin + _CHUNK_BYTES])


def _receive_tensor(connection: socket.socket, spec: TensorSpec, device: torch.device) -> Tensor:
    if spec.stride is None:
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
    else:
        tensor = torch.empty_strided(spec.shape, tuple(spec.stride), dtype=spec.dtype, device="cpu")
    if tensor.numel():
        receive_into(connection, memory_of(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)))
    return tensor if spec.device_type == "cpu" else tensor.to(device)


# Proofs: both ends show that they know the secret and never send it, by keyed hashes (RFC 2104).
#
# 1. the caller sends `_GREETING` and a nonce;
# 2. the rank that answers sends a nonce of its own and the keyed hash of both;
# 3. the caller sends a different keyed hash of both;
# 4. the rank that answers sends `_WELCOME`. Without it a caller could not tell that it had to make room for others
#    just then, and would lose its first question instead of calling again.

SECRET_BYTES = 16
_NONCE_BYTES = 16
_GREETING = b"ddp_zero 1\n"
_WELCOME = b"\n"


class WrongPeer(Exception):
    """The peer does not know the secret, or speaks a different protocol."""


def greet(connection: socket.socket, secret: bytes) -> None:
    """Client side of the handshake. Raises WrongPeer, or EOFError or OSError if the peer is gone."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_GREETING + nonce)
    answer = bytearray(_NONCE_BYTES + hashlib.sha256().digest_size)
    receive_into(connection, memoryview(answer))
    theirs = bytes(answer[:_NONCE_BYTES])
    _check_proof(bytes(answer[_NONCE_BYTES:]), _proof(secret, b"answers", nonce, theirs))
    # labelled by side: otherwise the peer's own proof, sent back to it, would pass as the caller's
    connection.sendall(_proof(secret, b"calls", nonce, theirs))
    receive_into(connection, memoryview(bytearray(len(_WELCOME))))


async def admit(connection: socket.socket, secret: bytes) -> None:
    """Server side of the handshake, on a socket that does not block. Raises as `greet`."""
    loop = asyncio.get_running_loop()
    greeting = await _receive(connection, len(_GREETING) + _NONCE_BYTES)
    if not greeting.startswith(_GREETING):
        raise WrongPeer(f"Expected a greeting of this protocol, got {greeting[:16]!r}.")
    nonce, own = greeting[len(_GREETING) :], secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(connection, own + _proof(secret, b"answers", nonce, own))
    expected = _proof(secret, b"calls", nonce, own)
    _check_proof(await _receive(connection, len(expected)), expected)
    await loop.sock_sendall(connection, _WELCOME)


async def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = await asyncio.get_running_loop().sock_recv(connection, count - len(received))
        if not part:
            raise EOFError("the caller has hung up")
        received += part
    return received


def _proof(secret: bytes, side: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(secret, side + b"".join(nonces), "sha256")


def _check_proof(found: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(found, expected):
        raise WrongPeer("The peer does not know the secret.")


# Calling

ATTEMPTS, _PAUSE_BETWEEN_ATTEMPTS = 5, 0.2


def call(address: Address, time_out: float) -> socket.socket:
    """Connect to a rank, with the handshake, within ``time_out`` seconds for all hosts together; OSError if not.

    Afterwards ``time_out`` is the connection's.
    """
    if not address.port:
        raise ConnectionError(address.reason)
    failed = []
    deadline = time.monotonic() + time_out
    for position, host in enumerate(address.hosts):
        for attempt in range(ATTEMPTS):
            left = max(0.001, deadline - time.monotonic())
            try:
                connection = _greeted(host, address, left / (len(address.hosts) - position))
            except (OSError, EOFError, WrongPeer) as error:
                has_hung_up = isinstance(error, EOFError | ConnectionResetError | BrokenPipeError)
                if has_hung_up and attempt < ATTEMPTS - 1 and left > _PAUSE_BETWEEN_ATTEMPTS:
                    time.sleep(_PAUSE_BETWEEN_ATTEMPTS)  # it may have made room for other callers
                    continue
                failed.append(f"{host}: {error}")
                break
            connection.settimeout(time_out)
            return connection
    raise ConnectionError("; ".join(failed))


def _greeted(host: str, address: Address, time_out: float) -> socket.socket:
    connection = socket.create_connection((host, address.port), time_out)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greet(connection, bytes.fromhex(address.secret))
    except BaseException:
        connection.close()
        raise
    return connection


# Listening. The thread that listens is a daemon and refers weakly to the object that answers; when that is collected,
# the port is closed and the thread ends. It also hears the proofs, of a few callers at a time and for a few seconds
# each, so that strangers take neither threads nor descriptors and keep no process alive. A script that ends well waits
# for the threads that answer until their callers have hung up, at most for the time-out: a rank may read its state.

NAME = "ddp_zero state"
_BACKLOG = 1024
MOST_CALLERS = 8
"""Maximum number of unproven callers at a time."""
HANDSHAKE_SECONDS = 10.0
_PATIENCE_SECONDS = 0.25
"""Age at which an unproven caller gives way to a new one."""
_TURN_SECONDS = 0.001
PAUSE_SECONDS = 0.5
COMPLAINT_SECONDS = 60.0
_COMPLAINT = "A call for optimizer state %s: %s. [ZERO-513]"
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EINTR)
"""Errors of `accept` after which the port still works: too few descriptors or memory, a caller that has hung up."""


class Answers(Protocol):
    """An object that serves callers."""

    def answer(self, connection: socket.socket) -> None:
        """Serve a caller until it hangs up, which raises EOFError."""


def listen(answers: Answers, store_host: str | None, time_out: float) -> Address:
    """Let other ranks call for as long as ``answers``, held weakly, is alive. Returns at once.

    A caller may make no progress for ``time_out`` seconds. Returns the address to call; without a port, and with the
    reason, if this machine has refused to listen.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    try:
        listener = open_port(bound_host(store_host))
        # polls, because a fork would share an epoll with its parent
        loop = asyncio.SelectorEventLoop(getattr(selectors, "PollSelector", selectors.SelectSelector)())
    except OSError as error:
        return Address((), 0, "", f"it cannot listen: {error}")
    port = listener.getsockname()[1]
    listener.setblocking(False)
    _open.add(listener)
    # weak: the thread must not keep the optimizer alive that it serves
    lobby = _Lobby(listener, secret, weakref.ref(answers), time_out)
    threading.Thread(target=lobby.run, args=(loop,), name=f"{NAME} listener", daemon=True).start()
    weakref.finalize(answers, _close, listener, os.getpid())
    _watch_the_end()
    return Address(own_hosts(store_host), port, secret.hex())


def open_port(host: str | None = None) -> socket.socket:
    """A listening socket at a free port of one address, or of all if None. Raises OSError if refused."""
    if host is not None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)


class _Lobby:
    """The loop of the listening thread, which also checks the callers' proofs."""

    def __init__(
        self, listener: socket.socket, secret: bytes, reference: "weakref.ref[Answers]", time_out: float
    ) -> None:
        self._listener, self._secret, self._reference, self._time_out = listener, secret, reference, time_out
        self._callers: dict[asyncio.Task[None], float] = {}  # unproven ones and when they came, in this order
        self._complained = float("-inf")

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_until_complete(self._listen(loop))
        finally:
            self._listener.close()
            loop.close()

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            if len(self._callers) >= MOST_CALLERS:  # others wait in the port's queue
                left = next(iter(self._callers.values())) + _PATIENCE_SECONDS - loop.time()
                await asyncio.wait(self._callers, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno not in _PASSING or self._reference() is None:
                    break  # the owner is gone
                self._complain("could not be accepted yet", error)
                self._dismiss_first()  # its descriptor may be the one that is missing
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if len(self._callers) >= MOST_CALLERS:
                await asyncio.sleep(_TURN_SECONDS)  # or those that can prove it would make room for strangers
            if len(self._callers) >= MOST_CALLERS:
                self._dismiss_first()
                self._complain("was refused", "too many at a time that have not proved that they know the secret")
            self._callers[loop.create_task(self._hear(connection))] = loop.time()
            await asyncio.sleep(0)  # one that is dismissed before it begins would not close its connection
        for caller in (waiting := list(self._callers)):
            caller.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)  # they close their connections

    def _dismiss_first(self) -> None:
        first = next(iter(self._callers), None)
        if first is not None:
            del self._callers[first]
            first.cancel()

    def _complain(self, outcome: str, why: object) -> None:
        # at most one line a minute: strangers may call often
        if time.monotonic() - self._complained >= COMPLAINT_SECONDS:
            self._complained = time.monotonic()
            logger.warning(_COMPLAINT, outcome, why)

    async def _hear(self, connection: socket.socket) -> None:
        with ExitStack() as refused:
            refused.enter_context(connection)
            try:
                await asyncio.wait_for(admit(connection, self._secret), min(HANDSHAKE_SECONDS, self._time_out))
            except asyncio.TimeoutError:
                self._complain("was refused", "it has not proved in time that it knows the secret")
            except WrongPeer as error:
                self._complain("was refused", error)
            except (OSError, EOFError):
                pass  # it has hung up
            else:
                with suppress(RuntimeError):  # there can be no more threads, or the interpreter is about to end
                    _start_serving(NAME, partial(_answer, connection, self._reference, self._time_out), connection)
                    refused.pop_all()
            finally:
                self._callers.pop(asyncio.current_task(), None)  # type: ignore[arg-type]


def _answer(connection: socket.socket, reference: "weakref.ref[Answers]", time_out: float) -> None:
    with connection:
        try:
            connection.settimeout(time_out)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answers = reference()
            if answers is not None:
                answers.answer(connection)
        except (OSError, EOFError):
            pass  # the caller has hung up, or reports it
        except Exception as error:  # whatever a request of unexpected content leads to
            logger.warning(_COMPLAINT, "was refused", f"{type(error).__name__}: {error}".rstrip("."))


def _close(listener: socket.socket, process: int) -> None:
    """Stop listening; in a forked process, close only this copy of the socket."""
    try:
        if os.getpid() == process:
            # the thread itself closes the port: it may be about to poll this descriptor, which would soon be another
            # socket's
            listener.shutdown(socket.SHUT_RDWR)  # from now on the thread finds it readable, and nothing to accept
            return
    except OSError:
        pass  # it is closed already, or the system shuts down no port that listens
    listener.close()


_open: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_in_child() -> None:
    # a child that outlives its parent must not keep the port: callers would wait instead of being refused
    for listener in list(_open):
        listener.close()
    _serving.clear()  # threads of the parent


if hasattr(os, "register_at_fork"):  # where there are forks
    os.register_at_fork(after_in_child=_close_in_child)


# Leaving. In ``if rank == 0: torch.save(opt.state_dict(), ...)`` at the end of a script the other ranks have nothing
# left to do, and must still answer. A rank leaves when its optimizer is dropped or its script has ended: then a thread,
# for which the process waits, calls every peer and waits until that one leaves too, is gone, or waits for other ranks
# itself: for this one, perhaps, which is then to be gone. After a script that ends with an exception nothing stays, and
# ranks that wait for it to leave are told by the end of their connections.

UNTIL = "until"
"""Key of a request whose connection the rank closes when it leaves."""

LOOK_SECONDS, _LOOKS = 1.0, 5
WAITING_IN = (
    *("torch.distributed", "torch.autograd", "torch.nn.parallel"),
    *("ddp_zero.core.comm", "ddp_zero.core.backward"),
)
"""Packages whose code waits for other ranks."""


class Stay:
    """Keeps a serving object alive until no peer can call any more, for at most ``time_out`` seconds.

    ``pending`` gives work that the script has issued and its devices have not begun, or None.
    """

    def __init__(
        self, peers: Sequence[Address], time_out: float, pending: Callable[[], int | None] = lambda: None
    ) -> None:
        self._peers = peers
        self._time_out = time_out
        self._pending = pending
        self._leaves = threading.Event()
        self._process = os.getpid()

    def keep(self, answers: object, owner: object) -> None:
        """Keep ``answers`` while peers may call, after the owner is dropped or the script ends."""
        _kept[self] = answers
        weakref.finalize(owner, self.leave).atexit = False

    def leave(self) -> None:
        """Tell waiting peers, and stay until none can call. Returns at once."""
        # only once, and not in a fork: the peers wait for the parent
        if self._leaves.is_set() or os.getpid() != self._process:
            return
        self._leaves.set()
        try:
            _start_serving("ddp_zero stay", self._stay)
        except RuntimeError:  # the interpreter is about to end
            _kept.pop(self, None)

    def give_up(self) -> None:
        """After an error of the script: tell waiting peers, and stay no longer."""
        _kept.pop(self, None)
        self._leaves.set()

    def wait_until_it_leaves(self) -> None:
        """Block until this rank leaves, or its script waits for other ranks."""
        # a script that stays at one instruction of a collective may be waiting for the very rank that waits here: give
        # up, or both would wait for the time-out
        before, looks = None, 0
        while looks < _LOOKS and not self._leaves.wait(LOOK_SECONDS):
            place = _waiting_at(self._pending())
            looks = looks + 1 if place is not None and place == before else 0
            before = place

    def _stay(self) -> None:
        deadline = time.monotonic() + self._time_out
        for address in self._peers:
            with suppress(OSError, EOFError, ValueError):  # it is gone, has left, or the time is up
                with call(address, max(0.001, deadline - time.monotonic())) as connection:
                    send_frame(connection, {UNTIL: "you leave"})
                    connection.settimeout(max(0.001, deadline - time.monotonic()))
                    receive_frame(connection)
        _kept.pop(self, None)


_kept: dict[Stay, object] = {}
_watched: set[int] = set()  # processes
_serving: dict[threading.Thread, socket.socket | None] = {}
"""Threads that the end of a script waits for if it is a good one, and the connections that they answer."""
_LAST_SECONDS = 2.0
"""Time for threads to end, after an error of the script: one that ends within torch aborts the process."""


def _start_serving(name: str, work: Callable[[], None], connection: socket.socket | None = None) -> None:
    """Start a thread for which a script that ends well waits. Raises RuntimeError if there can be no more threads."""

    def run() -> None:
        try:
            work()
        finally:
            _serving.pop(thread, None)

    # daemons, which Python does not wait for: it would wait after an error as well
    thread = threading.Thread(target=run, name=name, daemon=True)
    _serving[thread] = connection
    try:
        thread.start()
    except RuntimeError:
        _serving.pop(thread, None)
        raise


def _watch_the_end() -> None:
    if os.getpid() not in _watched:  # once in each process
        _watched.add(os.getpid())
        watch_worker()
        threading.Thread(target=_end, name="ddp_zero end", daemon=False).start()


def _end() -> None:
    """At the end of this process's script, wait until no peer can call any more; after an error, for nobody."""
    threading.main_thread().join()
    if script_has_failed():
        _end_at_once()
        return
    for stay in list(_kept):
        stay.leave()
    while threads := list(_serving):
        for thread in threads:
            _join(thread)


def _end_at_once() -> None:
    for stay in list(_kept):
        stay.give_up()
    answering = {thread: one for thread, one in list(_serving.items()) if one is not None}
    for connection in answering.values():
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + _LAST_SECONDS
    for thread in answering:
        _join(thread, max(0.0, deadline - time.monotonic()))


def _join(thread: threading.Thread, time_out: float | None = None) -> None:
    with suppress(RuntimeError):  # it is about to start
        thread.join(time_out)


def _waiting_at(pending: int | None) -> tuple[int, int, int | None] | None:
    """Frame and instruction at which the script waits for other ranks, and the pending work; None if it does not.

    Where work is pending it may wait for that anywhere, as in ``loss.item()``.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_globals.get("__name__") == threading.__name__:
        frame = frame.f_back  # for another thread, on behalf of its caller
    if frame is None or (pending is None and not frame.f_globals.get("__name__", "").startswith(WAITING_IN)):
        return None
    return id(frame), frame.f_lasti, pending
