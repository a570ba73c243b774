"""Which ranks a thing concerns: everyone who trains together, those who share the shards, or the replicas of one shard.

Without a shard group everyone shares the shards, and there are no replicas. With one, ::

    everyone:  0 1 2 3         DDP's ranks: agreement, errors of a step, whether gradients are averaged
    shard:     0 1 | 2 3       own the state once: sums to owners, syncs, norms, moves and gathers of state
    replicas:  0 2 | 1 3       hold the same shards: the sums of what they own add up across

Replicas take the same decisions, because they see the same sums to the last bit.
"""

import json
import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ddp_zero.core.comm.agreement import Agreement
from ddp_zero.core.comm.communicator import Communicator, next_generation
from ddp_zero.core.comm.ring import Background, RingWorker
from ddp_zero.core.local.arguments import check_group, is_group
from ddp_zero.core.plan.replicas import ShardGroups

_NO_MEMBER = (
    "Expected shard_group to be a group that this process belongs to, got one without global rank {}. Every rank "
    "passes its own: the one of its node, as mesh.get_group('shard') of a device mesh gives it."
)


@dataclass
class Ranks:
    """The ranks that an optimizer works with.

    Attributes:
        shard: those that share one copy of the state. The same object as ``everyone`` without a shard group.
        replicas: those that hold the same shards as this one; None without a shard group, or with a single one.
    """

    everyone: Communicator
    shard: Communicator
    replicas: Communicator | None = None
    _background: RingWorker | None = field(default=None, repr=False)

    @classmethod
    def alone(cls, comm: Communicator) -> "Ranks":
        """Without a shard group."""
        return cls(comm, comm)

    @property
    def replica(self) -> int:
        """The number of this rank's shard group."""
        return 0 if self.replicas is None else self.replicas.group_rank

    @property
    def num_replicas(self) -> int:
        """How many ranks hold each shard."""
        return 1 if self.replicas is None else self.replicas.world_size

    def begin_round(self) -> None:
        """Tell the messages that follow from those of the step before."""
        for comm in self._distinct():
            comm.round += 1

    def leave(self) -> None:
        """After an error: let later messages not wait for those that may never end."""
        for comm in self._distinct():
            comm.leave_rings()
        self._background = None

    def in_background(self, job: Background) -> None:
        """Run a job in a thread, behind those started before."""
        if self._background is None:
            self._background = RingWorker(threads=1)
        self._background.start(job)

    def _distinct(self) -> list[Communicator]:
        every = (self.everyone, self.shard, self.replicas)
        return list({id(comm): comm for comm in every if comm is not None}.values())


def arrange(group: ProcessGroup | None, shard_group: ProcessGroup | None, device: torch.device | None = None) -> Ranks:
    """The ranks of an optimizer. A collective of the group if there is a shard group, which builds those across.

    On a backend of native collectives also a collective that builds a second process group over the ranks that share
    the state, for parameters: a group runs its collectives one after the other, so that on a single one the all-gather
    of a bucket would delay the reduction of the next.

    Args:
        group: everyone; None for the default group.
        shard_group: the ranks that share one copy of the state with this one; None for everyone.
        device: where this rank's parameters are; see `Communicator`.

    Raises:
        TypeError: for a shard group that is no process group.
        ValueError: on every rank, if shard groups do not fit together, or are of different sizes.
        RuntimeError: if it failed on another rank.
    """
    everyone = Communicator(group, next_generation(group), device=device)
    if shard_group is None:
        return _with_own_group_for_parameters(Ranks.alone(everyone), device)
    with Agreement(everyone, "arranging shard groups"):
        if not is_group(shard_group):
            check_group(shard_group, "shard_group")
        if not isinstance(shard_group, ProcessGroup) or dist.get_rank(shard_group) < 0:
            raise ValueError(_NO_MEMBER.format(dist.get_rank()))
        mine = dist.get_process_group_ranks(shard_group)
    stated = [json.loads(text) for text in everyone.all_gather_text(json.dumps(mine))]
    groups = ShardGroups.of(dist.get_process_group_ranks(everyone.process_group), stated)
    if len(groups.groups) == 1:
        return _with_own_group_for_parameters(Ranks.alone(everyone), device)
    across = _group_across(everyone, shard_group, groups)
    shard = Communicator(shard_group, next_generation(shard_group), "shard rank", everyone.trace, device)
    return Ranks(everyone, shard, Communicator(across, next_generation(across), "replica", everyone.trace, device))


