"""Writing a checkpoint, now or in a thread: each rank captures and writes its share, then rank 0 publishes it.

Ranks use a separate Gloo group, so that a save in the background never mixes with the collectives of training.
"""

import atexit
import hashlib
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks

from ddp_zero.checkpoint import folder
from ddp_zero.checkpoint.optimizers import View
from ddp_zero.checkpoint.rows import Part, Row, SavedCheckpoint, Shared, rows_of
from ddp_zero.checkpoint.tensor_file import encode_part, write_dcp_metadata, write_tensors
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.control_group import Across, ControlGroup
from ddp_zero.core.comm.groups import Alone, Peers
from ddp_zero.core.comm.ranks import Agreement
from ddp_zero.core.comm.tracing import logger
from ddp_zero.core.local.inner import group_options, other_state
from ddp_zero.core.local.live_model import by_group, options_of_text
from ddp_zero.core.local.parameters import MASTER_KEY
from ddp_zero.core.local.tree import Tree
from ddp_zero.core.plan.global_layout import Layout
from ddp_zero.core.plan.partition import partition_greedy
from ddp_zero.core.state.state_dicts import Holding
from ddp_zero.error_codes import coded
from ddp_zero.tools.record.progress import showing

# Capturing


def capture(
    view: View,
    holdings: Mapping[str, Holding],
    layout: Layout | None,
    peers: Peers,
    extra: Tree,
    rank_extra: Tree,
    exclude_frozen: bool = False,
) -> Part:
    """This rank's part of a checkpoint, made of live tensors.

    The writer of a parameter's state also writes its value; parameters in no optimizer are spread over the ranks;
    buffers, which may differ between ranks, are taken from rank 0, as DDP broadcasts them. If ranks hold different
    parts of the model, ``layout`` gives the writer of each value.
    """
    rank, live, state = peers.group_rank, view.live, view.state
    params = {name: one for name, one in live.entries.items() if isinstance(one, nn.Parameter)}
    buffers = [name for name in live.entries if name not in params]
    if layout is None:
        spread = sorted(params.keys() - {*view.names})
        owners = partition_greedy([params[name].nbytes for name in spread], peers.world_size) if spread else []
        mine = {*holdings, *(name for name, owner in zip(spread, owners, strict=True) if owner == rank)}
        mine, hosts = mine.union(buffers if rank == 0 else ()), set(holdings)
    else:
        mine, hosts = layout.written_by(rank), layout.whole_states_of(rank)
    # state of a value that is not there would have no shape of the whole to be joined to, and is never loaded
    frozen = {name for name, param in params.items() if exclude_frozen and not param.requires_grad}
    stepped_whole = set() if state is None else {view.names[index] for index in state.table.wholes}
    rows, births, values = list[Row](), dict[str, tuple[int, int]](), live.values()
    for name, held in live.entries.items():
        one = holdings.get(name, Holding(-1, None, None, (0, 0)))
        own, is_mine = one.state or {}, name in mine and name not in frozen
        if odd := [key for key in own if type(key) not in (str, int)]:
            raise TypeError(f"Expected str or int keys in the state of {name!r}, got {odd[0]!r}. [ZERO-611]")
        is_host = is_mine
        if name in stepped_whole:  # its state, but for masters, which are of parts, is one rank's
            is_host = name in hosts and name not in frozen
            rows += [Row.whole(name, key, value) for key, value in own.items() if is_host and key != MASTER_KEY]
            own = {key: value for key, value in own.items() if key == MASTER_KEY}
        if is_host and one.state is not None:
            births[name] = one.birth
        if is_mine:
            rows += rows_of(name, held, own, values[name].shape, live.chunk(name), one.part)
    if rank != 0:
        return Part(rows, births, rank_extra, None)
    model = live if layout is None else layout
    shared = Shared(
        trainable=model.trainable,
        aliases={alias: name for alias, name in model.aliases.items() if name not in frozen},
        buffers=buffers if layout is None else layout.buffers,
        extra=extra,
        excludes_frozen=exclude_frozen,
    )
    if state is not None:
        options = map(group_options, state.optimizer.param_groups)
        named = [*zip(options, by_group(view.names, state.optimizer.param_groups), strict=True)]
        if layout is not None:
            named = [(options_of_text(options), names) for options, names in layout.groups()]
        shared = replace(
            shared,
            optimizer=state.class_name,
            param_groups=[{**options, "params": names} for options, names in named],
            other_state=other_state(state.inner),
            loss_scale=state.scale(),
        )
    return Part(rows, births, rank_extra, shared)


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
        with Agreement(peers, "writing a checkpoint"):
            if not unfinished.is_dir():
                raise FileNotFoundError(
                    f"{peers.name(rank)} does not see the folder that rank 0 created: {unfinished}. All ranks must "
                    "save to one file system. [ZERO-617]"
                )
            nbytes = sum(tensor.nbytes for tensor in tensors)
            with showing(f"saving step {step}", nbytes, not is_background and rank == 0):
                # live tensors, unless in the background: no step may change them before this returns
                spans = write_tensors(unfinished / folder.tensor_file_name(rank), tensors)
            folder.write_text(unfinished / folder.part_name(rank), encode_part(text, spans))
        with Agreement(peers, "completing a checkpoint"):
            if rank == 0:  # reads all parts as a load does, and writes the index for other tools
                texts = (folder.read_text(unfinished / folder.part_name(one)) for one in range(peers.world_size))
                marker = folder.Marker(step, tuple(hashlib.sha256(one.encode()).hexdigest() for one in texts))
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


class Saving:
    """A save that may still be in progress; its future resolves to the checkpoint's folder."""

    def __init__(self, future: "Future[Path]") -> None:
        self._future = future
        self.is_reported = False  # True once `wait` has raised

    def wait(self) -> Path:
        """Wait until the checkpoint is complete, and return its folder; RuntimeError if the save failed on any rank."""
        try:
            return self._future.result()
        except Exception as error:
            self.is_reported = True
            message = f"Expected a checkpoint to be saved, got {type(error).__name__}: {error}"
            raise RuntimeError(coded(message, "[ZERO-618]")) from error

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


def finish_all() -> None:
    """Wait for every unfinished save of this process; see `Writer.finish`."""
    for writer in [_alone, *(writer for known in _writers.values() for writer in known.values())]:
        writer.finish()
