"""Connections on which ranks of a job with snapshots send each other parts: addresses, proofs, and listening.

Every rank listens at its own port, in a daemon thread. A caller must prove that it knows the rank's secret, exchanged
between ranks at construction; then a thread serves it until it hangs up. Elements travel unencrypted.

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
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ddp_zero.core.comm import logger, start_serving, watch_script_end
from ddp_zero.core.state import receive_into

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
    nonce = greeting[len(_GREETING) :]
    own = secrets.token_bytes(_NONCE_BYTES)
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
_CHUNK_BYTES = 4 << 20


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


def send_all(connection: socket.socket, memory: memoryview) -> None:
    """Send memory. Raises OSError if the peer is gone or makes no progress."""
    for begin in range(0, len(memory), _CHUNK_BYTES):  # the time-out is for the whole of one sendall
        connection.sendall(memory[begin : begin + _CHUNK_BYTES])


# Listening. The thread that listens is a daemon and refers weakly to the object that answers; when that is collected,
# the port is closed and the thread ends. It also hears the proofs, of a few callers at a time and for a few seconds
# each, so that strangers take neither threads nor descriptors and keep no process alive. A script that ends well waits
# for the threads that answer until their callers have hung up, at most for the time-out: a rank may read its state.

NAME = "ddp_zero snapshots"
_BACKLOG = 1024
MOST_CALLERS = 8
"""Maximum number of unproven callers at a time."""
HANDSHAKE_SECONDS = 10.0
_PATIENCE_SECONDS = 0.25
"""Age at which an unproven caller gives way to a new one."""
_TURN_SECONDS = 0.001
PAUSE_SECONDS = 0.5
COMPLAINT_SECONDS = 60.0
_COMPLAINT = "A call for a part of a snapshot %s: %s. [ZERO-513]"
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
    watch_script_end()
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
                    answer = partial(_answer, connection, self._reference, self._time_out)
                    start_serving(NAME, answer, interrupt=partial(_hang_up, connection))
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


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


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


if hasattr(os, "register_at_fork"):  # where there are forks
    os.register_at_fork(after_in_child=_close_in_child)
