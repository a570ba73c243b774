"""Files of a memory-backed folder: private, within a limit, and written in place through a mapping.

A write through a mapping to a file system that is full kills the process (SIGBUS). So room is allocated first, which
fails with an error instead, and only after the limit, the file system, the host and the control group have been found
to have it.

A rank's part of a snapshot is one copy into mapped memory in the loop, then checksums and a seal in a thread.
"""

import fcntl
import mmap
import os
import re
import stat
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_zero.checkpoint.folder import digest_of, tensor_file_name
from ddp_zero.checkpoint.tensor_file import FileSpan, encode_part
from ddp_zero.snapshots.seals import SLOTS, Seal, names_of_part, write_privately

_LOCK = ".lock"
_PAUSE = 0.05
"""Seconds between two tries to lock the folder."""
_ALIGNMENT = 64
"""Bytes to a multiple of which a tensor begins in a file."""
GRACE = 1.0
"""Seconds to wait once more for a process for which patience has run out."""
_SPARE = 0.05
"""Share of the file system and of the host's memory that is left free."""
CONTROL_GROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""For versions 2 and 1: a folder, files of the limit and of the use, and the name of reclaimable memory."""


class NoRoomError(RuntimeError):
    """A file would exceed the limit, or the memory of the host."""


def private_folder(path: Path) -> None:
    """Create a folder that this user alone can enter, or check that it is such; PermissionError if not.

    In ``/dev/shm`` anybody may have created it first.
    """
    with suppress(FileExistsError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"Expected {path} to be a folder of user {os.geteuid()} that nobody else can enter, got mode "
            f"{stat.filemode(found.st_mode)} of user {found.st_uid}. Remove it, or give a different folder=. [ZERO-642]"
        )


class Budget:
    """The memory that files below a folder may take, together for all ranks of a host.

    ``limit`` is in bytes; None for all that the file system and the host have, apart from a spare 5%. ``patience`` is
    in seconds, to wait for other ranks of the host that allocate.
    """

    def __init__(self, root: Path, limit: int | None, patience: float = 60.0) -> None:
        self.root = root
        self.patience = patience
        self._limit = limit
        self._kept_out_by: int | None = None  # when the holder for which patience ran out took the lock

    @contextmanager
    def room(self, growth: int) -> Iterator[None]:
        """Let the block allocate so many more bytes. Raises NoRoomError before it, if there is no room."""
        # one rank of the host at a time: each would find the same room free
        with os.fdopen(os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)) as lock:
            self._lock(lock.fileno())
            self._check(growth)
            yield

    def _lock(self, descriptor: int) -> None:
        # training waits here: only once for a process that does not let go, not at every snapshot
        start = time.monotonic()
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.fstat(descriptor).st_mtime_ns
                patience = min(GRACE, self.patience) if holder == self._kept_out_by else self.patience
                if time.monotonic() >= start + patience:
                    self._kept_out_by = holder
                    raise NoRoomError(
                        f"Expected {self.root / _LOCK} to be free within {self.patience:g} s, got a process that holds "
                        "it. End that process: a rank of an earlier attempt, perhaps, that hangs. [ZERO-643]"
                    ) from None
                time.sleep(_PAUSE)
            else:
                self._kept_out_by = None
                # by which other ranks see that the lock has passed from one process to another
                os.utime(descriptor, ns=(now := time.time_ns(), now))
                return

    def _check(self, growth: int) -> None:
        if self._limit is not None and (used := bytes_in(self.root)) + growth > self._limit:
            raise NoRoomError(
                f"Expected snapshots in {self.root} to stay within limit={self._limit} bytes, got {used + growth}. "
                "Raise limit=, or train without snapshots. [ZERO-643]"
            )
        for name, free in _free_bytes(self.root):
            if growth > free:
                raise NoRoomError(
                    f"Expected room for {growth} more bytes in {self.root}, got {max(0, free)} of {name}. Raise the "
                    "size of the file system (--shm-size in a container), or train without snapshots. [ZERO-643]"
                )


def bytes_in(root: Path) -> int:
    """Memory of all files below a folder, each once."""
    sizes = {}
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(OSError):  # other ranks of the host write here as well
                found = os.lstat(os.path.join(folder, name))
                sizes[found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


def _free_bytes(root: Path) -> Iterator[tuple[str, int]]:
    """Names of limits, and the bytes that each leaves."""
    system = os.statvfs(root)
    yield "the file system", int((system.f_bavail - _SPARE * system.f_blocks) * system.f_frsize)
    with suppress(OSError, ValueError):
        text = Path("/proc/meminfo").read_text()
        total, available = (
            int(re.findall(rf"^{name}:\s+(\d+) kB", text, re.M)[0]) for name in ("MemTotal", "MemAvailable")
        )
        yield "the host's memory", int(available - _SPARE * total) * 1024
    for folder, most, used, inactive in CONTROL_GROUPS:
        with suppress(OSError, ValueError, IndexError):
            limit = int(Path(folder, most).read_text())  # "max" in one without limit
            idle = int(re.findall(rf"^{inactive} (\d+)$", Path(folder, "memory.stat").read_text(), re.M)[0])
            yield "the control group", int(limit * (1 - _SPARE)) - int(Path(folder, used).read_text()) + idle


class PartFile:
    """One part that is written in place, again and again: its files keep their memory from snapshot to snapshot.

    The folder is created when needed.
    """

    def __init__(self, folder: Path, rank: int, budget: Budget) -> None:
        self._folder, self._budget = folder, budget
        self._tensors, self._part, self._seal = (folder / name for name in names_of_part(rank))
        self._mapping: mmap.mmap | None = None

    def begin(self, nbytes: int) -> memoryview:
        """Break the seal, and return memory of so many bytes for the tensors. Raises NoRoomError or OSError."""
        # the seal first: a process that is killed in the middle of the copy must not leave a sealed mixture behind
        for path in (self._seal, self._part):
            path.unlink(missing_ok=True)
        size = max(1, nbytes)  # an empty file has no mapping
        if self._mapping is None or len(self._mapping) != size or not self._tensors.exists():
            self._mapping = None
            self._mapping = self._map(size)
        return memoryview(self._mapping)[:nbytes]

    def _map(self, size: int) -> mmap.mmap:
        for folder in (self._folder.parent, self._folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        # a new file, none is shortened: whoever still reads an old mapping would be killed beyond its new end, and an
        # old file may have further names, in the folder of a restored snapshot
        self._tensors.unlink(missing_ok=True)
        descriptor = os.open(self._tensors, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with self._budget.room(size):
                os.posix_fallocate(descriptor, 0, size)
            return mmap.mmap(descriptor, size)
        except BaseException:
            self._tensors.unlink(missing_ok=True)  # gives back a partial allocation
            raise
        finally:
            os.close(descriptor)

    def complete(self, text: str, seal: Seal) -> None:
        """Write the part's JSON and its seal. Raises OSError."""
        write_privately(self._part, text)
        # the last file: a part with a seal is complete
        write_privately(self._seal, seal.as_text())

    def discard(self) -> None:
        self._mapping = None
        for path in (self._seal, self._part, self._tensors):
            path.unlink(missing_ok=True)


