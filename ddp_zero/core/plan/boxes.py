"""Boxes of a tensor's elements, in plain ints: which part of a whole tensor a rank holds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import add


@dataclass(frozen=True)
class Box:
    """A run of elements in every dimension of a tensor.

    Attributes:
        offsets: the first element, by dimension.
        sizes: how many, by dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

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
        """To index the tensor with."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def overlap(self, other: "Box") -> "Box | None":
        """The elements of both; None if there are none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = [min(a.stop, b.stop) for a, b in zip(self.slices, other.slices, strict=True)]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def is_within(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape has all of these elements."""
        if len(shape) != len(self.sizes):
            return False
        return all(one.stop <= size for one, size in zip(self.slices, shape, strict=True))

    def seen_from(self, origin: Sequence[int]) -> "Box":
        """The same elements, with offsets counted from an element."""
        return Box(tuple(start - first for start, first in zip(self.offsets, origin, strict=True)), self.sizes)

    def moved_by(self, offsets: Sequence[int]) -> "Box":
        """Elements of the same sizes, further on by these offsets."""
        return Box(tuple(map(add, self.offsets, offsets)), self.sizes)

    def describe(self) -> str:
        """For messages, as in ``[0:4, 2:8]``."""
        return f"[{', '.join(f'{one.start}:{one.stop}' for one in self.slices)}]"


def fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why boxes do not make up a tensor, each element once; None if they do.

    Args:
        shape: of the tensor.
        boxes: different ones, in any order.
    """
    every = Box.whole(shape)
    for box in boxes:
        if not box.is_within(shape):
            return f"elements {box.describe()}, which it does not have"
    for one, other in combinations(boxes, 2):
        if one.overlap(other) is not None:
            return f"elements {one.describe()} and {other.describe()}, which overlap"
    found = sum(box.numel for box in boxes)
    return None if found == every.numel else f"{found} of {every.numel} elements"
