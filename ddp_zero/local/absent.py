"""What stands in ``param.grad`` where stage 2 keeps no gradient on this rank.

None would be taken for "no gradient", and ``torch.nn.utils.clip_grad_norm_`` would clip by the norm of what is left,
silently. An `AbsentGradient` has the parameter's shape and dtype and one element of memory; whoever computes with it is
told where the gradient is.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

_HARMLESS = {
    *("__get__", "zero_", "detach_", "requires_grad_", "size", "dim", "numel", "stride", "element_size", "data_ptr"),
    *("is_floating_point", "is_complex", "is_contiguous", "untyped_storage", "storage_offset", "nelement", "__hash__"),
    *("get_device", "ndimension", "__len__"),
}
"""What does not read values; setting to zero is what `zero_grad(set_to_none=False)` does to every gradient."""

_TENSORS_OF_A_TENSOR = [getattr(Tensor, name) for name in ("data", "_base", "real", "imag", "T", "H", "mT", "mH")]
"""Properties through which values could be read or written."""


class AbsentGradient(Tensor):
    """A gradient that is not here; any computation with it raises `RuntimeError` with the reason and the remedy.

    Attributes:
        consumed: whether it was used up by the step inside backward; if not, its owner has it.
        zeroed: how often it was set to zero, which changes nothing.
        told: where a `GradScaler` notes that it has found a gradient that is not finite, if it has looked.
    """

    consumed: bool
    zeroed: int
    told: Tensor | None
    _reason: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let attributes through, nothing else."""
        if func.__name__ in _HARMLESS and getattr(func, "__self__", None) not in _TENSORS_OF_A_TENSOR:
            if func.__name__ == "zero_":
                args[0].zeroed += 1
                return args[0]
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func.__name__ == "_foreach_zero_":
            for grad in args[0]:
                if isinstance(grad, AbsentGradient):
                    grad.zeroed += 1
            func([grad for grad in args[0] if not isinstance(grad, AbsentGradient)] or [torch.empty(0)])
            return None
        if func.__name__ == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale_present(func, *args)
        absent = _first_absent([*args, *(kwargs or {}).values()])
        assert absent is not None, "torch asks only where one is among the arguments"
        return absent.refuse()

    def refuse(self) -> NoReturn:
        """Raise `RuntimeError` with the reason."""
        raise RuntimeError(self._reason)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Its reason, without values."""
        return f"AbsentGradient({self._reason!r})"


def absent_gradient(param: Tensor, consumed: bool, reason: str) -> AbsentGradient:
    """Make one for a parameter.

    Args:
        param: whose shape, dtype and device it takes.
        consumed: see `AbsentGradient`.
        reason: the message of the error.
    """
    one_element = torch.full((), float("nan") if param.is_floating_point() else 0, dtype=param.dtype).to(param.device)
    absent = one_element.expand(param.shape).as_subclass(AbsentGradient)
    absent.consumed = consumed
    absent.zeroed = 0
    absent.told = None
    absent._reason = reason
    return absent


def is_present(grad: Tensor | None) -> bool:
    """Whether there is a gradient, and it is here."""
    return grad is not None and not isinstance(grad, AbsentGradient)


def tell_nonfinite(grads: Iterable[Tensor | None]) -> None:
    """Some rank has found a gradient that is not finite: have this rank's `GradScaler` know it, too.

    A rank all of whose gradients are present has seen what there is to see.
    """
    for grad in grads:
        if isinstance(grad, AbsentGradient) and grad.told is not None:
            grad.told.fill_(1.0)


def _unscale_present(func: Any, grads: Sequence[Tensor], found: Tensor, inverse_scale: Tensor) -> None:
    """What a `GradScaler` does to gradients, to those that are here; the optimizer's step asks the other ranks."""
    present = []
    for grad in grads:
        if not isinstance(grad, AbsentGradient):
            present.append(grad)
        elif grad.consumed:
            grad.refuse()
        else:
            grad.told = found
    if present:
        func(present, found, inverse_scale)


def _first_absent(value: Any) -> AbsentGradient | None:
    if isinstance(value, AbsentGradient):
        return value
    if isinstance(value, list | tuple):
        return next((found for item in value if (found := _first_absent(item)) is not None), None)
    return None
