"""Tensors that stand in for values that are not here: on use, `awaited` ones bring them and `absent` ones raise."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

StandIn = TypeVar("StandIn")


def among(kind: type[StandIn], values: Iterable[Any]) -> Iterator[StandIn]:
    """The stand-ins of a kind in arguments of torch functions: tensors, and sequences and dicts of them."""
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, Mapping):
            yield from among(kind, value.values())
        elif isinstance(value, list | tuple):
            yield from among(kind, value)
