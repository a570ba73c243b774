"""Owners by the cost of their steps, with a bound on bytes; parameters of elementwise optimizers may be cut.

A step of an m x n matrix by Newton-Schulz iterations costs about ``m n min(m, n)``, so even bytes are uneven work. Here
matrices go to the rank with the least work whose bytes stay within a limit. The limit is ``max_byte_imbalance`` times
the mean, or the busiest rank of the plan by bytes alone if that has more: some models have parameters larger than that.

If others may be cut, as those of AdamW beside Muon, a bucket of DDP can hold both kinds. A cut parameter must be one
run of memory and each segment one message, so between two ranks that share a parameter no whole one can lie. Four
ranks, two matrices of 4 elements and an embedding of 24 (sizes in elements, without grain):

    elements   0        4       8                      24       28       32
               [ m0     |  e: 0..4 | 4..12 | 12..20 | 20..24 |     m1    ]
    owners     [     rank 0        | rank 1| rank 2 |      rank 3        ]

So only the first ranks, as many as whole parameters fill, and the last one own whole parameters of such a bucket; the
work that the ranks between lack there is made up for in the other buckets.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from ddp_zero.core.plan.elements import CutParameters, cuts_nearest
from ddp_zero.core.plan.ownership import Piece, Pieces, home, is_cut, whole
from ddp_zero.core.plan.partition import GroupRank, Item, Loads, partition_by_cost
from ddp_zero.core.plan.shard_plan import Bucket, ParameterSpec, ShardPlan, plan_standalone, segments_of

Layout = Sequence[Sequence[int]]
Deal = Callable[[Sequence[ParameterSpec], int], tuple[list[Pieces], Loads]]
"""Deals parameters with these costs, and at most so many bytes for a rank if possible; the owners and the loads."""


MAX_BYTE_IMBALANCE = 1.25
"""Default of ``max_byte_imbalance``."""


class WeightedParameters:
    """Parameters to ranks by cost and bytes; see `ddp_zero.core.plan.partitions.Partition`.

    Args:
        max_byte_imbalance: bytes of the busiest rank over the mean that a balanced cost may lead to; at least 1.
        cuts: whether parameters that may be cut are; else all stay whole.
        why: reason for the choice, if ``partition="auto"`` made it.
        is_native: True for even parts where a bucket holds only parameters that may be cut; see [Note: even parts].
    """

    def __init__(
        self, max_byte_imbalance: float, *, cuts: bool = False, why: str = "", is_native: bool = False
    ) -> None:
        self.name = "elements" if cuts else "parameters"
        self.cuts = cuts
        self.why = why
        self.max_byte_imbalance = max_byte_imbalance
        self._cutter = CutParameters(is_native=is_native)

    def assign(
        self, specs: Sequence[ParameterSpec], decided: Sequence[Pieces], world_size: int, cap: int
    ) -> list[Pieces]:
        """Active parameters first, then dormant ones; those already decided keep their pieces."""

        def dealt(specs: Sequence[ParameterSpec], limit: int) -> tuple[list[Pieces], Loads]:
            assigned, loads = list(decided), Loads(world_size)
            for spec, pieces in zip(specs, decided, strict=False):
                _load(loads, spec, pieces)
            assigned += [whole(GroupRank(0), spec.numel) for spec in specs[len(decided) :]]
            for active in (True, False):
                members = [index for index in range(len(decided), len(specs)) if specs[index].active is active]
                divisible = {index for index in members if self._may_cut(specs[index])}
                masked = [replace(spec, active=index in divisible) for index, spec in enumerate(specs)]
                for index, pieces in enumerate(self._cutter.assign(masked, [], world_size, cap) if divisible else ()):
                    if index in divisible:
                        assigned[index] = pieces
                        _load(loads, specs[index], pieces)
                _deal([(index,) for index in members if index not in divisible], specs, loads, assigned, limit)
            return assigned, loads

        return self._within_limit(dealt, specs)

    def assign_by_bucket(
        self,
        specs: Sequence[ParameterSpec],
        pieces: Sequence[Pieces],
        world_size: int,
        layout: Layout,
        split: bool,
        decided: int,
    ) -> list[Pieces]:
        """Over all of DDP's buckets at once: a bucket's lack of balance is made up for in others.

        Without ``split`` a whole bucket goes to one rank, unless parameters are cut: then each part is one message
        anyway.
        """
        left = [sorted(bucket) for bucket in layout[decided:]]
        free = {param for bucket in left for param in bucket}

        def dealt(specs: Sequence[ParameterSpec], limit: int) -> tuple[list[Pieces], Loads]:
            assigned, loads = list(pieces), Loads(world_size)
            for index, held in enumerate(pieces):
                if index not in free and specs[index].active:
                    _load(loads, specs[index], held)
            if split or self.cuts:
                rest = [param for bucket in left for param in self._cut_bucket(bucket, specs, loads, assigned, limit)]
                _deal([(param,) for param in rest], specs, loads, assigned, limit)
                _spread(rest, left, specs, assigned)
            else:
                _deal([tuple(bucket) for bucket in left if bucket], specs, loads, assigned, limit)
            return assigned, loads

        return self._within_limit(dealt, specs)

    def _within_limit(
        self,
        dealt: Callable[[Sequence[ParameterSpec], int], tuple[list[Pieces], Loads]],
        specs: Sequence[ParameterSpec],
    ) -> list[Pieces]:
        """Deal by cost; by bytes alone if the busiest rank would exceed the limit in spite of it."""
        by_bytes, loads = dealt([replace(spec, cost=0) for spec in specs], 0)
        limit = byte_limit(loads.nbytes, self.max_byte_imbalance)
        by_cost, loads = dealt(specs, limit)
        return by_cost if max(loads.nbytes) <= limit else by_bytes

    def plan(
        self, specs: Sequence[ParameterSpec], pieces: Sequence[Pieces], world_size: int, layout: Layout | None, cap: int
    ) -> ShardPlan:
        """One bucket per DDP bucket, then buckets of cut parameters and buckets of whole ones."""
        reduced = {param for bucket in layout or () for param in bucket}
        buckets = [
            replace(self._bucket(sorted(bucket), specs, pieces, world_size), index=index)
            for index, bucket in enumerate(layout or ())
        ]
        rest = [spec.active and index not in reduced for index, spec in enumerate(specs)]
        divisible = [replace(spec, active=one and self._may_cut(spec)) for spec, one in zip(specs, rest, strict=True)]
        undivided = [
            replace(spec, active=one and not self._may_cut(spec)) for spec, one in zip(specs, rest, strict=True)
        ]
        further = [
            *self._cutter.plan(divisible, pieces, world_size, None, cap).buckets,
            *plan_standalone(undivided, list(map(home, _undivided(undivided, pieces))), world_size, cap).buckets,
        ]
        buckets += [replace(bucket, index=len(buckets) + place) for place, bucket in enumerate(further)]
        return ShardPlan(world_size, tuple(specs), tuple(pieces), tuple(buckets))

    def bucket_over(
        self,
        index: int,
        params: Sequence[int],
        specs: Sequence[ParameterSpec],
        pieces: Sequence[Pieces],
        world_size: int,
    ) -> Bucket:
        """A bucket outside the plan: with the owners so far, or cut anew if any of it may be cut."""
        anew = list(pieces)
        active = sorted(param for param in params if specs[param].active)
        if any(is_cut(pieces[param]) or self._may_cut(specs[param]) for param in active):
            by_bytes, loads = [replace(spec, cost=0) for spec in specs], Loads(world_size)
            rest = self._cut_bucket(active, by_bytes, loads, anew, 0)
            _deal([(param,) for param in rest], by_bytes, loads, anew, 0)
        return replace(self._bucket(sorted(params), specs, anew, world_size), index=index)

    # One bucket

    def _may_cut(self, spec: ParameterSpec) -> bool:
        return self.cuts and spec.may_be_cut

    def _bucket(
        self, params: Sequence[int], specs: Sequence[ParameterSpec], pieces: Sequence[Pieces], world_size: int
    ) -> Bucket:
        active = [param for param in params if specs[param].active]
        if active and all(self._may_cut(specs[param]) for param in active):
            return self._cutter.bucket_of(0, params, specs, pieces, world_size)
        kind = specs[params[0]].kind if params else ""
        return Bucket(0, kind, segments_of(params, specs, pieces, world_size))

    def _cut_bucket(
        self,
        params: Sequence[int],
        specs: Sequence[ParameterSpec],
        loads: Loads,
        assigned: list[Pieces],
        limit: int,
    ) -> list[int]:
        """Cut the large parameters of a DDP bucket that may be cut, and return those that may go to any rank."""
        ranks = len(loads.costs)
        divisible = [param for param in params if self._may_cut(specs[param])]
        if divisible and len(divisible) == len(params):
            self._cutter.cut_anew(params, specs, ranks, assigned)
            for param in params:
                _load(loads, specs[param], assigned[param])
            return []
        total = sum(specs[param].numel for param in params)
        spine = [param for param in divisible if 2 * ranks * specs[param].numel > total]
        if not spine or ranks == 1:
            return list(params)
        uncut = [param for param in params if param not in spine]
        filled = -(-ranks * sum(specs[param].numel for param in uncut) // total)  # ranks that whole ones would fill
        first = min(max(0, filled - 2), ranks - 2)  # the first rank with a piece
        hosts = [*range(first + 1), ranks - 1]
        _deal([(param,) for param in uncut], specs, loads, assigned, limit, hosts)
        held = [0] * ranks
        for param in uncut:
            held[home(assigned[param])] += specs[param].numel
        for param, pieces in zip(
            spine, _cut_over([specs[one].numel for one in spine], held, range(first, ranks)), strict=True
        ):
            assigned[param] = pieces
            _load(loads, specs[param], pieces)
        return []


def _deal(
    bundles: Sequence[tuple[int, ...]],
    specs: Sequence[ParameterSpec],
    loads: Loads,
    assigned: list[Pieces],
    limit: int,
    ranks: Sequence[int] | None = None,
) -> None:
    """Assign bundles of parameters, each to one rank."""
    items = [Item(sum(specs[p].cost for p in one), sum(specs[p].nbytes for p in one)) for one in bundles]
    for bundle, owner in zip(bundles, partition_by_cost(items, loads, limit, ranks), strict=True):
        for param in bundle:
            assigned[param] = whole(owner, specs[param].numel)


def byte_limit(by_bytes: Sequence[int], max_byte_imbalance: float) -> int:
    """Bytes that the busiest rank may have, given each rank's bytes in the plan by bytes alone."""
    return max(math.floor(max_byte_imbalance * sum(by_bytes) / len(by_bytes)), *by_bytes)


