"""Small models that several tests train."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.multiproc.cases import OptimizerCase


class ToyScheduleFree(Optimizer):
    """Schedule-free SGD: gradients are taken at y, the result is x, and ``train`` and ``eval`` go between them.

    Writes through ``.data``, which leaves version counters as they are.
    """

    kind = "toy"
    switches = 0

    def __init__(self, params: Any, lr: float = 0.5, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "train_mode": False, "k": 0})

    def train(self) -> "ToyScheduleFree":
        """Parameters become y."""
        return self._switch(True, lambda beta: 1 - beta)

    def eval(self) -> "ToyScheduleFree":
        """Parameters become x."""
        return self._switch(False, lambda beta: 1 - 1 / beta)

    def _switch(self, train_mode: bool, weight: Callable[[float], float]) -> "ToyScheduleFree":
        self.switches += 1
        for group in self.param_groups:
            for param in group["params"]:
                if group["train_mode"] is not train_mode and "z" in self.state[param]:
                    param.data.lerp_(self.state[param]["z"], weight(group["beta"]))
            group["train_mode"] = train_mode
        return self

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("Expected train mode, got eval mode.")
            group["k"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    z = self.state[param].setdefault("z", param.detach().clone())
                    x = param.lerp(z, 1 - 1 / group["beta"])
                    z.sub_(param.grad, alpha=group["lr"])
                    x.lerp_(z, 1 / group["k"])
                    param.copy_(x.lerp(z, 1 - group["beta"]))

    def steps_so_far(self) -> int:
        """Writes nothing."""
        return int(self.param_groups[0]["k"])

    def scale_all(self, factor: float, fails_if: Callable[[Tensor], bool] = lambda param: False) -> None:
        """Writes to everything, but may stop on the way."""
        for group in self.param_groups:
            group["scaled"] = factor
            for param in group["params"]:
                param.data.mul_(factor)
                if fails_if(param):
                    raise ArithmeticError("stopped on the way")

    @property
    def mode(self) -> bool:
        return bool(self.param_groups[0]["train_mode"])

    @staticmethod
    def twice(number: int) -> int:
        return 2 * number


TOY = OptimizerCase("toy schedule-free", ToyScheduleFree)


def build_model() -> nn.Module:
    """Large enough for several buckets, some of which cut a parameter in mode ``elements``."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 67), nn.Tanh(), nn.LayerNorm(67), nn.Linear(67, 41), nn.Tanh(), nn.Linear(41, 3))


def wrapped(model: nn.Module, views: bool = True) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.006, gradient_as_bucket_view=views)
