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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ddp_zero.core.plan.ownership import Pieces, check_pieces, home, piece_of, whole
from ddp_zero.core.plan.partition import GroupRank, partition_greedy


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
        """True if its segments are equally long and adjacent; see [Note: even parts]."""
        return self.segments[0].is_even

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
class ShardPlan:
    """The owner and the bucket of every parameter.

    Raises:
        ValueError: if the pieces of an active parameter are not in exactly one bucket, each in the segment of its
            owner, with its kind; if a segment's offsets do not lay its parameters end to end; or if pieces do not cover
            their parameter.
    """

    world_size: int  # number of ranks
    specs: tuple[ParameterSpec, ...]  # one per parameter, in the optimizer's order
    pieces: tuple[Pieces, ...]  # owned elements of each parameter
    buckets: tuple[Bucket, ...]  # buckets in the order in which every rank steps and syncs them

    def __post_init__(self) -> None:
        if len(self.pieces) != len(self.specs):
            raise ValueError(
                f"Expected one owner for each of {len(self.specs)} parameters, got {len(self.pieces)}. [ZERO-199]"
            )
        for param, (pieces, spec) in enumerate(zip(self.pieces, self.specs, strict=True)):
            check_pieces(pieces, spec.numel, self.world_size, param)
        bucket_of: dict[int, int] = {}
        for position, bucket in enumerate(self.buckets):
            if bucket.index != position:
                raise ValueError(
                    f"Expected bucket {position} at position {position}, got bucket {bucket.index}. [ZERO-199]"
                )
            self._check_bucket(bucket, bucket_of)
        for param, spec in enumerate(self.specs):
            if spec.active and param not in bucket_of:
                raise ValueError(f"Active parameter {param} is in no bucket. [ZERO-199]")

    @property
    def owners(self) -> tuple[GroupRank, ...]:
        """The owner of each parameter's first element, and of the whole parameter unless it is cut."""
        return tuple(map(home, self.pieces))

    def digest(self, *more: object) -> int:
        """A 63-bit hash of everything that affects messages, and of ``more``."""
        layout = [(bucket.kind, [(one.params, one.is_even) for one in bucket.segments]) for bucket in self.buckets]
        pieces = [[(piece.owner, piece.stop) for piece in pieces] for pieces in self.pieces]
        text = repr((self.world_size, pieces, [(spec.numel, spec.kind) for spec in self.specs], layout, more))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def _check_bucket(self, bucket: Bucket, bucket_of: dict[int, int]) -> None:
        if [segment.owner for segment in bucket.segments] != list(range(self.world_size)):
            raise ValueError(f"Expected one segment per rank in rank order in bucket {bucket.index}. [ZERO-199]")
        for segment in bucket.segments:
            unknown = [param for param in segment.params if not 0 <= param < len(self.specs)]
            if unknown:
                raise ValueError(
                    f"Expected parameters below {len(self.specs)}, got parameter {unknown[0]} in bucket "
                    f"{bucket.index}, rank {segment.owner}. [ZERO-199]"
                )
            ends = [0, *accumulate(stop - start for start, stop in segment.ranges)]
            if segment.is_even:
                self._check_even(bucket, segment)
            elif list(segment.offsets) != ends[:-1] or segment.numel != ends[-1]:
                raise ValueError(
                    f"Expected the parameters of bucket {bucket.index}, rank {segment.owner} end to end at "
                    f"{ends[:-1]}, got {list(segment.offsets)} and length {segment.numel}. [ZERO-199]"
                )
        self._check_count(bucket, bucket_of)
        for segment in bucket.segments:
            for param, held in zip(segment.params, segment.ranges, strict=True):
                self._check_member(bucket, segment, param, held)

    def _check_even(self, bucket: Bucket, segment: Segment) -> None:
        starts, ends = segment.offsets, [0, *segment.ends]
        overlaps = any(start < end for start, end in zip((*starts, segment.numel), ends, strict=True))
        if overlaps or any(one.numel != segment.numel for one in bucket.segments):
            raise ValueError(
                f"Expected the parameters of bucket {bucket.index}, rank {segment.owner} one after the other in "
                f"segments of one length, got offsets {list(starts)}, ends {ends[1:]} and lengths "
                f"{[one.numel for one in bucket.segments]}. [ZERO-199]"
            )

    def _check_count(self, bucket: Bucket, bucket_of: dict[int, int]) -> None:
        found = Counter(param for segment in bucket.segments for param in segment.params)
        for param, count in found.items():
            if param in bucket_of:
                raise ValueError(
                    f"Parameter {param} is in two buckets, {bucket_of[param]} and {bucket.index}. [ZERO-199]"
                )
            if count != len(self.pieces[param]):
                raise ValueError(
                    f"Expected all {len(self.pieces[param])} pieces of parameter {param} in bucket {bucket.index}, got "
                    f"{count}. [ZERO-199]"
                )
        bucket_of.update(dict.fromkeys(found, bucket.index))

    def _check_member(self, bucket: Bucket, segment: Segment, param: int, held: tuple[int, int]) -> None:
        spec, piece = self.specs[param], piece_of(self.pieces[param], segment.owner)
        if piece is None or held != (piece.start, piece.stop):
            raise ValueError(
                f"Expected parameter {param} with its owners, {self.pieces[param]}, got elements {held[0]} to "
                f"{held[1]} in a segment of rank {segment.owner} (bucket {bucket.index}). [ZERO-199]"
            )
        if spec.kind != bucket.kind or not spec.active:
            raise ValueError(
                f"Expected an active parameter of kind {bucket.kind} in bucket {bucket.index}, got parameter {param}: "
                f"{spec}. [ZERO-199]"
            )


