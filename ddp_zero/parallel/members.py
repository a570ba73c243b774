"""The members of a `ParallelOptimizer`: a sharded optimizer for each set of ranks that share parameter groups.

With eight ranks, two experts and experts held by ranks 0 2 4 6 and 1 3 5 7, ::

    dense    0 1 2 3 4 5 6 7      one group
    experts  0 2 4 6 | 1 3 5 7    two groups; ranks 0 and 1 are the first of theirs, and count in norms
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_zero.core.comm import Agreement, Communicator, next_generation
from ddp_zero.core.ddp import PASSED_BY, has_static_graph, in_buckets
from ddp_zero.core.local import (
    CLASS_KEY,
    MASTER_KEY,
    ParameterTable,
    ParamGroup,
    SteppedWhole,
    check_class,
    check_group,
    check_known,
    check_params,
    group_by_options,
    is_elementwise_class,
    suboptimizer_for,
)
from ddp_zero.core.plan import MAX_BYTE_IMBALANCE
from ddp_zero.core.step import wait_before_forward
from ddp_zero.ddp_hooks import build_with_hook, options_of_hook
from ddp_zero.optimizer import ZeroRedundancyOptimizer, engine_of, shard_of
from ddp_zero.options import PARALLEL_KEYS, PARALLEL_OPTIONS
from ddp_zero.parallel.gradients import Averages, check_same_values, take_part_with_zeros
from ddp_zero.parallel.joint_decision import HeldErrors, OtherMembers
from ddp_zero.parallel.placement import LocalParameter, local_parameter, read_cuts
from ddp_zero.parallel.whole import PART_NUMBER_KEY, Cut, StateRoutes, gathering_class, number_of_part, places_for
from ddp_zero.values import ddp_models_in

_REFUSED = {"process_group": "Parameter groups name theirs.", "overlap_with_ddp": "Use overlap=."}
_SHARD_GROUP = "shard_group"
_NOT_OPTIONS = ("params", "param_names", _SHARD_GROUP, *PARALLEL_KEYS)
_OF_HOOKS = ("hook", "hook_state", "interleaved", "shard_buckets", "overlap", "stage", "accumulate_in_fp32")
_OF_REDUCTIONS = ("grad_comm_dtype", "gradient_predivide_factor")


# Arguments of the optimizer


def check_arguments(model: object, optimizer_class: Any, options: Mapping[str, Any]) -> None:
    """Check types, and that no option is misspelt or decided elsewhere; TypeError if not."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"Expected the model that this rank trains, an nn.Module, got {type(model).__name__}. The order is: model, "
            "optimizer class, parameter groups. [ZERO-102]"
        )
    check_class(optimizer_class)
    for name, remedy in _REFUSED.items():
        if name in options:
            raise TypeError(f"Expected an option of ParallelOptimizer, got {name!r}. {remedy} [ZERO-104]")
    own = options_of_hook()
    check_known([name for name in options if name not in own], optimizer_class, [*own, *PARALLEL_OPTIONS])


def other_dims(mesh: DeviceMesh | None, data: Sequence[str], pipeline: str | None) -> list[str]:
    """Names of the mesh dimensions other than the data-parallel ones."""
    names = list(mesh.mesh_dim_names or ()) if mesh is not None else []
    for argument, name in [*(("data_parallel_dim", dim) for dim in data), ("pipeline_dim", pipeline)]:
        if name is not None and name not in names:
            raise ValueError(f"Expected {argument} to name a dimension of the mesh, {names}, got {name!r}. [ZERO-801]")
    if mesh is not None and not data:
        raise ValueError(
            f"mesh= needs data_parallel_dim=. Pass the name of the dimension of {names} along which ranks hold the "
            "same parameters. [ZERO-801]"
        )
    return [name for name in names if name not in data]


def data_group(
    model: nn.Module, given: ProcessGroup | None, mesh: DeviceMesh | None, dims: Sequence[str]
) -> ProcessGroup | None:
    """The data-parallel ranks; with several DDP models, the largest group.

    A collective of the mesh's ranks where several dimensions are data-parallel, unless their group is known to torch.
    """
    if given is not None or mesh is not None:
        if mesh is None or (given is not None and len(dims) > 1):
            return given
        return mesh.get_group(dims[0]) if len(dims) == 1 else mesh[tuple(dims)]._flatten().get_group()
    models = ddp_models_in(model) if isinstance(model, nn.Module) else {}  # else refused later, by all ranks
    groups: list[ProcessGroup] = [ddp.process_group for ddp in models.values()]
    return max(groups, key=lambda group: group.size(), default=None)


def copy_groups(params: Any, model: nn.Module) -> Any:
    """The constructor's ``params`` with copies of group dicts, so that they may be changed; all parameters for None."""
    named = [(name, param) for name, param in model.named_parameters()]
    if params is None:
        return named
    if callable(params):
        return group_by_options(named, params)
    check_params(params)
    return [dict(item) if isinstance(item, dict) else item for item in params]