def cost_loads(plan: ShardPlan) -> list[int]:
    """The cost of each rank's step, of active parameters; zeros if the plan knows no costs."""
    loads = Loads(plan.world_size)
    for spec, pieces in zip(plan.specs, plan.pieces, strict=True):
        if spec.active:
            _load(loads, spec, pieces)
    return loads.costs


def _load(loads: Loads, spec: ParameterSpec, pieces: Pieces) -> None:
    for piece in pieces:
        numel, all_numel = piece.stop - piece.start, max(spec.numel, 1)
        loads.add(piece.owner, Item(spec.cost * numel // all_numel, spec.nbytes * numel // all_numel))


def _undivided(specs: Sequence[ParameterSpec], pieces: Sequence[Pieces]) -> list[Pieces]:
    """The pieces of active parameters, all whole; of others any."""
    return [held if spec.active else whole(GroupRank(0), spec.numel) for spec, held in zip(specs, pieces, strict=True)]


def _cut_over(numels: Sequence[int], held: Sequence[int], ranks: range) -> list[Pieces]:
    """Cut parameters that lie end to end over consecutive ranks, so that these and what they hold are level."""
    shares = _levelled([held[rank] for rank in ranks], sum(numels))
    ends = [0, *accumulate(numels)]
    bounds = cuts_nearest(ends, [0, *accumulate(shares)])
    found = []
    for start, numel in zip(ends, numels, strict=False):
        pieces = [
            Piece(GroupRank(rank), max(low, start) - start, min(high, start + numel) - start)
            for rank, low, high in zip(ranks, bounds, bounds[1:], strict=False)
            if max(low, start) < min(high, start + numel)
        ]
        found.append(tuple(pieces))
    return found


def _levelled(held: Sequence[int], amount: int) -> list[int]:
    """Divide an amount so that the least loaded are filled up to one level; the shares add up to it."""
    order = sorted(range(len(held)), key=lambda place: held[place])
    filled, below = 0, 0
    for count, place in enumerate(order, start=1):
        below += held[place]
        filled, level = count, (below + amount) // count
        if count == len(order) or level <= held[order[count]]:
            break
    shares = [0] * len(held)
    for place in order[:filled]:
        shares[place] = max(0, level - held[place])
    shares[order[0]] += amount - sum(shares)
    return shares


def _spread(params: Sequence[int], layout: Layout, specs: Sequence[ParameterSpec], assigned: list[Pieces]) -> None:
    """Exchange the owners of equal parameters so that each bucket's bytes are spread; no rank's load changes.

    A bucket is as slow as its largest segment.
    """
    bucket_of = {param: position for position, bucket in enumerate(layout) for param in bucket}
    ranks = 1 + max((piece.owner for pieces in assigned for piece in pieces), default=0)
    held = [[0] * ranks for _ in layout]
    alike: dict[tuple[int, int, str], list[int]] = {}
    free = set(params)
    for param, position in bucket_of.items():
        if param in free:
            alike.setdefault((specs[param].cost, specs[param].nbytes, specs[param].kind), []).append(param)
        else:
            for piece in assigned[param]:
                held[position][piece.owner] += _bytes_of(specs[param], piece)
    for (_, nbytes, _), members in sorted(alike.items(), key=lambda one: (-one[0][1], -one[0][0], one[0][2])):
        remaining: dict[int, int] = {}
        for param in members:
            remaining[home(assigned[param])] = remaining.get(home(assigned[param]), 0) + 1
        for param in sorted(members, key=lambda one: (bucket_of[one], one)):
            here = held[bucket_of[param]]
            owner = min(remaining, key=lambda rank: _preference(here, remaining, rank))
            here[owner] += nbytes
            remaining[owner] -= 1
            if not remaining[owner]:
                del remaining[owner]
            assigned[param] = whole(GroupRank(owner), specs[param].numel)


def _preference(held: Sequence[int], remaining: Mapping[int, int], rank: int) -> tuple[int, int, int]:
    return held[rank], -remaining[rank], rank


def _bytes_of(spec: ParameterSpec, piece: Piece) -> int:
    return spec.nbytes * (piece.stop - piece.start) // max(spec.numel, 1)
