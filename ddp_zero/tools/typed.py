"""Values of unknown origin, checked against annotations. No torch, no communication."""

from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def check_types(one: Any) -> None:
    """Check the fields of a dataclass by their annotations; TypeError naming one of a different type."""
    for name, hint in get_type_hints(type(one)).items():
        if not is_of(getattr(one, name), hint):
            raise TypeError(f"damaged {name}: expected {hint} [ZERO-622]")


def is_of(value: Any, hint: Any) -> bool:
    """True if a value has the type that an annotation states, and so do the values in it."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(is_of(value, one) for one in inner)
    if origin is dict:
        return isinstance(value, dict) and _are_of(value, inner[0]) and _are_of(value.values(), inner[1])
    if origin is list:
        return type(value) is list and _are_of(value, inner[0])
    if origin is tuple and type(value) is tuple:
        kinds = inner[:1] * len(value) if Ellipsis in inner else inner
        return len(value) == len(kinds) and all(map(is_of, value, kinds))
    return hint is Any or type(value) is (NoneType if hint is None else hint)


def _are_of(values: Iterable[Any], hint: Any) -> bool:
    return hint is Any or all(is_of(value, hint) for value in values)