def nonfinite(options: Mapping[str, Any], groups: Sequence[ParamGroup]) -> str:
    """The option of that name, or its default: the same in all members, whether or not their steps wait."""
    action: str | None = options.get("nonfinite")
    if action is not None:
        return action
    limits = [options.get("max_grad_norm"), *(group.get("max_grad_norm") for group in groups)]
    clips_or_scales = options.get("loss_scale") is not None or any(limit is not None for limit in limits)
    return "skip" if clips_or_scales else "step"


@contextmanager
def agree_across(comms: Sequence[Communicator], doing: str, facts: Mapping[str, object]) -> Iterator[list[Agreement]]:
    """A context that succeeds on all ranks of these groups, or raises on all; ``facts`` must be equal on all of them.

    Yields an `Agreement` per group, in order, for further facts.
    """
    with ExitStack() as stack:
        # each group agrees twice: an error found in the last agreement must still reach groups that had agreed before
        if len(comms) > 1:
            for comm in reversed(comms):
                stack.enter_context(Agreement(comm, doing))
        agreements = [stack.enter_context(Agreement(comm, doing)) for comm in reversed(comms)][::-1]
        for agreement in agreements:
            for name, fact in facts.items():
                agreement.declare(name, fact)
        yield agreements


@dataclass(frozen=True)
class Axes:
    """The ranks around this rank, along each axis of the job."""

    data_comm: Communicator  # the data-parallel ranks
    mesh: DeviceMesh | None  # of all ranks
    data_dims: Sequence[str]  # names of its data-parallel dimensions
    other_dims: Sequence[str]  # names of its other dimensions
    pipeline: str | None  # the dimension among these along which ranks are pipeline stages
    comm_of_dim: Mapping[str, Communicator]  # for each of the other dimensions with several ranks: the ranks along it

    @classmethod
    def of(
        cls, model: Any, group: ProcessGroup | None, mesh: DeviceMesh | None, data: Sequence[str], pipeline: str | None
    ) -> "Axes":
        """The ranks around this rank; a collective of the mesh as `data_group`.

        Raises ValueError for dimensions that the mesh does not have, or without data-parallel dimensions.
        """
        others = other_dims(mesh, data, pipeline)
        device = next((param.device for param in model.parameters()), None)
        data_comm = Communicator(data_group(model, group, mesh, data), device=device)
        dims_of_several = [dim for dim in others if mesh is not None and mesh[dim].size() > 1]
        groups = {} if mesh is None else {dim: mesh.get_group(dim) for dim in dims_of_several}
        comm_of_dim = {dim: Communicator(ranks, device=device) for dim, ranks in groups.items()}
        return cls(data_comm, mesh, data, others, pipeline, comm_of_dim)

    @property
    def comms(self) -> list[Communicator]:
        """The data-parallel ranks, then those along the other dimensions of several ranks."""
        return [self.data_comm, *self.comm_of_dim.values()]

    @property
    def stages(self) -> int:
        return 1 if self.mesh is None or self.pipeline is None else self.mesh[self.pipeline].size()

    @property
    def home_dims(self) -> list[str]:
        """The data-parallel and pipeline dimensions: coordinates along these say which ranks hold a parameter."""
        return [*self.data_dims, *([] if self.pipeline is None else [self.pipeline])]


# Members


@dataclass(frozen=True)
class SplitParameter:
    """A parameter that is cut along one mesh dimension, and whose optimizer class must step it whole."""

    local: LocalParameter  # this rank's part of it
    tensor_dim: int  # the dimension of the tensor that is cut
    optimizer_class: type[Optimizer]
    options: Mapping[str, Any]  # of its parameter group

    def facts(self) -> list[object]:
        """Class, dtype and uncut dimensions, as JSON values: the same on all ranks that hold a part of it."""
        shape = self.local.shape_with(self.tensor_dim, -1)
        return [self.optimizer_class.__qualname__, str(self.local.param.dtype), shape]


class GatherPlan(NamedTuple):
    """The parameters whose parts are gathered on one rank for their step, and the ranks that do so."""

    cuts: dict[type[Optimizer], dict[int, Cut]]  # by optimizer class, and `number_of_part`
    comms: dict[str, Communicator]  # for each mesh dimension that cuts any: the ranks along it


