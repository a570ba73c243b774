"""Averaged gradients that travel from the owners they were reduced to, to those of a new plan."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ddp_zero.core.backward.owned_sums import ReducedRuns, ReducedSegment
from ddp_zero.core.backward.visible_gradients import VisibleGradients
from ddp_zero.core.local.parts import joined, part_of
from ddp_zero.core.plan.ownership import Piece, is_cut, moves, piece_of
from ddp_zero.core.step.sharded_step import ShardedStep

Arrival = ReducedSegment | ReducedRuns


def hand_over(sharded: ShardedStep, arrivals: Sequence[Arrival], visible: VisibleGradients, publishes: bool) -> None:
    """Where owners have changed, send the sums from the old ones to the new ones. Then a collective.

    Every rank walks the parameters in the same order, so the blocking messages cannot deadlock.

    Args:
        sharded: knows the new owners.
        arrivals: the buckets of this iteration, and who got what.
        visible: shows gradients.
        publishes: whether gradients are shown on this rank.
    """
    comm, after = sharded.comm, sharded.binding.pieces
    pairs = ((arrival, index) for arrival in arrivals for index in arrival.pieces)
    moved = [(arrival, index) for arrival, index in pairs if arrival.pieces[index] != after[index]]
    if not moved:
        return
    every = comm.all_gather_ints([int(index in visible.taken) for _, index in moved])
    for place, (arrival, index) in enumerate(moved):
        was_taken = any(every[piece.owner][place] for piece in arrival.pieces[index])
        arrival.wait()
        total = _exchanged(sharded, arrival, index)
        if total is None:
            continue
        arrival.receive(index, total)
        if was_taken:
            visible.taken.add(index)
        if publishes and (sharded.table.params[index].grad is not None or index in visible.taken):
            visible.show(index, arrival.gradient(index), arrival.exact(index))


def _exchanged(sharded: ShardedStep, arrival: Arrival, index: int) -> Tensor | None:
    """Send what others own of a sum now. Returns what this rank owns of it now; None if that is nothing, or as before.

    A collective.
    """
    comm, param = sharded.comm, sharded.table.params[index]
    before, after = arrival.pieces[index], sharded.binding.pieces[index]
    old, new = piece_of(before, comm.group_rank), piece_of(after, comm.group_rank)
    mine = None if old is None else arrival.total(index)
    cuts = is_cut(before) or is_cut(after)
    found: list[tuple[slice, Mapping[str, Tensor]]] = []
    for move in moves(before, after):
        elements = slice(move.start, move.stop)
        if move.source == comm.group_rank and old is not None and mine is not None:
            comm.send_tree(_elements(mine, param, old, elements) if cuts else mine, move.target)
        elif move.target == comm.group_rank:
            found.append((elements, {"sum": comm.receive_tree(move.source, param.device)}))
    if new is None or new == old:
        return None
    if not cuts:
        return found[0][1]["sum"]
    if old is not None and mine is not None and old.start < new.stop and new.start < old.stop:
        kept = slice(max(old.start, new.start), min(old.stop, new.stop))
        found.append((kept, {"sum": _elements(mine, param, old, kept)}))
    whole: Tensor = joined(found, param, slice(new.start, new.stop) if is_cut(after) else None)["sum"]
    return whole


def _elements(total: Tensor, param: Tensor, piece: Piece, elements: slice) -> Tensor:
    """Some elements of the sum of a piece, 1-D and contiguous."""
    if total.shape == param.shape:
        return part_of(total, param, elements).contiguous()
    return total[elements.start - piece.start : elements.stop - piece.start].contiguous()
