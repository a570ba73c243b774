"""The interface through which ranks agree, and its implementation for a process without peers."""

import json
import zlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_world_size, is_available, is_initialized

from ddp_zero.core.plan.partition import GroupRank


class Peers(Protocol):
    """Ranks that agree on something.

    Attributes:
        group_rank: this process's rank among them.
        world_size: number of ranks.
    """

    group_rank: GroupRank
    world_size: int

    def name(self, group_rank: GroupRank) -> str:
        """The name of a rank in messages."""

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values, in rank order."""

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, in rank order."""


class GathersTensors(Protocol):
    """Ranks that gather tensors of one size."""

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values, in rank order."""

    def all_gather_tensor(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order."""


class Alone:
    """A process that has no peers, whether or not `torch.distributed` is initialised."""

    group_rank = GroupRank(0)
    world_size = 1

    def name(self, group_rank: GroupRank) -> str:
        """The name of this process in messages."""
        return "this process"

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """This process's values only."""
        return [list(values)]

    def all_gather_text(self, text: str) -> list[str]:
        """This process's text only."""
        return [text]


def gather_text(peers: GathersTensors, text: str, device: torch.device) -> list[str]:
    """Every rank's text, in rank order; compressed on the wire.

    Args:
        peers: the ranks.
        text: this rank's.
        device: the device of messages.
    """
    mine = zlib.compress(text.encode())
    lengths = [length for (length,) in peers.all_gather_ints([len(mine)])]
    buffer = torch.zeros(max(lengths), dtype=torch.uint8)
    buffer[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    gathered = peers.all_gather_tensor(buffer.to(device))
    whole = [bytes(part[:length].tolist()) for part, length in zip(gathered, lengths, strict=True)]
    return [zlib.decompress(raw).decode() for raw in whole]


class GathersText(Protocol):
    """Ranks that gather texts."""

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, in rank order."""


def gather_text_across(levels: Sequence[GathersText], text: str) -> list[str]:
    """The text of every rank of a grid; the last dimension's ranks follow each other.

    Args:
        levels: this rank's peers along each dimension.
        text: this rank's.
    """
    texts = [text]
    for level in reversed(levels):
        texts = [one for part in level.all_gather_text(json.dumps(texts)) for one in json.loads(part)]
    return texts


def check_not_alone(group: ProcessGroup | None) -> None:
    """Check that a missing process group means a job of one rank: several ranks would each act alone.

    Raises:
        ValueError: if the job has several ranks.
    """
    if group is None and is_available() and is_initialized() and get_world_size() > 1:
        raise ValueError(
            f"Expected a model in DistributedDataParallel or a sharded optimizer in a job of {get_world_size()} "
            "ranks, got neither: ranks could not save together. Give the DDP model."
        )
