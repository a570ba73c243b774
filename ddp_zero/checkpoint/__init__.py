"""Sharded checkpoints: every rank writes its owned part; any number of ranks, any stage or torch optimizer can load it.

    checkpoint.save("runs/1", ddp, opt, extra={"scheduler": scheduler.state_dict()}, step=1000, keep=3)
    loaded = checkpoint.load("runs/1", ddp, opt)
    ddp-zero checkpoint export runs/1 plain/

A checkpoint is a folder in the format of `torch.distributed.checkpoint`, readable by its tools, plus checksums and a
JSON index. Loading reads only these two and raw bytes: nothing is unpickled.
"""

import atexit
import json
import os
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.optim import Optimizer

from ddp_zero.checkpoint import folder
from ddp_zero.checkpoint.loading import Restore
from ddp_zero.checkpoint.rows import SavedCheckpoint, capture
from ddp_zero.checkpoint.tensor_file import encode_part, write_dcp_metadata, write_tensors
from ddp_zero.checkpoint.view import View, process_groups
from ddp_zero.core.comm import Agreement, Peers, connect, logger
from ddp_zero.error_codes import coded
from ddp_zero.tools.files import by_rank, showing

__all__ = ["Loaded", "load", "save", "wait"]

PathLike = str | os.PathLike[str]

_MEND = "Earlier checkpoints are whole. Mend the cause, and save again. [ZERO-618]"
_NO_RENAME: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Loaded:
    """The result of a load.

    Attributes:
        folder: the loaded checkpoint.
        step: the number under which it was saved.
        extra: the value saved as ``extra``, tensors on the CPU.
        rank_extra: the value that this rank saved as ``rank_extra``; None if the number of ranks has changed.
        skipped: misfits that were left unchanged or converted, a line each; empty with ``strict=True``.
        notes: expected differences, such as parameters that were frozen in between.
    """

    folder: Path
    step: int
    extra: Any
    rank_extra: Any
    skipped: tuple[str, ...]
    notes: tuple[str, ...]


class Saving:
    """A save that may still be in progress; its future resolves to the checkpoint's folder."""

    def __init__(self, future: "Future[Path]") -> None:
        self._future = future
        self.is_reported = False  # True once `wait` has raised

    def wait(self) -> Path:
        """Wait until the checkpoint is complete, and return its folder; RuntimeError if the save failed on any rank."""
        # not `result` within a try: what a signal handler raises meanwhile is no failure of the save, which goes on
        error = self._future.exception()
        if error is not None:
            self.is_reported = True
            message = f"Expected a checkpoint to be saved, got {type(error).__name__}: {error}"
            raise RuntimeError(coded(message, "[ZERO-618]")) from error
        return self._future.result()

    @property
    def is_done(self) -> bool:
        """True if `wait` would return or raise at once."""
        return self._future.done()


def save(
    path: PathLike,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    rank_extra: Any = None,
    step: int | None = None,
    keep: int | None = None,
    background: bool = False,
    exclude_frozen: bool = False,
) -> Saving:
    """Save model and optimizer as ``path/step-<number>``, each rank its share. A collective.

    The checkpoint appears once it is completely on disk: a killed rank leaves earlier checkpoints intact. It holds the
    state after the last step, without gradients, so resume with the data that follows that step. A rank copies at most
    one tensor at a time (if needed, as from a GPU), or with ``background=True`` its whole shard.

    Args:
        path: folder for the checkpoints of one run, on a file system that all ranks share; one job at a time.
        model: the DDP model, a module that contains it, or a plain model in a single process.
        optimizer: a sharded optimizer of this library or of torch, a plain optimizer, or a wrapper that holds any as
            ``.optimizer``, such as Accelerate's.
        extra: any other state, saved from rank 0: None, numbers, strings, tensors, and lists, tuples and dicts of them,
            such as a scheduler's state dict.
        rank_extra: the same kinds of values, saved from every rank, such as the state of its random number generators.
        step: number of the checkpoint, the same on every rank, not below the last one's; by default one more.
        keep: number of checkpoints to keep in the folder, including the new checkpoint; None for all.
        background: copy this rank's share to the CPU and write it in a thread. The next save or load waits for it and
            raises its error; so does the result's ``wait()``, to be called before the process group is destroyed.
        exclude_frozen: leave out parameters that do not require a gradient, and their state; a load then leaves their
            values unchanged.

    Returns:
        The save; its ``wait()`` returns the checkpoint's folder.

    Raises:
        RuntimeError: with overlap or stage 2, between backward and step; if a save in the background failed; or if this
            save fails on a different rank.
        TypeError: for a value that cannot be saved without pickle, naming its place.
        ValueError: for a parameter of the optimizer that the model does not have, an empty path, arguments that differ
            between ranks, or a plain model in a job of several ranks.
        OSError: if writing to disk fails.
    """
    writer = writer_of(process_groups(model, optimizer, is_save=True))
    peers = writer.peers
    root = folder.folder_of(path)
    with Agreement(peers, "checkpoint.save") as agreement:
        writer.finish()
        agreement.declare("keep and exclude_frozen", (keep, exclude_frozen))
        agreement.declare("step", step)
        view = View.of(model, optimizer)
        view.declare(agreement, is_save=True)
    # every collective below runs outside of the agreements' blocks: a rank that raises inside a block still joins the
    # agreement at its end, but would leave its peers alone in a collective within it
    layout = view.layout(peers)
    with Agreement(peers, "checkpoint.save") as agreement:
        part = capture(view, layout, peers, extra, rank_extra, exclude_frozen)
        text, tensors = part.as_text("a checkpoint")
        if background:  # copies, unaffected by further training
            tensors = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        with by_rank(peers.name(peers.group_rank), _MEND):
            place = folder.start_next(root, step, keep, creates=peers.group_rank == 0)
    number, name = json.loads(peers.all_gather_text(place)[0])
    return writer.start(partial(write, root / name, number, keep, text, tensors), background)


