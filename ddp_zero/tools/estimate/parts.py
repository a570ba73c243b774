"""What a rank needs in one mode, by part, in bytes and plain ints."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddp_zero.core.plan.ownership import is_cut, piece_of
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.plan.shard_plan import ParameterSpec, Segment, ShardPlan
from ddp_zero.tools.estimate.buffers import BucketSizes, buffer_bytes

PACKED_IN_FLIGHT = 2
"""Buckets of which a sync without flat storage holds copies."""
SUMS_IN_FLIGHT = 2
"""Buckets whose sums in fp32 exist at once where a step follows each reduction."""


@dataclass(frozen=True)
class Mode:
    """What decides how much memory is needed, besides the model.

    Attributes:
        name: for people.
        stage: 0 for DDP with the unsharded optimizer.
        waits: whether the step needs all gradients.
        steps_buckets: whether the plan follows DDP's buckets.
        partition: how parameters are divided.
        masters: whether low-precision parameters have fp32 masters.
        flat: whether parameters live in flat storage.
        views: whether gradients are views of DDP's buckets.
        offload: None, "cpu" or "disk".
        buffers: pinned ones.
    """

    name: str
    stage: int
    waits: bool = False
    steps_buckets: bool = True
    partition: str = "parameters"
    masters: bool = False
    flat: bool = True
    views: bool = True
    offload: str | None = None
    buffers: int = 3


@dataclass(frozen=True)
class Sizes:
    """The parameters of a model.

    Attributes:
        specs: of each parameter; frozen ones are not active.
        states: bytes of each state tensor of so many elements of a parameter, or of all of it (None).
        is_low: whether each is of low precision.
        on_accelerator: whether they are to be on one, for offload.
    """

    specs: Sequence[ParameterSpec]
    states: Callable[[int, int | None], Sequence[int]]
    is_low: Sequence[bool]
    on_accelerator: bool = False


@dataclass(frozen=True)
class Needs:
    """Bytes by part, beside the parameters, on the host if state is offloaded, and on a disk.

    A rank on the CPU has one memory: what is on the host counts there as well.
    """

    device: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.device.values())


def needs_of(mode: Mode, sizes: Sizes, plan: ShardPlan | None, rank: int, shelf: Callable[[list[int]], int]) -> Needs:
    """What one rank needs.

    Args:
        mode: the mode.
        sizes: the parameters.
        plan: who owns what; None without sharding.
        rank: the rank.
        shelf: bytes of a file with tensors of these sizes.
    """
    specs = sizes.specs
    trained = [spec.nbytes for spec in specs if spec.active]
    owned = _owned(sizes, plan, rank)
    states = [size for index, part in owned for size in sizes.states(index, part)]
    held = _owned(sizes, plan, rank, frozen_too=plan is not None)
    masters = [4 * (part or specs[index].numel) for index, part in held if mode.masters and sizes.is_low[index]]
    device = {"parameters": sum(spec.nbytes for spec in specs), "masters": sum(masters), "state": sum(states)}
    host: dict[str, int] = {}
    disk: dict[str, int] = {}
    if mode.offload is not None:
        away = sizes.on_accelerator
        copies = _copies(mode, sizes, owned) if away else []
        if away or mode.offload == "disk":
            device |= {"masters": 0, "state": 0}
            kept = [*masters, *copies, *states]
            if mode.offload == "disk":
                disk["state"] = shelf(masters + copies) + shelf(states)
                host["state of a bucket"] = _of_largest_bucket(mode, sizes, plan, rank)
            else:
                host |= {
                    "masters": sum(masters),
                    "copies": sum(copies),
                    "state": sum(kept) - sum(masters) - sum(copies),
                }
        if away and plan is not None:
            host["pinned"] = mode.buffers * max(_traffic(mode, sizes, one) for one in _segments(plan, rank))
    device |= _gradients(mode, sizes, plan, rank, owned)
    device["gradient under way"] = max(trained, default=0)
    if mode.stage and not mode.flat and plan is not None:
        buckets = sorted((_bytes_of(specs, bucket.segments) for bucket in plan.buckets), reverse=True)
        device["sync"] = sum(buckets[:PACKED_IN_FLIGHT])
    if not sizes.on_accelerator:
        device |= {f"{part}, host": nbytes for part, nbytes in host.items()}
        host = {}
    return Needs({part: nbytes for part, nbytes in device.items() if nbytes}, host, disk)


def _gradients(
    mode: Mode, sizes: Sizes, plan: ShardPlan | None, rank: int, owned: Sequence[tuple[int, int | None]]
) -> dict[str, int]:
    specs = sizes.specs
    whole = sum(spec.nbytes for spec in specs if spec.active)
    if mode.stage < 2 or plan is None:
        return {"gradients": whole, "buckets": 0 if mode.views else whole}
    elements = {index: part or specs[index].numel for index, part in owned}
    shown = sum(_itemsize(sizes, index) * numel for index, numel in elements.items()) if mode.waits else 0
    sums = [sum(4 * numel for index, numel in _parts(one) if sizes.is_low[index]) for one in _segments(plan, rank)]
    buckets = buffer_bytes(_buckets(sizes, plan), rank, sizes.on_accelerator)
    in_fp32 = sum(sums) if mode.waits else sum(sorted(sums)[-SUMS_IN_FLIGHT:])
    return {"gradients": shown, "sums in fp32": in_fp32, "buckets": buckets}


def _buckets(sizes: Sizes, plan: ShardPlan) -> list[BucketSizes]:
    filled = [bucket for bucket in plan.buckets if any(segment.params for segment in bucket.segments)]
    firsts = [next(one.params[0] for one in bucket.segments if one.params) for bucket in filled]
    slices = [[segment.numel for segment in bucket.segments] for bucket in filled]
    return [
        BucketSizes(numels, _itemsize(sizes, index), sizes.is_low[index])
        for numels, index in zip(slices, firsts, strict=True)
    ]


def _owned(
    sizes: Sizes, plan: ShardPlan | None, rank: int, *, frozen_too: bool = False
) -> list[tuple[int, int | None]]:
    """Parameters that a rank steps, or that it owns, and how many elements of those that are cut."""
    counts = [index for index, spec in enumerate(sizes.specs) if spec.active or frozen_too]
    if plan is None:
        return [(index, None) for index in counts]
    pieces = [(index, piece_of(plan.pieces[index], GroupRank(rank))) for index in counts]
    return [
        (index, piece.stop - piece.start if is_cut(plan.pieces[index]) else None)
        for index, piece in pieces
        if piece is not None
    ]


def _copies(mode: Mode, sizes: Sizes, owned: Sequence[tuple[int, int | None]]) -> list[int]:
    """Bytes of the copies on the host of parameters without a master."""
    whole = [(index, part or sizes.specs[index].numel) for index, part in owned]
    return [_itemsize(sizes, index) * numel for index, numel in whole if not (mode.masters and sizes.is_low[index])]


def _traffic(mode: Mode, sizes: Sizes, segment: Segment) -> int:
    """Bytes of a segment's gradients, and of its parameters without a master."""
    total = 0
    for index, numel in _parts(segment):
        has_master = mode.masters and sizes.is_low[index]
        gradient = _sum_bytes(sizes, index) if has_master and mode.stage == 2 else _itemsize(sizes, index)
        total += numel * (gradient + (0 if has_master else _itemsize(sizes, index)))
    return total


