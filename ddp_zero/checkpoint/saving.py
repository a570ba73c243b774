"""Writing a checkpoint, now or in a thread: each rank writes its own files, then rank 0 makes the checkpoint visible.

Ranks use a Gloo group of their own, so that a save in the background never mixes with the collectives of training.
"""

import atexit
import hashlib
import shutil
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks

from ddp_zero.checkpoint.contents import SavedCheckpoint
from ddp_zero.checkpoint.dcp import write_dcp_metadata
from ddp_zero.checkpoint.folder import Marker, publish, read_text, write_text
from ddp_zero.checkpoint.manifest import encode_part, part_name, tensor_file_name
from ddp_zero.checkpoint.tensor_file import write_tensors
from ddp_zero.core.comm.agreement import Agreement
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.control_group import Across, ControlGroup
from ddp_zero.core.comm.peers import Alone, Peers
from ddp_zero.core.comm.tracing import logger
from ddp_zero.tools.record.progress import showing

Ranks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SaveJob:
    """The data that a rank has to write.

    Attributes:
        folder: the hidden folder that rank 0 created.
        step: the number under which to save.
        keep: how many complete checkpoints to keep; None: all.
        text: this rank's tree as text.
        tensors: the tensors of the tree.
    """

    folder: Path
    step: int
    keep: int | None
    text: str
    tensors: list[Tensor]


def write(job: SaveJob, peers: Peers, shows_progress: bool = True) -> Path:
    """Write this rank's part and wait for all others. A collective. Returns the folder of the complete checkpoint.

    Raises:
        OSError: if writing to disk fails; RuntimeError on other ranks. Earlier checkpoints are untouched.
    """
    rank, published = peers.group_rank, ""
    try:
        with Agreement(peers, "writing a checkpoint"):
            if not job.folder.is_dir():
                raise FileNotFoundError(
                    f"Expected the folder that rank 0 created, got none on {peers.name(rank)}: {job.folder}. All "
                    "ranks must save to one file system."
                )
            with showing(
                f"saving step {job.step}", sum(one.nbytes for one in job.tensors), shows_progress and rank == 0
            ):
                spans = write_tensors(job.folder / tensor_file_name(rank), job.tensors)
            write_text(job.folder / part_name(rank), encode_part(job.text, spans))
        with Agreement(peers, "completing a checkpoint"):
            if rank == 0:
                published = _complete(job, peers.world_size).name
    except Exception:
        if rank == 0:
            shutil.rmtree(job.folder, ignore_errors=True)
        raise
    return job.folder.parent / peers.all_gather_text(published)[0]


def _complete(job: SaveJob, world_size: int) -> Path:
    """Read all parts as a load does, write the index for other tools, and make the checkpoint visible."""
    texts = (read_text(job.folder / part_name(rank)) for rank in range(world_size))
    marker = Marker(job.step, tuple(hashlib.sha256(text.encode()).hexdigest() for text in texts))
    write_dcp_metadata(job.folder, SavedCheckpoint.read(job.folder, marker).as_tree())
    return publish(job.folder, marker, job.keep)


class Saving:
    """A save that may still be under way.

    Args:
        future: resolves to the checkpoint's folder.
    """

    def __init__(self, future: "Future[Path]") -> None:
        self._future = future
        self._is_reported = False

    def wait(self) -> Path:
        """Wait until the checkpoint is complete, and return its folder.

        Raises:
            RuntimeError: if the save failed on any rank.
        """
        try:
            return self._future.result()
        except Exception as error:
            self._is_reported = True
            raise RuntimeError(f"Expected a checkpoint to be saved, got {type(error).__name__}: {error}") from error

    def finish(self) -> None:
        """As `wait`, except that a failure that was already raised is not raised again."""
        was_reported = self._is_reported
        try:
            self.wait()
        except RuntimeError:
            if not was_reported:
                raise

    @property
    def is_done(self) -> bool:
        """True if `wait` would return or raise at once."""
        return self._future.done()


class Writer:
    """Saves with the ranks of a process group, or of several along which ranks form a grid, one save at a time.

    Attributes:
        peers: the ranks, on connections of their own.
        last: the last save, or None.
    """

    def __init__(self, *groups: ProcessGroup) -> None:
        larger = [group for group in groups if Communicator(group).world_size > 1]
        self.peers: Peers = Alone() if not larger else ControlGroup(larger[0]) if len(larger) == 1 else Across(larger)
        self.last: Saving | None = None

    def finish(self) -> None:
        """Wait for the current save, if any.

        Raises:
            RuntimeError: if it failed.
        """
        if self.last is not None:
            self.last.finish()

    def start(self, job: SaveJob, background: bool) -> Saving:
        """Write, with ``background`` in a thread; a failure there is logged at once and raised at the next call."""
        future: Future[Path] = Future()
        if background:
            pool = ThreadPoolExecutor(1, "ddp_zero.checkpoint")
            future = pool.submit(_logged, job, self.peers)
            pool.shutdown(wait=False)  # no more work; the interpreter waits for this job before it exits
        else:
            future.set_result(write(job, self.peers))
        self.last = Saving(future)
        return self.last


_alone = Writer()
_writers: "weakref.WeakKeyDictionary[ProcessGroup, dict[Ranks, Writer]]" = weakref.WeakKeyDictionary()
atexit.register(_writers.clear)  # Gloo's threads would race with the end of the interpreter, seen as SIGABRT


def writer_of(group: ProcessGroup | None) -> Writer:
    """The writer of a process group, or of a single process if None; a group's first call is a collective of it."""
    return _alone if group is None else writer_across([group])


def writer_across(groups: Sequence[ProcessGroup]) -> Writer:
    """The writer of all ranks of a grid, from the group of this rank along each of its dimensions.

    The first call is a collective of all ranks of the grid.
    """
    known = _writers.setdefault(groups[0], {})
    ranks = tuple(tuple(get_process_group_ranks(group)) for group in groups)
    if ranks not in known:
        known[ranks] = Writer(*groups)
    return known[ranks]


def finish_all() -> None:
    """Wait for every unfinished save of this process; see `Writer.finish`."""
    for writer in [_alone, *(writer for known in _writers.values() for writer in known.values())]:
        writer.finish()


def _logged(job: SaveJob, peers: Peers) -> Path:
    try:
        return write(job, peers, shows_progress=False)
    except Exception as error:
        logger.error("saving a checkpoint in the background has failed: %s", error)
        raise
    finally:
        job.tensors.clear()  # a stored traceback keeps the job alive
