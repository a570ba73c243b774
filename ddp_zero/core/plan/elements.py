"""``partition="elements"``: each bucket is cut into one part per rank, wherever parameters begin.

Parts have equal numbers of elements, except that a parameter is cut only at multiples of `GRAIN` elements of its own: a
vectorised kernel then rounds every element as it would in the whole parameter. At most one parameter is cut at each of
the N - 1 boundaries; all others stay whole. Three parameters of 200, 100 and 500 elements on two ranks:

    elements    0         200    300                        800
    parameters  [   p0    |  p1  |            p2            ]
    owners      [ rank 0: p0, p1, p2[0:128] | rank 1: p2[128:500] ]
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from ddp_zero.core.plan.ownership import Piece, Pieces, whole
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.plan.shard_plan import Bucket, ParameterSpec, ShardPlan, cut, segments_of

GRAIN = 64
"""Elements: at least the widest vector of any kernel."""


class CutParameters:
    """The plan of ``partition="elements"``; see `ddp_zero.core.plan.partitions.Partition`."""

    name = "elements"
    cuts = True

    def __init__(self, why: str = "") -> None:
        self.why = why

    def assign(
        self, specs: Sequence[ParameterSpec], decided: Sequence[Pieces], world_size: int, cap: int
    ) -> list[Pieces]:
        """Cut each run of new parameters of one kind; those already decided keep their pieces."""
        assigned = [*decided, *(whole(GroupRank(0), spec.numel) for spec in specs[len(decided) :])]
        for active in (True, False):
            members = [index for index in range(len(decided), len(specs)) if specs[index].active is active]
            for run in _runs(members, specs, cap):
                _assign(run, specs, world_size, assigned)
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
            _assign(sorted(bucket), specs, world_size, assigned)
        return assigned

    def plan(
        self,
        specs: Sequence[ParameterSpec],
        pieces: Sequence[Pieces],
        world_size: int,
        layout: Sequence[Sequence[int]] | None,
        cap: int,
    ) -> ShardPlan:
        """One bucket per DDP bucket, then one per run of the other active parameters of a kind."""
        reduced = {param for bucket in layout or () for param in bucket}
        rest = [index for index, spec in enumerate(specs) if spec.active and index not in reduced]
        members = [sorted(bucket) for bucket in layout or ()] + _runs(rest, specs, cap)
        buckets = [
            Bucket(index, specs[params[0]].kind if params else "", segments_of(params, specs, pieces, world_size))
            for index, params in enumerate(members)
        ]
        return ShardPlan(world_size, tuple(specs), tuple(pieces), tuple(buckets))

    def bucket_over(
        self,
        index: int,
        params: Sequence[int],
        specs: Sequence[ParameterSpec],
        pieces: Sequence[Pieces],
        world_size: int,
    ) -> Bucket:
        """A bucket that is in no plan, cut anew: its parts lie end to end, whoever owns them later."""
        anew = list(pieces)
        _assign([param for param in sorted(params) if specs[param].active], specs, world_size, anew)
        kind = specs[params[0]].kind if params else ""
        return Bucket(index, kind, segments_of(sorted(params), specs, anew, world_size))


def cut_evenly(numels: Sequence[int], world_size: int) -> list[Pieces]:
    """Cut parameters that lie end to end into one part per rank.

    Args:
        numels: elements of each parameter.
        world_size: number of ranks.

    Returns:
        The pieces of each parameter. Parts differ from their mean by at most `GRAIN` elements.
    """
    ends = [0, *accumulate(numels)]
    bounds = [_nearest_cut(ends, ends[-1] * rank // world_size) for rank in range(world_size)] + [ends[-1]]
    found = []
    for start, numel in zip(ends, numels, strict=False):
        inside = [
            Piece(GroupRank(rank), max(low, start) - start, min(high, start + numel) - start)
            for rank, (low, high) in enumerate(pairwise(bounds))
            if max(low, start) < min(high, start + numel)
        ]
        found.append(tuple(inside) or whole(_owner_at(bounds, start), numel))
    return found


def _nearest_cut(ends: Sequence[int], position: int) -> int:
    """The place nearest to a position at which a parameter ends or has a multiple of `GRAIN` elements before it."""
    param = bisect_right(ends, position) - 1
    if param >= len(ends) - 1:
        return ends[-1]
    start, stop = ends[param], ends[param + 1]
    below = start + (position - start) // GRAIN * GRAIN
    above = min(below + GRAIN, stop)
    return below if position - below <= above - position else above


def _owner_at(bounds: Sequence[int], position: int) -> GroupRank:
    """The owner of a parameter without elements."""
    return GroupRank(min(bisect_right(bounds, position) - 1, len(bounds) - 2))


def _assign(params: Sequence[int], specs: Sequence[ParameterSpec], world_size: int, assigned: list[Pieces]) -> None:
    for param, pieces in zip(params, cut_evenly([specs[param].numel for param in params], world_size), strict=True):
        assigned[param] = pieces


def _runs(members: Iterable[int], specs: Sequence[ParameterSpec], cap: int) -> list[list[int]]:
    """Parameters of each kind, in order, in runs of about ``cap`` bytes."""
    of_kind: dict[str, list[int]] = {}
    for param in members:
        of_kind.setdefault(specs[param].kind, []).append(param)
    runs = []
    for params in of_kind.values():
        sizes = [specs[param].nbytes for param in params]
        runs += cut(sizes, params, max(1, -(-sum(sizes) // cap)))
    return [run for run in runs if run]
