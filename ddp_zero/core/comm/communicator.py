"""`Communicator`: every `torch.distributed` collective and message of the library.

Everything is sent as bytes, so any dtype works on any backend (Gloo has no bfloat16 or complex collectives). Ranks are
`GroupRank` everywhere; the one conversion to `GlobalRank` is `Communicator.global_rank`, for messages to people.

The parameter sync is an all-gather of segments of unequal size. On Gloo with CPU memory it is a direct exchange: every
receive is posted, then every send, in chunks; each rank sends (N - 1) times its own segments and nothing else. From
`RING_RANKS` ranks and `RING_BYTES` on it is a ring, which sends as many bytes. On NCCL and similar backends (all but
Gloo and MPI) it is a native all-gather if padding segments to equal sizes adds at most an eighth. Otherwise, and on
Gloo with other memory and MPI, it is one broadcast per owner.

Alternatives considered for Gloo: ``all_gather_into_tensor`` (equal sizes only, so a rank with a small segment would
send padding); one broadcast per owner (the same bytes over all ranks, but relayed by ranks that own nothing of them).
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

# DDP imports this lazily. If that happens after init_process_group(), default arguments in it keep the group alive
# until exit, and Gloo's threads then race with the end of the interpreter (seen as SIGABRT with torch 2.13.0).
import torch.distributed.nn
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup, TCPStore, Work  # type: ignore[attr-defined]
from torch.futures import Future

from ddp_zero.core.comm.exchange import (
    CollectiveExchange,
    Exchange,
    InFlight,
    PaddedAllGather,
    PointToPointExchange,
    TensorsByPeer,
    all_gather_by_messages,
    bind_all_gather,
    bind_all_reduce,
    bind_broadcast,
    bind_padded_reduce_scatter,
    bind_reduce,
    bind_reduce_scatter,
    contiguous_span,
    every_rank,
    lost_peer_error,
    require_work,
    start_unrecorded,
    tag_of,
)
from ddp_zero.core.comm.groups import (
    TensorPeers,
    backends_of,
    check_not_forked,
    device_of,
    inherit_job_time_out,
    job_store_of,
    message_time_out,
    next_number,
    remember_device,
    time_out_of,
)
from ddp_zero.core.comm.missing import name_missing_ranks
from ddp_zero.core.comm.recorder import record_wait
from ddp_zero.core.comm.ring import Neighbours, RingTransfer, RingWorker, ring_chunk
from ddp_zero.core.comm.tracing import Trace
from ddp_zero.core.plan.partition import GlobalRank, GroupRank
from ddp_zero.core.plan.ring import RingSchedule, gather_schedule, sum_schedule
from ddp_zero.values.shapes import padded_size
from ddp_zero.values.tree import TensorSpec, Tree, as_bytes, flatten, rebuild, specs_in

_TREE_TAG = 0x7EE0

RING_RANKS = 4
RING_BYTES = 1 << 20
"""Thresholds from which rings are faster than a direct exchange: see docs/performance.md."""


def average_as_ddp(state: ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """DDP's own reduction as a communication hook, in place: the same bits for any number of ranks."""
    # DDP multiplies by the reciprocal and then sums; torch's `allreduce_hook` divides, which rounds differently unless
    # the number of ranks is a power of two
    buffer = bucket.buffer()
    buffer.mul_(1.0 / state.size())
    # by the group's own method: the wrapper's checks take as long as the work on a small bucket
    reduced = torch.view_as_real(buffer) if buffer.dtype.is_complex else buffer
    future: Future[list[Tensor]] = state.allreduce([reduced], dist.AllreduceOptions()).get_future()
    return name_missing_ranks(state, bucket.index(), future)


def sum_as_ddp(group: ProcessGroup, values: Tensor) -> dist.Work:
    """Add up a tensor over DDP's ranks, in place, as DDP does with its map of used parameters."""
    return group.allreduce(values)