@dataclass(frozen=True)
class SharedGroups:
    """Parameter groups that the same ranks hold, and that one DDP model reduces, if any does."""

    group: ProcessGroup | None  # their ranks; None for all data-parallel ranks
    shard_group: ProcessGroup | None  # the ranks among them that share one copy of the state; None: all
    # the DDP model that reduces their gradients; None if they are averaged in ``opt.step()``
    ddp: DistributedDataParallel | None
    positions: Sequence[int]  # of the groups among all groups
    groups: Sequence[ParamGroup]  # without ``process_group`` and ``sharded_over``
    local_params: Sequence[LocalParameter]  # the parameters of all groups, as this rank holds them, in order

    def extended_by(self, other: "SharedGroups") -> "SharedGroups":
        """A new value: these groups, followed by other groups that the same ranks hold."""
        return replace(
            self,
            ddp=self.ddp or other.ddp,
            positions=[*self.positions, *other.positions],
            groups=[*self.groups, *other.groups],
            local_params=[*self.local_params, *other.local_params],
        )

    def describe(self) -> str:
        """The groups, for messages."""
        shown = ", ".join(map(str, self.positions))
        return f"parameter group{'s' if len(self.positions) > 1 else ''} {shown}"

    def ranks(self, data_comm: Communicator) -> ProcessGroup:
        return data_comm.process_group if self.group is None else self.group

    def check_distributed_tensors(self, options: Mapping[str, Any]) -> None:
        """Check that the model will use the stepped values of distributed tensors (DTensors).

        Raises ValueError for DTensors in flat storage, NotImplementedError for those that would be received after the
        step.
        """
        distributed = next((param.label for param in self.local_params if param.source is not None), None)
        if distributed is not None and options.get("parameters_as_bucket_view"):
            raise ValueError(
                f"Expected parameters_as_bucket_view=False with distributed tensors, got True and {distributed}: moved "
                "elsewhere, its part would no longer be the one that the model uses. Leave the option out. [ZERO-105]"
            )
        if distributed is not None and options.get("sync") == "forward":
            raise NotImplementedError(
                f"sync='forward' does not support distributed tensors such as {distributed}: the model uses the whole "
                "and would not wait for this rank's part. Pass sync='step', or cut the parameters by hand. [ZERO-812]"
            )

    def find_split_parameters(self, optimizer_class: Callable[..., Optimizer]) -> dict[str, list[SplitParameter]]:
        """The parameters that are cut along one mesh dimension and must be stepped whole, by that dimension."""
        group_of_param = [group for group in self.groups for _ in group["params"]]
        split_params: dict[str, list[SplitParameter]] = {}
        for local, group in zip(self.local_params, group_of_param, strict=True):
            class_to_step = group.get(CLASS_KEY, optimizer_class)
            cut = local.single_cut()
            if cut is not None and isinstance(class_to_step, type) and not is_elementwise_class(class_to_step):
                mesh_dim, tensor_dim = cut
                split_params.setdefault(mesh_dim, []).append(SplitParameter(local, tensor_dim, class_to_step, group))
        return split_params

    def plan_gathers(
        self,
        optimizer_class: Callable[..., Optimizer],
        axes: Axes,
        max_byte_imbalance: float | None,
        extended: "Member | None" = None,
    ) -> GatherPlan:
        """Find the parameters whose parts are gathered for their step, and assign a host and an owner to each.

        A collective if there are any, or were before. ``extended`` is the member to which these groups are added, if
        any; NotImplementedError if its gathered parts all have one size and parts of these groups do not.
        """
        split_params = self.find_split_parameters(optimizer_class)
        shared = self if extended is None else extended.shared.extended_by(self)
        known_comms, known_cuts = ({}, {}) if extended is None else (extended.gather_comms, extended.cuts)
        has_given_owners = any(cut.owner is not None for cut in known_cuts.values())
        comms, part_lengths, are_even = dict[str, Communicator](), dict[str, list[tuple[int, ...]]](), True
        for dim in sorted({*split_params, *known_comms}):
            assert axes.mesh is not None, "it has the dimension"
            split_along = split_params.get(dim, [])
            if dim in known_comms:
                comms[dim] = known_comms[dim]
            else:
                group = axes.mesh.get_group(dim)
                comms[dim] = Communicator(group, next_generation(group), device=split_along[0].local.param.device)
            # of all its parameters: sizes decide the owners, and the parts of a matrix can meet only if one
            # data-parallel rank owns all of them. A rank that owns none would not come, and be waited for
            shapes = [list(local.param.shape) for local in shared.local_params]
            lengths = [split.local.param.shape[split.tensor_dim] for split in split_along]
            gathered = [json.loads(text) for text in comms[dim].all_gather_text(json.dumps([shapes, lengths]))]
            are_even &= all(rank_shapes == gathered[0][0] for rank_shapes, _ in gathered)
            part_lengths[dim] = [*zip(*(rank_lengths for _, rank_lengths in gathered), strict=True)]
        # shapes may differ along one dimension where all ranks along the other have the same
        are_even = all([flag for comm in comms.values() for (flag,) in comm.all_gather_ints([are_even])])
        if known_comms and not are_even and not has_given_owners:
            raise NotImplementedError(
                f"Expected parts of one size on all ranks in {self.describe()}, which is added to matrices that are "
                "stepped whole in parts of one size, got different sizes. Give the constructor a group with such "
                "parts, or build a new ParallelOptimizer and load the state_dict() of this one. [ZERO-812]"
            )
        imbalance = MAX_BYTE_IMBALANCE if max_byte_imbalance is None else max_byte_imbalance
        cuts: dict[type[Optimizer], dict[int, Cut]] = {}
        for dim, split_along in sorted(split_params.items()):
            comm, data_ranks = comms[dim], (self.shard_group or shared.ranks(axes.data_comm)).size()
            lengths_of = [*zip(split_along, part_lengths[dim], strict=True)]
            shapes_of_wholes = [split.local.shape_with(split.tensor_dim, sum(lengths)) for split, lengths in lengths_of]
            pairs = [*zip(split_along, shapes_of_wholes, strict=True)]
            costed = [(split.optimizer_class, shape, split.options) for split, shape in pairs]
            nbytes = [math.prod(shape) * split.local.param.itemsize for split, shape in pairs]
            known_nbytes = None if are_even and not has_given_owners else nbytes
            places = places_for(costed, known_nbytes, data_ranks, comm.world_size, imbalance)
            for (split, shape), (_, sizes), (owner, host) in zip(pairs, lengths_of, places, strict=True):
                cut = Cut(comm, split.tensor_dim, host, shape, split.local.label, sizes, owner)
                cuts.setdefault(split.optimizer_class, {})[number_of_part(split.local.param)] = cut
        return GatherPlan(cuts, comms)

    def check_ranks_of(self, ddp: DistributedDataParallel, ranks: ProcessGroup) -> None:
        """ValueError for a DDP model over these groups on other ranks."""
        if Communicator(ranks).has_same_ranks(ddp.process_group):
            return
        # DDP compares the name of a parameter of the root module with a leading dot
        root_names = {id(param): name for name, param in ddp.module.named_parameters(recurse=False)}
        names = [root_names[id(local.param)] for local in self.local_params if id(local.param) in root_names]
        by_name = f", of which it knows {names[0]!r} as {'.' + names[0]!r}: pass both names" if names else ""
        raise ValueError(
            f"Expected the DDP model over {self.describe()} on their ranks, {get_process_group_ranks(ranks)}, got a "
            f"DDP model on {get_process_group_ranks(ddp.process_group)}. Wrap it with process_group= of the groups, or "
            f"have DDP ignore these parameters{by_name}. [ZERO-803]"
        )


