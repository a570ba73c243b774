"""A rank's background thread for snapshots, and the rate of its warnings."""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from ddp_zero.snapshots.copies import lower_priority

_COMPLAINT_SECONDS = 60.0


class Courier:
    """A thread of low priority that does one job after the other; it keeps no process alive."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="ddp_zero snapshot", daemon=True).start()

    def submit(self, job: Callable[[], None]) -> None:
        """Do a job, which raises nothing, after those before it."""
        self._jobs.put(job)

    def wait(self) -> None:
        is_done = threading.Event()
        self._jobs.put(is_done.set)
        is_done.wait()

    def stop(self) -> None:
        """End the thread after the jobs so far."""
        self._jobs.put(None)

    def _run(self) -> None:
        lower_priority()
        while (job := self._jobs.get()) is not None:
            job()


class Complaints:
    """Decides which warnings are logged: at most one a minute of each kind, or a lasting cause would fill the log."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def is_due(self, kind: str) -> bool:
        now = time.monotonic()
        if now - self._last.get(kind, float("-inf")) < _COMPLAINT_SECONDS:
            return False
        self._last[kind] = now
        return True
