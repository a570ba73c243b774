"""Memory of tensors: digests of its bits, and memory that was freed but still counts as this process's."""

import ctypes
import mmap
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

from ddp_zero.values.shapes import is_dense

CHUNK_NUMEL = 1 << 20
"""Elements of a parameter that are hashed at a time."""


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """The sum of the elements' bits, each times a number that depends on its position."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[real.element_size()]
    for start, chunk in enumerate(real.reshape(-1).split(CHUNK_NUMEL)):
        place = torch.arange(len(chunk), device=tensor.device) + (start * CHUNK_NUMEL + 1)
        place.mul_(-7046029254386353131)
        place.bitwise_xor_(place >> 29).mul_(-4658895280553007687)
        place.bitwise_xor_(place >> 32).bitwise_or_(1)
        total += (chunk.view(bits) * place).sum()
    return total


LINES = 16
"""Of which `bit_sums` reads one, where it is asked to."""
LARGE_BYTES = 64 << 10
"""From so many on, memory is large."""
_LINE_WORDS = 8  # a cache line of 64 bytes


class SummedMemory:
    """Some memory, prepared for `bit_sums`, which read it as it is then."""

    def __init__(self, memory: Tensor) -> None:
        raw, nbytes = memory.detach(), memory.nbytes
        self._memory, self.is_copied = raw, not raw.is_contiguous()
        raw = (raw if raw.ndim == 1 and not self.is_copied else raw.contiguous().reshape(-1)).view(torch.uint8)
        if raw.storage_offset() % 8:
            raw, self.is_copied = raw.clone(), True  # no number of 8 bytes starts there
        whole = nbytes // 8 * 8
        self.words = (raw if whole == nbytes else raw[:whole]).view(torch.int64)
        self.rest = raw[whole:] if whole < nbytes else None
        self.is_large = nbytes >= LARGE_BYTES

    def now(self) -> "SummedMemory":
        """The same as it is now, where it was copied."""
        return SummedMemory(self._memory)

    def total(self, line: int | None) -> Tensor:
        """Its number of `bit_sums`."""
        words = self.words
        if line is None or not self.is_large:
            total = words.sum()
        else:
            whole = words.numel() // (LINES * _LINE_WORDS) * (LINES * _LINE_WORDS)
            total = words[:whole].view(-1, LINES, _LINE_WORDS)[:, line].sum()
            if whole < words.numel():
                total += words[whole:].sum()
        return total if self.rest is None else total + self.rest.sum()


def bit_sums(runs: Iterable[SummedMemory], line: int | None = None) -> list[Tensor]:
    """Numbers that differ if bits of some memory differ, except for permutations of 8 bytes at a time.

    One reading pass at the speed of memory; `digest` takes 40 times as long on a CPU. Where the memory starts has no
    effect. Of large memory, only cache line ``line`` of every `LINES` is read; None: all. A write to 1,088 neighbouring
    bytes shows in any. For each run, the sum of its numbers of 8 bytes, wrapping around: an int64 scalar on its device.
    """
    now = [one.now() if one.is_copied else one for one in runs]
    return [
        one.words.sum() if one.rest is None and (line is None or not one.is_large) else one.total(line) for one in now
    ]


def join_runs(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """1-D tensors over the memory of some, by the first key in each: those end to end in one storage are one run.

    A tensor with gaps is returned as it is. With gradients off.
    """
    grads = tensors.values()  # looked at at the speed of C, as all that is done per parameter
    are_dense = map(Tensor.is_contiguous, grads)
    gaps = {
        key
        for (key, one), is_dense_ in zip(tensors.items(), are_dense, strict=True)
        if not (is_dense_ or is_dense(one.shape, one.stride()))
    }
    storages = map(torch.UntypedStorage.data_ptr, map(Tensor.untyped_storage, grads))
    offsets = map(int, map(Tensor.storage_offset, grads))
    marks = zip(storages, [str(one.dtype) for one in grads], offsets, tensors, strict=True)
    places = [mark for mark in marks if mark[-1] not in gaps]
    runs, found = {key: tensors[key] for key in tensors if key in gaps}, dict[int, tuple[int, int]]()
    first, end, last = -1, 0, (0, "")
    for storage, dtype, start, key in sorted(places):
        if last != (storage, dtype) or start != end:
            first, begin = key, start
        last, end = (storage, dtype), start + tensors[key].numel()
        found[first] = begin, end
    for first, (begin, end) in found.items():
        runs[first] = tensors[first].as_strided((end - begin,), (1,), begin)
    return runs


def sum_of_bits(tensor: Tensor) -> Tensor:
    return bit_sums([SummedMemory(tensor)])[0]


def mark_of(tensor: Tensor) -> int:
    """`sum_of_bits` as a number that ranks compare; of zeros it is 0. Waits for an accelerator."""
    return int(sum_of_bits(tensor.detach()))


_WORTH_BYTES = 32 << 20
_DONTNEED: int | None = getattr(mmap, "MADV_DONTNEED", None)


def return_freed_memory(nbytes: int) -> None:
    """Give freed memory back to the system; does nothing where the C library is not glibc.

    glibc keeps freed blocks of up to 32 MiB for later requests. Stage 2 never requests again the memory that it frees
    once. If less than 32 MiB was just freed, ``nbytes``, the search is not worth its 0.1 s.
    """
    if nbytes >= _WORTH_BYTES and (trim := find_trim()):
        trim(0)


def return_pages(idle: Tensor) -> None:
    """Give the pages under a tensor's elements back to the system; whatever they held is lost.

    The tensor stays usable: a page comes back, with zeros, when it is first touched. Does nothing on an accelerator, or
    where the system has no ``madvise``. ``idle`` is 1-D contiguous, and nobody reads or writes it now. The pages at its
    ends may hold other things, and stay.
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
    with suppress(OSError, AttributeError, TypeError):  # TypeError: on Windows no library is the process itself
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
        return trim
    return None
