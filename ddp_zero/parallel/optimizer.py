"""`ParallelOptimizer`: sharded optimizers for parameters shared by different ranks, with one joint decision."""

import copy
import json
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ddp_zero.core.comm import all_gather_text_across
from ddp_zero.core.local import Grouping, ParamGroup, class_name
from ddp_zero.core.step import GradientStats, StepRecord
from ddp_zero.optimizer import ZeroRedundancyOptimizer, engine_of, shard_of, states_of
from ddp_zero.options import Offload
from ddp_zero.parallel.additions import Recipe, check_belongs, choose_member, extend, gather_choices, parse_group
from ddp_zero.parallel.alike import Comparison, arguments_of, declare_groups, declare_values
from ddp_zero.parallel.grad_scaler import ScalerReport
from ddp_zero.parallel.join import ParallelJoin, PeersUnderJoin, connected_sets, refuse, ties_of
from ddp_zero.parallel.joint_decision import GlobalErrorCheck, HeldErrors, JointDecision, NormLevel, OtherMembers
from ddp_zero.parallel.members import (
    Axes,
    Member,
    SharedGroups,
    agree_across,
    build_each,
    check_arguments,
    copy_groups,
    count_in_norms,
    describe,
    gather_group_ranks,
    row_of_this_rank,
    share_groups,
)
from ddp_zero.parallel.names import GlobalNames
from ddp_zero.parallel.placement import CutSizes, Holdings, measure_parts, merge, pack, split, unpack

_STEP = "opt.step()"


