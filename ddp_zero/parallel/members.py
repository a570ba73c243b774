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
from typing import Any

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
from ddp_zero.parallel.placement import Held, holding_of, read_cuts
from ddp_zero.parallel.whole import PART_KEY, Cut, StateRoutes, mark, meeting_class, places_for
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
    """Parameter groups that may be modified."""
    named = [(name, param) for name, param in model.named_parameters()]
    if params is None:
        return named
    if callable(params):
        return group_by_options(named, params)
    check_params(params)
    return [dict(one) if isinstance(one, dict) else one for one in params]


def nonfinite(options: Mapping[str, Any], groups: Sequence[ParamGroup]) -> str:
    """The option of that name, or its default: the same in all members, whether or not their steps wait."""
    given: str | None = options.get("nonfinite")
    if given is not None:
        return given
    deciding = [options.get("max_grad_norm"), options.get("loss_scale"), *(one.get("max_grad_norm") for one in groups)]
    return "step" if all(one is None for one in deciding) else "skip"


@contextmanager
def agreements(comms: Sequence[Communicator], doing: str, facts: Mapping[str, object]) -> Iterator[list[Agreement]]:
    """A block that succeeds on all of these ranks, with the same facts, or raises on all."""
    with ExitStack() as stack:
        # each group agrees twice: an error found in the last agreement must still reach groups that had agreed before
        told = comms if len(comms) > 1 else ()
        every = [stack.enter_context(Agreement(comm, doing)) for comm in [*reversed(told), *reversed(comms)]]
        found = every[len(told) :][::-1]
        for agreement in found:
            for name, fact in facts.items():
                agreement.declare(name, fact)
        yield found


@dataclass(frozen=True)
class Axes:
    """The ranks around this rank, along each axis of the job."""

    everyone: Communicator  # the data-parallel ranks
    mesh: DeviceMesh | None  # of all ranks
    data: Sequence[str]  # names of its data-parallel dimensions
    others: Sequence[str]  # names of its other dimensions
    pipeline: str | None  # the axis among these along which ranks hold different parameters
    along: Mapping[str, Communicator]  # by dimension among the others that has several ranks, the ranks along it

    @classmethod
    def of(
        cls, model: Any, group: ProcessGroup | None, mesh: DeviceMesh | None, data: Sequence[str], pipeline: str | None
    ) -> "Axes":
        """The ranks around this rank; a collective of the mesh as `data_group`.

        Raises ValueError for dimensions that the mesh does not have, or without data-parallel dimensions.
        """
        others = other_dims(mesh, data, pipeline)
        device = next((param.device for param in model.parameters()), None)
        everyone = Communicator(data_group(model, group, mesh, data), device=device)
        several = [dim for dim in others if mesh is not None and mesh[dim].size() > 1]
        groups = {} if mesh is None else {dim: mesh.get_group(dim) for dim in several}
        along = {dim: Communicator(one, device=device) for dim, one in groups.items()}
        return cls(everyone, mesh, data, others, pipeline, along)

    @property
    def comms(self) -> list[Communicator]:
        """The data-parallel ranks, then those along the other dimensions of several ranks."""
        return [self.everyone, *self.along.values()]

    @property
    def stages(self) -> int:
        return 1 if self.mesh is None or self.pipeline is None else self.mesh[self.pipeline].size()

    @property
    def kept(self) -> list[str]:
        """Dimensions along which plain parameters differ or are shared by data-parallel ranks."""
        return [*self.data, *([] if self.pipeline is None else [self.pipeline])]


# Members


@dataclass(frozen=True)
class StatedWhole:
    """A parameter that is stepped whole, as a rank with a part of it states it."""

    held: Held  # the part
    at: int  # the dimension that is cut
    kind: type[Optimizer]
    options: Mapping[str, Any]  # of its group

    def facts(self) -> list[object]:
        """All but the size of the part, which must be the same on all ranks that hold parts."""
        return [self.kind.__qualname__, str(self.held.param.dtype), self.held.shape_with(self.at, -1)]


