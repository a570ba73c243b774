"""Loss scaling in plain numbers: the factor on the loss, and its response to overflowing gradients.

Gradients in fp16 underflow unless the loss is multiplied by a scale before backward; the step divides it out again. A
*dynamic* scale is lowered when gradients overflow and raised after a run of steps without overflow, as described by
Micikevicius et al., "Mixed Precision Training", 2018. bf16 has the range of fp32 and needs no scale.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

SMALLEST, LARGEST = 2.0**-126, 2.0**127  # the range in which fp32 has a scale and its inverse


@dataclass(frozen=True)
class DynamicLossScale:
    """Policy of a loss scale that follows the gradients.

    Attributes:
        initial: the first scale.
        growth_factor: factor applied after ``growth_interval`` consecutive steps without an overflow; at least 1.
        backoff_factor: factor applied at an overflow; above 0 and below 1.
        growth_interval: number of steps, see ``growth_factor``; at least 1.
        hysteresis: number of overflows since the last growth at which the scale starts to back off; 1: at once.
        minimum: lower bound of the scale; an overflow at this scale raises.
        first_interval: ``growth_interval`` at the start and after an overflow; None for ``growth_interval``.
        restores_hysteresis: True if every step without an overflow restores the hysteresis, not only a growth.

    Raises:
        TypeError: for a value that is not a number.
        ValueError: for numbers outside these ranges.
    """

    initial: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    minimum: float = 1.0
    first_interval: int | None = None
    restores_hysteresis: bool = False

    def __post_init__(self) -> None:
        for name in ("initial", "growth_factor", "backoff_factor", "minimum"):
            check_number(name, getattr(self, name))
        if not SMALLEST <= self.minimum <= self.initial <= LARGEST:
            raise ValueError(
                f"Expected {SMALLEST} <= minimum <= initial <= {LARGEST}, got {self.minimum=} and {self.initial=}. "
                "[ZERO-103]"
            )
        if not (self.growth_factor >= 1 and math.isfinite(self.growth_factor)):
            raise ValueError(f"Expected growth_factor of at least 1 and finite, got {self.growth_factor}. [ZERO-103]")
        if not 0 < self.backoff_factor < 1:
            raise ValueError(f"Expected 0 < backoff_factor < 1, got {self.backoff_factor}. [ZERO-103]")
        if not isinstance(self.restores_hysteresis, bool):
            raise TypeError(
                f"Expected restores_hysteresis to be True or False, got {self.restores_hysteresis!r}. [ZERO-103]"
            )
        for name in ("growth_interval", "hysteresis", "first_interval"):
            value = 1 if name == "first_interval" and self.first_interval is None else getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"Expected {name} to be an int, got {value!r}. [ZERO-103]")
            if value < 1:
                raise ValueError(f"Expected {name} of at least 1, got {value}. [ZERO-103]")

    @property
    def head_start(self) -> int:
        """Steps counted in advance towards the first growth; negative if the first growth comes later."""
        return 0 if self.first_interval is None else self.growth_interval - self.first_interval


class LossScale:
    """The scale of one optimizer, by a policy or constant; ``value`` is the current factor on the loss."""

    def __init__(self, policy: DynamicLossScale | float) -> None:
        self._policy = policy if isinstance(policy, DynamicLossScale) else None
        self.value = float(policy.initial if isinstance(policy, DynamicLossScale) else policy)
        self._good_steps = 0 if self._policy is None else self._policy.head_start
        self._patience = self._policy.hysteresis if self._policy is not None else 0

    @property
    def is_dynamic(self) -> bool:
        """True if the scale follows the gradients; False for a constant."""
        return self._policy is not None

    @property
    def is_at_minimum(self) -> bool:
        """True if the next overflow cannot lower the scale."""
        return self._policy is not None and self._patience <= 1 and self.value <= self._policy.minimum

    def state_dict(self) -> dict[str, float]:
        """The scale, and the counts towards its next change; plain numbers."""
        return {"value": self.value, "good_steps": self._good_steps, "patience": self._patience}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state from `state_dict`; ValueError for numbers out of range."""
        numbers = {name: state.get(name) for name in self.state_dict()}
        for name, number in numbers.items():
            check_number(f"{name} of the loss scale", number)
        value, good_steps, patience = (float(numbers[name] or 0) for name in ("value", "good_steps", "patience"))
        least = 0 if self._policy is None else min(0, self._policy.head_start)
        if not (SMALLEST <= value <= LARGEST and good_steps >= least):
            raise ValueError(f"Expected a loss scale from {SMALLEST} to {LARGEST}, got {dict(state)}. [ZERO-103]")
        lowest = 0.0 if self._policy is None else self._policy.minimum
        self.value = max(value, lowest)
        self._good_steps = int(good_steps)
        self._patience = int(patience)

    def after_step(self, has_overflowed: bool) -> None:
        """Update the scale after a step; it has overflowed if any gradient of any rank was not finite."""
        policy = self._policy
        if policy is None:
            return
        if has_overflowed:
            self._good_steps = policy.head_start
            self._patience -= 1
            if self._patience <= 0:
                self.value = max(self.value * policy.backoff_factor, policy.minimum)
            return
        self._good_steps += 1
        if policy.restores_hysteresis:
            self._patience = policy.hysteresis
        if self._good_steps == policy.growth_interval:
            self._good_steps = 0
            self._patience = policy.hysteresis
            if self.value * policy.growth_factor <= LARGEST:
                self.value *= policy.growth_factor


def check_number(name: str, value: object) -> None:
    """Raise TypeError, naming the option, unless the value is a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"Expected {name} to be a number, got {value!r}. [ZERO-103]")
