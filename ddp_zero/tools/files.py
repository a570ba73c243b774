"""Files: regular, on disk, their values checked against annotations, and the progress of work on them, on a terminal.

Checkpoints of unknown origin may be hostile, so only regular files are opened. No torch, no communication.
"""

import os
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

COPY_AGAIN = "Copy the checkpoint again from where it was saved, or load the folder of an earlier step."
"""What to do where bytes of a file are not there, or have changed, in messages."""
LOAD_EARLIER = "Load the folder of an earlier step."
"""What to do where contents contradict each other that are as they were written."""
DELAY_SECONDS = 1.0  # seconds: shorter operations need no bar

_current = threading.local()


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; ValueError if it is none, or cannot be opened."""
    try:
        # a link could lead out of the folder; a pipe or a device could block the open, or never end
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError as error:
        raise ValueError(
            f"Expected a regular file that can be read, got {error.strerror}: {path}. {COPY_AGAIN} [ZERO-622]"
        ) from error
    except OSError as error:
        raise ValueError(
            f"Expected a regular file that can be read, got {error.strerror}: {path}. Make it readable for this user, "
            "and call this again. [ZERO-619]"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(
            f"Expected a regular file, got a different kind of file: {path}. Put a copy of the file in its place, and "
            "call this again. [ZERO-619]"
        )
    return os.fdopen(descriptor, "rb")


@contextmanager
def written(path: Path, mode: str) -> Iterator[Any]:
    """Open a file for writing; after the block its contents are on disk, though perhaps not its name."""
    try:
        with path.open(mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # a full disk's names no file
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def by_rank(name: str, remedy: str) -> Iterator[None]:
    """Errors of the file system name the rank, and end with a remedy and its code."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        place = "" if error.filename is None else f": {error.filename}"
        raise OSError(error.errno, f"{error.strerror}{place} ({name}). {remedy}") from error


def check_types(one: Any) -> None:
    """Check the fields of a dataclass by their annotations; TypeError naming one of a different type."""
    for name, hint in get_type_hints(type(one)).items():
        if not is_of(getattr(one, name), hint):
            raise TypeError(f"damaged {name}: expected {hint}")


def is_of(value: Any, hint: Any) -> bool:
    """True if a value has the type that an annotation states, and so do the values in it."""
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin in (Union, UnionType):
        return any(is_of(value, one) for one in inner)
    if origin is dict:
        return isinstance(value, dict) and _are_of(value, inner[0]) and _are_of(value.values(), inner[1])
    if origin is list:
        return type(value) is list and _are_of(value, inner[0])
    if origin is tuple and type(value) is tuple:
        kinds = inner[:1] * len(value) if Ellipsis in inner else inner
        return len(value) == len(kinds) and all(map(is_of, value, kinds))
    return hint is Any or type(value) is (NoneType if hint is None else hint)


def _are_of(values: Iterable[Any], hint: Any) -> bool:
    return hint is Any or all(is_of(value, hint) for value in values)


# Progress: a bar of ``tqdm`` if installed, and no output in logs


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
