"""Sharded checkpoints: every rank writes its owned part; any number of ranks, any stage or torch optimizer can load it.

    checkpoint.save("runs/1", ddp, opt, extra={"scheduler": scheduler.state_dict()}, step=1000, keep=3)
    loaded = checkpoint.load("runs/1", ddp, opt)
    ddp-zero checkpoint export runs/1 plain/

A checkpoint is a folder in the format of `torch.distributed.checkpoint`, readable by its tools, plus checksums and a
JSON index. Loading reads only these two and raw bytes: nothing is unpickled.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddp_zero.checkpoint.folder import folder_of, start_next
from ddp_zero.checkpoint.loading import Restore
from ddp_zero.checkpoint.optimizers import View, process_groups
from ddp_zero.checkpoint.rows import SavedCheckpoint
from ddp_zero.checkpoint.saving import Saving, capture, finish_all, write, writer_of
from ddp_zero.core.comm.ranks import Agreement

__all__ = ["Loaded", "load", "save", "wait"]

PathLike = str | os.PathLike[str]

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
        optimizer: a sharded optimizer of this library or of torch, a plain one, or a wrapper that holds one as
            ``.optimizer``, such as Accelerate's.
        extra: any other state, saved from rank 0: None, numbers, strings, tensors, and lists, tuples and dicts of them,
            such as a scheduler's state dict.
        rank_extra: the same kinds of values, saved from every rank, such as the state of its random number generators.
        step: number of the checkpoint, the same on every rank, not below the last one's; by default one more.
        keep: number of checkpoints to keep in the folder, including the new one; None for all.
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
    peers, root = writer.peers, folder_of(path)
    with Agreement(peers, "checkpoint.save") as agreement:
        writer.finish()
        agreement.declare("keep and exclude_frozen", (keep, exclude_frozen))
        agreement.declare("step", step)
        view = View.of(model, optimizer)
        view.declare(agreement, is_save=True)
    # every collective below runs outside of the agreements' blocks: a rank that raises inside a block still joins the
    # agreement at its end, but would leave its peers alone in a collective within it
    layout = view.layout(peers)
    holdings = view.holdings(peers, layout)
    with Agreement(peers, "checkpoint.save") as agreement:
        part = capture(view, holdings, layout, peers, extra, rank_extra, exclude_frozen)
        text, tensors = part.as_text("a checkpoint")
        if background:  # copies, unaffected by further training
            tensors = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        place = start_next(root, step, keep, creates=peers.group_rank == 0)
    number, folder = json.loads(peers.all_gather_text(place)[0])
    return writer.start(partial(write, root / folder, number, keep, text, tensors), background)


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
        rename: maps saved names, or dotted prefixes of them, to the current ones.

    Returns:
        The other saved values, and the skipped misfits.

    Raises:
        FileNotFoundError: if there is no complete checkpoint.
        ValueError: if it is damaged, was not written by this library, or does not fit, with a list of all misfits.
        RuntimeError: if that happened on a different rank, or a save in the background failed.
    """
    return _load(path, model, optimizer, strict, rename)


def load_verified(folder: Path, model: nn.Module, optimizer: Optimizer | None) -> Loaded:
    """As `load`, of a checkpoint whose checksums were compared on every host just now: reads its bytes once."""
    return _load(folder, model, optimizer, strict=True, rename=_NO_RENAME, is_verified=True)


def _load(
    path: PathLike,
    model: nn.Module,
    optimizer: Optimizer | None,
    strict: bool,
    rename: Mapping[str, str],
    is_verified: bool = False,
) -> Loaded:
    writer = writer_of(process_groups(model, optimizer))
    peers = writer.peers
    with Agreement(peers, "checkpoint.load") as agreement:
        writer.finish()
        view = View.of(model, optimizer)
        view.declare(agreement)
    layout = view.layout(peers)
    with Agreement(peers, "checkpoint.load") as agreement:
        saved = SavedCheckpoint.open(folder_of(path))
        agreement.declare("checkpoint", saved.digest)
        agreement.declare("strict and rename", (strict, sorted(rename.items())))
        elsewhere = set() if layout is None else layout.only_elsewhere(peers.group_rank)
        plan = Restore(saved, view, rename, strict, elsewhere, not is_verified)
        plan.verify(peers)
        extra = plan.read_extra(saved.shared.extra)
        is_same_world = len(saved.rank_extras) == peers.world_size
        rank_extra = plan.read_extra(saved.rank_extras[peers.group_rank]) if is_same_world else None
    with Agreement(peers, "reading a checkpoint that was found whole"):
        plan.carry_out(shows=peers.group_rank == 0)
    return Loaded(saved.folder, saved.step, extra, rank_extra, tuple(plan.fit.misfits), tuple(plan.fit.notes))


def wait() -> None:
    """Wait for all background saves of this process. Never communicates.

    Raises:
        RuntimeError: if a save failed and its error was not raised on this rank before.
    """
    finish_all()
