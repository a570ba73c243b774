from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddp_zero.values.shapes import aligned_offsets, is_dense


def fills_one_run(shape: list[int], stride: list[int]) -> bool:
    """By walking every element: the addresses are 0, 1, 2, ... in some order, each once."""
    elements = product(*map(range, shape))
    addresses = sorted(sum(i * step for i, step in zip(element, stride, strict=True)) for element in elements)
    return addresses == list(range(len(addresses)))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Shapes with dense strides in any order of dimensions, half of them with one stride changed."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    stride, expected = [0] * len(shape), 1
    for dim in draw(st.permutations(range(len(shape)))):
        stride[dim] = expected
        expected *= max(1, shape[dim])
    changed: bool = draw(st.booleans())
    if shape and changed:
        stride[draw(st.integers(0, len(shape) - 1))] = draw(st.integers(0, 20))
    return shape, stride


@given(layouts())
def test_a_layout_is_dense_if_its_elements_fill_one_run(layout: tuple[list[int], list[int]]) -> None:
    assert is_dense(*layout) is fills_one_run(*layout)


base = torch.arange(120.0)

TENSORS: dict[str, tuple[Tensor, bool]] = {
    "contiguous": (base.view(4, 5, 6), True),
    "transposed": (base.view(10, 12).t(), True),
    "permuted": (base.view(4, 5, 6).permute(2, 0, 1), True),
    "channels last": (base.view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), True),
    "channels last with one channel": (base.view(2, 1, 12, 5).contiguous(memory_format=torch.channels_last), True),
    "a run in the middle": (base.view(10, 12)[2:5], True),
    "one row of a column": (base.view(10, 12)[3:4, ::6][:, :1], True),
    "scalar": (base[7], True),
    "one element, expanded over nothing": (base[:1].expand(1, 1), True),
    "expanded": (base[:3].expand(2, 3), False),
    "one element, expanded": (base[:1].expand(4), False),
    "every other element": (base[::2], False),
    "columns": (base.view(10, 12)[:, :5], False),
    "every other row": (base.view(10, 12)[::2], False),
    "overlapping windows": (base.unfold(0, 3, 1), False),
    "windows side by side": (base.unfold(0, 3, 3), True),
    "no elements": (base[:0], True),
    "no elements in one dimension": (torch.empty(3, 0, 2), True),
    "no elements, sliced with gaps": (torch.empty(0, 4)[:, ::2], True),
    "no elements, expanded": (torch.empty(1, 0).expand(3, 0), True),
}


@pytest.mark.parametrize(("tensor", "dense"), TENSORS.values(), ids=TENSORS.keys())
def test_layouts_that_torch_makes_are_told_dense_or_not(tensor: Tensor, dense: bool) -> None:
    assert is_dense(tensor.shape, tensor.stride()) is dense


def test_shape_and_strides_must_fit_together() -> None:
    with pytest.raises(ValueError, match="zip"):
        is_dense([2, 3], [1])


@given(st.lists(st.integers(0, 100), max_size=8), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([16, 64]))
def test_aligned_runs_follow_each_other_each_at_a_multiple_of_the_alignment(
    numels: list[int], itemsize: int, alignment: int
) -> None:
    *offsets, end = aligned_offsets(numels, itemsize, alignment)
    last = 0
    for offset, numel in zip(offsets, numels, strict=True):
        assert numel == 0 or offset * itemsize % alignment == 0
        assert 0 <= (offset - last) * itemsize < alignment
        last = offset + numel
    assert end == last
