"""Records, without waiting for the device, which rank's own gradients were not finite before they were averaged."""

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_REMEMBERED = 4096  # buckets, for loops that never step


class NonfiniteProbe:
    """One sum per bucket and backward pass since the last step: it is not finite if any of the gradients is not.

    Attributes:
        is_on: False if no step will need the sums; `screen` is not called then.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._seen: deque[tuple[list[Tensor], Tensor]] = deque(maxlen=_REMEMBERED)

    def screen(self, params: list[Tensor], buffer: Tensor) -> None:
        """Note the sum of a bucket that is about to be averaged."""
        if buffer.layout is torch.strided:
            self._seen.append((params, buffer.sum(dtype=torch.promote_types(buffer.dtype, torch.float32))))

    def flags(self, param: Tensor) -> list[int]:
        """For each backward pass since the last step, in order: whether this rank's own bucket was not finite.

        A sum of finite gradients may overflow, so this holds only for parameters whose average was not finite.
        """
        sums = [total for params, total in self._seen if any(param is one for one in params)]
        return [int(not torch.isfinite(total)) for total in sums]

    def clear(self) -> None:
        """Forget the sums, after a step or once the gradients were dropped."""
        self._seen.clear()


def culprit(statements: Sequence[Sequence[int]]) -> int | None:
    """The rank that the last non-finite gradient came from, or None; one list of flags, by pass, per rank.

    If gradients add up in ``param.grad``, a non-finite one is on every rank in the passes after its own, so the search
    goes back to its own. Earlier passes may have been dropped, which is not reported.
    """
    found = None
    for flags in reversed(list(zip(*statements, strict=True))):
        if any(flags):
            found = flags.index(1)
        if found is not None and not all(flags):
            break
    return found


def suspect_nonfinite(grads: Iterable[Tensor]) -> Tensor | float:
    """1 if the sum of any gradient is not finite, else 0: one fast reading pass, without waiting for the device.

    A sum is not finite if any element is not, but it may also overflow by itself, so the caller must check. Of
    gradients that are converted for it, one is held at a time.
    """
    sums = [grad.sum(dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
    if not sums:
        return 0.0
    return 1.0 - torch.stack([torch.isfinite(total).to(sums[0].device) for total in sums]).all().double()
