import pytest
import torch
from torch import Tensor, nn

from ddp_zero.forwarding import _CHUNK, _mark

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn]


def _value(dtype: torch.dtype) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mark_follows_values_and_their_places(dtype: torch.dtype) -> None:
    value = _value(dtype)
    mark = int(_mark(value))
    assert int(_mark(value.clone())) == mark
    assert int(_mark(value.flip(0))) != mark
    assert int(_mark(value.roll(1))) != mark
    assert int(_mark(torch.zeros_like(value))) != int(_mark(torch.ones(6, 4).to(dtype)))


def test_a_mark_sees_one_bit_and_exchanged_pairs() -> None:
    value = torch.zeros(3 * _CHUNK // 2)
    marks = {int(_mark(value))}
    for place in (0, 1, _CHUNK - 1, _CHUNK, len(value) - 1):
        other = value.clone()
        other[place] = 1e-45  # the last bit
        marks.add(int(_mark(other)))
    assert len(marks) == 6
    pairs = torch.tensor([[1.0, 2.0, 2.0, 1.0], [2.0, 1.0, 1.0, 2.0]])
    assert int(_mark(pairs[0])) != int(_mark(pairs[1]))


def test_a_mark_does_not_depend_on_strides() -> None:
    value = _value(torch.float32)
    assert int(_mark(value)) == int(_mark(value.t().contiguous().t()))


@pytest.mark.parametrize("shape", [(), (0,), (1,)], ids=str)
def test_marks_of_small_tensors(shape: tuple[int, ...]) -> None:
    assert isinstance(int(_mark(nn.Parameter(torch.ones(shape)).detach())), int)
