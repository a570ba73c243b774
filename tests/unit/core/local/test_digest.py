import pytest
import torch
from torch import Tensor, nn

from ddp_zero.core.local.memory import CHUNK_NUMEL, LARGE_BYTES, LINES, SummedMemory, bit_sums, digest, sum_of_bits

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn]


def _value(dtype: torch.dtype) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mark_follows_values_and_their_places(dtype: torch.dtype) -> None:
    value = _value(dtype)
    mark = int(digest(value))
    assert int(digest(value.clone())) == mark
    assert int(digest(value.flip(0))) != mark
    assert int(digest(value.roll(1))) != mark
    assert int(digest(torch.zeros_like(value))) != int(digest(torch.ones(6, 4).to(dtype)))


def test_a_mark_sees_one_bit_and_exchanged_pairs() -> None:
    value = torch.zeros(3 * CHUNK_NUMEL // 2)
    marks = {int(digest(value))}
    for place in (0, 1, CHUNK_NUMEL - 1, CHUNK_NUMEL, len(value) - 1):
        other = value.clone()
        other[place] = 1e-45  # the last bit
        marks.add(int(digest(other)))
    assert len(marks) == 6
    pairs = torch.tensor([[1.0, 2.0, 2.0, 1.0], [2.0, 1.0, 1.0, 2.0]])
    assert int(digest(pairs[0])) != int(digest(pairs[1]))


def test_a_mark_does_not_depend_on_strides() -> None:
    value = _value(torch.float32)
    assert int(digest(value)) == int(digest(value.t().contiguous().t()))


@pytest.mark.parametrize("shape", [(), (0,), (1,)], ids=str)
def test_marks_of_small_tensors(shape: tuple[int, ...]) -> None:
    assert isinstance(int(digest(nn.Parameter(torch.ones(shape)).detach())), int)


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 16, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_a_sum_of_bits_depends_on_all_values_and_not_on_the_place(numel: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    value = torch.randn(numel, dtype=dtype)
    expected = int(sum_of_bits(value))
    for offset in range(5):
        window = torch.zeros(numel + 8, dtype=dtype)[offset : offset + numel].copy_(value)
        assert int(sum_of_bits(window)) == expected
    for place in range(numel):
        other = value.clone()
        other[place] += 1
        assert int(sum_of_bits(other)) != expected


@pytest.mark.parametrize("line", [None, *range(LINES)])
def test_a_line_of_16_shows_any_write_to_1088_neighbouring_bytes(line: int | None) -> None:
    torch.manual_seed(0)
    value = torch.randn(LARGE_BYTES // 4 + 1003)
    memory = SummedMemory(value)
    for start in [*range(0, 400, 7), value.numel() - 272]:
        before = int(bit_sums([memory], line)[0])
        value[start : start + 272] *= 1.5
        assert int(bit_sums([memory], line)[0]) != before, "the same memory, read again"


@pytest.mark.parametrize("line", [None, 0, LINES - 1])
def test_of_small_memory_every_bit_is_read(line: int | None) -> None:
    value = torch.zeros(LARGE_BYTES // 4 - 1)
    memory = SummedMemory(value)
    for place in (0, 5, 1000, value.numel() - 1):
        before = int(bit_sums([memory], line)[0])
        value[place] += 1
        assert int(bit_sums([memory], line)[0]) != before


@pytest.mark.parametrize("place", [slice(None, None, 2), slice(1, None)], ids=["with gaps", "at 4 bytes"])
def test_memory_that_has_to_be_copied_is_read_again(place: slice) -> None:
    value = torch.zeros(LARGE_BYTES // 4)
    memory = SummedMemory(value[place])
    before = int(bit_sums([memory])[0])
    value[3] += 1
    assert (int(bit_sums([memory])[0]) != before) == (place.step is None)
    value[4] += 1
    assert int(bit_sums([memory])[0]) != before
