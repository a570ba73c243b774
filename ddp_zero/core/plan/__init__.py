"""Ownership of parameters and their layout in memory, in plain ints; without torch."""

from ddp_zero.core.plan.chunks import Chunk, chunks_of_run, fault
from ddp_zero.core.plan.ownership import home, is_cut
from ddp_zero.core.plan.partition import GlobalRank, GroupRank, Item, Loads, partition_by_cost, partition_greedy
from ddp_zero.core.plan.partitions import AUTO
from ddp_zero.core.plan.shapes import Value, is_dense
from ddp_zero.core.plan.shard_plan import Bucket, ParameterSpec, Segment, ShardPlan
from ddp_zero.core.plan.weighted import MAX_BYTE_IMBALANCE, WeightedParameters, byte_limit, cost_loads

__all__ = ["Chunk", "chunks_of_run", "fault", "home", "is_cut"]
__all__ += ["AUTO", "GlobalRank", "GroupRank", "Item", "Loads", "partition_by_cost", "partition_greedy"]
__all__ += ["Bucket", "ParameterSpec", "Segment", "ShardPlan", "Value", "is_dense"]
__all__ += ["MAX_BYTE_IMBALANCE", "WeightedParameters", "byte_limit", "cost_loads"]