class Member:
    """Parameter groups that the same ranks hold, and their sharded optimizer. Building it is a collective of them.

    The optimizer has the hook of the DDP model; without a model it is standalone, in stage 1.

    Where a class needs whole parameters and ranks hold parts of them, these meet, see `ddp_zero.parallel.whole`;
    then the step waits for ``opt.step()``, in which all members step in one order on all ranks.

    Args:
        shared: the groups.
        group_ranks: for each data-parallel rank, the global ranks that hold these parameters together with it.
        optimizer_class: the class to shard.
        options: of `ParallelOptimizer`.
        axes: the ranks around this rank.
        model: this rank's part of the model.
        num_models: how many DDP models reduce members on this rank.

    Attributes:
        averages: of its gradients in ``opt.step()``; None if a DDP model reduces them.
        is_scheduled: whether a schedule of several stages runs the DDP model.
        gathering_classes: for each class that needs whole parameters, the subclass whose step gathers their parts.
        gather_comms: for each mesh dimension along which parts are gathered, the ranks along it.
        zero: the sharded optimizer.

    Raises:
        ValueError: for a DDP model on other ranks than the member's, or distributed tensors in flat storage; for
            different values of a parameter that no DDP model reduces.
        TypeError: for an optimizer that needs whole parameters where ranks hold parts that cannot meet.
        NotImplementedError: for parts of different sizes that would have to, with a partition that cuts parameters;
            for distributed tensors that would arrive after the step; for a static graph if averages are held back.
    """

    def __init__(
        self,
        shared: SharedGroups,
        group_ranks: Sequence[Sequence[int]],
        optimizer_class: Callable[..., Optimizer],
        options: Mapping[str, Any],
        axes: Axes,
        model: nn.Module,
        num_models: int,
    ) -> None:
        shared.check_distributed_tensors(options)
        # whole parameters, so that `sharded_state_dict` can name them
        options = {"partition": "parameters", **options, _SHARD_GROUP: shared.shard_group}
        gathers = shared.plan_gathers(optimizer_class, axes, options.get("max_byte_imbalance"))
        self.gather_comms = gathers.comms
        self.gathering_classes: dict[Any, Any] = {
            needs_wholes: gathering_class(needs_wholes, cuts) for needs_wholes, cuts in gathers.cuts.items()
        }
        self.shared, self.group_ranks = shared, group_ranks
        if options["partition"] != "parameters" and any(cut.owner is not None for cut in self.cuts.values()):
            raise NotImplementedError(
                f"Expected partition='parameters' for {shared.describe()}, whose ranks hold parts of different sizes "
                f"of matrices that are stepped whole, got {options['partition']!r}. Leave partition= out. [ZERO-816]"
            )
        if gathers.cuts:
            options["overlap"] = False
        self.zero = self._shard(optimizer_class, options, shared.ranks(axes.data_comm), model)
        self._describe_parameters(model)
        cuts = self.cuts
        if any(getattr(key, PART_NUMBER_KEY, None) in cuts for key in self.zero.optim.state):
            raise NotImplementedError(
                "Expected state of whole parameters to be created in the first step, got "
                f"{type(self.zero.optim).__name__}, which creates it for the parts when it is built. Use an optimizer "
                "that does not, or one that steps each element by itself. [ZERO-816]"
            )
        table = shard_of(self.zero).table
        everyone = shard_of(self.zero).ranks.everyone
        self.check_whole(table, shared.local_params)
        self.is_scheduled = shared.ddp is not None and axes.stages > 1
        self.averages: Averages | None = None
        if shared.ddp is None:
            engine_of(self.zero).gradients.assume_averaged = True
            check_same_values(everyone, table)
            self.averages = Averages(everyone, table, shared.local_params, axes.data_comm.world_size)
        elif axes.pipeline is not None:
            self._follow_schedule(shared.ddp, num_models)

    def _shard(
        self,
        optimizer_class: Callable[..., Optimizer],
        options: Mapping[str, Any],
        ranks: ProcessGroup,
        model: nn.Module,
    ) -> ZeroRedundancyOptimizer:
        """Build the sharded optimizer. A collective of its ranks."""
        shared, ddp = self.shared, self.shared.ddp
        optimizer_class = self.gathering_classes.get(optimizer_class, optimizer_class)
        groups = [self.with_gathering_class(group) for group in shared.groups]
        if ddp is not None:
            shared.check_ranks_of(ddp, ranks)
            zero = build_with_hook(ddp, optimizer_class, groups, **options)
            if shared.group is not None:
                take_part_with_zeros(ddp)
            return zero
        # without a DDP model: options of its hook and reductions have no effect
        arguments = {key: value for key, value in options.items() if key not in (*_OF_HOOKS, *_OF_REDUCTIONS)}
        syncs_in_forward = options.get("sync") == "forward"
        if syncs_in_forward:
            arguments.setdefault("parameters_as_bucket_view", True)
        zero = ZeroRedundancyOptimizer(groups, optimizer_class, process_group=ranks, **arguments)
        if syncs_in_forward:
            wait_before_forward(model, shard_of(zero))
        return zero

    def with_gathering_class(self, group: ParamGroup) -> ParamGroup:
        """The group, in which a class that needs whole parameters is replaced by its subclass that gathers them."""
        stepped_by = group.get(CLASS_KEY)
        gathering = self.gathering_classes.get(stepped_by)
        return group if gathering is None else {**group, CLASS_KEY: gathering}

    def check_can_add(self) -> None:
        """Check that a group can be added now, on this rank.

        Raises RuntimeError between ``opt.clip_grad_norm_()``, or another use of averages, and ``opt.step()``; while
        state is away; for edited groups.
        """
        if self.averages is not None and self.averages.are_done:
            raise RuntimeError(
                f"Gradients of {self.shared.describe()} have been averaged, which gradients of an added group would "
                "not be. Call opt.step() or opt.zero_grad() before opt.add_param_group(). [ZERO-309]"
            )
        shard_of(self.zero).check_ready()

    def follow_added(self, added: SharedGroups, comms: Mapping[str, Communicator], model: nn.Module) -> None:
        """After groups were added to the sharded optimizer: include them here. Never communicates.

        ``comms``: for each mesh dimension along which their parts are gathered, the ranks along it.
        """
        self.shared = self.shared.extended_by(added)
        self.gather_comms = {**self.gather_comms, **comms}
        self._describe_parameters(model)
        if self.averages is not None:
            params = self.shared.local_params
            self.averages = replace(self.averages, table=shard_of(self.zero).table, local_params=params)

    def _describe_parameters(self, model: nn.Module) -> None:
        """Tell the sharded optimizer its groups' positions, the parameters' names, and which are stepped whole."""
        shard = shard_of(self.zero)
        names = {id(param): name for name, param in model.named_parameters()}
        shard.local_step.options.positions, table = self.shared.positions, shard.table
        table.learn_names([(names[id(param)], param) for param in table.params if id(param) in names])
        table.wholes.update(
            {index: SteppedWhole(cut.shape, cut.is_host) for index, cut in self.cuts_by_index().items()}
        )

    def check_whole(self, table: ParameterTable, local_params: Sequence[LocalParameter]) -> None:
        """Check that no rank steps a mere part of a parameter that its class needs whole; TypeError if a rank does.

        ``local_params`` are the parameters of ``table``, which may already have groups that are about to be added.
        """
        cuts = self.cuts
        for index, local in enumerate(local_params):
            stepped_by = type(suboptimizer_for(self.zero.optim, self.zero.param_groups[table.groups[index]]))
            is_gathered = getattr(local.param, PART_NUMBER_KEY, None) in cuts
            if local.cut_over and not is_gathered and not is_elementwise_class(stepped_by):
                raise TypeError(
                    f"Expected an optimizer that steps each element by itself for {table.label(index)}, of which each "
                    f"rank along {sorted(local.cut_over)} holds a part, got {stepped_by.__name__}. Parts can meet "
                    "where one dimension of the mesh cuts a known dimension of the parameter, as in "
                    "sharded_over={'tensor': 0}. Else use an elementwise optimizer such as AdamW, or declare the "
                    "class by ddp_zero.elementwise(...) if it is elementwise. [ZERO-113]"
                )

    @property
    def cuts(self) -> dict[int, Cut]:
        """The parameters whose parts are gathered for their step, by `number_of_part`."""
        return {number: cut for gathering in self.gathering_classes.values() for number, cut in gathering.cuts.items()}

    def cuts_by_index(self) -> dict[int, Cut]:
        """The parameters whose parts are gathered for their step, by index."""
        numbers = [getattr(local.param, PART_NUMBER_KEY, None) for local in self.shared.local_params]
        cuts = self.cuts
        return {index: cuts[number] for index, number in enumerate(numbers) if number in cuts}

    def routes(self, state_dict: Mapping[str, Any]) -> StateRoutes:
        """The ranks to which states of whole parameters in a state dict by index go. A collective, if there are any."""
        shard = shard_of(self.zero)
        return StateRoutes(state_dict["state"], shard.table, self.cuts_by_index(), shard.binding.owned())

    def check_states_are_on_hosts(self, state_dict: Mapping[str, Any]) -> None:
        """ValueError for a state of a whole parameter, in a state dict by index, that another rank steps."""
        for index, cut in self.cuts_by_index().items():
            if not cut.is_host and state_dict["state"].get(index, {}).keys() - {MASTER_KEY}:
                comm = cut.comm
                raise ValueError(
                    f"Expected the state of {cut.label} on {comm.name(cut.host)}, which steps the whole, got state on "
                    f"{comm.name(comm.group_rank)}. Read it into sharded_state_dict(model, init_missing=True) of the "
                    "optimizer that loads it. [ZERO-817]"
                )

    def _follow_schedule(self, ddp: DistributedDataParallel, num_models: int) -> None:
        """Expect a pipeline schedule to run the DDP model; see `ddp_zero.core.ddp.forward_passes`.

        With one stage there may be a plain loop as well, whose forward passes prepare reductions. With several DDP
        models on this rank DDP itself cannot learn shapes (torch 2.13.0), so nothing is held back for its bits.
        NotImplementedError for a static graph if averages are held back: DDP averages its first pass anyway.
        """
        engine = engine_of(self.zero)
        sums_once = self.zero.stage == 2 or engine.decision.options.accumulate_in_fp32
        holds_back = self.is_scheduled and (sums_once or num_models > 1)
        if holds_back and has_static_graph(ddp):
            raise NotImplementedError(
                "stage=2, accumulate_in_fp32=True and several stages on a rank do not support a DDP model with "
                "static_graph=True around a pipeline stage: it averages the first backward pass, which a schedule runs "
                "under no_sync(). Wrap the stage without static_graph=True, or pass stage=1. [ZERO-812]"
            )
        engine.attachment.passes.follow_schedule(holds_back)

    def limits(self) -> list[tuple[str, float]]:
        """The largest norms of a step: of a group with its own limit, by position, and of all other groups."""
        found = engine_of(self.zero).decision.limits_by_key()
        return [
            ("all others" if key < 0 else f"group {self.shared.positions[key]}", limit)
            for key, limit in sorted(found.items())
        ]

    def decide_with(self, others: OtherMembers, errors: HeldErrors) -> None:
        """Take decisions with the rest of the model, and hold back errors until all members have begun."""
        engine = engine_of(self.zero)
        engine.decision.rest_of_model = others
        engine.runner.catching = errors.catching
        checks = engine.attachment.passes.checks
        if errors.raise_now not in checks:
            checks.append(errors.raise_now)

    def expose_gradients(self) -> None:
        """Show gradients of distributed tensors, before they are averaged, to code that looks at their parts."""
        if self.averages is not None and not self.averages.are_done:
            for param in self.shared.local_params:
                param.expose_gradient()

    def check_can_step(self, is_unscaled: bool = False) -> None:
        """Check, without communicating, that this rank can take a step that waits for ``opt.step()``.

        Raises RuntimeError for edited groups, offloaded state, a parameter that differs from its master, or gradients
        that a pipeline schedule has left to no one to average; NotImplementedError for a gradient that is not dense, or
        that a `GradScaler` could not unscale where it ``is_unscaled``.
        """
        attachment = engine_of(self.zero).attachment
        hook, passes = attachment.hook, attachment.passes
        # without a hook ranks compare their gradients in the step
        if self.is_scheduled and hook is not None and passes.has_seen and passes.last_is_local:
            raise RuntimeError(
                f"Expected averaged gradients of {self.shared.describe()}, got this rank's own: {PASSED_BY} [ZERO-302]"
            )
        params = self.shared.local_params
        hidden = next((param for param in params if is_unscaled and param.hides_gradient()), None)
        if hidden is not None:
            raise NotImplementedError(
                f"scaler.unscale_(opt) does not support {hidden.label}, a distributed tensor whose gradient is cut "
                "unlike itself. Leave unscale_ out and clip by max_grad_norm=, or redistribute the gradient. [ZERO-812]"
            )
        if hook is None or hook.machine.is_waiting:
            if hook is not None:
                hook.gradients.check_complete()
            shard = attachment.shard
            shard.table.check_groups(self.zero.param_groups)
            shard.table.check_gradients()
            shard.masters.follow_model()
            shard.check_ready()

    def drop_gradients(self, set_to_none: bool) -> None:
        """Follow ``opt.zero_grad()``, also for gradients of distributed tensors."""
        self.zero.zero_grad(set_to_none)
        for param in self.shared.local_params:
            param.drop_gradient(set_to_none)

    def counted_in_norms(self, mesh: DeviceMesh | None, dims: Sequence[str], pipeline_dim: str | None) -> list[bool]:
        """For each parameter, True if this rank counts it in norms: along each dimension the first replica does."""
        replicated = [dim for dim in dims if dim != pipeline_dim]
        is_first = {dim: mesh is None or mesh.get_local_rank(dim) == 0 for dim in replicated}
        return [all(dim in param.cut_over or is_first[dim] for dim in replicated) for param in self.shared.local_params]


