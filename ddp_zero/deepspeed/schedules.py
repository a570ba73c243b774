"""DeepSpeed's learning-rate schedules: curves of the step in plain numbers, and a scheduler that sets them.

*Iteration* -1 is the state before the first step, which is therefore taken with the rate of -1; each step that is not
skipped adds one. Options that are lists have an entry for each parameter group.

Alternative considered: `torch.optim.lr_scheduler.LambdaLR` over the curves. It multiplies a group's initial rate by a
factor; DeepSpeed's rates are absolute. ``lr / base * base`` differs from ``lr`` in the last bit in one of 14 steps, a
base of 0 has no factor, the momenta of OneCycle have no place, and its state dict is not DeepSpeed's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_zero.deepspeed.config.table import ConfigError, hint

PerGroup = float | Sequence[float]

_START = -1
_STEPS = {"warmup_num_steps", "total_num_steps", "lr_range_test_step_size"}
_SECOND_BETA = 0.99  # OneCycle sets Adam's second beta to it


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A schedule in plain numbers; ConfigError for an invalid option."""

    last_batch_iteration: int = _START

    def __post_init__(self) -> None:
        for name in _STEPS & vars(self).keys():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"Expected {name} of {type(self).__name__} to be an int of at least 1, got {value!r}. [ZERO-709]"
                )
        kind = getattr(self, "warmup_type", "log")
        if kind not in ("log", "linear"):
            raise ConfigError(f"Expected warmup_type to be 'log' or 'linear', got {kind!r}. [ZERO-709]")

    def lr(self, iteration: int, base: float, group: int) -> float:
        """The learning rate of a group at an iteration (see the module), given the group's initial rate."""
        raise NotImplementedError("every schedule has a curve")

    def betas(self, iteration: int, group: int) -> tuple[float, float] | None:
        """Both betas of a group of Adam; None if the schedule leaves them unchanged."""
        return None


@dataclass(frozen=True, kw_only=True)
class WarmupLR(Curve):
    """From one rate to another, linearly or with the logarithm of the iteration; constant afterwards."""

    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = None
    warmup_num_steps: int = 1000
    warmup_type: str = "log"

    def lr(self, iteration: int, base: float, group: int) -> float:
        low = _of_group(self.warmup_min_lr, group)
        if iteration < 0:
            return low
        high = base if self.warmup_max_lr is None else _of_group(self.warmup_max_lr, group)
        steps = max(2, self.warmup_num_steps)
        is_warm = iteration >= steps
        share = self.after(iteration, steps) if is_warm else _warmup_factor(iteration, steps, self.warmup_type)
        return low + (high - low) * share

    def after(self, iteration: int, steps: int) -> float:
        """Progress from the low to the high rate after warm-up, from 1 down to 0."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then linearly down to the low rate at ``total_num_steps``."""

    warmup_max_lr: PerGroup | None = 0.001
    total_num_steps: int

    def after(self, iteration: int, steps: int) -> float:
        return max(0.0, float(self.total_num_steps - iteration) / float(max(1.0, self.total_num_steps - steps)))


