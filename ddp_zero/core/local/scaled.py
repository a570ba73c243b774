"""Gradients as the inner optimizer gets them: times the factors of a step, copied to where memory begins, or changed.

Factors and copies leave ``param.grad`` as it is. Users may change what a rank owns; in stage 1 every other rank keeps
what was averaged. From then on a gradient counts on its owner only: norms are gathered from owners, and of a parameter
that is cut each owner takes its own part. Nothing else may change gradients before the step: DDP, for one, would
average what the owner has changed with what the others have not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ddp_zero.core.local.masters import GradientSource, SteppedTensors
from ddp_zero.core.local.parameters import ParameterTable

ALIGNMENT = 64
"""Bytes: where CPU allocations begin; CUDA's begin at multiples of it."""


@dataclass(frozen=True)
class GradientFactors:
    """The factors that a step multiplies gradients by, in this order.

    Attributes:
        inverse_scale: one over the loss scale, rounded to fp32; None means 1.
        coefficients: clipping coefficients by parameter group; groups left out are not clipped.
        groups: the group of every parameter, by index.
    """

    inverse_scale: Tensor | float | None = None
    coefficients: Mapping[int, Tensor | float] = field(default_factory=dict)
    groups: Sequence[int] = ()

    def apply(self, index: int, grad: Tensor) -> Tensor:
        """A parameter's gradient times its factors: a new tensor, unless there are no factors."""
        if self.inverse_scale is not None:
            grad = _times(grad, self.inverse_scale)
        if self.coefficients and self.groups[index] in self.coefficients:
            grad = _times(grad, self.coefficients[self.groups[index]])
        return grad

    def __bool__(self) -> bool:
        return self.inverse_scale is not None or bool(self.coefficients)


class ScaledGradients:
    """Gradients as the step uses them: in the dtype of the stepped tensor, times its factors.

    Args:
        stepped: the tensors that are stepped.
        source: the gradients.
        factors: the factors to multiply them by.
    """

    def __init__(self, stepped: SteppedTensors, source: GradientSource, factors: GradientFactors) -> None:
        self._stepped = stepped
        self._source = source
        self._factors = factors

    def gradient(self, index: int) -> Tensor | None:
        """The scaled gradient: a new tensor, unless there are no factors."""
        grad = self._stepped.gradient(index, self._source)
        return None if grad is None else self._factors.apply(index, grad)

    def exact(self, index: int) -> None:
        """None: ``gradient`` is exact."""


class AlignedGradients:
    """Gradients that begin where memory that is allocated does, as DDP's own do: products of matrices round by that.

    Args:
        source: the gradients, in buckets.
    """

    def __init__(self, source: GradientSource) -> None:
        self._source = source

    def gradient(self, index: int) -> Tensor | None:
        """The gradient: a copy if it begins elsewhere."""
        return _aligned(self._source.gradient(index))

    def exact(self, index: int) -> Tensor | None:
        """The same in the dtype of the sum, if that differs."""
        return _aligned(self._source.exact(index))


class _Noted(NamedTuple):
    """A parameter, and address and version of its gradient at a moment."""

    param: Tensor
    address: int
    version: int


class OwnedEdits:
    """Notes gradients when users get what this rank owns of them, as aliases with version counters of their own."""

    def __init__(self) -> None:
        self._noted: list[_Noted] = []

    def note(self, params: Sequence[Tensor]) -> None:
        """Gradients are as they should be: from now on any change that is not made through an alias is wrong."""
        grads = [(param, param.grad) for param in params]
        self._noted = [_Noted(param, grad.data_ptr(), grad._version) for param, grad in grads if grad is not None]

    def forget(self) -> None:
        """Forget gradients that were used or dropped."""
        self._noted = []

    def forget_dropped(self) -> None:
        """Before a forward pass: forget gradients that were set to None without the optimizer."""
        self._noted = [noted for noted in self._noted if noted.param.grad is not None]

    @property
    def are_made(self) -> bool:
        """Whether gradients may have been changed on their owners alone."""
        return bool(self._noted)

    def hold(self, table: ParameterTable) -> bool:
        """As `are_made`, after a check that nothing else has changed gradients since. Alike on every rank.

        Raises:
            RuntimeError: naming the first parameter whose gradient was changed.
        """
        for param, *mark in self._noted:
            grad = param.grad
            if grad is not None and [grad.data_ptr(), grad._version] != mark:
                raise RuntimeError(
                    "Expected no other change of gradients between opt.owned_gradients() and opt.step(), got one of "
                    f"{table.label(table.index_of[param])}, by a backward pass, GradScaler.unscale_ or code over "
                    "param.grad. What opt.owned_gradients() has changed is on its owner only (stage 1), and they would "
                    "mix it with other ranks' gradients. Call opt.owned_gradients() after them; opt.clip_grad_norm_ "
                    "and opt.clip_grad_value_ also work after it. To drop gradients, call opt.zero_grad()."
                )
        return self.are_made

    def source(self, source: GradientSource, stepped: SteppedTensors) -> GradientSource:
        """Where a step finds gradients: if owners have changed theirs, no more than each owns of a cut parameter."""
        return _OwnParts(source, stepped) if self.are_made else source


class _OwnParts:
    """Gradients of which a rank sees nothing but what it owns."""

    def __init__(self, source: GradientSource, stepped: SteppedTensors) -> None:
        self._source = source
        self._stepped = stepped

    def gradient(self, index: int) -> Tensor | None:
        """The gradient, 1-D of this rank's part if the parameter is cut."""
        return self._own(index, self._source.gradient(index))

    def exact(self, index: int) -> Tensor | None:
        """The same in the dtype of the sum, if that differs."""
        return self._own(index, self._source.exact(index))

    def _own(self, index: int, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else self._stepped.own_part(index, grad)


def _aligned(grad: Tensor | None) -> Tensor | None:
    return grad if grad is None or grad.data_ptr() % ALIGNMENT == 0 else grad.clone()


def _times(grad: Tensor, factor: Tensor | float) -> Tensor:
    """The product in the gradient's dtype and on its device, where a 0-d gradient would take those of the factor."""
    factor = factor.to(grad.device) if isinstance(factor, Tensor) else factor
    return (grad * factor).to(grad.dtype)
