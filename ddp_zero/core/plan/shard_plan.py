"""`ShardPlan`: the immutable plan of ownership and buckets, in plain numbers.

A plan is computed from sizes and the number of ranks alone, so every rank builds the same plan without messages. The
parameters of one kind (device type and dtype) are cut into *buckets*, the units of the pipeline "step a bucket, send it
while stepping the next". The part of a bucket that one rank owns is a *segment*: parameters laid end to end, and one
message. Parameters are whole here; `elements.py` cuts them.

Seven fp32 parameters on two ranks, with a cap of 64 bytes a bucket (numbers are elements):

    parameter      0    1    2    3    4    5    6
    elements       8    4    6    2    4    6    2        128 bytes, so 2 buckets
    owner          0    0    1    1    0    1    1

                   rank 0                      rank 1
    bucket 0       [ p0: 0..8 ]                [ p2: 0..6 | p3: 6..8 ]
    bucket 1       [ p1: 0..4 | p4: 4..8 ]     [ p5: 0..6 | p6: 6..8 ]

Every bucket holds about the same share of every rank's parameters, so that ranks step and send at the same pace.
"""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ddp_zero.core.plan.ownership import Pieces, check_pieces, home, piece_of, whole
from ddp_zero.core.plan.partition import GroupRank, partition_greedy

Layout = Sequence[Sequence[int]]
"""Parameter indices of each DDP bucket."""


@dataclass(frozen=True)
class ParameterSpec:
    """Planning input for one parameter."""

    numel: int  # number of elements
    nbytes: int  # size in bytes
    kind: str  # device type and dtype, such as ``cpu/float32``. A bucket holds parameters of one kind.
    # True if a step can change it. A dormant parameter (frozen, without a gradient on any rank) has an owner but no
    # bucket.
    active: bool = True
    cost: int = 0  # cost of its step in any unit, the same for all; 0 if only bytes count
    may_be_cut: bool = True  # False if its step needs all of its elements on one rank, in a plan that cuts others
    owner: GroupRank | None = None  # the rank that must own all of it; None: the partition chooses

    def bytes_of(self, numel: int) -> int:
        """Bytes of so many of its elements."""
        return numel * self.nbytes // self.numel if numel else 0


@dataclass(frozen=True)
class Segment:
    """The part of a bucket that one rank owns: whole or cut parameters in one message, end to end unless even."""

    owner: GroupRank  # the rank that steps these parameters and sends them
    # parameter indices: one that the rank before holds the beginning of, whole ones, one that the rank after continues
    params: tuple[int, ...]
    offsets: tuple[int, ...]  # offset of each parameter in the segment, in elements
    numel: int  # length of the segment, in elements
    ranges: tuple[tuple[int, int], ...]  # elements of each parameter in the segment, as start and stop
    is_even: bool = False  # True if gaps make all segments of the bucket equally long; see [Note: even parts]

    @property
    def ends(self) -> list[int]:
        """End of each parameter in the segment, in elements."""
        return [at + stop - start for at, (start, stop) in zip(self.offsets, self.ranges, strict=True)]


@dataclass(frozen=True)
class Bucket:
    """A unit of the pipeline: one segment per rank, in rank order, possibly empty, all of one kind."""

    index: int
    kind: str
    segments: tuple[Segment, ...]

    @property
    def is_even(self) -> bool:
        return self.segments[0].is_even

    @property
    def sizes(self) -> list[int]:
        """Elements of each segment."""
        return [segment.numel for segment in self.segments]

    @property
    def starts(self) -> dict[int, int]:
        """Offset of each parameter by index, in elements, if the segments lie one after the other."""
        found: dict[int, int] = {}
        begin = 0
        for segment in self.segments:
            for param, offset, (first, _) in zip(segment.params, segment.offsets, segment.ranges, strict=True):
                found.setdefault(param, begin + offset - first)
            begin += segment.numel
        return found