def plan_standalone(
    specs: Sequence[ParameterSpec], owners: Sequence[GroupRank], world_size: int, bucket_cap_bytes: int
) -> ShardPlan:
    """Cut the active parameters of each kind into buckets of about ``bucket_cap_bytes``.

    The owners are given; only the bucket of each parameter is decided here. Each rank's parameters of a kind are cut
    into the same number of runs of about the same size, and run *k* of every rank makes bucket *k*. The cap bounds the
    average size of the buckets of a kind. A single bucket can exceed it: parameters are never cut.
    """
    if bucket_cap_bytes < 1:
        raise ValueError(f"Expected a bucket cap of at least 1 byte, got {bucket_cap_bytes}. [ZERO-199]")
    members: dict[str, list[list[int]]] = {}
    for param, (spec, owner) in enumerate(zip(specs, owners, strict=True)):
        if spec.active:
            if not 0 <= owner < world_size:
                raise ValueError(
                    f"Expected parameter {param} to have an owner below {world_size}, got {owner}. [ZERO-199]"
                )
            if spec.kind not in members:
                members[spec.kind] = [[] for _ in range(world_size)]
            members[spec.kind][owner].append(param)

    pieces = whole_pieces(specs, owners)
    buckets: list[Bucket] = []
    for kind, params_per_rank in members.items():
        total = sum(specs[param].nbytes for params in params_per_rank for param in params)
        num_runs = min(max(1, -(-total // bucket_cap_bytes)), max(map(len, params_per_rank)))
        runs_per_rank = [cut([specs[p].nbytes for p in params], params, num_runs) for params in params_per_rank]
        for run in range(num_runs):
            segments = tuple(_segment(GroupRank(rank), runs[run], pieces) for rank, runs in enumerate(runs_per_rank))
            if any(segment.params for segment in segments):
                buckets.append(Bucket(len(buckets), kind, segments))
    return ShardPlan(world_size, tuple(specs), pieces, tuple(buckets))


def plan_for_ddp(
    specs: Sequence[ParameterSpec],
    owners: Sequence[GroupRank],
    world_size: int,
    layout: Sequence[Sequence[int]],
    bucket_cap_bytes: int,
) -> ShardPlan:
    """Build one bucket per DDP bucket, at the same index, then buckets of active parameters that DDP does not reduce.

    The layout excludes parameters of other optimizers, so a bucket may be empty.
    """
    reduced = {param for bucket in layout for param in bucket}
    outside = [replace(spec, active=spec.active and param not in reduced) for param, spec in enumerate(specs)]
    buckets = []
    for index, params in enumerate(layout):
        buckets.append(plan_bucket(index, params, specs, owners, world_size))
    for bucket in plan_standalone(outside, owners, world_size, bucket_cap_bytes).buckets:
        buckets.append(replace(bucket, index=len(buckets)))
    return ShardPlan(world_size, tuple(specs), whole_pieces(specs, owners), tuple(buckets))


def plan_bucket(
    index: int, params: Sequence[int], specs: Sequence[ParameterSpec], owners: Sequence[GroupRank], world_size: int
) -> Bucket:
    """Build the bucket of a DDP bucket: its active parameters, in one segment per rank."""
    segments = segments_of(sorted(params), specs, whole_pieces(specs, owners), world_size)
    return Bucket(index, specs[params[0]].kind if params else "", segments)


def segments_of(
    params: Sequence[int], specs: Sequence[ParameterSpec], pieces: Sequence[Pieces], world_size: int
) -> tuple[Segment, ...]:
    """Segments of the active parameters among ``params``, in this order, but ends of cut parameters at their seams."""
    of_rank: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for param in params:
        for piece in pieces[param] if specs[param].active else ():
            seam = 0 if piece.start else 2 if piece.stop < specs[param].numel else 1
            of_rank[piece.owner].append((seam, param))
    ordered = [[param for _, param in sorted(held, key=lambda one: one[0])] for held in of_rank]
    return tuple(_segment(GroupRank(rank), ordered[rank], pieces) for rank in range(world_size))


def whole_pieces(specs: Sequence[ParameterSpec], owners: Sequence[GroupRank]) -> tuple[Pieces, ...]:
    """Pieces of parameters that are not cut."""
    return tuple(whole(owner, spec.numel) for spec, owner in zip(specs, owners, strict=True))


def owners_by_bucket(
    sizes: Sequence[int],
    owners: Sequence[GroupRank],
    world_size: int,
    layout: Sequence[Sequence[int]],
    split: bool,
    decided: int = 0,
) -> list[GroupRank]:
    """Assign the parameters of each DDP bucket, carrying the loads from bucket to bucket.

    Sorted greedy inside each bucket if ``split``, else a whole bucket goes to the least loaded rank. A parameter in no
    bucket keeps its owner, as do the parameters of the first ``decided`` buckets, whose gradients are already in
    flight.
    """
    assigned = list(owners)
    loads = [0] * world_size
    for position, bucket in enumerate(layout):
        params = sorted(bucket)
        if position < decided:
            chosen = [owners[param] for param in params]
        elif split:
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
