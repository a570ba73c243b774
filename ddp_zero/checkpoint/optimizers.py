"""A checkpoint's view of optimizers: this library's, torch's ZeroRedundancyOptimizer, and unsharded ones.

Each gives the states that this rank saves and loads those that it keeps; parameters are indices in the order of groups.
The last functions find the ranks that save and load together, and have them agree on these views.
"""

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_zero.core.backward.reducer import reduced_parameters
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.groups import Peers, check_not_alone
from ddp_zero.core.comm.ranks import Agreement
from ddp_zero.core.local.inner import class_name, group_options, rehearse_load
from ddp_zero.core.local.live_model import LiveModel, PartModel, by_group, group_of, options_as_text
from ddp_zero.core.local.parameters import ParameterTable, sample_values
from ddp_zero.core.local.tree import check_can_travel
from ddp_zero.core.plan.global_layout import Layout, Statement
from ddp_zero.core.plan.partition import GroupRank, partition_greedy
from ddp_zero.core.state.state_dicts import check_state, own_part
from ddp_zero.optimizer import ZeroRedundancyOptimizer, engine_of, shard_of, states_of
from ddp_zero.parallel.optimizer import ParallelOptimizer
from ddp_zero.parallel.placement import split

Birth = tuple[int, int]
State = dict[Any, Any]
StateDict = dict[str, Any]


class OptimizerState:
    """View of an optimizer with all state on every rank: each rank saves a share and loads everything.

    Attributes:
        optimizer: the optimizer itself.
        inner: the optimizer that holds this rank's state.
        table: its parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.inner = optimizer
        self.table = ParameterTable(optimizer.param_groups)

    @property
    def class_name(self) -> str:
        """The class that steps, or several, the same on every rank."""
        return class_name(self.inner)

    def check(self) -> None:
        """Check that the state can be saved now.

        Raises:
            TypeError: for a class with its own ``state_dict()``, which cannot be split by parameter.
            RuntimeError: between a backward pass and its step.
        """
        wraps = isinstance(getattr(self.inner, "optimizer", None), Optimizer)
        if wraps or type(self.inner).state_dict is not Optimizer.state_dict:
            remedy = "Give its .optimizer, and the rest of its state" if wraps else "Save its state_dict()"
            raise TypeError(
                "Expected an optimizer with the state_dict() of torch.optim.Optimizer, got "
                f"{type(self.inner).__name__}, which has state of its own. {remedy} as `extra`. [ZERO-631]"
            )

    def owned(self, rank: GroupRank, world_size: int) -> list[int]:
        """Parameters whose state this rank saves; exactly one rank saves each."""
        owners = partition_greedy([param.nbytes for param in self.table.params], world_size)
        return [index for index, owner in enumerate(owners) if owner == rank]

    def kept(self) -> list[int]:
        """Parameters whose state this rank loads, or a part of it."""
        return list(range(len(self.table)))

    def state(self) -> dict[int, State]:
        """States of this rank's parameters, or parts of them, in the unsharded order, masters included."""
        return {self.table.index_of[key]: value for key, value in self.inner.state.items() if isinstance(key, Tensor)}

    def saved_state(self) -> dict[int, State]:
        """Whole states of at least `owned`, in the unsharded order, masters included. A collective."""
        return self.state()

    def shares(self, rank: GroupRank, world_size: int) -> list[tuple[int, slice | None]]:
        """As `owned`, with the elements that this rank owns of each cut parameter; exactly one rank saves each element.

        Their states are in `state`: no collective is needed to save them.
        """
        return [(index, None) for index in self.owned(rank, world_size)]

    def own_part(self, index: int, state: State) -> State:
        """This rank's part of a parameter's whole state, in the memory of states."""
        return state

    def device(self) -> torch.device:
        """The device to which states are read."""
        return self.table.accelerator()

    def births(self) -> Mapping[int, Birth]:
        """Order of creation of each of these states, comparable between ranks."""
        return {index: (0, place) for place, index in enumerate(self.state())}

    def scale(self) -> dict[str, float] | None:
        """State of a dynamic loss scale, or None; a GradScaler is saved by the user."""
        return None

    def master(self, index: int) -> Tensor | None:
        """The live fp32 master of a whole parameter, if this rank has one."""
        return None

    def wants_master(self, index: int) -> bool:
        """True if the owner of a parameter has a master of it."""
        return False

    def check_fits(self, state_dict: StateDict) -> None:
        """Check that a state dict of meta tensors could be loaded; ValueError names the parameter or the group."""
        for index, state in state_dict["state"].items():
            if not isinstance(index, str):  # a str key belongs to no parameter
                check_state(state, self.table, index, type(self.inner))
        if self.inner is self.optimizer:
            rehearse_load(self.inner, state_dict)

    def drop(self) -> None:
        """Drop this rank's states, before new ones are read."""
        self.inner.state.clear()

    def load(self, state_dict: StateDict, order: Sequence[int]) -> None:
        """Load a state dict with the states of `kept`, by index, whose tensors become the optimizer's.

        ``order``: parameters with a state on any rank, in the order of the unsharded optimizer.
        """
        self.optimizer.load_state_dict(state_dict)


