"""Optimizers that only the fuzzer uses, besides those of `tests.multiproc.cases`."""

from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from ddp_zero import elementwise
from tests.multiproc import small_models
from tests.multiproc.cases import OptimizerCase, optimizer_case


class PickyError(ValueError):
    """What `ToyPicky` raises."""


class ToyCoupled(Optimizer):
    """SGD with a step size from all gradients together, kept in the group: each rank would find one of its own."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = _evaluated(closure)
        for group in self.param_groups:
            grads = [param.grad for param in group["params"] if param.grad is not None]
            found = sum(float(grad.double().square().sum()) for grad in grads) ** 0.5
            group["d"] = 0.9 * group["d"] + 0.1 * found
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * group["d"])
        return loss


@elementwise
class ToyScheduleFree(small_models.ToyScheduleFree):
    """The toy that begins in training mode, and may be given a closure."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr)
        for options in (self.defaults, *self.param_groups):
            options["train_mode"] = True

    def step(self, closure: Any = None) -> Any:
        loss = _evaluated(closure)
        super().step()
        return loss


class ToyPicky(Optimizer):
    """SGD that refuses a parameter of two dimensions at its fourth step: only who owns one raises."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = _evaluated(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["steps"] = state.get("steps", 0) + 1
                if state["steps"] == 4 and param.dim() == 2:
                    raise PickyError(f"a parameter of shape {list(param.shape)}")
                param.add_(param.grad, alpha=-group["lr"])
        return loss


def _evaluated(closure: Any) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


_OWN = {
    "toy coupled": OptimizerCase("toy coupled", partial(ToyCoupled), {"lr": 1e-2}),  # not tried: noticed while training
    "toy schedule-free": OptimizerCase("toy schedule-free", ToyScheduleFree, {"lr": 1e-2}),
    "toy picky": OptimizerCase("toy picky", ToyPicky, {"lr": 1e-2}),
}


def find_optimizer(name: str) -> OptimizerCase:
    """An optimizer's class and options by name."""
    return _OWN[name] if name in _OWN else optimizer_case(name)
