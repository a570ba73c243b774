"""Everything that a loop may change between two steps and that a step made once could miss without a word.

Each change is made alike on the plain optimizer and on what a rank has of the sharded one.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer


class Side:
    """One of the two trainings that are compared.

    Args:
        model: as it is trained.
        optimizer: that the loop holds.
        local: that steps; the same as ``optimizer`` where nothing is sharded.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, local: Optimizer) -> None:
        self.model, self.optimizer, self.local = model, optimizer, local
        self.saved: Any = None

    @property
    def states(self) -> list[dict[str, Any]]:
        return [state for key, state in self.local.state.items() if isinstance(key, Tensor)]

    def set_options(self, **options: Any) -> None:
        for group in self.optimizer.param_groups:
            group.update(options)


def _replace_moments(side: Side) -> None:
    for state in side.states:
        state["exp_avg"] = state["exp_avg"] * 0.5


def _replace_counters(side: Side) -> None:
    for state in side.states:
        state["step"] = torch.tensor(1.0)


def _replace_states(side: Side) -> None:
    for key, state in list(side.local.state.items()):
        side.local.state[key] = {name: value * 0.75 for name, value in state.items()}


def _replace_memory_of_moments(side: Side) -> None:
    for state in side.states:
        state["exp_avg_sq"].data = state["exp_avg_sq"].detach() * 2


def _load(side: Side) -> None:
    side.optimizer.load_state_dict(side.saved)


def _move(side: Side) -> None:
    for param in side.model.parameters():
        param.data = param.detach().clone()


def _halve_gradients(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.mul_(0.5)


def _hook_before(side: Side) -> None:
    side.local.register_step_pre_hook(_halve_gradients)


def _hook_after(side: Side) -> None:
    def shrink(optimizer: Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.mul_(0.99)

    side.local.register_step_post_hook(shrink)


@torch.no_grad()
def _descend(optimizer: Optimizer, closure: Any = None) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.add_(param.grad, alpha=-group["lr"])


def _patch(side: Side) -> None:
    side.local.step = MethodType(_descend, side.local)  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Side], object]] = {
    "nothing": lambda side: None,
    "the moments": _replace_moments,
    "the counters": _replace_counters,
    "the states": _replace_states,
    "the memory of moments": _replace_memory_of_moments,
    "a loaded state": _load,
    "the memory of parameters": _move,
    "the rate": lambda side: side.set_options(lr=3e-3),
    "a rate that is a tensor": lambda side: side.set_options(lr=torch.tensor(3e-3)),
    "betas, eps and decay": lambda side: side.set_options(betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3),
    "the direction": lambda side: side.set_options(maximize=True),
    "the kernel, for foreach": lambda side: side.set_options(fused=False, foreach=True),
    "the kernel, for single": lambda side: side.set_options(fused=False, foreach=False),
    "a hook before": _hook_before,
    "a hook after": _hook_after,
    "the step of the instance": _patch,
}
"""By what is changed."""


@contextmanager
def class_patched() -> Iterator[None]:
    """A different ``AdamW.step`` meanwhile."""
    had = "step" in vars(AdamW)
    before = AdamW.step
    AdamW.step = _descend  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if had:
            AdamW.step = before  # type: ignore[method-assign]
        else:
            del AdamW.step


def saved(state_dict: Any) -> Any:
    """A copy that later steps do not change."""
    return copy.deepcopy(state_dict)