class ParallelOptimizer(Optimizer, Joinable):
    """Any optimizer, sharded over ranks that hold the same parameters, for models of which ranks hold different parts.

    Parameter groups name the ranks that hold their parameters as ``process_group``; groups without it are held by all
    data-parallel ranks. The groups of one process group become a *member*: a `ZeroRedundancyOptimizer` over its ranks.
    If a DDP model in ``model`` reduces the gradients of a member, it steps as after `ddp_zero.shard_optimizer`, inside
    backward, also in stage 2. If none does, as for experts that DDP was told to ignore, its gradients are averaged in
    `step`, and it steps there, in stage 1.

    Norms, the check for non-finite gradients, skipping and the loss scale concern the whole model: all members, and the
    ranks along the other dimensions of ``mesh``. Every parameter counts once.

    Every data-parallel rank constructs it with groups in the same order. With a mesh, all ranks of the mesh do.

    Args:
        model: this rank's part of the model: a DDP model, a module that holds several, or none.
        optimizer_class: the class to shard, such as `torch.optim.AdamW`.
        params: parameters, named or not, or parameter groups, or a function as for `ddp_zero.shard_optimizer`; None:
            all parameters. Besides the options of the class a group may have

            - ``process_group``: the ranks that hold its parameters, including this rank;
            - ``shard_group``: beside it, those of them that share one copy of the state;
            - ``sharded_over``: names of mesh dimensions along which each rank holds a part of every parameter of the
              group, of any sizes; checkpoints also need the dimension of the parameters that is cut, as in
              ``{"tensor": 0}``. Distributed tensors (`torch.distributed.tensor.DTensor`) state theirs.
        data_parallel_group: ranks with separate inputs, over which dense parameters are sharded; None for the ranks of
            ``mesh`` along ``data_parallel_dim``, of the DDP model, or all.
        mesh: a device mesh with named dimensions over all ranks that hold parts of the model.
        data_parallel_dim: name of its dimension along which ranks hold the same parameters, or the names of several,
            such as ``("replicate", "shard")``.
        pipeline_dim: name of its dimension along which ranks hold different parameters (stages), if any. Along other
            dimensions a parameter is assumed to be replicated unless declared cut.
        global_names: names in the whole model, for checkpoints, of values with another name on this rank: by name, or
            dotted prefix, as in ``{"experts.0": f"experts.{number}"}``, or a function of a name. Names are those in the
            model without ``module.`` of DDP. None: names are unchanged. Ranks that hold different values under one name
            cannot save and load: that raises, and names them.
        shard_group: ranks among the data-parallel ranks that share one copy of the state, such as the group of
            ``"shard"``; see `ZeroRedundancyOptimizer`. For groups without a process group. None: all of them.
        **options: options of `ddp_zero.shard_optimizer`, and options for ``optimizer_class``. ``nonfinite=None`` skips
            if gradients are clipped or scaled, else steps.

    Attributes:
        members: the sharded optimizers; the member of groups without a process group comes first.
        class_name: the classes that step any parameter on any rank, as checkpoints record them.

    Raises:
        ValueError: if ranks have different views of the groups, or different values of a parameter that no DDP model
            reduces, naming ranks; as `ZeroRedundancyOptimizer` does.
        NotImplementedError: for a DDP model with a static graph around a pipeline stage in stage 2.
        TypeError: for arguments of the wrong type, or an optimizer that needs whole parameters where ranks hold parts.
        RuntimeError: if construction failed on another rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: Callable[..., Optimizer],
        params: ParamsT | Grouping | None = None,
        *,
        data_parallel_group: ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        data_parallel_dim: str | Sequence[str] | None = None,
        pipeline_dim: str | None = None,
        global_names: GlobalNames | None = None,
        shard_group: ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self.members: list[ZeroRedundancyOptimizer] = []
        self._members: list[Member] = []
        self._report: ScalerReport | None = None
        self._join: weakref.ref[ParallelJoin] | None = None  # held by Join
        self._leaves_out_joined = False  # of averages, under Join
        self._is_shadowing = False  # a step of ranks that still train, under Join
        Joinable.__init__(self)
        data_dims = [data_parallel_dim] if isinstance(data_parallel_dim, str) else list(data_parallel_dim or ())
        self._axes = Axes.of(model, data_parallel_group, mesh, data_dims, pipeline_dim)
        self._comms = self._axes.comms
        self._stages = self._axes.stages
        building = "building ParallelOptimizer"
        with agree_across(self._comms, building, arguments_of(optimizer_class, options)) as agreements:
            check_arguments(model, optimizer_class, options)
            self._own_groups = Optimizer(copy_groups(params, model), {}).param_groups
            Optimizer.__setstate__(self, {"defaults": {}})
            self._recipe = Recipe(optimizer_class, options, shard_group, global_names, self._own_groups)
            shared = share_groups(self._own_groups, self._axes.other_dims, mesh, model, shard_group)
            shape = [(groups.positions, groups.ddp is not None, groups.shard_group is not None) for groups in shared]
            declare_groups(self._axes, agreements, self._own_groups, shared, optimizer_class, model)
            agreements[0].declare("parameter groups with a process group, a DDP model, and a shard group", shape)
        self._model = weakref.ref(model)
        self._parts = measure_parts(
            [local for member in shared for local in member.local_params], mesh, self._axes.comm_of_dim
        )
        with agree_across(self._comms, building, {}):
            self._holdings = self._holdings_of(shared, self._parts)
            group_ranks = gather_group_ranks(self._axes.data_comm, shared)
        with agree_across(self._comms, building, {}) as agreements:
            members = self._build(shared, group_ranks, model)
            declare_values(self._axes, agreements, shared)
        self._held_errors = HeldErrors()
        self._last_step: StepRecord | None = None
        self._adopt(members)

    def _holdings_of(self, shared: Sequence[SharedGroups], parts: Mapping[Tensor, Sequence[CutSizes]]) -> Holdings:
        axes = self._axes
        params_of_ranks = [(groups.ranks(axes.data_comm), groups.local_params) for groups in shared]
        return Holdings(
            params_of_ranks, axes.data_comm.process_group, axes.mesh, axes.home_dims, self._recipe.global_names, parts
        )

    def _build(
        self, shared: Sequence[SharedGroups], group_ranks: Sequence[Sequence[Sequence[int]]], model: nn.Module
    ) -> list[Member]:
        """Build the members of these groups. A collective of the data-parallel ranks."""
        recipe = self._recipe
        num_models = sum(groups.ddp is not None for groups in [*(member.shared for member in self._members), *shared])
        return build_each(
            shared,
            group_ranks,
            lambda groups, ranks: Member(
                groups, ranks, recipe.optimizer_class, recipe.options, self._axes, model, num_models
            ),
        )

    def _adopt(self, members: list[Member]) -> None:
        """Step these members together from now on. A collective of the mesh."""
        axes, data_comm = self._axes, self._axes.data_comm
        is_split = len(members) > 1 or members[0].shared.group is not None
        ranks = get_process_group_ranks(data_comm.process_group)
        levels = (
            [NormLevel(data_comm, [count_in_norms(ranks, member.group_ranks) for member in members])]
            if is_split
            else []
        )
        self._errors = GlobalErrorCheck(self._comms if is_split or axes.comm_of_dim else [])
        positions = [member.shared.positions for member in members]
        self._joint = JointDecision([*levels, *map(NormLevel, axes.comm_of_dim.values())], self._errors, positions)
        if is_split or axes.comm_of_dim:
            for member in members:
                counted = member.counted_in_norms(axes.mesh, axes.other_dims, axes.pipeline)
                member.decide_with(OtherMembers(self._joint, counted), self._held_errors)
        self._members = members
        self.members = [member.zero for member in members]
        place_of_position = {
            position: (number, group)
            for number, member in enumerate(members)
            for group, position in enumerate(member.shared.positions)
        }
        self._places = [place_of_position[position] for position in sorted(place_of_position)]
        self._stepped_for = {local.given: local.param for member in members for local in member.shared.local_params}
        self._rows = all_gather_text_across(self._comms, row_of_this_rank(members, data_comm, axes.mesh))
        has_wholes = any(member.cuts for member in members)
        self._has_wholes = "yes" in all_gather_text_across(self._comms, "yes" if has_wholes else "no")
        class_names = json.dumps([name for member in self.members for name in class_name(member.optim).split("+")])
        all_class_names = all_gather_text_across(self._comms, class_names)
        self.class_name = "+".join(dict.fromkeys(name for text in all_class_names for name in json.loads(text)))
        self.defaults = self.members[0].defaults
        self._alike = Comparison(axes, members)

    # Groups

    @property
    def param_groups(self) -> list[ParamGroup]:  # type: ignore[override]
        """All groups, in the order given; options set here reach the members at the next step."""
        for member in self._members:
            member.expose_gradients()  # `GradScaler.unscale_` looks for them here
        return [self.members[member].param_groups[group] for member, group in self._places]

    def common_groups(self) -> list[int]:
        """The places of groups without a process group: all ranks of the mesh have them, some without parameters."""
        return [place for place, (member, _) in enumerate(self._places) if self._members[member].shared.group is None]

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group of parameters between two steps; existing parameters keep their owners. A collective of the mesh.

        A group without a process group is held by all data-parallel ranks. If the DDP model reduces its parameters,
        they step as the others do. Else, as for parameters that were frozen when DDP wrapped the model, their gradients
        are averaged in `step`.

        Args:
            param_group: parameters and options, as for the constructor. Every rank of the mesh passes a group; one that
                has none of its parameters, such as another pipeline stage, passes ``{"params": []}`` with the options.

        Raises:
            ValueError: if the parameters are already in a group, if DDP reduces only some of those that train, if ranks
                disagree; or for the first ``max_grad_norm`` of any group without ``nonfinite=``.
            RuntimeError: if it failed on another rank, between ``clip_grad_norm_()`` and ``step()``, or under Join.
            NotImplementedError: for the first matrices of a class that are stepped whole, among those that DDP reduces.
            TypeError: as the constructor. After an error the optimizer is unchanged on all ranks.
        """
        if self._join_config.enable:
            raise RuntimeError(
                "add_param_group() inside Join is not supported: ranks that have joined would not take part. Add the "
                "group outside the Join context. [ZERO-310]"
            )
        self.finish_sync()
        doing, axes, recipe = "add_param_group", self._axes, self._recipe
        earlier = [member.shared for member in self._members]
        with agree_across(self._comms, doing, {}) as agreements:
            for member in self._members:
                member.check_can_add()
            model = self._model()
            first = len(self._own_groups)
            group = parse_group(self._own_groups, param_group, model)
            recipe.check_added(group)
            if model is None:
                raise RuntimeError(
                    "ParallelOptimizer does not support add_param_group() without the model that it was built with, "
                    "which was deleted. Keep a reference to it. [ZERO-812]"
                )
            [added] = share_groups([group], axes.other_dims, axes.mesh, model, recipe.shard_group, first)
            check_belongs(earlier, added)
            shape = (added.group is not None, added.shard_group is not None)
            agreements[0].declare("process group and shard group of the group", shape)
            declare_groups(axes, agreements, [group], [added], recipe.optimizer_class, model, first)
        choices = gather_choices(self._members, added, recipe.optimizer_class, axes.data_comm)
        parts = {**self._parts, **measure_parts(added.local_params, axes.mesh, axes.comm_of_dim)}
        with agree_across(self._comms, doing, {}):
            into = choose_member(choices, self._members, axes.data_comm)
            holdings = self._holdings_of([*earlier, added], parts)
            group_ranks = gather_group_ranks(axes.data_comm, [added]) if into is None else []
        members: list[Member] = self._members
        commit: Callable[[], None] | None = None
        with ExitStack() as undoing:
            with agree_across(self._comms, doing, {}) as agreements:
                declare_values(axes, agreements, [added])
                if into is None:
                    [built] = self._build([added], group_ranks, model)
                    # the scale that earlier members have reached
                    reached = engine_of(self.members[0]).decision.loss_scale
                    engine_of(built.zero).decision.loss_scale = copy.deepcopy(reached)
                    members = [*members, built]
                else:
                    commit = extend(into, added, recipe, axes, model, undoing)
            undoing.pop_all()
        if commit is not None:
            commit()
        self._parts, self._holdings = parts, holdings
        self._own_groups.append(group)
        self._adopt(members)

    # A step

    _step_supports_amp_scaling = True  # GradScaler then calls step() whatever this rank has found: all ranks decide

    @property
    def found_inf(self) -> ScalerReport | None:
        """The report of a `torch.amp.GradScaler` while it steps this optimizer; None otherwise."""
        return self._report

    @found_inf.setter
    def found_inf(self, found: Tensor) -> None:
        self._report = ScalerReport(self, found)

    @found_inf.deleter
    def found_inf(self) -> None:
        self._report = None

    @_disable_dynamo  # as in `ZeroRedundancyOptimizer.step`
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average gradients that no DDP model reduces, decide over the whole model, and step. A collective.

        Args:
            closure: evaluated once, with gradients enabled, before gradients are averaged.

        Returns:
            The closure's result.

        Raises:
            NotImplementedError: after ``scaler.unscale_(opt)``, for a distributed gradient laid out unlike its
                parameter.
            RuntimeError: as `ZeroRedundancyOptimizer.step`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._take_step()
        except BaseException:
            if self._report is not None:  # the scaler does not take back what it has left
                vars(self).pop("grad_scale", None)
                self._report = None
            raise
        return loss

    def _take_step(self) -> None:
        """Average gradients, decide, and step all members; raise errors on all ranks at the end. A collective."""
        join = self._current_join()
        if join is not None and self._join_config.enable and not self._is_shadowing:
            join.before_step()
        self._average(_STEP)
        if self._stages > 1 and self._last_step is None:
            # a schedule may have left gradients unaveraged: in its step a member would see it when others have stepped
            with self._agreement("averaging gradients"):
                for member in self.members:
                    engine_of(member).gradients.check_averaged()
        error: Exception | None = None
        try:
            with ExitStack() as shown:
                if torch.is_inference_mode_enabled():  # as in a step of one optimizer
                    shown.enter_context(torch.inference_mode(mode=False))
                    shown.enter_context(torch.no_grad())
                if self._report is not None:
                    averaged = [member.zero for member in self._members if member.averages is not None]
                    self._report.look_again(param.grad for zero in averaged for param in shard_of(zero).table.params)
                    shown.enter_context(self._report.shown_to(self.members, vars(self).get("grad_scale")))
                if self._is_shadowing:
                    self._joint.run([engine_of(member).step_joined_in_phases() for member in self.members])
                else:
                    self._joint.run([_stepping(member) for member in self.members])
        except Exception as raised:
            error = raised
        finally:
            self._last_step = self.members[0].last_step  # if all raise, the first has recorded why
            self._forget()
        # last, and on every rank: a rank whose members all stepped learns here that another rank's did not
        self._errors.conclude(error or self._held_errors.take())
        if self._report is not None and self._last_step is not None:
            self._report.write_back(self._last_step.stepped)

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients of all parameters; see `ZeroRedundancyOptimizer.zero_grad`.

        Args:
            set_to_none: True to drop them.
        """
        for member in self._members:
            member.drop_gradients(set_to_none)
        self._forget()

    def reset(self) -> None:
        """Drop the iteration, after an exception; see `ZeroRedundancyOptimizer.reset`."""
        for member in self.members:
            member.reset()
        self._held_errors.take()
        self._forget()

    def detach(self) -> None:
        """Leave the DDP models, if any; see `ZeroRedundancyOptimizer.detach`."""
        for member in self.members:
            member.detach()

    def finish_sync(self) -> None:
        """Wait for parameters that ``sync="forward"`` left in flight."""
        for member in self.members:
            member.finish_sync()

    def offload_state(self, to: Offload | str = "cpu") -> None:
        """Move state and masters of all members away; see `ZeroRedundancyOptimizer.offload_state`.

        Args:
            to: see `ZeroRedundancyOptimizer.offload_state`.

        Raises:
            RuntimeError: as `ZeroRedundancyOptimizer.offload_state`; members that were moved before are moved back.
        """
        with ExitStack() as moved:
            for member in self.members:
                member.offload_state(to)
                moved.callback(member.reload_state)
            moved.pop_all()

    def reload_state(self) -> None:
        """Move state and masters of all members back; see `ZeroRedundancyOptimizer.reload_state`."""
        for member in self.members:
            member.reload_state()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Take no step in backward passes inside this context; see `ZeroRedundancyOptimizer.accumulate`."""
        with ExitStack() as stack:
            for member in self.members:
                stack.enter_context(member.accumulate())
            yield

    @_disable_dynamo
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        parameters: Tensor | Iterable[Tensor] | None = None,
    ) -> Tensor:
        """Clip the norm of the whole model's gradients, between backward and step. A collective.

        Args:
            max_norm: see `ZeroRedundancyOptimizer.clip_grad_norm_`.
            norm_type: see `ZeroRedundancyOptimizer.clip_grad_norm_`.
            error_if_nonfinite: see `ZeroRedundancyOptimizer.clip_grad_norm_`.
            parameters: this rank's parameters to clip, possibly none; None for all.

        Returns:
            The norm before clipping.

        Raises:
            RuntimeError: as `ZeroRedundancyOptimizer.clip_grad_norm_`, or if it failed on another rank.
        """
        self._average("opt.clip_grad_norm_()", max_norm, norm_type, error_if_nonfinite)
        wanted = zip(self.members, self._by_member(parameters), strict=True)
        clips = [
            engine_of(member).gradients.clipping(max_norm, norm_type, error_if_nonfinite, params)
            for member, params in wanted
        ]
        try:
            total: Tensor = self._joint.run(clips)[0]
        except Exception as error:
            # levels that this rank has not reached yet would wait in their part of the decision
            self._errors.tell(error)
            raise
        return total

    @_disable_dynamo
    def clip_grad_value_(self, clip_value: float, parameters: Tensor | Iterable[Tensor] | None = None) -> None:
        """Clamp every element of gradients; see `ZeroRedundancyOptimizer.clip_grad_value_`. A collective.

        Args:
            clip_value: the largest absolute value.
            parameters: this rank's parameters to clip; None for all.
        """
        self._average("opt.clip_grad_value_()", clip_value)
        for member, params in zip(self.members, self._by_member(parameters), strict=True):
            member.clip_grad_value_(clip_value, params)

    @_disable_dynamo
    def owned_gradients(self) -> Mapping[Tensor, Tensor]:
        """Gradients that this rank steps, by the given parameter; see `ZeroRedundancyOptimizer.owned_gradients`.

        The gradient of a distributed tensor is this rank's shard. A collective.
        """
        self._average("opt.owned_gradients()")
        param_of = {stepped: param for param, stepped in self._stepped_for.items()}
        owned = [member.owned_gradients().items() for member in self.members]
        return MappingProxyType({param_of[param]: grad for items in owned for param, grad in items})

    @_disable_dynamo
    def full_grad(self, param: Tensor) -> Tensor | None:
        """The averaged gradient of a parameter, whole as this rank holds it; see `ZeroRedundancyOptimizer.full_grad`.

        A collective of the ranks that hold it.

        Args:
            param: the parameter as given to the constructor.

        Raises:
            ValueError: if the parameter is not in this optimizer.
        """
        param = self._stepped_for.get(param, param)
        for member in self._members:
            if param in shard_of(member.zero).table.index_of:
                if member.averages is not None:
                    member.averages.take()
                return member.zero.full_grad(param)
        raise ValueError(
            f"The parameter of shape {list(param.shape)} is not a parameter of this optimizer. Pass an object from "
            "opt.param_groups. [ZERO-119]"
        )

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale; see `ZeroRedundancyOptimizer.scale`.

        Args:
            loss: the loss.
        """
        return self.members[0].scale(loss)

    @property
    def loss_scale(self) -> float | None:
        """The current factor of `scale`; None without ``loss_scale=``. The same on every rank."""
        return self.members[0].loss_scale

    @property
    def last_step(self) -> StepRecord | None:
        """The first member's record of the last step; None before the first."""
        return self._last_step

    def _by_member(self, parameters: Tensor | Iterable[Tensor] | None) -> list[list[Tensor] | None]:
        """Each member's parameters among these; None for all."""
        chosen = [parameters] if isinstance(parameters, Tensor) else parameters
        if chosen is None:
            return [None] * len(self.members)
        stepped = [self._stepped_for[param] for param in chosen]
        tables = [shard_of(member).table for member in self.members]
        return [[param for param in stepped if param in table.index_of] for table in tables]

    def _average(self, call: str, *arguments: Any) -> None:
        """Average gradients that no DDP model reduces, and check that all ranks can step. A collective.

        All ranks have called the method ``call`` with the same numbers.
        """
        error: Exception | None = None
        decision: list[object] = [call]
        try:
            decision += map(float, arguments)
            if call == _STEP:
                decision.append(
                    {"max_grad_norm": sorted({limit for member in self._members for limit in member.limits()})}
                )
            if self._report is not None and self._join_config.enable:
                raise RuntimeError(
                    "Join does not support torch.amp.GradScaler: a rank that has joined does not know its scale. Use "
                    "loss_scale= of the optimizer instead, or bfloat16, which needs none. [ZERO-310]"
                )
            for member in self._members:
                if not self._is_shadowing or member.shared.ddp is None:
                    member.check_can_step(is_unscaled=self._report is not None and vars(self).get("grad_scale") is None)
        except Exception as raised:
            error = raised
        join = self._current_join() if self._join_config.enable and self._leaves_out_joined else None
        left_out = 0 if join is None else join.peers.num_joined
        # every member takes part, also after an error: its peers are in this collective
        for member in self._members:
            try:
                if member.averages is not None:
                    member.averages.take(error, left_out)
            except Exception as raised:
                error = error or raised
        scale = 0.0 if self._report is None else self._report.scale
        self._alike.note_options(is_silent=self._is_shadowing)
        self._errors.check(error, "averaging gradients", scale, decision, self._alike)

    def _forget(self) -> None:
        for member in self._members:
            if member.averages is not None:
                member.averages.forget()

    # State

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[Any, Any]:
        """State of this rank's owned parameters, of all members; see `ZeroRedundancyOptimizer.state`.

        States that are set for parameters of other ranks, also for parts of which another rank steps the whole, are
        theirs to set, and left out here.
        """
        return states_of(self.members[0]).state_of(
            lambda: [shard_of(member) for member in self.members],
            lambda param: self._stepped_for.get(param, param),
        )

    @state.setter
    def state(self, state: MutableMapping[Any, Any]) -> None:
        states_of(self.members[0]).replace_state(self.state, state)

    def state_dict(self) -> dict[str, Any]:
        """The unsharded optimizer's state dict over this rank's parameters, in the order of the given groups.

        Any rank may call it alone between two steps, see `ZeroRedundancyOptimizer.state_dict`. Ranks with different
        experts, parts or stages have different state dicts.
        """
        return merge([member.state_dict() for member in self.members], self._places)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of `state_dict` from a rank with the same parameters. A collective.

        Where parts of a parameter are stepped whole on one of the ranks that hold them, one rank's state dict has the
        state, and it is sent to the rank that steps the whole now. This is a collective of the whole mesh then.

        Args:
            state_dict: the state dict.

        Raises:
            ValueError: if it does not fit, or several ranks have a state of one whole parameter; RuntimeError if it
                failed on another rank that holds the same parameters.
        """
        parts = self._route(state_dict) if self._has_wholes else split(state_dict, self._places)
        for member, part in zip(self.members, parts, strict=True):
            member.load_state_dict(part)

    def _route(self, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
        """Each member's state dict, with states of whole parameters on the ranks that step them. A collective."""
        parts: list[dict[str, Any]] = []
        with self._agreement("loading a state dict"):
            parts = split(state_dict, self._places)
        # before anything is judged: an error here would leave other ranks alone in the collectives of later members
        routes = [member.routes(part) for member, part in zip(self._members, parts, strict=True)]
        with self._agreement("loading a state dict"):
            for route in routes:
                route.check()
        return [{**part, "state": route.carry_out()} for part, route in zip(parts, routes, strict=True)]

    @contextmanager
    def _agreement(self, doing: str) -> Iterator[None]:
        """A block that fails on all ranks of the mesh if it does on any. A collective."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self._errors.check(error, doing)

    def sharded_state_dict(self, model: nn.Module, *, init_missing: bool = False) -> dict[str, Any]:
        """This rank's part of the state, for direct use of `torch.distributed.checkpoint`. Never communicates.

        Ranks have different keys, ``state.<name>.<key>`` and ``param_groups.<name>.<option>`` with names in the whole
        model, as torch's ``flatten_optimizer_state_dict``. States of cut parameters are distributed tensors with the
        shape of the whole, so any other mesh can load them; states of parameters that are stepped whole are plain
        tensors on the rank that steps them. `ddp_zero.checkpoint` does all of it.

        Args:
            model: as given to the constructor.
            init_missing: see `ZeroRedundancyOptimizer.sharded_state_dict`.

        Raises:
            ValueError: for a parameter whose place in the whole model is not known; see ``sharded_over``.
        """
        return pack(self.members, self._holdings, model, init_missing)

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any], model: nn.Module) -> None:
        """Load a state dict of `sharded_state_dict`, for this rank's parameters. Never communicates.

        Args:
            state_dict: as read by `torch.distributed.checkpoint.load`; it is copied.
            model: as given to the constructor; load its parameters before.

        Raises:
            ValueError: if it does not fit, naming the parameter.
        """
        parts = unpack(state_dict, self.members, self._holdings, model)
        for member, part in zip(self._members, parts, strict=True):
            member.check_states_are_on_hosts(part)
        for zero, part in zip(self.members, parts, strict=True):
            engine_of(zero).attachment.check_before_step("opt.load_sharded_state_dict()")
            states_of(zero).load_by_index(zero, part)

    # Information

    @property
    def process_groups(self) -> list[ProcessGroup]:
        """The data-parallel ranks, and this rank's group along each other mesh dimension of several ranks."""
        return [comm.process_group for comm in self._comms]

    def explain(self) -> str:
        """The ranks that share each group, here and on every other rank, and the shards of each member. Stays local."""
        return describe(self._members, self._comms[0], self._rows)

    def __repr__(self) -> str:
        return "ParallelOptimizer of " + "\n".join(map(repr, self.members))

    # Join

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook that `torch.distributed.algorithms.Join` runs on ranks that have joined. A collective of the mesh.

        Ranks at one place of the data-parallel dimension leave together, and so do ranks that exchange tokens with
        other experts: the first ones that hold each, the second ones, and so on. In each iteration they compare
        themselves, before the forward pass of the model or the run of a pipeline schedule; if a rank has left alone,
        all ranks of the mesh raise.

        With pipeline stages Join lists the optimizer alone, also if stages are DDP models: it shadows their
        reductions. Their `PipelineStage` is built before.

        Args:
            **kwargs: arguments that `Join` passes to all hooks. ``divide_by_initial_world_size`` (True): averages that
                no DDP model takes count ranks that have joined, as DDP's do; False: only those that still train.

        Raises:
            NotImplementedError: for a second DDP model outside a pipeline, shard groups, experts held by different
                numbers of ranks, stages without a schedule of torch, DDP models of stages that send buffers or have a
                static graph, and ``divide_by_initial_world_size=False`` where DDP has a communication hook.
            RuntimeError: if it failed on another rank.
        """
        earlier = self._current_join()
        if earlier is not None:
            earlier.stop()
        model = self._model()
        needs_number_joined = not kwargs.get("divide_by_initial_world_size", True)
        is_piped = self._stages > 1
        local_ties: list[list[int]] = []
        with self._agreement("Join"):
            refuse(self._members, model, is_piped, kwargs)
            local_ties = ties_of(self._members, get_process_group_ranks(self._comms[0].process_group))
        ties = [tie for text in all_gather_text_across(self._comms, json.dumps(local_ties)) for tie in json.loads(text)]
        peers = PeersUnderJoin(self._comms, connected_sets(ties), needs_number_joined)
        join = ParallelJoin(self, model, self._members, peers, self._shadow_step, is_piped)
        self._join = weakref.ref(join)
        self._leaves_out_joined = needs_number_joined
        return join

    def _current_join(self) -> ParallelJoin | None:
        return None if self._join is None else self._join()

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self.members[0].join_device

    @property
    def join_process_group(self) -> Any:
        """The data-parallel ranks, which may run out of inputs at different times."""
        join = self._current_join()
        if join is not None:
            join.check_alone()
            if join.is_piped:
                return self._comms[0].process_group
        ddp = self._members[0].shared.ddp
        return self._comms[0].process_group if ddp is None else ddp.process_group

    @property
    def _join_config(self) -> Any:
        return self._joining

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        if config.enable and config.is_first_joinable and self._stages == 1 and self._members[0].shared.ddp is not None:
            raise ValueError(
                "Expected Join to list the DDP model before its ParallelOptimizer, got the optimizer first. Use "
                "Join([ddp, opt]). [ZERO-312]"
            )
        self._joining = config
        for member in self.members:  # which ask whether ranks may have joined, and leave it to this one to tell
            member._join_config = config._replace(is_first_joinable=False)

    def _shadow_step(self) -> None:
        """On a rank that has joined: one step of the ranks that still train."""
        self._is_shadowing = True
        try:
            self._drop_averaged()
            self._take_step()
        finally:
            self._is_shadowing = False
            self._drop_averaged()

    def _drop_averaged(self) -> None:
        """A rank that has joined has no gradients of its own; averages of others are in their place during a step."""
        for member in self._members:
            if member.averages is not None:
                member.drop_gradients(set_to_none=True)
                member.averages.forget()

    # Refused

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise NotImplementedError(
            "A ParallelOptimizer cannot be copied: its members share process groups. Build a new ParallelOptimizer, "
            "and load state_dict(). [ZERO-120]"
        )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "A ParallelOptimizer cannot be pickled: a rank holds only its shard. Save state_dict() instead. [ZERO-120]"
        )


def _stepping(member: ZeroRedundancyOptimizer) -> Generator[GradientStats, GradientStats, None]:
    """A member's part of a step, without torch's hooks around ``step()``: those of all optimizers see the user's."""
    engine = engine_of(member)
    phases = engine.step_in_phases(None, {})
    with engine.label:
        stats = next(phases, None)
    if stats is not None:
        joint_stats = yield stats
        with engine.label, suppress(StopIteration):
            phases.send(joint_stats)
