"""Boxes of elements of a tensor, in plain ints: the part of a whole tensor that one rank holds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import add


@dataclass(frozen=True)
class Box:
    """An axis-aligned block of a tensor's elements."""

    offsets: tuple[int, ...]  # index of the first element, per dimension
    sizes: tuple[int, ...]  # number of elements, per dimension

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """All elements of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """An index that selects these elements of the tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def overlap(self, other: "Box") -> "Box | None":
        """The intersection of two boxes, or None if it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = [min(a.stop, b.stop) for a, b in zip(self.slices, other.slices, strict=True)]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def is_within(self, shape: Sequence[int]) -> bool:
        """True if a tensor of this shape has all of these elements."""
        if len(shape) != len(self.sizes):
            return False
        return all(one.stop <= size for one, size in zip(self.slices, shape, strict=True))

    def seen_from(self, origin: Sequence[int]) -> "Box":
        """The same elements with offsets relative to ``origin``."""
        return Box(tuple(start - first for start, first in zip(self.offsets, origin, strict=True)), self.sizes)

    def moved_by(self, offsets: Sequence[int]) -> "Box":
        """A box of the same sizes, shifted by these offsets."""
        return Box(tuple(map(add, self.offsets, offsets)), self.sizes)

    def describe(self) -> str:
        """The box as text, such as ``[0:4, 2:8]``."""
        return f"[{', '.join(f'{one.start}:{one.stop}' for one in self.slices)}]"


def fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Describe why distinct boxes do not tile a tensor of this shape exactly once; None if they do."""
    every = Box.whole(shape)
    for box in boxes:
        if not box.is_within(shape):
            return f"elements {box.describe()}, which it does not have"
    for one, other in combinations(boxes, 2):
        if one.overlap(other) is not None:
            return f"elements {one.describe()} and {other.describe()}, which overlap"
    found = sum(box.numel for box in boxes)
    return None if found == every.numel else f"{found} of {every.numel} elements"
