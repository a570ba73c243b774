"""Putting a snapshot together after a restart: the ranks find the newest that is whole somewhere, and complete it.

1. Every host tells all others the seals of the parts in its folder.
2. All ranks compute the same candidate, the complete snapshot of the highest step.
3. Every host collects all of its parts in one folder: its own parts by links, which take no memory, the rest from the
   hosts that have them. Each part is checked against its checksums once on every host, by one of its ranks.
4. Parts that turned out to be damaged or out of reach are struck from the lists, and snapshots for which a host has no
   room; 2 begins again.

The folder that is left is a checkpoint, and is loaded as one.
"""

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_zero.checkpoint.folder import MARKER, Marker, marker_text
from ddp_zero.core.comm import Peers, logger
from ddp_zero.error_codes import coded
from ddp_zero.snapshots.connections import Address
from ddp_zero.snapshots.copies import Keeper, fetch_part
from ddp_zero.snapshots.memory_files import Budget, NoRoomError
from ddp_zero.snapshots.placement import Candidate, newest_complete, source_of
from ddp_zero.snapshots.seals import (
    GIVEN_UP,
    RESTORED,
    Seal,
    folders_given_up,
    folders_of_snapshots,
    holdings,
    names_of_part,
    verify_part,
    write_privately,
)

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMLINK)
"""Errors of a host whose folder cannot be written: parts may be whole, and no other source would help."""

Problem = tuple[str, int, str]
"""Where a part was to come from, or a snapshot could not be written; the part, or -1; and why."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of the ranks; here a host is a folder: ranks that see the same folder share all that is in it."""

    places: Sequence[str]  # for each rank, the name of its host
    rank: int  # this rank

    @property
    def here(self) -> str:
        return self.places[self.rank]

    def ranks_at(self, place: str) -> list[int]:
        return [rank for rank, one in enumerate(self.places) if one == place]

    @property
    def leads(self) -> bool:
        """True on the first rank of each host."""
        return self.ranks_at(self.here)[0] == self.rank

    def is_mine(self, part: int) -> bool:
        """True if this rank is the one of its host that collects a part."""
        ranks = self.ranks_at(self.here)
        return ranks[part % len(ranks)] == self.rank


