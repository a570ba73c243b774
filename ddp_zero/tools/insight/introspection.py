"""Reports of a `ZeroRedundancyOptimizer` on itself: place among the ranks, numbers, and its plan as text or page."""

import os
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ddp_zero.core.backward.overlap_machine import OverlapStatus, Phase
from ddp_zero.core.engine.engine import Engine
from ddp_zero.core.local.memory import digest
from ddp_zero.core.plan.ownership import home, is_cut
from ddp_zero.core.plan.partition import GlobalRank, GroupRank
from ddp_zero.core.step.rank_shard import Shard
from ddp_zero.core.step.record import StepRecord
from ddp_zero.tools.insight.explain import explain, write_page
from ddp_zero.tools.insight.stats import Stats

_SHOWN = 5  # parameters that differ, in a message


class Introspection:
    """Base class of `ZeroRedundancyOptimizer`; documented there."""

    _engine: Engine
    _stats: Stats
    parameters_as_bucket_view: bool

    @property
    def _shard(self) -> Shard:
        return self._engine.shard

    @property
    def last_step(self) -> StepRecord | None:
        """The record of the last step, the same on every rank; None before the first."""
        return self._engine.runner.last_step

    def stats(self) -> dict[str, float]:
        """Times, bytes and memory of the last step and of all steps so far, as a flat dict of numbers.

        Recording is always on. Reading neither communicates nor waits for a device: on an accelerator, seconds are of
        the last step whose work the device has finished. docs/insight.md describes every number.

        Returns:
            Seconds by phase (names end in ``_s``), bytes (in ``_bytes``), and counts. ``total_`` is since construction,
            ``peak_`` the maximum so far, the rest of the last step or current. The same keys at every call; an unknown
            number is NaN.
        """
        return self._stats.read()

    def check_agreement(self) -> None:
        """Check that all ranks hold the same parameters, bit for bit. A collective: eight bytes per parameter and rank.

        Raises:
            RuntimeError: on every rank, naming the parameters and the ranks that differ from most ranks; under Join.
        """
        shard = self._shard
        if self._engine.joins:
            raise RuntimeError(
                "opt.check_agreement() is not supported inside Join: ranks that have joined would not take part. Call "
                "it after the Join context. [ZERO-310]"
            )
        shard.left.complete()
        everyone, table = shard.everyone, shard.table
        device = table.accelerator()
        mine = torch.stack([digest(param.detach()).to(device) for param in table.params])
        found = find_diverging([theirs.tolist() for theirs in everyone.all_gather_tensor(mine)])
        if not found:
            return
        shown = "; ".join(
            f"{table.label(index)} on " + ", ".join(everyone.name(GroupRank(rank)) for rank in ranks)
            for index, ranks in list(found.items())[:_SHOWN]
        )
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        tied = " Two ranks cannot tell which of them is right." if everyone.world_size == 2 else ""
        raise RuntimeError(
            f"Expected the same parameters on every rank, got {len(found)} of {len(table)} that differ from what most "
            f"ranks hold: {shown}{more}.{tied} Some code has changed parameters on some ranks only, or memory is "
            "faulty: load a checkpoint on all ranks. [ZERO-512]"
        )

    def explain(self, html: str | os.PathLike[str] | None = None) -> str:
        """Ownership, balance and messages of a step, as text. Never communicates.

        Args:
            html: also write a page to this file, for a browser, that draws it; it needs no other file.

        Returns:
            The text.
        """
        text = explain(self._engine, self.parameters_as_bucket_view)
        if html is not None:
            write_page(html, self._engine, text)
        return text

    def owner_of(self, param: Tensor) -> GroupRank:
        """The rank, in ``process_group``, that owns a parameter; with shard groups, in this rank's. Stays local.

        Args:
            param: the parameter.

        Raises:
            ValueError: for a parameter that is not in the optimizer, or that several ranks share.
        """
        shard = self._shard
        index = shard.table.index_of.get(param)
        if index is None:
            raise ValueError(
                f"The parameter of shape {list(param.shape)} is not a parameter of this optimizer. [ZERO-119]"
            )
        pieces, comm = shard.binding.pieces[index], shard.comm
        if is_cut(pieces):
            shared = ", ".join(f"{comm.name(piece.owner)} elements {piece.start} to {piece.stop}" for piece in pieces)
            raise ValueError(f"{shard.table.label(index)} has several owners: {shared}. [ZERO-119]")
        owner = shard.everyone.place_of(comm.global_rank(home(pieces)))
        assert owner is not None, "a shard group is part of everyone"
        return owner

    @property
    def overlap_status(self) -> OverlapStatus:
        """The status of the plan of the overlapped step; UNINITIALIZED without overlap."""
        hook = self._engine.hook
        return OverlapStatus.UNINITIALIZED if hook is None else hook.machine.status

    @property
    def overlap_phase(self) -> Phase:
        """Phase of the current iteration of the overlapped step; REST without overlap."""
        hook = self._engine.hook
        return Phase.REST if hook is None else hook.machine.phase

    def __repr__(self) -> str:
        shard = self._engine.shard
        owned, rank = len(shard.binding.owned()), f"rank {self.rank} of {self.world_size}"
        return (
            f"{type(self).__name__} of {type(shard.inner).__name__}, {rank}, "
            f"{owned} of {len(shard.table)} parameters owned\n{super().__repr__()}"
        )

    @property
    def stage(self) -> int:
        """1: optimizer state is sharded; 2: gradients too."""
        return self._engine.stage

    @property
    def rank(self) -> GroupRank:
        """This process's rank in the group."""
        return self._shard.everyone.group_rank

    @property
    def global_rank(self) -> GlobalRank:
        """This process's rank in the whole job."""
        comm = self._shard.everyone
        return comm.global_rank(comm.group_rank)

    @property
    def _all_params(self) -> list[Tensor]:
        """All parameters, under the name that torch's own class has for them."""
        return list(self._shard.table.params)

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self._shard.everyone.world_size

    @property
    def process_group(self) -> ProcessGroup:
        """The group whose ranks share the optimizer."""
        return self._shard.everyone.process_group

    @property
    def shard_group(self) -> ProcessGroup:
        """The group over whose ranks state is sharded: ``process_group`` by default."""
        return self._shard.comm.process_group


def find_diverging(digests: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Ranks whose value differs from most ranks' value, by parameter.

    Args:
        digests: for each rank, in rank order, a number per parameter.

    Returns:
        For each parameter on which ranks disagree, the ranks in a minority. Without a single majority, all ranks that
        disagree with the lowest one.
    """
    found = {}
    for index, numbers in enumerate(zip(*digests, strict=True)):
        usual, _ = max(Counter(numbers).items(), key=lambda item: item[1])  # the first of several: the lowest rank's
        minority = [rank for rank, number in enumerate(numbers) if number != usual]
        if minority:
            found[index] = minority
    return found