def share_groups(
    groups: Sequence[ParamGroup],
    dims: Sequence[str],
    mesh: DeviceMesh | None,
    model: nn.Module,
    shard_group: ProcessGroup | None = None,
    first: int = 0,
) -> list[SharedGroups]:
    """The groups of each member: one per process group, and per DDP model if several reduce over its ranks.

    Groups without a process group come first; ``shard_group`` is theirs. ``dims`` name the mesh dimensions other than
    the data-parallel ones; along one of a single rank, parameters are whole. ``first`` is the position of the first of
    these groups among all.

    Raises:
        TypeError: for a ``process_group`` or ``sharded_over`` of the wrong type; see also `local_parameter`.
        ValueError: if several DDP models reduce a group's parameters, or groups of one process group have different
            ``shard_group``s.
    """
    reducing: dict[int, dict[str, DistributedDataParallel]] = {}  # by the parameter's identity, and by name
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            for _, param in in_buckets(module):
                reducing.setdefault(id(param), {})[name] = module
    reducing_ddp = [_reducer(group_given, position, reducing) for position, group_given in enumerate(groups, first)]
    by_ranks: dict[int | None, set[int | None]] = {}
    for group_given, ddp in zip(groups, reducing_ddp, strict=True):
        by_ranks.setdefault(_key(group_given), set()).add(None if ddp is None else id(ddp))
    members: dict[Any, SharedGroups] = {}
    dims_of_several = {dim for dim in dims if mesh is not None and mesh[dim].size() > 1}
    for position, (group_given, ddp) in enumerate(zip(groups, reducing_ddp, strict=True), first):
        group = group_given.get("process_group")
        declared = read_cuts(group_given.get("sharded_over", ()), position)
        if group is not None and not isinstance(group, ProcessGroup):
            check_group(group, f"process_group of parameter group {position}")
        effective_shard_group = group_given.get(_SHARD_GROUP, None if group is not None else shard_group)
        # one DDP model may leave some of its ranks' groups out: they are frozen, or averaged by the user
        has_several = len(by_ranks[_key(group_given)] - {None}) > 1
        key = (_key(group_given), ddp and id(ddp) if has_several else None)
        if key in members and effective_shard_group is not members[key].shard_group:
            raise ValueError(
                f"Expected the shard_group of parameter groups {members[key].positions} in parameter group {position}, "
                "which has the same process_group, got a different one. Pass shard_group= to shard_optimizer for "
                "groups without a process_group, and the same in all groups of one process_group. [ZERO-511]"
            )
        names = group_given.get("param_names", [None] * len(group_given["params"]))
        labels = [f"parameter {name or number} of parameter group {position}" for number, name in enumerate(names)]
        local_params = [
            local_parameter(param, declared, dims, label).restricted_to(dims_of_several)
            for param, label in zip(group_given["params"], labels, strict=True)
        ]
        params = [local.param for local in local_params]
        options = {key: value for key, value in group_given.items() if key not in _NOT_OPTIONS}
        named = [*zip(names, params, strict=True)] if "param_names" in group_given else params
        shared = SharedGroups(
            group, effective_shard_group, ddp, [position], [{**options, "params": named}], local_params
        )
        members[key] = members[key].extended_by(shared) if key in members else shared
    # groups without a process group first
    return sorted(members.values(), key=lambda shared: shared.group is not None)


