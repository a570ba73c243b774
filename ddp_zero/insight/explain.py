"""Ownership for users: `ZeroRedundancyOptimizer.owner_of`, and ``explain``: shards, balance and bytes of a step."""

from torch import Tensor

from ddp_zero.core.engine import Engine
from ddp_zero.core.plan import GroupRank, ShardPlan
from ddp_zero.core.step import Shard
from ddp_zero.insight.stats import imbalance, share_of


def owner_of(shard: Shard, param: Tensor) -> GroupRank:
    index = shard.table.index_of.get(param)
    if index is None:
        raise ValueError(
            f"The parameter of shape {list(param.shape)} is not a parameter of this optimizer. Pass an object from "
            "opt.param_groups. [ZERO-119]"
        )
    owner = shard.everyone.group_rank_of(shard.comm.global_rank(shard.binding.sole_owner(index)))
    assert owner is not None, "a shard group is part of everyone"
    return owner


def explain(engine: Engine, flat: bool) -> str:
    """Describe an optimizer. Never communicates."""
    shard, comm, ranks = engine.shard, engine.shard.comm, engine.shard.ranks
    storage = "flat storage" if flat else "storage of their own"
    mode = "overlapped with DDP" if engine.attachment.overlaps else "standalone"
    lines = [
        f"ZeroRedundancyOptimizer({type(shard.inner).__name__}), stage {engine.attachment.stage}, {mode}: "
        f"rank {ranks.everyone.group_rank} of {ranks.everyone.world_size}, parameters in {storage}"
    ]
    if ranks.replicas is not None:
        lines.append(
            f"sharded over the {comm.world_size} ranks of each of {ranks.num_replicas} shard groups: this is "
            f"{comm.name(comm.group_rank)} of group {ranks.replica}; the table shows shard ranks"
        )
    division = shard.binding.partition
    if division.why:
        lines.append(f'partition="auto" is "{division.name}" here: {division.why}')
    if (hook := engine.attachment.hook) is not None:
        lines += hook.describe()
    if engine.decision.options.sync == "forward":
        where = "in the next forward pass" if shard.syncs_outlast_step else "at the end of the step: see sync="
        lines.append(f"parameters of others are waited for {where}")
    lines += shard.targets.placement.describe()
    plan = shard.plan
    state = shard.memory_parts()["state_bytes"]
    lines.append(describe_shards(plan, comm.group_rank, state))
    if division.max_byte_imbalance is not None:
        lines += describe_costs(plan, division.max_byte_imbalance)
    return "\n".join([*lines, draw_buckets(plan)])


def describe_costs(plan: ShardPlan, max_byte_imbalance: float) -> list[str]:
    """Each rank's share of the cost and of the bytes of a step, as multiples of the mean; nothing without costs."""
    costs = plan.cost_loads()
    if not any(costs):
        return []
    trained = [share_of(plan, rank).trained for rank in range(plan.world_size)]
    rows = [
        f"{label:>15} " + "".join(f"{load * plan.world_size / sum(loads):>20.3f}" for load in loads)
        for label, loads in (("cost / mean", costs), ("bytes / mean", trained))
        if sum(loads)
    ]
    return [
        f"{'load of a step':>15} " + "".join(f"{f'rank {rank}':>20}" for rank in range(plan.world_size)),
        *rows,
        f"dealt by cost: bytes of the busiest rank are at most {max_byte_imbalance:g} times the mean "
        "(max_byte_imbalance), or as in the plan by bytes",
    ]


def describe_shards(plan: ShardPlan, group_rank: int, own_state_bytes: int) -> str:
    """A table of each rank's owned parameters; a star marks this rank, whose state bytes estimate all others'."""
    shares = [share_of(plan, rank) for rank in range(plan.world_size)]
    trained = [share.trained for share in shares]
    lines = [f"{'rank':>6} {'parameters':>11} {'elements':>15} {'bytes':>15} {'state bytes now':>17}"]
    for rank, share in enumerate(shares):
        state = f"{own_state_bytes:,}" if rank == group_rank else _estimate(trained, group_rank, rank, own_state_bytes)
        mark = "*" if rank == group_rank else " "
        lines.append(f"{mark}{rank:>5} {share.parameters:>11,} {share.elements:>15,} {share.nbytes:>15,} {state:>17}")
    lines.append(f"imbalance: {imbalance(plan):.3f} (largest share of trainable bytes / mean share)")
    dormant = sum(not spec.active for spec in plan.specs)
    sent = trained[group_rank] * (plan.world_size - 1)
    lines.append(f"sync: {len(plan.buckets)} buckets, {sent:,} bytes sent by this rank per step")
    if dormant:
        lines.append(f"frozen: {dormant} parameters, not sent until they are trainable")
    if plan.world_size > 1:
        lines.append("* this rank; ~ estimated from this rank's state bytes per parameter byte")
    return "\n".join(lines)


def draw_buckets(plan: ShardPlan) -> str:
    """Buckets x ranks: the number of elements and parameters that each rank owns of each bucket."""
    lines = ["bucket " + "".join(f"{f'rank {rank}':>20}" for rank in range(plan.world_size))]
    for bucket in plan.buckets:
        cells = [
            f"{segment.numel:,} in {len(segment.params)}" if segment.params else "-" for segment in bucket.segments
        ]
        lines.append(f"{bucket.index:>6} " + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)


def _estimate(trained: list[int], group_rank: int, rank: int, own_state_bytes: int) -> str:
    if not trained[group_rank]:
        return "unknown" if trained[rank] else "0"
    return f"~{round(own_state_bytes * trained[rank] / trained[group_rank]):,}"
