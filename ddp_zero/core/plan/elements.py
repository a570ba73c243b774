"""``partition="elements"``: each bucket is cut into one part per rank, wherever parameters begin.

Parts have equal numbers of elements, except that a parameter is cut only at multiples of `GRAIN` of its own elements,
so that a vectorised kernel rounds every element as it would in the whole parameter. At most one parameter is cut at
each of the N - 1 boundaries. Three parameters of 200, 100 and 500 elements on two ranks:

    elements    0         200    300                        800
    parameters  [   p0    |  p1  |            p2            ]
    owners      [ rank 0: p0, p1, p2[0:128] | rank 1: p2[128:500] ]

[Note: even parts]
Native collectives need parts of one size. For them parameters start at multiples of `GRAIN` elements, so that a cut
after any multiple of `GRAIN` is allowed, and parts are exactly equal, gaps and the padding of the last part included:

    elements    0        200 256 356 384          448                  896
    parameters  [   p0   | . | p1 | . |            p2          | ..... ]
    owners      [ rank 0: p0, p1, p2[0:64]        | rank 1: p2[64:500] ]

Gradients and parameters of a bucket use this layout in memory, so that one reduce-scatter and one all-gather work in
place. Where the gaps would add more than an eighth, parts are cut as above.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ddp_zero.core.plan.ownership import Piece, Pieces, whole
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.plan.shapes import aligned_offsets
from ddp_zero.core.plan.shard_plan import Bucket, ParameterSpec, Segment, ShardPlan, cut, segments_of

GRAIN = 64
"""Granularity of cuts in elements; at least the widest vector of any kernel."""


class CutParameters:
    """The plan of ``partition="elements"``; see `ddp_zero.core.plan.partitions.Partition`.

    Args:
        why: reason for the choice, if ``partition="auto"`` made it.
        is_native: True for even parts, as native collectives need; see [Note: even parts].
    """

    name = "elements"
    cuts = True

    def __init__(self, why: str = "", is_native: bool = False) -> None:
        self.why = why
        self._is_native = is_native

    def assign(
        self, specs: Sequence[ParameterSpec], decided: Sequence[Pieces], world_size: int, cap: int
    ) -> list[Pieces]:
        """Cut each run of new parameters of one kind; parameters already decided keep their pieces."""
        assigned = [*decided, *(whole(GroupRank(0), spec.numel) for spec in specs[len(decided) :])]
        for active in (True, False):
            members = [index for index in range(len(decided), len(specs)) if specs[index].active is active]
            for run in _runs(members, specs, cap):
                self.cut_anew(run, specs, world_size, assigned)
        return assigned

    def assign_by_bucket(
        self,
        specs: Sequence[ParameterSpec],
        pieces: Sequence[Pieces],
        world_size: int,
        layout: Sequence[Sequence[int]],
        split: bool,
        decided: int,
    ) -> list[Pieces]:
        """Cut each DDP bucket; ``split`` has no effect, since each part is one message anyway."""
        assigned = list(pieces)
        for bucket in layout[decided:]:
            self.cut_anew(sorted(bucket), specs, world_size, assigned)
        return assigned

    def plan(
        self,
        specs: Sequence[ParameterSpec],
        pieces: Sequence[Pieces],
        world_size: int,
        layout: Sequence[Sequence[int]] | None,
        cap: int,
    ) -> ShardPlan:
        """One bucket per DDP bucket, then one per run of the remaining active parameters of a kind."""
        reduced = {param for bucket in layout or () for param in bucket}
        rest = [index for index, spec in enumerate(specs) if spec.active and index not in reduced]
        members = [sorted(bucket) for bucket in layout or ()] + _runs(rest, specs, cap)
        buckets = [self.bucket_of(index, params, specs, pieces, world_size) for index, params in enumerate(members)]
        return ShardPlan(world_size, tuple(specs), tuple(pieces), tuple(buckets))

    def bucket_over(
        self,
        index: int,
        params: Sequence[int],
        specs: Sequence[ParameterSpec],
        pieces: Sequence[Pieces],
        world_size: int,
    ) -> Bucket:
        """A bucket outside the plan, cut anew: its parts lie end to end, regardless of later owners."""
        anew = list(pieces)
        self.cut_anew([param for param in sorted(params) if specs[param].active], specs, world_size, anew)
        return self.bucket_of(index, sorted(params), specs, anew, world_size)

    def bucket_of(
        self,
        index: int,
        params: Sequence[int],
        specs: Sequence[ParameterSpec],
        pieces: Sequence[Pieces],
        world_size: int,
    ) -> Bucket:
        """The bucket of these parameters, with these pieces."""
        kind = specs[params[0]].kind if params else ""
        return Bucket(index, kind, self._segments(params, specs, pieces, world_size))

    def cut_anew(
        self, params: Sequence[int], specs: Sequence[ParameterSpec], world_size: int, assigned: list[Pieces]
    ) -> None:
        """Replace the pieces of a bucket's parameters by equal parts."""
        numels = [specs[param].numel for param in params]
        even = _EvenParts.of(numels, world_size) if self._is_native else None
        found = cut_evenly(numels, world_size) if even is None else even.pieces
        for param, pieces in zip(params, found, strict=True):
            assigned[param] = pieces

    def _segments(
        self, params: Sequence[int], specs: Sequence[ParameterSpec], pieces: Sequence[Pieces], world_size: int
    ) -> tuple[Segment, ...]:
        """Segments of a bucket; end to end if its pieces were cut in a different bucket, or are not even."""
        active = [param for param in params if specs[param].active]
        even = _EvenParts.of([specs[param].numel for param in active], world_size) if self._is_native else None
        if even is None or even.pieces != [pieces[param] for param in active]:
            return segments_of(params, specs, pieces, world_size)
        return even.segments(active)


