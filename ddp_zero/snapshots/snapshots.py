"""Taking snapshots in the training loop, and going on from one.

All ranks agree in the loop, at every step that is due, with one small all-gather: on the step, and on how the snapshot
before it went. So the order of everything is a function of the steps, and no background work communicates on process
groups. A thread of each rank checksums, seals and sends its part meanwhile; when the next snapshot is due, it is done,
has failed, or is late: see `ddp_zero.snapshots.placement.Turns`.
"""

import json
import os
import socket
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddp_zero import checkpoint
from ddp_zero.checkpoint import Loaded, Saving, Writer, writer_of
from ddp_zero.checkpoint.folder import complete_in, folder_of, read_marker
from ddp_zero.checkpoint.loading import DoesNotFitError
from ddp_zero.checkpoint.rows import capture
from ddp_zero.checkpoint.tensor_file import text_and_tensors
from ddp_zero.checkpoint.view import View, members_of, process_groups
from ddp_zero.core.comm import Agreement, Communicator, Peers, logger
from ddp_zero.error_codes import coded
from ddp_zero.insight.stats import SNAPSHOT_COUNTS
from ddp_zero.optimizer import engine_of, shard_of
from ddp_zero.parallel.whole_model import Layout, RankValues
from ddp_zero.snapshots.connections import Address, listen
from ddp_zero.snapshots.copies import Current, Keeper, lower_priority, send_copy
from ddp_zero.snapshots.memory_files import Budget, NoRoomError, OwnPart, Staged, bytes_in, private_folder
from ddp_zero.snapshots.placement import Progress, Turns, receivers
from ddp_zero.snapshots.random_state import random_states, set_random_states
from ddp_zero.snapshots.recovery import Hosts, Recovery, remove, set_aside_all_but
from ddp_zero.snapshots.seals import rank_folder
from ddp_zero.values import Tree

PathLike = str | os.PathLike[str]

_FORMAT = "ddp_zero snapshot"
_COMPLAINT_SECONDS = 60.0


class Courier:
    """A thread of low priority that does one job after the other; it keeps no process alive."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="ddp_zero snapshot", daemon=True).start()

    def submit(self, job: Callable[[], None]) -> None:
        """Do a job, which raises nothing, after all earlier jobs."""
        self._jobs.put(job)

    def wait(self) -> None:
        is_done = threading.Event()
        self._jobs.put(is_done.set)
        is_done.wait()

    def stop(self) -> None:
        """End the thread after the jobs so far."""
        self._jobs.put(None)

    def _run(self) -> None:
        lower_priority()
        while (job := self._jobs.get()) is not None:
            job()


class Complaints:
    """Decides which warnings are logged: at most one a minute of each kind, or a lasting cause would fill the log."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def is_due(self, kind: str) -> bool:
        now = time.monotonic()
        if now - self._last.get(kind, float("-inf")) < _COMPLAINT_SECONDS:
            return False
        self._last[kind] = now
        return True


@dataclass
class _Session:
    """State between `Snapshots.load` and `Snapshots.close`."""

    # weak: process groups end where their users end them, see `ddp_zero.checkpoint.writer_of`
    writer: "weakref.ref[Writer]"
    hosts: Hosts
    keeper: Keeper
    own: OwnPart
    run: str  # names this attempt of the job, in the names of its snapshots
    keepers: list[Address]  # of the ranks that keep copies of this rank's part
    senders: frozenset[int]  # ranks of whose parts this rank keeps copies
    layout: Layout | None
    digest: int  # of the `RankValues` from which the layout was made
    restored: Path | None = None  # the folder of the restored snapshot, until a new snapshot is complete
    turns: Turns = field(default_factory=Turns)
    last_step: int = 0  # step of the last snapshot
    # of this rank's part of the last snapshot; written by the courier, read by training's thread at the next snapshot
    progress: Progress = Progress.COPIED
    courier: Courier = field(default_factory=Courier)

    @property
    def peers(self) -> Peers:
        """The ranks. Raises RuntimeError after the end of their process group."""
        writer = self.writer()
        if writer is None:
            raise RuntimeError(
                "Expected the process group that Snapshots were used in, got its end. Build new Snapshots. [ZERO-641]"
            )
        return writer.peers


