"""The C library's heap: memory that was freed but still counts as this process's."""

import ctypes
import mmap
from collections.abc import Callable
from contextlib import suppress
from functools import cache

from torch import Tensor

_WORTH_BYTES = 32 << 20
_DONTNEED: int | None = getattr(mmap, "MADV_DONTNEED", None)


class FreedMemory:
    """Counts memory that is freed little by little, and returns it whenever that is worth the search."""

    def __init__(self) -> None:
        self._nbytes = 0

    def add(self, nbytes: int) -> None:
        """Note that so much was freed."""
        self._nbytes += nbytes
        if self._nbytes >= _WORTH_BYTES:
            return_freed_memory(self._nbytes)
            self._nbytes = 0


def return_freed_memory(nbytes: int) -> None:
    """Give freed memory back to the system; does nothing where the C library is not glibc.

    glibc keeps freed blocks of up to 32 MiB for later requests. What stage 2 frees once is never requested again.

    Args:
        nbytes: how much was just freed. Less than 32 MiB is not worth the search, which takes up to 0.1 s.
    """
    if nbytes >= _WORTH_BYTES and (trim := find_trim()):
        trim(0)


def return_pages(idle: Tensor) -> None:
    """Give the pages under a tensor's elements back to the system; whatever they held is lost.

    The tensor stays usable: a page comes back, with zeros, when it is first touched. Does nothing on an accelerator, or
    where the system has no ``madvise``.

    Args:
        idle: 1-D contiguous, which nobody reads or writes now. The pages at its ends may hold other things, and stay.
    """
    if idle.device.type != "cpu" or _DONTNEED is None or (advise := _find_madvise()) is None:
        return
    first = idle.data_ptr() + -idle.data_ptr() % mmap.PAGESIZE
    nbytes = (idle.data_ptr() + idle.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if nbytes > 0:
        advise(first, nbytes, _DONTNEED)


@cache
def _find_madvise() -> Callable[[int, int, int], object] | None:
    with suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        advise: Callable[[int, int, int], object] = library.madvise
        return advise
    return None


def find_trim() -> Callable[[int], object] | None:
    """The function of glibc that gives freed memory back, or None if the C library has none."""
    with suppress(OSError, AttributeError, TypeError):  # TypeError: on Windows no library is the process itself
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
        return trim
    return None
