"""The ranks of an optimizer, and their agreement that all of them succeeded.

*Everyone* trains together; the *shard* ranks share one copy of the state; *replicas* hold the same shard. Without a
shard group the shard ranks are everyone, and there are no replicas. With shard groups::

    everyone:  0 1 2 3         DDP's ranks: agreement, errors of a step, whether gradients are averaged
    shard:     0 1 | 2 3       own the state once: sums to owners, syncs, norms, moves and gathers of state
    replicas:  0 2 | 1 3       hold the same shards: the sums of owned gradients add up across

Replicas take the same decisions, because they see the same sums to the last bit.

A rank that fails while its peers succeed would leave them waiting in the next collective. So code that can fail on only
some ranks runs inside `Agreement`: at its end every rank reports whether it failed, and a digest of the facts that must
be equal. A failed rank raises its own error, and its peers an error that names it; if digests differ, the details are
exchanged and every rank raises the same error, which names the ranks and the parameter. Errors of a local step, and the
options that the loop has given, travel in `StepErrors`, at the end of the step.
"""

import hashlib
import json
import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ddp_zero.core.comm.communicator import Communicator, next_generation
from ddp_zero.core.comm.exchange import ROUND, ROUND_BITS, PointToPointExchange
from ddp_zero.core.comm.groups import Peers
from ddp_zero.core.comm.missing import forget_failures
from ddp_zero.core.comm.ring import BackgroundJob, RingWorker
from ddp_zero.core.local.arguments import check_group, is_process_group
from ddp_zero.core.local.loop_options import LoopOptions, OptionsSummary, comparable_options
from ddp_zero.core.local.parameters import Fingerprint, ParameterTable
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.plan.replicas import ShardGroups
from ddp_zero.error_codes import coded, truncated


class Agreement:
    """A context whose block succeeds on every rank of the group, or raises on every rank.

    ``doing`` is the action of the block, for messages: "building ZeroRedundancyOptimizer". A failing rank raises its
    own error, all others RuntimeError. If arguments of `declare` or `declare_parameters` differ, all raise ValueError.
    """

    def __init__(self, comm: Peers, doing: str) -> None:
        self._comm = comm
        self._operation = doing
        self._facts = {"operation": doing}
        self._fingerprints: list[Fingerprint] = []

    def declare(self, fact: str, value: object) -> None:
        """Add a fact that must have the same value on every rank."""
        self._facts[fact] = str(value)

    def declare_each(self, facts: Mapping[str, object]) -> None:
        """Add facts, by name."""
        self._facts.update(zip(facts, map(str, facts.values()), strict=True))

    def declare_options(self, group: Mapping[str, Any], known: Collection[str], place: str) -> None:
        """Add the options of a parameter group, whose name in messages is ``place``.

        ``known`` are the options of the class that steps the group; see `loop_options.must_be_equal` for other options.
        """
        for name, value in comparable_options(group, known).items():
            self.declare(f"{name!r} of {place}", value)

    def declare_parameters(self, table: ParameterTable) -> None:
        """Add the parameters, which must be the same, in the same order, on every rank."""
        self._fingerprints = table.fingerprints()

    def __enter__(self) -> "Agreement":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # the user interrupts: peers may not come to this agreement
        # from here on every rank runs the same collectives, whether its block failed or not: first the flags and
        # digests, then at most one exchange of text, chosen by facts that all ranks have seen
        structures = [fingerprint.structure() for fingerprint in self._fingerprints]
        samples = [fingerprint.sample for fingerprint in self._fingerprints]
        statements = [0 if error is None else 1, digest([self._facts, structures]), digest(samples)]
        failed, facts, values = zip(*self._comm.all_gather_ints(statements), strict=True)
        if any(failed):
            self._raise_failures(failed, error)
        elif len(set(facts)) > 1:
            self._raise_first_difference(structures)
        elif len(set(values)) > 1:
            self._raise_if_permuted(samples)

    def _raise_failures(self, failed: Sequence[int], error: BaseException | None) -> None:
        mine = "" if error is None else f"{type(error).__name__}: {error}"
        # a failed rank takes part too: its peers wait here for its text
        messages = self._comm.all_gather_text(mine)
        if error is None:
            shown = "; ".join(f"rank {rank}: {messages[rank]}" for rank, flag in enumerate(failed) if flag)
            message = f"Expected every rank to succeed in {self._operation}, got a failure on {shown}"
            raise RuntimeError(coded(message, "[ZERO-505]"))

    def _raise_first_difference(self, structures: Sequence[Sequence[object]]) -> None:
        everyone = [json.loads(text) for text in self._comm.all_gather_text(json.dumps([self._facts, structures]))]
        for rank, statement in enumerate(everyone):
            if statement != everyone[0]:
                what, expected, got = _first_difference(*everyone[0], *statement)
                self._refuse(what, expected, got, rank)

    def _raise_if_permuted(self, samples: Sequence[str]) -> None:
        """Detect a different order of equally shaped parameters, which shows if the ranks hold the same values."""
        everyone = [json.loads(text) for text in self._comm.all_gather_text(json.dumps(samples))]
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0] and sorted(theirs) == sorted(everyone[0]):
                index = next(i for i, sample in enumerate(theirs) if sample != everyone[0][i])
                self._refuse(
                    "the parameters in the same order",
                    "an order",
                    f"a different order from parameter {index} {_describe(self._fingerprints[index].structure())} on",
                    rank,
                )

    def _refuse(self, expected: str, reference: str, got: str, rank: int) -> None:
        names = [self._comm.name(GroupRank(rank)) for rank in (0, rank)]
        raise ValueError(
            f"Expected {expected} on every rank in {self._operation}, got {reference} on {names[0]} and {got} on "
            f"{names[1]}. Give every rank the same. [ZERO-506]"
        )


