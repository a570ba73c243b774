"""ZeRO stages 1 and 2 for plain PyTorch DistributedDataParallel: state and gradients sharded, the numbers unchanged."""

from ddp_zero.api import hook_with_zero_step, hook_with_zero_step_interleaved, shard_optimizer
from ddp_zero.compacting import compact
from ddp_zero.loss_scale import DynamicLossScale
from ddp_zero.optimizer import ZeroRedundancyOptimizer
from ddp_zero.overlap import OverlapStatus, Phase
from ddp_zero.shardable import check_shardable
from ddp_zero.step_record import StepRecord, StepRegime

__all__ = [
    "DynamicLossScale",
    "OverlapStatus",
    "Phase",
    "StepRecord",
    "StepRegime",
    "ZeroRedundancyOptimizer",
    "check_shardable",
    "compact",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "shard_optimizer",
]
__version__ = "0.1.0.dev0"