@dataclass(frozen=True)
class SharedGroups:
    """Parameter groups that the same ranks hold, and that one DDP model reduces, if any does."""

    group: ProcessGroup | None  # their ranks; None for all data-parallel ranks
    shard_group: ProcessGroup | None  # those of them that share one copy of the state; None: all
    # the DDP model that reduces their gradients; None if they are averaged in ``opt.step()``
    ddp: DistributedDataParallel | None
    positions: Sequence[int]  # of the groups among all groups
    groups: Sequence[ParamGroup]  # without ``process_group`` and ``sharded_over``
    held: Sequence[Held]  # this rank's view of each of their parameters, in the order of the groups

    def joined(self, other: "SharedGroups") -> "SharedGroups":
        """These groups, then others of the same ranks."""
        return replace(
            self,
            ddp=self.ddp or other.ddp,
            positions=[*self.positions, *other.positions],
            groups=[*self.groups, *other.groups],
            held=[*self.held, *other.held],
        )

    def describe(self) -> str:
        """The groups, for messages."""
        shown = ", ".join(map(str, self.positions))
        return f"parameter group{'s' if len(self.positions) > 1 else ''} {shown}"

    def ranks(self, everyone: Communicator) -> ProcessGroup:
        return everyone.process_group if self.group is None else self.group

    def check_can_arrive(self, options: Mapping[str, Any]) -> None:
        """Check that parameters are where the model uses them, and when.

        Raises ValueError for distributed tensors in flat storage, NotImplementedError for those that would arrive after
        the step.
        """
        distributed = next((one.label for one in self.held if one.source is not None), None)
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

    def find_wholes(self, optimizer_class: Callable[..., Optimizer]) -> dict[str, list[StatedWhole]]:
        """Its parameters of which ranks along one dimension hold parts, and whose class needs wholes; by dimension."""
        of_each = [options for options in self.groups for _ in options["params"]]
        found: dict[str, list[StatedWhole]] = {}
        for one, options in zip(self.held, of_each, strict=True):
            kind = options.get(CLASS_KEY, optimizer_class)
            cut = one.single_cut()
            if cut is not None and isinstance(kind, type) and not is_elementwise_class(kind):
                found.setdefault(cut[0], []).append(StatedWhole(one, cut[1], kind, options))
        return found

    def find_cuts(
        self,
        optimizer_class: Callable[..., Optimizer],
        axes: Axes,
        max_byte_imbalance: float | None,
        beside: "Member | None" = None,
    ) -> tuple[dict[type[Optimizer], dict[int, Cut]], dict[str, Communicator]]:
        """The parameters whose parts have to meet, by class and number, and the ranks among which, by dimension.

        A collective if there are any, or were before. NotImplementedError if the groups are added to the member
        ``beside`` and parts are the first ones of different sizes in that.
        """
        wholes = self.find_wholes(optimizer_class)
        mesh = axes.mesh
        shared = self if beside is None else beside.shared.joined(self)
        known, before = ({}, {}) if beside is None else (beside.over, beside.cuts)
        states_owners = any(cut.owner is not None for cut in before.values())
        comms, sizes, are_even = dict[str, Communicator](), dict[str, list[tuple[int, ...]]](), True
        for dim in sorted({*wholes, *known}):
            assert mesh is not None, "it has the dimension"
            found = wholes.get(dim, [])
            over = mesh.get_group(dim)
            if dim in known:
                comms[dim] = known[dim]
            else:
                comms[dim] = Communicator(over, next_generation(over), device=found[0].held.param.device)
            comm = comms[dim]
            # of all its parameters: sizes decide the owners, and the parts of a matrix can meet only if one
            # data-parallel rank owns all of them. A rank that owns none would not come, and be waited for
            here = [list(one.param.shape) for one in shared.held], [one.held.param.shape[one.at] for one in found]
            every = [json.loads(text) for text in comm.all_gather_text(json.dumps(here))]
            are_even &= all(shapes == every[0][0] for shapes, _ in every)
            sizes[dim] = [*zip(*(of_rank for _, of_rank in every), strict=True)]
        # shapes may differ along one dimension where all ranks along the other have the same
        are_even = all([flag for comm in comms.values() for (flag,) in comm.all_gather_ints([are_even])])
        if known and not are_even and not states_owners:
            raise NotImplementedError(
                f"Expected parts of one size on all ranks in {self.describe()}, which is added to matrices that are "
                "stepped whole in parts of one size, got different sizes. Give the constructor a group with such "
                "parts, or build a new ParallelOptimizer and load the state_dict() of this one. [ZERO-812]"
            )
        imbalance = MAX_BYTE_IMBALANCE if max_byte_imbalance is None else max_byte_imbalance
        of_class: dict[type[Optimizer], dict[int, Cut]] = {}
        for dim, found in sorted(wholes.items()):
            comm = comms[dim]
            data_ranks = (self.shard_group or shared.ranks(axes.everyone)).size()
            shapes = [one.held.shape_with(one.at, sum(parts)) for one, parts in zip(found, sizes[dim], strict=True)]
            stated = [(one.kind, shape, one.options) for one, shape in zip(found, shapes, strict=True)]
            nbytes = [math.prod(shape) * one.held.param.itemsize for one, shape in zip(found, shapes, strict=True)]
            known_sizes = None if are_even and not states_owners else nbytes
            places = places_for(stated, known_sizes, data_ranks, comm.world_size, imbalance)
            for one, shape, parts, (owner, host) in zip(found, shapes, sizes[dim], places, strict=True):
                cut = Cut(comm, one.at, host, shape, one.held.label, parts, owner)
                of_class.setdefault(one.kind, {})[mark(one.held.param)] = cut
        return of_class, comms

    def check_ranks_of(self, ddp: DistributedDataParallel, ranks: ProcessGroup) -> None:
        """ValueError for a DDP model over these groups on other ranks."""
        if Communicator(ranks).has_same_ranks(ddp.process_group):
            return
        # DDP compares the name of a parameter of the root module with a leading dot
        own = {id(param): name for name, param in ddp.module.named_parameters(recurse=False)}
        names = [own[id(one.param)] for one in self.held if id(one.param) in own]
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
        stated: by data-parallel rank, the global ranks of its group.
        optimizer_class: the class to shard.
        options: of `ParallelOptimizer`.
        axes: the ranks around this rank.
        model: this rank's part of the model.
        num_models: how many DDP models reduce members on this rank.

    Attributes:
        averages: of its gradients in ``opt.step()``; None if a DDP model reduces them.
        is_scheduled: whether a schedule of several stages runs the DDP model.
        meeting: for classes of parameters whose parts meet, the class in whose steps they do.
        over: by mesh dimension, the ranks along it among which parts meet.
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
        stated: Sequence[Sequence[int]],
        optimizer_class: Callable[..., Optimizer],
        options: Mapping[str, Any],
        axes: Axes,
        model: nn.Module,
        num_models: int,
    ) -> None:
        shared.check_can_arrive(options)
        # whole parameters, so that `sharded_state_dict` can name them
        options = {"partition": "parameters", **options, _SHARD_GROUP: shared.shard_group}
        found, self.over = shared.find_cuts(optimizer_class, axes, options.get("max_byte_imbalance"))
        # classes that need whole parameters are replaced by classes in whose steps parts meet
        self.meeting: dict[Any, Any] = {kind: meeting_class(kind, cuts) for kind, cuts in found.items()}
        self.shared, self.stated = shared, stated
        if options["partition"] != "parameters" and any(cut.owner is not None for cut in self.cuts.values()):
            raise NotImplementedError(
                f"Expected partition='parameters' for {shared.describe()}, whose ranks hold parts of different sizes "
                f"of matrices that are stepped whole, got {options['partition']!r}. Leave partition= out. [ZERO-816]"
            )
        if found:
            options["overlap"] = False
        self.zero = self._shard(optimizer_class, options, shared.ranks(axes.everyone), model)
        self._tell_table(model)
        cuts = self.cuts
        if any(getattr(one, PART_KEY, None) in cuts for one in self.zero.optim.state):
            raise NotImplementedError(
                "Expected state of whole parameters to be created in the first step, got "
                f"{type(self.zero.optim).__name__}, which creates it for the parts when it is built. Use an optimizer "
                "that does not, or one that steps each element by itself. [ZERO-816]"
            )
        table = shard_of(self.zero).table
        everyone = shard_of(self.zero).ranks.everyone
        self.check_whole(table, shared.held)
        self.is_scheduled = shared.ddp is not None and axes.stages > 1
        self.averages: Averages | None = None
        if shared.ddp is None:
            engine_of(self.zero).gradients.assume_averaged = True
            check_same_values(everyone, table)
            self.averages = Averages(everyone, table, shared.held, axes.everyone.world_size)
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
        optimizer_class = self.meeting.get(optimizer_class, optimizer_class)
        groups = [self.with_meeting(group) for group in shared.groups]
        if ddp is not None:
            shared.check_ranks_of(ddp, ranks)
            zero = build_with_hook(ddp, optimizer_class, groups, **options)
            if shared.group is not None:
                take_part_with_zeros(ddp)
            return zero
        outlasts = options.get("sync") == "forward"
        own = {key: value for key, value in options.items() if key not in (*_OF_HOOKS, *_OF_REDUCTIONS)}
        own = {**({"parameters_as_bucket_view": True} if outlasts else {}), **own}
        zero = ZeroRedundancyOptimizer(groups, optimizer_class, process_group=ranks, **own)
        if outlasts:
            wait_before_forward(model, shard_of(zero))
        return zero

    def with_meeting(self, group: ParamGroup) -> ParamGroup:
        """The group, with the class in whose steps parts meet in place of its own class."""
        kind = group.get(CLASS_KEY)
        return group if kind not in self.meeting else {**group, CLASS_KEY: self.meeting[kind]}

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

    def take(self, added: SharedGroups, over: Mapping[str, Communicator], model: nn.Module) -> None:
        """Have groups that the sharded optimizer has already, whose parts meet ``over`` these. Never communicates."""
        self.shared = self.shared.joined(added)
        self.over = {**self.over, **over}
        self._tell_table(model)
        if self.averages is not None:
            self.averages = replace(self.averages, table=shard_of(self.zero).table, held=self.shared.held)

    def _tell_table(self, model: nn.Module) -> None:
        """Tell the optimizer its places among all groups, names of parameters in the model, and the wholes of parts."""
        shard = shard_of(self.zero)
        names = {id(param): name for name, param in model.named_parameters()}
        shard.local_step.options.positions, table = self.shared.positions, shard.table
        table.learn_names([(names[id(param)], param) for param in table.params if id(param) in names])
        table.wholes.update(
            {index: SteppedWhole(cut.shape, cut.is_here) for index, cut in self.cuts_by_index().items()}
        )

    def check_whole(self, table: ParameterTable, all_held: Sequence[Held]) -> None:
        """Check that no rank steps a mere part of a parameter that its class needs whole; TypeError if a rank does."""
        cuts = self.cuts
        for index, one in enumerate(all_held):
            kind = type(suboptimizer_for(self.zero.optim, self.zero.param_groups[table.groups[index]]))
            if one.cut_over and getattr(one.param, PART_KEY, None) not in cuts and not is_elementwise_class(kind):
                raise TypeError(
                    f"Expected an optimizer that steps each element by itself for {table.label(index)}, of which each "
                    f"rank along {sorted(one.cut_over)} holds a part, got {kind.__name__}. Parts can meet where "
                    "one dimension of the mesh cuts a known dimension of the parameter, as in sharded_over={'tensor': "
                    "0}. Else use an elementwise optimizer such as AdamW, or declare the class by "
                    "ddp_zero.elementwise(...) if it is elementwise. [ZERO-113]"
                )

    @property
    def cuts(self) -> dict[int, Cut]:
        """The parameters whose parts meet, by number."""
        return {number: cut for kind in self.meeting.values() for number, cut in kind.cuts.items()}

    def cuts_by_index(self) -> dict[int, Cut]:
        """The parameters whose parts meet, by index."""
        numbers = [getattr(one.param, PART_KEY, None) for one in self.shared.held]
        cuts = self.cuts
        return {index: cuts[number] for index, number in enumerate(numbers) if number in cuts}

    def routes(self, state_dict: Mapping[str, Any]) -> StateRoutes:
        """The ranks to which states of whole parameters in a state dict by index go. A collective, if there are any."""
        shard = shard_of(self.zero)
        return StateRoutes(state_dict["state"], shard.table, self.cuts_by_index(), shard.binding.owned())

    def check_states_are_here(self, state_dict: Mapping[str, Any]) -> None:
        """ValueError for a state of a whole parameter, in a state dict by index, that another rank steps."""
        for index, cut in self.cuts_by_index().items():
            if not cut.is_here and state_dict["state"].get(index, {}).keys() - {MASTER_KEY}:
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

    def lend_gradients(self) -> None:
        """Show gradients of distributed tensors, before they are averaged, to code that looks at their parts."""
        if self.averages is not None and not self.averages.are_done:
            for one in self.shared.held:
                one.lend_gradient()

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
        hidden = next((one for one in self.shared.held if is_unscaled and one.hides_gradient()), None)
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
        for one in self.shared.held:
            one.drop_gradient(set_to_none)

    def counts_here(self, mesh: DeviceMesh | None, dims: Sequence[str], pipeline_dim: str | None) -> list[bool]:
        """For each parameter, True if this rank counts it in norms; one of its replicas does."""
        replicated = [dim for dim in dims if dim != pipeline_dim]
        at_first = {dim: mesh is None or mesh.get_local_rank(dim) == 0 for dim in replicated}
        return [all(dim in one.cut_over or at_first[dim] for dim in replicated) for one in self.shared.held]


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
        TypeError: for a ``process_group`` or ``sharded_over`` of the wrong type; see also `holding_of`.
        ValueError: if several DDP models reduce a group's parameters, or groups of one process group have different
            ``shard_group``s.
    """
    reducing: dict[int, dict[str, DistributedDataParallel]] = {}  # by the parameter's identity, and by name
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            for _, param in in_buckets(module):
                reducing.setdefault(id(param), {})[name] = module
    chosen = [_reducer(given, position, reducing) for position, given in enumerate(groups, first)]
    by_ranks: dict[int | None, set[int | None]] = {}
    for given, ddp in zip(groups, chosen, strict=True):
        by_ranks.setdefault(_key(given), set()).add(None if ddp is None else id(ddp))
    found: dict[Any, SharedGroups] = {}
    shared = {dim for dim in dims if mesh is not None and mesh[dim].size() > 1}
    for position, (given, ddp) in enumerate(zip(groups, chosen, strict=True), first):
        group = given.get("process_group")
        declared = read_cuts(given.get("sharded_over", ()), position)
        if group is not None and not isinstance(group, ProcessGroup):
            check_group(group, f"process_group of parameter group {position}")
        own = given.get(_SHARD_GROUP, None if group is not None else shard_group)
        # one DDP model may leave some of its ranks' groups out: they are frozen, or averaged by the user
        has_several = len(by_ranks[_key(given)] - {None}) > 1
        key = (_key(given), ddp and id(ddp) if has_several else None)
        if key in found and own is not found[key].shard_group:
            raise ValueError(
                f"Expected the shard_group of parameter groups {found[key].positions} in parameter group {position}, "
                "which has the same process_group, got a different one. Pass shard_group= to shard_optimizer for "
                "groups without a process_group, and the same in all groups of one process_group. [ZERO-511]"
            )
        names = given.get("param_names", [None] * len(given["params"]))
        held = [
            holding_of(param, declared, dims, f"parameter {name or number} of parameter group {position}").along(shared)
            for number, (name, param) in enumerate(zip(names, given["params"], strict=True))
        ]
        params = [one.param for one in held]
        options = {key: value for key, value in given.items() if key not in _NOT_OPTIONS}
        named = [*zip(names, params, strict=True)] if "param_names" in given else params
        one = SharedGroups(group, own, ddp, [position], [{**options, "params": named}], held)
        found[key] = found[key].joined(one) if key in found else one
    # groups without a process group first
    return sorted(found.values(), key=lambda one: one.group is not None)


def _key(given: ParamGroup) -> int | None:
    """A parameter group's process group, by identity."""
    group = given.get("process_group")
    return None if group is None else id(group)


