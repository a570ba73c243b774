"""Optimizers that only the fuzzer uses, besides those of `tests.multiproc.cases`."""

from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from ddp_zero import elementwise
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
class ToyScheduleFree(Optimizer):
    """SGD whose parameters are an interpolation in training and an average in evaluation."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    def train(self) -> None:
        """Parameters are what gradients are taken at."""
        self._switch(True)

    def eval(self) -> None:
        """Parameters are the average."""
        self._switch(False)

    @torch.no_grad()
    def _switch(self, trains: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is trains:
                continue
            group["train_mode"] = trains
            for param in group["params"]:
                if "z" in self.state[param]:
                    weight = 1 - group["beta"] if trains else 1 - 1 / group["beta"]
                    param.lerp_(self.state[param]["z"], weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = _evaluated(closure)
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("Expected the optimizer in training mode, got one in evaluation mode.")
            share = 1 / (group["k"] + 1)
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "z" not in state:
                    state["z"] = param.clone()
                param.lerp_(state["z"], share)
                param.add_(param.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                state["z"].sub_(param.grad, alpha=group["lr"])
            group["k"] += 1
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
