"""Writing a checkpoint, now or in a thread: each rank captures and writes its share, then rank 0 publishes it.

Ranks use a separate Gloo group, so that a save in the background never mixes with the collectives of training.
"""

import atexit
import hashlib
import json
import shutil
import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks

from ddp_zero.checkpoint.contents import Part, SavedCheckpoint, Shared
from ddp_zero.checkpoint.folder import (
    Marker,
    check_comes_last,
    encode_part,
    next_step,
    part_name,
    publish,
    read_text,
    start,
    tensor_file_name,
    write_text,
)
from ddp_zero.checkpoint.optimizers import OptimizerState
from ddp_zero.checkpoint.tensor_file import write_dcp_metadata, write_tensors
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.control_group import Across, ControlGroup
from ddp_zero.core.comm.groups import Alone, Peers
from ddp_zero.core.comm.ranks import Agreement
from ddp_zero.core.comm.tracing import logger
from ddp_zero.core.local.inner import group_options, other_state
from ddp_zero.core.local.live_model import LiveModel, PartModel, by_group, options_of_text
from ddp_zero.core.local.parameters import MASTER_KEY
from ddp_zero.core.local.parts import run_of
from ddp_zero.core.local.tree import Tree
from ddp_zero.core.plan.boxes import Box
from ddp_zero.core.plan.global_layout import Layout
from ddp_zero.core.plan.partition import GroupRank, partition_greedy
from ddp_zero.error_codes import coded
from ddp_zero.tools.record.progress import showing

# Capturing


def capture(
    live: LiveModel,
    optimizer: OptimizerState | None,
    states: dict[int, dict[Any, Any]],
    peers: Peers,
    extra: Tree,
    rank_extra: Tree,
    layout: Layout | None = None,
    exclude_frozen: bool = False,
    in_pieces: bool = False,
) -> Part:
    """This rank's part of a checkpoint, made of live tensors.

    The writer of a parameter's state also writes its value; parameters in no optimizer are spread over the ranks;
    buffers, which may differ between ranks, are taken from rank 0, as DDP broadcasts them. If ranks hold different
    parts of the model, ``layout`` gives the writer of each value. With ``in_pieces`` and without a layout, each rank
    writes the elements that it owns of a cut parameter, and ``states`` are this rank's own. Raises ValueError if the
    optimizer has a parameter that the model does not have.
    """
    rank, world_size = peers.group_rank, peers.world_size
    names = [] if optimizer is None else live.names_of(optimizer.table)
    pieces: dict[str, slice] = {}
    if optimizer is None:
        owned = []
    elif in_pieces and layout is None:
        shares = optimizer.shares(rank, world_size)
        owned = [index for index, _ in shares]
        pieces = {names[index]: part for index, part in shares if part is not None}
    else:
        owned = optimizer.owned(rank, world_size)
    if layout is None:
        mine = {names[index] for index in owned} | set(_share_of_rest(live, names, rank, world_size))
    else:
        mine = layout.written_by(rank)
        owned = [index for index in owned if names[index] in mine]
    shared = _shared(live, optimizer, names, extra, layout) if rank == 0 else None
    if exclude_frozen:
        parameters = {name: value for name, value in live.entries.items() if isinstance(value, nn.Parameter)}
        frozen = {name for name, param in parameters.items() if not param.requires_grad}
        mine -= frozen
        # state of a value that is not there would have no shape of the whole to be joined to, and is never loaded
        states = {index: state for index, state in states.items() if names[index] not in frozen}
        if shared is not None:
            aliases = {alias: name for alias, name in shared.aliases.items() if name not in frozen}
            shared = replace(shared, aliases=aliases, excludes_frozen=True)
    model = {name: value for name, value in live.entries.items() if name in mine}
    places = {
        name: (tuple(model[name].shape), model[name].stride(), part.start)
        for name, part in pieces.items()
        if name in mine
    }
    model.update({name: run_of(model[name].detach())[pieces[name]] for name in places})
    births = {} if optimizer is None else optimizer.births()
    parts, wholes = _divided(optimizer, layout, names, states, rank, set(owned))
    return Part(
        model,
        {names[index]: state for index, state in parts.items()},
        [(*births[index], names[index]) for index in states if index in parts or index in wholes],
        rank_extra,
        shared,
        _cuts(live, mine),
        places,
        {names[index]: state for index, state in wholes.items()},
    )


