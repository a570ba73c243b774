"""Groups of ranks that hold replicas."""

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tests.multiproc.cases import SumByGroup


def groups_of(sizes: int) -> ProcessGroup:
    """This rank's group of so many neighbours; every rank calls it."""
    found, _ = dist.new_subgroups(group_size=sizes)
    group: ProcessGroup = found
    return group


def hook_of(mode: dict[str, Any]) -> Any:
    """The reference for stage 2: sums of two ranks that share a copy of the state, and then of their sums."""
    return SumByGroup(2).average if mode.get("stage") == 2 else None