def cut_evenly(numels: Sequence[int], world_size: int) -> list[Pieces]:
    """Cut consecutive parameters into one part per rank; parts differ from their mean by at most `GRAIN` elements."""
    ends = [0, *accumulate(numels)]
    bounds = cuts_nearest(ends, [ends[-1] * rank // world_size for rank in range(world_size + 1)])
    found = []
    for start, numel in zip(ends, numels, strict=False):
        inside = [
            Piece(GroupRank(rank), max(low, start) - start, min(high, start + numel) - start)
            for rank, (low, high) in enumerate(pairwise(bounds))
            if max(low, start) < min(high, start + numel)
        ]
        found.append(tuple(inside) or whole(_owner_at(bounds, start), numel))
    return found


def cuts_nearest(ends: Sequence[int], positions: Sequence[int]) -> list[int]:
    """The legal cuts nearest to positions, of which the last is the end."""
    return [*(_nearest_cut(ends, position) for position in positions[:-1]), ends[-1]]


def _nearest_cut(ends: Sequence[int], position: int) -> int:
    """The legal cut nearest to a position: the end of a parameter, or a multiple of `GRAIN` elements into one."""
    param = bisect_right(ends, position) - 1
    if param >= len(ends) - 1:
        return ends[-1]
    start, stop = ends[param], ends[param + 1]
    below = start + (position - start) // GRAIN * GRAIN
    above = min(below + GRAIN, stop)
    return below if position - below <= above - position else above


def _owner_at(bounds: Sequence[int], position: int) -> GroupRank:
    return GroupRank(min(bisect_right(bounds, position) - 1, len(bounds) - 2))


@dataclass(frozen=True)
class _EvenParts:
    starts: list[int]  # offset of each parameter in the bucket, in elements
    pieces: list[Pieces]  # pieces of each parameter
    numel: int  # elements of one part
    world_size: int  # number of ranks

    @classmethod
    def of(cls, numels: Sequence[int], world_size: int) -> "_EvenParts | None":
        """Even parts for parameters of these sizes; None if gaps add more than an eighth."""
        *starts, end = aligned_offsets(numels, 1, GRAIN)
        part = -(-end // (world_size * GRAIN)) * GRAIN
        if not end or 8 * part * world_size > 9 * sum(numels):
            return None
        pieces = []
        for start, numel in zip(starts, numels, strict=True):
            last = min(max(start, start + numel - 1) // part, world_size - 1)
            owners = range(min(start // part, last), last + 1)
            bounds = [0, *(part * rank - start for rank in owners[1:]), numel]
            held = zip(owners, pairwise(bounds), strict=True)
            pieces.append(tuple(Piece(GroupRank(rank), *elements) for rank, elements in held))
        return cls(starts, pieces, part, world_size)

    def segments(self, params: Sequence[int]) -> tuple[Segment, ...]:
        held: list[list[tuple[int, int, tuple[int, int]]]] = [[] for _ in range(self.world_size)]
        for param, start, pieces in zip(params, self.starts, self.pieces, strict=True):
            for piece in pieces:
                offset = start + piece.start - piece.owner * self.numel
                held[piece.owner].append((param, offset, (piece.start, piece.stop)))
        return tuple(
            Segment(
                GroupRank(rank),
                tuple(param for param, _, _ in members),
                tuple(offset for _, offset, _ in members),
                self.numel,
                tuple(elements for _, _, elements in members),
                is_even=True,
            )
            for rank, members in enumerate(held)
        )


def _runs(members: Iterable[int], specs: Sequence[ParameterSpec], cap: int) -> list[list[int]]:
    of_kind: dict[str, list[int]] = {}
    for param in members:
        of_kind.setdefault(specs[param].kind, []).append(param)
    runs = []
    for params in of_kind.values():
        sizes = [specs[param].nbytes for param in params]
        runs += cut(sizes, params, max(1, -(-sum(sizes) // cap)))
    return [run for run in runs if run]
