"""The schedule of a ring: in which order a rank passes on the chunks of every rank's segment.

Rank *r* receives from the rank before it and sends to the rank after it. A *gather* takes each segment from its owner
*o* around to rank *o - 1*. A *sum* begins at the owner's right neighbour, so that it ends at the owner: its order is
``(x[o+1] + x[o+2] + ...) + x[o]``, ranks modulo their number. The algorithm is that of Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", 2009.

Segments are cut into chunks, and a chunk is passed on as soon as it is there. So links stay busy also where segments
differ in size: the largest one flows through the ring while others wait for nothing but its chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_CHUNKS_PER_SEGMENT = 4


@dataclass(frozen=True)
class Chunk:
    """A part of a segment.

    Attributes:
        owner: whose segment.
        start: of its elements.
        stop: where they end.
    """

    owner: int
    start: int
    stop: int


@dataclass(frozen=True)
class RingSchedule:
    """What one rank does, in order.

    Attributes:
        first: the chunks that it sends without having received them.
        received: the chunks that it receives.
        passed_on: how many of those, from the first on, it sends on; the others end here.
    """

    first: list[Chunk]
    received: list[Chunk]
    passed_on: int


def sum_schedule(sizes: Sequence[int], rank: int, chunk: int) -> RingSchedule:
    """The schedule of a sum: a rank adds its own part to each chunk that it receives."""
    return _schedule(sizes, rank - 1, chunk)


def gather_schedule(sizes: Sequence[int], rank: int, chunk: int) -> RingSchedule:
    """The schedule of a gather."""
    return _schedule(sizes, rank, chunk)


def chunk_numel(sizes: Sequence[int], least: int, most: int) -> int:
    """Elements of a chunk for segments of these sizes: the same on every rank.

    Args:
        sizes: elements of each rank's segment.
        least: below this many, messages cost more than waiting for a whole segment.
        most: above, a rank waits longer than its link needs to stay busy.
    """
    return max(least, min(most, -(-max(sizes) // _CHUNKS_PER_SEGMENT)))


def _schedule(sizes: Sequence[int], start: int, chunk: int) -> RingSchedule:
    """Send the segment of ``start``, receive those before it, one after the other, and pass on all but the last."""
    ranks = len(sizes)
    segments = [_chunks_of((start - hop) % ranks, sizes, chunk) for hop in range(ranks)]
    received = [one for segment in segments[1:] for one in segment]
    return RingSchedule(segments[0], received, len(received) - len(segments[-1]))


def _chunks_of(owner: int, sizes: Sequence[int], chunk: int) -> list[Chunk]:
    return [Chunk(owner, start, min(start + chunk, sizes[owner])) for start in range(0, sizes[owner], chunk)]
