"""Ownership of parameters and their layout in memory, in plain ints; without torch."""

from ddp_zero.core.plan.buckets import CAP_BYTES, FIRST_CAP_BYTES, bucket_mb, ddp_layout
from ddp_zero.core.plan.chunks import Chunk, chunks_of_run, fault
from ddp_zero.core.plan.ownership import home, is_cut, piece_of
from ddp_zero.core.plan.partition import GlobalRank, GroupRank, Item, Loads, partition_by_cost, partition_greedy
from ddp_zero.core.plan.partitions import AUTO, partition_named
from ddp_zero.core.plan.shapes import Value, is_dense, padded_size
from ddp_zero.core.plan.shard_plan import Bucket, ParameterSpec, Segment, ShardPlan
from ddp_zero.core.plan.weighted import MAX_BYTE_IMBALANCE, WeightedParameters, byte_limit, cost_loads

__all__ = ["CAP_BYTES", "FIRST_CAP_BYTES", "Chunk", "bucket_mb", "chunks_of_run", "ddp_layout", "fault"]
__all__ += ["home", "is_cut", "piece_of"]
__all__ += ["GlobalRank", "GroupRank", "Item", "Loads", "partition_by_cost", "partition_greedy"]
__all__ += ["AUTO", "Value", "is_dense", "padded_size", "partition_named"]
__all__ += ["Bucket", "ParameterSpec", "Segment", "ShardPlan"]
__all__ += ["MAX_BYTE_IMBALANCE", "WeightedParameters", "byte_limit", "cost_loads"]
