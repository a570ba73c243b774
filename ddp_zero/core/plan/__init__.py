"""Ownership of parameters and their layout in memory, in plain ints; without torch."""

from ddp_zero.core.plan.partition import GlobalRank, GroupRank, partition_greedy
from ddp_zero.core.plan.shard_plan import ShardPlan
from ddp_zero.core.plan.weighted import MAX_BYTE_IMBALANCE

__all__ = ["MAX_BYTE_IMBALANCE", "GlobalRank", "GroupRank", "ShardPlan", "partition_greedy"]