class Snapshots:
    """Snapshots of the training state in the memory of the hosts, and a restart from the newest.

    A snapshot holds the state after a step: each rank's share of the parameters, optimizer state, masters and loss
    scale, the states of random number generators, and the objects in ``extra`` and ``rank_extra``. It is written in the
    format of `ddp_zero.checkpoint`, with its checksums, below ``folder``, which this user alone can enter. Two are
    kept; the older one is given up when the newer is complete on all ranks, copies included. Every rank builds one with
    equal arguments, after the optimizer.

    Taking one stops the loop for one small all-gather and one copy of this rank's shard into the memory of the file.
    Of a parameter that is cut, each rank writes the elements that it owns; with a `ParallelOptimizer`, their states are
    first gathered where their parameter begins, as for a checkpoint. A snapshot that fails (a full memory, a peer that
    does not answer) or is late is left out: a warning in the log and a number in ``opt.stats()``; training goes on. The
    inspiration is Gemini (Wang et al., SOSP 2023), which keeps whole checkpoints in the memory of other machines.

    Args:
        model: as for `ddp_zero.checkpoint.save`.
        optimizer: as for `ddp_zero.checkpoint.save`.
        folder: a folder of this run on each host, memory-backed, such as ``"/dev/shm/run-1"``; created if need be.
        every: number of steps from one snapshot to the next.
        copies: number of other hosts that keep a copy of each part; if there is one host, of other ranks.
        fallback: folder of this run's checkpoints on storage that all ranks share, for `load` and `save`.
        extra: objects with ``state_dict()`` and ``load_state_dict()`` whose states are equal on all ranks, by name,
            such as a scheduler.
        rank_extra: the same for objects whose states differ between ranks, such as a data loader. They are restored at
            the same number of ranks only.
        limit: bytes that the files of one host may take together; None for all that is free, but for 5%.
        time_out: seconds for which a rank that is sent a copy, or asked for it, may make no progress.

    Attributes:
        steps: number of calls of `step` so far, those before a restart included.

    Raises:
        ValueError: for a number out of range, an empty path, or a ``fallback`` in ``folder``.
        TypeError: for an object in ``extra`` or ``rank_extra`` without the two methods.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        folder: PathLike,
        every: int = 10,
        copies: int = 1,
        fallback: PathLike | None = None,
        extra: Mapping[str, Any] | None = None,
        rank_extra: Mapping[str, Any] | None = None,
        limit: int | None = None,
        time_out: float = 60.0,
    ) -> None:
        for name, number, least in (("every", every, 1), ("copies", copies, 0), ("limit", limit, 1)):
            if (number is not None or name != "limit") and (type(number) is not int or number < least):
                raise ValueError(
                    f"Expected {name} to be an int of at least {least}, got {number!r}. Pass such a number, or leave "
                    f"{name}= out. [ZERO-641]"
                )
        if not time_out > 0:
            raise ValueError(
                f"Expected time_out to be positive, got {time_out!r}. Pass seconds, or leave time_out= out. [ZERO-641]"
            )
        self.steps = 0
        self._model, self._optimizer = model, optimizer
        self._root = folder_of(folder).absolute()
        self._every, self._copies, self._time_out = every, copies, time_out
        self._fallback = None if fallback is None else folder_of(fallback)
        if self._fallback is not None and self._fallback.resolve().is_relative_to(self._root.resolve()):
            raise ValueError(
                f"Expected fallback= outside folder=, the snapshots' own {self._root}, got {self._fallback}. Give a "
                "folder on storage that all ranks share. [ZERO-641]"
            )
        self._extra, self._rank_extra = dict(extra or {}), dict(rank_extra or {})
        for name, one in [*self._extra.items(), *self._rank_extra.items()]:
            if not (callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))):
                raise TypeError(
                    f"Expected an object with state_dict() and load_state_dict() as {name!r}, got "
                    f"{type(one).__name__}. Leave it out, or pass an object that has both. [ZERO-641]"
                )
        self._budget = Budget(self._root, limit, time_out)
        self._session: _Session | None = None
        self._has_loaded = False
        self._complaints = Complaints()
        self._numbers = dict.fromkeys(SNAPSHOT_COUNTS, 0.0)
        for one in members_of(optimizer):
            shard_of(one).trace.snapshots = self._numbers  # shown by `opt.stats()`

    def load(self) -> Loaded | None:
        """Go on from the newest snapshot, or from a newer checkpoint in ``fallback``; once, before the first step.

        The number of ranks, the stage, and the partition may have changed. Afterwards all other snapshots are removed:
        training takes its own course from here. A collective.

        Returns:
            The result of the load; the first of its ``notes`` says whether it was a snapshot or a checkpoint, and the
            next ones why no newer snapshot was loaded. None if there was neither.

        Raises:
            PermissionError: if other users can enter ``folder``.
            ValueError: if arguments differ between ranks, or the snapshot does not fit the model or the objects.
            TypeError: if the state of an object cannot be saved without pickle.
            RuntimeError: if that happened on a different rank, or `load` was called before; or if a host has no room to
                put the snapshot together, and there is nothing else to go on from.
        """
        if self._has_loaded:
            raise RuntimeError(
                "Expected one call of Snapshots.load(), got a second one. Build a new Snapshots to load again. "
                "[ZERO-641]"
            )
        self._has_loaded = True
        peers, session, recovery = self._open()
        with Agreement(peers, "Snapshots.load"):
            on_disk = -1 if self._fallback is None or peers.group_rank != 0 else _newest_step(self._fallback)
        on_disk = peers.all_gather_ints([on_disk])[0][0]
        session.restored, reasons = recovery.restore(on_disk)
        source = session.restored or (self._fallback if on_disk >= 0 else None)
        loaded = None
        if source is not None:
            loaded = self._loaded_from(source, is_verified=session.restored is not None)
        with Agreement(peers, "restoring extra and generators"):
            if loaded is not None:
                loaded = self._restore_objects(loaded, session.restored is not None, reasons)
                self.steps = session.last_step = loaded.step
        # not before every rank has loaded: a crash up to here leaves all snapshots in place
        session.keeper.on_offer = {}
        aside = set_aside_all_but(session.restored, self._root, peers, session.hosts)
        # in the thread, beside the first steps; the first snapshot waits for it
        session.courier.submit(partial(remove, aside))
        if peers.group_rank == 0:
            for reason in reasons:
                logger.warning(coded(f"A newer snapshot is not restored: {reason}", "[ZERO-645]"))
            logger.info("%s", "nothing to go on from" if loaded is None else loaded.notes[0])
        self._session = session
        self._note(snapshot_step=self.steps if session.restored is not None else 0)
        return loaded

    def step(self) -> None:
        """Count a step, and take a snapshot if it is due: at the end of each iteration, on every rank.

        Raises:
            RuntimeError: before `load`; between backward and step; inside Join; or on every rank, if ranks have called
                it unequally often.
        """
        session = self._session
        if session is None:
            raise RuntimeError(
                "Expected Snapshots.load() before step(), got no call of it, or close(). Call it once before the first "
                "step: it finds the snapshot to go on from, if there is one. [ZERO-641]"
            )
        self.steps += 1
        if self.steps % self._every == 0:
            started = time.perf_counter()
            self._take(session)
            took = time.perf_counter() - started
            self._note(snapshot_s=took, total_snapshot_s=self._numbers["total_snapshot_s"] + took)

    def wait(self) -> bool:
        """Wait until this rank's part of the last snapshot is sealed and sent; False if that has failed."""
        session = self._session
        if session is None:
            return False
        session.courier.wait()
        return session.progress is Progress.COPIED

    def save(self, *, keep: int | None = None, background: bool = False) -> Saving:
        """Save a checkpoint in ``fallback``, from which `load` restores as much as from a snapshot. A collective.

        Args:
            keep: as for `ddp_zero.checkpoint.save`.
            background: as for `ddp_zero.checkpoint.save`.

        Returns:
            The save. For errors see `ddp_zero.checkpoint.save`.

        Raises:
            ValueError: without ``fallback``.
        """
        if self._fallback is None:
            raise ValueError(
                "Expected fallback=, a folder for checkpoints, got None. Call ddp_zero.checkpoint.save(), or build "
                "Snapshots with it. [ZERO-641]"
            )
        values = {"extra": self._shared_values(), "rank_extra": self._rank_values(), "step": self.steps}
        where = self._fallback, self._model, self._optimizer
        return checkpoint.save(*where, **values, keep=keep, background=background)

    def stats(self) -> dict[str, float]:
        """The numbers about snapshots in ``opt.stats()``, for optimizers that have none."""
        return dict(self._numbers)

    def close(self, *, keep: bool = False) -> None:
        """End, and free the memory: at the end of a run, when its last checkpoint is on disk. A collective.

        Args:
            keep: leave the last snapshot, complete, for a later `load`.
        """
        session, self._session = self._session, None
        if session is None:
            return
        # peers may still be sending copies to this rank, so all end together
        session.courier.wait()
        session.courier.stop()
        session.peers.all_gather_ints([0])  # all copies have arrived, or have failed
        session.keeper.expect(None)
        if not keep:
            remove(set_aside_all_but(None, self._root, session.peers, session.hosts))
            session.peers.all_gather_ints([0])  # the memory is free when any rank returns

    # Opening and restoring

    def _open(self) -> tuple[Peers, _Session, Recovery]:
        groups = process_groups(self._model, self._optimizer, is_save=True)
        # connections of their own: a checkpoint may be saved in the background at any time
        writer = writer_of(groups, "snapshots")
        peers = writer.peers
        if groups:  # other ranks wait for this rank meanwhile, for their own time-out
            self._budget.patience = min(self._time_out, Communicator(groups[0]).time_out.total_seconds() / 2)
        folder = rank_folder(self._root, peers.group_rank)
        with Agreement(peers, "Snapshots.load") as agreement:
            agreement.declare("every and copies", (self._every, self._copies))
            agreement.declare("names in extra and rank_extra", (sorted(self._extra), sorted(self._rank_extra)))
            agreement.declare("fallback", self._fallback)
            view = View.of(self._model, self._optimizer)
            view.declare(agreement, is_save=True)
            text_and_tensors([self._shared_values(), self._rank_values()], "a snapshot")
            private_folder(self._root)
            place = _place(self._root)
            keeper = Keeper(folder, self._budget, self._time_out)
            address = listen(keeper, Communicator(groups[0]).store_host if groups else None, self._time_out)
        layout = view.layout(peers)
        mine = [_machine(), place, address.as_text(), os.urandom(16).hex()]
        told = [json.loads(one) for one in peers.all_gather_text(json.dumps(mine))]
        machines, places, texts, names = zip(*told, strict=True)
        hosts = Hosts(places, peers.group_rank)
        addresses = list(map(Address.of_text, texts))
        targets = receivers(machines, self._copies)
        if self._copies > len(targets[0]) and peers.group_rank == 0 and peers.world_size > 1:
            logger.warning(
                f"Expected copies={self._copies} of each part of a snapshot, got room for {len(targets[0])}: the job "
                f"has {len(set(machines))} hosts and {peers.world_size} ranks. [ZERO-645]"
            )
        session = _Session(
            weakref.ref(writer),
            hosts,
            keeper,
            OwnPart(folder, peers.group_rank, self._budget),
            run=names[0],
            keepers=[addresses[rank] for rank in targets[peers.group_rank]],
            senders=frozenset(rank for rank, theirs in enumerate(targets) if peers.group_rank in theirs),
            layout=layout,
            digest=_digest(view.rank_values),
        )
        recovery = Recovery(peers, hosts, addresses, keeper, self._root, self._budget, self._time_out)
        return peers, session, recovery

    def _loaded_from(self, source: Path, is_verified: bool) -> Loaded:
        try:
            return checkpoint.restore(source, self._model, self._optimizer, is_verified=is_verified)
        except DoesNotFitError as error:
            message = (
                f"{error} Snapshots.load() restores what fits as a whole: to go on with a changed model, load "
                f"{str(source)!r} with checkpoint.load() once, and give Snapshots a different folder= and fallback=. "
                "Set its attribute steps to the loaded step."
            )
            raise ValueError(coded(message, "[ZERO-615]")) from error

    def _restore_objects(self, loaded: Loaded, is_snapshot: bool, reasons: Sequence[str]) -> Loaded:
        """Restore objects and generators, and tell in the notes what was restored."""
        kind = "snapshot" if is_snapshot else "checkpoint"
        notes = [f"step {loaded.step} is restored from the {kind} {loaded.folder}", *reasons, *loaded.notes]
        if not isinstance(loaded.extra, dict) or loaded.extra.get("format") != _FORMAT:
            notes.append("extra and generators are not restored: Snapshots.save() has not written this checkpoint")
            return replace(loaded, notes=tuple(notes))
        shared = loaded.extra["objects"]
        mine = loaded.rank_extra
        _check_names("extra", shared, self._extra)
        for name, one in self._extra.items():
            one.load_state_dict(shared[name])
        if mine is None:
            notes.append("rank_extra and generators are not restored: the number of ranks has changed")
            return replace(loaded, extra=shared, notes=tuple(notes))
        _check_names("rank_extra", mine["objects"], self._rank_extra)
        for name, one in self._rank_extra.items():
            one.load_state_dict(mine["objects"][name])
        # the last: loading an object may draw numbers
        set_random_states(mine["generators"], self._model)
        return replace(loaded, extra=shared, rank_extra=mine["objects"], notes=tuple(notes))

    def _shared_values(self) -> Tree:
        return {"format": _FORMAT, "objects": {name: one.state_dict() for name, one in self._extra.items()}}

    def _rank_values(self) -> Tree:
        states = {name: one.state_dict() for name, one in self._rank_extra.items()}
        return {"objects": states, "generators": random_states(self._model)}

    # Taking a snapshot

    def _take(self, session: _Session) -> None:
        peers = session.peers
        _check_not_joined(self._optimizer)
        view = View.of(self._model, self._optimizer)
        if view.state is not None:
            view.state.check()
        digest = _digest(view.rank_values)
        if session.turns.last is None:
            # before the gather: no rank of this host then finds memory taken that is being given back
            session.courier.wait()
        # the one collective, at the same steps on every rank; parts of different steps must not become one snapshot
        rows = peers.all_gather_ints([self.steps, session.progress, int(digest != session.digest)])
        steps, outcomes, changes = zip(*rows, strict=True)
        if len(set(steps)) > 1:
            raise RuntimeError(
                f"Expected equally many calls of Snapshots.step() on every rank, got {list(steps)} by rank. Call it "
                "once at the end of each iteration, on every rank. [ZERO-641]"
            )
        if any(changes):
            # a second collective, which all ranks enter: they have seen the same rows
            session.layout = view.layout(peers)
            session.digest = digest
        lowest = Progress(min(outcomes))
        if lowest is Progress.LATE:
            self._note(late_snapshots=self._numbers["late_snapshots"] + 1)
            if self._complaints.is_due("late"):
                logger.warning(
                    f"The snapshot of step {self.steps} is left out: the one of step {session.last_step} is not "
                    "written on all ranks yet. If this lasts, raise every=. [ZERO-645]"
                )
            return
        self._settle(session, lowest)
        slot = session.turns.next(lowest)
        name = f"{session.run}-{self.steps}"
        session.last_step = self.steps
        # peers may send as soon as they have passed the gather
        session.keeper.expect(Current(name, slot, session.senders))
        session.progress = Progress.FAILED  # until the copy is made
        try:
            extra, rank_extra = self._shared_values(), self._rank_values()
            part = capture(view, session.layout, peers, extra, rank_extra)
            text, tensors = part.as_text("a snapshot")
            staged = session.own.stage(slot, text, tensors)
        except (NoRoomError, OSError, MemoryError, TypeError) as error:
            self._fail(error)
            return
        # from here on the slot is the courier's, until it reports the outcome
        session.progress = Progress.LATE
        finish = partial(self._finish, session, staged, name, self.steps, peers.group_rank, peers.world_size)
        session.courier.submit(finish)

    def _settle(self, session: _Session, lowest: Progress) -> None:
        """Note the outcome of the last snapshot, which is the same on all ranks."""
        if session.turns.last is None or lowest is Progress.FAILED:
            return
        self._note(snapshots=self._numbers["snapshots"] + 1)
        if lowest is Progress.COPIED:
            self._note(snapshot_step=session.last_step)
            if session.restored is not None and session.hosts.leads:
                # no longer needed on any host; in the thread, since giving back much memory takes time
                session.courier.submit(partial(remove, [session.restored]))
            session.restored = None

    def _finish(self, session: _Session, staged: Staged, name: str, step: int, rank: int, world_size: int) -> None:
        """Seal this rank's part, and send it to the keepers of its copies. In the courier's thread."""
        try:
            seal, text = staged.complete(name, step, rank, world_size)
        except Exception as error:  # whatever it is, training goes on
            self._fail(error, step)
            session.progress = Progress.FAILED
            return
        progress = Progress.COPIED
        for address in session.keepers:
            try:
                send_copy(address, self._time_out, seal, text, staged.memory)
            except Exception as error:
                progress = Progress.KEPT
                self._note(failed_snapshot_copies=self._numbers["failed_snapshot_copies"] + 1)
                if self._complaints.is_due("copy"):
                    message = f"A copy of this rank's part of the snapshot of step {step} was not made: {error}"
                    logger.warning(coded(message, "[ZERO-645]"))
        self._note(snapshot_bytes=bytes_in(self._root))
        # the last: from here on training's thread may write to either slot
        session.progress = progress

    def _fail(self, error: BaseException, step: int | None = None) -> None:
        self._note(failed_snapshots=self._numbers["failed_snapshots"] + 1)
        if self._complaints.is_due("failed"):
            message = f"The snapshot of step {step or self.steps} has failed on this rank: {error}"
            logger.warning(coded(message, "[ZERO-645]"))

    def _note(self, **numbers: float) -> None:
        # the courier never counts a number that training's thread counts meanwhile: one snapshot ends before the next
        self._numbers.update(numbers)


