"""`torch.amp.GradScaler` over a mesh: all ranks skip a step together, and all scales follow the same path.

A scaler looks at the gradients of its own rank. With other experts, parts or stages on other ranks, each would find
something else. So the members take what this rank has found into their joint decision, and the outcome is written back
to where the scaler keeps its findings until ``update()``.

Torch hands an optimizer the findings, as ``found_inf``, but not the place (torch 2.13.0): the sum that it sets is a
copy. The caller's frame has the scaler, see `calling_scaler`. Alternatives considered: a scaler class
of our own, as torch has for FSDP (loops and frameworks build torch's); a gradient whose type notices the check, as in
stage 2 (a rank without gradients has none).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_zero.core.step import calling_scaler


class ScalerReport:
    """The report of a scaler that is about to call ``step()`` of an optimizer; RuntimeError if no scaler calls.

    ``found_inf`` is above 0 if a gradient of this rank is not finite; 0 without gradients.
    """

    def __init__(self, optimizer: Optimizer, found_inf: Any) -> None:
        calling = calling_scaler(optimizer)
        if calling is None:
            raise RuntimeError(
                "Expected found_inf to be set by a torch.amp.GradScaler that steps this optimizer, got no scaler among "
                "its callers. Call scaler.step(opt), or build the optimizer with loss_scale=. [ZERO-812]"
            )
        scaler, self._findings = calling
        self._found = torch.as_tensor(found_inf, dtype=torch.float32)
        self.scale = float(scaler.get_scale())

    @contextmanager
    def shown_to(self, members: Sequence[Optimizer], scale: Tensor | None) -> Iterator[None]:
        """Leave the findings on members, as the scaler does on an optimizer, while they step.

        ``scale`` is the divisor that gradients still need; None if they have been divided.
        """
        try:
            for member in members:
                vars(member).update(found_inf=self._found, grad_scale=scale)
            yield
        finally:
            for member in members:
                for name in ("found_inf", "grad_scale"):
                    vars(member).pop(name, None)

    def look_again(self, grads: Iterable[Tensor | None]) -> None:
        """Add gradients that were averaged after the scaler has looked: a sum of finite ones may have overflowed."""
        sums = [torch.isfinite(grad).all() for grad in grads if grad is not None]
        if sums:
            seen = torch.stack([total.to(self._found.device) for total in sums])
            self._found = self._found + (1.0 - seen.all().float())

    def write_back(self, has_stepped: bool) -> None:
        """Let the scaler know the outcome on all ranks; also where this rank has no gradient, so that it updates."""
        if not self._findings:
            self._findings[self._found.device] = torch.zeros((), device=self._found.device)
        for found in self._findings.values():
            found.fill_(0.0 if has_stepped else 1.0)