def _first_difference(
    first_facts: dict[str, str],
    first_structures: Sequence[Sequence[object]],
    facts: dict[str, str],
    structures: Sequence[Sequence[object]],
) -> tuple[str, str, str]:
    """The first thing in which another rank differs from the first rank, with the text of both, for a message."""
    for fact in first_facts | facts:
        pair = first_facts.get(fact, _NONE), facts.get(fact, _NONE)
        if pair[0] != pair[1]:
            return f"the same {fact}", *pair
    for index, (reference, structure) in enumerate(zip(first_structures, structures, strict=False)):
        if reference != structure:
            return f"the same parameter {index}", _describe(reference), _describe(structure)
    return "as many parameters", str(len(first_structures)), str(len(structures))


def _describe(structure: Sequence[object]) -> str:
    name, group, shape, stride, dtype, device, trainable, cost = structure
    named = f"{name!r}, " if name is not None else ""
    further = ("" if trainable else ", frozen") + (f", cost {cost}" if cost else "")
    return f"({named}group {group}, shape {list(shape)}, strides {list(stride)}, {dtype} on {device}{further})"  # type: ignore[call-overload]


def digest(facts: object) -> int:
    """63 bits of a hash of facts that JSON can write."""
    return int.from_bytes(hashlib.sha256(json.dumps(facts).encode()).digest()[:8], "big") >> 1


BLOCK_BYTES = 512
_DIGEST_BYTES = 8
_NONE = "none"
_END_OF_STEP = -1  # in the subject of these messages, in place of a bucket's index
WHAT_NOW = "Some parameters may have been updated: restart from a checkpoint."


class StepFailedElsewhereError(RuntimeError):
    """A local step has failed on other ranks."""


@dataclass
class _Outcomes:
    """The exchange of a step's outcomes: this rank's block goes to every peer, and a block of each peer arrives."""

    exchange: PointToPointExchange
    own_block: Tensor
    blocks: dict[GroupRank, Tensor]
    local_error: Exception | None = None
    options: LoopOptions | None = None
    stated: OptionsSummary = field(default_factory=OptionsSummary)


