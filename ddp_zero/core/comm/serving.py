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
"""Set when the script has ended with an error: threads end."""

LAST_SECONDS = 60.0
"""Time for that, of which most is for connections to peers that are gone."""


class Lasting(Protocol):
    """An object that outlives the script."""

    def leave(self) -> None:
        """The script has ended well: start to end, in a thread of `start_serving` if that takes time."""

    def give_up(self) -> None:
        """The script has failed: end at once."""


_watched: set[int] = set()  # processes
_lasting: dict[Lasting, object] = {}
_serving: dict[threading.Thread, Callable[[], None]] = {}
_last: list[Callable[[], None]] = []
_is_over = threading.Event()


def start_serving(name: str, work: Callable[[], None], interrupt: Callable[[], None] = lambda: None) -> None:
    """Start a thread for which a script that ends well waits. Raises RuntimeError if there can be no more of them.

    ``interrupt`` is called if the script fails, and wakes the thread up.
    """
    # daemons, which Python does not wait for: it would wait after an error as well
    thread = threading.Thread(target=work, name=name, daemon=True)
    _present()  # forgets those that have ended
    _serving[thread] = interrupt
    try:
        if _is_over.is_set():  # looked at when `_end` can see the thread
            raise RuntimeError("the script has ended")
        thread.start()
    except RuntimeError:
        _serving.pop(thread, None)
        raise


def keep(lasting: Lasting, kept: object) -> None:
    """Keep an object until `drop`, and tell ``lasting`` when the script ends."""
    _lasting[lasting] = kept


def drop(lasting: Lasting) -> None:
    _lasting.pop(lasting, None)


def watch_the_end(last: Callable[[], None] | None = None) -> None:
    """Wait for serving threads when the script ends.

    ``last`` is called when no peer can ask any more.
    """
    if last is not None and last not in _last:
        _last.append(last)
    if os.getpid() not in _watched:  # once in each process
        _watched.add(os.getpid())
        watch_worker()
        threading.Thread(target=_end, name="ddp_zero end", daemon=False).start()


def _end() -> None:
    """At the end of this process's script, wait until no peer can ask any more; after an error, for nobody.

    Either way no thread is left. Python ends one that comes back from torch during finalization with `pthread_exit`,
    which unwinds its stack, and destructors of C++ in that stack abort the process.
    """
    threading.main_thread().join()
    if script_has_failed():
        has_failed.set()
        for one in list(_lasting):
            one.give_up()
    else:
        for one in list(_lasting):
            one.leave()
        _join_serving()
    _is_over.set()
    for end in _last:
        end()
    deadline = time.monotonic() + LAST_SECONDS if has_failed.is_set() else None
    for interrupt in list(_serving.values()) if deadline else ():
        interrupt()
    _join_serving(deadline)
    if _present():  # for a device, perhaps, that never answers
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(1)


def _join_serving(deadline: float | None = None) -> None:
    while (threads := _present()) and (deadline is None or time.monotonic() < deadline):
        with suppress(RuntimeError):  # it is about to start
            threads[0].join(None if deadline is None else max(0.0, deadline - time.monotonic()))


def _present() -> list[threading.Thread]:
    for thread in list(_serving):
        with suppress(RuntimeError):  # it is about to start, or this one
            thread.join(0)
            if not thread.is_alive():
                _serving.pop(thread, None)
    return list(_serving)


if hasattr(os, "register_at_fork"):  # where there are forks
    os.register_at_fork(after_in_child=_serving.clear)  # threads of the parent
