"""A live model with its optimizer on this rank, as checkpoints see them, and the ranks that save and load together.

Optimizers may be this library's, torch's ZeroRedundancyOptimizer, or unsharded: each gives the states that this rank
saves and loads those that it keeps; parameters are indices in the order of groups. A `View` adds the model.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_zero.checkpoint.folder import digest_of
from ddp_zero.core.comm import Agreement, Communicator, Peers
from ddp_zero.core.ddp import reduced_parameters
from ddp_zero.core.local import ParameterTable, class_name, rehearse_load, sample_values
from ddp_zero.core.plan import GroupRank, partition_greedy
from ddp_zero.core.state import StateDicts, check_state
from ddp_zero.core.step import Shard
from ddp_zero.optimizer import ZeroRedundancyOptimizer, engine_of, shard_of, states_of
from ddp_zero.parallel.optimizer import ParallelOptimizer
from ddp_zero.parallel.placement import split
from ddp_zero.parallel.whole_model import Layout, RankValues
from ddp_zero.values import LiveModel, Part, group_of

State = dict[Any, Any]
StateDict = dict[str, Any]


class Holding(NamedTuple):
    """The elements of a parameter of which a rank writes value and state."""

    part: Part  # the elements, in the parameter as this rank holds it; None: all
    state: State | None  # their state, the master included
    birth: tuple[int, int]  # order of creation of the state, comparable between ranks


class Target(NamedTuple):
    """How a rank steps a parameter, and so what it loads."""

    part: Part = None  # the elements that the rank owns; None: all
    has_master: bool = False  # True if the parameter's owner keeps a master
    master: Tensor | None = None  # this rank's live master, if it is of the whole parameter


class OptimizerState:
    """View of an optimizer whose parameters are not cut: each rank saves a share of the states that it has.

    A plain optimizer has, and loads, all of them; torch's ZeroRedundancyOptimizer only its own parameters' states.
    """

    def __init__(self, optimizer: Any, inner: Optimizer, table: ParameterTable | None = None) -> None:
        self.optimizer = optimizer
        self.inner = inner  # the optimizer that holds this rank's state
        self.table = ParameterTable(optimizer.param_groups) if table is None else table
        self.class_name = class_name(inner)  # of the class that steps, or several, the same on every rank

    def check(self) -> None:
        """Check that the state can be saved now.

        Raises TypeError for a class with its own ``state_dict()``, which cannot be split by parameter, and RuntimeError
        between a backward pass and its step.
        """
        wraps = isinstance(getattr(self.inner, "optimizer", None), Optimizer)
        if wraps or type(self.inner).state_dict is not Optimizer.state_dict:
            remedy = "Give its .optimizer, and the rest of its state" if wraps else "Save its state_dict()"
            raise TypeError(
                "Expected an optimizer with the state_dict() of torch.optim.Optimizer, got "
                f"{type(self.inner).__name__}, which has state of its own. {remedy} as `extra`. [ZERO-632]"
            )

    def holdings(self, peers: Peers) -> dict[int, Holding]:
        """The elements of parameters that this rank writes, by index; every element is in the holdings of one rank."""
        states, written_here = self.state(), self.loaded_indices()
        births = {index: (0, index) for index in written_here}
        if self.inner is self.optimizer:
            owners = partition_greedy([param.nbytes for param in self.table.params], peers.world_size)
            written_here = [index for index, owner in enumerate(owners) if owner == peers.group_rank]
            births |= {index: (0, place) for place, index in enumerate(states)}
        return {index: Holding(None, states.get(index), births[index]) for index in written_here}

    def loaded_indices(self) -> list[int]:
        """Indices of the parameters of whose state this rank loads elements."""
        return sorted(self.table.index_of[param] for group in self.inner.param_groups for param in group["params"])

    def state(self) -> dict[int, State]:
        """States of this rank's parameters, or parts of them, in the unsharded order, masters included."""
        return {self.table.index_of[key]: value for key, value in self.inner.state.items() if isinstance(key, Tensor)}

    def common_groups(self) -> list[int]:
        """The places of groups that all ranks have, some of them perhaps without parameters."""
        return [*range(len(self.optimizer.param_groups))]

    def other_state(self) -> dict[str, Any]:
        """The state of this rank that belongs to no parameter."""
        state: State = self.inner.state
        return {key: value for key, value in state.items() if isinstance(key, str)}

    def target(self, index: int) -> Target:
        return Target()

    def device(self) -> torch.device:
        """The device to which states are read."""
        return self.table.accelerator()

    def scale(self) -> dict[str, float] | None:
        """State of a dynamic loss scale, or None; a GradScaler is saved by the user."""
        return None

    def check_fits(self, state_dict: StateDict) -> None:
        """Check that a state dict of meta tensors could be loaded; ValueError names the parameter or the group."""
        for index, state in state_dict["state"].items():
            if not isinstance(index, str):  # a str key belongs to no parameter
                check_state(state, self.table, index, type(self.inner))
        if self.inner is self.optimizer:
            rehearse_load(self.inner, state_dict)

    def load(self, read: Callable[[], StateDict], order: Sequence[int]) -> None:
        """Drop this rank's states, and load a state dict with states of `loaded_indices`, whose tensors it keeps.

        ``order``: parameters with a state on any rank, in the order of the unsharded optimizer.
        """
        self.inner.state.clear()  # before the new value is read, so that two are never in memory
        self.optimizer.load_state_dict(read())


