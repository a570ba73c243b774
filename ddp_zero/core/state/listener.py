"""Listens for other ranks, and answers each in a thread of its own once it has proved that it knows the secret.

The thread that listens is a daemon and holds nothing but a weak reference to who answers; when that is collected, the
port is closed and the thread ends. It also hears the proofs: of a few callers at a time, for a few seconds each, so
that strangers take neither threads nor descriptors, and keep no process. A thread that answers keeps its process, and
who answers, until the caller has hung up: a program may end while another rank still reads its state. It waits at most
for the time-out.
"""

import errno
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Protocol

from ddp_zero.core.comm.tracing import logger
from ddp_zero.core.state.address import Address, bound_host, own_hosts
from ddp_zero.core.state.handshake import SECRET_BYTES, Admission, WrongPeer

_BACKLOG = 1024
_MOST_CALLERS = 8
"""That have not proved anything yet, at a time."""
_HANDSHAKE_SECONDS = 10.0
_PATIENCE_SECONDS = 0.25
"""After so long a caller makes room for another."""
_PAUSE_SECONDS = 0.5
_COMPLAINT_SECONDS = 60.0
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EINTR)
"""Errors of `accept` after which the port still works: too few descriptors or memory, a caller that has hung up."""
NAME = "ddp_zero state"


class Answers(Protocol):
    """Who answers."""

    def answer(self, connection: socket.socket) -> None:
        """Answer the caller until it hangs up, which raises EOFError."""


