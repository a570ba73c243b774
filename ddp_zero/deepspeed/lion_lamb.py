"""Lion and Lamb, which torch does not have, with the options that DeepSpeed's have.

Both are a page; a library of optimizers as a dependency would have other options and defaults (bounds of Lamb's
coefficient, bias correction), and would have to be installed for them. No claim on speed: foreach is not used.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ddp_zero.elements.elementwise import elementwise


def _checked(lr: float, betas: tuple[float, float], weight_decay: float) -> dict[str, Any]:
    """Options that both have.

    Raises:
        ValueError: for one out of its range.
    """
    first, second = betas
    for name, value in {"lr": lr, "weight_decay": weight_decay}.items():
        if not value >= 0:
            raise ValueError(f"Expected {name} of at least 0, got {value!r}.")
    if not (0 <= first < 1 and 0 <= second < 1):
        raise ValueError(f"Expected betas from 0 up to 1, got {betas!r}.")
    return {"lr": lr, "betas": (first, second), "weight_decay": weight_decay}


@elementwise
class Lion(Optimizer):
    """The sign of a momentum: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.

    Args:
        params: as for any torch optimizer.
        lr: learning rate.
        betas: shares of the momentum in the update, and of the old momentum in the new one.
        weight_decay: decoupled.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, _checked(lr, betas, weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; returns what the closure returns, if there is one."""
        loss = _evaluate(closure)
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                momentum = state["exp_avg"]
                update = (momentum * first).add_(param.grad, alpha=1 - first).sign_()
                param.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                momentum.mul_(second).add_(param.grad, alpha=1 - second)
        return loss


class Lamb(Optimizer):
    """Adam with a rate for each parameter: You et al., "Large Batch Optimization for Deep Learning", 2020.

    A parameter's rate is ``lr`` times the ratio of its own norm to that of its update, within bounds.

    Args:
        params: as for any torch optimizer.
        lr: learning rate.
        bias_correction: correct the moments of the first steps.
        betas: of both moments.
        eps: added to the root of the second moment.
        eps_inside_sqrt: add it before taking the root.
        weight_decay: part of the update, and of its norm.
        max_coeff: the largest ratio.
        min_coeff: the smallest ratio.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        own = dict(eps=eps, eps_inside_sqrt=eps_inside_sqrt, max_coeff=max_coeff, min_coeff=min_coeff)
        super().__init__(params, {**_checked(lr, betas, weight_decay), **own, "bias_correction": bias_correction})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; returns what the closure returns, if there is one."""
        loss = _evaluate(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, param.grad, group)
        return loss

    def _step(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[param], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        state["step"] += 1
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(first).add_(grad, alpha=1 - first)
        square.mul_(second).addcmul_(grad, grad, value=1 - second)
        root = (square + group["eps"]).sqrt_() if group["eps_inside_sqrt"] else square.sqrt().add_(group["eps"])
        update = mean.div(root).add_(param, alpha=group["weight_decay"])
        size, change = param.norm(), update.norm()
        ratio = (size / change).clamp(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((size == 0) | (change == 0), torch.ones_like(ratio), ratio)
        rate = group["lr"]
        if group["bias_correction"]:
            rate *= math.sqrt(1 - second ** state["step"]) / (1 - first ** state["step"])
        param.sub_(update.mul_(ratio), alpha=rate)


def _evaluate(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
