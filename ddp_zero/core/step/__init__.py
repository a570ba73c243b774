"""One sharded step, wherever the gradients come from: ownership, clipping, scaling, skipping, Join."""

from ddp_zero.core.step.before_forward import wait_before_forward
from ddp_zero.core.step.clipping import GradientStats, NonfiniteGradient, RestOfModel
from ddp_zero.core.step.decision import calling_scaler
from ddp_zero.core.step.join import refuse_join
from ddp_zero.core.step.rank_shard import Shard
from ddp_zero.core.step.record import StepRecord, StepRegime

__all__ = ["GradientStats", "NonfiniteGradient", "RestOfModel", "Shard", "StepRecord", "StepRegime"]
__all__ += ["calling_scaler", "refuse_join", "wait_before_forward"]