class StepErrors:
    """Shares errors of local steps between ranks: `note`, then at the end of the step `share` and `raise_any`.

    A local step may raise only on the owner of a parameter. That rank then stops stepping but still sends its segments,
    so that no peer waits for them. After its last segment every rank sends each peer a block of fixed size: a digest of
    the options that its loop has given, and the text of its error or else some of these options.

    Errors are shared in this way only where messages are direct (Gloo, CPU memory). Elsewhere, as on NCCL, an error is
    raised where it occurs, and the peers raise when the group's time-out passes.

    Args:
        comm: all ranks that step, replicas included: parameters would differ on a rank that has not stepped them.
        tensors: the stepped tensors; their devices decide whether errors are shared.
    """

    def __init__(self, comm: Communicator, tensors: Sequence[Tensor], plan_digest: int) -> None:
        # where errors are shared: whether this rank's local step failed, in the present step or the last shared one
        self.has_local_error = False
        self._comm = comm
        self._subject = (plan_digest, _END_OF_STEP)
        # not on an accelerator: reading a block would wait for the device in every step
        self._is_shared = not comm.is_alone and all(comm.has_direct_messages(tensor.device) for tensor in tensors)
        self._local_error: Exception | None = None
        self._in_flight: _Outcomes | None = None
        self._reusable: _Outcomes | None = None  # of an earlier step, once all blocks were sent and received

    def note(self, error: Exception) -> bool:
        """Record that this rank's local step failed. Returns False if errors are not shared: raise it now."""
        if sys.version_info >= (3, 11):
            error.add_note(f"({self._comm.name(self._comm.group_rank)}. {WHAT_NOW})")
        self._local_error = error if self._is_shared else None
        self.has_local_error = self._is_shared
        return self._is_shared

    def share(self, options: LoopOptions | None = None) -> None:
        """Once every bucket was sent: send each peer the outcome of the step. A collective; waits for no message."""
        if not self._is_shared:
            return
        error, self._local_error = self._local_error, None
        stated = OptionsSummary() if options is None else options.summary
        # only blocks that no peer may still write into are used again: a dropped step leaves its blocks to them
        outcomes = self._reusable or self._new_blocks()
        self._reusable = None
        # of fixed size, so that receives are posted before the outcome is known: no round trip
        outcomes.own_block.copy_(encode(stated, "" if error is None else f"{type(error).__name__}: {error}"))
        outcomes.local_error, outcomes.options, outcomes.stated = error, options, stated
        outcomes.exchange.post()
        # holds the blocks: peers write into them until `wait` of the exchange returns
        self._in_flight = outcomes
        self.has_local_error = error is not None

    def _new_blocks(self) -> _Outcomes:
        mine = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cpu")
        blocks = {peer: torch.empty_like(mine) for peer in self._comm.peers()}
        sent = {peer: [mine] for peer in blocks}
        received = {peer: [block] for peer, block in blocks.items()}
        return _Outcomes(PointToPointExchange(self._comm, sent, received, self._subject, is_control=True), mine, blocks)

    def receive(self) -> None:
        """Wait for the peers' blocks."""
        if self._in_flight is not None:
            with self._comm.trace.label("wait_errors"):
                self._in_flight.exchange.wait("the end of the step")

    def raise_any(self) -> None:
        """Wait for the peers' blocks, and raise the errors in them, once. Does nothing if nothing was shared.

        Raises the error of this rank's local step, if it has one; StepFailedElsewhereError if only peers failed;
        RuntimeError, on every rank, if ranks were given different options.
        """
        # taken first, so that errors are raised once
        outcomes, self._in_flight = self._in_flight, None
        self.has_local_error = self._local_error is not None
        if outcomes is None:
            return
        # before this rank's own error is raised: its peers' blocks must have arrived, or memory in use would be freed
        outcomes.exchange.wait("the end of the step")
        error, outcomes.local_error = outcomes.local_error, None
        self._reusable = outcomes
        if error is not None:
            raise error.with_traceback(error.__traceback__)
        self._check_peers(outcomes)

    def _check_peers(self, outcomes: _Outcomes) -> None:
        """Raise the errors of other ranks, or an error where their options differ from this rank's."""
        comm = self._comm
        told = {peer: decode(block) for peer, block in sorted(outcomes.blocks.items())}
        shown = "; ".join(f"on {comm.name(peer)} {error}" for peer, (_, error) in told.items() if error)
        if shown:
            message = f"Expected the local step to succeed on every rank, got {shown}. {WHAT_NOW}"
            raise StepFailedElsewhereError(coded(message, "[ZERO-319]"))
        other = next((peer for peer, (theirs, _) in told.items() if theirs.digest != outcomes.stated.digest), None)
        if other is not None and outcomes.options is not None:
            group, option, here, there = outcomes.options.find_difference(told[other][0])
            raise RuntimeError(
                difference_in_options(group, option, (here, comm.name(comm.group_rank)), (there, comm.name(other)))
            )

    def forget(self, sent_too: bool) -> None:
        """Drop the error of the current step; with ``sent_too`` also blocks in flight with errors not yet raised."""
        self._local_error = None
        if sent_too:
            self._in_flight = None
        self.has_local_error = self._in_flight is not None and self._in_flight.local_error is not None


def difference_in_options(group: int, option: str, here: tuple[str | None, str], there: tuple[str | None, str]) -> str:
    """The message about an option of a group, from two values, None if not known, and the ranks that have them."""
    shown = " and ".join(f"{'another value' if value is None else value} on {rank}" for value, rank in (here, there))
    return (
        f"Expected {option!r} of parameter group {group} to be the same on every rank, got {shown}. Set options alike "
        "on all ranks; a scheduler that decides by the loss needs the same loss on all of them, such as the mean. "
        f"{WHAT_NOW} [ZERO-820]"
    )


