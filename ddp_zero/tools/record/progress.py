"""How far something long has come, on a terminal: a bar of ``tqdm`` if that is installed, and nothing in logs."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_DELAY = 1.0  # seconds: what is done sooner needs no bar

_current = threading.local()


@contextmanager
def showing(doing: str, total: int, wanted: bool = True) -> Iterator[None]:
    """Show within this context, in this thread, how many of the bytes `moved` has been told of.

    Nothing is shown if standard error is not a terminal, without ``tqdm``, within a context that shows something, and
    during the first second.

    Args:
        doing: what is done, such as ``saving step-20``.
        total: of bytes.
        wanted: False: show nothing, as on all ranks but one.
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


def moved(nbytes: int) -> None:
    """So many more bytes are done."""
    bar = getattr(_current, "bar", None)
    if bar is not None:
        bar.update(nbytes)


class Counted:
    """A file that is only written to, and each write to which counts.

    Args:
        file: opened for writing bytes.
    """

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        """As the file's, and `moved`."""
        written: int = self._file.write(data)
        moved(written)
        return written

    def flush(self) -> None:
        """As the file's."""
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
        desc=doing, total=total, unit="B", unit_scale=True, unit_divisor=1024, delay=_DELAY, leave=False, file=stream
    )
