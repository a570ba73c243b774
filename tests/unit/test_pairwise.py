from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

from tests.pairwise import pairwise

FACTORS: list[list[Sequence[Any]]] = [
    [(0, 1), (0, 1)],
    [(0, 1), (0, 1), (0, 1), range(5)],
    ["ab", range(3), range(3), range(3)],
    [range(4), [0]],
]


@pytest.mark.parametrize("factors", FACTORS)
def test_every_two_values_of_different_factors_are_in_one_combination(factors: list[Sequence[Any]]) -> None:
    rows = pairwise(*factors)
    for one, other in combinations(range(len(factors)), 2):
        assert {(row[one], row[other]) for row in rows} == set(product(factors[one], factors[other]))
    assert len(rows) == len(set(rows))


def test_combinations_are_few_and_always_the_same() -> None:
    assert len(pairwise((0, 1), (0, 1), (0, 1), range(5))) == 10
    assert len(pairwise(range(3), range(3), range(3), range(2))) <= 12
    assert pairwise(*FACTORS[2]) == pairwise(*FACTORS[2])
