"""Optimizer state across ranks: gather it to one rank, and cut a whole state dict down to what a rank owns.

A *state dict* here is the unsharded optimizer's: ``{"state": {id: state}, "param_groups": [{..., "params": [id]}]}``,
where ids are parameter indices. Gathering sends one parameter's state at a time, as tensors and JSON, to the one rank
that asked.
"""

import copy
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_zero.agreement import Agreement
from ddp_zero.collectives import Communicator
from ddp_zero.inner import check_epsilon
from ddp_zero.local_step import ParamGroup
from ddp_zero.parameters import ParameterTable
from ddp_zero.partition import GroupRank
from ddp_zero.payload import copy_tree, flatten
from ddp_zero.precision import SteppedTensors

Birth = tuple[int, int]
State = MutableMapping[Any, Any]

MASTER_KEY = "master_weight"
"""Where the fp32 master of a parameter is in its state."""


class StateOrder:
    """The order in which the unsharded optimizer would have created its per-parameter states.

    `torch.optim` keeps states in the order of creation: by step, then by parameter index. A rank sees only its own, so
    each notes when its states were born and the gathered ones are sorted by that. States are keyed by what is stepped.

    Attributes:
        is_at_birth: whether no step was begun and no state loaded, so that there is at most the state that construction
            creates. The same on every rank.
        is_as_built: whether, in addition, no parameters were added, nor a state dict without state loaded.
    """

    def __init__(self) -> None:
        self._births: dict[Tensor, Birth] = {}
        self._step = 0
        self.is_at_birth = True
        self.is_as_built = True

    def after_step(self, state: Mapping[Any, Any], index_of: Callable[[Tensor], int]) -> None:
        """Note the states that a step created."""
        self._step += 1
        self.note_new(state, index_of)

    def note_new(self, state: Mapping[Any, Any], index_of: Callable[[Tensor], int]) -> None:
        """Note the states that are there and were not before; some optimizers create theirs at construction."""
        keys = [key for key in state if isinstance(key, Tensor)]
        self._births = {key: self._births.get(key) or (self._step, index_of(key)) for key in keys}

    def loaded(self, stepped: Sequence[Tensor], state: Mapping[Any, Any]) -> None:
        """Forget everything; states are now in the order of the state dict, given as what is stepped."""
        self.is_at_birth = self.is_at_birth and not stepped
        self.is_as_built = False
        position = {key: place for place, key in enumerate(stepped)}
        self._births = {key: (self._step, position[key]) for key in state if key in position}

    def sorted(self, state: State) -> State:
        """A state in the unsharded order; states that belong to no parameter first."""
        born = sorted((key for key in state if isinstance(key, Tensor)), key=self.of)
        others = [key for key in state if not isinstance(key, Tensor)]
        return {key: state[key] for key in [*others, *born]}

    def of(self, param: Tensor, index: int = 0) -> Birth:
        """When a state was born: (step, place within the step); now, if it was not."""
        return self._births.get(param, (self._step, index))

    def give(self, param: Tensor) -> Birth:
        """Forget a state that moves to another rank, and say when it was born."""
        return self._births.pop(param)

    def take(self, param: Tensor, birth: Birth) -> None:
        """Remember a state that has come from another rank."""
        self._births[param] = birth


def gather_state(
    comm: Communicator,
    table: ParameterTable,
    owners: Sequence[GroupRank],
    state: Mapping[Any, Any],
    order: StateOrder,
    stepped: SteppedTensors,
    to: GroupRank,
) -> dict[Any, Any] | None:
    """Gather every rank's per-parameter state on one rank. A collective.

    Args:
        comm: the group.
        table: the parameters.
        owners: the owner of each.
        state: this rank's state, keyed by what it steps.
        order: when each state was born.
        stepped: what is stepped for each parameter; masters are part of their state.
        to: the rank that receives.

    Returns:
        On ``to``: a snapshot of the unsharded optimizer's state, keyed by parameter, in the unsharded order, on the
        devices where it would be. None elsewhere.

    Raises:
        TypeError: if a state holds something that cannot travel, naming the parameter; RuntimeError on other ranks.
        ValueError: if ``to`` is not a rank of the group, or ranks name different receivers.
    """
    with Agreement(comm, "consolidate_state_dict") as agreement:
        if not 0 <= to < comm.world_size:
            raise ValueError(f"Expected `to` to be a rank below {comm.world_size}, got {to}.")
        agreement.declare("argument `to`", to)
        order.note_new(state, stepped.index_of)
        owned = {  # looking up the state of somebody else's parameter leaves an empty one behind
            index: value
            for index, value in with_masters(state, stepped).items()
            if isinstance(index, int) and owners[index] == comm.group_rank
        }
        for index, value in owned.items():
            _check_can_travel(value, table.label(index))
    counts = [count for (count,) in comm.all_gather_ints([len(owned)])]
    if comm.group_rank != to:
        for index, value in owned.items():
            comm.send_tree((index, order.of(stepped[index], index), value), to)
        return None

    born = [(order.of(stepped[index], index), index, copy_tree(value)) for index, value in owned.items()]
    for source in map(GroupRank, range(comm.world_size)):
        for _ in range(counts[source] if source != to else 0):
            index, birth, value = comm.receive_tree(source, table.accelerator())
            born.append((birth, index, value))
    gathered: dict[Any, Any] = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
    born.sort(key=lambda entry: entry[:2])
    gathered.update((table.params[index], value) for _, index, value in born)
    return gathered


