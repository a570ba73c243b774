"""Parameters whose values are on their way: whoever uses one waits for them first.

While a sync is under way after its step (``sync="forward"``), its parameters have another type, a subclass of their own
with a ``__torch_function__``. Torch asks that before it does anything with such a tensor: a layer, ``state_dict()``,
``param.data``, an average kept beside, a copy. It waits for the tensors among the arguments, which gives them back
their own type, and repeats the call. So a use that nobody has thought of waits, and a parameter that has come costs
nothing. What only asks for a shape, or for ``param.grad``, does not wait.

Not seen are memory that was aliased before (``view = param.data`` kept from an earlier step), and functions that take a
tensor to C++ without asking for its type: ``torch.Tensor(param)``, ``tensor.new_tensor(param)`` and others that
`ZeroRedundancyOptimizer.finish_sync` names. `before_forward` has modules wait for their own parameters, whoever they
hand them to.

Alternatives considered: those pre-hooks alone (they miss tied weights, averages, writes, ``state_dict()``).
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_ATTRIBUTES = ("grad", "requires_grad", "shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "output_nr")
_METHODS = ("size", "dim", "numel", "register_hook", "register_post_accumulate_grad_hook")
_READS_NO_VALUES = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(getattr(Tensor, name) for name in _METHODS),
    torch._C.TensorBase.grad.__set__,  # type: ignore[union-attr]
}
_FUNCTIONS = (Tensor.__dict__["__torch_function__"].__func__, torch.nn.Parameter.__torch_function__)

_arrivals: dict[int, Callable[[], None]] = {}  # by id of a tensor that is alive, what brings its values

untouched = torch._C.DisableTorchFunctionSubclass
"""A context in which nothing waits: for code that looks at many parameters and at no values."""


class Awaited:
    """What the type of a tensor has in addition while its values are on their way."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Wait for every argument that is awaited, then do what was asked."""
        kwargs = kwargs or {}
        if func in _READS_NO_VALUES:
            with untouched():
                return func(*args, **kwargs)
        for tensor in _awaited_among([args, kwargs]):
            wait_for(tensor)
        return func(*args, **kwargs)

    def detach(self) -> Any:
        """Wait for it. `torch.nn.Parameter` of a parameter then insists on one of the type that its argument has."""
        is_for_parameter = sys._getframe(1).f_code is torch.nn.Parameter.__new__.__code__
        wait_for(self)
        own: Any = self  # of its own type now
        return Tensor._make_subclass(type(own), own) if is_for_parameter else own.detach()

    def as_subclass(self, kind: type) -> Any:
        """Torch does not ask before it does this."""
        wait_for(self)
        return self.as_subclass(kind)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        wait_for(self)
        return self.__deepcopy__(memo)  # of its own type now

    def __reduce_ex__(self, protocol: Any) -> Any:
        wait_for(self)
        return self.__reduce_ex__(protocol)


def can_await(tensors: Iterable[Tensor]) -> bool:
    """Whether uses of these tensors can be noticed: not if a type has a ``__torch_function__`` of its own."""
    functions = [getattr(kind, "__torch_function__", None) for kind in set(map(type, tensors))]
    return all(getattr(function, "__func__", function) in _FUNCTIONS for function in functions)


def expect(tensors: Iterable[Tensor], arrival: Callable[[], None]) -> None:
    """From now on, the first use of one of these calls ``arrival``, which ends by `arrived`, or raises.

    Args:
        tensors: kept alive by the caller until then.
        arrival: waits for their values.
    """
    for tensor in tensors:
        _arrivals[id(tensor)] = arrival
        tensor.__class__ = _awaited_type(type(tensor))


def arrived(tensors: Iterable[Tensor]) -> None:
    """They have their values, or will never have them: they are ordinary tensors again."""
    for tensor in tensors:
        if isinstance(tensor, Awaited):  # its type first: a thread that finds nothing to wait for repeats its call
            tensor.__class__ = type(tensor).__bases__[1]
        _arrivals.pop(id(tensor), None)


def wait_for(tensor: Any) -> None:
    """Have its values."""
    arrival = _arrivals.get(id(tensor))
    if arrival is not None:
        arrival()


def all_arrivals() -> list[Callable[[], None]]:
    """Everything that is on its way in this process."""
    return list(dict.fromkeys(_arrivals.values()))


_types: dict[type, type] = {}


def _awaited_type(own: type) -> type:
    if own not in _types:
        _types[own] = type(own)(f"Awaited{own.__name__}", (Awaited, own), {"__slots__": ()})
    return _types[own]


def _awaited_among(values: Iterable[Any]) -> Iterator[Any]:
    """In arguments of torch functions: tensors, and sequences and dicts of them."""
    for value in values:
        if isinstance(value, Awaited):
            yield value
        elif isinstance(value, Mapping):
            yield from _awaited_among(value.values())
        elif isinstance(value, list | tuple):
            yield from _awaited_among(value)
