"""`Join` over a mesh: ranks at one place of the data dimension leave together, which is checked in every iteration.

Under `torch.distributed.algorithms.Join` each data-parallel group keeps its own count of ranks that still train. A rank
whose peers along another dimension have left would wait for them inside the model, until the time-out. So before the
forward pass every rank compares its state with its peers, and the data-parallel group hears of the outcome: all ranks
of the mesh raise, or none. Ranks that have joined take part before they shadow the iteration, and when all have joined.

With a DDP model they do so where DDP itself tells joined ranks about the backward pass. Without one, Join hears of an
iteration before the forward pass as well, or in ``opt.step()`` if the model is not called.
"""

import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.utils.hooks import RemovableHandle

from ddp_zero.core.backward.forward_passes import weakly
from ddp_zero.core.backward.reducer import watch_iterations_under_join
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.groups import gather_text_across
from ddp_zero.core.step.join import refuse_replicas
from ddp_zero.optimizer import engine_of, shard_of
from ddp_zero.parallel.members import Member


class Progress(IntEnum):
    """How far a rank is."""

    TRAINING = 0
    JOINED = 1
    DONE = 2  # its data-parallel group has joined as a whole


class PeersUnderJoin:
    """Compares the progress of ranks along the other dimensions of the mesh.

    Args:
        comms: the data-parallel ranks, and this rank's group along each other dimension of several ranks. With the
            data-parallel ranks alone nothing is compared or sent.
    """

    def __init__(self, comms: Sequence[Communicator]) -> None:
        self._comms = comms

    @property
    def are_there(self) -> bool:
        """True if there are other dimensions."""
        return len(self._comms) > 1

    def check(self, mine: Progress) -> None:
        """Compare progress with peers, once per iteration, and tell the data-parallel ranks. A collective of the mesh.

        Raises:
            RuntimeError: on every rank of the mesh, if progress differs anywhere.
        """
        if not self.are_there:
            return
        least = most = int(mine)
        for comm in self._comms[1:]:
            every = comm.all_gather_ints([least, most])
            least, most = min(low for low, _ in every), max(high for _, high in every)
        if not any(flag for (flag,) in self._comms[0].all_gather_ints([int(least != most)])):
            return
        here = self._comms[0]
        rank = here.global_rank(here.group_rank)
        texts = sorted(gather_text_across(self._comms, f"{rank} {int(mine != Progress.TRAINING)}"), key=_rank_of)
        left = ", ".join(text.split()[0] for text in texts if text.endswith(" 1"))
        train = ", ".join(text.split()[0] for text in texts if text.endswith(" 0"))
        raise RuntimeError(
            f"Expected ranks at one place of the data-parallel dimension to leave Join together, got global ranks "
            f"{left} that have joined and {train or 'none'} that still train. Give the ranks along the other "
            "dimensions of the mesh the same number of batches. [ZERO-818]"
        )


def _rank_of(text: str) -> int:
    return int(text.split()[0])


class ParallelJoin(JoinHook):
    """One use of Join: watches iterations where this rank trains, and shadows those of others when it has joined.

    Args:
        optimizer: the one that Join was given.
        model: this rank's part of the model.
        member: its only member.
        peers: along the other dimensions.
        step: takes a step without gradients of this rank.
        divides_by_initial_world_size: whether averages that no DDP model takes count ranks that have joined, too.
    """

    def __init__(
        self,
        optimizer: Joinable,
        model: nn.Module | None,
        member: Member,
        peers: PeersUnderJoin,
        step: Callable[[], None],
        divides_by_initial_world_size: bool,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._member, self._peers, self._step = member, peers, step
        self._handle: RemovableHandle | None = None
        self._stop: Callable[[], None] | None = None
        self._has_begun = False  # an iteration, without a DDP model
        if member.ddp is not None:
            self._stop = watch_iterations_under_join(member.ddp, weakly(self._in_iteration))
        else:
            assert member.averages is not None, "no DDP model reduces"
            member.averages.divides_by_training = not divides_by_initial_world_size
            engine_of(member.zero).averages_reach_joined = True
            if model is not None and peers.are_there:
                self._handle = model.register_forward_pre_hook(_BeforeForward(self), prepend=True)

    def main_hook(self) -> None:
        """Shadow one iteration of ranks that still train."""
        if self._member.ddp is None:
            self._peers.check(Progress.JOINED)
        self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Every data-parallel rank has joined: those at other places of the mesh must have as well."""
        self.stop()
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._join_config = _JoinConfig.construct_disabled_join_config()
        self._peers.check(Progress.DONE)

    def before_forward(self) -> None:
        """Without a DDP model, on a rank that trains: begin an iteration before it needs its peers."""
        if torch.is_grad_enabled():
            self._begin()

    def before_step(self) -> None:
        """In ``opt.step()`` of a rank that trains, without a DDP model: the iteration has begun now at the latest."""
        if self._member.ddp is None:
            self._begin()
            self._has_begun = False

    def _begin(self) -> None:
        optimizer = self._optimizer()
        if optimizer is None or not optimizer._join_config.enable or self._has_begun:
            return
        self._has_begun = True
        Join.notify_join_context(optimizer)
        self._peers.check(Progress.TRAINING)

    def stop(self) -> None:
        """Watch no more."""
        if self._handle is not None:
            self._handle.remove()
        if self._stop is not None:
            self._stop()
        self._handle = self._stop = None

    def _in_iteration(self, has_joined: bool) -> None:
        self._peers.check(Progress.JOINED if has_joined else Progress.TRAINING)


class _BeforeForward:
    """A forward pre-hook; has no effect in copies of the model."""

    def __init__(self, join: ParallelJoin | None = None) -> None:
        self._join = None if join is None else weakref.ref(join)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _BeforeForward, ()

    def __call__(self, module: nn.Module, args: Any) -> None:
        join = None if self._join is None else self._join()
        if join is not None:
            join.before_forward()


def refuse(members: Sequence[Member], stages: int) -> None:
    """Refuse Join where ranks that have joined would be missing; NotImplementedError, alike on all ranks."""
    own = [member for member in members if member.group is not None]
    if own:
        raise NotImplementedError(
            f"ParallelOptimizer does not support Join with groups that have a process_group, here {own[0].describe()}: "
            "experts exchange tokens between data-parallel ranks, and those that have joined would be missing. Give "
            "every data-parallel rank the same number of batches, empty ones if need be. [ZERO-812]"
        )
    if len(members) > 1:
        raise NotImplementedError(
            f"ParallelOptimizer does not support Join where gradients of {members[1].describe()} are averaged in "
            "opt.step() and others are not. Wrap the model in DDP again, so that it reduces all of them, and build a "
            "new ParallelOptimizer. [ZERO-812]"
        )
    if stages > 1:
        raise NotImplementedError(
            f"ParallelOptimizer does not support Join with pipeline stages, here {stages}: DDP counts every "
            "micro-batch as an iteration of Join, and stages run at different times. Give every data-parallel rank the "
            "same number of batches. [ZERO-812]"
        )
    for member in members:
        refuse_replicas(shard_of(member.zero).ranks)
