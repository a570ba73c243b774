"""Builds the shard and the engine of an optimizer from its arguments, checked and compared between ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from ddp_zero.core.backward.other_optimizers import check_others_confirmed
from ddp_zero.core.backward.scratch_bucket import options_of_stage
from ddp_zero.core.comm.ranks import Agreement, build_ranks
from ddp_zero.core.ddp.preconditions import check_can_sync, check_torch
from ddp_zero.core.ddp.reducer import missing_for_hooks
from ddp_zero.core.engine.engine import Engine
from ddp_zero.core.engine.partition_choice import partition_for
from ddp_zero.core.engine.shardable import check_unknown_classes
from ddp_zero.core.local.arguments import (
    check_flags,
    check_group,
    check_in_one_group,
    first_device,
    is_process_group,
    own_options,
)
from ddp_zero.core.local.costs import Cost, check_cost, make_hints_of
from ddp_zero.core.local.inner import (
    build_inner,
    check_can_be_sharded,
    check_epsilon,
    options_known_to,
)
from ddp_zero.core.local.instances import Build, Instance, read_arguments
from ddp_zero.core.local.mixed import CLASS_KEY, classes_in
from ddp_zero.core.local.parameters import ParameterTable, StepTargets
from ddp_zero.core.local.placement import placement_for
from ddp_zero.core.step.clipping import GROUP_LIMIT, check_options
from ddp_zero.core.step.rank_shard import Binding, Shard
from ddp_zero.core.step.state_order import StateOrder
from ddp_zero.error_codes import ending_with
from ddp_zero.options import StepOptions


def build_engine(
    optimizer: Any,
    params: Any,
    optimizer_class: Any,
    defaults: dict[str, Any],
    process_group: ProcessGroup | None,
    shard_group: ProcessGroup | None,
    constructor: Callable[..., None],
    *,
    stage: tuple[int, Any, Any],
    step: tuple[Any, ...],
    overlap_with_ddp: bool,
    parameters_as_bucket_view: bool,
    partition: str,
    cost: Cost,
    max_byte_imbalance: float,
) -> tuple[Engine, Build, Instance | None]:
    """Build the engine of an optimizer that is not initialised yet, and set the optimizer's groups. A collective.

    All arguments are as the user gave them to ``constructor``. ``stage`` is the stage with ``grad_comm_dtype`` and
    ``gradient_predivide_factor``, ``step`` has the arguments of `StepOptions`.

    Returns:
        The engine; a function that builds the inner optimizer from groups and step targets; and the optimizer instance
        whose state is to be taken over, or None.
    """
    group = process_group if is_process_group(process_group) else None  # anything else is refused below, by all ranks
    ranks = build_ranks(group, shard_group, first_device(params))
    Joinable.__init__(optimizer)
    with Agreement(ranks.everyone, "building ZeroRedundancyOptimizer") as agreement:
        check_group(process_group)
        check_flags(parameters_as_bucket_view=parameters_as_bucket_view, overlap_with_ddp=overlap_with_ddp)
        reduction = options_of_stage(*stage)
        options = StepOptions(*step)
        check_can_sync(options.sync, parameters_as_bucket_view)
        if overlap_with_ddp or reduction is not None or options.accumulate_in_fp32:
            needs = "overlap_with_ddp=True, stage=2 and accumulate_in_fp32=True rely"
            check_torch(needs, missing_for_hooks(partitions=reduction is not None))
        groups, built_class, build, instance = read_arguments(
            params, optimizer_class, defaults, own_options(constructor)
        )
        check_cost(cost, max_byte_imbalance)
        for kind in classes_in(built_class):
            check_can_be_sharded(kind)
        if instance is not None:
            instance.check_can_be_copied()
        check_in_one_group(groups)
        with ending_with("[ZERO-102]"):
            # not by the constructor, which calls back; the local optimizer knows the class's own defaults
            parsed = Optimizer(groups, {}).param_groups
        Optimizer.__setstate__(optimizer, {"defaults": {}, "param_groups": parsed})
        exposed = optimizer.param_groups
        check_others_confirmed("a new optimizer over its parameters", exposed)
        check_unknown_classes(build, defaults, exposed)
        table = ParameterTable(exposed, make_hints_of(built_class, instance.defaults if instance else defaults, cost))
        division = partition_for(
            partition,
            built_class,
            table.params,
            ranks.shard,
            stage=stage[0],
            overlaps=overlap_with_ddp,
            limits=[options.max_grad_norm, *(group.get(GROUP_LIMIT) for group in exposed)],
            norm_type=options.norm_type,
            master_weights=options.master_weights,
            offload=options.offload,
            hints_of=table.hints_of,
            max_byte_imbalance=max_byte_imbalance,
        )
        agreement.declare("optimizer class", getattr(built_class, "__qualname__", repr(built_class)))
        agreement.declare("number of parameter groups", len(exposed))
        agreement.declare("classes of groups", [group.get(CLASS_KEY) for group in exposed])
        agreement.declare("max_byte_imbalance", max_byte_imbalance)
        agreement.declare("parameters_as_bucket_view", parameters_as_bucket_view)
        reduced = dict(zip(("stage", "grad_comm_dtype", "gradient_predivide_factor"), stage, strict=True))
        placed = {"overlap_with_ddp": overlap_with_ddp, "partition": division.name}
        agreement.declare_each({**reduced, **vars(options), **placed})
        agreement.declare_parameters(table)
        binding = Binding(ranks, table, parameters_as_bucket_view, options.sync == "forward", division)
        stepped = StepTargets(table, options.master_weights, placement_for(options.offload))
        agreement.declare("state of the optimizer", instance and instance.digest())
        build_one = partial(build_inner, build, defaults=defaults)
        with ending_with("[ZERO-103]"):
            inner = build_one(exposed, stepped.assign(binding.owned_parts()))
        for place, stepped_group in enumerate(inner.param_groups):
            agreement.declare_options(stepped_group, options_known_to(inner), f"parameter group {place}")
        check_options(options, inner)
        binding.check_class(inner)
        check_epsilon(inner, inner.param_groups, table, stepped)
    shard = Shard(ranks, table, binding, inner, optimizer, stepped, StateOrder(), binding.strides())
    return Engine(optimizer, shard, options, overlap_with_ddp, reduction), build_one, instance
