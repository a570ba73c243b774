"""Threads that answer other ranks, which the end of a script waits for.

After a script that ends well, the process stays while a thread answers, and while a peer may still ask. After a script
that ends with an exception nothing stays, and peers that wait for it are told.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from ddp_zero.core.comm.script_end import script_has_failed, watch_worker

has_failed = threading.Event()
"""Set when the script has ended with an error, so that serving threads end."""

LAST_SECONDS = 60.0
"""Time for these threads to end, mostly in connections to peers that are gone."""


class EndListener(Protocol):
    """An object that outlives the script, and is told how the script has ended."""

    def leave(self) -> None:
        """The script has ended well: begin to end, in a thread of `start_serving` if that takes time."""

    def give_up(self) -> None:
        """The script has failed: end at once."""


_watched: set[int] = set()  # ids of processes
_listeners: dict[EndListener, object] = {}
_serving: dict[threading.Thread, Callable[[], None]] = {}
_last_calls: list[Callable[[], None]] = []
_is_over = threading.Event()


def start_serving(name: str, work: Callable[[], None], interrupt: Callable[[], None] = lambda: None) -> None:
    """Start a thread for which a script that ends well waits. Raises RuntimeError if no more threads can start.

    ``interrupt`` is called if the script fails, and must wake the thread.
    """
    # a daemon, for which Python does not wait: it would wait after an error as well
    thread = threading.Thread(target=work, name=name, daemon=True)
    _living_threads()  # forgets threads that have ended
    _serving[thread] = interrupt
    try:
        if _is_over.is_set():  # read after `_end` can see the thread
            raise RuntimeError("the script has ended")
        thread.start()
    except RuntimeError:
        _serving.pop(thread, None)
        raise


def keep(listener: EndListener, kept: object) -> None:
    """Keep ``kept`` alive until `drop`, and tell the listener when the script ends."""
    _listeners[listener] = kept


def drop(listener: EndListener) -> None:
    _listeners.pop(listener, None)


def watch_script_end(last: Callable[[], None] | None = None) -> None:
    """Wait for serving threads when the script ends.

    ``last`` is called when no peer can ask any more.
    """
    if last is not None and last not in _last_calls:
        _last_calls.append(last)
    if os.getpid() not in _watched:  # once in each process
        _watched.add(os.getpid())
        watch_worker()
        threading.Thread(target=_end, name="ddp_zero end", daemon=False).start()


def _end() -> None:
    """At the end of this process's script, wait until no peer can ask any more; after an error, for nobody.

    Either way no thread is left. During finalization Python ends a thread that returns from torch by `pthread_exit`,
    which unwinds the thread's stack, and C++ destructors in that stack abort the process.
    """
    threading.main_thread().join()
    if script_has_failed():
        has_failed.set()
        for listener in list(_listeners):
            listener.give_up()
    else:
        for listener in list(_listeners):
            listener.leave()
        _join_serving()
    _is_over.set()
    for call in _last_calls:
        call()
    deadline = time.monotonic() + LAST_SECONDS if has_failed.is_set() else None
    if deadline:
        for interrupt in list(_serving.values()):
            interrupt()
    _join_serving(deadline)
    if _living_threads():  # a thread may wait for a device that never answers
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(1)


def _join_serving(deadline: float | None = None) -> None:
    while (threads := _living_threads()) and (deadline is None or time.monotonic() < deadline):
        with suppress(RuntimeError):  # the thread is about to start
            threads[0].join(None if deadline is None else max(0.0, deadline - time.monotonic()))


def _living_threads() -> list[threading.Thread]:
    for thread in list(_serving):
        with suppress(RuntimeError):  # the thread is about to start, or is this thread
            thread.join(0)
            if not thread.is_alive():
                _serving.pop(thread, None)
    return list(_serving)


if hasattr(os, "register_at_fork"):  # where there are forks
    os.register_at_fork(after_in_child=_serving.clear)  # these threads are the parent's
