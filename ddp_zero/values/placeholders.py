"""Tensors in place of values that are not here: `Awaited` tensors wait for them on use, an `AbsentGradient` raises.

[Note: parameters in flight]
While a sync is under way after its step (``sync="forward"``), its parameters have a different type: a subclass of their
own type with a ``__torch_function__``. Torch calls that before every operation on such a tensor: a layer,
``state_dict()``, ``param.data``, an EMA update, a copy. It waits for the tensors among the arguments, which restores
their own type, and repeats the call. So any use of a parameter waits, also an unforeseen use, and a parameter that has
arrived costs nothing. Reading only a shape or ``param.grad`` does not wait.

Two uses are not detected: memory that was aliased before (``view = param.data`` kept from an earlier step), and
functions that pass a tensor to C++ without checking its type: ``torch.Tensor(param)``, ``tensor.new_tensor(param)`` and
others that `ZeroRedundancyOptimizer.finish_sync` names. The hooks of `before_forward` make modules wait for their own
parameters, wherever these are then used.

On an accelerator the first use makes *its stream* wait, and receives there. Other streams read the same memory, so the
type stays until the values are there for the host too: until then further streams wait for the stream that received.

Alternatives considered: those pre-hooks alone (they miss tied weights, averages, writes, ``state_dict()``).

[Note: absent gradients]
Stage 2 puts an `AbsentGradient` into ``param.grad`` where it keeps no gradient on this rank. None would mean "no
gradient", and ``torch.nn.utils.clip_grad_norm_`` would silently clip by a partial norm. The placeholder has the
parameter's shape and dtype and one element of memory; computing with it raises an error that says where the gradient
is. Once it was set to zero it stands for a gradient of zeros, and computing with it makes it an ordinary gradient.

It follows its model: ``model.to(...)``, ``model.cpu()`` and the like move gradients with their parameters, and an
absent one stays absent in the new dtype and place. Tracers (`torch.compile`, `torch.export`) describe gradients, so its
structure can be read. What would make a second tensor of its values (``clone``, ``detach``, pickle) is refused.
"""

import linecache
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

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


_ATTRIBUTES = ("grad", "requires_grad", "shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "output_nr")
_METHODS = ("size", "dim", "numel", "register_hook", "register_post_accumulate_grad_hook")
_READS_NO_VALUES = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(getattr(Tensor, name) for name in _METHODS),
    Tensor.grad.__set__,  # type: ignore[union-attr]
}
_FUNCTIONS = (Tensor.__dict__["__torch_function__"].__func__, torch.nn.Parameter.__torch_function__)


class Arrival(Protocol):
    """Waits for the values of a tensor."""

    def __call__(self, on_host: bool = False) -> None:
        """Make the current stream wait, or with ``on_host`` the host, which makes the tensor ordinary again."""


_arrivals: dict[int, Arrival] = {}  # by id of a live tensor

not_awaiting_params = torch._C.DisableTorchFunctionSubclass
"""A context in which uses of parameters do not wait until these are received: for code that reads addresses, versions,
flags or gradients of many parameters, but no values."""


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
            with not_awaiting_params():
                return func(*args, **kwargs)
        for tensor in among(Awaited, [args, kwargs]):
            wait_for(tensor)
        if any(True for _ in among(Awaited, [args, kwargs])):  # there for this stream, but not for all yet
            with not_awaiting_params():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def detach(self) -> Any:
        """Wait, then detach. ``torch.nn.Parameter(param)`` requires a result of the type that its argument had."""
        is_for_parameter = sys._getframe(1).f_code is torch.nn.Parameter.__new__.__code__
        wait_for(self, on_host=is_for_parameter)
        own: Any = self
        if is_for_parameter:  # of its own type now
            return Tensor._make_subclass(type(own), own)
        with not_awaiting_params():
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


def intercept_uses(tensors: Iterable[Tensor], arrival: Arrival) -> None:
    """From now on, any use of one of these tensors calls ``arrival``.

    The caller keeps them alive until ``arrival`` has waited for their values and called `stop_intercepting`, once the
    values are there for all streams. Or it raises.
    """
    for tensor in tensors:
        _arrivals[id(tensor)] = arrival
        tensor.__class__ = _awaited_type(type(tensor))


def stop_intercepting(tensors: Iterable[Tensor]) -> None:
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


@cache
def _awaited_type(own: type) -> type:
    return type(own)(f"Awaited{own.__name__}", (Awaited, own), {"__slots__": ()})


_MOVES = {
    *("to", "type", "cpu", "cuda", "xpu", "hpu", "ipu", "mtia", "double", "float", "half", "bfloat16"),
    *("cdouble", "cfloat", "chalf", "share_memory_", "pin_memory", "empty_like"),
}
"""Functions by which `torch.nn.Module` moves its parameters, and their gradients, to a different dtype or memory."""

_UNKNOWN = float("nan")  # an element of a gradient that is not here

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]