def build_each(
    groups: Sequence[SharedGroups],
    stated: Sequence[Sequence[Sequence[int]]],
    build: Callable[[SharedGroups, Sequence[Sequence[int]]], Member],
) -> list[Member]:
    """Build a member of each of these, a collective of its ranks, whether or not another fails.

    The first error is raised at the end: ranks without an error would wait for this rank in a member that they share.
    """
    members, errors = list[Member](), list[Exception]()
    for one, ranks in zip(groups, stated, strict=True):
        try:
            members.append(build(one, ranks))
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0].with_traceback(errors[0].__traceback__)
    return members


def _reducer(
    given: ParamGroup, position: int, reducing: Mapping[int, Mapping[str, DistributedDataParallel]]
) -> DistributedDataParallel | None:
    """The DDP model that reduces a parameter group; ValueError if there are several."""
    found = {name: ddp for param in given["params"] for name, ddp in reducing.get(id(param), {}).items()}
    if len(found) > 1:
        raise ValueError(
            f"Expected one DDP model over parameter group {position}, got {len(found)}: {', '.join(map(repr, found))}. "
            "Give the parameters of each DDP model a parameter group of their own, with its process_group= if its "
            "ranks are not all data-parallel ones. [ZERO-202]"
        )
    return next(iter(found.values()), None)


