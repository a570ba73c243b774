"""Gradients as the inner optimizer gets them: times the factors of a step, or copied to where memory begins.

``param.grad`` stays as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ddp_zero.local.masters import GradientSource, SteppedTensors

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


def _aligned(grad: Tensor | None) -> Tensor | None:
    return grad if grad is None or grad.data_ptr() % ALIGNMENT == 0 else grad.clone()


def _times(grad: Tensor, factor: Tensor | float) -> Tensor:
    """The product in the gradient's dtype and on its device, where a 0-d gradient would take those of the factor."""
    factor = factor.to(grad.device) if isinstance(factor, Tensor) else factor
    return (grad * factor).to(grad.dtype)
