"""The names of `ddp_zero`, which imports this file when the first of them is used."""

import ddp_zero.tools.needs  # noqa: F401  # first: it refuses an unusable torch
from ddp_zero.core.backward import Phase
from ddp_zero.core.engine import check_shardable
from ddp_zero.core.local import elementwise
from ddp_zero.core.step import StepRecord, StepRegime
from ddp_zero.ddp_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from ddp_zero.insight.flight import record_to
from ddp_zero.loss_scale import DynamicLossScale
from ddp_zero.optimizer import ZeroRedundancyOptimizer
from ddp_zero.options import Offload
from ddp_zero.shard import shard_optimizer, wrap
from ddp_zero.tools.estimate import estimate
from ddp_zero.values import state_class

__all__ = [
    "DynamicLossScale",
    "Offload",
    "Phase",
    "StepRecord",
    "StepRegime",
    "ZeroRedundancyOptimizer",
    "check_shardable",
    "elementwise",
    "estimate",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "record_to",
    "shard_optimizer",
    "state_class",
    "wrap",
]
