"""The whole state of an optimizer on one rank, in the unsharded order: one parameter at a time, as tensors and JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ddp_zero.core.comm.agreement import Agreement
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.ranks import Ranks
from ddp_zero.core.local.parameters import ParameterTable, SteppedTensors, with_masters
from ddp_zero.core.local.parts import joined
from ddp_zero.core.local.tree import check_can_travel, copy_tree
from ddp_zero.core.plan.ownership import Pieces, is_cut, piece_of
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.step.state_order import Birth, StateOrder


def gather_state(
    ranks: Ranks,
    table: ParameterTable,
    pieces: Sequence[Pieces],
    state: Mapping[Any, Any],
    order: StateOrder,
    stepped: SteppedTensors,
    to: GroupRank,
) -> dict[Any, Any] | None:
    """Gather every rank's per-parameter state on one rank. A collective.

    Args:
        ranks: the ranks; the shard group of the receiver sends.
        table: the parameters.
        pieces: who owns which elements of each.
        state: this rank's state, keyed by what it steps.
        order: when each state was born.
        stepped: what is stepped for each parameter; masters are part of their state.
        to: the rank that receives, of everyone.

    Returns:
        On ``to``: a snapshot of the unsharded optimizer's state, keyed by parameter, in the unsharded order, on the
        devices where it would be. None elsewhere.

    Raises:
        TypeError: if a state holds something that cannot travel, naming the parameter; RuntimeError on other ranks.
        ValueError: if ``to`` is not a rank of the group, or ranks name different receivers.
    """
    comm, everyone = ranks.shard, ranks.everyone
    with Agreement(everyone, "consolidate_state_dict") as agreement:
        if not 0 <= to < everyone.world_size:
            raise ValueError(f"Expected `to` to be a rank below {everyone.world_size}, got {to}.")
        agreement.declare("argument `to`", to)
        order.note_new(state, stepped.index_of)
        owned = {  # looking up the state of a different rank's parameter leaves an empty one behind
            index: value
            for index, value in with_masters(state, stepped).items()
            if isinstance(index, int) and piece_of(pieces[index], comm.group_rank) is not None
        }
        for index, value in owned.items():
            check_can_travel(value, table.label(index))
    receiver = comm.place_of(everyone.global_rank(to))
    if receiver is None:
        return None
    counts = [count for (count,) in comm.all_gather_ints([len(owned)])]
    if comm.group_rank != receiver:
        for index, value in owned.items():
            comm.send_tree((index, order.of(stepped[index], index), value), receiver)
        return None

    found = [(index, receiver, order.of(stepped[index], index), copy_tree(value)) for index, value in owned.items()]
    for source in map(GroupRank, range(comm.world_size)):
        for _ in range(counts[source] if source != receiver else 0):
            index, birth, value = comm.receive_tree(source, table.accelerator())
            found.append((index, source, birth, value))
    born = put_together(found, table, pieces)
    gathered: dict[Any, Any] = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
    born.sort(key=lambda entry: entry[:2])
    gathered.update((table.params[index], value) for _, index, value in born)
    return gathered


def gather_cut(
    comm: Communicator,
    table: ParameterTable,
    pieces: Sequence[Pieces],
    states: Mapping[int, Mapping[Any, Any]],
) -> dict[int, dict[Any, Any]]:
    """Gather the state of each parameter that is cut on the owner of its first element. A collective if any is.

    Args:
        comm: the group.
        table: the parameters.
        pieces: who owns which elements of each.
        states: of what this rank owns, by index, masters included; checked to be able to travel.

    Returns:
        The whole states of those parameters whose first element this rank owns, by index.
    """
    me, whole = comm.group_rank, {}
    for index in filter(lambda index: is_cut(pieces[index]), range(len(pieces))):
        first, *others = pieces[index]
        mine = piece_of(pieces[index], me)
        if mine is not None and mine is not first:
            comm.send_tree(states.get(index), first.owner)
        if mine is not first or first.owner != me:
            continue
        parts = [(slice(first.start, first.stop), states.get(index))]
        for piece in others:
            parts.append((slice(piece.start, piece.stop), comm.receive_tree(piece.owner, table.accelerator())))
        known = [(part, state) for part, state in parts if state is not None]
        if known:
            whole[index] = joined(known, table.params[index], None)
    return whole


def put_together(
    found: Sequence[tuple[int, GroupRank, Birth, Any]], table: ParameterTable, pieces: Sequence[Pieces]
) -> list[tuple[Birth, int, Any]]:
    """The birth, index and state of every parameter that has one, from what its owners have sent.

    Args:
        found: index, owner, birth and state of parameters or parts of them, masters included.
        table: the parameters.
        pieces: who owns which elements of each.
    """
    born = [(birth, index, value) for index, _, birth, value in found if not is_cut(pieces[index])]
    parts: dict[int, list[tuple[slice, Any]]] = {}
    births = {}
    for index, source, birth, value in found:
        piece = piece_of(pieces[index], source)
        if is_cut(pieces[index]) and piece is not None:
            parts.setdefault(index, []).append((slice(piece.start, piece.stop), value))
            births[index] = birth
    return born + [(births[index], index, joined(of_one, table.params[index], None)) for index, of_one in parts.items()]
