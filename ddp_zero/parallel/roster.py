"""Who is who: which ranks hold, reduce and shard which parameter groups, as text."""

from collections.abc import Sequence
from typing import Any

from ddp_zero.comm.communicator import Communicator
from ddp_zero.optimizer import ZeroRedundancyOptimizer


def describe(
    members: Sequence[ZeroRedundancyOptimizer],
    places: Sequence[tuple[int, int]],
    everyone: Communicator,
    stated: Sequence[Sequence[Sequence[int]]],
) -> str:
    """Describe a `ParallelOptimizer`. Never communicates.

    Args:
        members: its members.
        places: for each parameter group its member, and its position there.
        everyone: the data-parallel ranks.
        stated: by member and data-parallel rank, the global ranks that share the member's parameters.
    """
    lines = [f"ParallelOptimizer of {len(members)} members, {everyone.world_size} data-parallel ranks"]
    for number, (member, ranks_of) in enumerate(zip(members, stated, strict=True)):
        groups = [position for position, (one, _) in enumerate(places) if one == number]
        params = member._engine.sharded.table.params
        nbytes = sum(param.nbytes for param in params)
        distinct = list(dict.fromkeys(map(tuple, ranks_of)))
        shared = " | ".join(" ".join(map(str, ranks)) for ranks in distinct)
        mine = " ".join(map(str, ranks_of[everyone.group_rank]))
        averaged = "by DDP" if member._engine.hook is not None or _has_model(member) else "in opt.step()"
        lines += [
            f"member {number}: parameter groups {groups}, {len(params)} parameters, {nbytes:,} bytes here",
            f"  shared by global ranks {shared}; this rank's are {mine}; averaged {averaged}",
        ]
    return "\n\n".join(["\n".join(lines), *(member.explain() for member in members)])


def _has_model(member: Any) -> bool:
    return bool(member._engine.passes._models)
