"""The members of a `ParallelOptimizer`: a sharded optimizer for each set of ranks that share parameter groups."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_zero.core.backward.reducer import has_static_graph, reduced_parameters
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.local.arguments import PARALLEL_KEYS, check_group
from ddp_zero.core.local.inner import ParamGroup, is_elementwise
from ddp_zero.ddp_hooks import build_with_hook
from ddp_zero.optimizer import ZeroRedundancyOptimizer, engine_of, sharded_of
from ddp_zero.parallel.idle_experts import take_part_with_zeros
from ddp_zero.parallel.membership import check_groups, counted
from ddp_zero.parallel.shards import Held, held, read_cuts

_OF_HOOKS = ("hook", "hook_state", "interleaved", "shard_buckets", "overlap", "stage", "accumulate_in_fp32", "sync")
_OF_REDUCTIONS = ("grad_comm_dtype", "gradient_predivide_factor")


@dataclass
class Plan:
    """What will become a member.

    Attributes:
        group: its ranks; None for all data-parallel ones.
        positions: of its groups among all.
        groups: its parameter groups, without what concerns ranks.
        held: how each of its parameters is held, in the order of the groups.
    """

    group: ProcessGroup | None
    positions: list[int] = field(default_factory=list)
    groups: list[ParamGroup] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)

    def describe(self) -> str:
        """Its groups, for messages."""
        shown = ", ".join(map(str, self.positions))
        return f"parameter group{'s' if len(self.positions) > 1 else ''} {shown}"


def planned(groups: Sequence[ParamGroup], dims: Sequence[str], mesh: DeviceMesh | None) -> list[Plan]:
    """One plan for groups without a process group, which comes first, and one for each process group.

    Args:
        groups: parameter groups as torch has read them.
        dims: names of the mesh dimensions other than the data-parallel one.
        mesh: the mesh; along dimensions of one rank, parameters are whole.

    Raises:
        TypeError: for a ``process_group`` or ``sharded_over`` of the wrong type; see also `held`.
    """
    plans: dict[int | None, Plan] = {None: Plan(None)}
    shared = {dim for dim in dims if mesh is not None and mesh[dim].size() > 1}
    for position, given in enumerate(groups):
        group, declared = given.get("process_group"), read_cuts(given.get("sharded_over", ()), position)
        if group is not None and not isinstance(group, ProcessGroup):
            check_group(group, f"process_group of parameter group {position}")
        plan = plans.setdefault(None if group is None else id(group), Plan(group))
        names = given.get("param_names", [None] * len(given["params"]))
        all_held = [
            held(param, declared, dims, f"parameter {name or number} of parameter group {position}").along(shared)
            for number, (name, param) in enumerate(zip(names, given["params"], strict=True))
        ]
        params = [one.param for one in all_held]
        options = {key: value for key, value in given.items() if key not in _NOT_OPTIONS}
        named = [*zip(names, params, strict=True)] if "param_names" in given else params
        plan.positions.append(position)
        plan.groups.append({**options, "params": named})
        plan.held += all_held
    return [plan for plan in plans.values() if plan.groups]


_NOT_OPTIONS = ("params", "param_names", *PARALLEL_KEYS)


def reducing(model: nn.Module, plan: Plan) -> DistributedDataParallel | None:
    """The DDP model, in a module, that reduces a plan's parameters; None if none does.

    Raises:
        ValueError: if several do.
    """
    mine = {id(one.param) for one in plan.held}
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, DistributedDataParallel)
        and any(id(param) in mine for _, param in reduced_parameters(module))
    }
    if len(found) > 1:
        raise ValueError(
            f"Expected one DDP model over {plan.describe()}, got {len(found)}: {', '.join(map(repr, found))}. Give the "
            "parameters of each DDP model a parameter group with its process_group=."
        )
    return next(iter(found.values()), None)


def built(
    plan: Plan,
    ddp: DistributedDataParallel | None,
    optimizer_class: Callable[..., Optimizer],
    everyone: Communicator,
    names: Mapping[int, str],
    options: dict[str, Any],
) -> ZeroRedundancyOptimizer:
    """The sharded optimizer of a plan: with the hook of its DDP model, or standalone in stage 1 without one.

    Args:
        plan: the groups.
        ddp: the model that reduces their gradients, or None.
        optimizer_class: the class.
        everyone: the data-parallel ranks.
        names: of parameters, by identity.
        options: of `ddp_zero.shard_optimizer`.

    Raises:
        ValueError: for a DDP model on other ranks than the plan's, or distributed tensors in flat storage.
        TypeError: for an optimizer that looks at whole parameters where ranks hold parts.
    """
    group = everyone.process_group if plan.group is None else plan.group
    distributed = next((one.label for one in plan.held if one.source is not None), None)
    if distributed is not None and options.get("parameters_as_bucket_view"):
        raise ValueError(
            f"Expected parameters_as_bucket_view=False with distributed tensors, got True and {distributed}: moved "
            "elsewhere, its part would no longer be the one that the model uses. Leave the option out."
        )
    options = {"partition": "parameters", **options}  # whole ones, so that `sharded_state_dict` knows their names
    if ddp is not None:
        if not Communicator(group).has_same_ranks(ddp.process_group):
            raise ValueError(
                f"Expected the DDP model over {plan.describe()} on their ranks, {get_process_group_ranks(group)}, got "
                f"one on {get_process_group_ranks(ddp.process_group)}. Wrap it with process_group= of the groups, or "
                f"have DDP ignore these parameters{_by_name(ddp, plan)}."
            )
        zero = build_with_hook(ddp, optimizer_class, plan.groups, **options)
        if plan.group is not None:
            take_part_with_zeros(ddp)
    else:
        own = {key: value for key, value in options.items() if key not in (*_OF_HOOKS, *_OF_REDUCTIONS)}
        zero = ZeroRedundancyOptimizer(plan.groups, optimizer_class, process_group=group, **own)
    table = sharded_of(zero).table
    table.learn_names([(names[id(param)], param) for param in table.params if id(param) in names])
    cut = next((index for index, one in enumerate(plan.held) if one.cut_over), None)
    if cut is not None and not is_elementwise(zero.optim):
        raise TypeError(
            f"Expected an optimizer that steps each element by itself for {table.label(cut)}, of which each rank "
            f"along {sorted(plan.held[cut].cut_over)} holds a part, got {type(zero.optim).__name__}. Use one such as "
            "AdamW, or declare the class by ddp_zero.elementwise(...) if it is one."
        )
    return zero


def _by_name(ddp: DistributedDataParallel, plan: Plan) -> str:
    """How to ignore a parameter of the root module, whose name DDP compares with a leading dot."""
    own = {id(param): name for name, param in ddp.module.named_parameters(recurse=False)}
    names = [own[id(one.param)] for one in plan.held if id(one.param) in own]
    return f", of which it knows {names[0]!r} as {'.' + names[0]!r}: pass both names" if names else ""


def follow_schedule(zero: ZeroRedundancyOptimizer, ddp: DistributedDataParallel) -> None:
    """Expect a pipeline schedule to run the DDP model of a member; see `ddp_zero.core.backward.forward_passes`.

    Raises:
        NotImplementedError: for a static graph, of which DDP averages the first backward pass of all, unless it was to.
    """
    holds_back = zero.stage == 2 or engine_of(zero).decision.options.accumulate_in_fp32
    if holds_back and has_static_graph(ddp):
        raise NotImplementedError(
            "Expected a DDP model without static_graph=True around a pipeline stage with stage=2 or "
            "accumulate_in_fp32=True, got one with it: it averages the first backward pass, which a schedule runs "
            "under no_sync(). Wrap the stage without static_graph=True, or pass stage=1."
        )
    engine_of(zero).passes.follow_schedule(holds_back)


def check_can_step(zero: ZeroRedundancyOptimizer) -> None:
    """Check, without communicating, that a member whose step waits for ``opt.step()`` can take it on this rank.

    Raises:
        RuntimeError: for groups that were edited, state that was moved away, or a parameter that is not its master.
        NotImplementedError: for a gradient that is not dense.
    """
    engine = engine_of(zero)
    if engine.hook is None or engine.hook.is_waiting:
        if engine.hook is not None:
            engine.hook.check_complete()
        sharded = engine.sharded
        sharded.table.check_groups(zero.param_groups)
        sharded.table.check_gradients()
        sharded.stepped.follow_model()
        sharded.check_ready()


def stated_groups(everyone: Communicator, plans: Sequence[Plan]) -> list[list[list[int]]]:
    """The global ranks of each plan's group, as every data-parallel rank has stated them: by plan, then by rank.

    A collective.

    Raises:
        ValueError: on every rank, if two of them differ.
    """
    own = [get_process_group_ranks(plan.group or everyone.process_group) for plan in plans]
    every = [json.loads(text) for text in everyone.all_gather_text(json.dumps(own))]
    ranks = get_process_group_ranks(everyone.process_group)
    by_plan = [[one[number] for one in every] for number in range(len(plans))]
    for plan, stated in zip(plans, by_plan, strict=True):
        check_groups(ranks, stated, plan.describe())
    return by_plan


def counted_by_rank(everyone: Communicator, stated: Sequence[Sequence[Sequence[int]]]) -> list[list[bool]]:
    """By plan and data-parallel rank, whether its share of the plan's groups counts in norms."""
    ranks = get_process_group_ranks(everyone.process_group)
    return [counted(ranks, one) for one in stated]


def counted_here(plan: Plan, mesh: DeviceMesh | None, dims: Sequence[str], pipeline_dim: str | None) -> list[bool]:
    """For each parameter of a plan, whether this rank counts it in norms: one of those that hold a replica does."""
    replicated = [dim for dim in dims if dim != pipeline_dim]
    at_first = {dim: mesh is None or mesh.get_local_rank(dim) == 0 for dim in replicated}
    return [all(dim in one.cut_over or at_first[dim] for dim in replicated) for one in plan.held]


def held_params(plans: Sequence[Plan]) -> dict[Tensor, Tensor]:
    """The parameter that is stepped for each that the user gave."""
    return {one.given: one.param for plan in plans for one in plan.held}


def places_of(plans: Sequence[Plan]) -> list[tuple[int, int]]:
    """For each parameter group its member, and its position there."""
    found = {
        position: (member, group) for member, plan in enumerate(plans) for group, position in enumerate(plan.positions)
    }
    return [found[position] for position in sorted(found)]
