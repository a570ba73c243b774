"""Who is who: which ranks hold, reduce and shard which parameter groups, checked, counted, and as text.

With eight ranks, two experts and experts held by ranks 0 2 4 6 and 1 3 5 7, ::

    dense    0 1 2 3 4 5 6 7      one group
    experts  0 2 4 6 | 1 3 5 7    two groups; ranks 0 and 1 are the first of theirs, and count in norms
"""

import json
from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.optimizer import ZeroRedundancyOptimizer, engine_of, sharded_of


def check_groups(ranks: Sequence[int], stated: Sequence[Sequence[int]], what: str) -> None:
    """Check that ranks which share a parameter group have the same view of who shares it.

    Args:
        ranks: the global ranks that train one copy of the model's dense part, in the order of their process group.
        stated: for each of them the ranks of its process group for the parameter group.
        what: the parameter group, for messages.

    Raises:
        ValueError: naming two ranks that differ; the same on every rank.
    """
    said = dict(zip(ranks, map(tuple, stated), strict=True))
    for rank, group in said.items():
        if rank not in group:
            raise ValueError(
                f"Expected process_group of {what} to contain the rank that passes it, got {list(group)} on global "
                f"rank {rank}. Every rank passes the group of the ranks that hold the same parameters as itself."
            )
        for member in group:
            if said.get(member, group) != group:
                raise ValueError(
                    f"Expected the ranks of process_group of {what} to agree on who they are, got {list(group)} on "
                    f"global rank {rank} and {list(said[member])} on global rank {member}. Build the groups from one "
                    "table of ranks, as torch.distributed.device_mesh.init_device_mesh does."
                )


def counted(ranks: Sequence[int], stated: Sequence[Sequence[int]]) -> list[bool]:
    """For each rank whether its share of a parameter group counts in norms, so that each parameter counts once.

    The first rank of each group counts. If that is not one of ``ranks``, as where pipeline stages share a parameter,
    the group counts there.
    """
    return [rank == group[0] for rank, group in zip(ranks, stated, strict=True)]


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
        params = sharded_of(member).table.params
        nbytes = sum(param.nbytes for param in params)
        distinct = list(dict.fromkeys(map(tuple, ranks_of)))
        shared = " | ".join(" ".join(map(str, ranks)) for ranks in distinct)
        mine = " ".join(map(str, ranks_of[everyone.group_rank]))
        averaged = "by DDP" if engine_of(member).hook is not None or _has_model(member) else "in opt.step()"
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
        params = sharded_of(member).table.params
        shared = " ".join(map(str, ranks_of[everyone.group_rank]))
        nbytes = sum(param.nbytes for param in params)
        lines.append(
            f"    groups {groups}: {len(params)} parameters, {nbytes:,} bytes, shared by global ranks {shared}"
        )
    return json.dumps([rank, "\n".join(lines)])


def _has_model(member: Any) -> bool:
    return bool(engine_of(member).passes._models)
