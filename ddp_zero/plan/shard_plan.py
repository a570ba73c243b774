"""Who owns what, as plain numbers: specs and owners in, an immutable `ShardPlan` out.

A plan is computed from sizes and the number of ranks alone, so every rank builds the same one without messages. The
parameters of one kind (device type and dtype) are cut into *buckets*, the units of the pipeline "step a bucket, send
it while stepping the next". What one rank owns of one bucket is a *segment*: a run of whole parameters laid end to end,
and one message. Seven fp32 parameters on two ranks, with a cap of 64 bytes a bucket (numbers are elements):

    parameter      0    1    2    3    4    5    6
    elements       8    4    6    2    4    6    2        128 bytes, so 2 buckets
    owner          0    0    1    1    0    1    1

                   rank 0                      rank 1
    bucket 0       [ p0: 0..8 ]                [ p2: 0..6 | p3: 6..8 ]
    bucket 1       [ p1: 0..4 | p4: 4..8 ]     [ p5: 0..6 | p6: 6..8 ]

Every bucket holds about the same share of every rank's parameters, so that ranks step and send at the same pace.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ddp_zero.plan.partition import GroupRank, partition_greedy


@dataclass(frozen=True)
class ParameterSpec:
    """What a plan needs to know about one parameter.

    Attributes:
        numel: number of elements.
        nbytes: size in bytes.
        kind: device type and dtype, such as ``cpu/float32``. A bucket holds parameters of one kind.
        active: whether a step can change it. A dormant parameter (frozen, without a gradient on any rank) has an owner
            but is in no bucket.
    """

    numel: int
    nbytes: int
    kind: str
    active: bool = True


@dataclass(frozen=True)
class Segment:
    """What one rank owns of one bucket: whole parameters, end to end, in one message.

    Attributes:
        owner: the rank that steps these parameters and sends them.
        params: parameter indices, increasing.
        offsets: where each parameter starts in the segment, in elements.
        numel: length of the segment, in elements.
    """

    owner: GroupRank
    params: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int


@dataclass(frozen=True)
class Bucket:
    """A unit of the pipeline: one segment per rank, in rank order, possibly empty, all of one kind."""

    index: int
    kind: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class ShardPlan:
    """Which rank owns which parameter, and in which bucket it travels.

    Attributes:
        world_size: number of ranks.
        specs: one per parameter, in the optimizer's order.
        owners: one per parameter.
        buckets: in the order in which every rank steps and syncs them.

    Raises:
        ValueError: if an active parameter is not in exactly one bucket, in the segment of its owner, with its kind; if
            a segment's offsets do not lay its parameters end to end; or if an owner is not a rank.
    """

    world_size: int
    specs: tuple[ParameterSpec, ...]
    owners: tuple[GroupRank, ...]
    buckets: tuple[Bucket, ...]

    def __post_init__(self) -> None:
        if len(self.owners) != len(self.specs):
            raise ValueError(f"Expected one owner for each of {len(self.specs)} parameters, got {len(self.owners)}.")
        for param, owner in enumerate(self.owners):
            if not 0 <= owner < self.world_size:
                raise ValueError(f"Expected parameter {param} to have an owner below {self.world_size}, got {owner}.")
        bucket_of: dict[int, int] = {}
        for position, bucket in enumerate(self.buckets):
            if bucket.index != position:
                raise ValueError(f"Expected bucket {position} at position {position}, got bucket {bucket.index}.")
            self._check_bucket(bucket, bucket_of)
        for param, spec in enumerate(self.specs):
            if spec.active and param not in bucket_of:
                raise ValueError(f"Expected active parameter {param} in a bucket, got it in none.")

    def digest(self) -> int:
        """A 63-bit hash that differs if two plans differ in anything that is sent."""
        layout = [(bucket.kind, [segment.params for segment in bucket.segments]) for bucket in self.buckets]
        text = repr((self.world_size, self.owners, [(spec.numel, spec.kind) for spec in self.specs], layout))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def _check_bucket(self, bucket: Bucket, bucket_of: dict[int, int]) -> None:
        if [segment.owner for segment in bucket.segments] != list(range(self.world_size)):
            raise ValueError(f"Expected one segment per rank in rank order in bucket {bucket.index}.")
        for segment in bucket.segments:
            unknown = [param for param in segment.params if not 0 <= param < len(self.specs)]
            if unknown:
                raise ValueError(
                    f"Expected parameters below {len(self.specs)}, got parameter {unknown[0]} in bucket "
                    f"{bucket.index}, rank {segment.owner}."
                )
            numels = [self.specs[param].numel for param in segment.params]
            ends = [0, *accumulate(numels)]
            if list(segment.offsets) != ends[:-1] or segment.numel != ends[-1]:
                raise ValueError(
                    f"Expected the parameters of bucket {bucket.index}, rank {segment.owner} end to end at "
                    f"{ends[:-1]}, got {list(segment.offsets)} and length {segment.numel}."
                )
            for param in segment.params:
                self._check_member(bucket, segment, param, bucket_of)
                bucket_of[param] = bucket.index

    def _check_member(self, bucket: Bucket, segment: Segment, param: int, bucket_of: dict[int, int]) -> None:
        spec = self.specs[param]
        if param in bucket_of:
            raise ValueError(
                f"Expected parameter {param} in one bucket, got it in {bucket_of[param]} and {bucket.index}."
            )
        if self.owners[param] != segment.owner:
            raise ValueError(
                f"Expected parameter {param} with its owner {self.owners[param]}, got it in a segment of rank "
                f"{segment.owner} (bucket {bucket.index})."
            )
        if spec.kind != bucket.kind or not spec.active:
            raise ValueError(
                f"Expected an active parameter of kind {bucket.kind} in bucket {bucket.index}, got parameter {param}: "
                f"{spec}."
            )


def plan_standalone(
    specs: Sequence[ParameterSpec], owners: Sequence[GroupRank], world_size: int, bucket_cap_bytes: int
) -> ShardPlan:
    """Cut the active parameters of each kind into buckets of about ``bucket_cap_bytes``.

    The owners are given; this decides only which bucket each parameter is in. Each rank's parameters of a kind are
    cut into the same number of runs of about the same size, and run *k* of every rank makes bucket *k*.

    Args:
        specs: one per parameter.
        owners: one per parameter.
        world_size: number of ranks.
        bucket_cap_bytes: upper bound on the average size of the buckets of a kind, at least 1. A single bucket can
            exceed it: parameters are never cut.

    Raises:
        ValueError: if the cap is less than 1 or the arguments contradict each other.
    """
    if bucket_cap_bytes < 1:
        raise ValueError(f"Expected a bucket cap of at least 1 byte, got {bucket_cap_bytes}.")
    members: dict[str, list[list[int]]] = {}
    for param, (spec, owner) in enumerate(zip(specs, owners, strict=True)):
        if spec.active:
            if not 0 <= owner < world_size:
                raise ValueError(f"Expected parameter {param} to have an owner below {world_size}, got {owner}.")
            if spec.kind not in members:
                members[spec.kind] = [[] for _ in range(world_size)]
            members[spec.kind][owner].append(param)

    buckets: list[Bucket] = []
    for kind, params_per_rank in members.items():
        total = sum(specs[param].nbytes for params in params_per_rank for param in params)
        num_runs = min(max(1, -(-total // bucket_cap_bytes)), max(map(len, params_per_rank)))
        runs_per_rank = [cut([specs[p].nbytes for p in params], params, num_runs) for params in params_per_rank]
        for run in range(num_runs):
            segments = tuple(_segment(GroupRank(rank), runs[run], specs) for rank, runs in enumerate(runs_per_rank))
            if any(segment.params for segment in segments):
                buckets.append(Bucket(len(buckets), kind, segments))
    return ShardPlan(world_size, tuple(specs), tuple(owners), tuple(buckets))


def plan_for_ddp(
    specs: Sequence[ParameterSpec],
    owners: Sequence[GroupRank],
    world_size: int,
    layout: Sequence[Sequence[int]],
    bucket_cap_bytes: int,
) -> ShardPlan:
    """Build one bucket per DDP bucket, at the same index, then buckets of active parameters that DDP does not reduce.

    Args:
        specs: one per parameter.
        owners: one per parameter.
        world_size: number of ranks.
        layout: parameter indices of each DDP bucket, without those of other optimizers, so a bucket may be empty.
        bucket_cap_bytes: cap for the buckets that DDP does not reduce, see `plan_standalone`.
    """
    reduced = {param for bucket in layout for param in bucket}
    outside = [replace(spec, active=spec.active and param not in reduced) for param, spec in enumerate(specs)]
    buckets = []
    for index, params in enumerate(layout):
        buckets.append(plan_bucket(index, params, specs, owners, world_size))
    for bucket in plan_standalone(outside, owners, world_size, bucket_cap_bytes).buckets:
        buckets.append(replace(bucket, index=len(buckets)))
    return ShardPlan(world_size, tuple(specs), tuple(owners), tuple(buckets))


def plan_bucket(
    index: int, params: Sequence[int], specs: Sequence[ParameterSpec], owners: Sequence[GroupRank], world_size: int
) -> Bucket:
    """Build the bucket for one of DDP's: its active parameters, in one segment per rank.

    Args:
        index: the bucket's.
        params: parameter indices, of one kind, in any order; possibly none.
        specs: one per parameter of the optimizer.
        owners: one per parameter of the optimizer.
        world_size: number of ranks.
    """
    of_rank: list[list[int]] = [[] for _ in range(world_size)]
    for param in sorted(params):
        if specs[param].active:
            of_rank[owners[param]].append(param)
    segments = tuple(_segment(GroupRank(rank), of_rank[rank], specs) for rank in range(world_size))
    return Bucket(index, specs[params[0]].kind if params else "", segments)


def owners_by_bucket(
    sizes: Sequence[int],
    owners: Sequence[GroupRank],
    world_size: int,
    layout: Sequence[Sequence[int]],
    split: bool,
    decided: int = 0,
) -> list[GroupRank]:
    """Assign the parameters of each DDP bucket, carrying the loads from bucket to bucket.

    Args:
        sizes: one per parameter.
        owners: the current owners; a parameter in no bucket keeps its owner.
        world_size: number of ranks.
        layout: parameter indices of each DDP bucket.
        split: if True, sorted greedy inside each bucket; if False, a whole bucket goes to the least loaded rank.
        decided: number of leading buckets that keep their owners, because their gradients are already being sent.
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


def _segment(owner: GroupRank, params: Sequence[int], specs: Sequence[ParameterSpec]) -> Segment:
    ends = [0, *accumulate(specs[param].numel for param in params)]
    return Segment(owner, tuple(params), tuple(ends[:-1]), ends[-1])


def cut(sizes: Sequence[int], items: Sequence[int], num_runs: int) -> list[list[int]]:
    """Cut items, in order, into runs of about equal size: an item goes to the run that holds its middle.

    Args:
        sizes: of each item, in any unit.
        items: what is cut; none is divided.
        num_runs: how many runs, of which some may be empty.
    """
    runs: list[list[int]] = [[] for _ in range(num_runs)]
    total = max(1, sum(sizes))
    start = 0
    for item, size in zip(items, sizes, strict=True):
        middle = 2 * start + size
        runs[min(num_runs - 1, middle * num_runs // (2 * total))].append(item)
        start += size
    return runs