class _Place(NamedTuple):
    """A tensor in a file: its elements are the bytes from ``begin`` to ``end``."""

    shape: torch.Size
    dtype: torch.dtype
    begin: int
    end: int

    def view(self, memory: memoryview) -> Tensor:
        if self.begin == self.end:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(memory[self.begin : self.end], dtype=torch.uint8).view(self.dtype).view(self.shape)


def _places_of(tensors: Sequence[Tensor]) -> list[_Place]:
    places, end = [], 0
    for tensor in tensors:
        begin = end + -end % _ALIGNMENT
        end = begin + tensor.nbytes
        places.append(_Place(tensor.shape, tensor.dtype, begin, end))
    return places


@dataclass(frozen=True)
class Staged:
    """A part whose tensors are in the mapped file; their checksums are not known yet."""

    memory: memoryview  # the file of tensors, mapped
    _text: str  # the part's tree
    _file: PartFile
    _places: Sequence[_Place]

    def complete(self, snapshot: str, step: int, rank: int, world_size: int) -> tuple[Seal, str]:
        """Compute checksums, write the part's JSON and its seal, and return the seal and the JSON. Raises OSError."""
        name = tensor_file_name(rank)
        spans = []
        for place in self._places:
            # CRC-32, at a third of the time of SHA-256: it has to find damage, not forgery, since whoever can write to
            # this user's private folder can write checksums as well. One call per tensor, which releases Python's lock
            crc = zlib.crc32(self.memory[place.begin : place.end])
            spans.append(FileSpan(name, place.begin, place.end - place.begin, place.begin, f"{crc:08x}"))
        part = encode_part(self._text, spans)
        seal = Seal(snapshot, step, world_size, rank, digest_of(part), len(self.memory))
        self._file.complete(part, seal)
        return seal, part


class OwnPart:
    """The files of this rank's own part, in both slots of its folder."""

    def __init__(self, folder: Path, rank: int, budget: Budget) -> None:
        self._files = {slot: PartFile(folder / slot, rank, budget) for slot in SLOTS}
        self._views: dict[str, tuple[list[_Place], memoryview, list[Tensor]]] = {}

    @torch.no_grad()
    def stage(self, slot: str, text: str, tensors: Sequence[Tensor]) -> Staged:
        """Copy tensors into a slot's file. Raises NoRoomError or OSError; the slot is broken then."""
        places = _places_of(tensors)
        before = self._views.pop(slot, None)
        if before is not None and before[0] != places:
            before = None  # gives back the old mapping, before a new mapping is allocated
        file = self._files[slot]
        memory = file.begin(places[-1].end if places else 0)
        if before is None or before[1].obj is not memory.obj:
            before = places, memory, [place.view(memory) for place in places]
        self._views[slot] = before
        if tensors:
            torch._foreach_copy_(before[2], list(tensors))  # blocks until the copies from a device have arrived
        return Staged(before[1], text, file, places)
