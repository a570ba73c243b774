"""The text of `ZeroRedundancyOptimizer.explain`: what each rank owns, how balanced that is and what a step sends."""

from torch import Tensor

from ddp_zero.core.plan.ownership import home, is_cut
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.step.report import describe_shards, draw_buckets, state_bytes
from ddp_zero.tools.insight.optimizer_parts import OptimizerParts


def explain(running: OptimizerParts, flat: bool) -> str:
    """Describe an optimizer. Never communicates.

    Args:
        running: the optimizer.
        flat: whether parameters live in flat storage.
    """
    sharded, comm, ranks = running.sharded, running.sharded.comm, running.sharded.ranks
    storage = "flat storage" if flat else "storage of their own"
    mode = "overlapped with DDP" if running.overlaps else "standalone"
    lines = [
        f"ZeroRedundancyOptimizer({type(sharded.inner).__name__}), stage {running.stage}, {mode}: "
        f"rank {ranks.everyone.group_rank} of {ranks.everyone.world_size}, parameters in {storage}"
    ]
    if ranks.replicas is not None:
        lines.append(
            f"sharded over the {comm.world_size} ranks of each of {ranks.num_replicas} shard groups: this is "
            f"{comm.name(comm.group_rank)} of group {ranks.replica}; the table shows shard ranks"
        )
    division = sharded.binding.partition
    if division.why:
        lines.append(f'partition="auto" is "{division.name}" here: {division.why}')
    if running.hook is not None:
        lines += running.hook.describe()
    if running.decision.options.sync == "forward":
        where = "in the next forward pass" if sharded.leaves_syncs else "at the end of the step: see sync="
        lines.append(f"parameters of others are waited for {where}")
    lines += sharded.stepped.residence.describe()
    plan = sharded.plan
    state = state_bytes(sharded.inner_state)
    return "\n".join([*lines, describe_shards(plan, comm.group_rank, state), draw_buckets(plan)])


def owner_of(running: OptimizerParts, param: Tensor) -> GroupRank:
    """See `ZeroRedundancyOptimizer.owner_of`."""
    sharded = running.sharded
    index = sharded.table.index_of.get(param)
    if index is None:
        raise ValueError(f"Expected a parameter of this optimizer, got one of shape {list(param.shape)}.")
    pieces, comm = sharded.binding.pieces[index], sharded.comm
    if is_cut(pieces):
        shared = ", ".join(f"{comm.name(piece.owner)} elements {piece.start} to {piece.stop}" for piece in pieces)
        raise ValueError(f"Expected {sharded.table.label(index)} to have one owner, got several: {shared}.")
    owner = sharded.everyone.place_of(comm.global_rank(home(pieces)))
    assert owner is not None, "a shard group is part of everyone"
    return owner
