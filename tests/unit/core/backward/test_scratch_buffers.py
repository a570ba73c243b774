"""The scratches of a plan's buckets: which bucket uses which, and how large they are."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_zero.core.backward.scratch_buffers import SideStream, buffers_of
from ddp_zero.core.plan.buckets import scratch_bytes, scratch_turns

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("sizes", "turns", "nbytes"),
    [
        ([], [], 0),
        ([64], [0], 64),
        ([64, 64, 48], [0, 1, 0], 128),
        ([96, 16, 16, 96], [2, 0, 1, 2], 128),  # tables at both ends, as in models with untied embeddings
        ([16, 16, 96, 16, 16], [0, 1, 0, 1, 0], 112),
        ([96, 96, 16, 16], [0, 1, 0, 1], 192),
        ([16, 96, 16, 16, 96, 32], [0, 2, 1, 0, 2, 1], 144),
    ],
)
def test_a_few_large_buckets_share_a_scratch(sizes: list[int], turns: list[int], nbytes: int) -> None:
    assert scratch_turns(sizes) == turns
    assert sum(scratch_bytes(sizes, turns).values()) == nbytes


@given(st.lists(st.integers(1, 9).map(lambda number: 16 * number), min_size=1, max_size=12))
def test_no_bucket_has_the_scratch_of_the_one_before(sizes: list[int]) -> None:
    turns = scratch_turns(sizes)
    assert all(one != following for one, following in pairwise(turns))
    found = scratch_bytes(sizes, turns)
    assert all(found[turn] >= size for turn, size in zip(turns, sizes, strict=True))
    assert sum(found.values()) <= max(sizes[::2]) + max(sizes[1::2], default=0), "never more than two that take turns"


def test_buffers_are_made_as_the_turns_say() -> None:
    found, received = zip(*buffers_of(SideStream(), [(CPU, 90, 0), (CPU, 16, 33), (CPU, 50, 20)]), strict=True)
    assert found[0] is found[2] is not found[1]
    assert [buffer.memory.nbytes for buffer in found] == [96, 16, 96], "any dtype can be laid over them"
    assert len(set(received)) == 1, "a reduction ends before the next one starts"
    assert received[0].memory.nbytes == 48
