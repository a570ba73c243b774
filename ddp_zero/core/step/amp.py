"""What `torch.amp.GradScaler` reports to an optimizer whose ``step`` it calls even if gradients are not finite."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AmpState:
    """The report.

    Attributes:
        scale: what gradients must still be divided by; None if they have been.
        found_nonfinite: above 0 if this rank has seen a gradient that is not finite.
    """

    scale: Tensor | None
    found_nonfinite: Tensor


def amp_state(optimizer: object, has_loss_scale: bool, joins: bool) -> AmpState | None:
    """What a `GradScaler` has set on an optimizer before it calls ``step()``; None without one.

    Args:
        optimizer: the one that the scaler steps.
        has_loss_scale: whether it has a loss scale of its own.
        joins: whether ranks may have run out of inputs.

    Raises:
        RuntimeError: if the scaler cannot be followed.
    """
    left = vars(optimizer)  # not by getattr, which would find attributes of the inner optimizer
    found = left.get("found_inf")
    if found is None:
        return None
    if has_loss_scale:
        raise RuntimeError(
            "Expected one loss scale, got loss_scale= of the optimizer and a torch.amp.GradScaler. Use one of them."
        )
    if joins:
        raise RuntimeError(
            "Expected no torch.amp.GradScaler under Join, got one: a rank that has joined knows nothing of its "
            "scale. Use loss_scale= of the optimizer instead, or bfloat16, which needs none."
        )
    return AmpState(left.get("grad_scale"), torch.as_tensor(found, dtype=torch.float32))


def check_unscaled(amp: AmpState | None, has_stepped: bool) -> None:
    """Check at ``opt.step()`` that no step has used gradients that a `GradScaler` had scaled.

    Raises:
        RuntimeError: if one has, inside backward.
    """
    if amp is not None and has_stepped:
        raise RuntimeError(
            "Expected unscaled gradients, got a step under torch.amp.GradScaler, and backward has stepped already "
            "with scaled ones. Use the GradScaler from the first step on, or build the optimizer with loss_scale= "
            "or overlap_with_ddp=False."
        )
