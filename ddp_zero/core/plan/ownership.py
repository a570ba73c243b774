"""Ownership of the elements of parameters, and the moves when ownership changes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.values.shapes import Part


@dataclass(frozen=True)
class Piece:
    """The elements of a parameter that one rank owns: ``start`` to ``stop`` in memory order."""

    owner: GroupRank
    start: int
    stop: int


Pieces = tuple[Piece, ...]
"""Pieces of one parameter: at least one, in order, covering all elements, each with a different owner."""


@dataclass(frozen=True)
class Move:
    """Elements of a parameter that ``source`` has owned, and ``target`` owns from now on."""

    source: GroupRank
    target: GroupRank
    start: int
    stop: int


def whole(owner: GroupRank, numel: int) -> Pieces:
    return (Piece(owner, 0, numel),)


def home(pieces: Pieces) -> GroupRank:
    """The owner of the first element: the rank that acts for the parameter where exactly one rank must."""
    return pieces[0].owner


def is_cut(pieces: Pieces) -> bool:
    return len(pieces) > 1


def describe_owners(pieces: Pieces, name: Callable[[GroupRank], str]) -> str:
    first, last = name(home(pieces)), name(pieces[-1].owner)
    return f"{first} to {last}, each a part of it," if is_cut(pieces) else first


def piece_of(pieces: Pieces, rank: GroupRank) -> Piece | None:
    return next((piece for piece in pieces if piece.owner == rank), None)


def part_between(start: int, stop: int, numel: int) -> Part:
    """Some of ``numel`` elements as a part."""
    return None if (start, stop) == (0, numel) else slice(start, stop)


def parts_of(pieces: Sequence[Pieces], rank: GroupRank) -> dict[int, Part]:
    """The parameters of which a rank owns anything, by index, and which part of each."""
    return {
        index: part_between(piece.start, piece.stop, held[-1].stop)
        for index, held in enumerate(pieces)
        for piece in held
        if piece.owner == rank
    }


def moves(before: Pieces, after: Pieces) -> list[Move]:
    """The elements of one parameter by their old and new owner, in order."""
    overlaps = (
        Move(old.owner, new.owner, max(old.start, new.start), min(old.stop, new.stop))
        for old in before
        for new in after
    )
    is_empty = before[-1].stop == 0  # a parameter without elements has an owner all the same
    return [move for move in overlaps if move.start < move.stop or is_empty]


def check_pieces(pieces: Sequence[Piece], numel: int, world_size: int, param: int) -> None:
    """Assert that the pieces cover the parameter end to end, with distinct owners within the group."""
    owners = [piece.owner for piece in pieces]
    assert all(0 <= owner < world_size for owner in owners), f"parameter {param} has owners {owners} of {world_size}"
    ends = [0, *(piece.stop for piece in pieces)]
    is_covered = [*(piece.start for piece in pieces), numel] == ends and len(set(owners)) == len(owners)
    assert is_covered, f"pieces of parameter {param} with {numel} elements: {pieces}"