def encode(stated: OptionsSummary, error: str) -> Tensor:
    """Write a block: a summary's digest, then the text of an error or else of the summary; then zeros."""
    block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device="cpu")
    text = truncated(error or stated.excerpt, BLOCK_BYTES - _DIGEST_BYTES - 1)
    raw = bytearray(stated.digest.to_bytes(_DIGEST_BYTES, "little") + bytes([bool(error)]) + text)
    block[: len(raw)] = torch.frombuffer(raw, dtype=torch.uint8)
    return block


def decode(block: Tensor) -> tuple[OptionsSummary, str]:
    """Read a block of `encode`: the summary, and the text of the error or an empty string."""
    raw = bytes(block.tolist())
    has_error = bool(raw[_DIGEST_BYTES])
    text = raw[_DIGEST_BYTES + 1 :].rstrip(b"\0").decode(errors="ignore")
    return OptionsSummary(int.from_bytes(raw[:_DIGEST_BYTES], "little"), "" if has_error else text), text * has_error


_NO_MEMBER = (
    "shard_group must contain the process that passes it, global rank {}. Every rank passes the shard group of its "
    "own node, as mesh.get_group('shard') of a device mesh gives it. [ZERO-511]"
)


@dataclass
class Ranks:
    """The groups of ranks that an optimizer works with; see the module docstring."""

    everyone: Communicator  # DDP's ranks
    shard: Communicator  # ranks that share one copy of the state; the same object as ``everyone`` without a shard group
    # ranks that hold the same shards as this rank; None without shard groups, or with a single shard group
    replicas: Communicator | None = None
    _background: RingWorker | None = field(default=None, repr=False)

    @classmethod
    def alone(cls, comm: Communicator) -> "Ranks":
        return cls(comm, comm)

    @property
    def replica(self) -> int:
        """Index of this rank's shard group."""
        return 0 if self.replicas is None else self.replicas.group_rank

    @property
    def num_replicas(self) -> int:
        """Number of ranks that hold each shard."""
        return 1 if self.replicas is None else self.replicas.world_size

    def begin_round(self) -> None:
        """Start a new round, which separates later messages from earlier ones."""
        for comm in self._distinct():
            comm.round += 1
            comm.round_tag = comm.round * ROUND & ROUND_BITS

    def abandon_threads(self) -> None:
        """After an error: start later messages in new threads, not behind messages that may never end."""
        for comm in self._distinct():
            comm.abandon_ring_transfers()
        self._background = None

    def run_in_background(self, job: BackgroundJob) -> None:
        """Run a job in a thread, after the jobs started before."""
        if self._background is None:
            self._background = RingWorker(threads=1)
        self._background.start(job)

    def _distinct(self) -> list[Communicator]:
        every = (self.everyone, self.shard, self.replicas)
        return list({id(comm): comm for comm in every if comm is not None}.values())


def build_ranks(
    group: ProcessGroup | None, shard_group: ProcessGroup | None, device: torch.device | None = None
) -> Ranks:
    """Build the ranks of an optimizer. A collective of the group.

    With native collectives it also builds a second process group over the same ranks, for all-gathers of parameters.

    Args:
        group: everyone; None for the default group.
        shard_group: this rank and the ranks that share a copy of the state with it; None for everyone.
        device: device of this rank's parameters; see `Communicator`.

    Raises:
        TypeError: if ``shard_group`` is not a process group.
        ValueError: on every rank, if shard groups do not fit together, differ in size, or were given on some ranks
            only.
        RuntimeError: if the call failed on another rank.
    """
    # every branch below follows from statements that all ranks have gathered
    everyone = Communicator(group, next_generation(group), device=device)
    forget_failures(everyone.process_group)
    mine: list[int] = []
    with Agreement(everyone, "arranging shard groups") as agreement:
        agreement.declare("shard_group", "None" if shard_group is None else "a process group")
        if shard_group is not None:
            if not is_process_group(shard_group):
                check_group(shard_group, "shard_group")
            if not isinstance(shard_group, ProcessGroup) or dist.get_rank(shard_group) < 0:
                raise ValueError(_NO_MEMBER.format(dist.get_rank()))
            mine = dist.get_process_group_ranks(shard_group)
    if shard_group is not None:
        stated = [json.loads(text) for text in everyone.all_gather_text(json.dumps(mine))]
        groups = ShardGroups.of(dist.get_process_group_ranks(everyone.process_group), stated)
        if len(groups.groups) > 1:
            trace = everyone.trace
            across = _replica_group(everyone, shard_group, groups)
            shard = Communicator(shard_group, next_generation(shard_group), "shard rank", trace, device)
            return Ranks(everyone, shard, Communicator(across, next_generation(across), "replica", trace, device))
    if device is not None and not everyone.is_alone and everyone.has_native_collectives(device):
        _use_separate_gathering_group(everyone)
    return Ranks.alone(everyone)


