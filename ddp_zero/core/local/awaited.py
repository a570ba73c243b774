"""Parameters whose values are still in flight: any use of one waits for its values first.

While a sync is under way after its step (``sync="forward"``), its parameters have a different type: a subclass of their
own type with a ``__torch_function__``. Torch calls that before every operation on such a tensor: a layer,
``state_dict()``, ``param.data``, an EMA update, a copy. It waits for the tensors among the arguments, which restores
their own type, and repeats the call. So any use of a parameter waits, also an unforeseen one, and a parameter that has
arrived costs nothing. Reading only a shape or ``param.grad`` does not wait.

Two uses are not detected: memory that was aliased before (``view = param.data`` kept from an earlier step), and
functions that pass a tensor to C++ without checking its type: ``torch.Tensor(param)``, ``tensor.new_tensor(param)`` and
others that `ZeroRedundancyOptimizer.finish_sync` names. The hooks of `before_forward` make modules wait for their own
parameters, wherever these are then used.

On an accelerator the first use makes *its stream* wait, and receives there. Other streams read the same memory, so the
type stays until the values are there for the host too: until then each further stream waits for the one that received.

Alternatives considered: those pre-hooks alone (they miss tied weights, averages, writes, ``state_dict()``).
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ddp_zero.core.local.stand_in import among

_ATTRIBUTES = ("grad", "requires_grad", "shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "output_nr")
_METHODS = ("size", "dim", "numel", "register_hook", "register_post_accumulate_grad_hook")
_READS_NO_VALUES = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(getattr(Tensor, name) for name in _METHODS),
    torch._C.TensorBase.grad.__set__,  # type: ignore[union-attr]
}
_FUNCTIONS = (Tensor.__dict__["__torch_function__"].__func__, torch.nn.Parameter.__torch_function__)


class Arrival(Protocol):
    """Waits for the values of a tensor."""

    def __call__(self, on_host: bool = False) -> None:
        """Make the current stream wait, or the host, which makes the tensor ordinary again.

        Args:
            on_host: whether the host waits for an accelerator.
        """


_arrivals: dict[int, Arrival] = {}  # by id of a live tensor

untouched = torch._C.DisableTorchFunctionSubclass
"""A context in which nothing waits: for code that inspects many parameters but reads no values."""


class Awaited:
    """Mixed into the type of a tensor while its values are in flight."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Wait for every awaited argument, then call the function."""
        kwargs = kwargs or {}
        if func in _READS_NO_VALUES:
            with untouched():
                return func(*args, **kwargs)
        for tensor in among(Awaited, [args, kwargs]):
            wait_for(tensor)
        if any(True for _ in among(Awaited, [args, kwargs])):  # there for this stream, but not for all yet
            with untouched():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def detach(self) -> Any:
        """Wait, then detach. ``torch.nn.Parameter(param)`` requires a result of the type that its argument had."""
        is_for_parameter = sys._getframe(1).f_code is torch.nn.Parameter.__new__.__code__
        wait_for(self, on_host=is_for_parameter)
        own: Any = self
        if is_for_parameter:  # of its own type now
            return Tensor._make_subclass(type(own), own)
        with untouched():
            return Tensor.detach(own)

    def as_subclass(self, kind: type) -> Any:
        """Wait, then convert: torch does not call ``__torch_function__`` for this method."""
        wait_for(self, on_host=True)
        return self.as_subclass(kind)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        wait_for(self, on_host=True)
        return self.__deepcopy__(memo)  # of its own type now

    def __reduce_ex__(self, protocol: Any) -> Any:
        wait_for(self, on_host=True)
        return self.__reduce_ex__(protocol)


def can_await(tensors: Iterable[Tensor]) -> bool:
    """True if uses of these tensors can be detected: no type has a ``__torch_function__`` of its own."""
    functions = [getattr(kind, "__torch_function__", None) for kind in set(map(type, tensors))]
    return all(getattr(function, "__func__", function) in _FUNCTIONS for function in functions)


def expect(tensors: Iterable[Tensor], arrival: Arrival) -> None:
    """From now on, any use of one of these tensors calls ``arrival``.

    Args:
        tensors: kept alive by the caller until `arrived` is called with them.
        arrival: waits for their values, calls `arrived` once they are there for all streams, or raises.
    """
    for tensor in tensors:
        _arrivals[id(tensor)] = arrival
        tensor.__class__ = _awaited_type(type(tensor))


def arrived(tensors: Iterable[Tensor]) -> None:
    """Make tensors ordinary again: their values have arrived or never will."""
    for tensor in tensors:
        if isinstance(tensor, Awaited):  # its type first: a thread that finds nothing to wait for repeats its call
            tensor.__class__ = type(tensor).__bases__[1]
        _arrivals.pop(id(tensor), None)


def wait_for(tensor: Any, on_host: bool = False) -> None:
    """Wait until a tensor has its values; returns at once for anything else. See `Arrival`."""
    arrival = _arrivals.get(id(tensor))
    if arrival is not None:
        arrival(on_host)


def all_arrivals() -> list[Arrival]:
    """The wait functions of everything in flight in this process."""
    return list(dict.fromkeys(_arrivals.values()))


_types: dict[type, type] = {}


def _awaited_type(own: type) -> type:
    if own not in _types:
        _types[own] = type(own)(f"Awaited{own.__name__}", (Awaited, own), {"__slots__": ()})
    return _types[own]
