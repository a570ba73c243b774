"""The place where a `torch.amp.GradScaler` keeps its findings on an optimizer that it steps.

Torch hands an optimizer the findings, as ``found_inf``, but not the place (torch 2.13.0). `tools.check` tries the two
facts on which this file relies: the scaler is a caller's ``self``, and ``_per_optimizer_states`` has the findings.
"""

import traceback

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer


def calling_scaler() -> GradScaler | None:
    """The scaler in whose ``step()`` this is called, or None."""
    scalers = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(None))
    return next((one for one in scalers if isinstance(one, GradScaler)), None)


def findings_of(scaler: GradScaler, optimizer: Optimizer) -> dict[torch.device, Tensor]:
    """The scaler's findings on an optimizer, by device, which it keeps until ``update()``.

    Each is above 0 if a gradient is not finite.
    """
    findings: dict[torch.device, Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return findings