def load(
    path: PathLike,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    rename: Mapping[str, str] = _NO_RENAME,
) -> Loaded:
    """Load a checkpoint into a model and an optimizer, saved by any optimizer on any number of ranks. A collective.

    Nothing changes until the whole checkpoint has been checked to be complete, undamaged and fitting. Then parameters
    are written in place, state is replaced, and the optimizer's gradients are dropped. A rank reads the model and the
    states of its owned parameters, a tensor at a time.

    Args:
        path: a checkpoint, or a folder of them, of which the complete one of the highest step is loaded.
        model: as for `save`.
        optimizer: as for `save`, over the model's parameters. None: load the model only.
        strict: if True, raise if anything does not fit. If False, convert dtypes, leave other misfits unchanged with
            their state, start without state if a value fits and its state does not, and report all of these.
        rename: maps saved names, or dotted prefixes of them, to the current names.

    Returns:
        The other saved values, and the skipped misfits.

    Raises:
        FileNotFoundError: if there is no complete checkpoint.
        ValueError: if it is damaged, was not written by this library, or does not fit, with a list of all misfits.
        RuntimeError: if that happened on a different rank, or a save in the background failed.
    """
    return restore(path, model, optimizer, strict, rename)


def restore(
    path: PathLike,
    model: nn.Module,
    optimizer: Optimizer | None,
    strict: bool = True,
    rename: Mapping[str, str] = _NO_RENAME,
    is_verified: bool = False,
) -> Loaded:
    """As `load`; ``is_verified`` if checksums were compared on every host just now: it reads the bytes once."""
    writer = writer_of(process_groups(model, optimizer))
    peers = writer.peers
    with Agreement(peers, "checkpoint.load") as agreement:
        writer.finish()
        view = View.of(model, optimizer)
        view.declare(agreement)
    layout = view.layout(peers)
    with Agreement(peers, "checkpoint.load") as agreement:
        saved = SavedCheckpoint.open(folder.folder_of(path))
        agreement.declare("checkpoint", saved.digest)
        agreement.declare("strict and rename", (strict, sorted(rename.items())))
        elsewhere = set() if layout is None else layout.only_elsewhere(peers.group_rank)
        plan = Restore(saved, view, rename, strict, elsewhere, not is_verified)
        plan.verify(peers)
        extra = plan.read_extra(saved.shared.extra)
        is_same_world = len(saved.rank_extras) == peers.world_size
        rank_extra = plan.read_extra(saved.rank_extras[peers.group_rank]) if is_same_world else None
    plan.fill_empty_groups(peers)
    with Agreement(peers, "reading a checkpoint that was found whole"):
        plan.carry_out(shows=peers.group_rank == 0)
    return Loaded(saved.folder, saved.step, extra, rank_extra, tuple(plan.fit.misfits), tuple(plan.fit.notes))


def wait() -> None:
    """Wait for all background saves of this process. Never communicates.

    Raises:
        RuntimeError: if a save failed and its error was not raised on this rank before.
    """
    for writer in [_alone, *(writer for known in _writers.values() for writer in known.values())]:
        writer.finish()


# Writing


