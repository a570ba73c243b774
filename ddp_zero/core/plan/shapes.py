"""Shapes, strides and places in memory as plain ints."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True)
class Value:
    """Shape and dtype of a tensor; both are None for module state that is not a tensor."""

    shape: tuple[int, ...] | None
    dtype: str | None


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor's elements fill one run of memory, each place once, in any order of dimensions.

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


def padded_size(sizes: Sequence[int]) -> int | None:
    """The size of segments that are all made as large as the largest one; None if that adds more than an eighth."""
    largest = max(sizes)
    return largest if 8 * largest * len(sizes) <= 9 * sum(sizes) else None


def aligned_offsets(numels: Sequence[int], itemsize: int, alignment: int) -> list[int]:
    """Offsets of consecutive runs of elements in memory, each starting at a multiple of an alignment.

    Args:
        numels: lengths of the runs, in elements.
        itemsize: size of an element, in bytes.
        alignment: in bytes.

    Returns:
        One offset per run, in elements, and the end of the last run.
    """
    step = alignment // gcd(alignment, itemsize)
    offsets, end = [], 0
    for numel in numels:
        start = -(-end // step) * step if numel else end
        offsets.append(start)
        end = start + numel
    return [*offsets, end]
