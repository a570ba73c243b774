"""Moves states of parameters to new owners, when a group is added or a checkpoint has other owners."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.ranks import Agreement, Ranks
from ddp_zero.core.local.parameters import MASTER_KEY, ParameterTable, StepTargets
from ddp_zero.core.plan.ownership import Pieces, moves, part_between, parts_of
from ddp_zero.core.step.state_order import Birth, State, StateOrder
from ddp_zero.values.parts import join_parts, narrow_state, narrow_value
from ddp_zero.values.shapes import Part
from ddp_zero.values.tree import flatten_states


def agree_on_moves(
    ranks: Ranks,
    table: ParameterTable,
    state: State,
    targets: StepTargets,
    before: Sequence[Pieces],
    after: Sequence[Pieces],
) -> bool:
    """Check that all ranks are about to move the same states, and that these can be sent. A collective.

    Returns whether there is any state or master to move. Raises TypeError naming a parameter whose state cannot be
    sent; RuntimeError on other ranks.
    """
    changes = _changes(before, after)
    owned_before = parts_of(before, ranks.shard.group_rank)
    with Agreement(ranks.everyone, "moving optimizer state to new owners") as agreement:
        found = f"{len(changes)}, the first of {table.label(changes[0])}" if changes else "none"
        agreement.declare("new owners, which follow from bucket_cap_mb of DistributedDataParallel,", found)
        agreement.declare("moves", [(index, before[index], after[index]) for index in changes])
        leaving = [index for index in changes if index in owned_before]
        states = {index: state[targets[index]] for index in leaving if targets[index] in state}
        flatten_states(states, table.label)  # raises for a state that cannot be sent
    has_any = bool(states) or any(index in targets.masters for index in leaving)
    return any(flag for (flag,) in ranks.everyone.all_gather_ints([int(has_any)]))


def migrate_state(
    comm: Communicator,
    order: StateOrder,
    table: ParameterTable,
    state: State,
    targets: StepTargets,
    before: Sequence[Pieces],
    after: Sequence[Pieces],
    *,
    sends: bool,
) -> None:
    """Send the state of every parameter, or part, whose owner changes from the old to the new owner. A collective.

    Every rank walks the parameters in the same order, so the blocking messages cannot deadlock. ``sends`` is False on
    every rank if there is nothing to send.
    """
    me = comm.group_rank
    old_parts, new_parts = parts_of(before, me), parts_of(after, me)
    for index in _changes(before, after):
        param = table.params[index]
        was_owner, is_owner = index in old_parts, index in new_parts
        old_part, new_part = old_parts.get(index), new_parts.get(index)
        if (was_owner, old_part) == (is_owner, new_part):
            continue
        local = _MovedState.remove_from(state, order, targets, index) if was_owner else None
        arrived: list[tuple[Part, _MovedState]] = []
        for move in moves(before[index], after[index]):
            elements = part_between(move.start, move.stop, param.numel())
            if move.source == me and local is not None:
                moved = local.narrow(param, old_part, elements)
                if move.target == me:
                    arrived.append((elements, moved))
                elif sends:
                    comm.send_tree((moved.master, moved.birth, moved.state), move.target)
            elif move.target == me:
                received = comm.receive_tree(move.source, table.accelerator()) if sends else (None, None, None)
                arrived.append((elements, _MovedState(*received)))
        if is_owner:
            _MovedState.join(arrived, param, new_part).put_into(state, order, targets, index, new_part)


def _changes(before: Sequence[Pieces], after: Sequence[Pieces]) -> list[int]:
    """The parameters whose owners differ, by index."""
    return [index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]


@dataclass
class _MovedState:
    """The optimizer state of a parameter or of a part of it, as ranks send it."""

    master: Tensor | None  # the fp32 master, if there is one
    birth: Birth | None  # when the state was created; None without a state
    state: Any  # the inner optimizer's state of the parameter, or None

    @classmethod
    def remove_from(cls, state: State, order: StateOrder, targets: StepTargets, index: int) -> "_MovedState":
        """Take what this rank has of a parameter's state out of ``state``, ``order`` and ``targets``, and return it."""
        target = targets[index]  # the tensor that was stepped here, by which states are keyed
        master = targets.release(index)
        master = None if master is None else master.detach()
        if target not in state:
            return cls(master, None, None)
        return cls(master, order.pop(target), state.pop(target))

    def narrow(self, param: Tensor, have: Part, want: Part) -> "_MovedState":
        """The state of the elements ``want``, which are among the elements ``have`` that this state is for."""
        master = narrow_value(self.master, param, have, want)
        state = None if self.state is None else narrow_state(self.state, param, have, want)
        return replace(self, master=master, state=state)

    @classmethod
    def join(cls, parts: Sequence[tuple[Part, "_MovedState"]], param: Tensor, want: Part) -> "_MovedState":
        """The state of the elements ``want``, which ``parts`` make up; either all of these have a state, or none."""
        first = parts[0][1]
        masters = [(part, {MASTER_KEY: held.master}) for part, held in parts if held.master is not None]
        states = [(part, held.state) for part, held in parts if held.state is not None]
        assert len(states) in (0, len(parts)), "a parameter is stepped on all its owners or on none"
        return cls(
            join_parts(masters, param, want)[MASTER_KEY] if masters else None,
            first.birth,
            join_parts(states, param, want) if states else None,
        )

    def put_into(self, state: State, order: StateOrder, targets: StepTargets, index: int, part: Part) -> None:
        """Create the target of a parameter's part on this rank, and add the state to ``state`` and ``order``."""
        targets.create(index, self.master, part)
        if self.birth is not None:
            target = targets[index]
            state[target] = self.state
            order.insert(target, self.birth)
