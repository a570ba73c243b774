"""Hooks of models and of their outputs that do not keep their owner alive."""

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ddp_zero.core.local.compiler import never_compiled


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in the output of a model."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [tensor for one in value for tensor in tensors_in(one)] if isinstance(value, list | tuple) else []


class _WeakCall:
    """See `weakly`; without a method, as in copies and pickles of a model that holds this, it does nothing."""

    def __init__(self, method: Any = None) -> None:
        self._owner: Callable[[], Any] = (lambda: None) if method is None else weakref.ref(method.__self__)
        self._function: Callable[..., Any] = getattr(method, "__func__", bool)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()

    @never_compiled
    def __call__(self, *args: Any) -> Any:
        alive = self._owner()
        return None if alive is None else self._function(alive, *args)


class WeakHook(_WeakCall):
    """A hook around forward passes."""

    @never_compiled
    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            super().__call__(*args)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a bound method while its object lives, and then returns None; so do copies of it.

    Hooks of a model call the engine: a model outlives its optimizer, and cycles are left to the garbage collector.
    """
    return _WeakCall(method)