@dataclass(frozen=True)
class Ownership:
    """The owner of every element of every parameter."""

    world_size: int  # number of ranks
    specs: tuple[ParameterSpec, ...]  # one per parameter, in the optimizer's order
    pieces: tuple[Pieces, ...]  # owned elements of each parameter

    @property
    def owners(self) -> tuple[GroupRank, ...]:
        """The owner of each parameter's first element, and of the whole parameter unless it is cut."""
        return tuple(map(home, self.pieces))

    def active(self, params: Iterable[int]) -> list[int]:
        """Those among these parameters that a step can change."""
        return [param for param in params if self.specs[param].active]

    def with_active(self, params: Collection[int]) -> "Ownership":
        """The same owners, with only these parameters active, if they are."""
        specs = (replace(spec, active=spec.active and param in params) for param, spec in enumerate(self.specs))
        return Ownership(self.world_size, tuple(specs), self.pieces)

    def with_pieces(self, pieces: Sequence[Pieces]) -> "Ownership":
        return Ownership(self.world_size, self.specs, tuple(pieces))

    def in_buckets(self, buckets: Iterable["Bucket"]) -> "ShardPlan":
        """The plan with these buckets, which are numbered in this order."""
        numbered = (replace(bucket, index=index) for index, bucket in enumerate(buckets))
        return ShardPlan(self.world_size, self.specs, self.pieces, tuple(numbered))


def whole_parameters(specs: Sequence[ParameterSpec], owners: Sequence[GroupRank], world_size: int) -> Ownership:
    pieces = (whole(owner, spec.numel) for spec, owner in zip(specs, owners, strict=True))
    return Ownership(world_size, tuple(specs), tuple(pieces))


@dataclass(frozen=True)
class ShardPlan(Ownership):
    """The owner and the bucket of every parameter.

    Asserts that the pieces of an active parameter are in exactly one bucket, each in the segment of its owner, with its
    kind; that a segment's offsets lay its parameters end to end; and that pieces cover their parameter.
    """

    buckets: tuple[Bucket, ...]  # buckets in the order in which every rank steps and syncs them

    def __post_init__(self) -> None:
        assert len(self.pieces) == len(self.specs), f"owners of {len(self.pieces)} of {len(self.specs)} parameters"
        for param, (pieces, spec) in enumerate(zip(self.pieces, self.specs, strict=True)):
            check_pieces(pieces, spec.numel, self.world_size, param)
        bucket_of: dict[int, int] = {}
        for position, bucket in enumerate(self.buckets):
            assert bucket.index == position, f"bucket {bucket.index} is at position {position}"
            self._check_bucket(bucket, bucket_of)
        for param, spec in enumerate(self.specs):
            assert param in bucket_of or not spec.active, f"active parameter {param} is in no bucket"

    def digest(self, *more: object) -> int:
        """A 63-bit hash of everything that affects messages, and of ``more``."""
        layout = [(bucket.kind, [(one.params, one.is_even) for one in bucket.segments]) for bucket in self.buckets]
        pieces = [[(piece.owner, piece.stop) for piece in pieces] for pieces in self.pieces]
        text = repr((self.world_size, pieces, [(spec.numel, spec.kind) for spec in self.specs], layout, more))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def cost_loads(self) -> list[int]:
        """The cost of each rank's step, of active parameters; zeros if the plan knows no costs."""
        costs = [0] * self.world_size
        for spec, pieces in zip(self.specs, self.pieces, strict=True):
            for piece in pieces if spec.active else ():
                costs[piece.owner] += spec.cost * (piece.stop - piece.start) // max(spec.numel, 1)
        return costs

    def _check_bucket(self, bucket: Bucket, bucket_of: dict[int, int]) -> None:
        owners = [segment.owner for segment in bucket.segments]
        assert owners == list(range(self.world_size)), f"bucket {bucket.index} has segments of ranks {owners}"
        for segment in bucket.segments:
            where = f"bucket {bucket.index}, rank {segment.owner}"
            known = range(len(self.specs))
            assert all(param in known for param in segment.params), f"{where}: parameters {segment.params} of {known}"
            if segment.is_even:
                self._check_even(bucket, segment)
            else:
                ends = [0, *accumulate(stop - start for start, stop in segment.ranges)]
                at = [*segment.offsets, segment.numel]
                assert at == ends, f"{where}: parameters at {at[:-1]} to {at[-1]}, not at {ends}"
        found = Counter(param for segment in bucket.segments for param in segment.params)
        for param, count in found.items():
            assert param not in bucket_of, f"parameter {param} is in two buckets, {bucket_of[param]} and {bucket.index}"
            pieces = len(self.pieces[param])
            assert count == pieces, f"{count} of {pieces} pieces of parameter {param} in bucket {bucket.index}"
        bucket_of.update(dict.fromkeys(found, bucket.index))
        for segment in bucket.segments:
            for param, held in zip(segment.params, segment.ranges, strict=True):
                spec = self.specs[param]
                piece = piece_of(self.pieces[param], segment.owner)
                where = f"parameter {param} in bucket {bucket.index}, rank {segment.owner}"
                expected = None if piece is None else (piece.start, piece.stop)
                assert held == expected, f"{where}: {held} of {self.pieces[param]}"
                assert (spec.kind, spec.active) == (bucket.kind, True), f"{where} of {bucket.kind}: {spec}"

    def _check_even(self, bucket: Bucket, segment: Segment) -> None:
        starts = segment.offsets
        ends = [0, *segment.ends]
        overlaps = any(start < end for start, end in zip((*starts, segment.numel), ends, strict=True))
        lengths = [one.numel for one in bucket.segments]
        where = f"bucket {bucket.index}, rank {segment.owner}"
        assert not overlaps, f"{where}: parameters from {list(starts)} to {ends[1:]} of {segment.numel}"
        assert set(lengths) == {segment.numel}, f"{where}: segments of {lengths}"


