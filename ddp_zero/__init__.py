"""ZeRO stage 1 for plain PyTorch DistributedDataParallel: optimizer state sharded, the numbers unchanged."""

from ddp_zero.api import hook_with_zero_step, hook_with_zero_step_interleaved, shard_optimizer
from ddp_zero.optimizer import ZeroRedundancyOptimizer
from ddp_zero.overlap import OverlapStatus, Phase

__all__ = [
    "OverlapStatus",
    "Phase",
    "ZeroRedundancyOptimizer",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "shard_optimizer",
]
__version__ = "0.1.0.dev0"
