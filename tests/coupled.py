"""Toy optimizers that compute something from all parameters, in the ways of real ones."""

from typing import Any

import torch
from torch.optim import Optimizer


class ToyProdigy(Optimizer):
    """SGD whose step size grows with a sum over all parameters and gradients, kept in the groups, as Prodigy's does."""

    def __init__(self, params: Any, lr: float = 0.1, d0: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "d": d0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        stepped = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        moved = sum(float((param.grad * param).sum().abs()) for param in stepped if param.grad is not None)
        for group in self.param_groups:
            group["d"] = max(group["d"], min(1.0, group["d"] + 0.01 * moved))
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * group["d"])


class ToyScale(Optimizer):
    """SGD that divides by a running mean of gradient sizes, kept in a tensor on the optimizer."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.mean = torch.zeros(1)
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        sizes = [param.grad.abs().mean() for param in params if param.grad is not None and param.numel()]
        if sizes:
            self.mean.mul_(0.9).add_(torch.stack(sizes).mean(), alpha=0.1)
        for param in params:
            if param.grad is not None:
                param.sub_(self.param_groups[0]["lr"] * param.grad / (self.mean.to(param.dtype) + 1e-3))


class ToyPreNorm(Optimizer):
    """SGD that clips by the norm of all gradients inside ``step`` and keeps no trace of it, as LAMB's ``pre_norm``."""

    def __init__(self, params: Any, lr: float = 0.1, max_norm: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self.max_norm = int(max_norm)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norms = [param.grad.norm() for param in params if param.grad is not None]
        if not norms:
            return
        factor = (self.max_norm / torch.stack(norms).norm()).clamp(max=1.0)
        for param in params:
            if param.grad is not None:
                param.sub_(self.param_groups[0]["lr"] * param.grad * factor)


class ToyByPlace(Optimizer):
    """SGD whose rate depends on a parameter's place in its list, where a key of the group says so."""

    def __init__(self, params: Any, lr: float = 0.1, by_place: bool = False) -> None:
        super().__init__(params, {"lr": lr, "by_place": by_place})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for place, param in enumerate(group["params"]):
                if param.grad is not None:
                    scale = group["scales"][place] if "scales" in group else place if group["by_place"] else 1.0
                    param.add_(param.grad, alpha=-group["lr"] * scale)