class Partition(ABC):
    """Divides parameters among ranks. Pure: every rank computes the same."""

    name: str  # the value of ``partition=``
    cuts: bool  # whether several ranks may own parts of one parameter
    why: str  # the reason for the choice if ``partition="auto"`` made it; else empty
    max_byte_imbalance: float | None = None  # the bound of a partition by cost

    @abstractmethod
    def assign(
        self, specs: Sequence[ParameterSpec], world_size: int, cap: int, decided: Sequence[Pieces] = ()
    ) -> Ownership:
        """Owners of all parameters, in buckets of ``cap`` bytes; the leading ones keep the pieces in ``decided``."""

    @abstractmethod
    def assign_by_bucket(self, owned: Ownership, layout: Layout, split: bool = True) -> Ownership:
        """Owners of all parameters once DDP's buckets are known; see `owners_by_bucket`."""

    def plan(self, owned: Ownership, layout: Layout | None, cap: int) -> ShardPlan:
        """One bucket per DDP bucket, at the same index, then buckets of about ``cap`` bytes of the other active ones.

        The layout lacks parameters of other optimizers, so a bucket may be empty.
        """
        reduced = {param for bucket in layout or () for param in bucket}
        rest = owned.with_active(set(range(len(owned.specs))) - reduced)
        of_ddp = (self.bucket(owned, sorted(bucket)) for bucket in layout or ())
        return owned.in_buckets([*of_ddp, *self.further(rest, cap)])

    def may_cut(self, spec: ParameterSpec) -> bool:
        return self.cuts and spec.may_be_cut

    def bucket(self, owned: Ownership, params: Sequence[int], index: int = 0) -> Bucket:
        return bucket_of(owned, params, index)

    @abstractmethod
    def further(self, owned: Ownership, cap: int) -> Iterable[Bucket]:
        """Buckets of about ``cap`` bytes that hold all active parameters."""


def plan_standalone(
    specs: Sequence[ParameterSpec], owners: Sequence[GroupRank], world_size: int, bucket_cap_bytes: int
) -> ShardPlan:
    """The plan of parameters that are not cut; see `standalone_buckets`."""
    owned = whole_parameters(specs, owners, world_size)
    return owned.in_buckets(standalone_buckets(owned, bucket_cap_bytes))


