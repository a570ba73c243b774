"""Shard groups and the replicas across them, in plain rank numbers.

With shard groups (0, 1) and (2, 3) each parameter is owned twice, once per group. Ranks at the same position in their
groups own the same parameters: 0 and 2 are *replicas*, and so are 1 and 3.

A bucket is summed within the groups first: across them first, every rank's whole bucket would cross.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_REMEDY = (
    "Build the groups from one table of ranks, a row for each: torch.distributed.device_mesh.init_device_mesh(device, "
    "(nodes, ranks_per_node), mesh_dim_names=('node', 'shard')), and pass mesh.get_group('shard')."
)


@dataclass(frozen=True)
class ShardGroups:
    """Disjoint groups of one size that cover the ranks of a process group."""

    groups: tuple[tuple[int, ...], ...]  # global ranks of each group; groups in the order of their first ranks

    @classmethod
    def of(cls, ranks: Sequence[int], stated: Sequence[Sequence[int]]) -> "ShardGroups":
        """Build the groups from each rank's statement of its group, both as global ranks, in process group order.

        Raises ValueError, the same on every rank, if the groups are not disjoint, differ in size, have foreign members,
        or order their ranks differently.
        """
        place = {rank: position for position, rank in enumerate(ranks)}
        for rank, group in zip(ranks, stated, strict=True):
            _check_group(rank, group, place, stated)
        groups = sorted({tuple(group) for group in stated}, key=lambda group: place[group[0]])
        sizes = sorted({len(group) for group in groups})
        if len(sizes) > 1:
            raise ValueError(
                f"Expected shard groups of equal size, got {_text_of(groups)}: the ranks of each own as much as the "
                f"ranks of any other, in the same order. {_REMEDY} [ZERO-511]"
            )
        found = cls(tuple(groups))
        for replicas in found.replicas():
            if sorted(replicas, key=place.__getitem__) != list(replicas):
                raise ValueError(
                    f"Expected shard groups that list their ranks in one order, got {_text_of(groups)}: global ranks "
                    f"{list(replicas)} would hold the same shards, and are not in the order of the groups. {_REMEDY} "
                    "[ZERO-511]"
                )
        return found

    def replicas(self) -> list[tuple[int, ...]]:
        """Global ranks that hold the same shards, for each position in the groups."""
        return list(zip(*self.groups, strict=True))


def _check_group(rank: int, group: Sequence[int], place: dict[int, int], stated: Sequence[Sequence[int]]) -> None:
    foreign = [member for member in group if member not in place]
    if foreign:
        raise ValueError(
            f"Expected shard_group within the ranks that train together, {list(place)}, got global rank {foreign[0]} "
            f"in the group of global rank {rank}, {list(group)}. {_REMEDY} [ZERO-511]"
        )
    if [place[member] for member in group] != sorted(place[member] for member in group):
        raise ValueError(
            f"Expected shard_group in the order of process_group, {list(place)}, got {list(group)} on global rank "
            f"{rank}. {_REMEDY} [ZERO-511]"
        )
    for member in group:
        other = stated[place[member]]
        if list(other) != list(group):
            raise ValueError(
                f"Expected disjoint shard groups, the same on all of their ranks, got {list(group)} on global rank "
                f"{rank} and {list(other)} on global rank {member}. {_REMEDY} [ZERO-511]"
            )


def _text_of(groups: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(list(group)) for group in groups)