def state_of(optimizer: Optimizer) -> OptimizerState:
    """The view of an optimizer for its class."""
    optimizer = unwrapped(optimizer)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return ShardedState(optimizer)
    if isinstance(optimizer, ParallelOptimizer):
        return ParallelState(optimizer)
    torchs = sys.modules.get("torch.distributed.optim")  # importing it warns; its optimizers exist only if imported
    if torchs is not None and isinstance(optimizer, torchs.ZeroRedundancyOptimizer):
        return TorchZeroState(optimizer)
    return OptimizerState(optimizer)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside wrappers, such as Accelerate's, that hold it as ``.optimizer`` and have no own state."""
    while isinstance(inner := _held_by(optimizer), Optimizer):
        own = getattr(optimizer, "__dict__", {})
        is_sharded = isinstance(optimizer, ZeroRedundancyOptimizer) and not isinstance(inner, ZeroRedundancyOptimizer)
        if is_sharded or ("state" in own and own["state"] is not inner.state):
            break
        optimizer = inner
    return optimizer


def _held_by(wrapper: Any) -> Any:
    """The value of ``.optimizer``, unless the wrapper only forwards an attribute of the wrapped object."""
    has_own = "optimizer" in getattr(wrapper, "__dict__", {}) or hasattr(type(wrapper), "optimizer")
    return wrapper.optimizer if has_own else None


def process_group_of(optimizer: Any) -> ProcessGroup | None:
    """The group over which an optimizer, this library's or torch's, is sharded; None if unsharded."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return shard_of(optimizer).everyone.process_group
    return getattr(optimizer, "join_process_group", None)


class TorchZeroState(OptimizerState):
    """`torch.distributed.optim.ZeroRedundancyOptimizer`: every rank has the state of its own parameters."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.inner = optimizer.optim

    def owned(self, rank: GroupRank, world_size: int) -> list[int]:
        """The parameters that the local optimizer steps."""
        return self.kept()

    def kept(self) -> list[int]:
        """The parameters that the local optimizer steps."""
        return sorted(self.table.index_of[param] for group in self.inner.param_groups for param in group["params"])

    def births(self) -> Mapping[int, Birth]:
        """The parameter's index."""
        return {index: (0, index) for index in self.state()}


class ShardedState(OptimizerState):
    """This library's optimizer: each rank has the states of its owned parameters."""

    optimizer: ZeroRedundancyOptimizer

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self.optimizer = optimizer
        self.inner = optimizer.optim
        self._shard = shard_of(optimizer)
        self._states = states_of(optimizer)
        self.table = self._shard.table

    def check(self) -> None:
        """Check that no step is in progress or due, and that parts of states can be sent."""
        engine_of(self.optimizer).check_between_steps()
        states = self.state()
        for index in self._shard.binding.owned_parts():
            check_can_travel(states.get(index), self.table.label(index))

    def owned(self, rank: GroupRank, world_size: int) -> list[int]:
        """This rank's share of the parameters whose first element it and its replicas own."""
        ranks = self._shard.ranks
        return self._states.saved_indices()[ranks.replica :: ranks.num_replicas]

    def shares(self, rank: GroupRank, world_size: int) -> list[tuple[int, slice | None]]:
        """This rank's share of the holdings that it and its replicas have in common."""
        ranks = self._shard.ranks
        return self._shard.binding.holdings()[ranks.replica :: ranks.num_replicas]

    def kept(self) -> list[int]:
        """Parameters with elements that this rank owns."""
        return self._shard.binding.owned()

    def state(self) -> dict[int, State]:
        """The states of owned parameters, or parts of them."""
        return self._states.owned_state()

    def saved_state(self) -> dict[int, State]:
        """States of `owned` and of replicas' shares; parts of cut parameters come from their owners."""
        return self._states.saved_state()

    def own_part(self, index: int, state: State) -> State:
        """The state of this rank's part, if the parameter is cut."""
        stepped = self._shard.stepped
        part = stepped.part(index)
        mine = state if part is None else own_part(state, self.table, index, part)
        stepped.residence.keep([mine])
        return mine

    def device(self) -> torch.device:
        """The parameters' device, or the host if they are stepped there."""
        accelerator, stepped = self.table.accelerator(), self._shard.stepped
        return torch.device("cpu") if stepped.residence.is_away(accelerator) else accelerator

    def births(self) -> Mapping[int, Birth]:
        """By step first, then by parameter; see `StateOrder`."""
        shard = self._shard
        return {index: shard.order.of(shard.stepped[index], index) for index in self.state()}

    def scale(self) -> dict[str, float] | None:
        """The state of ``loss_scale=DynamicLossScale()``."""
        return self._states.scale()

    def master(self, index: int) -> Tensor | None:
        """The master of a parameter on its owner; None if the parameter is cut."""
        stepped = self._shard.stepped
        return stepped.masters.get(index) if stepped.part(index) is None else None

    def wants_master(self, index: int) -> bool:
        """True for low-precision parameters with ``master_weights=True``."""
        return self._shard.masters.wants(index)

    def check_fits(self, state_dict: StateDict) -> None:
        """Run the checks of ``load_state_dict``."""
        self._states.check_fits(state_dict)

    def load(self, state_dict: StateDict, order: Sequence[int]) -> None:
        """Drop the current iteration, if any, and load."""
        self.optimizer.reset()
        self._states.load_owned(self.optimizer, state_dict, order)


