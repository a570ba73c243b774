"""DeepSpeed's learning-rate schedules in plain numbers: the rate after so many steps.

*Iteration* -1 is the state before the first step, which is therefore taken with the rate of -1; each step that is taken
moves on by one. Options that are lists have an entry for each parameter group.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar

from ddp_zero.deepspeed.config.keys import ConfigError

PerGroup = float | Sequence[float]

START = -1
"""The iteration before the first step."""

_SECOND_BETA = 0.99  # with which OneCycle replaces that of Adam


@dataclass(frozen=True)
class Curve:
    """A schedule.

    Raises:
        ConfigError: for an option that it cannot have.
    """

    last_batch_iteration: int = START

    STEPS: ClassVar[tuple[str, ...]] = ()
    """Options that are numbers of steps, at least 1."""

    def __post_init__(self) -> None:
        for name in self.STEPS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"Expected {name} of {type(self).__name__} to be an int of at least 1, got {value!r}."
                )

    def lr(self, iteration: int, base: float, group: int) -> float:
        """The learning rate of a group.

        Args:
            iteration: see the module.
            base: the group's rate when the schedule was built.
            group: its position.
        """
        raise NotImplementedError("every schedule has a curve")

    def betas(self, iteration: int, group: int) -> tuple[float, float] | None:
        """Both momenta of a group of Adam; None if the schedule leaves them alone."""
        return None


@dataclass(frozen=True)
class WarmupLR(Curve):
    """From one rate to another, linearly or with the logarithm of the iteration; constant afterwards."""

    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = None
    warmup_num_steps: int = 1000
    warmup_type: str = "log"

    STEPS: ClassVar[tuple[str, ...]] = ("warmup_num_steps",)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_type(self.warmup_type)

    def lr(self, iteration: int, base: float, group: int) -> float:
        """As in `Curve`."""
        low = of_group(self.warmup_min_lr, group)
        if iteration < 0:
            return low
        high = base if self.warmup_max_lr is None else of_group(self.warmup_max_lr, group)
        return low + (high - low) * self.share(iteration)

    def share(self, iteration: int) -> float:
        """How far the rate is on the way from the low to the high one, from 0 to 1."""
        steps = max(2, self.warmup_num_steps)
        return _warmed_up(iteration, steps, self.warmup_type) if iteration < steps else self.after(iteration, steps)

    def after(self, iteration: int, steps: int) -> float:
        """The share of the learning rate after warm-up."""
        return 1.0


@dataclass(frozen=True)
class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then linearly down to the low rate at ``total_num_steps``."""

    warmup_max_lr: PerGroup | None = 0.001
    total_num_steps: int = 0

    STEPS: ClassVar[tuple[str, ...]] = ("warmup_num_steps", "total_num_steps")

    def after(self, iteration: int, steps: int) -> float:
        """As in `WarmupLR`."""
        return max(0.0, float(self.total_num_steps - iteration) / float(max(1.0, self.total_num_steps - steps)))