def standalone_buckets(owned: Ownership, bucket_cap_bytes: int) -> list[Bucket]:
    """Cut the active parameters of each kind, which are whole, into buckets of about ``bucket_cap_bytes``.

    The owners are given; only the bucket of each parameter is decided here. Each rank's parameters of a kind are cut
    into the same number of runs of about the same size, and run *k* of every rank makes bucket *k*. The cap bounds the
    average size of the buckets of a kind. A single bucket can exceed it: parameters are never cut.
    """
    assert bucket_cap_bytes > 0, f"a bucket cap of {bucket_cap_bytes} bytes"
    specs, members = owned.specs, dict[str, list[list[int]]]()
    for param, (spec, pieces) in enumerate(zip(specs, owned.pieces, strict=True)):
        if spec.active:
            check_pieces(pieces, spec.numel, owned.world_size, param)
            members.setdefault(spec.kind, [[] for _ in range(owned.world_size)])[pieces[0].owner].append(param)
    buckets: list[Bucket] = []
    for kind, params_per_rank in members.items():
        total = sum(specs[param].nbytes for params in params_per_rank for param in params)
        num_runs = min(max(1, -(-total // bucket_cap_bytes)), max(map(len, params_per_rank)))
        runs_per_rank = [cut([specs[p].nbytes for p in params], params, num_runs) for params in params_per_rank]
        for run in range(num_runs):
            segments = [_segment(GroupRank(rank), runs[run], owned.pieces) for rank, runs in enumerate(runs_per_rank)]
            if any(segment.params for segment in segments):
                buckets.append(Bucket(len(buckets), kind, tuple(segments)))
    return buckets


def bucket_of(owned: Ownership, params: Sequence[int], index: int = 0) -> Bucket:
    """The bucket of these parameters: the active ones, in this order but ends of cut ones at their seams."""
    of_rank: list[list[tuple[int, int]]] = [[] for _ in range(owned.world_size)]
    for param in owned.active(params):
        for piece in owned.pieces[param]:
            seam = 0 if piece.start else 2 if piece.stop < owned.specs[param].numel else 1
            of_rank[piece.owner].append((seam, param))
    ordered = [[param for _, param in sorted(held, key=lambda one: one[0])] for held in of_rank]
    segments = (_segment(GroupRank(rank), members, owned.pieces) for rank, members in enumerate(ordered))
    return Bucket(index, owned.specs[params[0]].kind if params else "", tuple(segments))


def owners_by_bucket(
    sizes: Sequence[int], owners: Sequence[GroupRank], world_size: int, layout: Sequence[Sequence[int]], split: bool
) -> list[GroupRank]:
    """Assign the parameters of each DDP bucket, carrying the loads from bucket to bucket.

    Sorted greedy inside each bucket if ``split``, else a whole bucket goes to the least loaded rank. A parameter in no
    bucket keeps its owner.
    """
    assigned = list(owners)
    loads = [0] * world_size
    for bucket in layout:
        params = sorted(bucket)
        if split:
            chosen = partition_greedy([sizes[param] for param in params], world_size, loads)
        else:
            chosen = partition_greedy([sum(sizes[param] for param in params)], world_size, loads) * len(params)
        for param, owner in zip(params, chosen, strict=True):
            assigned[param] = owner
            loads[owner] += sizes[param]
    return assigned


def _segment(owner: GroupRank, params: Sequence[int], pieces: Sequence[Pieces]) -> Segment:
    found = [piece_of(pieces[param], owner) for param in params]
    ranges = tuple((piece.start, piece.stop) for piece in found if piece is not None)
    ends = [0, *accumulate(stop - start for start, stop in ranges)]
    return Segment(owner, tuple(params), tuple(ends[:-1]), ends[-1], ranges)


def cut(sizes: Sequence[int], items: Sequence[int], num_runs: int) -> list[list[int]]:
    """Cut items, in order, into runs of about equal size: an item goes to the run that holds its middle."""
    runs: list[list[int]] = [[] for _ in range(num_runs)]
    total = max(1, sum(sizes))
    start = 0
    for item, size in zip(items, sizes, strict=True):
        middle = 2 * start + size
        runs[min(num_runs - 1, middle * num_runs // (2 * total))].append(item)
        start += size
    return runs
