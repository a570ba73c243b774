"""Ranks that leave: each process stays until no other rank can ask any more.

In ``if rank == 0: torch.save(opt.state_dict(), ...)`` at the end of a script the other ranks have nothing left to do,
and must still answer. A rank leaves when its optimizer is dropped or its script has ended: it notes that in the store,
and a thread waits until every peer has left too, is gone, or is itself blocked in a collective. That may wait for this
rank, which must then end.
"""

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from ddp_zero.core.comm.requests import ANSWER_SECONDS, Listener
from ddp_zero.core.comm.serving import drop, has_failed, keep, start_serving

UNTIL = "until"
"""Key of the request by which a rank that has left asks whether a peer is still alive."""

LOOK_SECONDS, _LOOKS = 1.0, 5
_POLL_SECONDS = 0.005, 0.25
WAITING_IN = (
    *("torch.distributed", "torch.autograd", "torch.nn.parallel"),
    *("ddp_zero.core.comm", "ddp_zero.core.ddp", "ddp_zero.core.backward"),
)
"""Packages whose code waits for other ranks."""


class Stay:
    """Keeps an object that answers until no peer can ask any more, for at most ``time_out`` seconds.

    Args:
        listener: this process's listener.
        mine: the address of the object.
        peers: the addresses of the same object on other ranks.
        time_out: seconds.
        pending: returns the number of a change that was issued and that the devices have not begun, or None.
    """

    def __init__(
        self,
        listener: Listener,
        mine: str,
        peers: Sequence[str],
        time_out: float,
        pending: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._listener, self._mine, self._peers = listener, mine, peers
        self._time_out = time_out
        self._pending = pending
        self._has_left = threading.Event()
        self._is_asked_to_leave = False
        self._process = os.getpid()

    def keep(self, answers: object, owner: object) -> None:
        """Keep ``answers`` while peers may ask, after the owner is dropped or the script ends."""
        keep(self, answers)
        weakref.finalize(owner, self.leave).atexit = False

    def leave(self) -> None:
        """Note that this rank leaves, and stay in a thread until no peer can ask. Returns at once."""
        # only once, and not in a forked process: the peers wait for the parent
        if self._has_left.is_set() or os.getpid() != self._process:
            return
        self._has_left.set()
        try:
            start_serving("ddp_zero stay", self._stay)
        except RuntimeError:  # the interpreter is about to end
            drop(self)

    def give_up(self) -> None:
        """After an error of the script: note that this rank has left, and stay no longer."""
        self._has_left.set()
        with suppress(OSError):
            self._listener.note_left(self._mine)
        drop(self)

    def note_peer_left(self) -> None:
        """A peer has left, and stays for this rank: watch this rank's script in a thread, until it leaves too."""
        if not self._is_asked_to_leave:
            self._is_asked_to_leave = True
            with suppress(RuntimeError):  # the script has just ended
                start_serving("ddp_zero stay", self._watch)

    def _watch(self) -> None:
        self.wait_until_it_leaves()
        with suppress(OSError):
            self._listener.note_left(self._mine)

    def wait_until_it_leaves(self) -> None:
        """Block until this rank leaves, or its script waits for other ranks."""
        # a script that stays at the same instruction of a collective may be waiting for the very rank that waits here:
        # give up, or both ranks would wait for the time-out
        before, looks = None, 0
        while looks < _LOOKS and not self._has_left.wait(LOOK_SECONDS):
            place = _waiting_at(self._pending())
            looks = looks + 1 if place is not None and place == before else 0
            before = place

    def _stay(self) -> None:
        with suppress(OSError):  # the store is gone, and with it the job
            self._listener.note_left(self._mine)
            self._await_peers()
        drop(self)

    def _await_peers(self) -> None:
        # most peers leave at about the same moment: after a while the remaining peers are asked whether they are alive
        now = time.monotonic()
        deadline, next_question = now + self._time_out, now + LOOK_SECONDS
        present = list(self._peers)
        pause, longest = _POLL_SECONDS
        while not has_failed.is_set() and time.monotonic() < deadline:
            while present and self._listener.has_left(present[0]):
                del present[0]
            if not present:
                break
            if time.monotonic() > next_question:
                present = self._alive(present)
                next_question = time.monotonic() + ANSWER_SECONDS
            has_failed.wait(pause)
            pause = min(2 * pause, longest)

    def _alive(self, peers: Sequence[str]) -> list[str]:
        """The peers that answer, as each does until it has left."""
        asked = [(peer, self._listener.post(peer, {UNTIL: "you leave"})) for peer in peers]
        deadline = time.monotonic() + ANSWER_SECONDS
        return [peer for peer, key in asked if self._is_answered(key, peer, deadline)]

    def _is_answered(self, key: str, peer: str, deadline: float) -> bool:
        try:
            self._listener.await_answer(key, peer, deadline)
        except ConnectionRefusedError:
            return False
        return True


def _waiting_at(pending: int | None) -> tuple[int, int, int | None] | None:
    """Frame and instruction at which the script waits for other ranks, and the pending work; None if it does not.

    While devices have work pending, the script may wait for that work at any line, as in ``loss.item()``.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_globals.get("__name__") == threading.__name__:
        frame = frame.f_back  # a wait for another thread counts as its caller's
    if frame is None or (pending is None and not frame.f_globals.get("__name__", "").startswith(WAITING_IN)):
        return None
    return id(frame), frame.f_lasti, pending
