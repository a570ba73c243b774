"""The modes that are estimated side by side, and the plan of each at a number of ranks."""

from collections.abc import Sequence
from dataclasses import replace

from ddp_zero.core.offload.mapped_file import shelf_bytes
from ddp_zero.core.plan.buckets import CAP_BYTES, ddp_layout
from ddp_zero.core.plan.partitions import partition_named
from ddp_zero.core.plan.shard_plan import ShardPlan
from ddp_zero.tools.estimate.parts import Mode, Needs, Sizes, needs_of

MODES = (
    Mode("DDP", 0),
    Mode("stage 1", 1, waits=True, steps_buckets=False),
    Mode("stage 1, inside backward", 1),
    Mode("stage 2, inside backward", 2),
    Mode("stage 2, after backward", 2, waits=True),
)


def modes_for(
    stage: int | None, partitions: Sequence[str], offload: str | None, buffers: int, base: Mode
) -> list[Mode]:
    """All modes of a stage, or of all; without offload, and with it if that is asked for.

    Args:
        stage: 0, 1 or 2; None: all.
        partitions: those that the optimizer allows.
        offload: None, "cpu" or "disk".
        buffers: pinned ones.
        base: what else is the same for all modes.
    """
    found = []
    for mode in MODES:
        if stage is not None and mode.stage != stage:
            continue
        for partition in partitions if mode.stage else ("parameters",):
            for place in dict.fromkeys((None, offload)) if mode.stage else (None,):
                name = (
                    mode.name + (", cut" if partition == "elements" else "") + (f", offload {place}" if place else "")
                )
                own = replace(mode, name=name, partition=partition, offload=place, buffers=buffers)
                found.append(replace(own, masters=base.masters, flat=base.flat or not mode.stage, views=base.views))
    return sorted(found, key=lambda mode: mode.offload is not None)


def plan_of(mode: Mode, sizes: Sizes, ranks: int, caps: Sequence[int]) -> ShardPlan | None:
    """Who owns what at so many ranks, with DDP's buckets of these sizes; None without sharding."""
    if mode.stage == 0:
        return None
    partition = partition_named(mode.partition)
    specs = list(sizes.specs)
    pieces = partition.assign(specs, [], ranks, CAP_BYTES)
    if not mode.steps_buckets:
        return partition.plan(specs, pieces, ranks, None, CAP_BYTES)
    reduced = [index for index, spec in enumerate(specs) if spec.active]
    found = ddp_layout([specs[index].nbytes for index in reduced], [specs[index].kind for index in reduced], caps)
    layout = [[reduced[place] for place in bucket] for bucket in found]
    pieces = partition.assign_by_bucket(specs, pieces, ranks, layout, True, 0)
    return partition.plan(specs, pieces, ranks, layout, CAP_BYTES)


def largest_needs(mode: Mode, sizes: Sizes, ranks: int, caps: Sequence[int]) -> Needs:
    """What the rank needs that owns most."""
    plan = plan_of(mode, sizes, ranks, caps)
    return needs_of(mode, sizes, plan, 0 if plan is None else _owner_of_most(plan), shelf_bytes)


def _owner_of_most(plan: ShardPlan) -> int:
    """The rank that owns most bytes that a step can change; of several the one with the largest part of a bucket."""
    owned, largest = [0] * plan.world_size, [0] * plan.world_size
    for spec, pieces in zip(plan.specs, plan.pieces, strict=True):
        for piece in pieces if spec.active and spec.numel else ():
            owned[piece.owner] += (piece.stop - piece.start) * spec.nbytes // spec.numel
    for bucket in plan.buckets:
        for segment in bucket.segments:
            largest[segment.owner] = max(largest[segment.owner], segment.numel)
    return max(range(plan.world_size), key=lambda rank: (owned[rank], largest[rank]))