def _use_separate_gathering_group(comm: Communicator) -> None:
    """All-gather parameters on a second process group: an earlier optimizer's if all ranks have one. A collective."""
    reference = _gathering_groups.get(comm.process_group)
    group = None if reference is None else reference()
    is_whole_job = comm.world_size == dist.get_world_size()
    facts = comm.all_gather_ints([int(group is not None), _num_groups()])
    if group is None or not all(is_known for is_known, _ in facts):
        # torch names a group by a rank's number of groups: names would differ, and the ranks would never meet
        if not is_whole_job and len({count for _, count in facts}) > 1:
            return
        group = _new_group(comm, dist.get_process_group_ranks(comm.process_group))
        _gathering_groups[comm.process_group] = weakref.ref(group)
    # a group runs its collectives one after the other: on a single group a bucket's all-gather would delay the next
    # reduce-scatter. Each rank issues the collectives of both groups from one thread, in the order of the plan, as NCCL
    # requires of communicators used concurrently
    comm.gathering_group = group


def _replica_group(everyone: Communicator, shard_group: ProcessGroup, groups: ShardGroups) -> ProcessGroup:
    """This rank's group of replicas, an earlier optimizer's if all ranks have its group. A collective."""
    me = everyone.global_rank(everyone.group_rank)
    replicas = next(ranks for ranks in groups.replicas() if me in ranks)
    # weak: a destroyed group must not be reused, and nothing here may keep it alive
    reference = _replica_groups.setdefault(shard_group, {}).get(replicas)
    group = None if reference is None else reference()
    are_known = all(flag for (flag,) in everyone.all_gather_ints([int(group is not None)]))
    if group is None or not are_known:
        group = build_replica_group(everyone, groups)
    _replica_groups[shard_group][replicas] = weakref.ref(group)
    return group


def build_replica_group(everyone: Communicator, groups: ShardGroups) -> ProcessGroup:
    """This rank's group of replicas, with everyone's backend and time-out. A collective.

    Raises RuntimeError on every rank if ranks are in different numbers of groups, by which torch names groups.
    """
    me = everyone.global_rank(everyone.group_rank)
    is_whole_job = everyone.world_size == dist.get_world_size()
    if not is_whole_job:
        counts = [count for (count,) in everyone.all_gather_ints([_num_groups()])]
        if len(set(counts)) > 1:
            raise RuntimeError(
                "Every rank must have created the same number of process groups before shard_group= is used, got "
                f"{counts}: torch names groups by their number, so names would differ between ranks. Build the same "
                "number of groups on every rank, or use the default group for DDP and the optimizer. [ZERO-506]"
            )
    own_group: ProcessGroup | None = None
    # in one order on every rank: torch numbers groups as they are created
    for replicas in groups.replicas():
        if is_whole_job or me in replicas:  # torch counts the groups of a job: all of its ranks call this, or members
            built = _new_group(everyone, replicas)
            own_group = built if me in replicas else own_group
    assert own_group is not None, "groups cover everyone"
    return own_group


def _new_group(comm: Communicator, members: Sequence[int]) -> ProcessGroup:
    """A group of members of ``comm``, with its backend and time-out. A collective of the job if ``comm`` is the job."""
    group: ProcessGroup = dist.new_group(
        list(members),
        timeout=comm.time_out,
        backend=str(dist.get_backend_config(comm.process_group)),
        use_local_synchronization=comm.world_size != dist.get_world_size(),
    )
    return group


def _num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_names)


_gathering_groups: weakref.WeakKeyDictionary[ProcessGroup, "weakref.ref[ProcessGroup]"] = weakref.WeakKeyDictionary()
"""Gathering groups by the process group of their ranks, reused by later optimizers; weak, as `_replica_groups`."""

_ByReplicas = dict[tuple[int, ...], "weakref.ref[ProcessGroup]"]
_replica_groups: weakref.WeakKeyDictionary[ProcessGroup, _ByReplicas] = weakref.WeakKeyDictionary()
"""Replica groups by shard group and replicas, for later optimizers; weak: `destroy_process_group` ends them."""
