"""The text of `ZeroRedundancyOptimizer.explain`: what each rank owns, how balanced that is and what a step sends."""

from ddp_zero.engine import Engine
from ddp_zero.step.report import describe_shards, draw_buckets, state_bytes


def explain(engine: Engine, flat: bool) -> str:
    """Describe an optimizer. Never communicates.

    Args:
        engine: of the optimizer.
        flat: whether parameters live in flat storage.
    """
    sharded, comm, ranks = engine.sharded, engine.sharded.comm, engine.sharded.ranks
    storage = "flat storage" if flat else "storage of their own"
    mode = "overlapped with DDP" if engine.overlaps else "standalone"
    lines = [
        f"ZeroRedundancyOptimizer({type(sharded.inner).__name__}), stage {engine.stage}, {mode}: "
        f"rank {ranks.everyone.group_rank} of {ranks.everyone.world_size}, parameters in {storage}"
    ]
    if ranks.replicas is not None:
        lines.append(
            f"sharded over the {comm.world_size} ranks of each of {ranks.num_replicas} shard groups: this is "
            f"{comm.name(comm.group_rank)} of group {ranks.replica}; the table shows shard ranks"
        )
    if engine.hook is not None:
        lines += engine.hook.describe()
    if engine.decision.options.sync == "forward":
        where = "in the next forward pass" if sharded.leaves_syncs else "at the end of the step: see sync="
        lines.append(f"parameters of others are waited for {where}")
    lines += sharded.stepped.residence.describe()
    plan = sharded.binding.plan
    state = state_bytes(sharded.inner.state)
    return "\n".join([*lines, describe_shards(plan, comm.group_rank, state), draw_buckets(plan)])
