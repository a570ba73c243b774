"""Frozen, validated options of a step: clipping, loss scale, sync, offload; and names of options."""

from dataclasses import dataclass
from typing import Literal, get_args

from ddp_zero.loss_scale import LARGEST, SMALLEST, DynamicLossScale, check_number

Nonfinite = Literal["skip", "raise", "step"]
Sync = Literal["step", "forward"]
PartitionName = Literal["auto", "parameters", "elements"]
NONFINITE: tuple[str, ...] = get_args(Nonfinite)
SYNC: tuple[str, ...] = get_args(Sync)

PARALLEL_OPTIONS = ("mesh", "data_parallel_dim", "pipeline_dim", "data_parallel_group", "global_names")
"""Options of an optimizer whose ranks do not all hold the same parameters: see `ddp_zero.parallel`."""
PARALLEL_KEYS = ("process_group", "sharded_over")
"""Keys of its parameter groups besides options of a class."""


@dataclass(frozen=True)
class Offload:
    """Placement of optimizer state, fp32 masters and the step, if not with the parameters.

    Attributes:
        to: ``"cpu"``, host memory, for parameters on an accelerator; parameters on the CPU are stepped as without it.
        buffers: number of pinned buffers for an accelerator's gradients and parameters, each as large as the largest
            part of a bucket that a rank owns. At least 1; with 3, copies in both directions and steps overlap.

    Raises:
        TypeError: for a value of the wrong type.
        ValueError: for another placement, or fewer than one buffer.
    """

    to: Literal["cpu"] = "cpu"
    buffers: int = 3

    def __post_init__(self) -> None:
        if self.to != "cpu":
            raise ValueError(f"Expected offload to be 'cpu' or None, got {self.to!r}. [ZERO-103]")
        if type(self.buffers) is not int:
            raise TypeError(f"Expected buffers to be an int, got {self.buffers!r}. [ZERO-103]")
        if self.buffers < 1:
            raise ValueError(f"Expected at least 1 buffer, got {self.buffers}. [ZERO-103]")

    @classmethod
    def of(cls, given: "Offload | str | None") -> "Offload | None":
        """Normalise an offload option: a placement alone becomes an `Offload`.

        Args:
            given: the user's value.

        Raises:
            TypeError: if it is neither.
        """
        if given is None or isinstance(given, Offload):
            return given
        if not isinstance(given, str):
            raise TypeError(f"Expected offload to be 'cpu', a ddp_zero.Offload or None, got {given!r:.80}. [ZERO-103]")
        return cls(given)  # type: ignore[arg-type]  # checked there


@dataclass(frozen=True)
class StepOptions:
    """Treatment of gradients by a step; `ZeroRedundancyOptimizer` documents each option.

    Raises TypeError for a value of the wrong type, ValueError for others that cannot be used, alone or together.
    """

    max_grad_norm: float | None = None
    norm_type: float = 2.0
    nonfinite: Nonfinite | None = None
    loss_scale: DynamicLossScale | float | None = None
    master_weights: bool = False
    sync: Sync = "step"
    accumulate_in_fp32: bool = False
    offload: Offload | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "offload", Offload.of(self.offload))
        if self.max_grad_norm is not None:
            check_max_grad_norm(self.max_grad_norm)
        check_number("norm_type", self.norm_type)
        for name in ("master_weights", "accumulate_in_fp32"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Expected {name} to be True or False, got {getattr(self, name)!r}. [ZERO-103]")
        if not self.norm_type > 0:
            raise ValueError(f"Expected norm_type above 0, got {self.norm_type!r}. [ZERO-103]")
        if self.nonfinite not in (None, *NONFINITE):
            raise ValueError(f"Expected nonfinite to be one of {NONFINITE} or None, got {self.nonfinite!r}. [ZERO-103]")
        if self.sync not in SYNC:
            raise ValueError(f"Expected sync to be one of {SYNC}, got {self.sync!r}. [ZERO-103]")
        self._check_loss_scale()

    def _check_loss_scale(self) -> None:
        if self.loss_scale is None:
            return
        if isinstance(self.loss_scale, DynamicLossScale):
            if self.nonfinite not in (None, "skip"):
                raise ValueError(
                    "Expected nonfinite='skip' with a dynamic loss_scale, which overflows on purpose, got "
                    f"{self.nonfinite!r}. [ZERO-105]"
                )
        elif isinstance(self.loss_scale, bool) or not isinstance(self.loss_scale, int | float):
            raise TypeError(
                f"Expected loss_scale to be a number, a DynamicLossScale or None, got {self.loss_scale!r}. For a "
                "dynamic scale with the usual numbers pass DynamicLossScale(). [ZERO-103]"
            )
        elif not SMALLEST <= self.loss_scale <= LARGEST:
            raise ValueError(f"Expected loss_scale from {SMALLEST} to {LARGEST}, got {self.loss_scale!r}. [ZERO-103]")

    def why_wait(self) -> str | None:
        """The reason for a step with these options to need all gradients before it starts, or None."""
        if self.max_grad_norm is not None:
            return "max_grad_norm needs the norm of all gradients"
        if self.loss_scale is not None and self.nonfinite == "step":
            return "loss_scale is divided out of all gradients at once"
        if self.loss_scale is not None:
            return "loss_scale needs to know whether any gradient has overflowed"
        if self.nonfinite in ("skip", "raise"):
            return f"nonfinite={self.nonfinite!r} needs to see all gradients"
        return None


def check_max_grad_norm(max_grad_norm: float) -> None:
    """Check a clipping norm; TypeError if it is not a number, ValueError if it is not above 0."""
    check_number("max_grad_norm", max_grad_norm)
    if not max_grad_norm > 0:
        raise ValueError(f"Expected max_grad_norm above 0, got {max_grad_norm!r}. [ZERO-103]")
