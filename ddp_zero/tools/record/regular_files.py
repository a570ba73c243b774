"""Opens regular files only; checkpoints of unknown origin may be hostile."""

import os
import stat
from io import BufferedReader
from pathlib import Path


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