# Membership


def state_groups(everyone: Communicator, members: Sequence[SharedGroups]) -> list[list[list[int]]]:
    """For each member, the global ranks of the group of every data-parallel rank.

    A collective; ValueError on all if two differ.
    """
    own = [get_process_group_ranks(member.ranks(everyone)) for member in members]
    every = [json.loads(text) for text in everyone.all_gather_text(json.dumps(own))]
    ranks = get_process_group_ranks(everyone.process_group)
    stated = [[of_rank[number] for of_rank in every] for number in range(len(members))]
    for member, groups in zip(members, stated, strict=True):
        check_groups(ranks, groups, member.describe())
    return stated


def check_groups(ranks: Sequence[int], stated: Sequence[Sequence[int]], what: str) -> None:
    """Check that ranks that share a parameter group agree on its ranks.

    ``ranks`` train one copy of the dense part, in process group order; ``stated`` are their groups, as global ranks.
    Raises ValueError naming two ranks that differ; the same on every rank.
    """
    said = dict(zip(ranks, map(tuple, stated), strict=True))
    for rank, group in said.items():
        if rank not in group:
            raise ValueError(
                f"Expected process_group of {what} to contain the rank that passes it, got {list(group)} on global "
                f"rank {rank}. Every rank passes the group of the ranks that hold the same parameters as itself. "
                "[ZERO-801]"
            )
        for peer in group:
            if said.get(peer, group) != group:
                raise ValueError(
                    f"Expected the ranks of process_group of {what} to agree on who they are, got {list(group)} on "
                    f"global rank {rank} and {list(said[peer])} on global rank {peer}. Build the groups from one table "
                    "of ranks, as torch.distributed.device_mesh.init_device_mesh does. [ZERO-801]"
                )