class Transport:
    """Chooses how buckets travel between ranks, by backend, device and size: a `Communicator` without its group.

    Args:
        rank: this process's rank in the group.
        world_size: number of ranks.
        backends: the backend of each type of device.
    """

    def __init__(self, rank: GroupRank, world_size: int, backends: Mapping[str, str]) -> None:
        self.group_rank, self.world_size, self._backends = rank, world_size, backends
        self.is_alone = world_size == 1  # there is nobody to send to

    def has_native_collectives(self, device: torch.device) -> bool:
        """True if the backend all-gathers and reduce-scatters equal segments of a device's memory.

        NCCL does so in one collective each, as do the backends of other accelerators, whatever their names (``xccl``,
        ``hccl``, ...).
        """
        return self._backends.get(device.type) not in (None, "gloo", "mpi")

    def has_direct_messages(self, device: torch.device) -> bool:
        """True if `PointToPointExchange` work for memory of a device: Gloo's messages are in CPU memory."""
        return device.type == "cpu" and self._backends.get("cpu") == "gloo"

    def has_rings(self, device: torch.device, nbytes: int) -> bool:
        """True if this many bytes, summed over ranks, are exchanged around a ring instead of pairwise."""
        return self.world_size >= RING_RANKS and nbytes >= RING_BYTES and self.has_direct_messages(device)

    def reduce_scatter_recv_numel(self, device: torch.device, sizes: Sequence[int]) -> int:
        """Elements of the `prepare_reduce_scatter` buffer for parts of these sizes: padded parts, and their sum."""
        numel = padded_size(sizes)
        if numel is None or len(set(sizes)) == 1 or not self.has_native_collectives(device):
            return 0
        return (len(sizes) + 1) * numel

    def padded_all_gather_nbytes(self, device: torch.device, sizes: Sequence[int]) -> int:
        """Bytes of the staging buffer that all-gathers segments of these bytes, if not adjacent; 0: without one."""
        nbytes = padded_size(sizes)
        is_copied = nbytes is not None and self.has_native_collectives(device) and not self.is_alone
        return nbytes * len(sizes) if is_copied and nbytes else 0

    def can_average(self, parts: Sequence[Tensor]) -> bool:
        """True if `prepare_reduce_scatter` can average with the bits of DDP, which multiplies by 1/N, then sums."""
        # NCCL multiplies its input by 1/N. Only for a power of two are the products exact, whatever the dtype in which
        # it holds 1/N and whether or not it fuses product and sum
        is_even = len({part.numel() for part in parts}) == 1
        ranks = self.world_size
        return is_even and ranks & (ranks - 1) == 0 and self._backends.get(parts[0].device.type) == "nccl"