_TENSORS_OF_A_TENSOR = [getattr(Tensor, name) for name in ("_base", "real", "imag", "T", "H", "mT", "mH")]
"""Properties through which values could be read or written."""


_READ = (
    "opt.clip_grad_norm_(float('inf')), from the first step on, returns the norm of all gradients and clips nothing; "
    "opt.full_grad(param) gets one whole gradient on every rank; opt.owned_gradients() is what this rank steps. "
    "SAM's first pass runs in ddp.no_sync()."
)
_CHANGE = (
    "opt.owned_gradients() is what this rank steps, to change in place before opt.step(); opt.clip_grad_value_(value) "
    "limits every element."
)
_NORM = (
    "A norm of the gradients here would be partial; opt.clip_grad_norm_(max_norm) clips by the norm of all and returns "
    "it. To clip each by its own, change opt.owned_gradients(), with partition='parameters', which keeps them whole. "
    "SAM's first pass runs in ddp.no_sync()."
)
_OTHER = (
    "To train the model by another optimizer, call model.zero_grad(), opt.reset() and opt.detach() of this one first, "
    "and load the parameters if backward has stepped."
)
_CHECK = (
    "nonfinite='raise' or 'skip' checks the gradients of all ranks in the step; opt.owned_gradients() is what this "
    "rank steps."
)
_USED_UP = "Or do this by opt in every iteration from the first on, where steps then wait for opt.step():"
_SCALED = (
    "It was asked for by a torch.amp.GradScaler, and backward has stepped with gradients of the scaled loss: load a "
    "checkpoint, and use the scaler from the first step on, or loss_scale= of the optimizer."
)