@dataclass(frozen=True)
class WarmupCosineLR(Curve):
    """A factor on each group's own rate: warm-up to 1, then half a cosine down to ``cos_min_ratio``."""

    total_num_steps: int = 0
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = "log"

    STEPS: ClassVar[tuple[str, ...]] = ("warmup_num_steps", "total_num_steps")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_type(self.warmup_type)

    def lr(self, iteration: int, base: float, group: int) -> float:
        """As in `Curve`."""
        return 0.0 if iteration < 0 else base * self.ratio(iteration)

    def ratio(self, iteration: int) -> float:
        """The factor."""
        steps = max(2, self.warmup_num_steps)
        if iteration < steps:
            share = _warmed_up(iteration, steps, self.warmup_type)
            return self.warmup_min_ratio + share * (1.0 - self.warmup_min_ratio)
        progress = min(1.0, (iteration - steps + 1) / max(1, self.total_num_steps - steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


@dataclass(frozen=True)
class LRRangeTest(Curve):
    """Ever larger rates, to find the largest with which a model trains."""

    lr_range_test_min_lr: PerGroup = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    STEPS: ClassVar[tuple[str, ...]] = ("lr_range_test_step_size",)

    def lr(self, iteration: int, base: float, group: int) -> float:
        """As in `Curve`."""
        intervals = float(iteration + 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = math.floor(intervals)
        return of_group(self.lr_range_test_min_lr, group) * (1 + self.lr_range_test_step_rate * intervals)


@dataclass(frozen=True)
class OneCycle(Curve):
    """Up and down once, and then decay; the first momentum of Adam goes the other way."""

    cycle_min_lr: PerGroup = 0.0
    cycle_max_lr: PerGroup = 0.0
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
        if not self.cycle_first_step_size > 0:
            raise ConfigError(f"Expected cycle_first_step_size above 0, got {self.cycle_first_step_size!r}.")
        if not self.second >= 0:
            raise ConfigError(f"Expected cycle_second_step_size of at least 0, got {self.cycle_second_step_size!r}.")

    @property
    def first(self) -> float:
        """Iterations on the way up."""
        return float(self.cycle_first_step_size)

    @property
    def second(self) -> float:
        """Iterations on the way down."""
        return self.first if self.cycle_second_step_size is None else float(self.cycle_second_step_size)

    @property
    def total(self) -> float:
        """Iterations of the cycle."""
        return self.first + self.second

    def lr(self, iteration: int, base: float, group: int) -> float:
        """As in `Curve`."""
        low, high = of_group(self.cycle_min_lr, group), of_group(self.cycle_max_lr, group)
        if iteration == START:
            return low
        if iteration < self.total:
            return low + (high - low) * self.height(iteration + 1)
        return low / self._decay(iteration, self.decay_lr_rate)

    def betas(self, iteration: int, group: int) -> tuple[float, float] | None:
        """As in `Curve`."""
        if not self.cycle_momentum:
            return None
        low, high = of_group(self.cycle_min_mom, group), of_group(self.cycle_max_mom, group)
        if iteration == START:
            return low, _SECOND_BETA
        if iteration < self.total:
            return high - (high - low) * self.height(iteration + 1), _SECOND_BETA
        return high * self._decay(iteration, self.decay_mom_rate), _SECOND_BETA

    def height(self, place: int) -> float:
        """How far up the cycle is, from 0 to 1."""
        within = 1.0 + place / self.total - math.floor(1 + place / self.total)
        ratio = self.first / self.total
        is_first = within <= ratio
        height = within / ratio if is_first else (within - 1) / (ratio - 1)
        second_stairs = self.cycle_second_stair_count
        stairs = self.cycle_first_stair_count if is_first or second_stairs is None else second_stairs
        if stairs <= 0:
            return height
        whole = place % self.total  # rounding must not drop the schedule from a stair that it has just reached
        steps = whole * stairs / self.first if whole <= self.first else (self.total - whole) * stairs / self.second
        return math.floor(steps) / stairs

    def _decay(self, iteration: int, rate: float) -> float:
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return 1.0
        return 1 + rate * ((iteration - self.total + 1) / self.decay_step_size)


CURVES: Mapping[str, Callable[..., Curve]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
"""The schedules by name."""

NEEDED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
"""Options without a default."""


def build_curve(name: str, params: Mapping[str, Any]) -> Curve:
    """A schedule by its name.

    Raises:
        ConfigError: for a missing option, or one that it does not have, with the nearest name.
    """
    kind = CURVES[name]
    known = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    missing = [one for one in NEEDED.get(name, ()) if one not in params]
    if missing:
        raise ConfigError(f"Expected {', '.join(missing)} in scheduler.params of {name}, got {sorted(params)}.")
    for one in params:
        if one not in known:
            near = get_close_matches(one, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"Expected an option of {name} in scheduler.params, got {one!r}{hint}")
    return kind(**params)


def of_group(value: PerGroup, group: int) -> float:
    """The value for a parameter group, of one for all or of one for each."""
    return value[group] if isinstance(value, Sequence) else value


def check_groups(curve: Curve, groups: int) -> None:
    """Check that options with a value for each group have as many values.

    Raises:
        ConfigError: naming the option.
    """
    for one in fields(curve):
        value = getattr(curve, one.name)
        if isinstance(value, list | tuple) and len(value) != groups:
            raise ConfigError(
                f"Expected {groups} values in {one.name} of {type(curve).__name__}, one for each parameter group, got "
                f"{len(value)}."
            )


def _warmed_up(iteration: int, steps: int, kind: str) -> float:
    return 1.0 / math.log(steps) * math.log(iteration + 1) if kind == "log" else iteration / steps


def _check_type(kind: str) -> None:
    if kind not in ("log", "linear"):
        raise ConfigError(f"Expected warmup_type to be 'log' or 'linear', got {kind!r}.")
