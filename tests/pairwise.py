"""Fewer combinations than the full product, for factors that act on each other in pairs at most."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

Modes = dict[str, dict[str, Any]]
"""Options by name."""

_Mode = TypeVar("_Mode")


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations in which every two values of two factors meet at least once; always the same combinations.

    Almost every fault needs one value or two to show. Where the code composes the factors (a partition knows nothing of
    the order of a hook, an optimizer nothing of either), the pairs are enough for each change, and the full product is
    left to the nightly tier.

    Example:
        >>> len(pairwise((0, 1), (0, 1), (0, 1), range(5)))
        10
    """
    rows = list(product(*(range(len(values)) for values in factors)))
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        chosen.append(best)
    return [tuple(values[index] for values, index in zip(factors, row, strict=True)) for row in sorted(chosen)]


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(combinations(enumerate(row), 2))


def every_other(modes: Mapping[str, _Mode], start: int = 0) -> dict[str, _Mode]:
    """Half of the modes, for a case of which the nightly tier runs all; cases side by side take different halves.

    Example:
        >>> every_other({"a": 1, "b": 2, "c": 3}, 1)
        {'b': 2}
    """
    return dict(list(modes.items())[start::2])