def count_in_norms(ranks: Sequence[int], stated: Sequence[Sequence[int]]) -> list[bool]:
    """For each rank, True if its share of a parameter group counts in norms, so that each parameter counts once.

    The first rank of each group counts. If that rank is not in ``ranks``, as when pipeline stages share a parameter,
    the group counts on that rank's side.
    """
    return [rank == group[0] for rank, group in zip(ranks, stated, strict=True)]


def describe(members: Sequence[Member], everyone: Communicator, rows: Sequence[str]) -> str:
    """The text of `ParallelOptimizer.explain`; ``rows`` are every rank's `own_row`."""
    lines = [f"ParallelOptimizer of {len(members)} members, {everyone.world_size} data-parallel ranks"]
    for number, member in enumerate(members):
        distinct = list(dict.fromkeys(map(tuple, member.stated)))
        shared = " | ".join(" ".join(map(str, ranks)) for ranks in distinct)
        mine = " ".join(map(str, member.stated[everyone.group_rank]))
        averaged = "in opt.step()" if member.shared.ddp is None else "by DDP"
        lines += [
            f"member {number}: parameter groups {member.shared.positions}, {_sizes(member)} here",
            f"  shared by global ranks {shared}; this rank's are {mine}; averaged {averaged}",
        ]
    every = [text for _, text in sorted(json.loads(row) for row in rows)]
    parts = ["\n".join(lines), "\n".join(["every rank", *every]), *(member.zero.explain() for member in members)]
    return "\n\n".join(parts)


def own_row(members: Sequence[Member], everyone: Communicator, mesh: DeviceMesh | None) -> str:
    """This rank's line of `describe`, for all other ranks: its number, and lines of text, as JSON."""
    rank = everyone.global_rank(everyone.group_rank)
    place = ""
    if mesh is not None:
        place = f" ({', '.join(f'{dim} {mesh.get_local_rank(dim)}' for dim in mesh.mesh_dim_names or ())})"
    lines = [f"  global rank {rank}{place}"]
    for member in members:
        shared = " ".join(map(str, member.stated[everyone.group_rank]))
        lines.append(f"    groups {member.shared.positions}: {_sizes(member)}, shared by global ranks {shared}")
    return json.dumps([rank, "\n".join(lines)])


def _sizes(member: Member) -> str:
    params = shard_of(member.zero).table.params
    return f"{len(params)} parameters, {sum(param.nbytes for param in params):,} bytes"
