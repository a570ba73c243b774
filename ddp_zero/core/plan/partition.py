"""The sorted-greedy partition: sizes in, owners out.

Pure: plain ints, no torch. Every rank computes the same owners from the same sizes, without communication.
"""

import heapq
from collections.abc import Sequence
from typing import NewType

GroupRank = NewType("GroupRank", int)
"""A rank within the optimizer's process group, from 0 to the group's size - 1. Owners are group ranks."""

GlobalRank = NewType("GlobalRank", int)
"""A rank within the whole job, as `torch.distributed` numbers it. Used only in messages shown to people."""


def partition_greedy(sizes: Sequence[int], num_ranks: int, loads: Sequence[int] | None = None) -> list[GroupRank]:
    """Assign each size to a rank, largest first, always to the least loaded rank.

    This is longest-processing-time scheduling (R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J.
    Appl. Math. 17(2), 1969): from empty loads, the largest load is at most 4/3 - 1/(3 num_ranks) times the optimum.
    Equal sizes keep their order and equal loads go to the lowest rank, so the result is a function of the arguments.
    ``loads`` are the initial loads, zero by default. Raises ValueError for arguments out of range.
    """
    if num_ranks < 1:
        raise ValueError(f"Expected at least 1 rank, got {num_ranks}. [ZERO-199]")
    if loads is None:
        loads = [0] * num_ranks
    if len(loads) != num_ranks:
        raise ValueError(f"Expected one load for each of {num_ranks} ranks, got {len(loads)}. [ZERO-199]")
    if any(size < 0 for size in sizes):
        raise ValueError(f"Expected sizes of at least 0, got {min(sizes)}. [ZERO-199]")

    owners = [GroupRank(0)] * len(sizes)
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        load, rank = heap[0]
        owners[item] = GroupRank(rank)
        heapq.heapreplace(heap, (load + sizes[item], rank))
    return owners
