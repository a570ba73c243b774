"""What a step does besides the local optimizer: frozen, validated options."""

from dataclasses import dataclass

from ddp_zero.loss_scale import LARGEST, SMALLEST, DynamicLossScale, check_number

NONFINITE = ("skip", "raise", "step")
SYNC = ("step", "forward")


@dataclass(frozen=True)
class StepOptions:
    """How a step treats the gradients that it is taken from.

    Attributes:
        max_grad_norm: clip the norm of all gradients to this; None: do not.
        norm_type: order of the p-norm; ``inf`` for the largest absolute value.
        nonfinite: what to do about gradients that are not finite: ``"skip"`` the step, ``"raise"``, or ``"step"`` as if
            they were; None: skip where the step waits for all gradients anyway, else step.
        loss_scale: the factor that ``opt.scale`` multiplies the loss by, a number or a policy; None: no loss scale.
        master_weights: whether fp16 and bf16 parameters are stepped in fp32.
        accumulate_in_fp32: whether averages of several backward passes add up in fp32 in stage 1, as in stage 2.
        sync: when to wait for parameters that other ranks have stepped: at the end of the ``"step"``, or at the first
            use of each, as in the next ``"forward"`` pass.

    Raises:
        TypeError: for a value of the wrong type.
        ValueError: for a value outside its range, or options that contradict each other.
    """

    max_grad_norm: float | None = None
    norm_type: float = 2.0
    nonfinite: str | None = None
    loss_scale: DynamicLossScale | float | None = None
    master_weights: bool = False
    sync: str = "step"
    accumulate_in_fp32: bool = False

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None:
            check_max_grad_norm(self.max_grad_norm)
        check_number("norm_type", self.norm_type)
        for name in ("master_weights", "accumulate_in_fp32"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Expected {name} to be True or False, got {getattr(self, name)!r}.")
        if not self.norm_type > 0:
            raise ValueError(f"Expected norm_type above 0, got {self.norm_type!r}.")
        if self.nonfinite not in (None, *NONFINITE):
            raise ValueError(f"Expected nonfinite to be one of {NONFINITE} or None, got {self.nonfinite!r}.")
        if self.sync not in SYNC:
            raise ValueError(f"Expected sync to be one of {SYNC}, got {self.sync!r}.")
        self._check_loss_scale()

    def _check_loss_scale(self) -> None:
        if self.loss_scale is None:
            return
        if isinstance(self.loss_scale, DynamicLossScale):
            if self.nonfinite not in (None, "skip"):
                raise ValueError(
                    f"Expected nonfinite='skip' with a dynamic loss_scale, which overflows on purpose, got "
                    f"{self.nonfinite!r}."
                )
        elif isinstance(self.loss_scale, bool) or not isinstance(self.loss_scale, int | float):
            raise TypeError(
                f"Expected loss_scale to be a number, a DynamicLossScale or None, got {self.loss_scale!r}. For a "
                "dynamic scale with the usual numbers pass DynamicLossScale()."
            )
        elif not SMALLEST <= self.loss_scale <= LARGEST:
            raise ValueError(f"Expected loss_scale from {SMALLEST} to {LARGEST}, got {self.loss_scale!r}.")

    def why_wait(self) -> str | None:
        """Why a step with these options needs all gradients before it starts, or None if it does not."""
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
    """Check that gradients can be clipped to a norm.

    Raises:
        TypeError: if it is not a number; ValueError if it is not above 0.
    """
    check_number("max_grad_norm", max_grad_norm)
    if not max_grad_norm > 0:
        raise ValueError(f"Expected max_grad_norm above 0, got {max_grad_norm!r}.")
