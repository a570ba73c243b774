"""The pool of buffers: what it lends, what it keeps, what it says."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_zero.core.backward.scratch_buffers import BufferPool, SideStream
from tests import internals

CPU = torch.device("cpu")


def test_a_buffer_that_came_back_is_lent_again() -> None:
    pool = BufferPool(SideStream(), 1024, 2048)
    first = pool.lend(1000, CPU)
    assert (first.dtype, first.dim(), first.numel()) == (torch.uint8, 1, 1024)
    second = pool.lend(1000, CPU)
    assert second is not first
    pool.give_back(first)
    assert pool.lend(900, CPU) is first
    assert pool.statistics.held_bytes == pool.statistics.most_bytes == 2048
    assert pool.statistics.most_lent == 2


def test_small_requests_get_small_buffers_unless_a_large_one_is_free() -> None:
    pool = BufferPool(SideStream(), 1024, 4096)
    assert [pool.lend(n, CPU).numel() for n in (1, 16, 17, 129, 513, 1024, 5000)] == [
        *(16, 16, 32, 256, 1024, 1024),
        5008,
    ]
    small, large = pool.lend(10, CPU), pool.lend(1000, CPU)
    pool.give_back(large)
    assert pool.lend(10, CPU) is large
    pool.give_back(small)
    pool.give_back(large)
    assert pool.lend(10, CPU) is small, "the smallest that fits"


def test_what_an_iteration_did_not_use_is_dropped_at_its_end() -> None:
    pool = BufferPool(SideStream(), 1024, 4096)
    lent = [pool.lend(1024, CPU) for _ in range(3)]
    for buffer in lent:
        pool.give_back(buffer)
    pool.trim()
    assert pool.statistics.held_bytes == 3072
    pool.give_back(pool.lend(1024, CPU))
    pool.trim()
    assert pool.statistics.held_bytes == 1024
    assert pool.statistics.most_bytes == 3072


def test_more_than_it_keeps_is_lent_and_dropped_afterwards() -> None:
    pool = BufferPool(SideStream(), 1024, 2048)
    for buffer in [pool.lend(1024, CPU) for _ in range(5)]:
        pool.give_back(buffer)
    pool.trim()
    assert pool.statistics.held_bytes == 2048


def test_free_buffers_make_room_for_one_that_does_not_fit() -> None:
    pool = BufferPool(SideStream(), 1024, 1024)
    for buffer in [pool.lend(256, CPU) for _ in range(4)]:
        pool.give_back(buffer)
    pool.lend(1024, CPU)
    assert pool.statistics.most_bytes == 1024


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=40))
def test_any_sequence_keeps_its_books_right(actions: list[tuple[bool, int]]) -> None:
    pool = BufferPool(SideStream(), 1000, 2000)
    lent: list[torch.Tensor] = []
    for is_lending, number in actions:
        if is_lending:
            buffer = pool.lend(number, CPU)
            assert buffer.numel() >= number
            assert all(buffer is not other for other in lent), "lent once at a time"
            assert buffer.numel() % 16 == 0
            lent.append(buffer)
        elif lent:
            pool.give_back(lent.pop(number % len(lent)))
            if number % 3 == 0:
                pool.trim()
                assert pool.statistics.held_bytes <= max(2000, sum(buffer.numel() for buffer in lent) + 2000)
    held = sum(buffer.numel() for buffer in [*lent, *internals.free_buffers(pool)])
    assert pool.statistics.held_bytes == held <= pool.statistics.most_bytes
