"""What ranks that agree on something need of each other, and the case of a process that has no peers."""

from collections.abc import Sequence
from typing import Protocol

from ddp_zero.partition import GroupRank


class Peers(Protocol):
    """Ranks that agree on something.

    Attributes:
        group_rank: this process's rank among them.
        world_size: how many they are.
    """

    group_rank: GroupRank
    world_size: int

    def name(self, group_rank: GroupRank) -> str:
        """How messages call a rank."""

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values, in rank order."""

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, in rank order."""


class Alone:
    """A process that has no peers, whether or not `torch.distributed` is initialised."""

    group_rank = GroupRank(0)
    world_size = 1

    def name(self, group_rank: GroupRank) -> str:
        """How messages call this process."""
        return "this process"

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Its own values."""
        return [list(values)]

    def all_gather_text(self, text: str) -> list[str]:
        """Its own text."""
        return [text]
