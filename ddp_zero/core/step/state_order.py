"""The order in which states were created, and their migration to new owners."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.ranks import Agreement, Ranks
from ddp_zero.core.local.parameters import MASTER_KEY, ParameterTable, StepTargets
from ddp_zero.core.local.parts import join_parts, narrow_state, narrow_value
from ddp_zero.core.local.tree import check_can_travel
from ddp_zero.core.plan.ownership import Part, Pieces, moves, part_between, parts_of

Birth = tuple[int, int]
State = MutableMapping[Any, Any]


class StateOrder:
    """The order in which the unsharded optimizer would have created its per-parameter states.

    `torch.optim` keeps states in the order of creation: by step, then by parameter index. A rank sees only its own, so
    each notes when its states were born and the gathered ones are sorted by that. States are keyed by stepped tensor.
    """

    def __init__(self) -> None:
        self.births: dict[Tensor, Birth] = {}  # when each state was created
        self.step = 0  # how many were taken
        # until a step begins or state is loaded: at most the states that construction creates exist, on every rank
        self.is_at_birth = True
        # in addition no parameters were added and no state dict was loaded, not even an empty one
        self.is_as_built = True

    def after_step(self, state: Mapping[Any, Any], index_of: Callable[[Tensor], int]) -> None:
        """Note the states that a step, or a method of the inner class, has created."""
        self.step += 1
        self.note_new(state, index_of)

    def note_new(self, state: Mapping[Any, Any], index_of: Callable[[Tensor], int]) -> None:
        """Note the states that are new since the last call; some optimizers create theirs at construction."""
        if state.keys() == self.births.keys():
            return
        keys = [key for key in state if isinstance(key, Tensor)]
        self.births = {key: self.births.get(key) or (self.step, index_of(key)) for key in keys}

    def follow_load(self, stepped: Sequence[Tensor], state: Mapping[Any, Any]) -> None:
        """Forget all births; states are now in the order of the state dict, given as stepped tensors."""
        self.is_at_birth = self.is_at_birth and not stepped
        self.is_as_built = False
        position = {key: place for place, key in enumerate(stepped)}
        self.births = {key: (self.step, position[key]) for key in state if key in position}

    def sort(self, state: State) -> State:
        """A state in the unsharded order; states that belong to no parameter first."""
        born = sorted((key for key in state if isinstance(key, Tensor)), key=self.of)
        others = [key for key in state if not isinstance(key, Tensor)]
        return {key: state[key] for key in [*others, *born]}

    def of(self, param: Tensor, index: int = 0) -> Birth:
        """Creation key of a state: (step, place within the step). Uses the current step if the state has none."""
        return self.births.get(param, (self.step, index))

    def give(self, param: Tensor) -> Birth:
        """Forget a state that moves to another rank; returns its creation key."""
        return self.births.pop(param)

    def take(self, param: Tensor, birth: Birth) -> None:
        """Note a state that has arrived from another rank."""
        self.births[param] = birth


def agree_on_moves(
    ranks: Ranks,
    table: ParameterTable,
    state: State,
    stepped: StepTargets,
    before: Sequence[Pieces],
    after: Sequence[Pieces],
) -> None:
    """Check that all ranks are about to move the same states, and that these can travel. A collective.

    Raises TypeError if a state cannot travel, naming the parameter; RuntimeError on other ranks.
    """
    changes, mine = _changes(before, after), parts_of(before, ranks.shard.group_rank)
    with Agreement(ranks.everyone, "moving optimizer state to new owners") as agreement:
        agreement.declare("moves", [(index, before[index], after[index]) for index in changes])
        for index in changes:
            if stepped[index] in state and index in mine:
                check_can_travel(state[stepped[index]], table.label(index))


def migrate_state(
    comm: Communicator,
    table: ParameterTable,
    state: State,
    order: StateOrder,
    stepped: StepTargets,
    before: Sequence[Pieces],
    after: Sequence[Pieces],
) -> None:
    """Send the state of every parameter, or part of one, whose owner changes from its old to its new one. A collective.

    Every rank walks the parameters in the same order, so the blocking messages cannot deadlock.
    """
    me = comm.group_rank
    old, new = parts_of(before, me), parts_of(after, me)
    for index in _changes(before, after):
        param, have, want = table.params[index], old.get(index), new.get(index)
        if (index in old, have) == (index in new, want):
            continue
        mine = _Held.out_of(state, order, stepped, index) if index in old else None
        arrived: list[tuple[Part, _Held]] = []
        for move in moves(before[index], after[index]):
            elements = part_between(move.start, move.stop, param.numel())
            if move.source == me and mine is not None:
                given = mine.of(param, have, elements)
                if move.target == me:
                    arrived.append((elements, given))
                else:
                    comm.send_tree((given.master, given.birth, given.state), move.target)
            elif move.target == me:
                arrived.append((elements, _Held(*comm.receive_tree(move.source, table.accelerator()))))
        if index in new:
            _Held.join(arrived, param, want).put_into(state, order, stepped, index, want)


def _changes(before: Sequence[Pieces], after: Sequence[Pieces]) -> list[int]:
    return [index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]


@dataclass
class _Held:
    """The optimizer state of a parameter or a part of it on one rank: master, birth, state."""

    master: Tensor | None
    birth: Birth | None
    state: Any

    @classmethod
    def out_of(cls, state: State, order: StateOrder, stepped: StepTargets, index: int) -> "_Held":
        key, master = stepped[index], stepped.release(index)
        is_there = key in state
        master = None if master is None else master.detach()
        return cls(master, order.give(key) if is_there else None, state.pop(key) if is_there else None)

    def of(self, param: Tensor, have: Part, want: Part) -> "_Held":
        master = narrow_value(self.master, param, have, want)
        return replace(
            self, master=master, state=None if self.state is None else narrow_state(self.state, param, have, want)
        )

    @classmethod
    def join(cls, parts: Sequence[tuple[Part, "_Held"]], param: Tensor, want: Part) -> "_Held":
        """Several parts as one; all have a state, or none."""
        first = parts[0][1]
        masters = [(part, {MASTER_KEY: held.master}) for part, held in parts if held.master is not None]
        states = [(part, held.state) for part, held in parts if held.state is not None]
        assert len(states) in (0, len(parts)), "a parameter is stepped on all its owners or on none"
        return cls(
            join_parts(masters, param, want)[MASTER_KEY] if masters else None,
            first.birth,
            join_parts(states, param, want) if states else None,
        )

    def put_into(self, state: State, order: StateOrder, stepped: StepTargets, index: int, part: Part) -> None:
        stepped.create(index, self.master, part)
        if self.birth is not None:
            key = stepped[index]
            state[key] = self.state
            order.take(key, self.birth)
