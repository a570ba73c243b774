"""Ownership of parameters and their layout in memory, in plain ints; without torch."""

from ddp_zero.core.plan.chunks import Chunk
from ddp_zero.core.plan.ownership import Part
from ddp_zero.core.plan.partition import GlobalRank, GroupRank, partition_greedy
from ddp_zero.core.plan.shapes import Value
from ddp_zero.core.plan.shard_plan import ShardPlan
from ddp_zero.core.plan.weighted import MAX_BYTE_IMBALANCE

__all__ = ["MAX_BYTE_IMBALANCE", "Chunk", "GlobalRank", "GroupRank", "Part", "ShardPlan", "Value", "partition_greedy"]
