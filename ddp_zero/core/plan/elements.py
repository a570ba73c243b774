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
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ddp_zero.core.plan.ownership import Piece, Pieces, whole
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.plan.shard_plan import Bucket, Layout, Ownership, ParameterSpec, Partition, Segment, bucket_of, cut
from ddp_zero.values.shapes import aligned_offsets

GRAIN = 64
"""Granularity of cuts in elements; at least the widest vector of any kernel."""


class CutParameters(Partition):
    """``partition="elements"``.

    ``why`` is the reason for the choice, if ``partition="auto"`` made it. Native collectives need even parts, with
    ``is_native``; see [Note: even parts].
    """

    name = "elements"
    cuts = True

    def __init__(self, why: str = "", is_native: bool = False) -> None:
        self.why = why
        self._is_native = is_native

    def assign(
        self, specs: Sequence[ParameterSpec], world_size: int, cap: int, decided: Sequence[Pieces] = ()
    ) -> Ownership:
        """Cut each run of new parameters of one kind; parameters already decided keep their pieces."""
        added = (whole(GroupRank(0), spec.numel) for spec in specs[len(decided) :])
        owned = Ownership(world_size, tuple(specs), (*decided, *added))
        for active in (True, False):
            members = [index for index in range(len(decided), len(specs)) if specs[index].active is active]
            owned = self.cut_anew(owned, _runs(members, specs, cap))
        return owned

    def assign_by_bucket(self, owned: Ownership, layout: Layout, split: bool = True) -> Ownership:
        """Cut each DDP bucket; ``split`` has no effect, since each part is one message anyway."""
        return self.cut_anew(owned, map(sorted, layout))

    def further(self, owned: Ownership, cap: int) -> Iterable[Bucket]:
        """One bucket per run of the active parameters of a kind."""
        runs = _runs(owned.active(range(len(owned.specs))), owned.specs, cap)
        return [self.bucket(owned, run) for run in runs]

    def cut_anew(self, owned: Ownership, buckets: Iterable[Sequence[int]]) -> Ownership:
        """Cut the parameters of each bucket into equal parts, whoever owned them."""
        assigned = list(owned.pieces)
        for params in buckets:
            numels = [owned.specs[param].numel for param in params]
            even = _EvenParts.of(numels, owned.world_size) if self._is_native else None
            found = cut_evenly(numels, owned.world_size) if even is None else even.pieces
            for param, pieces in zip(params, found, strict=True):
                assigned[param] = pieces
        return owned.with_pieces(assigned)

    def bucket(self, owned: Ownership, params: Sequence[int], index: int = 0) -> Bucket:
        """Segments are end to end if their pieces were cut in a different bucket, or are not even."""
        bucket = bucket_of(owned, params, index)
        active = owned.active(params)
        numels = [owned.specs[param].numel for param in active]
        even = _EvenParts.of(numels, owned.world_size) if self._is_native else None
        if even is None or even.pieces != [owned.pieces[param] for param in active]:
            return bucket
        return replace(bucket, segments=even.segments(active))


def cut_evenly(numels: Sequence[int], world_size: int) -> list[Pieces]:
    """Cut consecutive parameters into one part per rank; parts differ from their mean by at most `GRAIN` elements."""
    total = sum(numels)
    return cut_at(numels, [total * rank // world_size for rank in range(world_size + 1)], range(world_size))


def cut_at(numels: Sequence[int], positions: Sequence[int], ranks: range) -> list[Pieces]:
    """Cut consecutive parameters over ranks at the legal cuts nearest to positions, of which the last is the end."""
    ends = [0, *accumulate(numels)]
    bounds = [*(_nearest_cut(ends, position) for position in positions[:-1]), ends[-1]]
    found = []
    for start, numel in zip(ends, numels, strict=False):
        inside = [
            Piece(GroupRank(rank), max(low, start) - start, min(high, start + numel) - start)
            for rank, (low, high) in zip(ranks, pairwise(bounds), strict=True)
            if max(low, start) < min(high, start + numel)
        ]
        holder = min(bisect_right(bounds, start) - 1, len(ranks) - 1)  # of a parameter without elements
        found.append(tuple(inside) or whole(GroupRank(ranks[holder]), numel))
    return found


def _nearest_cut(ends: Sequence[int], position: int) -> int:
    """The legal cut nearest to a position: the end of a parameter, or a multiple of `GRAIN` elements within it."""
    param = bisect_right(ends, position) - 1
    if param >= len(ends) - 1:
        return ends[-1]
    start, stop = ends[param], ends[param + 1]
    below = start + (position - start) // GRAIN * GRAIN
    above = min(below + GRAIN, stop)
    return below if position - below <= above - position else above


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
