"""Tensors in a memory-mapped file, which the system may write back and evict at any time.

The file has no name: no other program can truncate it, and it is gone when the process is.
"""

import ctypes
import os
import shutil
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

_PAGE = os.sysconf("SC_PAGE_SIZE")
_ALIGNMENT = 64  # bytes
EXTENT_BYTES = 1 << 20
"""Tensors of at least this size are mapped separately, smaller ones together."""

_READ_WRITE, _SHARED, _DROP = 3, 1, 4  # PROT_READ | PROT_WRITE, MAP_SHARED, MADV_DONTNEED: the same on all of Linux


class MappedFile:
    """A file in a folder for tensors, and its mapped parts; RuntimeError if no file can be created there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._system = _system_calls()
        try:
            self._file: BinaryIO = tempfile.TemporaryFile(dir=folder, prefix="ddp_zero-", buffering=0)
        except OSError as error:
            raise RuntimeError(
                f"Cannot create a file for offload in {str(folder)!r}: {error.strerror}. Give every rank a folder on a "
                "disk that it can write to. [ZERO-914]"
            ) from error
        weakref.finalize(self, self._file.close)
        self._size = 0  # of the file: all of it is allocated
        self._free: list[tuple[int, int]] = []  # offset and size of ranges that are not mapped
        self._extents: dict[int, int] = {}  # address to size
        self._addresses: list[int] = []
        self._small: tuple[ctypes.Array[ctypes.c_char] | None, int] = (None, 0)  # the open one, and how full it is

    def room(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A new tensor in the file, of this shape and, if dense, these strides; RuntimeError if the disk is full."""
        nbytes = like.numel() * dtype.itemsize
        if nbytes == 0:
            return torch.empty_like(like, dtype=dtype, device="cpu")
        if nbytes >= EXTENT_BYTES:
            extent, start = self._mapped(_rounded(nbytes, _PAGE)), 0
        else:
            extent, start = self._small_room(nbytes)
        flat = torch.frombuffer(extent, dtype=dtype, count=like.numel(), offset=start)
        strides = torch.empty_like(like, device="meta").stride()
        return flat.as_strided(like.shape, strides)

    def reserve(self, nbytes: Sequence[int]) -> None:
        """Allocate blocks for further tensors of these sizes; all or none; RuntimeError if the disk is full."""
        missing = mapped_bytes(nbytes) - sum(size for _, size in self._free)
        if missing > 0:
            self._grow(missing)

    def has(self, tensor: Tensor) -> bool:
        """True if a tensor's memory is in the file."""
        address = tensor.untyped_storage().data_ptr()
        place = bisect_right(self._addresses, address) - 1
        return place >= 0 and address < self._addresses[place] + self._extents[self._addresses[place]]

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Evict tensors from memory. Their values remain in the file, or in the page cache."""
        pages = sorted(
            (one.data_ptr() // _PAGE * _PAGE, _rounded(one.data_ptr() + one.nbytes, _PAGE))
            for one in tensors
            if one.nbytes and self.has(one)
        )
        merged: list[tuple[int, int]] = []
        for start, stop in pages:
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        for start, stop in merged:
            # whole pages, neighbours included: a shared mapping loses no data by it, it is read again from the file
            self._system.madvise(start, stop - start, _DROP)

    def check(self) -> None:
        """Raise RuntimeError if the file is smaller than it was, or cannot be reached."""
        try:
            # a write past the end of the file would be a SIGBUS, which nothing can catch
            size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise RuntimeError(f"{self._lost} {error.strerror}. [ZERO-914]") from error
        if size < self._size:
            raise RuntimeError(f"{self._lost} {size:,} bytes of {self._size:,}. [ZERO-914]")

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return self._size

    @property
    def _lost(self) -> str:
        return (
            f"Expected the optimizer state in a file in {str(self.folder)!r} to be there, before anything is stepped, "
            "got"
        )

    def _small_room(self, nbytes: int) -> tuple["ctypes.Array[ctypes.c_char]", int]:
        extent, start = self._small
        if extent is None or start + nbytes > EXTENT_BYTES:
            extent, start = self._mapped(EXTENT_BYTES), 0
        self._small = (extent, _rounded(start + nbytes, _ALIGNMENT))
        return extent, start

    def _mapped(self, size: int) -> "ctypes.Array[ctypes.c_char]":
        """Part of the file as memory; unmapped when no tensor refers to it."""
        offset = self._take(size)
        address = self._system.mmap(None, size, _READ_WRITE, _SHARED, self._file.fileno(), offset)
        if address in (None, ctypes.c_void_p(-1).value):
            self._free.append((offset, size))
            reason = os.strerror(ctypes.get_errno())
            raise RuntimeError(
                f"Expected to map {size:,} bytes of a file in {str(self.folder)!r}, got {reason}. [ZERO-914]"
            )
        extent = (ctypes.c_char * size).from_address(address)
        self._extents[address] = size
        self._addresses = sorted(self._extents)
        # tensors keep the extent alive, not the file: they may outlive it, and the range is unmapped after the last of
        # them. Not at exit: a tensor may be used until the process ends
        weakref.finalize(extent, _unmap, weakref.ref(self), self._system, address, size, offset).atexit = False
        return extent

    def _take(self, size: int) -> int:
        for place, (offset, free) in enumerate(self._free):
            if free >= size:
                rest = [(offset + size, free - size)] if free > size else []
                self._free[place : place + 1] = rest
                return offset
        self._grow(size)
        return self._take(size)

    def _grow(self, nbytes: int) -> None:
        try:
            # allocated before it is mapped: a full disk is an error here, not a signal on a later write
            os.posix_fallocate(self._file.fileno(), self._size, nbytes)
        except OSError as error:
            os.ftruncate(self._file.fileno(), self._size)  # some file systems keep what they could allocate
            raise RuntimeError(
                f"No room for {nbytes:,} more bytes of optimizer state in {str(self.folder)!r}, which holds "
                f"{self._size:,}: {error.strerror} ({shutil.disk_usage(self.folder).free:,} bytes free). Nothing was "
                "lost. Give offload= a folder on a larger disk, or use more ranks. [ZERO-914]"
            ) from error
        if self._free and sum(self._free[-1]) == self._size:
            offset, size = self._free.pop()
            self._free.append((offset, size + nbytes))
        else:
            self._free.append((self._size, nbytes))
        self._size += nbytes

    def _unmapped(self, address: int, size: int, offset: int) -> None:
        del self._extents[address]
        self._addresses = sorted(self._extents)
        self._free.append((offset, size))


def mapped_bytes(nbytes: Iterable[int]) -> int:
    """Bytes of a file with tensors of these sizes, added in this order."""
    total, left = 0, 0
    for size in nbytes:
        if size >= EXTENT_BYTES:
            total += _rounded(size, _PAGE)
        elif size:
            if size > left:
                total, left = total + EXTENT_BYTES, EXTENT_BYTES
            left -= min(left, _rounded(size, _ALIGNMENT))
    return total


def _rounded(nbytes: int, unit: int) -> int:
    return nbytes + -nbytes % unit


def _unmap(owner: "weakref.ref[MappedFile]", system: ctypes.CDLL, address: int, size: int, offset: int) -> None:
    system.munmap(address, size)
    alive = owner()
    if alive is not None:
        alive._unmapped(address, size, offset)


def _system_calls() -> ctypes.CDLL:
    """``mmap``, ``munmap`` and ``madvise`` of the C library."""
    if not hasattr(os, "posix_fallocate"):
        raise RuntimeError("Offload to a disk needs Linux: this system has no posix_fallocate. Use 'cpu'. [ZERO-107]")
    # not Python's `mmap`, which keeps a file descriptor open per mapping
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    system.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    system.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return system
