"""More than one kind of parallelism: experts, tensor and pipeline parallel ranks around the data-parallel ones."""

from ddp_zero.parallel.optimizer import ParallelOptimizer

__all__ = ["ParallelOptimizer"]
