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

A parameter with a stated owner goes there, before others are dealt; plans that cut parameters have none.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from ddp_zero.core.plan.elements import CutParameters, cut_at
from ddp_zero.core.plan.ownership import Piece, Pieces, home, whole
from ddp_zero.core.plan.partition import GroupRank, Item, Loads, partition_by_cost
from ddp_zero.core.plan.shard_plan import (
    Bucket,
    Layout,
    Ownership,
    ParameterSpec,
    Partition,
    bucket_of,
    standalone_buckets,
)

MAX_BYTE_IMBALANCE = 1.25
"""Default of ``max_byte_imbalance``."""


class WeightedParameters(Partition):
    """Parameters to ranks by cost and bytes.

    Bytes of the busiest rank over the mean, which a balanced cost may raise, stay within ``max_byte_imbalance``, at
    least 1. With ``cuts`` parameters that may be cut are, with ``is_native`` in even parts where a bucket holds no
    others; see [Note: even parts]. ``why`` is the reason for the choice, if ``partition="auto"`` made it.
    """

    max_byte_imbalance: float

    def __init__(
        self, max_byte_imbalance: float, *, cuts: bool = False, why: str = "", is_native: bool = False
    ) -> None:
        self.name = "elements" if cuts else "parameters"
        self.cuts = cuts
        self.why = why
        self.max_byte_imbalance = max_byte_imbalance
        self._cutter = CutParameters(is_native=is_native)

    @classmethod
    def like(cls, chosen: Partition, max_byte_imbalance: float, is_native: bool = False) -> "WeightedParameters":
        """By cost instead of by bytes, with parameters cut or whole as in a partition that was chosen."""
        return cls(max_byte_imbalance, cuts=chosen.cuts, why=chosen.why, is_native=is_native)

    def assign(
        self, specs: Sequence[ParameterSpec], world_size: int, cap: int, decided: Sequence[Pieces] = ()
    ) -> Ownership:
        """Active parameters first, then dormant ones; those already decided keep their pieces."""
        undecided = (whole(GroupRank(0), spec.numel) for spec in specs[len(decided) :])
        owned = Ownership(world_size, tuple(specs), (*decided, *undecided))

        def deal(dealing: _Dealing) -> None:
            dealing.keep(range(len(decided)))
            added = range(len(decided), len(specs))
            for index in added:
                if (owner := specs[index].owner) is not None:
                    dealing.give(index, whole(owner, specs[index].numel))
            for active in (True, False):
                members = [index for index in added if specs[index].active is active and specs[index].owner is None]
                divisible = {index for index in members if self.may_cut(specs[index])}
                if divisible:
                    masked = [replace(spec, active=index in divisible) for index, spec in enumerate(specs)]
                    cut = self._cutter.assign(masked, world_size, cap).pieces
                    for index in divisible:
                        dealing.give(index, cut[index])
                dealing.deal([(index,) for index in members if index not in divisible])

        return self._within_limit(owned, deal)

    def assign_by_bucket(self, owned: Ownership, layout: Layout, split: bool = True) -> Ownership:
        """Over all of DDP's buckets at once: a bucket's lack of balance is made up for in others.

        Without ``split`` a whole bucket goes to one rank, unless each part is one message anyway.
        """
        left = [sorted(param for param in bucket if owned.specs[param].owner is None) for bucket in layout]
        free = {param for bucket in left for param in bucket}

        def deal(dealing: _Dealing) -> None:
            dealing.keep(param for param in owned.active(range(len(owned.specs))) if param not in free)
            if split or self.cuts:
                rest = [param for bucket in left for param in self._cut_bucket(bucket, dealing)]
                dealing.deal([(param,) for param in rest])
                dealing.spread(rest, left)
            else:
                dealing.deal([tuple(bucket) for bucket in left if bucket])

        return self._within_limit(owned, deal)

    def _within_limit(self, owned: Ownership, deal: "Callable[[_Dealing], None]") -> Ownership:
        """Deal by cost; by bytes alone if the busiest rank would exceed the limit in spite of it."""
        by_bytes = _Dealing(owned, [replace(spec, cost=0) for spec in owned.specs], limit=0)
        deal(by_bytes)
        limit = byte_limit(by_bytes.loads.nbytes, self.max_byte_imbalance)
        by_cost = _Dealing(owned, owned.specs, limit)
        deal(by_cost)
        return owned.with_pieces((by_cost if max(by_cost.loads.nbytes) <= limit else by_bytes).pieces)

    def further(self, owned: Ownership, cap: int) -> Iterable[Bucket]:
        """Buckets of cut parameters, then buckets of whole ones."""
        divisible = {index for index, spec in enumerate(owned.specs) if self.may_cut(spec)}
        undivided = owned.with_active(set(range(len(owned.specs))) - divisible)
        return [*self._cutter.further(owned.with_active(divisible), cap), *standalone_buckets(undivided, cap)]

    def bucket(self, owned: Ownership, params: Sequence[int], index: int = 0) -> Bucket:
        """The bucket of these parameters, in even parts if all of them may be cut."""
        active = owned.active(params)
        is_divisible = active and all(self.may_cut(owned.specs[param]) for param in active)
        return self._cutter.bucket(owned, params, index) if is_divisible else bucket_of(owned, params, index)

    def _cut_bucket(self, params: Sequence[int], dealing: "_Dealing") -> list[int]:
        """Cut the large parameters of a DDP bucket that may be cut, and return those that may go to any rank."""
        owned, specs = dealing.owned, dealing.owned.specs
        ranks = owned.world_size
        divisible = [param for param in params if self.may_cut(specs[param])]
        if divisible and len(divisible) == len(params):
            pieces = self._cutter.cut_anew(owned, [params]).pieces
            for param in params:
                dealing.give(param, pieces[param])
            return []
        total = sum(specs[param].numel for param in params)
        spine = [param for param in divisible if 2 * ranks * specs[param].numel > total]
        if not spine or ranks == 1:
            return list(params)
        uncut = [param for param in params if param not in spine]
        filled = -(-ranks * sum(specs[param].numel for param in uncut) // total)  # ranks that whole ones would fill
        first = min(max(0, filled - 2), ranks - 2)  # the first rank with a piece
        dealing.deal([(param,) for param in uncut], [*range(first + 1), ranks - 1])
        held = [0] * ranks
        for param in uncut:
            held[home(dealing.pieces[param])] += specs[param].numel
        numels = [specs[one].numel for one in spine]
        holders = range(first, ranks)
        shares = _level([held[rank] for rank in holders], sum(numels))
        for param, parts in zip(spine, cut_at(numels, [0, *accumulate(shares)], holders), strict=True):
            dealing.give(param, parts)
        return []


class _Dealing:
    """Parameters on their way to new owners, and each rank's load so far: at most ``limit`` bytes, if possible."""

    def __init__(self, owned: Ownership, specs: Sequence[ParameterSpec], limit: int) -> None:
        self.owned = owned
        self.pieces = list(owned.pieces)
        self.loads = Loads(owned.world_size)
        self._specs = specs
        self._limit = limit

    def keep(self, params: Iterable[int]) -> None:
        for param in params:
            self.give(param, self.pieces[param])

    def give(self, param: int, pieces: Pieces) -> None:
        self.pieces[param] = pieces
        _load(self.loads, self._specs[param], pieces)

    def deal(self, bundles: Sequence[tuple[int, ...]], ranks: Sequence[int] | None = None) -> None:
        """Assign bundles of parameters, each to one rank, of these or of all."""
        specs = self._specs
        items = [Item(sum(specs[p].cost for p in one), sum(specs[p].nbytes for p in one)) for one in bundles]
        for bundle, owner in zip(bundles, partition_by_cost(items, self.loads, self._limit, ranks), strict=True):
            for param in bundle:
                self.pieces[param] = whole(owner, specs[param].numel)

    def spread(self, params: Sequence[int], layout: Layout) -> None:
        """Exchange the owners of equal parameters so that each bucket's bytes are spread; no rank's load changes.

        A bucket is as slow as its largest segment.
        """
        specs = self._specs
        free = set(params)
        bucket_of_param = {param: position for position, bucket in enumerate(layout) for param in bucket}
        held = [[0] * self.owned.world_size for _ in layout]
        alike: dict[tuple[int, int, str], list[int]] = {}
        for param, position in bucket_of_param.items():
            if param in free:
                alike.setdefault((specs[param].cost, specs[param].nbytes, specs[param].kind), []).append(param)
            else:
                for piece in self.pieces[param]:
                    held[position][piece.owner] += _bytes_of(specs[param], piece)
        for (_, nbytes, _), members in sorted(alike.items(), key=lambda one: (-one[0][1], -one[0][0], one[0][2])):
            remaining = Counter(home(self.pieces[param]) for param in members)
            for param in sorted(members, key=lambda one: (bucket_of_param[one], one)):
                here = held[bucket_of_param[param]]
                owner = min(remaining, key=lambda rank: (here[rank], -remaining[rank], rank))
                here[owner] += nbytes
                remaining[owner] -= 1
                if not remaining[owner]:
                    del remaining[owner]
                self.pieces[param] = whole(owner, specs[param].numel)


def byte_limit(by_bytes: Sequence[int], max_byte_imbalance: float) -> int:
    """Bytes that the busiest rank may have, given each rank's bytes in the plan by bytes alone."""
    return max(math.floor(max_byte_imbalance * sum(by_bytes) / len(by_bytes)), *by_bytes)


def _load(loads: Loads, spec: ParameterSpec, pieces: Pieces) -> None:
    for piece in pieces:
        cost = spec.cost * (piece.stop - piece.start) // max(spec.numel, 1)
        loads.add(piece.owner, Item(cost, _bytes_of(spec, piece)))


def _level(held: Sequence[int], amount: int) -> list[int]:
    """Divide an amount so that the least loaded are filled up to one level; the shares add up to it."""
    order = sorted(range(len(held)), key=lambda place: held[place])
    filled, below = 0, 0
    for count, place in enumerate(order, start=1):
        below += held[place]
        filled = count
        level = (below + amount) // count
        if count == len(order) or level <= held[order[count]]:
            break
    shares = [0] * len(held)
    for place in order[:filled]:
        shares[place] = max(0, level - held[place])
    shares[order[0]] += amount - sum(shares)
    return shares


def _bytes_of(spec: ParameterSpec, piece: Piece) -> int:
    return spec.nbytes * (piece.stop - piece.start) // max(spec.numel, 1)