class ParallelState(OptimizerState):
    """A `ddp_zero.parallel.ParallelOptimizer`: its members; parameters are numbered in the order of all groups."""

    optimizer: ParallelOptimizer

    def __init__(self, optimizer: ParallelOptimizer) -> None:
        self.optimizer = optimizer
        self.table = ParameterTable(optimizer.param_groups)
        self._members = [ShardedState(member) for member in optimizer.members]
        self.inner = self._members[0].inner
        self._numbers = [[self.table.index_of[param] for param in member.table.params] for member in self._members]
        self._place_of = {
            number: (member, index)
            for member, own in zip(self._members, self._numbers, strict=True)
            for index, number in enumerate(own)
        }
        for member, own in zip(self._members, self._numbers, strict=True):
            self.table.wholes.update({own[index]: whole for index, whole in member.table.wholes.items()})

    @property
    def class_name(self) -> str:
        """The classes that step on any rank: pipeline stages may have different ones."""
        return self.optimizer.class_name

    def part_of(self, model: nn.Module) -> PartModel:
        """This rank's part of the model."""
        return self.optimizer._holdings.part_of(model)

    def statement(self, live: PartModel) -> Statement:
        """The values and the states that this rank holds."""
        names, groups = live.names_of(self.table), self.optimizer.param_groups
        owned, wholes = self.owned(GroupRank(0), 1), self.table.wholes
        hosted = {names[index] for index in owned if index in wholes and wholes[index].is_here}
        texts = [options_as_text(group_options(group)) for group in groups]
        named = list(zip(texts, by_group(names, groups), strict=True))
        return live.statement([names[index] for index in owned], named, hosted)

    def check(self) -> None:
        """Check every member."""
        for member in self._members:
            member.check()

    def owned(self, rank: GroupRank, world_size: int) -> list[int]:
        """Parameters that members save; ranks with different parts of the model save theirs."""
        return self._numbered(member.owned(rank, world_size) for member in self._members)

    def kept(self) -> list[int]:
        """The parameters that members keep."""
        return self._numbered(member.kept() for member in self._members)

    def state(self) -> dict[int, State]:
        """The states of all members."""
        return self._joined(member.state() for member in self._members)

    def saved_state(self) -> dict[int, State]:
        """The saved states of all members."""
        return self._joined(member.saved_state() for member in self._members)

    def own_part(self, index: int, state: State) -> State:
        """By the member that has the parameter."""
        member, own = self._place_of[index]
        return member.own_part(own, state)

    def device(self) -> torch.device:
        """One device for all members."""
        return self._members[0].device()

    def births(self) -> Mapping[int, Birth]:
        """By step, then in the order of all groups."""
        births = self._joined(member.births() for member in self._members)
        return {index: (step, index) for index, (step, _) in births.items()}

    def scale(self) -> dict[str, float] | None:
        """One scale in all members."""
        return self._members[0].scale()

    def master(self, index: int) -> Tensor | None:
        """By the member that has the parameter."""
        member, own = self._place_of[index]
        return member.master(own)

    def wants_master(self, index: int) -> bool:
        """By the member that has the parameter."""
        member, own = self._place_of[index]
        return member.wants_master(own)

    def check_fits(self, state_dict: StateDict) -> None:
        """Run the checks of each member."""
        for member, part in zip(self._members, split(state_dict, self.optimizer._places), strict=True):
            member.check_fits(part)

    def drop(self) -> None:
        """Drop the states of every member."""
        for member in self._members:
            member.drop()

    def load(self, state_dict: StateDict, order: Sequence[int]) -> None:
        """Drop the current iteration, if any, and load each member."""
        self.optimizer.reset()
        parts = split(state_dict, self.optimizer._places)
        for member, part, numbers in zip(self._members, parts, self._numbers, strict=True):
            index_of = {number: index for index, number in enumerate(numbers)}
            member.load(part, [index_of[number] for number in order if number in index_of])

    def _numbered(self, found: Iterable[Iterable[int]]) -> list[int]:
        return sorted(own[index] for own, some in zip(self._numbers, found, strict=True) for index in some)

    def _joined(self, found: Iterable[Mapping[int, Any]]) -> dict[int, Any]:
        return {own[index]: one for own, some in zip(self._numbers, found, strict=True) for index, one in some.items()}


