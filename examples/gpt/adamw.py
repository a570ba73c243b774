"""AdamW in this training: its parameter groups, its learning rate, and its step with torch's own parts."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

BETAS = (0.9, 0.95)


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups: matrices with weight decay, biases and norms without."""
    params = list(model.named_parameters())  # named, so that messages can say which
    return [
        {"params": [(name, p) for name, p in params if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [(name, p) for name, p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def lr_factor(steps_done: int, steps: int) -> float:
    """Scale the learning rate: up for the first tenth of the steps, then down half a cosine to a tenth of the peak."""
    warm_up = max(1, steps // 10)
    if steps_done < warm_up:
        return (steps_done + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (steps_done - warm_up) / max(1, steps - warm_up)))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step, of either optimizer.

    Attributes:
        norm: norm of all gradients; None without clipping.
        skipped: reason for skipping the step; None if it was taken.
    """

    norm: float | None
    skipped: str | None

    def __str__(self) -> str:
        if self.norm is None:
            return ""
        return f"  grad norm {self.norm:.3g}, {'stepped' if self.skipped is None else 'not stepped'}"


@torch.no_grad()
def step_by_hand(model: nn.Module, optimizer: Optimizer, clip: float | None) -> Outcome:
    """Step torch's AdamW with fp32 masters, clipping and skipping, which a sharded optimizer does itself."""
    params = [param for group in parameter_groups(model) for _, param in group["params"]]
    stepped = [param for group in optimizer.param_groups for param in group["params"]]  # parameters, or their masters
    for param, master in zip(params, stepped, strict=True):
        if master is not param:
            master.grad, param.grad = param.grad.float(), None
    norm = None
    if clip is not None:  # as clip_grad_norm_ does, but that would compute the norm of bf16 gradients in bf16
        tensor_of = dict(zip(params, stepped, strict=True))
        total = nn.utils.get_total_norm([tensor_of[param].grad.float() for param in model.parameters()])
        nn.utils.clip_grads_with_norm_(stepped, clip, total)
        norm = total.item()
        if not math.isfinite(norm):
            return Outcome(norm, "the norm of all gradients is not finite")
    optimizer.step()
    for param, master in zip(params, stepped, strict=True):
        param.copy_(master)
    return Outcome(norm, None)