@dataclass(frozen=True, kw_only=True)
class WarmupCosineLR(Curve):
    """A factor on each group's own rate: warm-up to 1, then half a cosine down to ``cos_min_ratio``."""

    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = "log"

    def lr(self, iteration: int, base: float, group: int) -> float:
        if iteration < 0:
            return 0.0
        steps = max(2, self.warmup_num_steps)
        if iteration < steps:
            share = _warmup_factor(iteration, steps, self.warmup_type)
            return base * (self.warmup_min_ratio + share * (1.0 - self.warmup_min_ratio))
        progress = min(1.0, (iteration - steps + 1) / max(1, self.total_num_steps - steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return base * max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


@dataclass(frozen=True, kw_only=True)
class LRRangeTest(Curve):
    """Up from a low rate, steadily or in stairs, to find the largest usable rate."""

    lr_range_test_min_lr: PerGroup = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def lr(self, iteration: int, base: float, group: int) -> float:
        intervals = float(iteration + 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = math.floor(intervals)
        return _of_group(self.lr_range_test_min_lr, group) * (1 + self.lr_range_test_step_rate * intervals)


@dataclass(frozen=True, kw_only=True)
class OneCycle(Curve):
    """Up and down once, and then decay; the first momentum of Adam goes the other way."""

    cycle_min_lr: PerGroup
    cycle_max_lr: PerGroup
    decay_lr_rate: float = 0.0
    cycle_first_step_size: float = 2000
    cycle_second_step_size: float | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: float = 0
    cycle_momentum: bool = True
    cycle_min_mom: PerGroup = 0.8
    cycle_max_mom: PerGroup = 0.9
    decay_mom_rate: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        first, second = self._halves()
        if not first > 0:
            raise ConfigError(f"Expected cycle_first_step_size above 0, got {self.cycle_first_step_size!r}. [ZERO-709]")
        if not second >= 0:
            raise ConfigError(
                f"Expected cycle_second_step_size of at least 0, got {self.cycle_second_step_size!r}. [ZERO-709]"
            )

    def lr(self, iteration: int, base: float, group: int) -> float:
        low, high = _of_group(self.cycle_min_lr, group), _of_group(self.cycle_max_lr, group)
        if iteration == _START:
            return low
        if iteration < sum(self._halves()):
            return low + (high - low) * self._height(iteration + 1)
        return low / self._decay(iteration, self.decay_lr_rate)

    def betas(self, iteration: int, group: int) -> tuple[float, float] | None:
        if not self.cycle_momentum:
            return None
        low, high = _of_group(self.cycle_min_mom, group), _of_group(self.cycle_max_mom, group)
        if iteration == _START:
            return low, _SECOND_BETA
        if iteration < sum(self._halves()):
            return high - (high - low) * self._height(iteration + 1), _SECOND_BETA
        return high * self._decay(iteration, self.decay_mom_rate), _SECOND_BETA

    def _halves(self) -> tuple[float, float]:
        second = self.cycle_second_step_size
        first = float(self.cycle_first_step_size)
        return first, first if second is None else float(second)

    def _height(self, place: int) -> float:
        first, second = self._halves()
        total = first + second
        within = 1.0 + place / total - math.floor(1 + place / total)
        ratio = first / total
        is_first = within <= ratio
        height = within / ratio if is_first else (within - 1) / (ratio - 1)
        second_stairs = self.cycle_second_stair_count
        stairs = self.cycle_first_stair_count if is_first or second_stairs is None else second_stairs
        if stairs <= 0:
            return height
        whole = place % total  # exact: rounding must not drop the schedule from a stair just reached
        steps = whole * stairs / first if whole <= first else (total - whole) * stairs / second
        return math.floor(steps) / stairs

    def _decay(self, iteration: int, rate: float) -> float:
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return 1.0
        return 1 + rate * ((iteration - sum(self._halves()) + 1) / self.decay_step_size)


CURVES: Mapping[str, type[Curve]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
"""The schedules by name."""


def build_curve(name: str, params: Mapping[str, Any]) -> Curve:
    """A schedule by its name; ConfigError for a missing or unknown option."""
    kind = CURVES[name]
    known = [one.name for one in fields(kind)]
    missing = [one.name for one in fields(kind) if one.default is MISSING and one.name not in params]
    if missing:
        raise ConfigError(
            f"Expected {', '.join(missing)} in scheduler.params of {name}, got {sorted(params)}. [ZERO-709]"
        )
    for one in params:
        if one not in known:
            near = hint(one, known)
            raise ConfigError(f"Expected an option of {name} in scheduler.params, got {one!r}{near} [ZERO-709]")
    return kind(**params)


def _of_group(value: PerGroup, group: int) -> float:
    return value[group] if isinstance(value, Sequence) else value


def _warmup_factor(iteration: int, steps: int, kind: str) -> float:
    return 1.0 / math.log(steps) * math.log(iteration + 1) if kind == "log" else iteration / steps


class Schedule:
    """Sets learning rates, and for OneCycle the betas of Adam, after every step that is not skipped.

    It has the interface of DeepSpeed's schedulers: ``last_batch_iteration`` is the number of steps, less one. Raises
    ConfigError if the curve has options for another number of groups.
    """

    def __init__(self, optimizer: Optimizer, curve: Curve) -> None:
        groups = optimizer.param_groups
        for one in fields(curve):
            value = getattr(curve, one.name)
            if isinstance(value, list | tuple) and len(value) != len(groups):
                raise ConfigError(
                    f"Expected {len(groups)} values in {one.name} of {type(curve).__name__}, one for each parameter "
                    f"group, got {len(value)}. [ZERO-709]"
                )
        self.optimizer = optimizer
        self.curve = curve
        self.last_batch_iteration = curve.last_batch_iteration
        self._base = [float(group["lr"]) for group in groups]
        self._moves_betas = all("betas" in group for group in groups)
        self._last_lr = list(self._base)
        if self.last_batch_iteration == _START:
            self._set()

    def get_lr(self) -> list[float]:
        """The rate of each group for the next step."""
        iteration = self.last_batch_iteration
        return [float(self.curve.lr(iteration, base, group)) for group, base in enumerate(self._base)]

    def get_last_lr(self) -> list[float]:
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one step, or to an iteration."""
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
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from there; the rates are the loaded optimizer's until the next step."""
        self.last_batch_iteration = state["last_batch_iteration"]
        self._last_lr = self.get_lr()


def build_schedule(name: str, params: Mapping[str, Any], optimizer: Optimizer) -> Any:
    """The configured schedule, DeepSpeed's or torch's; ConfigError for an unknown name or wrong options."""
    if name in CURVES:
        return Schedule(optimizer, build_curve(name, params))
    schedulers = torch.optim.lr_scheduler
    found = getattr(schedulers, name, None)
    if not (isinstance(found, type) and issubclass(found, schedulers.LRScheduler)):
        near = hint(name, [*CURVES, *vars(schedulers)], 0.75)
        raise ConfigError(
            f"Expected scheduler.type to be one of {', '.join(CURVES)}, or a class of torch.optim.lr_scheduler, got "
            f"{name!r}{near} [ZERO-709]"
        )
    try:
        return found(optimizer, **params)
    except TypeError as error:
        raise ConfigError(f"Expected options of {name} in scheduler.params, got {error}. [ZERO-709]") from error