def _key(given: ParamGroup) -> int | None:
    """A parameter group's process group, by identity."""
    group = given.get("process_group")
    return None if group is None else id(group)


def build_each(
    groups: Sequence[SharedGroups],
    group_ranks: Sequence[Sequence[Sequence[int]]],
    build: Callable[[SharedGroups, Sequence[Sequence[int]]], Member],
) -> list[Member]:
    """Build a member for each of the shared groups, also after another has failed. A collective of each one's ranks.

    ``group_ranks``: for each, the result of `gather_group_ranks`. The first error is raised at the end: ranks without
    an error would wait for this rank in the next member that they share.
    """
    members, errors = list[Member](), list[Exception]()
    for shared, ranks in zip(groups, group_ranks, strict=True):
        try:
            members.append(build(shared, ranks))
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0].with_traceback(errors[0].__traceback__)
    return members


def _reducer(
    group: ParamGroup, position: int, reducing: Mapping[int, Mapping[str, DistributedDataParallel]]
) -> DistributedDataParallel | None:
    """The DDP model that reduces a parameter group, or None; ValueError if there are several.

    ``reducing`` has the DDP models by name, for the identity of each parameter that they reduce.
    """
    models = {name: ddp for param in group["params"] for name, ddp in reducing.get(id(param), {}).items()}
    if len(models) > 1:
        raise ValueError(
            f"Expected one DDP model over parameter group {position}, got {len(models)}: {', '.join(map(repr, models))}"
            ". Give the parameters of each DDP model a parameter group of their own, with its process_group= if its "
            "ranks are not all data-parallel ones. [ZERO-202]"
        )
    return next(iter(models.values()), None)


