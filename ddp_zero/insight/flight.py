"""The flight record: this rank's last events, in a file when a step fails or nears its time-out, or an error ends all.

Recording costs no more than the ring; writing needs a folder, from `record_to` or the environment variable
``DDP_ZERO_RECORD_DIR``. ``ddp-zero postmortem`` merges the files of all ranks.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, ClassVar

from ddp_zero.core.comm import RECENT_SPANS, on_failure
from ddp_zero.insight.record_format import FIELDS, UNCAUGHT, VERSION

VARIABLE = "DDP_ZERO_RECORD_DIR"
_NEARS = 0.75
"""Fraction of a time-out after which a record is written."""
_STACK_LINES = 40


class _Job:
    folder: Path | None = Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None
    rank = 0
    members: ClassVar[set[int]] = set()
    time_out = 0.0
    collectives: ClassVar[Callable[[], list[list[Any]] | None]] = lambda: None
    started = time.time()
    watch: threading.Thread | None = None
    process = 0
    written_at = -1  # as `time.perf_counter_ns`
    warned: Path | None = None
    """Record of a wait that may still end well."""
    last_error = ""


_one_writes = threading.Lock()


def record_to(folder: str | os.PathLike[str] | None) -> None:
    """Write flight records to a folder from now on.

    A record is written when a step raises, as when a peer has died, when an exception ends the process, and when three
    quarters of the process group's time-out have passed in one wait, or without any event. The environment variable
    ``DDP_ZERO_RECORD_DIR`` does the same without a change of the program.

    Args:
        folder: the folder, which all ranks may share; None for no records.
    """
    _Job.folder = None if folder is None else Path(folder)
    _start_watch()


def identify(
    rank: int,
    members: Iterable[int],
    time_out: float,
    collectives: Callable[[], list[list[Any]] | None] = lambda: None,
) -> None:
    """Set this process's global rank, its peers, and the time-out of messages in seconds.

    ``collectives`` returns rows with the fields of `ddp_zero.tools.postmortem.records.Collective`, or None if nothing
    records them.
    """
    _Job.rank = rank
    _Job.members.update(members)
    _Job.time_out = time_out
    _Job.collectives = collectives
    _start_watch()


def write(reason: str, error: str = "") -> Path | None:
    """Write this rank's record, replacing an earlier one; None without a folder, or if it cannot be written."""
    folder = _Job.folder
    if folder is None:
        return None
    # the watch and the training thread may both write; the rename below keeps a reader from half a record
    with contextlib.suppress(OSError), _one_writes:  # a full disk must not hide the error
        folder.mkdir(parents=True, exist_ok=True)
        now = time.perf_counter_ns()
        path = folder / f"attempt-{_attempt()}-rank-{_Job.rank:05}.json"
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_text(json.dumps(_record(reason, error)))
        unfinished.replace(path)
        _Job.written_at = now
        _Job.warned, _Job.last_error = (None, error) if error else (path, "")
        return path
    return None


def _record(reason: str, error: str) -> dict[str, Any]:
    now = time.time()
    origin = now - time.perf_counter_ns() * 1e-9
    return {
        "version": VERSION,
        "rank": _Job.rank,
        "members": sorted(_Job.members | {_Job.rank}),
        "attempt": _attempt(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "started": _Job.started,
        "written": now,
        "time_out": _Job.time_out,
        "reason": reason,
        "error": error,
        "stacks": _stacks(),
        "fields": list(FIELDS),
        # other threads go on recording: a row may be torn, never the list of spans
        "events": [event.as_row(number, origin) for number, event in enumerate(RECENT_SPANS.events())],
        "collectives": _collectives(),
    }


def _collectives() -> list[list[Any]] | None:
    try:
        return _Job.collectives()
    except Exception:  # torch's own recorder has no stable interface, and must not hide the error
        return None


def _stacks() -> dict[str, list[str]]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # it would refer to itself, and so live on with all that it refers to
    stacks = {names.get(ident, str(ident)): traceback.format_stack(frame) for ident, frame in frames.items()}
    if threading.current_thread() is threading.main_thread():
        stacks["MainThread"] = traceback.format_stack()
    return {name: [line.rstrip() for line in stack[-_STACK_LINES:]] for name, stack in stacks.items()}


def _attempt() -> int:
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdigit() else 0


# The end of a process, and time-outs


def _start_watch() -> None:
    """Start the watch thread, once per process, if there are a folder and a time-out."""
    # checked by process id: a fork inherits the flag but not the thread
    if _Job.folder is None or _Job.time_out <= 0 or (_Job.watch is not None and _Job.process == os.getpid()):
        return
    _write_when_uncaught()
    _Job.process = os.getpid()
    _Job.watch = threading.Thread(target=_watch, name="ddp_zero flight record", daemon=True)
    _Job.watch.start()


def _write_when_uncaught() -> None:
    """Write a record if an exception ends the process: DDP's own reductions raise outside this library's events."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        note_end(error)
        previous(kind, error, trace)

    if _Job.watch is None:  # a forked process has it from its parent
        sys.excepthook = hook
    # a `multiprocessing` process never calls its hook; its finalizers run while the exception is handled
    Finalize(None, lambda: note_end(sys.exc_info()[1]), exitpriority=100)


def note_end(error: BaseException | None) -> None:
    """Write a record if an error ends the process, unless one was written for that error."""
    if isinstance(error, SystemExit):  # as the workers of `torch.multiprocessing` turn an exception into an exit code
        error = error.__context__
    if isinstance(error, Exception) and (text := f"{type(error).__name__}: {error}") != _Job.last_error:
        write(UNCAUGHT, text)


def _watch() -> None:
    while True:
        # a daemon that polls: the training thread may be blocked in a collective, and cannot write its own record
        time.sleep(min(max(_Job.time_out / 40, 0.05), 15.0))
        if _Job.written_at >= 0 and all(event.begun <= _Job.written_at for event in RECENT_SPANS.events()):
            continue  # a record of an error stays
        if _Job.warned is not None:
            withdraw(_Job.warned)
        reason = overdue(time.perf_counter_ns(), _Job.time_out)
        if reason is not None:
            write(reason)


def withdraw(path: Path) -> None:
    """Remove the record of a wait that has ended well, which would pass for this rank's end."""
    with contextlib.suppress(OSError), _one_writes:
        if _Job.warned == path:
            _Job.warned = None
            path.unlink(missing_ok=True)


def overdue(now: int, time_out: float) -> str | None:
    """The reason for a record at ``now``, as `time.perf_counter_ns`; None if no time-out nears."""
    newest = RECENT_SPANS.newest_time()
    if not newest or (now - newest) * 1e-9 < _NEARS * time_out:
        return None
    return f"no event for {(now - newest) * 1e-9:.1f} s of a time-out of {time_out:.1f} s"


on_failure(write)
