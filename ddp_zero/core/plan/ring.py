"""Schedules of ring collectives: the order in which a rank forwards the chunks of every segment.

Rank *r* receives from rank *r - 1* and sends to rank *r + 1*. A *gather* takes each segment from its owner *o* around
to rank *o - 1*. A *sum* begins at the owner's right neighbour, so that it ends at the owner: its order is ``(x[o+1] +
x[o+2] + ...) + x[o]``, ranks modulo their number. The algorithm is from Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009.

Segments are cut into chunks, and a chunk is forwarded as soon as it arrives. Links therefore stay busy even if segments
differ in size: the chunks of the largest one stream through the ring.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_CHUNKS_PER_SEGMENT = 4


@dataclass(frozen=True)
class Chunk:
    """A part of a segment."""

    owner: int  # owner of the segment
    start: int  # first element within the segment
    stop: int  # end within the segment, exclusive


@dataclass(frozen=True)
class RingSchedule:
    """One rank's chunks, in order."""

    first: list[Chunk]  # chunks that it sends without receiving them before
    received: list[Chunk]  # chunks that it receives
    passed_on: int  # number of leading received chunks that it forwards; the remaining ones end here


def sum_schedule(sizes: Sequence[int], rank: int, chunk: int) -> RingSchedule:
    """The schedule of a sum: a rank adds its own part to each chunk that it receives."""
    return _schedule(sizes, rank - 1, chunk)


def gather_schedule(sizes: Sequence[int], rank: int, chunk: int) -> RingSchedule:
    return _schedule(sizes, rank, chunk)


def chunk_numel(sizes: Sequence[int], least: int, most: int) -> int:
    """Elements of a chunk for segments of these sizes, the same on every rank.

    Messages smaller than ``least`` cost more than waiting for a whole segment; with chunks larger than ``most`` a rank
    waits longer than its link needs to stay busy.
    """
    return max(least, min(most, -(-max(sizes) // _CHUNKS_PER_SEGMENT)))


def _schedule(sizes: Sequence[int], start: int, chunk: int) -> RingSchedule:
    """Send the segment of ``start``, receive the segments before it in turn, and forward all but the last."""
    ranks = len(sizes)
    owners = [(start - hop) % ranks for hop in range(ranks)]
    segments = [
        [Chunk(owner, begin, min(begin + chunk, sizes[owner])) for begin in range(0, sizes[owner], chunk)]
        for owner in owners
    ]
    received = [one for segment in segments[1:] for one in segment]
    return RingSchedule(segments[0], received, len(received) - len(segments[-1]))
