"""Equality to the last bit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_NOT_COMPARED = {"params", "param_names", "max_grad_norm"}


class Difference(Exception):
    """The two runs differ."""


def check_equal(expected: Any, actual: Any, where: str) -> None:
    """See that two values are equal, and of one kind.

    Raises:
        Difference: if not.
    """
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        _check_tensors(expected.detach(), actual.detach(), where)
    elif isinstance(expected, Mapping) and isinstance(actual, Mapping):
        if list(expected) != list(actual):
            raise Difference(f"{where}: keys {list(expected)} and {list(actual)}")
        for key in expected:
            check_equal(expected[key], actual[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        if len(expected) != len(actual):
            raise Difference(f"{where}: lengths {len(expected)} and {len(actual)}")
        for position, (one, other) in enumerate(zip(expected, actual, strict=True)):
            check_equal(one, other, f"{where}[{position}]")
    elif type(expected) is not type(actual) or not _are_same(expected, actual):
        raise Difference(f"{where}: {expected!r} and {actual!r}")


def _are_same(one: Any, other: Any) -> bool:
    return bool(one == other or (one != one and other != other))


def _check_tensors(expected: Tensor, actual: Tensor, where: str) -> None:
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        kinds = f"{expected.dtype} {list(expected.shape)} and {actual.dtype} {list(actual.shape)}"
        raise Difference(f"{where}: {kinds}")
    if torch.equal(expected, actual):
        return
    nan = torch.isnan(expected) & torch.isnan(actual)
    if torch.equal(expected.masked_fill(nan, 0), actual.masked_fill(nan, 0)):
        return
    distance = (expected.double() - actual.double()).abs().max().item()
    raise Difference(f"{where}: differs by {distance:.3g} (of {expected.double().abs().max().item():.3g})")


def check_models(expected: nn.Module, actual: nn.Module) -> None:
    """See that parameters and buffers are equal.

    Raises:
        Difference: naming the first that is not.
    """
    for (name, param), actual_param in zip(expected.named_parameters(), actual.parameters(), strict=True):
        check_equal(param, actual_param, f"parameter {name}")
    for (name, buffer), other in zip(expected.named_buffers(), actual.buffers(), strict=True):
        check_equal(buffer, other, f"buffer {name}")


def check_options(expected: Optimizer, actual: Optimizer) -> None:
    """See that groups have the same options.

    Raises:
        Difference: naming the first that is not.
    """
    for position, (one, other) in enumerate(zip(expected.param_groups, actual.param_groups, strict=True)):
        for key in (key for key in one if key not in _NOT_COMPARED):
            if key not in other:
                raise Difference(f"group {position} has no {key!r}")
            check_equal(one[key], other[key], f"group {position}[{key!r}]")
