"""Who is who: which ranks hold, reduce and shard which parameter groups, as text."""

import json
from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ddp_zero.comm.communicator import Communicator
from ddp_zero.optimizer import ZeroRedundancyOptimizer


def describe(
    members: Sequence[ZeroRedundancyOptimizer],
    places: Sequence[tuple[int, int]],
    everyone: Communicator,
    stated: Sequence[Sequence[Sequence[int]]],
    rows: Sequence[str],
) -> str:
    """Describe a `ParallelOptimizer`. Never communicates.

    Args:
        members: its members.
        places: for each parameter group its member, and its position there.
        everyone: the data-parallel ranks.
        stated: by member and data-parallel rank, the global ranks that share the member's parameters.
        rows: of every rank of the mesh, from `own_row`.
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
    every = [text for _, text in sorted(json.loads(row) for row in rows)]
    return "\n\n".join(["\n".join(lines), "\n".join(["every rank", *every]), *(one.explain() for one in members)])


def own_row(  # noqa: D417  # as in `describe`
    members: Sequence[ZeroRedundancyOptimizer],
    places: Sequence[tuple[int, int]],
    stated: Sequence[Sequence[Sequence[int]]],
    everyone: Communicator,
    mesh: DeviceMesh | None,
) -> str:
    """What this rank tells all others of its groups: its number, and lines of text, as JSON.

    Args:
        members, places, stated, everyone: as for `describe`.
        mesh: of all ranks, or None.
    """
    rank = everyone.global_rank(everyone.group_rank)
    place = ""
    if mesh is not None:
        place = f" ({', '.join(f'{dim} {mesh.get_local_rank(dim)}' for dim in mesh.mesh_dim_names or ())})"
    lines = [f"  global rank {rank}{place}"]
    for number, (member, ranks_of) in enumerate(zip(members, stated, strict=True)):
        groups = [position for position, (one, _) in enumerate(places) if one == number]
        params = member._engine.sharded.table.params
        shared = " ".join(map(str, ranks_of[everyone.group_rank]))
        nbytes = sum(param.nbytes for param in params)
        lines.append(
            f"    groups {groups}: {len(params)} parameters, {nbytes:,} bytes, shared by global ranks {shared}"
        )
    return json.dumps([rank, "\n".join(lines)])


def _has_model(member: Any) -> bool:
    return bool(member._engine.passes._models)
