"""The order in which states were created, and their migration to new owners."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from ddp_zero.comm.agreement import Agreement
from ddp_zero.comm.ranks import Ranks
from ddp_zero.local.masters import SteppedTensors
from ddp_zero.local.parameters import ParameterTable
from ddp_zero.local.tree import check_can_travel
from ddp_zero.plan.partition import GroupRank

Birth = tuple[int, int]
State = MutableMapping[Any, Any]


class StateOrder:
    """The order in which the unsharded optimizer would have created its per-parameter states.

    `torch.optim` keeps states in the order of creation: by step, then by parameter index. A rank sees only its own, so
    each notes when its states were born and the gathered ones are sorted by that. States are keyed by what is stepped.

    Attributes:
        is_at_birth: True until a step begins or state is loaded: at most the states that construction creates exist.
            The same on every rank.
        is_as_built: True if, in addition, no parameters were added and no state dict was loaded, not even an empty one.
    """

    def __init__(self) -> None:
        self._births: dict[Tensor, Birth] = {}
        self._step = 0
        self.is_at_birth = True
        self.is_as_built = True

    def after_step(self, state: Mapping[Any, Any], index_of: Callable[[Tensor], int]) -> None:
        """Note the states that a step, or a method of the inner class, has created."""
        self._step += 1
        self.note_new(state, index_of)

    def note_new(self, state: Mapping[Any, Any], index_of: Callable[[Tensor], int]) -> None:
        """Note the states that are new since the last call; some optimizers create theirs at construction."""
        keys = [key for key in state if isinstance(key, Tensor)]
        self._births = {key: self._births.get(key) or (self._step, index_of(key)) for key in keys}

    def loaded(self, stepped: Sequence[Tensor], state: Mapping[Any, Any]) -> None:
        """Forget all births; states are now in the order of the state dict, given by what is stepped."""
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
        """Creation key of a state: (step, place within the step). Uses the current step if the state has none."""
        return self._births.get(param, (self._step, index))

    def give(self, param: Tensor) -> Birth:
        """Forget a state that moves to another rank; returns its creation key."""
        return self._births.pop(param)

    def take(self, param: Tensor, birth: Birth) -> None:
        """Note a state that has arrived from another rank."""
        self._births[param] = birth


def migrate_state(
    ranks: Ranks,
    table: ParameterTable,
    state: State,
    order: StateOrder,
    stepped: SteppedTensors,
    old_owners: Sequence[GroupRank],
    new_owners: Sequence[GroupRank],
) -> None:
    """Send the state of every parameter whose owner changes from its old to its new one. A collective.

    Every rank walks the parameters in the same order, so the blocking messages cannot deadlock.

    Raises:
        TypeError: if a state cannot travel, naming the parameter, before any is moved; RuntimeError on other ranks.
    """
    moves = [
        (index, old, new) for index, (old, new) in enumerate(zip(old_owners, new_owners, strict=True)) if old != new
    ]
    if not moves:
        return
    comm = ranks.shard
    with Agreement(ranks.everyone, "moving optimizer state to new owners") as agreement:
        agreement.declare("moves", moves)
        for index, old, _ in moves:
            if old == comm.group_rank and stepped[index] in state:
                check_can_travel(state[stepped[index]], table.label(index))
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