class _Member(NamedTuple):
    """One of this library's sharded optimizers, as a member of the whole one."""

    optimizer: ZeroRedundancyOptimizer
    shard: Shard
    states: StateDicts
    numbers: list[int]  # for each of its parameters, the index among the parameters of all members

    def written_parts(self) -> dict[int, Part]:
        """The elements of parameters that this rank writes, by index: its owned ones, spread over its replicas."""
        ranks = self.shard.ranks
        return dict([*self.shard.binding.owned_parts().items()][ranks.replica :: ranks.num_replicas])


class ShardedState(OptimizerState):
    """This library's optimizer, or the members of a `ParallelOptimizer`, numbered in the order of all its groups."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer | ParallelOptimizer) -> None:
        members = members_of(optimizer)
        super().__init__(optimizer, members[0].optim, shard_of(members[0]).table if members[0] is optimizer else None)
        if isinstance(optimizer, ParallelOptimizer):
            self.class_name = optimizer.class_name  # pipeline stages may have different ones
        self._members: list[_Member] = []
        self._place_of: dict[int, tuple[Shard, int]] = {}  # the shard of each parameter, and its index there
        for zero in members:
            shard = shard_of(zero)
            table = shard.table
            numbers = [self.table.index_of[param] for param in table.params]
            self._members.append(_Member(zero, shard, states_of(zero), numbers))
            self._place_of |= {number: (shard, index) for index, number in enumerate(numbers)}
            self.table.wholes.update({numbers[index]: whole for index, whole in table.wholes.items()})

    def check(self) -> None:
        """Check that no step is in progress or due."""
        for member in self._members:
            engine_of(member.optimizer).check_between_steps()

    def common_groups(self) -> list[int]:
        optimizer = self.optimizer
        return optimizer.common_groups() if isinstance(optimizer, ParallelOptimizer) else super().common_groups()

    def writers(self) -> dict[int, int]:
        """The parameters of which this rank may write a share, with the first of the ranks that share their states."""
        firsts = [(member, member.shard.everyone.global_rank(GroupRank(0))) for member in self._members]
        return {member.numbers[index]: first for member, first in firsts for index in member.written_parts()}

    def holdings(self, peers: Peers) -> dict[int, Holding]:
        holdings = {}
        for member in self._members:
            states = member.states.owned_state()
            shares = member.written_parts()
            births = member.states.births_of(shares)
            for index, part in shares.items():
                number = member.numbers[index]
                step, place = births[index]
                birth = step, place if len(self._members) == 1 else number
                holdings[number] = Holding(part, states.get(index), birth)
        return holdings

    def loaded_indices(self) -> list[int]:
        return sorted(numbers[i] for _, shard, _, numbers in self._members for i in shard.binding.owned())

    def state(self) -> dict[int, State]:
        return {
            member.numbers[i]: state for member in self._members for i, state in member.states.owned_state().items()
        }

    def target(self, index: int) -> Target:
        shard, index_in_member = self._place_of[index]
        return Target(
            shard.targets.part(index_in_member),
            shard.masters.needs_master(index_in_member),
            shard.targets.whole_master(index_in_member),
        )

    def device(self) -> torch.device:
        """The parameters' device, or the host if they are stepped there."""
        accelerator = self.table.accelerator()
        stepped = self._members[0].shard.targets
        return torch.device("cpu") if stepped.placement.is_offloaded(accelerator) else accelerator

    def scale(self) -> dict[str, float] | None:
        return self._members[0].states.loss_scale_state()

    def check_fits(self, state_dict: StateDict) -> None:
        for member, part in zip(self._members, self._split(state_dict), strict=True):
            member.states.check_fits(part)

    def load(self, read: Callable[[], StateDict], order: Sequence[int]) -> None:
        for _, shard, _, _ in self._members:
            shard.drop_state()
        parts = self._split(read())
        self.optimizer.reset()  # drops the current iteration, if any
        for member, part in zip(self._members, parts, strict=True):
            indices = [index for shard, index in map(self._place_of.__getitem__, order) if shard is member.shard]
            member.states.load_owned(member.optimizer, part, indices)

    def _split(self, state_dict: StateDict) -> list[StateDict]:
        is_one = isinstance(self.optimizer, ZeroRedundancyOptimizer)
        return [state_dict] if is_one else split(state_dict, self.optimizer._places)


