"""The ranks of an optimizer, and their agreement that all of them succeeded.

*Everyone* trains together; the *shard* ranks share one copy of the state; *replicas* hold the same shard. Without a
shard group the shard ranks are everyone, and there are no replicas. With one, ::

    everyone:  0 1 2 3         DDP's ranks: agreement, errors of a step, whether gradients are averaged
    shard:     0 1 | 2 3       own the state once: sums to owners, syncs, norms, moves and gathers of state
    replicas:  0 2 | 1 3       hold the same shards: the sums of owned gradients add up across

Replicas take the same decisions, because they see the same sums to the last bit.

A rank that fails while its peers succeed would leave them waiting in the next collective. So code that can fail on only
some ranks runs inside `Agreement`: at its end every rank reports whether it failed, and a digest of the facts that must
be equal. A failed rank raises its own error and its peers raise one that names it; if digests differ, the details are
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
from ddp_zero.core.comm.ring import Background, RingWorker
from ddp_zero.core.local.arguments import check_group, is_group
from ddp_zero.core.local.given_options import GivenOptions, Statement, written_options
from ddp_zero.core.local.parameters import Fingerprint, ParameterTable
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.plan.replicas import ShardGroups
from ddp_zero.error_codes import coded, truncated


class Agreement:
    """A block that succeeds on every rank of the group or raises on every rank of it.

    ``doing`` is the action of the block, for messages: "building ZeroRedundancyOptimizer". A failing rank raises its
    own error, all others RuntimeError. If arguments of `declare` or `declare_parameters` differ, all raise ValueError.
    """

    def __init__(self, comm: Peers, doing: str) -> None:
        self._comm = comm
        self._doing = doing
        self._facts = {"operation": doing}
        self._fingerprints: list[Fingerprint] = []

    def declare(self, fact: str, value: object) -> None:
        """Add a fact that must have the same value on every rank."""
        self._facts[fact] = str(value)

    def declare_options(self, group: Mapping[str, Any], known: Collection[str], place: str) -> None:
        """Add the options of a parameter group, whose name in messages is ``place``.

        See `given_options.counts` for those that ``known``, the options of the class that steps it, lacks.
        """
        for name, value in written_options(group, known).items():
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
            return  # the user interrupts: do not communicate
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
            message = f"Expected every rank to succeed in {self._doing}, got a failure on {shown}"
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
            f"Expected {expected} on every rank in {self._doing}, got {reference} on {names[0]} and {got} on "
            f"{names[1]}. Give every rank the same. [ZERO-506]"
        )


def _first_difference(
    expected_facts: dict[str, str],
    expected: Sequence[Sequence[object]],
    facts: dict[str, str],
    structures: Sequence[Sequence[object]],
) -> tuple[str, str, str]:
    for fact in expected_facts | facts:
        pair = expected_facts.get(fact, _NONE), facts.get(fact, _NONE)
        if pair[0] != pair[1]:
            return f"the same {fact}", *pair
    for index, (one, other) in enumerate(zip(expected, structures, strict=False)):
        if one != other:
            return f"the same parameter {index}", _describe(one), _describe(other)
    return "as many parameters", str(len(expected)), str(len(structures))


def _describe(structure: Sequence[object]) -> str:
    name, group, shape, stride, dtype, device, trainable, cost = structure
    named = f"{name!r}, " if name is not None else ""
    further = ("" if trainable else ", frozen") + (f", cost {cost}" if cost else "")
    return f"({named}group {group}, shape {list(shape)}, strides {list(stride)}, {dtype} on {device}{further})"  # type: ignore[call-overload]


def digest(facts: object) -> int:
    """63 bits of a hash of what JSON can write."""
    return int.from_bytes(hashlib.sha256(json.dumps(facts).encode()).digest()[:8], "big") >> 1


BLOCK_BYTES = 512
_DIGEST_BYTES = 8
_NONE = "none"
_END_OF_STEP = -1  # the subject of these messages, in place of a bucket's index
WHAT_NOW = "Some parameters may have been updated: restart from a checkpoint."


class StepFailedElsewhereError(RuntimeError):
    """A local step has failed on other ranks."""


@dataclass
class _Sent:
    """A step's blocks in flight."""

    exchange: PointToPointExchange
    mine: Tensor
    blocks: dict[GroupRank, Tensor]
    own: Exception | None = None
    options: GivenOptions | None = None
    stated: Statement = field(default_factory=Statement)


