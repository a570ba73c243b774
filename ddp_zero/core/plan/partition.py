"""The sorted-greedy partitions, by bytes and by cost: sizes in, owners out.

Pure: plain ints, no torch. Every rank computes the same owners from the same sizes, without communication.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
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
    ``loads`` are the initial loads, zero by default.
    """
    loads = [0] * num_ranks if loads is None else loads
    assert len(loads) == num_ranks > 0, f"{len(loads)} loads of {num_ranks} ranks"

    owners = [GroupRank(0)] * len(sizes)
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        load, rank = heap[0]
        owners[item] = GroupRank(rank)
        heapq.heapreplace(heap, (load + sizes[item], rank))
    return owners


@dataclass(frozen=True)
class Item:
    """A unit of the partition by cost: a parameter, or parameters that stay together."""

    cost: int  # cost of its step, in any unit
    nbytes: int  # bytes that its owner keeps and sends


class Loads:
    """The cost and the bytes of every rank so far."""

    def __init__(self, num_ranks: int) -> None:
        self.costs = [0] * num_ranks
        self.nbytes = [0] * num_ranks

    def add(self, rank: int, item: Item) -> None:
        self.costs[rank] += item.cost
        self.nbytes[rank] += item.nbytes


def partition_by_cost(
    items: Sequence[Item], loads: Loads, limit: int, ranks: Sequence[int] | None = None
) -> list[GroupRank]:
    """Assign each item to the rank with the least cost whose bytes stay within a limit, and load that rank with it.

    Longest processing time, see `partition_greedy`, with two sizes. Items of more than half the limit go first, by
    bytes, so that an embedding of little cost finds room before the rest has taken it; then the others by cost. An item
    without cost, or one that exceeds the limit everywhere, goes to the rank with the fewest bytes. Ties go to the rank
    with fewer bytes, then to the lowest one, so the result is a function of the arguments. Only ``ranks`` may own an
    item; None: all.
    """
    allowed = range(len(loads.costs)) if ranks is None else ranks
    if not any(one.cost for one in items):
        owners = partition_greedy([one.nbytes for one in items], len(allowed), [loads.nbytes[rank] for rank in allowed])
        owners = [GroupRank(allowed[owner]) for owner in owners]
        for owner, one in zip(owners, items, strict=True):
            loads.add(owner, one)
        return owners

    def turn(place: int) -> tuple[int, int, int]:
        one = items[place]
        is_bulky = 2 * one.nbytes > limit
        return (0, -one.nbytes, -one.cost) if is_bulky else (1, -one.cost, -one.nbytes)

    owners = [GroupRank(allowed[0])] * len(items)
    heap = [(loads.costs[rank], loads.nbytes[rank], rank) for rank in allowed]
    heapq.heapify(heap)
    for place in sorted(range(len(items)), key=turn):
        one = items[place]
        full = list[tuple[int, int, int]]()
        while heap and (not one.cost or heap[0][1] + one.nbytes > limit):
            full.append(heapq.heappop(heap))
        if heap:
            chosen = heapq.heappop(heap)
        else:
            chosen = min(full, key=lambda entry: (entry[1], entry[0], entry[2]))
            full.remove(chosen)
        rank = chosen[2]
        owners[place] = GroupRank(rank)
        loads.add(rank, one)
        for entry in (*full, (loads.costs[rank], loads.nbytes[rank], rank)):
            heapq.heappush(heap, entry)
    return owners
