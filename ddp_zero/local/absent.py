"""The placeholder in ``param.grad`` where stage 2 keeps no gradient on this rank.

None would mean "no gradient", and ``torch.nn.utils.clip_grad_norm_`` would silently clip by a partial norm. An
`AbsentGradient` has the parameter's shape and dtype and one element of memory; computing with it raises an error that
says where the gradient is.
"""

import linecache
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ddp_zero.local.stand_in import among

_HARMLESS = {
    *("__get__", "zero_", "detach_", "requires_grad_", "size", "dim", "numel", "stride", "element_size", "data_ptr"),
    *("is_floating_point", "is_complex", "is_contiguous", "untyped_storage", "storage_offset", "nelement", "__hash__"),
    *("get_device", "ndimension", "__len__"),
}
"""Functions that read no values; `zero_grad(set_to_none=False)` calls ``zero_`` on every gradient."""

_TENSORS_OF_A_TENSOR = [getattr(Tensor, name) for name in ("data", "_base", "real", "imag", "T", "H", "mT", "mH")]
"""Properties through which values could be read or written."""


class AbsentGradient(Tensor):
    """A gradient that is not on this rank; any computation with it raises `RuntimeError` with reason and remedy.

    Attributes:
        consumed: True if the step inside backward has used it up; if False, its owner has it.
        zeroed: how often it was set to zero.
        found_inf: the found-inf tensor of a `GradScaler`, set once ``unscale_`` has run; else None.
        part: the elements that this rank has if the parameter is cut, 1-D; else None.
    """

    consumed: bool
    zeroed: int
    found_inf: Tensor | None
    part: Tensor | None
    _reason: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Allow functions that read no values, zeroing and unscaling; refuse everything else."""
        if func.__name__ in _HARMLESS and getattr(func, "__self__", None) not in _TENSORS_OF_A_TENSOR:
            if func.__name__ == "zero_":
                args[0].zero_part()
                return args[0]
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func.__name__ == "_foreach_zero_":
            for grad in args[0]:
                if isinstance(grad, AbsentGradient):
                    grad.zero_part()
            func([grad for grad in args[0] if not isinstance(grad, AbsentGradient)] or [torch.empty(0)])
            return None
        if func.__name__ == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale_present(func, *args)
        absent = next(among(AbsentGradient, [args, kwargs]))  # torch calls this only if an argument is one
        return absent.refuse()

    def zero_part(self) -> None:
        """Count that it was set to zero, and set to zero what this rank has of it."""
        self.zeroed += 1
        if self.part is not None:
            self.part.zero_()

    def refuse(self) -> NoReturn:
        """Raise `RuntimeError` with the reason and the line that used the gradient."""
        raise RuntimeError(f"{self._reason} The line to change: {_line_outside()}.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The reason, without values."""
        return f"AbsentGradient({self._reason!r})"


def absent_gradient(param: Tensor, consumed: bool, reason: str, part: Tensor | None = None) -> AbsentGradient:
    """Make an `AbsentGradient` for a parameter.

    Args:
        param: determines shape, dtype and device.
        consumed: see `AbsentGradient`.
        reason: the message of the error.
        part: see `AbsentGradient`.
    """
    filler = float("nan") if param.is_floating_point() else 0
    one_element = torch.full((), filler, dtype=param.dtype, device=param.device)
    absent = one_element.expand(param.shape).as_subclass(AbsentGradient)
    absent.consumed = consumed
    absent.zeroed = 0
    absent.found_inf = None
    absent.part = part
    absent._reason = reason
    return absent


def is_present(grad: Tensor | None) -> bool:
    """True for a gradient that is on this rank."""
    return grad is not None and not isinstance(grad, AbsentGradient)


def on_this_rank(grad: Tensor) -> Tensor | None:
    """What this rank has of a gradient: all of it, its part of one that is cut, or nothing."""
    return grad.part if isinstance(grad, AbsentGradient) else grad


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
        elif grad.consumed:
            grad.refuse()
        else:
            grad.found_inf = found
            present += [] if grad.part is None else [grad.part]
    if present:
        func(present, found, inverse_scale)
