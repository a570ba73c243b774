"""One training step out of a trace: pure, from ranges to bars."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ddp_zero.tools.timeline.trace import Range

COMPUTE = ("forward", "backward")
WAITS = ("wait_reduce", "wait_sync", "wait_errors", "share_errors")
_MOST_APART = 0.02  # of a step: ranges of backward that are no further apart are one


@dataclass(frozen=True)
class Iteration:
    """One step.

    Attributes:
        compute: forward and backward, without the time that this library takes inside them.
        bars: of each bucket: ``reduce`` and ``sync`` while in flight, at most, ``local_step``, and waits.
        exposed: when the training loop waits for other ranks, without overlaps.
        begin, end: milliseconds in the trace.
    """

    compute: Sequence[Range]
    bars: Sequence[Range]
    exposed: Sequence[Range]
    begin: float
    end: float

    @property
    def buckets(self) -> list[int]:
        """The buckets that there are bars of."""
        return sorted({bar.bucket for bar in self.bars if bar.bucket >= 0})

    def exposed_ms(self) -> float:
        """Milliseconds in which the training loop waits for other ranks."""
        return sum(one.end - one.begin for one in self.exposed)

    def in_flight_ms(self) -> float:
        """Milliseconds in which something is in flight."""
        flights = [bar for bar in self.bars if bar.what in ("reduce", "sync")]
        return sum(one.end - one.begin for one in union(flights, "in flight"))

    def summary(self) -> str:
        """In one line."""
        took, exposed = self.end - self.begin, self.exposed_ms()
        return (
            f"step of {took:.1f} ms, {len(self.buckets)} buckets; communication for {self.in_flight_ms():.1f} "
            f"ms, of which exposed {exposed:.1f} ms ({exposed / took:.0%} of the step)"
        )


def iterations_in(ranges: Sequence[Range]) -> list[Iteration]:
    """The steps of a trace, in order.

    A step begins with its forward pass, or its backward pass where the trace has none, and ends with the last label of
    this library before the next one.

    Args:
        ranges: by time of beginning.
    """
    starts = _starts(ranges)
    found = []
    for begin, end in pairwise([*starts, float("inf")]):
        within = [one for one in ranges if begin <= one.begin < end]
        labels = [one for one in within if one.what not in COMPUTE]
        if labels and any(one.what == "local_step" for one in labels):
            late = [one for one in ranges if one.begin >= end and one.what == "wait_sync"]
            found.append(_iteration(within, labels, late))
    return found


def _starts(ranges: Sequence[Range]) -> list[float]:
    """When steps begin: at the first forward pass, or else backward, after the labels of the step before."""
    starts, has_stepped = [], True
    first = "forward" if any(one.what == "forward" for one in ranges) else "backward"
    for one in ranges:
        if one.what == first and has_stepped:
            starts.append(one.begin)
            has_stepped = False
        has_stepped |= one.what in ("local_step", "sync")
    return starts or [min(one.begin for one in ranges)]


def _iteration(within: Sequence[Range], labels: Sequence[Range], late: Sequence[Range]) -> Iteration:
    bars: list[Range] = []
    for posted, awaited in (("reduce", "wait_reduce"), ("sync", "wait_sync")):
        waits = [one for one in labels if one.what == awaited]
        waits += late if awaited == "wait_sync" else []
        for one in labels:
            if one.what == posted:
                wait = next((wait for wait in waits if wait.bucket == one.bucket and wait.begin >= one.begin), one)
                bars.append(Range(posted, one.begin, max(one.end, wait.end), one.bucket))
    bars += [one for one in labels if one.bucket >= 0 and one.what in ("local_step", *WAITS)]
    exposed = union([one for one in labels if one.what in WAITS], "exposed")
    begin = min(one.begin for one in within)
    end = max(one.end for one in within if one.what != "forward")
    busy = union([one for one in labels if one.what != "step"], "busy")
    compute: list[Range] = []
    for what in COMPUTE:
        parts = union([one for one in within if one.what == what], what, apart=_MOST_APART * (end - begin))
        compute += minus(parts, busy)
    return Iteration(compute, bars, exposed, begin, max([end, *(bar.end for bar in bars)]))


def union(ranges: Iterable[Range], what: str, apart: float = 0.0) -> list[Range]:
    """The time that ranges cover, without overlaps; those at most so far apart become one."""
    found: list[Range] = []
    for one in sorted(ranges, key=lambda one: one.begin):
        if found and one.begin <= found[-1].end + apart:
            found[-1] = Range(what, found[-1].begin, max(found[-1].end, one.end))
        else:
            found.append(Range(what, one.begin, one.end))
    return found


def minus(ranges: Iterable[Range], taken: Sequence[Range]) -> list[Range]:
    """What is left of ranges without the time of others, which do not overlap each other and are in order."""
    found = []
    for one in ranges:
        begin = one.begin
        for other in taken:
            if other.end <= begin or other.begin >= one.end:
                continue
            if other.begin > begin:
                found.append(Range(one.what, begin, other.begin))
            begin = max(begin, other.end)
        if begin < one.end:
            found.append(Range(one.what, begin, one.end))
    return found