def migrate_state(
    comm: Communicator,
    table: ParameterTable,
    state: State,
    order: StateOrder,
    stepped: SteppedTensors,
    old_owners: Sequence[GroupRank],
    new_owners: Sequence[GroupRank],
) -> None:
    """Send the state of every parameter whose owner changes from its old to its new one. A collective.

    Every rank walks the parameters in the same order, so the blocking messages cannot wait for each other in a circle.

    Raises:
        TypeError: if a state cannot travel, naming the parameter, before any is moved; RuntimeError on other ranks.
    """
    moves = [
        (index, old, new) for index, (old, new) in enumerate(zip(old_owners, new_owners, strict=True)) if old != new
    ]
    if not moves:
        return
    with Agreement(comm, "moving optimizer state to new owners") as agreement:
        agreement.declare("moves", moves)
        for index, old, _ in moves:
            if old == comm.group_rank and stepped[index] in state:
                _check_can_travel(state[stepped[index]], table.label(index))
    device = table.accelerator()
    for index, old, new in moves:
        if comm.group_rank == old:
            key, master = stepped[index], stepped.give(index)
            born = (order.give(key), state.pop(key)) if key in state else None
            comm.send_tree((None if master is None else master.detach(), born), new)
        elif comm.group_rank == new:
            master, born = comm.receive_tree(old, device)
            if master is not None:
                stepped.take(index, master)
            if born is not None:
                key = stepped[index]
                birth, state[key] = born
                order.take(key, birth)


def restrict_state_dict(
    state_dict: Mapping[str, Any],
    param_groups: Sequence[ParamGroup],
    table: ParameterTable,
    inner: torch.optim.Optimizer,
    stepped: SteppedTensors,
) -> tuple[dict[str, Any], list[int], dict[int, Tensor]]:
    """The part of a whole state dict that an inner optimizer over some of the parameters can load.

    Args:
        state_dict: the unsharded optimizer's; states of parameters that this rank does not own may be left out.
        param_groups: the exposed groups.
        table: their parameters.
        inner: the optimizer over this rank's parameters.
        stepped: what is stepped for each of them.

    Returns:
        The inner optimizer's state dict, the indices of all parameters that have a state, in the order found, and all
        masters. Tensors are the argument's own.

    Raises:
        ValueError: if it does not fit, naming the group or the parameter and why.
    """
    _check_groups(state_dict, param_groups)
    saved_groups = state_dict["param_groups"]
    check_epsilon(inner, saved_groups, table, stepped)
    saved_ids = [saved_id for group in saved_groups for saved_id in group["params"]]
    index_of_id = {saved_id: index for index, saved_id in enumerate(saved_ids)}
    local_id = {param: i for i, param in enumerate(param for group in inner.param_groups for param in group["params"])}

    local_state: dict[Any, Any] = {}
    masters: dict[int, Tensor] = {}
    for saved_id, value in state_dict["state"].items():
        if isinstance(saved_id, str) and saved_id not in index_of_id:
            local_state[saved_id] = value
            continue
        if saved_id not in index_of_id:
            raise ValueError(f"Expected state for parameters 0 to {len(saved_ids) - 1}, got some for {saved_id!r}.")
        index = index_of_id[saved_id]
        check_state(value, table, index, type(inner))
        if MASTER_KEY in value:
            masters[index] = _checked_master(value, table, index, stepped)
            value = {key: item for key, item in value.items() if key != MASTER_KEY}
        if stepped[index] in local_id and (value or index not in masters):
            local_state[local_id[stepped[index]]] = value

    owned = {table.params[index] for index in range(len(table)) if stepped[index] in local_id}
    copied = copy.deepcopy([dict(group) for group in saved_groups])  # together: groups may share a tensor, such as lr
    _share_as_before(copied, param_groups)
    local_groups = [
        _localise_group(saved, exposed, inner_group, local_id, owned)
        for saved, exposed, inner_group in zip(copied, param_groups, inner.param_groups, strict=True)
    ]
    indices = [index_of_id[saved_id] for saved_id in state_dict["state"] if saved_id in index_of_id]
    return {"state": local_state, "param_groups": local_groups}, indices, masters


