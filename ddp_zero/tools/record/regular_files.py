"""Opens regular files only, since checkpoints of unknown origin may be hostile, and writes files that are on disk."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; ValueError if it is not one, or cannot be opened."""
    try:
        # a link could lead out of the folder; a pipe or a device could block the open, or never end
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise ValueError(
            f"Expected a regular file that can be read, got {error.strerror}: {path}. [ZERO-619]"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"Expected a regular file, got a different kind of file: {path}. [ZERO-619]")
    return os.fdopen(descriptor, "rb")


@contextmanager
def written(path: Path, mode: str) -> Iterator[Any]:
    """Open a file for writing; after the block its contents are on disk, though perhaps not its name."""
    with path.open(mode, encoding=None if "b" in mode else "utf-8") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
