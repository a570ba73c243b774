"""`EngineOptimizer`: the sharded optimizer of an engine, with names that scripts use on DeepSpeed's."""

from typing import TYPE_CHECKING, Any

from ddp_zero.deepspeed.config.answers import OF_THE_OPTIMIZER, way_here
from ddp_zero.optimizer import ZeroRedundancyOptimizer, engine_of


class EngineOptimizer(ZeroRedundancyOptimizer):
    """A `ZeroRedundancyOptimizer` that answers what scripts ask DeepSpeed's optimizers of stages 1 and 2.

    For other names of theirs the error tells the way here.
    """

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped because a gradient was not finite."""
        step = self.last_step
        return step is not None and not step.stepped

    @property
    def cur_scale(self) -> float:
        """The current factor on the loss; 1.0 without fp16."""
        return 1.0 if self.loss_scale is None else self.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the loss scale changes with overflows."""
        scale = engine_of(self).decision.loss_scale
        return scale is not None and scale.is_dynamic

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group; call it on every rank."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> Any:
        return self.param_groups[0]["lr"]

    def refresh_fp32_params(self) -> None:
        """Make masters from the model's parameters, after these were changed."""
        if self.master_weights:
            self.refresh_master_weights()

    if not TYPE_CHECKING:  # so that a misspelt name is still an error

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError as error:
                way = way_here(name, OF_THE_OPTIMIZER)
                if way is None or name.startswith("__"):
                    raise
                raise AttributeError(f"Expected what this optimizer has of DeepSpeed's, got {name!r}. {way}") from error
