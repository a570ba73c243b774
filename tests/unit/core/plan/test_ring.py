"""Schedules of rings, run on lists of numbers: who gets what, in which order it is summed, what each link carries."""

from collections import deque
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_zero.core.plan.ring import Chunk, RingSchedule, chunk_numel, gather_schedule, sum_schedule

Element = tuple[int, ...]
"""The ranks that an element has been added up from, in order."""

SIZES = st.lists(st.integers(0, 9), min_size=2, max_size=7).filter(any)


class Rank:
    """A rank that does what its schedule says."""

    def __init__(self, schedule: RingSchedule, segments: list[list[Element]], adds: bool) -> None:
        self.inbox: deque[tuple[Chunk, list[Element]]] = deque()
        self.sent: list[Chunk] = []
        self.segments = segments
        self._schedule = schedule
        self._adds = adds
        self._received = 0

    def begin(self, after: "Rank") -> None:
        for chunk in self._schedule.first:
            self._send(chunk, after)

    def receive_one(self, after: "Rank") -> bool:
        """Returns False if nothing has arrived."""
        if not self.inbox:
            return False
        chunk, values = self.inbox.popleft()
        assert chunk == self._schedule.received[self._received], "chunks arrive in the order in which they are expected"
        part = slice(chunk.start, chunk.stop)
        mine = self.segments[chunk.owner][part]
        total = [one + two for one, two in zip(values, mine, strict=True)] if self._adds else values
        self.segments[chunk.owner][part] = total
        if self._received < self._schedule.passed_on:
            self._send(chunk, after)
        self._received += 1
        return True

    @property
    def is_done(self) -> bool:
        return self._received == len(self._schedule.received)

    def _send(self, chunk: Chunk, after: "Rank") -> None:
        after.inbox.append((chunk, list(self.segments[chunk.owner][chunk.start : chunk.stop])))
        self.sent.append(chunk)


def run(sizes: Sequence[int], chunk: int, schedule_of: Callable[[Sequence[int], int, int], RingSchedule]) -> list[Rank]:
    count, adds = len(sizes), schedule_of is sum_schedule
    ranks = [Rank(schedule_of(sizes, rank, chunk), [[(rank,)] * size for size in sizes], adds) for rank in range(count)]
    for rank, one in enumerate(ranks):
        one.begin(ranks[(rank + 1) % count])
    while any([one.receive_one(ranks[(rank + 1) % count]) for rank, one in enumerate(ranks)]):
        pass
    assert all(one.is_done for one in ranks), "a rank waits for ever"
    return ranks


@given(SIZES, st.integers(1, 4))
def test_a_sum_ends_at_the_owner_in_the_documented_order(sizes: list[int], chunk: int) -> None:
    count = len(sizes)
    for owner, rank in enumerate(run(sizes, chunk, sum_schedule)):
        order = tuple((owner + 1 + place) % count for place in range(count))
        assert rank.segments[owner] == [order] * sizes[owner]


@given(SIZES, st.integers(1, 4))
def test_a_gather_brings_every_segment_to_every_rank(sizes: list[int], chunk: int) -> None:
    for rank in run(sizes, chunk, gather_schedule):
        assert rank.segments == [[(owner,)] * size for owner, size in enumerate(sizes)]


@given(SIZES, st.integers(1, 4))
def test_each_link_carries_every_segment_but_one_once(sizes: list[int], chunk: int) -> None:
    for schedule_of, missing in ((sum_schedule, 0), (gather_schedule, 1)):
        for rank, one in enumerate(run(sizes, chunk, schedule_of)):
            left_out = (rank + missing) % len(sizes)
            sent = sorted((chunk.owner, chunk.start, chunk.stop) for chunk in one.sent)
            assert {owner for owner, *_ in sent} == {owner for owner, size in enumerate(sizes) if size} - {left_out}
            assert sum(stop - start for _, start, stop in sent) == sum(sizes) - sizes[left_out]


def test_the_first_chunk_of_a_large_segment_is_passed_on_before_the_last_one_arrives() -> None:
    schedule = sum_schedule([8, 0, 0], rank=2, chunk=2)  # between rank 1, where it starts, and its owner
    assert schedule.first == []
    assert [chunk.start for chunk in schedule.received] == [0, 2, 4, 6]
    assert schedule.passed_on == 4


@pytest.mark.parametrize(
    ("sizes", "expected"), [([100, 40], 25), ([101], 26), ([8], 4), ([4000, 4000], 64), ([0, 0], 4)]
)
def test_a_segment_has_four_chunks_within_limits(sizes: list[int], expected: int) -> None:
    assert chunk_numel(sizes, least=4, most=64) == expected