def write(
    unfinished: Path,
    step: int,
    keep: int | None,
    text: str,
    tensors: list[Tensor],
    peers: Peers,
    is_background: bool = False,
) -> Path:
    """Write this rank's part and wait for all ranks. A collective. Returns the folder of the complete checkpoint.

    After an OSError here, RuntimeError on other ranks, earlier checkpoints are untouched. ``unfinished`` is the hidden
    folder that rank 0 created; ``text`` and ``tensors`` are this rank's part.
    """
    rank, published = peers.group_rank, ""
    try:
        # two agreements: rank 0 may complete the checkpoint only once every rank's part is on disk, and no rank may
        # report success before it is complete
        with Agreement(peers, "writing a checkpoint"), by_rank(peers.name(rank), _MEND):
            if not unfinished.is_dir():
                raise FileNotFoundError(
                    f"{peers.name(rank)} does not see the folder that rank 0 created: {unfinished}. All ranks must "
                    "save to one file system. [ZERO-618]"
                )
            nbytes = sum(tensor.nbytes for tensor in tensors)
            with showing(f"saving step {step}", nbytes, not is_background and rank == 0):
                # live tensors, unless in the background: no step may change them before this returns
                spans = write_tensors(unfinished / folder.tensor_file_name(rank), tensors)
            folder.write_text(unfinished / folder.part_name(rank), encode_part(text, spans))
        with Agreement(peers, "completing a checkpoint"), by_rank(peers.name(rank), _MEND):
            if rank == 0:  # reads all parts as a load does, and writes the index for other tools
                texts = (
                    folder.read_text(unfinished / folder.part_name(part_rank)) for part_rank in range(peers.world_size)
                )
                marker = folder.Marker(step, tuple(map(folder.digest_of, texts)))
                write_dcp_metadata(unfinished, SavedCheckpoint.read(unfinished, marker).as_tree())
                published = folder.publish(unfinished, marker, keep).name
        return unfinished.parent / peers.all_gather_text(published)[0]
    except Exception as error:
        if rank == 0 and not published:
            # rank 0 alone; files that a lost rank still adds are removed by the next save
            shutil.rmtree(unfinished, ignore_errors=True)
        if is_background:
            logger.error(coded(f"Saving a checkpoint in the background has failed: {error}", "[ZERO-618]"))
        raise
    finally:
        tensors.clear()  # a stored traceback keeps them alive


class Writer:
    """Saves with the ranks of a process group, or of several whose ranks form a grid, one save at a time.

    ``peers`` are the ranks, on separate connections.
    """

    def __init__(self, *groups: ProcessGroup) -> None:
        self.peers = connect(groups)
        self.last: Saving | None = None

    def finish(self) -> None:
        """Wait for the current save, if any. Raises RuntimeError if it failed, unless its `wait` has done so."""
        # one at a time on every rank: two saves would interleave their agreements on the one control group
        if self.last is not None and not self.last.is_reported:
            self.last.wait()

    def start(self, save: Callable[..., Path], background: bool) -> Saving:
        """Run `write` for these peers; with ``background`` in a thread, whose failure is raised at the next call."""
        future: Future[Path] = Future()
        if background:
            # the thread talks to its peers on `self.peers` only, never on training's group, whose collectives go on
            # meanwhile
            pool = ThreadPoolExecutor(1, "ddp_zero.checkpoint")
            future = pool.submit(save, self.peers, is_background=True)
            pool.shutdown(wait=False)  # no more work; the interpreter waits for this job before it exits
        else:
            future.set_result(save(self.peers))
        self.last = Saving(future)
        return self.last


_alone = Writer()
# weak: a writer lives as long as its process group, whose destruction ends its connections
_writers: "weakref.WeakKeyDictionary[ProcessGroup, dict[object, Writer]]" = weakref.WeakKeyDictionary()
atexit.register(_writers.clear)  # Gloo's threads would race with the end of the interpreter, seen as SIGABRT


def writer_of(groups: Sequence[ProcessGroup], use: str = "checkpoint") -> Writer:
    """The writer of all ranks of a grid, given this rank's group along each dimension; of one process if none.

    The first call for a use is a collective of all ranks of the grid. Writers of different uses have connections of
    their own, so that a save in the background and a snapshot do not mix.
    """
    if not groups:
        return _alone
    # kept per grid: building the control group is a collective, and ranks enter it in the same save or load
    known = _writers.setdefault(groups[0], {})
    key = use, *(tuple(get_process_group_ranks(group)) for group in groups)
    if key not in known:
        known[key] = Writer(*groups)
    return known[key]
