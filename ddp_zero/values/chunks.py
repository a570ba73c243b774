"""Chunks of elements of a tensor, in plain ints: the part of a whole tensor that one rank holds."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from operator import add


@dataclass(frozen=True)
class Chunk:
    """An axis-aligned block of a tensor's elements."""

    offsets: tuple[int, ...]  # index of the first element, per dimension
    sizes: tuple[int, ...]  # number of elements, per dimension

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Chunk":
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def overlap(self, other: "Chunk") -> "Chunk | None":
        """The intersection of two chunks, or None if it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = [min(a.stop, b.stop) for a, b in zip(self.slices, other.slices, strict=True)]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Chunk(starts, sizes) if all(size > 0 for size in sizes) else None

    def is_within(self, shape: Sequence[int]) -> bool:
        if len(shape) != len(self.sizes):
            return False
        return all(0 <= along.start and along.stop <= size for along, size in zip(self.slices, shape, strict=True))

    def seen_from(self, origin: Sequence[int]) -> "Chunk":
        """The same elements with offsets relative to ``origin``."""
        return Chunk(tuple(start - first for start, first in zip(self.offsets, origin, strict=True)), self.sizes)

    def moved_by(self, offsets: Sequence[int]) -> "Chunk":
        return Chunk(tuple(map(add, self.offsets, offsets)), self.sizes)

    def describe(self) -> str:
        """The chunk as text, such as ``[0:4, 2:8]``."""
        return f"[{', '.join(f'{along.start}:{along.stop}' for along in self.slices)}]"

    @staticmethod
    def fault(shape: Sequence[int], chunks: "Sequence[Chunk]") -> str | None:
        """Describe why distinct chunks do not tile a tensor of this shape exactly once; None if they do."""
        whole = Chunk.whole(shape)
        for chunk in chunks:
            if not chunk.is_within(shape):
                return f"elements {chunk.describe()}, which it does not have"
        for chunk_a, chunk_b in combinations(chunks, 2):
            if chunk_a.overlap(chunk_b) is not None:
                return f"elements {chunk_a.describe()} and {chunk_b.describe()}, which overlap"
        numel = sum(chunk.numel for chunk in chunks)
        return None if numel == whole.numel else f"{numel} of {whole.numel} elements"

    @staticmethod
    def of_run(shape: Sequence[int], start: int, stop: int) -> "Iterator[Chunk]":
        """The chunks that elements ``start`` to ``stop`` of a contiguous tensor make up, in order.

        For elements 4 to 20 of shape (4, 6): [0:1, 4:6], [1:3, 0:6], [3:4, 0:2].
        """
        if (start, stop) == (0, math.prod(shape)):
            yield Chunk.whole(shape)
            return
        row = math.prod(shape[1:])
        first, last = -(-start // row), stop // row  # the rows that are in it whole
        bounds = [start, first * row, last * row, stop] if first <= last else [start, stop]
        for begin, end in pairwise(bounds):
            place = begin // row
            if begin < end and begin % row == end % row == 0:
                yield Chunk((place, *(0 for _ in shape[1:])), ((end - begin) // row, *shape[1:]))
            elif begin < end:
                for chunk in Chunk.of_run(shape[1:], begin - place * row, end - place * row):
                    yield Chunk((place, *chunk.offsets), (1, *chunk.sizes))