class StepErrors:
    """Shares errors of local steps between ranks: `note`, then at the end of the step `share` and `raise_any`.

    A local step may raise only on the owner of a parameter. That rank then stops stepping but still sends its segments,
    so that no peer waits for them. After its last segment every rank sends each peer a block of fixed size: a digest of
    the options that its loop has given, and the text of its error or else some of these options.

    Ranks learn of an error in this way only where messages are direct (Gloo, CPU memory). Elsewhere, as on NCCL, an
    error is raised where it occurs, and the peers raise when the group's time-out passes.

    Args:
        comm: all ranks that step, replicas included: a parameter that one of them has not stepped would differ.
        tensors: the stepped tensors; their devices decide whether errors are shared.
    """

    def __init__(self, comm: Communicator, tensors: Sequence[Tensor], plan_digest: int) -> None:
        # whether this rank's local step failed, in the step under way or the last that was shared; if errors are shared
        self.has_local_error = False
        self._comm = comm
        self._subject = (plan_digest, _END_OF_STEP)
        # not on an accelerator: reading a block would wait for the device in every step
        self._is_shared = not comm.is_alone and all(comm.has_direct_messages(one.device) for one in tensors)
        self._own: Exception | None = None
        self._sent: _Sent | None = None
        self._idle: _Sent | None = None  # an earlier step's, once all was sent and received

    def note(self, error: Exception) -> bool:
        """Record that this rank's local step failed. Returns False if errors are not shared: raise it now."""
        if sys.version_info >= (3, 11):
            error.add_note(f"({self._comm.name(self._comm.group_rank)}. {WHAT_NOW})")
        self._own = error if self._is_shared else None
        self.has_local_error = self._is_shared
        return self._is_shared

    def share(self, options: GivenOptions | None = None) -> None:
        """After every bucket was sent: send each peer the outcome of the step. A collective; waits for nothing."""
        if not self._is_shared:
            return
        own, self._own = self._own, None
        stated = Statement() if options is None else options.statement
        # only blocks that no peer may still write into are used again: a dropped step leaves its blocks to them
        (sent, self._idle) = self._idle or self._new_blocks(), None
        # of fixed size, so that receives are posted before the outcome is known: no round trip
        sent.mine.copy_(encode(stated, "" if own is None else f"{type(own).__name__}: {own}"))
        sent.own, sent.options, sent.stated = own, options, stated
        sent.exchange.post()
        # holds the blocks: peers write into them until the exchange was waited for
        self._sent = sent
        self.has_local_error = own is not None

    def _new_blocks(self) -> _Sent:
        mine = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cpu")
        blocks = {peer: torch.empty_like(mine) for peer in self._comm.peers()}
        sent, received = {peer: [mine] for peer in blocks}, {peer: [block] for peer, block in blocks.items()}
        return _Sent(PointToPointExchange(self._comm, sent, received, self._subject, is_control=True), mine, blocks)

    def receive(self) -> None:
        if self._sent is not None:
            with self._comm.trace.label("wait_errors"):
                self._sent.exchange.wait("the end of the step")

    def raise_any(self) -> None:
        """Wait for the peers' blocks, and raise what they tell, once. Does nothing if nothing was shared.

        That is the error of this rank's local step; StepFailedElsewhereError if only others have one; RuntimeError on
        every rank if one was given other options than another.
        """
        # taken first, so that errors are raised once
        sent, self._sent = self._sent, None
        self.has_local_error = self._own is not None
        if sent is None:
            return
        # before this rank's own error is raised: its peers' blocks must have arrived, or memory in use would be freed
        sent.exchange.wait("the end of the step")
        own, sent.own = sent.own, None
        self._idle = sent
        if own is not None:
            raise own.with_traceback(own.__traceback__)
        told = {peer: decode(block) for peer, block in sorted(sent.blocks.items())}
        shown = "; ".join(f"on {self._comm.name(peer)} {error}" for peer, (_, error) in told.items() if error)
        if shown:
            message = f"Expected the local step to succeed on every rank, got {shown}. {WHAT_NOW}"
            raise StepFailedElsewhereError(coded(message, "[ZERO-319]"))
        other = next((peer for peer, (theirs, _) in told.items() if theirs.digest != sent.stated.digest), None)
        if other is not None and sent.options is not None:
            position, name, here, there = sent.options.find_difference(told[other][0])
            raise RuntimeError(
                options_differ(
                    position, name, (here, self._comm.name(self._comm.group_rank)), (there, self._comm.name(other))
                )
            )

    def forget(self, sent_too: bool) -> None:
        """Drop the error of the current step; with ``sent_too`` also blocks in flight with errors not yet raised."""
        self._own = None
        if sent_too:
            self._sent = None
        self.has_local_error = self._sent is not None and self._sent.own is not None


