"""Memory of tensors: digests of its bits, and memory that was freed but still counts as this process's."""

import ctypes
import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

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
"""A partial reading by `BitSums` reads one cache line of so many."""
LARGE_BYTES = 64 << 10
"""The size from which memory counts as large."""
_KIND = attrgetter("shape", "dtype", "device")
_LINE_WORDS = 8  # a cache line of 64 bytes


class SummedMemory:
    """Views of a tensor's memory as words of 8 bytes, whose content `BitSums` add up later.

    Attributes:
        lines: large memory, as a view of shape [groups, `LINES`, words of a cache line]; None: the memory is small.
        always: views of the memory outside ``lines``: whole words, and the bytes after the last word.
    """

    def __init__(self, memory: Tensor) -> None:
        raw, nbytes = memory.detach(), memory.nbytes
        self._memory, self.is_copied = raw, not raw.is_contiguous()
        raw = (raw if raw.ndim == 1 and not self.is_copied else raw.contiguous().reshape(-1)).view(torch.uint8)
        if raw.storage_offset() % 8:
            raw, self.is_copied = raw.clone(), True  # no number of 8 bytes starts there
        whole = nbytes // 8 * 8
        words = (raw if whole == nbytes else raw[:whole]).view(torch.int64)
        self.lines: Tensor | None = None
        if nbytes >= LARGE_BYTES:
            by_line = words.numel() // (LINES * _LINE_WORDS) * (LINES * _LINE_WORDS)
            self.lines = words[:by_line].view(-1, LINES, _LINE_WORDS)
            words = words[by_line:]
        rest = raw[whole:]
        self.always = [part for part in (words, rest) if part.numel() or (part is words and self.lines is None)]

    def total(self, line: int | None) -> Tensor:
        """The sum over all words of 8 bytes and over the bytes after the last word; see `BitSums.now`."""
        if self.is_copied:
            current = SummedMemory(self._memory)
            current.is_copied = False
            return current.total(line)
        lines = () if self.lines is None else (self.lines if line is None else self.lines[:, line],)
        first, *others = map(Tensor.sum, (*self.always, *lines))
        return sum(others, first)


class BitSums:
    """Checksums of memory: sums of its words of 8 bytes, to be taken whenever `now` is called.

    Other bits give another sum, except where words have only changed places; the memory's address has no effect. Sums
    take one reading pass at the speed of memory; `digest` takes 40 times as long on a CPU.

    Args:
        keys: the caller's key for each sum: those of ``always``, then ``large``, then ``copied``.
        always: small memory, which every call of `now` reads whole.
        large: memory of which `now` may read a single cache line of `LINES`; shaped as `SummedMemory.lines`.
        copied: memory that must be copied to be read.
    """

    def __init__(
        self, keys: list[int], always: list[Tensor], large: list[Tensor], copied: Sequence[SummedMemory] = ()
    ) -> None:
        self.keys = keys
        self.always, self.large, self.copied = always, large, copied

    @classmethod
    def of(cls, runs: Sequence[tuple[int, SummedMemory]]) -> "BitSums":
        """Build the sums over runs of memory, each with a key; a run may have several sums, all with its key."""
        in_place = [(key, run) for key, run in runs if not run.is_copied]
        always = [(key, view) for key, run in in_place for view in run.always]
        large = [(key, run.lines) for key, run in in_place if run.lines is not None]
        copied = [(key, run) for key, run in runs if run.is_copied]
        keys = [key for key, _ in (*always, *large, *copied)]
        return cls(keys, [view for _, view in always], [lines for _, lines in large], [run for _, run in copied])

    def now(self, line: int | None = None) -> list[Tensor]:
        """Take the sums, in the order of ``keys``: int64 scalars, wrapping around, each on its memory's device.

        Of large memory, only cache line ``line`` of every `LINES` is read; None: all. A write to 1,088 neighbouring
        bytes changes the sum of any line.
        """
        large = self.large if line is None else map(Tensor.select, self.large, repeat(1), repeat(line))
        return [*map(Tensor.sum, chain(self.always, large)), *[run.total(line) for run in self.copied]]


