"""Sums in a wider dtype than the gradients that show them, and users' changes of either."""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ddp_zero.core.local.parameters import rounds_to


class _ExactSum:
    """A sum in its own dtype.

    Attributes:
        versions: of the sum and of the gradient that shows it when a user got the former.
    """

    __slots__ = ("total", "versions")

    def __init__(self, total: Tensor) -> None:
        self.total = total
        self.versions: tuple[int, int] | None = None


class ExactSums:
    """Sums in their own dtype.

    Attributes:
        of_gradient: the sums, by the gradients that show them rounded.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self.of_gradient = WeakTensorKeyDictionary()

    def keep(self, grad: Tensor, total: Tensor) -> None:
        """A gradient shows this sum from now on."""
        self.of_gradient[grad] = _ExactSum(total)

    def of(self, grad: Tensor) -> Tensor | None:
        """The sum that a gradient shows; None if there is none, or if the user has changed the gradient since.

        If the user has changed the sum instead (see `editable`), the gradient is made to show that.
        """
        kept: _ExactSum | None = self.of_gradient.get(grad)
        if kept is None or kept.versions is None:
            return None if kept is None else _still_exact(kept.total, grad)
        if not (rounds_to(kept.total, grad) or self._takes_up_edit(kept, grad)):
            return None
        kept.versions = kept.total._version, grad._version
        return kept.total

    def editable(self, grad: Tensor) -> Tensor | None:
        """As `of`, for a user to change in place."""
        exact = self.of(grad)
        if exact is not None:
            # the versions of now tell later which of the two the user has changed
            kept: _ExactSum = self.of_gradient[grad]
            kept.versions = exact._version, grad._version
        return exact

    def take_up_edits(self) -> None:
        """Have gradients show the sums that users have changed."""
        for grad, kept in list(self.of_gradient.items()):
            if kept.versions is not None:
                self.of(grad)  # writes an edited sum into the gradient

    def forget_edits(self) -> None:
        """Users change no sum from now on."""
        for kept in self.of_gradient.values():
            kept.versions = None

    def _takes_up_edit(self, kept: _ExactSum, grad: Tensor) -> bool:
        """Show the sum, which differs, if the user has changed the sum."""
        exact, versions = kept.total, kept.versions
        assert versions is not None, "a user got the sum"
        sum_changed, grad_changed = exact._version != versions[0], grad._version != versions[1]
        if sum_changed and not grad_changed:
            grad.data.copy_(exact)  # counts no version: it is no change of the user's
        elif sum_changed or not (grad_changed or rounds_to(exact, grad)):  # a NaN differs from itself
            raise RuntimeError(
                f"A gradient of shape {list(grad.shape)} was changed both in param.grad and in the result of "
                f"opt.owned_gradients(), or through .data ({self._where}). Change the result of "
                "opt.owned_gradients() in place, and nothing else. [ZERO-320]"
            )
        return bool(sum_changed)


def _still_exact(exact: Tensor, grad: Tensor) -> Tensor | None:
    """A sum if its rounded value equals a gradient; else None.

    To compare on an accelerator, the host would wait. There each element that was changed is taken from the gradient.
    """
    if grad.device.type == "cpu":
        return exact if rounds_to(exact, grad) else None
    return torch.where(exact.to(grad.dtype) == grad, exact, grad.to(exact.dtype))
