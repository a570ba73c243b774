"""Memory that goes back to the system."""

import mmap
import os
from pathlib import Path

import pytest
import torch

from ddp_zero.core.backward.scratch_buffers import Buffer, SideStream
from ddp_zero.core.local.memory import return_pages

MIB = 1 << 20
needs_linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@needs_linux
def test_returned_pages_do_not_count_and_come_back_when_they_are_touched() -> None:
    idle = torch.ones(64 * MIB, dtype=torch.uint8)
    before = resident()
    return_pages(idle)
    assert before - resident() > 60 * MIB, "64 MiB were returned"
    idle.fill_(3)
    assert idle.eq(3).all(), "the memory is as usable as before"


@needs_linux
@pytest.mark.parametrize(("first", "last"), [(0, 3 * mmap.PAGESIZE), (5, 2 * mmap.PAGESIZE + 7), (1, 9), (4, 4)])
def test_return_pages_keeps_the_values_before_and_behind(first: int, last: int) -> None:
    whole = torch.ones(4 * mmap.PAGESIZE, dtype=torch.uint8)
    return_pages(whole[first:last])
    assert whole[:first].eq(1).all(), f"the {first} bytes before"
    assert whole[last:].eq(1).all(), f"the bytes behind {last}"


@needs_linux
def test_a_buffer_returns_its_pages_unless_it_is_lent() -> None:
    lent, free = (Buffer(SideStream(), 64 * MIB, torch.device("cpu")) for _ in range(2))
    lent.lend()
    for buffer in (lent, free):
        buffer.memory.fill_(1)
    before = resident()
    for buffer in (lent, free):
        buffer.rest()
    assert 60 * MIB < before - resident() < 68 * MIB, "one buffer of two was free"
    assert lent.memory.eq(1).all(), "the lent one keeps its content"
