"""The shard of one rank, and its local step: parameters, groups, masters, trees of values."""

from ddp_zero.core.local.arguments import (
    PARALLEL_KEYS,
    PARALLEL_OPTIONS,
    Grouping,
    check_class,
    check_flags,
    check_group,
    check_known,
    check_params,
    first_device,
    group_by_options,
    is_group,
    is_parallel,
    own_options,
    parameters_of,
)
from ddp_zero.core.local.costs import Cost, check_cost, known_cost, weigher
from ddp_zero.core.local.given_options import GivenOptions, Written, digest_of, plain, text
from ddp_zero.core.local.inner import (
    ParamGroup,
    SteppedTogether,
    build_inner,
    check_can_be_sharded,
    check_elementwise,
    check_epsilon,
    class_name,
    elementwise,
    group_options,
    is_elementwise,
    is_elementwise_class,
    load_group,
    may_be_cut,
    options_known_to,
    other_state,
    part_for,
    rehearse_load,
)
from ddp_zero.core.local.instances import instance_in, read_arguments
from ddp_zero.core.local.live_model import (
    LiveModel,
    by_group,
    ddp_models_in,
    group_of,
    holds_tensor,
    is_extra,
    the_ddp_model_in,
)
from ddp_zero.core.local.memory import digest
from ddp_zero.core.local.mixed import CLASS_KEY, Mixture, StepsWithPeers, classes_in, read_classes, with_class
from ddp_zero.core.local.parameters import (
    MASTER_KEY,
    ParameterTable,
    SteppedWhole,
    StepTargets,
    rounds_to,
    sample_values,
)
from ddp_zero.core.local.parts import boxes_of, run_of
from ddp_zero.core.local.placeholders import on_this_rank, untouched
from ddp_zero.core.local.tree import TensorSpec, Tree, check_can_travel, fill, flatten, memory_of, specs_in, unflatten

__all__ = ["PARALLEL_KEYS", "PARALLEL_OPTIONS", "Grouping", "check_class", "check_flags", "check_group", "check_known"]
__all__ += ["check_params", "first_device", "group_by_options", "is_group", "is_parallel", "own_options"]
__all__ += ["Cost", "check_cost", "known_cost", "parameters_of", "weigher"]
__all__ += ["GivenOptions", "Written", "digest_of", "plain", "text"]
__all__ += ["ParamGroup", "SteppedTogether", "build_inner", "check_can_be_sharded", "check_elementwise"]
__all__ += ["check_epsilon", "class_name", "elementwise", "group_options", "is_elementwise", "is_elementwise_class"]
__all__ += ["load_group", "may_be_cut", "options_known_to", "other_state", "part_for", "rehearse_load"]
__all__ += ["instance_in", "read_arguments"]
__all__ += ["LiveModel", "by_group", "ddp_models_in", "group_of", "holds_tensor", "is_extra", "the_ddp_model_in"]
__all__ += ["CLASS_KEY", "Mixture", "StepsWithPeers", "classes_in", "digest", "read_classes", "with_class"]
__all__ += ["MASTER_KEY", "ParameterTable", "StepTargets", "SteppedWhole", "rounds_to", "sample_values"]
__all__ += ["boxes_of", "on_this_rank", "run_of", "untouched"]
__all__ += ["TensorSpec", "Tree", "check_can_travel", "fill", "flatten", "memory_of", "specs_in", "unflatten"]
