"""Plans of a few parameters."""

from collections.abc import Sequence

from torch import Tensor

from ddp_zero.core.local.parameters import ParameterTable
from ddp_zero.core.plan.partition import partition_greedy
from ddp_zero.core.plan.shard_plan import ShardPlan, plan_standalone


def label(index: int) -> str:
    return f"parameter {index}"


def make_plan(params: Sequence[Tensor], world_size: int, cap: int = 200) -> ShardPlan:
    specs = ParameterTable([{"params": params}]).specs([param.requires_grad for param in params])
    return plan_standalone(specs, partition_greedy([spec.nbytes for spec in specs], world_size), world_size, cap)