def _of_largest_bucket(mode: Mode, sizes: Sizes, plan: ShardPlan | None, rank: int) -> int:
    """Bytes of states and masters that one bucket's step brings into memory."""
    assert plan is not None, "offload is sharded"
    found = []
    for segment in _segments(plan, rank):
        parts = [(index, numel if is_cut(plan.pieces[index]) else None) for index, numel in _parts(segment)]
        states = sum(size for index, part in parts for size in sizes.states(index, part))
        found.append(states + sum(4 * n for index, n in _parts(segment) if mode.masters and sizes.is_low[index]))
    return max(found)


def _segments(plan: ShardPlan, rank: int) -> list[Segment]:
    return [bucket.segments[rank] for bucket in plan.buckets] or [Segment(GroupRank(rank), (), (), 0, ())]


def _parts(segment: Segment) -> list[tuple[int, int]]:
    return [(index, stop - start) for index, (start, stop) in zip(segment.params, segment.ranges, strict=True)]


def _bytes_of(specs: Sequence[ParameterSpec], segments: Sequence[Segment]) -> int:
    pairs = [(specs[index], numel) for segment in segments for index, numel in _parts(segment)]
    return sum(numel * spec.nbytes // spec.numel for spec, numel in pairs if spec.numel)


def _itemsize(sizes: Sizes, index: int) -> int:
    spec = sizes.specs[index]
    return spec.nbytes // spec.numel if spec.numel else 0


def _sum_bytes(sizes: Sizes, index: int) -> int:
    """Bytes per element of a sum of gradients: in fp32 for those of low precision."""
    return 4 if sizes.is_low[index] else _itemsize(sizes, index)