def _machine() -> str:
    """A name of this machine; torchrun's number of the host tells containers apart that share a name."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


def _place(root: Path) -> str:
    """A name of a folder, the same for all ranks that see it, and for no others."""
    found = root.stat()
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return f"{socket.gethostname()}:{root} ({boot} {found.st_dev} {found.st_ino})"


def _check_not_joined(optimizer: Optimizer | None) -> None:
    if any(engine_of(one).attachment.in_join for one in members_of(optimizer)):
        raise RuntimeError(
            "Snapshots.step() is not supported inside Join: ranks that have joined would not take part. Give every "
            "rank the same number of batches, or take snapshots outside the Join context. [ZERO-641]"
        )


def _check_names(what: str, saved: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    if saved.keys() != live.keys():
        raise ValueError(
            f"Expected {what} with the names that were saved, {sorted(saved)}, got {sorted(live)}. Give Snapshots "
            "these; the rest may go once they are loaded. [ZERO-641]"
        )


def _newest_step(folder: Path) -> int:
    """The step of the newest complete checkpoint in a folder; -1 if there is none."""
    found = complete_in(folder)
    return read_marker(found[-1]).step if found else -1


def _digest(rank_values: RankValues | None) -> int:
    return 0 if rank_values is None else zlib.crc32(rank_values.as_text().encode())