def _divided(
    optimizer: OptimizerState | None,
    layout: Layout | None,
    names: Sequence[str],
    states: Mapping[int, dict[Any, Any]],
    rank: GroupRank,
    written: Collection[int],
) -> tuple[dict[int, dict[Any, Any]], dict[int, dict[Any, Any]]]:
    """The states that this rank writes: of values or parts that it writes, and of wholes that it steps."""
    if optimizer is None or layout is None or not optimizer.table.wholes:
        return {index: state for index, state in states.items() if index in written}, {}
    parts, wholes, stepped_whole = {}, {}, optimizer.table.wholes
    hosted = layout.whole_states_of(rank)
    for index, state in states.items():
        if index not in stepped_whole:
            parts.update({index: state} if index in written else {})
            continue
        master = {key: value for key, value in state.items() if key == MASTER_KEY}
        if master and index in written:
            parts[index] = master
        # of the whole there may be no state yet, besides the master of this part
        if names[index] in hosted and (len(state) > len(master) or not master):
            wholes[index] = {key: value for key, value in state.items() if key != MASTER_KEY}
    return parts, wholes


def _cuts(live: LiveModel, mine: set[str]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """For each value that this rank writes a part of: the shape of the whole, and the part's offsets."""
    if not isinstance(live, PartModel):
        return {}
    placed = {name: live.placed[name] for name in live.entries if name in mine and name in live.placed}
    return {name: (one.shape, one.box.offsets) for name, one in placed.items() if one.box != Box.whole(one.shape)}


def _share_of_rest(live: LiveModel, names: list[str], rank: GroupRank, world_size: int) -> list[str]:
    taken = set(names)
    rest = {name: value for name, value in live.entries.items() if name not in taken}
    spread = {name: value for name, value in rest.items() if isinstance(value, nn.Parameter)}
    owners = partition_greedy([param.nbytes for param in spread.values()], world_size)
    mine = [name for name, owner in zip(spread, owners, strict=True) if owner == rank]
    return mine + ([name for name in rest if name not in spread] if rank == 0 else [])


def _shared(
    live: LiveModel, optimizer: OptimizerState | None, names: list[str], extra: Tree, layout: Layout | None
) -> Shared:
    if layout is None:
        buffers = [name for name, value in live.entries.items() if not isinstance(value, nn.Parameter)]
        shared = Shared(trainable=live.trainable, aliases=live.aliases, buffers=buffers, extra=extra)
    else:
        shared = Shared(trainable=layout.trainable, aliases=layout.aliases, buffers=layout.buffers, extra=extra)
    if optimizer is None:
        return shared
    if layout is None:
        param_groups = optimizer.optimizer.param_groups
        named = list(zip(map(group_options, param_groups), by_group(names, param_groups), strict=True))
    else:
        named = [(options_of_text(options), params) for options, params in layout.groups()]
    return replace(
        shared,
        optimizer=optimizer.class_name,
        param_groups=[{**options, "params": params} for options, params in named],
        other_state=other_state(optimizer.inner),
        loss_scale=optimizer.scale(),
    )


def start_folder(peers: Peers, agreement: Agreement, root: Path, step: int | None, keep: int | None) -> str:
    """Create the folder on rank 0. Returns there the checkpoint's number and the folder's name as JSON, else ""."""
    agreement.declare("step", step)
    for name, number, least in (("step", step, 0), ("keep", keep, 1)):
        if number is not None and (type(number) is not int or number < least):
            raise ValueError(f"Expected {name} to be an int of at least {least}, got {number!r}. [ZERO-612]")
    if peers.group_rank != 0:
        return ""
    check_comes_last(root, step)
    step = next_step(root) if step is None else step
    return json.dumps([step, start(root, step)])


# Writing


@dataclass(frozen=True)
class SaveJob:
    """One rank's data to write."""

    folder: Path  # the hidden folder that rank 0 created
    step: int  # the number under which to save
    keep: int | None  # number of complete checkpoints to keep; None for all
    text: str  # this rank's tree as text
    tensors: list[Tensor]  # tensors of the tree


def write(job: SaveJob, peers: Peers, shows_progress: bool = True) -> Path:
    """Write this rank's part and wait for all ranks. A collective. Returns the folder of the complete checkpoint.

    After an OSError here, RuntimeError on other ranks, earlier checkpoints are untouched.
    """
    rank, published = peers.group_rank, ""
    nbytes = sum(tensor.nbytes for tensor in job.tensors)
    try:
        # two agreements: rank 0 may complete the checkpoint only once every rank's part is on disk, and no rank may
        # report success before it is complete
        with Agreement(peers, "writing a checkpoint"):
            if not job.folder.is_dir():
                raise FileNotFoundError(
                    f"{peers.name(rank)} does not see the folder that rank 0 created: {job.folder}. All ranks must "
                    "save to one file system. [ZERO-617]"
                )
            with showing(f"saving step {job.step}", nbytes, shows_progress and rank == 0):
                # live tensors, unless in the background: no step may change them before this returns
                spans = write_tensors(job.folder / tensor_file_name(rank), job.tensors)
            write_text(job.folder / part_name(rank), encode_part(job.text, spans))
        with Agreement(peers, "completing a checkpoint"):
            if rank == 0:
                published = _complete(job, peers.world_size).name
    except Exception:
        if rank == 0:
            # rank 0 alone; files that a lost rank still adds are removed by the next save
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
    """A save that may still be in progress; its future resolves to the checkpoint's folder."""

    def __init__(self, future: "Future[Path]") -> None:
        self._future = future
        self._is_reported = False

    def wait(self) -> Path:
        """Wait until the checkpoint is complete, and return its folder; RuntimeError if the save failed on any rank."""
        try:
            return self._future.result()
        except Exception as error:
            self._is_reported = True
            message = f"Expected a checkpoint to be saved, got {type(error).__name__}: {error}"
            raise RuntimeError(coded(message, "[ZERO-618]")) from error

    def finish(self) -> None:
        """As `wait`, except that an already raised failure is not raised again."""
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
    """Saves with the ranks of a process group, or of several whose ranks form a grid, one save at a time.

    Attributes:
        peers: the ranks, on separate connections.
        last: the last save, or None.
    """

    def __init__(self, *groups: ProcessGroup) -> None:
        larger = [group for group in groups if Communicator(group).world_size > 1]
        self.peers: Peers = Alone() if not larger else ControlGroup(larger[0]) if len(larger) == 1 else Across(larger)
        self.last: Saving | None = None

    def finish(self) -> None:
        """Wait for the current save, if any. Raises RuntimeError if it failed."""
        # one at a time on every rank: two saves would interleave their agreements on the one control group
        if self.last is not None:
            self.last.finish()

    def start(self, job: SaveJob, background: bool) -> Saving:
        """Write, with ``background`` in a thread; a failure there is logged at once and raised at the next call."""
        future: Future[Path] = Future()
        if background:
            # the thread talks to its peers on `self.peers` only, never on training's group, whose collectives go on
            # meanwhile
            pool = ThreadPoolExecutor(1, "ddp_zero.checkpoint")
            future = pool.submit(_logged, job, self.peers)
            pool.shutdown(wait=False)  # no more work; the interpreter waits for this job before it exits
        else:
            future.set_result(write(job, self.peers))
        self.last = Saving(future)
        return self.last


def _logged(job: SaveJob, peers: Peers) -> Path:
    try:
        return write(job, peers, shows_progress=False)
    except Exception as error:
        logger.error(coded(f"Saving a checkpoint in the background has failed: {error}", "[ZERO-618]"))
        raise
    finally:
        job.tensors.clear()  # a stored traceback keeps the job alive


_alone = Writer()
_writers: "weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[str, tuple[tuple[int, ...], ...]], Writer]]"
# weak: a writer lives as long as its process group, whose destruction ends its connections
_writers = weakref.WeakKeyDictionary()
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
    ranks = tuple(tuple(get_process_group_ranks(group)) for group in groups)
    if (use, ranks) not in known:
        known[use, ranks] = Writer(*groups)
    return known[use, ranks]


def finish_all() -> None:
    """Wait for every unfinished save of this process; see `Writer.finish`."""
    for writer in [_alone, *(writer for known in _writers.values() for writer in known.values())]:
        writer.finish()