def _advice(function: str, is_target: bool) -> str:
    """The advice for code that has called a torch function on an absent gradient, by the function and its caller."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(None))
    inside = takewhile(lambda name: name.split(".")[0] in ("torch", "ddp_zero", "traceback"), modules)
    if any(name.startswith("torch.optim.") for name in inside):
        return _OTHER
    if "norm" in function:
        return _NORM
    if function in ("isfinite", "isnan", "isinf"):
        return _CHECK
    return _CHANGE if is_target and function.endswith("_") and function != "__get__" else _READ


@cache
def _harmless() -> set[str]:
    """Functions that read no values."""
    return {
        *("__get__", "detach_", "requires_grad_", "size", "dim", "numel", "stride", "element_size", "data_ptr"),
        *("is_floating_point", "is_complex", "is_contiguous", "untyped_storage", "storage_offset", "nelement"),
        *("get_device", "ndimension", "__len__", "is_shared", "is_pinned", "__hash__"),
        *("_is_view", "is_conj", "is_neg", "is_inference", "_has_compatible_shallow_copy_type"),
    }


class AbsentGradient(Tensor):
    """A gradient that is not on this rank; any computation with it raises `RuntimeError` with reason and remedy."""

    consumed: bool  # whether the step inside backward has used it up; if not, its owner has it
    zeroed: bool  # whether the user has set it to zero since it was shown
    found_inf: Tensor | None  # the found-inf tensor of a `GradScaler`, set once ``unscale_`` has run
    part: Tensor | None  # the elements that this rank has if the parameter is cut, 1-D
    _reason: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Allow functions that read no values, zeroing and unscaling; refuse everything else, but of zeros."""
        if func == _GET_DATA:
            return args[0]  # as `param.grad.data.zero_()` is written
        if func.__name__ == "zero_" or (func.__name__ == "fill_" and args[1:] == (0,)):
            return args[0].set_to_zero()
        if func.__name__ in _harmless() and getattr(func, "__self__", None) not in _TENSORS_OF_A_TENSOR:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func.__name__ in _MOVES and isinstance(args[0], AbsentGradient):
            return args[0].move(func, args[1:], kwargs or {})
        if func == _SET_DATA and all(isinstance(arg, AbsentGradient) for arg in args):
            return args[0].become(args[1])
        if func.__name__ == "_foreach_zero_":
            for grad in args[0]:
                if isinstance(grad, AbsentGradient):
                    grad.set_to_zero()
            func([grad for grad in args[0] if not isinstance(grad, AbsentGradient)] or [torch.empty(0)])
            return None
        if func.__name__ == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale_present(func, *args)
        absent = list(among(AbsentGradient, [args, kwargs]))
        for unknown in (grad for grad in absent if not grad.zeroed):
            is_target = next(among(AbsentGradient, args[:1]), None) is not None
            unknown.refuse(_advice(func.__name__, is_target))
        for grad in absent:
            grad.become_zeros()
        return func(*args, **(kwargs or {}))

    def set_to_zero(self) -> "AbsentGradient":
        """Note that it was set to zero, and zero this rank's part of it."""
        self._fill(0)  # DDP's reducer copies gradients into new buckets, whatever they are
        self.zeroed = True
        if self.part is not None:
            self.part.zero_()
        return self

    def hide_value(self) -> None:
        """Stand for an unknown gradient again."""
        self._fill(_UNKNOWN)
        self.zeroed = False

    def _fill(self, value: float) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.as_strided((), ()).fill_(value if self.is_floating_point() else 0)

    def become_zeros(self) -> None:
        """Once it was set to zero: become an ordinary gradient of zeros, with memory of its own."""
        with torch._C.DisableTorchFunctionSubclass():
            _SET_DATA(self, torch.zeros(self.shape, dtype=self.dtype, device=self.device))
        self.__class__ = Tensor  # type: ignore[assignment]

    def move(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An absent gradient in a different dtype or place, by a function of `_MOVES`.

        RuntimeError for a memory format, if this rank has a part: its elements would have a different order.
        """
        formats = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.memory_format)]
        if self.part is not None and any(memory_format is not torch.preserve_format for memory_format in formats):
            self.refuse()
        args = [arg for arg in args if not isinstance(arg, torch.memory_format)]
        kwargs = {name: arg for name, arg in kwargs.items() if name != "memory_format"}
        with torch._C.DisableTorchFunctionSubclass():
            element = self.as_strided((), ())
            moved_element = func(element, *args, **kwargs)
            part = None if self.part is None else func(self.part, *args, **kwargs)
            if moved_element is element or not isinstance(moved_element, Tensor):
                return self if moved_element is element else moved_element  # ``type()`` is a name
            moved = _absent_of(moved_element, self.shape)
        moved.consumed, moved.zeroed, moved.found_inf = self.consumed, self.zeroed, self.found_inf
        moved.part, moved._reason = part, self._reason
        return moved

    def become(self, moved: "AbsentGradient") -> None:
        """Take the dtype and place of a moved gradient, as ``grad.data = moved`` does in a moved module."""
        with torch._C.DisableTorchFunctionSubclass():
            _SET_DATA(self, moved)
        self.part = moved.part

    def refuse(self, advice: str = _READ) -> NoReturn:
        """Raise `RuntimeError` with the reason, a remedy and the line that used the gradient."""
        when = f"{self._reason} {_USED_UP}" if self.consumed and advice is not _OTHER else self._reason
        message = f"{when} {advice} The line to change: {_line_outside()}."
        raise RuntimeError(f"{message} [ZERO-402]" if self.consumed else f"{message} [ZERO-401]")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentGradient({self._reason!r})"


def absent_gradient(param: Tensor, consumed: bool, reason: str, part: Tensor | None = None) -> AbsentGradient:
    """A placeholder for a parameter's gradient of which this rank has at most ``part``; ``reason`` is for messages."""
    element = torch.full((), _UNKNOWN if param.is_floating_point() else 0, dtype=param.dtype, device=param.device)
    absent = _absent_of(element, param.shape)
    absent.consumed = consumed
    absent.zeroed = False
    absent.found_inf = None
    absent.part = part
    absent._reason = reason
    return absent


def _absent_of(element: Tensor, shape: torch.Size) -> AbsentGradient:
    """A tensor on the memory of one element; not a view, as `as_subclass` would make it: tracers follow views."""
    return Tensor._make_subclass(AbsentGradient, element.expand(shape))


def on_this_rank(grad: Tensor) -> Tensor | None:
    """This rank's part of a gradient: all of it, its own elements if it is cut, or None."""
    return grad.part if isinstance(grad, AbsentGradient) else grad


def on_its_owner(grad: Tensor) -> Tensor | None:
    """As `on_this_rank`, on a rank that has the gradient unless a step has used it up; zeros if it was zeroed since."""
    if isinstance(grad, AbsentGradient) and grad.zeroed and grad.part is None:
        grad.become_zeros()
    return on_this_rank(grad)


def report_nonfinite(grads: Iterable[Tensor | None]) -> None:
    """Report to this rank's `GradScaler` that some rank found a non-finite gradient.

    On a rank where all gradients are present, the scaler has already checked them all.
    """
    for grad in grads:
        if isinstance(grad, AbsentGradient) and grad.found_inf is not None:
            grad.found_inf.fill_(1.0)


def _line_outside() -> str:
    """File, line and text of the innermost call that is neither in this library nor in torch."""
    for frame, number in traceback.walk_stack(None):
        if frame.f_globals.get("__name__", "").split(".")[0] not in ("torch", "ddp_zero", "traceback"):
            file = frame.f_code.co_filename
            return f"{file}:{number}: {linecache.getline(file, number).strip()}"
    return "unknown"


def _unscale_present(func: Any, grads: Sequence[Tensor], found: Tensor, inverse_scale: Tensor) -> None:
    """Unscale, as a `GradScaler` does, the gradients on this rank; the optimizer's step checks with other ranks."""
    present = []
    for grad in grads:
        if not isinstance(grad, AbsentGradient):
            present.append(grad)
        elif grad.consumed and not grad.zeroed:
            raise RuntimeError(f"{grad._reason} {_SCALED} [ZERO-314]")
        else:
            grad.found_inf = found
            present += [] if grad.part is None else [grad.part]
    if present:
        func(present, found, inverse_scale)