# Membership


def gather_group_ranks(data_comm: Communicator, members: Sequence[SharedGroups]) -> list[list[list[int]]]:
    """For each member, and each data-parallel rank: the global ranks that hold the member's parameters with that rank.

    A collective; ValueError on all if two ranks contradict each other, see `check_group_ranks`.
    """
    local = [get_process_group_ranks(member.ranks(data_comm)) for member in members]
    gathered = [json.loads(text) for text in data_comm.all_gather_text(json.dumps(local))]
    ranks = get_process_group_ranks(data_comm.process_group)
    group_ranks = [[of_rank[number] for of_rank in gathered] for number in range(len(members))]
    for member, groups in zip(members, group_ranks, strict=True):
        check_group_ranks(ranks, groups, member.describe())
    return group_ranks


def check_group_ranks(ranks: Sequence[int], group_ranks: Sequence[Sequence[int]], what: str) -> None:
    """Check that ranks that share a parameter group agree on its ranks.

    ``ranks`` are the data-parallel ranks, and ``group_ranks`` has the ranks of each one's group; all are global.
    Raises ValueError naming two ranks that differ; the same on every rank.
    """
    group_of = dict(zip(ranks, map(tuple, group_ranks), strict=True))
    for rank, group in group_of.items():
        if rank not in group:
            raise ValueError(
                f"Expected process_group of {what} to contain the rank that passes it, got {list(group)} on global "
                f"rank {rank}. Every rank passes the group of the ranks that hold the same parameters as itself. "
                "[ZERO-801]"
            )
        for peer in group:
            if group_of.get(peer, group) != group:
                raise ValueError(
                    f"Expected the ranks of process_group of {what} to agree on who they are, got {list(group)} on "
                    f"global rank {rank} and {list(group_of[peer])} on global rank {peer}. Build the groups from one "
                    "table of ranks, as torch.distributed.device_mesh.init_device_mesh does. [ZERO-801]"
                )


