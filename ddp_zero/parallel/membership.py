"""Which ranks share a parameter group, as every rank has stated it: pure facts about numbers of ranks.

With eight ranks, two experts and experts held by ranks 0 2 4 6 and 1 3 5 7, ::

    dense    0 1 2 3 4 5 6 7      one group
    experts  0 2 4 6 | 1 3 5 7    two groups; ranks 0 and 1 are the first of theirs, and count in norms
"""

from collections.abc import Sequence


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
