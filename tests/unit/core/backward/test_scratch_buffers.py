"""The scratches of a plan's buckets: which bucket uses which, and how large they are."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_zero.core.backward.scratch_buffers import SideStream, memory_of
from ddp_zero.core.plan.buckets import EARLY_BYTES, BufferBytes, scratch_bytes, scratch_turns

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


def test_buckets_that_take_turns_share_a_buffer_of_the_largest() -> None:
    found = memory_of(SideStream(), [(CPU, 90, 0), (CPU, 16, 33), (CPU, 50, 20)])
    assert found[0].scratch is found[2].scratch is not found[1].scratch
    assert [one.scratch.memory.nbytes for one in found] == [96, 16, 96], "any dtype can be laid over them"
    assert len({one.receives for one in found}) == 1
    assert found[0].receives is not None
    assert found[0].receives.memory.nbytes == 80
    assert [one.received_at for one in found] == [80, 0, 48]


@pytest.mark.parametrize(
    ("received", "nbytes", "starts_early"),
    [
        ([64, 64, 32], 128, [True, True, True]),
        ([0, 0], 0, [True, True]),
        ([EARLY_BYTES, EARLY_BYTES], EARLY_BYTES, [True, False]),
        ([EARLY_BYTES, 64, 64], EARLY_BYTES, [True, False, True]),
        ([2 * EARLY_BYTES, EARLY_BYTES, EARLY_BYTES], 2 * EARLY_BYTES, [True, False, True]),
        ([EARLY_BYTES, 0, EARLY_BYTES], EARLY_BYTES, [True, True, True]),
    ],
)
def test_small_buckets_have_places_of_their_own(received: list[int], nbytes: int, starts_early: list[bool]) -> None:
    found = BufferBytes.of([(64, one) for one in received])
    assert found.received == nbytes
    assert list(found.starts_early) == starts_early


@given(st.lists(st.integers(0, 1 << 21), max_size=12))
def test_a_bucket_that_starts_early_shares_no_byte_with_the_one_before(received: list[int]) -> None:
    found = BufferBytes.of([(64, one) for one in received])
    spans = [(at, at + nbytes) for at, nbytes in zip(found.received_at, received, strict=True)]
    assert all(0 <= begin and end <= found.received for begin, end in spans)
    for ((begun, ended), (begin, end)), is_early in zip(pairwise(spans), found.starts_early[1:], strict=True):
        assert not is_early or ended <= begin or end <= begun
    assert found.received <= max([EARLY_BYTES, *(one + 15 for one in received)])