def with_masters(state: Mapping[Any, Any], stepped: SteppedTensors) -> dict[Any, Any]:
    """A state keyed by parameter index instead of by what is stepped, with masters among its values."""
    by_index = {stepped.index_of(key) if isinstance(key, Tensor) else key: value for key, value in state.items()}
    for index, master in stepped.masters.items():
        by_index[index] = {**by_index.get(index, {}), MASTER_KEY: master.detach()}
    return by_index


def _checked_master(value: Mapping[str, Any], table: ParameterTable, index: int, stepped: SteppedTensors) -> Tensor:
    master = value[MASTER_KEY]
    if not stepped.wants_master(index):
        raise ValueError(
            f"Expected state without {MASTER_KEY!r} for {table.label(index)}, which is stepped in "
            f"{table.params[index].dtype}, got some. Build the optimizer with master_weights=True over a model in low "
            f"precision, or leave {MASTER_KEY!r} out of the state to lose it."
        )
    if not isinstance(master, Tensor) or master.dtype != torch.float32:
        kind = master.dtype if isinstance(master, Tensor) else type(master).__name__
        raise ValueError(f"Expected {MASTER_KEY!r} of {table.label(index)} to be an fp32 tensor, got {kind}.")
    return master


def _localise_group(
    saved: Mapping[str, Any],
    exposed: ParamGroup,
    inner_group: ParamGroup,
    local_id: Mapping[Tensor, int],
    owned: Collection[Tensor],
) -> ParamGroup:
    kept = [position for position, param in enumerate(exposed["params"]) if param in owned]
    per_parameter = {"params": [local_id[param] for param in inner_group["params"]]}
    if "param_names" in saved:
        per_parameter["param_names"] = [saved["param_names"][position] for position in kept]
    return {**saved, **per_parameter}


def _share_as_before(loaded: Sequence[ParamGroup], exposed: Sequence[ParamGroup]) -> None:
    """Where groups share a tensor now, and files have given each a copy with the same value, they share one again."""
    first: dict[int, Tensor] = {}
    for group, now in zip(loaded, exposed, strict=True):
        for key, value in group.items():
            if isinstance(value, Tensor) and isinstance(now.get(key), Tensor) and not value.is_meta:
                one = first.setdefault(id(now[key]), value)
                if one.dtype == value.dtype and torch.equal(one, value):
                    group[key] = one


def _check_groups(state_dict: Mapping[str, Any], param_groups: Sequence[ParamGroup]) -> None:
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"Expected an optimizer's state dict with 'state' and 'param_groups', got no {key!r}.")
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(param_groups):
        raise ValueError(f"Expected a state dict with {len(param_groups)} parameter groups, got {len(saved_groups)}.")
    for position, (saved, group) in enumerate(zip(saved_groups, param_groups, strict=True)):
        if "params" not in saved:
            raise ValueError(
                f"Expected a list of parameter ids in group {position} of the state dict, got no 'params'."
            )
        if len(saved.get("param_names", saved["params"])) != len(saved["params"]):
            raise ValueError(
                f"Expected a name for each of {len(saved['params'])} parameters in group {position} of the state dict, "
                f"got {len(saved['param_names'])}."
            )
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"Expected {len(group['params'])} parameters in group {position} of the state dict, got "
                f"{len(saved['params'])}."
            )


def check_state(value: Any, table: ParameterTable, index: int, optimizer_class: type[torch.optim.Optimizer]) -> None:
    """See that a state is a dict and, for torch's own optimizers, has no tensor of another parameter's shape.

    Raises:
        ValueError: if not, naming the parameter.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"Expected a dict as the state of {table.label(index)}, got {type(value).__name__}.")
    if not optimizer_class.__module__.startswith("torch.optim"):
        return
    shape = table.params[index].shape
    for key, tensor in value.items():
        if isinstance(tensor, Tensor) and tensor.dim() and not _broadcasts(tensor.shape, shape):
            raise ValueError(
                f"Expected state {key!r} of {table.label(index)} to fit its shape, got shape {list(tensor.shape)}. "
                "Is this the state dict of another model, or were the parameters given in another order?"
            )


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    """Whether a state has its parameter's shape or, as Adafactor's, that shape with some dimensions reduced to 1."""
    return len(shape) == len(target) and all(one in (1, other) for one, other in zip(shape, target, strict=True))


def _check_can_travel(value: Any, label: str) -> None:
    try:
        flatten(value)
    except TypeError as error:
        raise TypeError(f"Expected a state that can be sent without pickle for {label}. {error}") from error
