"""Remembers, without waiting for the device, whose own gradients were not finite before they were averaged."""

from collections.abc import Sequence

import torch
from torch import Tensor


class LocalWatch:
    """One sum per bucket and backward pass since the last step: it is not finite if any of its gradients is not.

    Attributes:
        is_on: whether anybody will ask.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._seen: list[tuple[list[Tensor], Tensor]] = []

    def note(self, params: list[Tensor], buffer: Tensor) -> None:
        """A bucket is about to be averaged."""
        if self.is_on and buffer.layout is torch.strided:
            self._seen.append((params, buffer.sum(dtype=torch.promote_types(buffer.dtype, torch.float32))))

    def flags(self, param: Tensor) -> list[int]:
        """For each backward pass since the last step, in order: whether this rank's own bucket was not finite.

        A sum of finite gradients may overflow, so this is to be asked for parameters whose average was not finite.
        """
        sums = [total for params, total in self._seen if any(param is one for one in params)]
        return [int(not torch.isfinite(total)) for total in sums]

    def clear(self) -> None:
        """A step has been taken, or the gradients were dropped."""
        self._seen.clear()


def first_flagged(statements: Sequence[Sequence[int]]) -> int | None:
    """The first rank that was flagged in the earliest backward pass in which any was; one list of flags per rank."""
    for flags in zip(*statements, strict=True):
        if any(flags):
            return flags.index(1)
    return None
