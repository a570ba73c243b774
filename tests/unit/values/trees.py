"""Trees of values, drawn and compared."""

import struct
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

DTYPES = [
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.bool),
]


def of_random_bytes(seed: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """A tensor of any dtype with any bits in it, NaNs too."""
    generator = torch.Generator().manual_seed(seed)
    numel = int(torch.Size(shape).numel())
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    tensor = of_random_bytes(draw(st.integers(0, 99)), draw(st.sampled_from(DTYPES)), shape)
    layout = draw(st.sampled_from(["contiguous", "transposed", "every other", "parameter"]))
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, 1)
    if layout == "every other" and tensor.dim():
        return tensor[::2]
    if layout == "parameter" and tensor.dtype.is_floating_point:
        return nn.Parameter(tensor)
    return tensor


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats()
    | st.sampled_from([-0.0, float("inf"), float("-inf"), float("nan"), 5e-324, 1e308])
    | st.text()
    | st.sampled_from(["tensor", "spec", "dtype", "tuple", "dict"])
    | st.sampled_from(DTYPES)
    | tensors()
)


keys = st.text() | st.integers() | st.sampled_from(["tensor", "spec", "dtype", "tuple", "dict", "1", 1])


trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


def bytes_of(tensor: Tensor) -> bytes:
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return bytes(fresh.view(-1).view(torch.uint8).tolist())


def assert_same(one: Any, other: Any) -> None:
    """Equal types all the way down, equal bits at the bottom; a `Parameter` may come back as a plain tensor."""
    if isinstance(one, Tensor):
        assert type(other) is Tensor
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert bytes_of(one) == bytes_of(other)
        return
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert [(type(key), key) for key in one] == [(type(key), key) for key in other]
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, float) and one == one:
        assert struct.pack("d", one) == struct.pack("d", other)
    elif isinstance(one, float):
        assert other != other
    else:
        assert one == other
