"""Join over a mesh: which ranks leave together."""

from types import SimpleNamespace
from typing import Any

import pytest

from ddp_zero.parallel.join import connected_sets, ties_of


def members_of(*stated: list[list[int]]) -> Any:
    shared = SimpleNamespace(describe=lambda: "parameter group 1")
    return [SimpleNamespace(group_ranks=one, shared=shared) for one in stated]


def test_experts_tie_the_ranks_at_one_place_and_dense_parameters_none() -> None:
    everyone, ranks = [[0, 1, 2, 3]] * 4, [0, 1, 2, 3]
    assert ties_of(members_of(everyone), ranks) == []
    assert ties_of(members_of(everyone, [[0, 2], [1, 3], [0, 2], [1, 3]]), ranks) == [[0, 1], [2, 3]]
    both_ends = [[10, 11, 20, 21]] * 2
    assert ties_of(members_of([[10, 20]] * 2, both_ends), [10, 20]) == []
    crossed = members_of([[0, 2], [1, 3], [0, 2], [1, 3]], [[0, 1], [0, 1], [2, 3], [2, 3]])
    assert ties_of(crossed, ranks) == [[0, 1, 2, 3]]
    assert connected_sets([[0, 1], [2, 3], [4, 5], [3, 4]]) == [[0, 1], [2, 3, 4, 5]]


def test_experts_with_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"got \[1, 3\] in parameter group 1.*ZERO-812"):
        ties_of(members_of([[0, 1, 2], [0, 1, 2], [0, 1, 2], [3]]), [0, 1, 2, 3])
