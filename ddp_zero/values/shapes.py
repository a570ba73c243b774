"""Shapes, strides, offsets and parts as plain ints."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

Part = slice | None
"""The elements of a parameter that are stepped together, from start to stop in its memory and 1-D; None: all of them,
in the parameter's shape."""


@dataclass(frozen=True)
class Value:
    """Shape and dtype of a tensor; both None for module state that is not a tensor."""

    shape: tuple[int, ...] | None
    dtype: str | None


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """True if a tensor's elements fill one run of memory, each place once, in any order of dimensions.

    True for contiguous, transposed and channels-last tensors; False for expanded ones and slices with gaps.
    """
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def shape_of(shape: Sequence[int], part: Part) -> tuple[int, ...]:
    """The shape of a part of a tensor."""
    return tuple(shape) if part is None else (part.stop - part.start,)


def layout_of(
    shape: Sequence[int], stride: Sequence[int], part: Part = None
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """First element, shape and strides of a part of a tensor that is copied; a tensor with gaps becomes contiguous."""
    if part is not None:
        return part.start, shape_of(shape, part), (1,)
    if not is_dense(shape, stride):
        stride = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return 0, tuple(shape), tuple(stride)


def padded_size(sizes: Sequence[int]) -> int | None:
    """The size of segments padded to the largest one; None if padding adds more than an eighth."""
    largest = max(sizes)
    return largest if 8 * largest * len(sizes) <= 9 * sum(sizes) else None


def aligned_offsets(numels: Sequence[int], itemsize: int, alignment: int) -> list[int]:
    """Offsets of consecutive runs in elements, each at a multiple of ``alignment`` bytes, and the end of the last."""
    step = alignment // gcd(alignment, itemsize)
    offsets, end = [], 0
    for numel in numels:
        start = -(-end // step) * step if numel else end
        offsets.append(start)
        end = start + numel
    return [*offsets, end]
