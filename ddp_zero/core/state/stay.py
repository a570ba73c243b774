"""Keeps what answers other ranks until none of them can call any more: they may read a state after this rank has ended.

In ``if rank == 0: torch.save(opt.state_dict(), ...)`` at the end of a script the other ranks have nothing left to do. A
rank *leaves* when its optimizer is dropped or its script has ended. Then a thread, for which the process waits, calls
every peer and waits until that one leaves too, is gone, or waits for other ranks itself: for this one, perhaps, which
is then to be gone. After a script that ends with an exception nothing stays.
"""

import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress

from ddp_zero.core.state.address import Address
from ddp_zero.core.state.caller import call
from ddp_zero.core.state.frames import receive_frame, send_frame

UNTIL = "until"
"""Key of a request that is answered, by the end of the connection, when the rank leaves."""

_LOOK_SECONDS, _LOOKS = 1.0, 5
WAITING_IN = ("torch.distributed", "torch.autograd", "ddp_zero.core.comm", "ddp_zero.core.backward")
"""Packages whose code waits for other ranks."""


class Stay:
    """Where a rank is on its way out, with one optimizer.

    Args:
        peers: the other ranks.
        time_out: seconds that this rank stays at most.
    """

    def __init__(self, peers: Sequence[Address], time_out: float) -> None:
        self._peers = peers
        self._time_out = time_out
        self._leaves = threading.Event()
        self._process = os.getpid()

    def keep(self, answers: object, owner: object) -> None:
        """Keep who answers from the moment that the owner is dropped, or the script ends, while peers may call."""
        _kept[self] = answers
        weakref.finalize(owner, self.leave).atexit = False
        _watch_script()

    def leave(self) -> None:
        """Tell the peers that wait, and stay until none can call. Returns at once."""
        if self._leaves.is_set() or os.getpid() != self._process:
            return
        self._leaves.set()
        try:
            threading.Thread(target=self._stay, name="ddp_zero stay", daemon=False).start()
        except RuntimeError:  # the interpreter is about to end
            _kept.pop(self, None)

    def wait_until_it_leaves(self) -> None:
        """Block until this rank leaves, or its script waits for other ranks."""
        before, looks = None, 0
        while looks < _LOOKS and not self._leaves.wait(_LOOK_SECONDS):
            place = _waiting_at()
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


def _watch_script() -> None:
    """Have all leave when the script of this process has ended; once in each process."""
    if os.getpid() not in _watched:
        _watched.add(os.getpid())
        threading.Thread(target=_leave_at_the_end, name="ddp_zero end", daemon=False).start()


def _leave_at_the_end() -> None:
    threading.main_thread().join()
    has_failed = getattr(sys, "last_value", None) is not None  # Python has printed an exception
    for stay in list(_kept):
        if has_failed:
            _kept.pop(stay, None)
        else:
            stay.leave()


def _waiting_at() -> tuple[int, int] | None:
    """Where the script waits for other ranks, as a frame and the instruction in it; None if it does not."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or not frame.f_globals.get("__name__", "").startswith(WAITING_IN):
        return None
    return id(frame), frame.f_lasti