def members_of(optimizer: Optimizer | None) -> list[ZeroRedundancyOptimizer]:
    """This library's optimizers that an optimizer, or a wrapper around it, consists of."""
    inner = unwrap(optimizer)
    if isinstance(inner, ParallelOptimizer):
        return list(inner.members)
    return [inner] if isinstance(inner, ZeroRedundancyOptimizer) else []


def state_of(optimizer: Optimizer) -> OptimizerState:
    """The view of an optimizer for its class."""
    inner = unwrap(optimizer)
    if isinstance(inner, ZeroRedundancyOptimizer | ParallelOptimizer):
        return ShardedState(inner)
    torchs = sys.modules.get("torch.distributed.optim")  # importing it warns; its optimizers exist only if imported
    is_torchs = torchs is not None and isinstance(inner, torchs.ZeroRedundancyOptimizer)
    return OptimizerState(inner, inner.optim if is_torchs else inner)


def unwrap(optimizer: Any) -> Any:
    """The optimizer inside wrappers, such as Accelerate's, that hold it as ``.optimizer`` and have no own state."""
    while True:
        attributes = getattr(optimizer, "__dict__", {})
        # its own one, not an attribute that it merely forwards of the wrapped object
        inner = optimizer.optimizer if "optimizer" in attributes or hasattr(type(optimizer), "optimizer") else None
        is_sharded = isinstance(optimizer, ZeroRedundancyOptimizer) and not isinstance(inner, ZeroRedundancyOptimizer)
        if (
            not isinstance(inner, Optimizer)
            or is_sharded
            or ("state" in attributes and attributes["state"] is not inner.state)
        ):
            return optimizer
        optimizer = inner


# With the model