def options_differ(position: int, name: str, one: tuple[str | None, str], other: tuple[str | None, str]) -> str:
    """The message about an option of a group, from two values, None if not known, and the ranks that have them."""
    shown = " and ".join(f"{'another value' if value is None else value} on {rank}" for value, rank in (one, other))
    return (
        f"Expected {name!r} of parameter group {position} to be the same on every rank, got {shown}. Set options alike "
        "on all ranks; a scheduler that decides by the loss needs the same loss on all of them, such as the mean. "
        f"{WHAT_NOW} [ZERO-820]"
    )


def encode(stated: Statement, error: str) -> Tensor:
    """A block: the digest of a statement, then the text of an error, or else what the statement shows; then zeros."""
    block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device="cpu")
    text = truncated(error or stated.shown, BLOCK_BYTES - _DIGEST_BYTES - 1)
    raw = bytearray(stated.digest.to_bytes(_DIGEST_BYTES, "little") + bytes([bool(error)]) + text)
    block[: len(raw)] = torch.frombuffer(raw, dtype=torch.uint8)
    return block


def decode(block: Tensor) -> tuple[Statement, str]:
    """The statement, and the text of the error or nothing, of a block of `encode`."""
    raw = bytes(block.tolist())
    has_error = bool(raw[_DIGEST_BYTES])
    text = raw[_DIGEST_BYTES + 1 :].rstrip(b"\0").decode(errors="ignore")
    return Statement(int.from_bytes(raw[:_DIGEST_BYTES], "little"), "" if has_error else text), text * has_error


_NO_MEMBER = (
    "shard_group must contain the process that passes it, global rank {}. Every rank passes the shard group of its "
    "own node, as mesh.get_group('shard') of a device mesh gives it. [ZERO-511]"
)


@dataclass
class Ranks:
    """The ranks that an optimizer works with."""

    everyone: Communicator  # DDP's ranks
    shard: Communicator  # ranks that share one copy of the state; the same object as ``everyone`` without a shard group
    # ranks that hold the same shards as this one; None without a shard group, or with a single one
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
            comm.round_bits = comm.round * ROUND & ROUND_BITS

    def leave(self) -> None:
        """After an error: start later messages in new threads, not behind messages that may never end."""
        for comm in self._distinct():
            comm.abandon_ring_transfers()
        self._background = None

    def in_background(self, job: Background) -> None:
        """Run a job in a thread, after the jobs started before."""
        if self._background is None:
            self._background = RingWorker(threads=1)
        self._background.start(job)

    def _distinct(self) -> list[Communicator]:
        every = (self.everyone, self.shard, self.replicas)
        return list({id(comm): comm for comm in every if comm is not None}.values())