def listen(answers: Answers, store_host: str | None, time_out: float) -> Address:
    """Let other ranks call, for as long as ``answers`` is alive. Returns at once.

    Args:
        answers: who answers; held weakly.
        store_host: see `own_hosts`.
        time_out: seconds for which a caller may make no progress.

    Returns:
        Where to call; if this machine has refused, an address without a port, and the reason.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    try:
        listener = open_port(bound_host(store_host))
    except OSError as error:
        return Address((), 0, "", f"it cannot listen: {error}")
    port = listener.getsockname()[1]
    listener.setblocking(False)
    _open.add(listener)
    thread = threading.Thread(
        target=_Lobby(listener, secret, weakref.ref(answers), time_out).run, name=f"{NAME} listener", daemon=True
    )
    thread.start()
    weakref.finalize(answers, _close, listener, os.getpid())
    return Address(own_hosts(store_host), port, secret.hex())


def open_port(host: str | None = None) -> socket.socket:
    """A socket that listens at a free port.

    Args:
        host: an address of this machine; None: all of them.

    Raises:
        OSError: if this machine refuses.
    """
    if host is not None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)


@dataclass(eq=False)
class _Caller:
    """One that has not proved anything yet."""

    connection: socket.socket
    admission: Admission
    since: float


class _Lobby:
    """Where callers prove that they know the secret: the thread that listens.

    Args:
        listener: the port.
        secret: what callers must know.
        reference: to who answers.
        time_out: seconds for which an admitted caller may make no progress.
    """

    def __init__(
        self, listener: socket.socket, secret: bytes, reference: "weakref.ref[Answers]", time_out: float
    ) -> None:
        self._listener, self._secret, self._reference, self._time_out = listener, secret, reference, time_out
        self._callers: list[_Caller] = []  # the first is there for the longest
        self._complained = float("-inf")
        self._paused_until = float("-inf")
        self._selector = getattr(selectors, "PollSelector", selectors.SelectSelector)()  # which take no descriptor

    def run(self) -> None:
        """Until the port is closed."""
        try:
            while self._listener.fileno() >= 0:
                self._dismiss_late()
                self._listen(self._has_room())
                ready = [key.data for key, _ in self._selector.select(self._seconds_to_wait())]
                for caller in filter(None, ready):  # first, or those that can prove it would make room for strangers
                    self._hear(caller)
                if None in ready:
                    self._accept()
        except _PortClosed:
            pass
        finally:
            for caller in self._callers:
                caller.connection.close()
            self._listener.close()
            self._selector.close()

    def _listen(self, is_on: bool) -> None:
        if is_on == (self._listener in self._ports()):
            return
        if is_on:
            try:
                self._selector.register(self._listener, selectors.EVENT_READ)
            except ValueError as error:
                raise _PortClosed("the owner is gone") from error
        else:
            self._selector.unregister(self._listener)

    def _ports(self) -> list[object]:
        return [key.fileobj for key in self._selector.get_map().values()]

    def _has_room(self) -> bool:
        now = time.monotonic()
        if now < self._paused_until:
            return False
        return len(self._callers) < _MOST_CALLERS or now - self._callers[0].since >= _PATIENCE_SECONDS

    def _seconds_to_wait(self) -> float | None:
        moments = [self._paused_until] if self._listener not in self._ports() else []
        if self._callers:
            is_full = len(self._callers) >= _MOST_CALLERS
            moments.append(self._callers[0].since + (_PATIENCE_SECONDS if is_full else _HANDSHAKE_SECONDS))
        left = [moment - time.monotonic() for moment in moments]
        return max(0.001, min((one for one in left if one > 0), default=0.001)) if left else None

    def _dismiss_late(self) -> None:
        deadline = time.monotonic() - min(_HANDSHAKE_SECONDS, self._time_out)
        while self._callers and self._callers[0].since <= deadline:
            self._dismiss(self._callers[0], "it has not proved in time that it knows the secret")

    def _dismiss(self, caller: _Caller, why: object = None) -> None:
        self._leave(caller)
        caller.connection.close()
        if why is not None:
            self._complain(f"a call for optimizer state was refused: {why}")

    def _leave(self, caller: _Caller) -> None:
        self._callers.remove(caller)
        self._selector.unregister(caller.connection)

    def _complain(self, message: str) -> None:
        """One line a minute: strangers may call often."""
        if time.monotonic() - self._complained >= _COMPLAINT_SECONDS:
            self._complained = time.monotonic()
            logger.warning(message)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in _PASSING or self._reference() is None:
                raise _PortClosed("the owner is gone") from error
            self._complain(f"a call for optimizer state could not be accepted yet: {error}")
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
            if self._callers:  # its descriptor may be the one that is missing
                self._dismiss(self._callers[0])
            return
        if len(self._callers) >= _MOST_CALLERS:
            self._dismiss(self._callers[0], "too many at a time that have not proved that they know the secret")
        connection.setblocking(False)
        caller = _Caller(connection, Admission(self._secret), time.monotonic())
        self._callers.append(caller)
        self._selector.register(connection, selectors.EVENT_READ, caller)

    def _hear(self, caller: _Caller) -> None:
        connection, admission = caller.connection, caller.admission
        try:
            room = bytearray(admission.missing)
            received = connection.recv_into(room)
            if not received:
                return self._dismiss(caller)
            connection.sendall(admission.receive(bytes(room[:received])))  # so little that it never blocks
        except BlockingIOError:
            return None
        except OSError:
            return self._dismiss(caller)  # it has hung up
        except WrongPeer as error:
            return self._dismiss(caller, error)
        if admission.is_proven:
            self._leave(caller)
            self._admit(connection)
        return None

    def _admit(self, connection: socket.socket) -> None:
        arguments = connection, self._reference, self._time_out
        try:
            threading.Thread(target=_answer, args=arguments, name=NAME, daemon=False).start()
        except RuntimeError:  # there can be no more threads, or the interpreter is about to end
            connection.close()


class _PortClosed(Exception):
    """Who answers is gone."""


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
        except ValueError as error:
            logger.warning("a call for optimizer state was refused: %s", error)


def _close(listener: socket.socket, process: int) -> None:
    """Stop listening. In a process that was forked only this copy is closed: the parent goes on.

    The thread closes the port itself: it may be about to wait for that descriptor, which would soon be another's.
    """
    try:
        if os.getpid() == process:
            listener.shutdown(socket.SHUT_RDWR)  # from now on the thread finds it readable, and nothing to accept
            return
    except OSError:
        pass  # it is closed already, or the system shuts down no port that listens
    listener.close()


_open: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A child that outlives its parent must not keep the port: callers would wait instead of being refused."""
    for listener in list(_open):
        listener.close()


if hasattr(os, "register_at_fork"):  # where there are forks
    os.register_at_fork(after_in_child=_close_in_child)
