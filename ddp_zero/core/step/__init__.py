"""One sharded step, wherever the gradients come from: ownership, clipping, scaling, skipping, Join.

Imports `comm` and the rooms below it; knows neither DDP nor backward.
"""

from ddp_zero.core.step.before_forward import wait_before_forward
from ddp_zero.core.step.clipping import OWN_LIMIT, Beyond, Culprit, Share, check_options
from ddp_zero.core.step.decision import calling_scaler, findings_of
from ddp_zero.core.step.join import ZeroJoinHook, refuse_active_divisor, refuse_replicas
from ddp_zero.core.step.rank_shard import Binding, Shard
from ddp_zero.core.step.record import Number, StepRecord, StepRegime
from ddp_zero.core.step.state_order import State

__all__ = ["OWN_LIMIT", "Beyond", "Culprit", "Share", "check_options", "wait_before_forward"]
__all__ += ["ZeroJoinHook", "calling_scaler", "findings_of", "refuse_active_divisor", "refuse_replicas"]
__all__ += ["Binding", "Number", "Shard", "State", "StepRecord", "StepRegime"]
