"""Shapes and strides as plain ints."""

from collections.abc import Sequence


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor's elements fill one run of memory, each place once, in whatever order of dimensions.

    Contiguous, transposed and channels-last tensors do; expanded ones and slices with gaps do not.
    """
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True
