"""ZeRO stages 1 and 2 for plain PyTorch DistributedDataParallel: state and gradients sharded, the numbers unchanged."""

import ddp_zero.tools.needs  # noqa: F401  # first: it says what is missing
from ddp_zero.core.backward.overlap_machine import OverlapStatus, Phase
from ddp_zero.core.engine.shardable import check_shardable
from ddp_zero.core.local.inner import elementwise
from ddp_zero.core.step.record import StepRecord, StepRegime
from ddp_zero.ddp_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from ddp_zero.loss_scale import DynamicLossScale
from ddp_zero.optimizer import ZeroRedundancyOptimizer
from ddp_zero.options import Offload
from ddp_zero.shard import shard_optimizer, wrap
from ddp_zero.tools.estimate import estimate
from ddp_zero.tools.record.flight import record_to

__all__ = [
    "DynamicLossScale",
    "Offload",
    "OverlapStatus",
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
    "wrap",
]
__version__ = "0.1.0"
