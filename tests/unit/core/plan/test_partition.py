from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_zero.core.plan.partition import partition_greedy

RANKS = [1, 2, 3, 8, 128, 1024]

sizes_up_to = st.lists(st.integers(0, 1 << 40) | st.integers(0, 3), max_size=40)


def sort_and_argmin(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """The same rule, written in the plainest way."""
    carried = list(loads)
    owners = [-1] * len(sizes)
    for _, item in sorted((-size, item) for item, size in enumerate(sizes)):
        owners[item] = carried.index(min(carried))
        carried[owners[item]] += sizes[item]
    return owners


def loads_after(sizes: Sequence[int], owners: Sequence[int], num_ranks: int) -> list[int]:
    loads = [0] * num_ranks
    for size, owner in zip(sizes, owners, strict=True):
        loads[owner] += size
    return loads


def best_largest_load(sizes: Sequence[int], num_ranks: int) -> int:
    """The smallest possible largest load, by trying every assignment up to renaming ranks."""
    reachable = {(0,) * num_ranks}
    for size in sizes:
        reachable = {
            tuple(sorted((*loads[:rank], loads[rank] + size, *loads[rank + 1 :])))
            for loads in reachable
            for rank in range(num_ranks)
        }
    return min(max(loads) for loads in reachable)


@given(sizes=sizes_up_to, num_ranks=st.integers(1, 12) | st.sampled_from(RANKS), data=st.data())
def test_the_greedy_partition_equals_sort_then_argmin(sizes: list[int], num_ranks: int, data: st.DataObject) -> None:
    loads = data.draw(st.none() | st.lists(st.integers(0, 1 << 40), min_size=num_ranks, max_size=num_ranks))
    assert partition_greedy(sizes, num_ranks, loads) == sort_and_argmin(sizes, loads or [0] * num_ranks)


@given(sizes=sizes_up_to, loads=st.lists(st.integers(0, 100), min_size=1, max_size=8))
def test_the_greedy_partition_changes_no_argument_and_repeats_its_answer(sizes: list[int], loads: list[int]) -> None:
    sizes_before, loads_before = tuple(sizes), tuple(loads)
    first = partition_greedy(sizes, len(loads), loads)
    assert (tuple(sizes), tuple(loads)) == (sizes_before, loads_before)
    assert partition_greedy(sizes_before, len(loads), loads_before) == first


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=8), num_ranks=st.integers(1, 4))
def test_the_largest_load_is_within_grahams_bound_of_the_best(sizes: list[int], num_ranks: int) -> None:
    largest = max(loads_after(sizes, partition_greedy(sizes, num_ranks), num_ranks))
    best = best_largest_load(sizes, num_ranks)
    assert best <= largest
    assert 3 * num_ranks * largest <= (4 * num_ranks - 1) * best


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_grahams_worst_case_reaches_the_bound(num_ranks: int) -> None:
    pairs = [size for size in range(2 * num_ranks - 1, num_ranks, -1) for _ in range(2)]
    sizes = [*pairs, num_ranks, num_ranks, num_ranks]
    largest = max(loads_after(sizes, partition_greedy(sizes, num_ranks), num_ranks))
    assert largest == 4 * num_ranks - 1
    if num_ranks < 4:
        assert best_largest_load(sizes, num_ranks) == 3 * num_ranks


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "loads", "message"),
    [
        ([1], 0, None, "0 loads of 0 ranks"),
        ([1], -3, None, "0 loads of -3 ranks"),
        ([1], 2, [0, 0, 0], "3 loads of 2 ranks"),
    ],
)
def test_impossible_arguments_are_refused(
    sizes: list[int], num_ranks: int, loads: list[int] | None, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        partition_greedy(sizes, num_ranks, loads)