# The ranks that save and load together


def process_groups(model: nn.Module, optimizer: Optimizer | None, is_save: bool = False) -> list[ProcessGroup]:
    """The groups whose ranks save and load together; with a `ParallelOptimizer`, all ranks of the model."""
    inner = unwrapped(optimizer)
    if isinstance(inner, ParallelOptimizer):
        return inner.process_groups
    group = _group(model, optimizer)
    if is_save:
        check_not_alone(group)
    return [] if group is None else [group]


def _group(model: nn.Module, optimizer: Optimizer | None) -> ProcessGroup | None:
    """The process group that saves and loads together: DDP's, or a sharded optimizer's."""
    group = group_of(model)
    sharded = process_group_of(unwrapped(optimizer))
    if group is not None and sharded is not None and not Communicator(group).has_same_ranks(sharded):
        raise ValueError(
            "The optimizer and the DDP model are on different ranks. Build the optimizer with "
            "process_group=ddp.process_group. [ZERO-207]"
        )
    return sharded if group is None else group


def views_of(
    model: nn.Module, optimizer: Optimizer | None
) -> tuple[LiveModel, OptimizerState | None, Statement | None]:
    """Views of model and optimizer; with a `ParallelOptimizer`, of this rank's part, and a statement of it."""
    state = None if optimizer is None else state_of(optimizer)
    if isinstance(state, ParallelState):
        part = state.part_of(model)
        return part, state, state.statement(part)
    return LiveModel(model), state, None


def declared(
    agreement: Agreement, model: nn.Module, optimizer: Optimizer | None, is_save: bool = False
) -> tuple[LiveModel, OptimizerState | None, Statement | None]:
    """`views_of`, declared to be the same on every rank; names, shapes, dtypes and classes.

    With a `ParallelOptimizer` names differ between ranks: the third value states this rank's.
    """
    live, state, statement = views_of(model, optimizer)
    kind = "none" if state is None else f"{type(state).__name__} of {state.class_name}"
    agreement.declare("optimizer", kind)
    if statement is not None:
        return live, state, statement
    values = repr(sorted(live.values().items()))
    agreement.declare("names, shapes and dtypes in the model", hashlib.sha256(values.encode()).hexdigest())
    if is_save:
        agreement.declare("parameters that DDP ignores, or their ParallelOptimizer,", _sample_of_ignored(model, live))
    return live, state, None


def layout_of(peers: Peers, statement: Statement | None) -> Layout | None:
    """The layout of the model over all ranks, if they hold different parts. A collective.

    Raises:
        ValueError: on every rank, if the parts do not fit together, naming the parameter and two ranks.
    """
    if statement is None:
        return None
    every = [Statement.of_text(text) for text in peers.all_gather_text(statement.as_text())]
    return Layout(every, lambda rank: peers.name(GroupRank(rank)))


def _sample_of_ignored(model: nn.Module, live: LiveModel) -> str:
    """A digest of trainable parameters that DDP ignores: ranks may hold different ones under one name."""
    models = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    reduced = {id(param) for ddp in models for param in _reduced_by(ddp)}
    ignored = [one for one in live.tensors.values() if one.requires_grad and id(one) not in reduced]
    return hashlib.sha256("".join(sample_values(ignored) if models else []).encode()).hexdigest()


def _reduced_by(ddp: DistributedDataParallel) -> Iterable[Tensor]:
    """All parameters that DDP reduces, and perhaps some that are frozen."""
    params: Iterable[Tensor] = ddp.module.parameters()
    return [param for _, param in reduced_parameters(ddp)] if ddp.parameters_to_ignore else params