@dataclass(frozen=True)
class Recovery:
    """Collects the parts of a snapshot on every host. All methods are collectives."""

    peers: Peers
    hosts: Hosts
    addresses: Sequence[Address]  # of each rank's keeper
    keeper: Keeper  # this rank's own
    root: Path  # the folder of the run on this host
    budget: Budget
    time_out: float  # seconds for which a peer may make no progress

    def restore(self, least_step: int) -> tuple[Path | None, list[str]]:
        """Collect the newest complete snapshot of at least ``least_step`` steps on every host.

        Returns:
            The folder, a checkpoint, or None; and a line for each newer snapshot, or part, that could not be used.

        Raises:
            RuntimeError: on every rank, if a host cannot write, and there is nothing else to go on from: a new training
                would remove snapshots that may be whole.
        """
        here: dict[Seal, list[Path]] = {}
        unreadable = ""
        try:
            for holding in holdings(self.root):
                here.setdefault(holding.seal, []).append(holding.folder)
        except OSError as error:
            unreadable = str(error)  # there may be more
        # on offer before the seals are told: peers may ask right after the gather
        self.keeper.on_offer = {(seal.snapshot, seal.rank): folders[0] for seal, folders in here.items()}
        offers, reasons = self._offers(here, unreadable)
        unwritable = False
        while True:
            candidate, incomplete = newest_complete(offers)
            if candidate is None or candidate.step < least_step:
                if unwritable and least_step < 0:
                    raise RuntimeError(
                        f"Expected to go on from a snapshot, got {'; '.join(reasons)}. Nothing was removed: make room "
                        "(files in /dev/shm that killed processes have left), or make the folder writable, and start "
                        "again; without fallback= there is nothing else to go on from. To begin anew, give a "
                        "different folder=. [ZERO-643]"
                    )
                return None, reasons + incomplete
            folder = self.root / f"{RESTORED}{candidate.name}"
            problems = self._collect(candidate, here, folder) or self._publish(candidate, folder)
            if not problems:
                return folder, reasons + incomplete
            for place, rank, reason in problems:
                unwritable |= rank < 0
                what = f"part of rank {rank} on {place}" if rank >= 0 else f"on {place}"
                reasons.append(f"snapshot of step {candidate.step}, {what}: {reason}")
                struck = [candidate.seals[rank]] if rank >= 0 else candidate.seals
                for one in offers if rank < 0 else (place,):
                    offers[one] = [seal for seal in offers[one] if seal not in struck]

    def _offers(self, here: Mapping[Seal, Sequence[Path]], unreadable: str) -> tuple[dict[str, list[Seal]], list[str]]:
        """The seals on each host, and a line for each host that could not be read."""
        mine = [seal.as_text() for seal in here] if self.hosts.leads else []
        told = self.peers.all_gather_text(json.dumps([mine, unreadable]))
        offers, reasons = dict[str, list[Seal]](), list[str]()
        for rank, (place, text) in enumerate(zip(self.hosts.places, told, strict=True)):
            lines, reason = json.loads(text)
            offers.setdefault(place, []).extend(Seal.of_text(one, f"the list of rank {rank}") for one in lines)
            reasons += [f"snapshots on {place}: {reason}"] if reason else []
        return offers, reasons

    def _publish(self, candidate: Candidate, folder: Path) -> list[Problem]:
        """Mark the collected snapshot as a checkpoint on every host; returns the problems of all ranks."""
        problems = []
        if self.hosts.leads:
            try:
                marker = Marker(candidate.step, tuple(seal.part for seal in candidate.seals))
                write_privately(folder / MARKER, marker_text(marker))
            except OSError as error:
                problems.append((self.hosts.here, -1, str(error)))
        return self._gather_problems(problems)  # nobody reads the marker before it is there

    def _gather_problems(self, problems: Sequence[Problem]) -> list[Problem]:
        told = self.peers.all_gather_text(json.dumps(problems))
        return [(place, rank, reason) for text in told for place, rank, reason in json.loads(text)]

    def _collect(self, candidate: Candidate, here: Mapping[Seal, Sequence[Path]], folder: Path) -> list[Problem]:
        """Collect this rank's share of the parts; returns the problems of all ranks."""
        hosts, problems = self.hosts, list[Problem]()
        for rank, seal in enumerate(candidate.seals):
            if not hosts.is_mine(rank):
                continue
            source = source_of(candidate, rank, hosts.here)
            try:
                if source == hosts.here:
                    _link_part(here[seal], folder, seal)
                else:
                    ranks = hosts.ranks_at(source)
                    address = self.addresses[ranks[rank % len(ranks)]]
                    fetch_part(address, self.time_out, seal, folder, self.budget)
            except NoRoomError as error:
                problems.append((hosts.here, -1, str(error)))  # no other source would help
            except (OSError, EOFError, ValueError, KeyError) as error:
                for name in reversed(names_of_part(rank)):
                    with suppress(OSError):
                        (folder / name).unlink(missing_ok=True)
                is_unwritable = isinstance(error, OSError) and error.errno in _UNWRITABLE
                problems.append((hosts.here, -1, str(error)) if is_unwritable else (source, rank, str(error)))
        return self._gather_problems(problems)


def set_aside_all_but(kept: Path | None, root: Path, peers: Peers, hosts: Hosts) -> list[Path]:
    """Take all snapshots but one away: from here on they belong to a past that training does not share. A collective.

    Returns, on the first rank of each host, their folders under hidden names, to be removed.
    """
    peers.all_gather_ints([0])  # every rank has read all that it needs
    aside: list[Path] = []
    if hosts.leads:
        try:
            aside += folders_given_up(root)  # of an earlier attempt that was killed meanwhile
            for path in folders_of_snapshots(root):
                if path != kept:
                    # at once under a name that no restart looks for: giving back the memory takes a second for some
                    # gigabytes
                    name = root / f"{GIVEN_UP}{secrets.token_hex(8)}"
                    path.rename(name)
                    aside.append(name)
                    if path.parent != root:
                        with suppress(OSError):
                            path.parent.rmdir()  # if it holds nothing else
        except OSError as error:
            logger.warning(coded(f"Earlier snapshots in {root} could not be removed: {error}", "[ZERO-645]"))
    peers.all_gather_ints([0])  # nobody writes a new snapshot before
    return aside


def remove(folders: Iterable[Path]) -> None:
    """Remove folders, and give back their memory."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _link_part(sources: Sequence[Path], folder: Path, seal: Seal) -> None:
    """Link the first whole part of several; raises ValueError or OSError if none is whole."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for number, source in enumerate(sources, start=1):
        try:
            for name in names_of_part(seal.rank) if source != folder else ():
                (folder / name).unlink(missing_ok=True)
                os.link(source / name, folder / name, follow_symlinks=False)
            verify_part(folder, seal)
            return
        except (OSError, ValueError):
            if number == len(sources):
                raise
