"""Which ranks share a parameter group, and which of them count in norms."""

import pytest

from ddp_zero.parallel.membership import check_groups, counted


def test_each_group_counts_once() -> None:
    stated = [[0, 2], [1, 3], [0, 2], [1, 3]]
    check_groups([0, 1, 2, 3], stated, "group 1")
    assert counted([0, 1, 2, 3], stated) == [True, True, False, False]


def test_a_group_that_begins_in_another_stage_counts_there() -> None:
    stated = [[0, 1, 2, 3], [0, 1, 2, 3]]
    check_groups([2, 3], stated, "group 2")
    assert counted([2, 3], stated) == [False, False]
    assert counted([0, 1], stated) == [True, False]


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (
            [[0, 2], [0, 1], [0, 2], [1, 3]],
            r"on who they are, got \[0, 1\] on global rank 1 and \[0, 2\] on global rank 0",
        ),
        ([[0, 2], [3], [0, 2], [1, 3]], r"contain the rank that passes it, got \[3\] on global rank 1"),
        ([[0], [1, 3], [0, 2], [1, 3]], r"got \[0, 2\] on global rank 2 and \[0\] on global rank 0"),
    ],
)
def test_ranks_that_differ_are_named(stated: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_groups([0, 1, 2, 3], stated, "group 1")
