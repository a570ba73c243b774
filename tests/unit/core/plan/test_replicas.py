"""Shard groups in plain numbers: which fit together, who holds the same shards, and errors about those that do not."""

import re

import pytest

from ddp_zero.core.plan.replicas import ShardGroups


def stated(ranks: list[int], groups: list[list[int]]) -> list[list[int]]:
    """What each rank would state."""
    return [next(group for group in groups if rank in group) for rank in ranks]


@pytest.mark.parametrize(
    ("groups", "replicas"),
    [
        ([[0, 1], [2, 3]], [(0, 2), (1, 3)]),
        ([[0, 2], [1, 3]], [(0, 1), (2, 3)]),
        ([[0, 1, 2], [3, 4, 5]], [(0, 3), (1, 4), (2, 5)]),
        ([[0, 1], [2, 3], [4, 5]], [(0, 2, 4), (1, 3, 5)]),
        ([[0], [1], [2]], [(0, 1, 2)]),
        ([[0, 1, 2]], [(0,), (1,), (2,)]),
        ([[2, 5], [7, 9]], [(2, 7), (5, 9)]),
    ],
)
def test_ranks_at_the_same_position_are_replicas(groups: list[list[int]], replicas: list[tuple[int, ...]]) -> None:
    ranks = sorted(rank for group in groups for rank in group)
    found = ShardGroups.of(ranks, stated(ranks, groups))
    assert found.groups == tuple(map(tuple, groups))
    assert found.replicas() == replicas


def test_ranks_of_a_process_group_may_be_in_any_order() -> None:
    found = ShardGroups.of([5, 3, 8, 1], [[5, 3], [5, 3], [8, 1], [8, 1]])
    assert found.replicas() == [(5, 8), (3, 1)]


@pytest.mark.parametrize(
    ("ranks", "groups", "message"),
    [
        ([0, 1, 2, 3], [[0, 1], [0, 1, 2], [2, 3], [2, 3]], "disjoint .* got [0, 1] on global rank 0 and [0, 1, 2] on"),
        ([0, 1, 2], [[0], [1, 2], [1, 2]], "equal size, got [0], [1, 2]"),
        ([0, 1], [[0, 1, 2], [0, 1, 2]], "within .* got global rank 2 in the group of global rank 0, [0, 1, 2]"),
        ([0, 1, 2, 3], [[0, 3], [1, 2], [1, 2], [0, 3]], "in one order, got [0, 3], [1, 2]: global ranks [3, 2]"),
        ([0, 1], [[1, 0], [1, 0]], "in the order of process_group, [0, 1], got [1, 0] on global rank 0"),
    ],
)
def test_groups_that_do_not_fit_are_refused_with_the_remedy(
    ranks: list[int], groups: list[list[int]], message: str
) -> None:
    pattern = ".*".join(map(re.escape, message.split(" .* "))) + ".*init_device_mesh"
    with pytest.raises(ValueError, match=pattern):
        ShardGroups.of(ranks, groups)
