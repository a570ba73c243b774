import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ddp_zero.core.local.memory import (
    CHUNK_NUMEL,
    LARGE_BYTES,
    LINES,
    BitSums,
    MovingMemory,
    SummedMemory,
    digest,
    join_runs,
    sum_of_bits,
)

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


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 16, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_sum_of_bits_changes_with_every_value_and_not_with_the_offset(numel: int, dtype: torch.dtype) -> None:
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
    memory = BitSums.of([(0, SummedMemory(value))])
    for start in [*range(0, 400, 7), value.numel() - 272]:
        before = [*map(int, memory.now(line))]
        value[start : start + 272] *= 1.5
        assert [*map(int, memory.now(line))] != before, "the same memory, read again"


@pytest.mark.parametrize("line", [None, 0, LINES - 1])
def test_of_small_memory_every_bit_is_read(line: int | None) -> None:
    value = torch.zeros(LARGE_BYTES // 4 - 1)
    memory = BitSums.of([(0, SummedMemory(value))])
    for place in (0, 5, 1000, value.numel() - 1):
        before = [*map(int, memory.now(line))]
        value[place] += 1
        assert [*map(int, memory.now(line))] != before


@pytest.mark.parametrize("place", [slice(None, None, 2), slice(1, None)], ids=["with gaps", "at 4 bytes"])
def test_memory_that_has_to_be_copied_is_read_again(place: slice) -> None:
    value = torch.zeros(LARGE_BYTES // 4)
    memory = BitSums.of([(0, SummedMemory(value[place]))])
    before = [*map(int, memory.now())]
    value[3] += 1
    assert ([*map(int, memory.now())] != before) == (place.step is None)
    value[4] += 1
    assert [*map(int, memory.now())] != before


def _gradients(flat: Tensor, offsets: list[int]) -> dict[int, Tensor]:
    """Views of a bucket as DDP has them: a matrix in another order in memory, vectors of odd sizes, a large one."""
    first, second, third, fourth = offsets
    return {
        2: flat[first : first + 12].view(4, 3).t(),
        0: flat[second : second + 7],
        5: flat[third : third + LARGE_BYTES // 2 + 333],
        9: flat[fourth : fourth + 1].view(()),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex128])
@pytest.mark.parametrize("gap", [0, 1, 8])
def test_memory_at_the_same_places_is_summed_as_memory_seen_for_the_first_time(dtype: torch.dtype, gap: int) -> None:
    torch.manual_seed(0)
    flat, moving = torch.randn(LARGE_BYTES + 1, dtype=dtype), MovingMemory()
    starts = [gap, 12 + 2 * gap, 19 + 3 * gap, 352 + LARGE_BYTES // 2 + 4 * gap]
    for offsets in (starts, starts, starts, [start + 8 for start in starts], starts):
        flat.mul_(1.5)
        grads = _gradients(flat, offsets)
        known = BitSums.of([(key, SummedMemory(run)) for key, run in join_runs(grads).items()])
        found = moving.sums(grads)
        assert found.keys == known.keys
        for line in (None, 0, 3, LINES - 1):
            assert [*map(int, found.now(line))] == [*map(int, known.now(line))]


def test_the_places_of_memory_keep_no_memory() -> None:
    moving, memory = MovingMemory(), torch.ones(8)
    moving.sums({0: memory})
    held = StorageWeakRef(memory.untyped_storage())
    assert moving.sums({0: memory}).now()
    del memory
    assert held.expired()