@dataclass(frozen=True)
class View:
    """A model and its optimizer; with a `ParallelOptimizer`, this rank's part of the model."""

    model: nn.Module  # as the user gave it
    live: LiveModel
    state: OptimizerState | None  # None without an optimizer
    names: list[str]  # of the optimizer's parameters, by index
    rank_values: RankValues | None  # of this rank's part; None if all ranks hold the same

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer | None) -> "View":
        """Raises ValueError if the optimizer has a parameter that the model does not have."""
        state = None if optimizer is None else state_of(optimizer)
        parallel = None if state is None else state.optimizer
        if not (isinstance(parallel, ParallelOptimizer) and isinstance(state, ShardedState)):
            live = LiveModel(model)
            return cls(model, live, state, [] if state is None else state.table.names_in(live), None)
        part = parallel._holdings.part_of(model)
        names = state.table.names_in(part)
        wholes = state.table.wholes
        writers = state.writers()
        hosted = {names[index] for index in writers if index in wholes and wholes[index].steps_here}
        rank_values = part.rank_values({names[index]: first for index, first in writers.items()}, hosted)
        return cls(model, part, state, names, rank_values)

    def declare(self, agreement: Agreement, is_save: bool = False) -> None:
        """Declare names, shapes, dtypes and classes, the same on every rank; for a save, also check the state."""
        kind = "none" if self.state is None else f"{type(self.state.optimizer).__name__} of {self.state.class_name}"
        agreement.declare("optimizer", kind)
        if self.rank_values is None:
            named = repr(sorted(self.live.values().items()))
            agreement.declare("names, shapes and dtypes in the model", digest_of(named))
            if is_save:
                ignored = digest_of("".join(_samples_of_ignored(self.model, self.live)))
                agreement.declare("parameters that DDP ignores, or their ParallelOptimizer,", ignored)
        if is_save and self.state is not None:
            self.state.check()

    def layout(self, peers: Peers) -> Layout | None:
        """The layout of the model over all ranks, if they hold different parts. A collective.

        Raises ValueError on every rank if the parts do not fit together, naming the parameter and two ranks.
        """
        if self.rank_values is None:
            return None
        values_of_rank = [RankValues.of_text(text) for text in peers.all_gather_text(self.rank_values.as_text())]
        return Layout(values_of_rank, lambda rank: peers.name(GroupRank(rank)))


def _samples_of_ignored(model: nn.Module, live: LiveModel) -> list[str]:
    """Digests of trainable parameters that DDP ignores: ranks may hold different parameters under one name."""
    models = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    reduced: set[int] = set()
    for ddp in models:  # all that DDP reduces, and perhaps some that are frozen
        params = (
            [param for _, param in reduced_parameters(ddp)] if ddp.parameters_to_ignore else ddp.module.parameters()
        )
        reduced |= set(map(id, params))
    ignored = [param for param in live.tensors.values() if param.requires_grad and id(param) not in reduced]
    return sample_values(ignored) if models else []


# The ranks that save and load together


def process_groups(model: nn.Module, optimizer: Optimizer | None, is_save: bool = False) -> list[ProcessGroup]:
    """The groups whose ranks save and load together; with a `ParallelOptimizer`, all ranks of the model."""
    inner = unwrap(optimizer)
    group = group_of(model)
    if isinstance(inner, ParallelOptimizer):
        return inner.process_groups
    is_sharded = isinstance(inner, ZeroRedundancyOptimizer)
    sharded = shard_of(inner).everyone.process_group if is_sharded else getattr(inner, "join_process_group", None)
    if group is not None and sharded is not None and not Communicator(group).has_same_ranks(sharded):
        raise ValueError(
            "The optimizer and the DDP model are on different ranks. Build the optimizer with "
            "process_group=ddp.process_group. [ZERO-207]"
        )
    group = sharded if group is None else group
    if is_save and group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"A job of {dist.get_world_size()} ranks cannot save or load together without a model in "
            "DistributedDataParallel or a sharded optimizer. Give the DDP model. [ZERO-201]"
        )
    return [] if group is None else [group]
