"""Further parallel dimensions: expert, tensor and pipeline parallelism around data-parallel ranks."""

from ddp_zero.parallel.optimizer import ParallelOptimizer

__all__ = ["ParallelOptimizer"]
