"""ZeRO stage 1 for plain PyTorch DistributedDataParallel: optimizer state sharded, the numbers unchanged."""

from ddp_zero.optimizer import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
__version__ = "0.1.0.dev0"
