"""Decisions that all ranks take alike: receivers of copies, the slot that is written next, the snapshot to restore."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from ddp_zero.snapshots.seals import SLOTS, Seal


def receivers(places: Sequence[str], copies: int) -> list[list[int]]:
    """For each rank, the ranks that keep a copy of its part.

    Copies go to the next hosts, in the order of their first ranks, one to each; on a host, to the rank of the same
    place among its ranks, so that load is even. If all ranks are on one host, they go to the next ranks. There are
    fewer than asked for if there are fewer other hosts, or ranks. ``places`` has the host of each rank.
    """
    ranks_at: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        ranks_at.setdefault(place, []).append(rank)
    hosts = list(ranks_at.values())
    if len(hosts) == 1:
        world_size = len(places)
        return [[(rank + 1 + copy) % world_size for copy in range(min(copies, world_size - 1))] for rank in hosts[0]]
    found: list[list[int]] = [[] for _ in places]
    for number, ranks in enumerate(hosts):
        for local, rank in enumerate(ranks):
            for copy in range(min(copies, len(hosts) - 1)):
                there = hosts[(number + 1 + copy) % len(hosts)]
                found[rank].append(there[local % len(there)])
    return found


class Progress(IntEnum):
    """State of a rank's part of the last snapshot; the lowest one of all ranks is the snapshot's."""

    LATE = 0  # its checksums are being computed, or it is being sent
    FAILED = 1  # the part is not whole
    KEPT = 2  # the part is whole, a copy is not
    COPIED = 3  # the part and its copies are whole, or nothing was written yet


@dataclass
class Turns:
    """The two slots, in turns.

    ======  =========================================================================================
    state   of the last snapshot, and the consequence when the next is due
    ======  =========================================================================================
    LATE    none is taken: both slots stay
    FAILED  its slot is written again
    KEPT    complete after a crash that loses no host; a copied snapshot in the other slot stays beside it
    COPIED  complete whatever host is lost: the older one's slot is written next
    ======  =========================================================================================
    """

    last: str | None = None  # the slot that was written last; None before the first
    copied: str | None = None  # the slot of the newest snapshot with all its copies
    kept: str | None = None  # the slot of a newer snapshot without them

    def next(self, lowest: Progress) -> str:
        """The slot to write now, given the state of the last snapshot, which is not late."""
        if self.last is not None:
            if lowest is Progress.COPIED:
                self.copied, self.kept = self.last, None
            elif lowest is Progress.KEPT:
                self.kept = self.last
            elif self.kept == self.last:
                self.kept = None
        spared = self.copied or self.kept
        self.last = SLOTS[1] if spared == SLOTS[0] else SLOTS[0]
        return self.last


@dataclass(frozen=True)
class Candidate:
    """A snapshot whose parts are all on some host."""

    seals: tuple[Seal, ...]  # of each rank's part
    places: tuple[tuple[str, ...], ...]  # for each part, the hosts that have it

    @property
    def step(self) -> int:
        return self.seals[0].step

    @property
    def name(self) -> str:
        return self.seals[0].snapshot


def newest_complete(offers: Mapping[str, Collection[Seal]]) -> tuple[Candidate | None, list[str]]:
    """The complete snapshot of the highest step, or None; and a line for each newer snapshot that is not complete."""
    known: dict[str, dict[Seal, list[str]]] = {}
    for place, seals in offers.items():
        for seal in seals:
            hosts = known.setdefault(seal.snapshot, {}).setdefault(seal, [])
            if place not in hosts:
                hosts.append(place)
    reasons = []
    # of two snapshots of one step, from a training and its repetition, any will do: the order must only be the same
    for name, found in sorted(known.items(), key=lambda one: (max(seal.step for seal in one[1]), one[0]), reverse=True):
        by_rank = {seal.rank: seal for seal in found}
        first = next(iter(found))
        if len({(seal.step, seal.world_size) for seal in found}) > 1 or len(by_rank) < len(found):
            reasons.append(f"snapshot of step {first.step} ({name}): its parts contradict each other")
            continue
        missing = [rank for rank in range(first.world_size) if rank not in by_rank]
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            reasons.append(f"snapshot of step {first.step}: no part of rank {shown} of {first.world_size}")
            continue
        seals = tuple(by_rank[rank] for rank in range(first.world_size))
        return Candidate(seals, tuple(tuple(sorted(found[seal])) for seal in seals)), reasons
    return None, reasons


def source_of(candidate: Candidate, part: int, place: str) -> str:
    """The host from which a host takes a part: itself, or the hosts that have it in turns."""
    places = candidate.places[part]
    return place if place in places else places[part % len(places)]
