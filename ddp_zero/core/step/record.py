"""The outcome of a step: the record that users read as ``opt.last_step``."""

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

Number = Tensor | float | None
"""A number that may still be on an accelerator."""


class StepRegime(Enum):
    """The moment at which a step was taken."""

    OVERLAPPED = "overlapped"
    """Inside backward, bucket by bucket as reductions resolved."""
    DEFERRED = "deferred"
    """After all buckets were reduced: at the end of backward, or in ``opt.step()``."""
    STANDALONE = "standalone"
    """In ``opt.step()``, from gradients that were averaged by DDP without this library."""


@dataclass(frozen=True)
class StepRecord:
    """The outcome of a step, the same on every rank.

    Attributes:
        stepped: whether parameters and state were updated.
        reason: why the step was skipped, or None.
        regime: when the step was taken or skipped.
        deferred_because: why the step waited for all buckets, or None.
        nonfinite_parameter: the first parameter, by name, whose averaged gradient was not finite; None if all were or
            none was checked.
        number: of the step, counted from 1 for each optimizer; skipped steps count, too.
        nonfinite_rank: the first group rank whose own gradient was not finite before averaging; None if all were
            finite, or if no communication hook of this library saw the gradients.
    """

    stepped: bool
    regime: StepRegime
    reason: str | None = None
    deferred_because: str | None = None
    nonfinite_parameter: str | None = None
    nonfinite_rank: int | None = None
    number: int = field(default=0, compare=False)
    norm: Number = field(default=None, repr=False, compare=False)
    coefficient: Number = field(default=None, repr=False, compare=False)
    scale: Number = field(default=None, repr=False, compare=False)

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients before clipping, None if it was not computed. Waits for the device."""
        return _read(self.norm)

    @property
    def clip_coefficient(self) -> float | None:
        """The factor that clipping applied to gradients, at most 1; the smallest if groups were clipped on their own.

        None without clipping. Waits for the device.
        """
        return _read(self.coefficient)

    @property
    def loss_scale(self) -> float | None:
        """The divisor of gradients, None without a loss scale. Waits for the device."""
        return _read(self.scale)

    def __str__(self) -> str:
        """The record in one line, with its numbers. Waits for the device."""
        numbers = {name: getattr(self, name) for name in ("grad_norm", "clip_coefficient", "loss_scale")}
        shown = "stepped" if self.stepped else f"not stepped: {self.reason}"
        facts = [self.regime.value, *(f"{name} {value:g}" for name, value in numbers.items() if value is not None)]
        return f"{shown} ({', '.join(facts)})"


def _read(number: Number) -> float | None:
    return float(number.item()) if isinstance(number, Tensor) else number
