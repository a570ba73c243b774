"""Progress of long operations on a terminal: a bar of ``tqdm`` if installed, and no output in logs."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DELAY_SECONDS = 1.0  # seconds: shorter operations need no bar

_current = threading.local()


@contextmanager
def showing(doing: str, total: int, wanted: bool = True) -> Iterator[None]:
    """Show the progress reported to `advance`, within this context and thread, out of ``total`` bytes.

    Nothing is shown unless wanted, if standard error is not a terminal, without ``tqdm``, within an outer context with
    a bar, and during the first second.
    """
    bar = _bar(doing, total) if wanted and getattr(_current, "bar", None) is None else None
    if bar is None:
        yield
        return
    _current.bar = bar
    try:
        yield
    finally:
        _current.bar = None
        bar.close()


def advance(nbytes: int) -> None:
    """Report further bytes as done."""
    bar = getattr(_current, "bar", None)
    if bar is not None:
        bar.update(nbytes)


class Counted:
    """A write-only file whose writes are reported to `advance`."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        """Write, and report to `advance`."""
        written: int = self._file.write(data)
        advance(written)
        return written

    def flush(self) -> None:
        self._file.flush()


def _bar(doing: str, total: int) -> Any:
    stream = sys.stderr
    if stream is None or not stream.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(
        desc=doing,
        total=total,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        delay=DELAY_SECONDS,
        leave=False,
        file=stream,
    )
