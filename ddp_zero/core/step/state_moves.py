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
    mine = parts_of(before, ranks.shard.group_rank)
    with Agreement(ranks.everyone, "moving optimizer state to new owners") as agreement:
        found = f"{len(changes)}, the first of {table.label(changes[0])}" if changes else "none"
        agreement.declare("new owners, which follow from bucket_cap_mb of DistributedDataParallel,", found)
        agreement.declare("moves", [(index, before[index], after[index]) for index in changes])
        going = [index for index in changes if targets[index] in state and index in mine]
        flatten_states({index: state[targets[index]] for index in going}, table.label)
    held = any(targets[index] in state or index in targets.masters for index in changes if index in mine)
    return any(flag for (flag,) in ranks.everyone.all_gather_ints([int(held)]))


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
    old, new = parts_of(before, me), parts_of(after, me)
    for index in _changes(before, after):
        param = table.params[index]
        have = old.get(index)
        want = new.get(index)
        if (index in old, have) == (index in new, want):
            continue
        mine = _MovedState.remove_from(state, order, targets, index) if index in old else None
        arrived: list[tuple[Part, _MovedState]] = []
        for move in moves(before[index], after[index]):
            elements = part_between(move.start, move.stop, param.numel())
            if move.source == me and mine is not None:
                given = mine.narrow(param, have, elements)
                if move.target == me:
                    arrived.append((elements, given))
                elif sends:
                    comm.send_tree((given.master, given.birth, given.state), move.target)
            elif move.target == me:
                came = comm.receive_tree(move.source, table.accelerator()) if sends else (None, None, None)
                arrived.append((elements, _MovedState(*came)))
        if index in new:
            _MovedState.join(arrived, param, want).put_into(state, order, targets, index, want)


def _changes(before: Sequence[Pieces], after: Sequence[Pieces]) -> list[int]:
    return [index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]


@dataclass
class _MovedState:
    """The optimizer state of a parameter or of a part, as ranks send it: master, birth, state."""

    master: Tensor | None
    birth: Birth | None
    state: Any

    @classmethod
    def remove_from(cls, state: State, order: StateOrder, targets: StepTargets, index: int) -> "_MovedState":
        key = targets[index]
        master = targets.release(index)
        is_there = key in state
        master = None if master is None else master.detach()
        return cls(master, order.pop(key) if is_there else None, state.pop(key) if is_there else None)

    def narrow(self, param: Tensor, have: Part, want: Part) -> "_MovedState":
        master = narrow_value(self.master, param, have, want)
        return replace(
            self, master=master, state=None if self.state is None else narrow_state(self.state, param, have, want)
        )

    @classmethod
    def join(cls, parts: Sequence[tuple[Part, "_MovedState"]], param: Tensor, want: Part) -> "_MovedState":
        """Join several parts; either all have a state, or none."""
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
        targets.create(index, self.master, part)
        if self.birth is not None:
            key = targets[index]
            state[key] = self.state
            order.insert(key, self.birth)
