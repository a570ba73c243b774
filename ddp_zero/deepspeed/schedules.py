"""A schedule of `ddp_zero.deepspeed.config.curves` on an optimizer, with the interface of DeepSpeed's schedulers."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_zero.deepspeed.config.curves import CURVES, START, Curve, build_curve, check_groups
from ddp_zero.deepspeed.config.keys import ConfigError
from ddp_zero.deepspeed.config.sections import SchedulerSection


class Schedule:
    """Sets learning rates, and for OneCycle the momenta of Adam, after every step that is taken.

    Args:
        optimizer: whose groups it sets.
        curve: the rates.

    Attributes:
        optimizer: as given.
        curve: as given.
        last_batch_iteration: steps taken, less one.

    Raises:
        ConfigError: if the curve has options for another number of groups.
    """

    def __init__(self, optimizer: Optimizer, curve: Curve) -> None:
        check_groups(curve, len(optimizer.param_groups))
        self.optimizer = optimizer
        self.curve = curve
        self.last_batch_iteration = curve.last_batch_iteration
        self._base = [_number(group["lr"]) for group in optimizer.param_groups]
        self._moves_betas = all("betas" in group for group in optimizer.param_groups)
        self._last_lr = list(self._base)
        if self.last_batch_iteration == START:
            self._set()

    def get_lr(self) -> list[float]:
        """The rate of each group for the next step."""
        iteration = self.last_batch_iteration
        return [float(self.curve.lr(iteration, base, group)) for group, base in enumerate(self._base)]

    def get_last_lr(self) -> list[float]:
        """The rates that were set last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Move on by one step, or to an iteration."""
        self.last_batch_iteration += 1
        if last_batch_iteration is not None:
            self.last_batch_iteration = last_batch_iteration
        self._set()

    def _set(self) -> None:
        self._last_lr = self.get_lr()
        for position, (group, lr) in enumerate(zip(self.optimizer.param_groups, self._last_lr, strict=True)):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
            betas = self.curve.betas(self.last_batch_iteration, position)
            if betas is not None and self._moves_betas:
                group["betas"] = betas

    def state_dict(self) -> dict[str, int]:
        """Where the schedule is."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there; the rates are those of the optimizer's state dict until the next step."""
        self.last_batch_iteration = state["last_batch_iteration"]
        self._last_lr = self.get_lr()


def _number(lr: Any) -> float:
    return float(lr.item()) if isinstance(lr, Tensor) else float(lr)


def build_schedule(section: SchedulerSection, optimizer: Optimizer) -> Any:
    """The schedule that a configuration names: one of DeepSpeed's, or of torch's.

    Raises:
        ConfigError: for a name that neither has, with the nearest one, or wrong options.
    """
    if section.type in CURVES:
        return Schedule(optimizer, build_curve(section.type, section.params))
    schedulers = torch.optim.lr_scheduler
    found = getattr(schedulers, section.type, None)
    if not (isinstance(found, type) and issubclass(found, schedulers.LRScheduler)):
        near = get_close_matches(section.type, [*CURVES, *vars(schedulers)], n=1, cutoff=0.75)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"Expected scheduler.type to be one of {', '.join(CURVES)}, or a class of torch.optim.lr_scheduler, got "
            f"{section.type!r}{hint}"
        )
    try:
        return found(optimizer, **section.params)
    except TypeError as error:
        raise ConfigError(f"Expected options of {section.type} in scheduler.params, got {error}.") from error