def arrange(group: ProcessGroup | None, shard_group: ProcessGroup | None, device: torch.device | None = None) -> Ranks:
    """Build the ranks of an optimizer. A collective of the group.

    With native collectives also a collective that builds a second process group over the shard ranks, for parameters.

    Args:
        group: everyone; None for the default group.
        shard_group: the ranks that share one copy of the state with this one; None for everyone.
        device: device of this rank's parameters; see `Communicator`.

    Raises:
        TypeError: if ``shard_group`` is not a process group.
        ValueError: on every rank, if shard groups do not fit together, differ in size, or were given on some ranks
            only.
        RuntimeError: if it failed on another rank.
    """
    # every branch below follows from statements that all ranks have gathered
    everyone = Communicator(group, next_generation(group), device=device)
    forget_failures(everyone.process_group)
    mine: list[int] = []
    with Agreement(everyone, "arranging shard groups") as agreement:
        agreement.declare("shard_group", "None" if shard_group is None else "a process group")
        if shard_group is not None:
            if not is_group(shard_group):
                check_group(shard_group, "shard_group")
            if not isinstance(shard_group, ProcessGroup) or dist.get_rank(shard_group) < 0:
                raise ValueError(_NO_MEMBER.format(dist.get_rank()))
            mine = dist.get_process_group_ranks(shard_group)
    if shard_group is not None:
        stated = [json.loads(text) for text in everyone.all_gather_text(json.dumps(mine))]
        groups = ShardGroups.of(dist.get_process_group_ranks(everyone.process_group), stated)
        if len(groups.groups) > 1:
            trace, across = everyone.trace, _group_across(everyone, shard_group, groups)
            shard = Communicator(shard_group, next_generation(shard_group), "shard rank", trace, device)
            return Ranks(everyone, shard, Communicator(across, next_generation(across), "replica", trace, device))
    if device is not None and not everyone.is_alone and everyone.has_native_collectives(device):
        _give_own_group_for_parameters(everyone)
    return Ranks.alone(everyone)


def _give_own_group_for_parameters(comm: Communicator) -> None:
    """Give parameters a separate process group; reuses an earlier optimizer's if all ranks have one."""
    reference = _for_parameters.get(comm.process_group)
    found, is_whole_job = None if reference is None else reference(), comm.world_size == dist.get_world_size()
    facts = comm.all_gather_ints([int(found is not None), _num_groups()])
    if found is None or not all(is_known for is_known, _ in facts):
        # torch names a group by a rank's number of groups: names would differ, and the ranks would never meet
        if not is_whole_job and len({count for _, count in facts}) > 1:
            return
        found = _new_group(comm, dist.get_process_group_ranks(comm.process_group))
        _for_parameters[comm.process_group] = weakref.ref(found)
    # a group runs its collectives one after the other: on a single one a bucket's all-gather would delay the next
    # reduce-scatter. Each rank issues the collectives of both groups from one thread, in the order of the plan, as NCCL
    # requires of communicators used concurrently
    comm.gathering_group = found


def _group_across(everyone: Communicator, shard_group: ProcessGroup, groups: ShardGroups) -> ProcessGroup:
    """This rank's group of replicas; reuses an earlier optimizer's if all ranks have one. A collective."""
    me = everyone.global_rank(everyone.group_rank)
    replicas = next(ranks for ranks in groups.replicas() if me in ranks)
    # weak: a destroyed group must not be reused, and nothing here may keep it alive
    reference = _known.setdefault(shard_group, {}).get(replicas)
    found = None if reference is None else reference()
    are_known = all(flag for (flag,) in everyone.all_gather_ints([int(found is not None)]))
    across = found if found is not None and are_known else build_group_across(everyone, groups)
    _known[shard_group][replicas] = weakref.ref(across)
    return across


def build_group_across(everyone: Communicator, groups: ShardGroups) -> ProcessGroup:
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
    found: ProcessGroup | None = None
    # in one order on every rank: torch numbers groups as they are created
    for replicas in groups.replicas():
        if is_whole_job or me in replicas:  # torch counts the groups of a job: all of its ranks call this, or members
            built = _new_group(everyone, replicas)
            found = built if me in replicas else found
    assert found is not None, "groups cover everyone"
    return found


def _new_group(comm: Communicator, members: Sequence[int]) -> ProcessGroup:
    """A group of members of another, with its backend and time-out; a collective of the whole job if that has all."""
    group: ProcessGroup = dist.new_group(
        list(members),
        timeout=comm.time_out,
        backend=str(dist.get_backend_config(comm.process_group)),
        use_local_synchronization=comm.world_size != dist.get_world_size(),
    )
    return group


def _num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_names)


_for_parameters: weakref.WeakKeyDictionary[ProcessGroup, "weakref.ref[ProcessGroup]"] = weakref.WeakKeyDictionary()
"""Parameter process groups by the group of their ranks, reused by later optimizers; weak, as below."""

_Across = dict[tuple[int, ...], "weakref.ref[ProcessGroup]"]
_known: weakref.WeakKeyDictionary[ProcessGroup, _Across] = weakref.WeakKeyDictionary()
"""Replica groups by shard group and replicas, for later optimizers; weak: `destroy_process_group` ends them."""
