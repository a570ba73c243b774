"""Listens for other ranks, and answers each in a thread of its own.

The thread that listens is a daemon and holds nothing but a weak reference to who answers; when that is collected, the
port is closed and the thread ends. A thread that answers keeps its process, and who answers, until the caller has hung
up: a program may end while another rank still reads its state. It waits at most for the time-out.
"""

import errno
import os
import secrets
import socket
import threading
import time
import weakref
from contextlib import suppress
from typing import Protocol

from ddp_zero.comm.tracing import logger
from ddp_zero.service.address import Address, own_hosts
from ddp_zero.service.handshake import SECRET_BYTES, WrongPeer, admit

_BACKLOG = 1024
_HANDSHAKE_SECONDS = 10.0
_PAUSE_SECONDS = 0.5
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
        listener = open_port()
    except OSError as error:
        return Address((), 0, "", f"it cannot listen: {error}")
    port = listener.getsockname()[1]
    _open.add(listener)
    thread = threading.Thread(
        target=_accept, args=(listener, secret, weakref.ref(answers), time_out), name=f"{NAME} listener", daemon=True
    )
    thread.start()
    weakref.finalize(answers, _close, listener, os.getpid())
    return Address(own_hosts(store_host), port, secret.hex())


def open_port() -> socket.socket:
    """A socket that listens at a free port of all interfaces.

    Raises:
        OSError: if this machine refuses.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)


def _accept(listener: socket.socket, secret: bytes, reference: "weakref.ref[Answers]", time_out: float) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno not in _PASSING or reference() is None:  # closed
                return
            logger.warning("a call for optimizer state could not be accepted yet: %s", error)
            time.sleep(_PAUSE_SECONDS)
            continue
        try:
            threading.Thread(
                target=_answer, args=(connection, secret, reference, time_out), name=NAME, daemon=False
            ).start()
        except RuntimeError:  # the interpreter is about to end
            connection.close()
            return


def _answer(connection: socket.socket, secret: bytes, reference: "weakref.ref[Answers]", time_out: float) -> None:
    with connection:
        try:
            connection.settimeout(min(_HANDSHAKE_SECONDS, time_out))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            admit(connection, secret)
            connection.settimeout(time_out)
            answers = reference()
            if answers is not None:
                answers.answer(connection)
        except (OSError, EOFError):
            pass  # the caller has hung up, or reports it
        except (WrongPeer, ValueError) as error:
            logger.warning("a call for optimizer state was refused: %s", error)


def _close(listener: socket.socket, process: int) -> None:
    """Stop listening. In a process that was forked only this copy is closed: the parent goes on."""
    if os.getpid() == process:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # ends the accept() of the thread
    listener.close()


_open: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A child that outlives its parent must not keep the port: callers would wait instead of being refused."""
    for listener in list(_open):
        listener.close()


if hasattr(os, "register_at_fork"):  # where there are forks
    os.register_at_fork(after_in_child=_close_in_child)