class Communicator(Transport, TensorPeers):
    """A process group, seen from a member: starts its collectives and messages, and agrees with its other ranks.

    Args:
        group: the process group; None for the default one.
        generation: distinguishes the messages of optimizers on one group; see `next_generation`.
        member: word for a member of the group in messages.
        trace: receives the optimizer's events; None for a new one.
        device: device of this rank's parameters. On a backend without CPU memory it carries the control messages of
            this and all later communicators of the group; None keeps the earlier device, or the current one.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        generation: int = 0,
        member: str = "rank",
        trace: Trace | None = None,
        device: torch.device | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "Expected torch.distributed to be initialised, got no default process group. Call "
                "torch.distributed.init_process_group() first; a single process can use it with world_size=1. "
                "[ZERO-501]"
            )
        group = dist.group.WORLD if group is None else group
        assert group is not None, "it is initialised"
        self.process_group: ProcessGroup = group
        self.gathering_group = self.process_group  # of native all-gathers of parameters; see `ranks.build_ranks`
        rank = GroupRank(dist.get_rank(self.process_group))
        if rank < 0:
            raise RuntimeError(
                f"This process (global rank {dist.get_rank()}) is not a member of process_group. Build the optimizer "
                "on the group's members only. [ZERO-502]"
            )
        super().__init__(rank, dist.get_world_size(self.process_group), backends_of(self.process_group))
        check_not_forked(self.process_group)
        inherit_job_time_out(self.process_group)
        self.message_time_out = message_time_out(self.process_group)
        if device is not None and device.type != "cpu":
            remember_device(self.process_group, device)
        self.trace = Trace() if trace is None else trace
        self.generation = generation
        self._member = member
        # steps synced or abandoned so far; part of every tag: a late message of an abandoned step matches no receive of
        # a later step
        self.round = self.round_tag = 0
        self._ring_worker: RingWorker | None = None

    @property
    def store_host(self) -> str | None:
        """The host of the job's store; None if it has none."""
        try:
            store = job_store_of(self.process_group)
        except RuntimeError:  # a backend without a store
            return None
        return store.host if isinstance(store, TCPStore) else None

    @property
    def time_out(self) -> timedelta:
        return time_out_of(self.process_group)

    @property
    def wait_time_out(self) -> timedelta:
        """The time-out of a wait for a message; see `groups.message_time_out`."""
        return self.time_out if self.message_time_out is None else self.message_time_out

    def global_rank(self, group_rank: GroupRank) -> GlobalRank:
        try:
            return GlobalRank(dist.get_global_rank(self.process_group, group_rank))
        except ValueError as error:
            raise RuntimeError(
                "Expected the process group that the optimizer was built on, got destroy_process_group() before. Save "
                "before that call. After init_process_group() wrap the module in DDP again, build a new optimizer and "
                "load what was saved. [ZERO-502]"
            ) from error

    def group_rank_of(self, rank: GlobalRank) -> GroupRank | None:
        """The group rank of a global rank; None if it is not a member."""
        members = dist.get_process_group_ranks(self.process_group)
        return GroupRank(members.index(rank)) if rank in members else None

    def has_same_ranks(self, group: ProcessGroup) -> bool:
        """True if a group has the same members in the same order."""
        return dist.get_process_group_ranks(group) == dist.get_process_group_ranks(self.process_group)

    def name(self, group_rank: GroupRank) -> str:
        return f"{self._member} {group_rank} (global rank {self.global_rank(group_rank)})"

    # Parameter sync

    def start_all_gather(self, segments: Sequence[Tensor], subject: tuple[int, ...]) -> InFlight:
        """Start an all-gather of segments of unequal size; see `prepare_all_gather`.

        ``subject`` identifies the exchange, the same on every rank: the plan and the bucket. Where the backend has
        tags, a rank at a different round or with a different subject matches no message: its peers raise when the
        group's time-out passes, instead of taking one parameter's bytes for another's.
        """
        return self.prepare_all_gather(segments, subject)()

    def prepare_all_gather(self, segments: Sequence[Tensor], subject: tuple[int, ...]) -> Callable[[], InFlight]:
        """Prepare an all-gather of segments of unequal size, in memory that stays in place.

        Segments are 1-D contiguous tensors on one device, one per rank in rank order, of the same sizes on every rank.
        This rank's segment is sent, the others are written; empty segments cost nothing. Returns a function that starts
        the all-gather, as often as needed; for ``subject`` see `start_all_gather`.
        """
        mine = segments[self.group_rank].detach()
        device = next((segment.device for segment in segments if segment.numel()), torch.device("cpu"))
        if self.is_alone:
            return partial(Exchange, (), (), segments)
        raw = [segment.detach().view(torch.uint8) for segment in segments]
        # sizes, the plan's layout and the backend choose the branch, so that all ranks choose the same: two algorithms
        # in one group would wait for each other until the time-out
        if self.has_rings(device, sum(segment.nbytes for segment in segments)):
            return partial(self._start_ring, gather_schedule, raw, subject)
        if self.has_direct_messages(device):
            received = {peer: [segments[peer].detach()] for peer in self.peers()}
            return PointToPointExchange(self, {peer: [mine] for peer in received}, received, subject).post
        # not on `process_group`: a group runs its collectives in order of issue, and an all-gather would hold up the
        # next bucket's reduce-scatter
        group = self.gathering_group
        own = raw[self.group_rank]
        others = self.world_size - 1
        whole = contiguous_span(raw) if self.has_native_collectives(device) else None
        if whole is not None:
            gather = bind_all_gather(group, whole, own)
            return CollectiveExchange(
                self, [gather], [every_rank], [whole], (own.nbytes * others, own.nbytes * others)
            ).post
        if copied := self.padded_all_gather_nbytes(device, [segment.nbytes for segment in segments]):
            return partial(self._start_padded_all_gather, raw, copied // self.world_size, device)
        moved = own.nbytes * others, sum(part.nbytes for part in raw) - own.nbytes
        return self._collective_per_owner(bind_broadcast, group, raw, raw, moved).post

    def staging_nbytes(self, segments: Sequence[Tensor]) -> int:
        """Bytes of the staging buffer while these segments are all-gathered; 0 if they are gathered in place."""
        device = next((segment.device for segment in segments if segment.numel()), torch.device("cpu"))
        copied = self.padded_all_gather_nbytes(device, [segment.nbytes for segment in segments])
        return copied if copied and contiguous_span(segments) is None else 0

    def _start_padded_all_gather(self, raw: Sequence[Tensor], nbytes: int, device: torch.device) -> InFlight:
        self.trace.add_bytes(nbytes * (self.world_size - 1), nbytes * (self.world_size - 1))
        return PaddedAllGather(self.gathering_group, raw, nbytes, device)

    def _collective_per_owner(
        self,
        issue_of: Callable[[ProcessGroup, Tensor, GroupRank], Callable[[], Work]],
        group: ProcessGroup,
        parts: Sequence[Tensor],
        tensors: Sequence[Tensor],
        moved: tuple[int, int],
    ) -> CollectiveExchange:
        """Prepare a collective for each rank's part, from or to its owner."""
        # in rank order on every rank, and parts without elements skipped by all: NCCL matches collectives by order of
        # issue alone
        filled = [(GroupRank(owner), part) for owner, part in enumerate(parts) if part.numel()]
        issues = [self._without_unsafe_ranges(issue_of(group, part, owner), part.device) for owner, part in filled]
        return CollectiveExchange(self, issues, [partial(self.name, owner) for owner, _ in filled], tensors, moved)

    def _without_unsafe_ranges(self, issue: Callable[[], Work], device: torch.device) -> Callable[[], Work]:
        """``issue``, without profiler ranges where the backend may close them too late; see `start_unrecorded`."""
        return issue if self.has_native_collectives(device) else partial(start_unrecorded, issue)

    # Messages between pairs of ranks

    def peers(self) -> list[GroupRank]:
        """The other ranks, starting with the next rank."""
        # rotated, so that not all ranks send to the same peer first
        return [GroupRank((self.group_rank + step) % self.world_size) for step in range(1, self.world_size)]

    def all_to_all(self, sent: TensorsByPeer, received: TensorsByPeer, device: torch.device, what: str) -> None:
        """Send tensors to all peers, receive theirs, and wait. A collective, in the same order on all ranks.

        All tensors are on ``device``, of the same type on every rank; ``what`` names them in messages.
        """
        if self.has_direct_messages(device):
            number = next_number(self.process_group, "all_to_all")
            PointToPointExchange(self, sent, received, (number,)).post().wait(what)
            return
        ranks = [GroupRank(rank) for rank in range(self.world_size)]
        to_send, targets = ([*chain.from_iterable(by[peer] for peer in sorted(by))] for by in (sent, received))
        send_bytes = [sum(part.nbytes for part in sent.get(rank, ())) for rank in ranks]
        recv_bytes = [sum(part.nbytes for part in received.get(rank, ())) for rank in ranks]
        packed = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *map(as_bytes, to_send)])
        arrived = torch.empty(sum(recv_bytes), dtype=torch.uint8, device=device)
        dist.all_to_all_single(arrived, packed, recv_bytes, send_bytes, group=self.process_group)
        self.trace.add_bytes(sum(send_bytes), sum(recv_bytes))
        for part, target in zip(arrived.split([target.nbytes for target in targets]), targets, strict=True):
            as_bytes(target).copy_(part)

    # Rings

    def start_ring_reduce_scatter(
        self, parts: Sequence[Tensor], recv_buffer: Tensor, factor: float, subject: tuple[int, ...]
    ) -> RingTransfer:
        """Start a reduce-scatter in ring order, see `RingTransfer`; for ``subject`` see `start_all_gather`."""
        return self._start_ring(sum_schedule, parts, subject, recv_buffer, factor)

    def abandon_ring_transfers(self) -> None:
        """After an error: start later transfers in new threads, not behind transfers that may never end."""
        # not joined: a thread may sit in a receive from a dead peer. A dropped worker puts None behind its transfers
        self._ring_worker = None

    def _start_ring(
        self,
        schedule_of: Callable[[Sequence[int], int, int], RingSchedule],
        segments: Sequence[Tensor],
        subject: tuple[int, ...],
        recv_buffer: Tensor | None = None,
        factor: float = 1.0,
    ) -> RingTransfer:
        group = self.process_group
        tag = tag_of(self.generation, self.round, subject)
        before, after = self.peers()[-1], self.peers()[0]
        sizes = [segment.numel() for segment in segments]
        itemsize = segments[0].element_size()
        schedule = schedule_of(sizes, self.group_rank, ring_chunk(sizes, itemsize))
        neighbours = Neighbours(
            receive=lambda tensor: start_unrecorded(partial(group.recv, [tensor], before, tag)),
            send=lambda tensor: start_unrecorded(partial(group.send, [tensor], after, tag)),
            before=partial(self.name, before),
            after=partial(self.name, after),
            limit=self.wait_time_out,
        )
        sent = [*schedule.first, *schedule.received[: schedule.passed_on]]
        numels = (sum(chunk.stop - chunk.start for chunk in chunks) for chunks in (sent, schedule.received))
        self.trace.add_bytes(*(numel * itemsize for numel in numels))
        if self._ring_worker is None:
            self._ring_worker = RingWorker()
        # one order on every rank: the worker's threads take transfers alternately, in the order of these calls
        return self._ring_worker.start(RingTransfer(neighbours, schedule, segments, recv_buffer, factor))

    # Sums

    def prepare_reduce_scatter(
        self, whole: Tensor, parts: Sequence[Tensor], recv_buffer: Tensor, average: bool = False
    ) -> tuple[Callable[[], InFlight], Tensor]:
        """Prepare a reduce-scatter by the backend's collectives, in memory that stays in place.

        Equal parts, as `CutParameters` lays them out, are reduce-scattered in place. Unequal parts are padded if
        ``recv_buffer`` has room. Otherwise native backends reduce to each owner in place, and others all-reduce.

        Args:
            whole: 1-D, destroyed.
            parts: windows of ``whole``, one per rank in rank order, of any sizes.
            recv_buffer: buffer of `reduce_scatter_recv_numel` elements, of the dtype of ``whole``.
            average: divide the sum by the number of ranks; only where `can_average`.

        Returns a function that starts the sum, as often as needed, and the tensor for this rank's part of it.
        """
        # the collectives read and write `whole` and `recv_buffer` until the stream that has waited for them is done:
        # the caller keeps both, nothing is allocated here
        group = self.process_group
        mine = parts[self.group_rank]
        others = self.world_size - 1
        is_native = self.has_native_collectives(whole.device)
        if len({part.numel() for part in parts}) == 1 and is_native:
            scatter = bind_reduce_scatter(group, mine, whole, average)
            moved = mine.nbytes * others
            return CollectiveExchange(self, [scatter], [every_rank], [whole], (moved, moved)).post, mine
        if self.reduce_scatter_recv_numel(whole.device, [part.numel() for part in parts]):
            moved = others * (recv_buffer.numel() // (self.world_size + 1)) * mine.element_size()
            issue, total = bind_padded_reduce_scatter(group, parts, recv_buffer)
            return CollectiveExchange(self, [issue], [every_rank], [whole, recv_buffer], (moved, moved)).post, total
        moved_both = whole.nbytes - mine.nbytes, mine.nbytes * others
        if is_native:
            return self._collective_per_owner(bind_reduce, group, parts, [whole], moved_both).post, mine
        issue = self._without_unsafe_ranges(bind_all_reduce(group, whole), whole.device)
        return CollectiveExchange(self, [issue], [every_rank], [whole], moved_both).post, mine

    def broadcast_from_owner(self, tensor: Tensor, owner: GroupRank) -> None:
        """Broadcast the owner's values into a contiguous tensor on every rank."""
        raw = as_bytes(tensor.detach())
        if raw.numel():
            dist.broadcast(raw, group_src=owner, group=self.process_group)

    # Agreement

    def all_gather_tensor(self, mine: Tensor) -> list[Tensor]:
        group = self.process_group
        staged = mine.to(self._message_device(mine.device.type)).contiguous()
        if self.has_direct_messages(staged.device):
            # numbers match because every rank enters agreements of a group in the same order
            number = next_number(group, "gather")
            what = "an agreement between ranks"
            gathered = all_gather_by_messages(group, staged, number, self.name, what, self.message_time_out)
        else:
            gathered = [torch.empty_like(staged) for _ in range(self.world_size)]
            dist.all_gather(gathered, staged, group=group)
        return [part.to(mine.device) for part in gathered]

    # Trees, one rank to another

    def send_tree(self, tree: Tree, to: GroupRank) -> None:
        """Send a tree of tensors and plain values (see `values.tree`); the receiver calls `receive_tree`."""
        text, tensors = flatten(tree)
        raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        # length, text, tensors: all on one tag, so the receiver relies on this order
        self._send(torch.tensor([raw.numel()], dtype=torch.int64), to)
        self._send(raw, to)
        for tensor in tensors:
            self._send(tensor, to)

    def receive_tree(self, source: GroupRank, device: torch.device) -> Tree:
        """Receive a tree from `send_tree`; accelerator tensors to ``device``, the rest to the CPU."""
        length = int(self._receive(TensorSpec((1,), (1,), torch.int64, "cpu"), source, device).item())
        raw = self._receive(TensorSpec((length,), (1,), torch.uint8, "cpu"), source, device)
        text = bytes(raw.tolist()).decode()
        return rebuild(text, [self._receive(spec, source, device) for spec in specs_in(text)])

    def _send(self, tensor: Tensor, to: GroupRank) -> None:
        raw = as_bytes(tensor.detach())
        if raw.numel():
            self._wait(dist.isend, raw.to(self._control_device()), to)

    def _receive(self, spec: TensorSpec, source: GroupRank, device: torch.device) -> Tensor:
        target = torch.device("cpu") if spec.device_type == "cpu" else device
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self._control_device())
        if tensor.numel():
            self._wait(dist.irecv, as_bytes(tensor), source)
        tensor = tensor.to(target)
        if spec.stride in (None, tensor.stride()) or not tensor.numel():
            return tensor
        return torch.empty_strided(spec.shape, spec.stride or (), dtype=spec.dtype, device=target).copy_(tensor)

    def _wait(self, post: Callable[..., Work | None], tensor: Tensor, peer: GroupRank) -> None:
        name = partial(self.name, peer)
        what = "an exchange of optimizer state"
        limit = () if self.message_time_out is None else (self.message_time_out,)
        # batched, although it is a single message: for a plain one NCCL would make a communicator of the two ranks
        message = dist.P2POp(post, tensor, group=self.process_group, group_peer=peer, tag=_TREE_TAG)
        record_wait(what, name)
        try:
            works = dist.batch_isend_irecv([message])
            require_work(works[0] if works else None).wait(*limit)
        except RuntimeError as error:
            raise lost_peer_error(name(), what, error) from error

    # Devices

    def _control_device(self) -> torch.device:
        return torch.device("cpu") if "cpu" in self._backends else self._accelerator()

    def _message_device(self, device_type: str) -> torch.device:
        """Device from which a tensor is sent: Gloo's messages are in CPU memory, NCCL's are not."""
        backend = self._backends.get(device_type)
        if device_type == "cpu" or backend in (None, "gloo"):
            return self._control_device()
        return self._accelerator()

    def _accelerator(self) -> torch.device:
        return device_of(self.process_group, next(name for name in self._backends if name != "cpu"))


def next_generation(group: ProcessGroup | None) -> int:
    """A new number for each optimizer built on a group, the same on every rank that builds as many."""
    # unmatched messages of a dropped optimizer must not match those of its successor, which has the same plan
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    is_member = group is not None and dist.get_rank(group) >= 0  # outside of a group torch gives a number
    return next_number(group, "optimizer") if group is not None and is_member else 0