def join_runs(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Join tensors that lie end to end in one storage into 1-D runs, each with the first key in it.

    A tensor with gaps is returned as it is. Called with gradients off.
    """
    grads = tensors.values()  # without a Python loop over the parameters
    are_dense = map(Tensor.is_contiguous, grads)
    gaps = {
        key
        for (key, tensor), is_dense_ in zip(tensors.items(), are_dense, strict=True)
        if not (is_dense_ or is_dense(tensor.shape, tensor.stride()))
    }
    storages = map(torch.UntypedStorage.data_ptr, map(Tensor.untyped_storage, grads))
    offsets = map(int, map(Tensor.storage_offset, grads))
    marked = zip(storages, [str(tensor.dtype) for tensor in grads], offsets, tensors, strict=True)
    places = [mark for mark in marked if mark[-1] not in gaps]
    runs = {key: tensors[key] for key in tensors if key in gaps}
    extents = dict[int, tuple[int, int]]()
    first = -1
    end = 0
    last_place = (0, "")
    for storage, dtype, start, key in sorted(places):
        if last_place != (storage, dtype) or start != end:
            first, begin = key, start
        last_place = (storage, dtype)
        end = start + tensors[key].numel()
        extents[first] = begin, end
    for first, (begin, end) in extents.items():
        runs[first] = tensors[first].as_strided((end - begin,), (1,), begin)
    return runs


_Window = tuple[tuple[int], int, torch.dtype]
"""A view of a tensor's storage: its shape and offset in elements of the tensor, and the dtype to read."""


def _window_of(memory: Tensor, tensor: Tensor) -> _Window:
    begin = memory.storage_offset() * memory.itemsize
    itemsize = tensor.itemsize
    return (memory.nbytes // itemsize,), begin // itemsize, memory.dtype


class MovingMemory:
    """Makes `BitSums` of tensors that are allocated anew in each step, such as gradients.

    Their addresses, shapes and strides mostly repeat. Then the views of memory are made by the
    same recipe, without looking for runs again. No memory is kept.
    """

    _places: tuple[list[Any], ...] = ()  # addresses, shapes and so on of the tensors for which the recipe was made
    _keys: list[int]  # of the sums; each is also the key of a tensor in whose storage the sum's memory is
    _windows: list[_Window]  # the memory that each sum reads
    _num_large: int  # how many of these, the last ones, are of large memory

    @torch.no_grad()
    def sums(self, tensors: Mapping[int, Tensor]) -> BitSums:
        """The sums over these tensors, each with the first key in its run; see `join_runs`."""
        memory = [*tensors.values()]
        storages = [*map(torch.UntypedStorage.data_ptr, map(Tensor.untyped_storage, memory))]
        offsets, strides = [*map(Tensor.storage_offset, memory)], [*map(Tensor.stride, memory)]
        places = [*tensors], storages, offsets, strides, [*map(_KIND, memory)]
        if places != self._places:
            runs = [(key, SummedMemory(run)) for key, run in join_runs(tensors).items()]
            sums = BitSums.of(runs)
            self._places = places if sums.keys and not sums.copied else ()
            self._keys = sums.keys
            self._num_large = len(sums.large)
            # not of copied memory, which comes last
            self._windows = [
                _window_of(view, tensors[key])
                for key, view in zip(sums.keys, (*sums.always, *sums.large), strict=False)
            ]
            return sums
        firsts = map(tensors.__getitem__, self._keys)
        sizes, begins, dtypes = zip(*self._windows, strict=True)
        flat = map(Tensor.as_strided, firsts, sizes, repeat((1,)), begins)
        views = [*map(Tensor.view, flat, dtypes)]
        num_small = len(views) - self._num_large
        large = [*map(Tensor.view, views[num_small:], repeat((-1, LINES, _LINE_WORDS)))]
        return BitSums(self._keys, views[:num_small], large)


def sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum over the bits of a tensor; see `BitSums`."""
    return SummedMemory(tensor).total(None)


def bit_sum_of(tensor: Tensor) -> int:
    """`sum_of_bits` as an integer that ranks compare; 0 for zeros. Waits for an accelerator."""
    return int(sum_of_bits(tensor.detach()))


_WORTH_RETURNING_BYTES = 32 << 20
_DONTNEED: int | None = getattr(mmap, "MADV_DONTNEED", None)


def return_freed_memory(nbytes: int) -> None:
    """Give freed memory back to the system; does nothing where the C library is not glibc.

    glibc keeps freed blocks of up to 32 MiB for later requests. Stage 2 never requests again the memory that it frees
    once. If less than 32 MiB was just freed, ``nbytes``, the search is not worth its 0.1 s.
    """
    if nbytes >= _WORTH_RETURNING_BYTES and (trim := find_trim()):
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