def count_in_norms(ranks: Sequence[int], group_ranks: Sequence[Sequence[int]]) -> list[bool]:
    """For each rank, True if its share of a parameter group counts in norms, so that each parameter counts once.

    The first rank of each group counts. If that rank is not in ``ranks``, as when pipeline stages share a parameter,
    the group counts on that rank's side.
    """
    return [rank == group[0] for rank, group in zip(ranks, group_ranks, strict=True)]


def describe(members: Sequence[Member], data_comm: Communicator, rows: Sequence[str]) -> str:
    """The text of `ParallelOptimizer.explain`; ``rows`` are every rank's `row_of_this_rank`."""
    lines = [f"ParallelOptimizer of {len(members)} members, {data_comm.world_size} data-parallel ranks"]
    for number, member in enumerate(members):
        distinct_groups = list(dict.fromkeys(map(tuple, member.group_ranks)))
        shared = " | ".join(" ".join(map(str, ranks)) for ranks in distinct_groups)
        mine = " ".join(map(str, member.group_ranks[data_comm.group_rank]))
        averaged = "in opt.step()" if member.shared.ddp is None else "by DDP"
        lines += [
            f"member {number}: parameter groups {member.shared.positions}, {_sizes(member)} here",
            f"  shared by global ranks {shared}; this rank's are {mine}; averaged {averaged}",
        ]
    row_texts = [text for _, text in sorted(json.loads(row) for row in rows)]
    parts = ["\n".join(lines), "\n".join(["every rank", *row_texts]), *(member.zero.explain() for member in members)]
    return "\n\n".join(parts)


def row_of_this_rank(members: Sequence[Member], data_comm: Communicator, mesh: DeviceMesh | None) -> str:
    """This rank's line of `describe`, for all other ranks: its number, and lines of text, as JSON."""
    rank = data_comm.global_rank(data_comm.group_rank)
    place = ""
    if mesh is not None:
        place = f" ({', '.join(f'{dim} {mesh.get_local_rank(dim)}' for dim in mesh.mesh_dim_names or ())})"
    lines = [f"  global rank {rank}{place}"]
    for member in members:
        shared = " ".join(map(str, member.group_ranks[data_comm.group_rank]))
        lines.append(f"    groups {member.shared.positions}: {_sizes(member)}, shared by global ranks {shared}")
    return json.dumps([rank, "\n".join(lines)])


def _sizes(member: Member) -> str:
    params = shard_of(member.zero).table.params
    return f"{len(params)} parameters, {sum(param.nbytes for param in params):,} bytes"
