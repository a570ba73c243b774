"""Copies of parts on other hosts: sent after each snapshot, and fetched after a restart by a host that has lost parts.

Ranks talk on connections of their own, `ddp_zero.snapshots.connections`, with proofs that both know the job's secret,
in threads of low priority. A receiver writes from the connection into the mapped file, and seals a part when all of it
is there. Elements travel unencrypted, as everything else of a training job.
"""

import os
import socket
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_zero.checkpoint.folder import part_name, read_text, tensor_file_name
from ddp_zero.core.state import MOST_REQUEST_BYTES, receive_frame, receive_into, send_frame
from ddp_zero.snapshots.connections import Address, call, send_all
from ddp_zero.snapshots.memory_files import Budget, NoRoomError, PartFile
from ddp_zero.snapshots.seals import Seal, verify_part
from ddp_zero.tools.files import open_regular

_NICENESS = 10
_LOWER_EFFORT = 0x04  # in the field of service classes of IP packets: RFC 8622


@dataclass(frozen=True)
class Current:
    """The snapshot that is being written."""

    snapshot: str  # its name
    slot: str  # the folder of each rank that it is written to
    senders: Collection[int]  # ranks that send this rank a copy of their part


def lower_priority() -> None:
    """Let this thread run when training's threads leave a processor idle, as far as the system can."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class Keeper:
    """Keeps copies of other ranks' parts in this rank's folder, and gives out parts. Answers in threads.

    ``time_out`` is in seconds: a sender may make no progress for so long, or come too early.
    """

    def __init__(self, folder: Path, budget: Budget, time_out: float) -> None:
        self.on_offer: Mapping[tuple[str, int], Path] = {}  # folders of parts to give out, by snapshot and rank
        self._folder, self._budget, self._time_out = folder, budget, time_out
        self._current: Current | None = None
        self._changed = threading.Condition()
        self._files: dict[tuple[str, int], PartFile] = {}
        self._turns: dict[tuple[str, int], threading.Lock] = {}
        self._senders: dict[tuple[str, int], socket.socket] = {}

    def expect(self, current: Current | None) -> None:
        """Accept copies of this snapshot from now on, and of no other."""
        with self._changed:
            self._current = current
            self._changed.notify_all()

    def answer(self, connection: socket.socket) -> None:
        # in a thread of the connection, at any moment of a step of training
        lower_priority()
        request = receive_frame(connection, MOST_REQUEST_BYTES)
        snapshot = str(request.get("snapshot"))
        rank = int(request.get("rank", -1))
        if request.get("wants") == "copy":
            send_frame(connection, self._keep(connection, snapshot, rank, int(request.get("nbytes", 0))))
        else:
            self._give(connection, snapshot, rank)

    # Copies

    def _keep(self, connection: socket.socket, snapshot: str, rank: int, nbytes: int) -> dict[str, Any]:
        current = self._when_expected(snapshot)
        if current is None or rank not in current.senders:
            return {"refused": f"it does not write snapshot {snapshot}, or keeps no copy for rank {rank}"}
        key = current.slot, rank
        with self._turn(key, connection) as is_mine:
            if not is_mine:
                return {"refused": "it still receives an earlier copy"}
            file = self._files.setdefault(key, PartFile(self._folder / current.slot, rank, self._budget))
            try:
                memory = file.begin(nbytes)
            except (NoRoomError, OSError) as error:
                return {"refused": str(error)}
            send_frame(connection, {"ready": True})
            receive_into(connection, memory)
            last = receive_frame(connection)
            seal = Seal.of_text(str(last["seal"]), "a copy")
            with self._changed:
                # the slot may belong to a later snapshot by now: a sender that was late has been given up
                if self._current != current or (seal.snapshot, seal.rank) != (snapshot, rank):
                    return {"refused": "it has given up this copy"}
                try:
                    file.complete(str(last["part"]), seal)
                except OSError as error:
                    return {"refused": str(error)}
        return {"kept": True}

    def _when_expected(self, snapshot: str) -> Current | None:
        def is_here() -> bool:
            return self._current is not None and self._current.snapshot == snapshot

        # this rank's training thread may reach the step of the snapshot a moment after the sender's
        with self._changed:
            return self._current if self._changed.wait_for(is_here, self._time_out / 2) else None

    @contextmanager
    def _turn(self, key: tuple[str, int], connection: socket.socket) -> Iterator[bool]:
        """One sender at a time writes to a file; a new sender ends the earlier copy."""
        with self._changed:
            lock = self._turns.setdefault(key, threading.Lock())
            earlier = self._senders.get(key)
        if earlier is not None:
            with suppress(OSError):
                earlier.shutdown(socket.SHUT_RDWR)  # its thread wakes up, and leaves the file
        is_mine = lock.acquire(timeout=self._time_out / 2)
        try:
            if is_mine:
                self._senders[key] = connection
            yield is_mine
        finally:
            if is_mine:
                self._senders.pop(key, None)
                lock.release()

    # Lost parts

    def _give(self, connection: socket.socket, snapshot: str, rank: int) -> None:
        folder = self.on_offer.get((snapshot, rank))
        if folder is None:
            send_frame(connection, {"refused": f"it has no part of rank {rank} of snapshot {snapshot}"})
            return
        path = folder / tensor_file_name(rank)
        with open_regular(path) as file:
            nbytes = os.fstat(file.fileno()).st_size
            send_frame(connection, {"nbytes": nbytes, "part": read_text(folder / part_name(rank))})
            if nbytes:
                # from the file's own memory; its time-out is the connection's, for each part that the kernel takes
                connection.sendfile(file, 0, nbytes)


def send_copy(address: Address, time_out: float, seal: Seal, text: str, tensors: memoryview) -> None:
    """Send this rank's part to a keeper, and wait until it has sealed it. Raises OSError, EOFError or ValueError."""
    with call(address, time_out) as connection:
        _yield_the_way(connection)
        request = {"wants": "copy", "snapshot": seal.snapshot, "rank": seal.rank, "nbytes": seal.nbytes}
        send_frame(connection, request)
        _check_not_refused(receive_frame(connection))
        # the slot is not written again before this rank has reported the outcome, in `Snapshots.step`; not `sendfile`,
        # which takes the pages of a memory-backed file one by one, at three times the processor time
        send_all(connection, tensors)
        send_frame(connection, {"part": text, "seal": seal.as_text()})
        _check_not_refused(receive_frame(connection))


def fetch_part(address: Address, time_out: float, seal: Seal, folder: Path, budget: Budget) -> None:
    """Fetch a part into a folder, check it, and seal it.

    Raises OSError if the peer is gone or refuses, EOFError if it hangs up, ValueError if the part is damaged, or
    NoRoomError.
    """
    with call(address, time_out) as connection:
        send_frame(connection, {"wants": "part", "snapshot": seal.snapshot, "rank": seal.rank})
        frame = receive_frame(connection)
        _check_not_refused(frame)
        file = PartFile(folder, seal.rank, budget)
        receive_into(connection, file.begin(int(frame["nbytes"])))
    file.complete(str(frame["part"]), seal)
    try:
        verify_part(folder, seal)
    except ValueError:
        file.discard()
        raise


def _check_not_refused(frame: Mapping[str, Any]) -> None:
    if "refused" in frame:
        raise OSError(str(frame["refused"]))


def _yield_the_way(connection: socket.socket) -> None:
    """Mark packets as less urgent than training's, for networks that look at such marks."""
    with suppress(OSError, AttributeError):
        if connection.family == socket.AF_INET6:
            connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, _LOWER_EFFORT)
        else:
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _LOWER_EFFORT)
