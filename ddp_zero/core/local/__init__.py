"""The shard of one rank, and its local step: parameters, groups, masters; also in other memory, on the host."""

from ddp_zero.core.local.arguments import (
    Grouping,
    check_class,
    check_flags,
    check_group,
    check_known,
    check_params,
    group_by_options,
    parameters_of,
)
from ddp_zero.core.local.costs import Cost, deal_by_cost
from ddp_zero.core.local.inner import (
    ParamGroup,
    SteppedTogether,
    class_name,
    elementwise,
    is_elementwise_class,
    rehearse_load,
    suboptimizer_for,
)
from ddp_zero.core.local.instances import instance_in
from ddp_zero.core.local.loop_options import comparable_text, digest_of
from ddp_zero.core.local.memory import digest
from ddp_zero.core.local.mixed import CLASS_KEY, StepsWithPeers
from ddp_zero.core.local.parameters import MASTER_KEY, ParameterTable, SteppedWhole, rounds_to, sample_values
from ddp_zero.core.local.weak_calls import weakly

__all__ = ["Grouping", "check_class", "check_flags", "check_group", "check_known", "check_params", "group_by_options"]
__all__ += ["Cost", "comparable_text", "deal_by_cost", "digest_of", "parameters_of"]
__all__ += ["ParamGroup", "SteppedTogether", "class_name", "elementwise", "is_elementwise_class", "suboptimizer_for"]
__all__ += ["digest", "instance_in", "rehearse_load"]
__all__ += ["CLASS_KEY", "MASTER_KEY", "ParameterTable", "SteppedWhole", "StepsWithPeers", "rounds_to", "sample_values"]
__all__ += ["weakly"]