def _with_own_group_for_parameters(ranks: Ranks, device: torch.device | None) -> Ranks:
    """Let parameters travel on a process group of their own, the one of earlier optimizers if all ranks have one.

    Every rank issues the collectives of both groups from one thread, in the order of the plan, as NCCL requires of
    communicators that are used concurrently. Without it where torch would not name the group alike on all ranks.
    """
    comm = ranks.shard
    if device is None or comm.world_size == 1 or not comm.has_native_collectives(device):
        return ranks
    reference = _for_parameters.get(comm.process_group)
    found, is_whole_job = None if reference is None else reference(), comm.world_size == dist.get_world_size()
    facts = comm.all_gather_ints([int(found is not None), len(dist.distributed_c10d._world.pg_names)])
    if found is None or not all(is_known for is_known, _ in facts):
        if not is_whole_job and len({count for _, count in facts}) > 1:
            return ranks
        found = dist.new_group(
            dist.get_process_group_ranks(comm.process_group),
            timeout=comm.time_out,
            backend=str(dist.get_backend_config(comm.process_group)),
            use_local_synchronization=not is_whole_job,
        )
        _for_parameters[comm.process_group] = weakref.ref(found)
    comm.gathering_group = found
    return ranks


def _group_across(everyone: Communicator, shard_group: ProcessGroup, groups: ShardGroups) -> ProcessGroup:
    """This rank's group across the shard groups, the one of earlier optimizers if all ranks have one. A collective."""
    me = everyone.global_rank(everyone.group_rank)
    replicas = next(ranks for ranks in groups.replicas() if me in ranks)
    reference = _known.setdefault(shard_group, {}).get(replicas)
    found = None if reference is None else reference()
    are_known = all(flag for (flag,) in everyone.all_gather_ints([int(found is not None)]))
    across = found if found is not None and are_known else _build(everyone, groups)
    _known[shard_group][replicas] = weakref.ref(across)
    return across


def _build(everyone: Communicator, groups: ShardGroups) -> ProcessGroup:
    """This rank's group across the shard groups, on the backend and with the time-out of everyone's. A collective."""
    backend = str(dist.get_backend_config(everyone.process_group))
    me = everyone.global_rank(everyone.group_rank)
    is_whole_job = everyone.world_size == dist.get_world_size()
    if not is_whole_job:
        _check_same_count(everyone)
    found: ProcessGroup | None = None
    for replicas in groups.replicas():
        if is_whole_job or me in replicas:  # torch counts the groups of a job: all of its ranks call this, or members
            built = dist.new_group(
                list(replicas), timeout=everyone.time_out, backend=backend, use_local_synchronization=not is_whole_job
            )
            found = built if me in replicas else found
    assert found is not None, "groups cover everyone"
    return found


def _check_same_count(everyone: Communicator) -> None:
    """Check that torch will name a group alike on its members: it does so by how many groups each of them is in.

    Raises:
        RuntimeError: on every rank, if ranks are in different numbers of groups.
    """
    counts = [count for (count,) in everyone.all_gather_ints([len(dist.distributed_c10d._world.pg_names)])]
    if len(set(counts)) > 1:
        raise RuntimeError(
            "Expected every rank to have created the same number of process groups before shard_group= is used, got "
            f"{counts}: torch names groups by their number, so names would differ between ranks. Build the same number "
            "of groups on every rank, or use the default group for DDP and the optimizer."
        )


_for_parameters: weakref.WeakKeyDictionary[ProcessGroup, "weakref.ref[ProcessGroup]"] = weakref.WeakKeyDictionary()
"""Process groups for parameters, by that of their ranks, for further optimizers; weakly, as below."""

_Across = dict[tuple[int, ...], "weakref.ref[ProcessGroup]"]
_known: weakref.WeakKeyDictionary[ProcessGroup, _Across] = weakref.WeakKeyDictionary()
"""Groups across, by shard group and replicas, for further optimizers; weakly: `destroy_process_group` ends them."""
