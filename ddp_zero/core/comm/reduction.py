"""The reduce-scatter of stage 2: every rank receives the sum over ranks of its own segment of a bucket.

On Gloo each rank sends every owner the owner's slice, and the owner sums the slices *in rank order*: the result depends
neither on timing nor on the owner. Received slices are held in a bounded buffer; if the slices of all peers do not fit
at once, they are received window by window. A rank sends (N - 1)/N of the bucket on average, the lower bound.

With many ranks, large buckets travel around a ring, as many bytes, and are summed *in ring order*: from the owner's
right neighbour on, the owner last; see `ddp_zero.core.plan.ring`. The result depends on the owner, not on timing.

Gradients below 32 bits are summed in fp32, and so are slices sent in a narrower dtype. They do not travel around rings:
partial sums in fp32 would be twice the bytes.

With shard groups the sum is taken first within the groups and then over the replicas, each in the order of ranks (or
rings): ``(g0 + g1) + (g2 + g3)`` with groups of two. Each replica sums a part of the segment and sends it to its fellow
replicas, so all have the same bits, and a rank sends 2 (R - 1)/R of its segment to other groups, for R replicas. A
group's sum is rounded to the dtype on the wire before it leaves the group, and so is the total.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain, pairwise, repeat, zip_longest
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_zero.core.comm.communicator import Communicator, Transport
from ddp_zero.core.comm.exchange import (
    Exchange,
    InFlight,
    LocalWork,
    PointToPointExchange,
    as_real,
    await_background_job,
    lost_peer_error,
)
from ddp_zero.core.comm.missing import lost_collective_error
from ddp_zero.core.comm.ranks import Ranks
from ddp_zero.core.comm.recorder import Span, name_of
from ddp_zero.core.comm.ring import ring_recv_numel, unfinished
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.error_codes import coded

_REDUCE = 1  # in the tags, distinguishes this from the sync of a bucket
_GATHER = 2  # ... and from the all-gather that ends a sum over replicas
_PIECE_NUMEL = 1 << 17  # elements scaled and summed at a time, so that they are read from memory once


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def recv_numel(
    comm: Transport, sizes: Sequence[int], dtype: torch.dtype, device: torch.device, limit: int | None = None
) -> int:
    """Elements of the receive buffer that `segment_reduction` needs for parts of these sizes.

    At most the limit (None: all elements), or 2 MiB around a ring; more for tiny buckets, and for the padded parts of
    native collectives.
    """
    limit = sum(sizes) if limit is None else limit
    if _sums_in_ring_order(comm, sum(sizes), dtype, device):
        return ring_recv_numel(sizes, dtype.itemsize)
    if not comm.has_direct_messages(device):
        return comm.reduce_scatter_recv_numel(device, sizes)
    return receive_window(sizes[comm.group_rank], len(sizes), limit) * (len(sizes) - 1)


class PreparedReduction(Protocol):
    """A reduction that can be started as often as needed, over memory that stays in place."""

    @property
    def in_place(self) -> Callable[[], InFlight]:
        """A function that starts it; this rank's part of the memory receives the sum."""

    def start(self, out: Tensor) -> InFlight:
        """Start it; ``out``, in its own dtype, receives this rank's sum."""


class DirectReduceScatter(PointToPointExchange):
    """A reduce-scatter by messages from each rank to each owner, which sums them in rank order.

    Its `wait` raises RuntimeError if an exception has interrupted the sum, which destroys its terms.

    Args:
        parts: windows of this rank's contribution, one per rank in rank order; destroyed.
        recv_buffer: receive buffer, 1-D, of the same dtype, `recv_numel` elements.
        limit: elements of the bucket; bounds the elements received at once.
        factor: multiplies every rank's contribution before the sum.
        subject: the plan, the bucket, and everything else that must be the same.
    """

    def __init__(
        self,
        comm: Communicator,
        parts: Sequence[Tensor],
        recv_buffer: Tensor,
        limit: int,
        factor: float,
        subject: tuple[int, ...],
    ) -> None:
        self.bucket = subject[1]
        self._rank = rank = comm.group_rank
        self._factor = factor
        peers = comm.peers()
        self._own = parts[rank]
        windows = [_windows(part.numel(), receive_window(part.numel(), comm.world_size, limit)) for part in parts]
        self._windows = windows[rank]
        # this rank's segment is received window by window: each in the slots that the window before has left
        slots: list[dict[GroupRank, list[Tensor]]] = []
        self._pieces: list[list[tuple[Tensor, ...]]] = []  # of each window: the terms of each piece, in rank order
        for start, stop in self._windows:
            slot_of = dict(zip(sorted(peers), recv_buffer.split(stop - start), strict=False))
            terms = [slot_of.get(GroupRank(source), self._own[start:stop]) for source in range(comm.world_size)]
            slots.append({peer: [slot_of[peer]] for peer in peers})
            self._pieces.append(list(zip(*(torch.split(term, _PIECE_NUMEL) for term in terms), strict=True)))
        slices = {peer: [parts[peer][start:stop] for start, stop in windows[peer]] for peer in peers}
        subject, what = (*subject, _REDUCE), name_of_reduction(subject[1])
        later = [_WindowReceives(PointToPointExchange(comm, {}, window, subject), what) for window in slots[1:]]
        # after the sum of each window, the receives of the next window are posted into its slots
        self._next_posts: list[list[Callable[[], object]]] = [[receives.messages.post] for receives in later]
        self._next_posts += [[]] * (len(slots) > 0)
        self._sums = [LocalWork((), _interruption(what)) for _ in self._windows]
        self._sum_into(self._own)
        self._in_place = [window_sum.operations for window_sum in self._sums]
        # `wait` sums while the slices are still being sent, and returns when all are: only then may the bucket's
        # memory, which peers were still reading, be used again
        works = [work for pair in zip_longest(self._sums, later) for work in pair if work is not None]
        # the receives of the first window are posted with the sends
        super().__init__(comm, slices, slots[0] if slots else {}, subject, works)

    def _sum_into(self, out: Tensor) -> None:
        """Write the sums of later waits to ``out``."""
        of_windows = zip(self._windows, self._pieces, self._next_posts, self._sums, strict=True)
        for (start, stop), pieces, next_posts, window_sum in of_windows:
            totals = [out[start:stop]] if len(pieces) == 1 else torch.split(out[start:stop], _PIECE_NUMEL)
            window_sum.operations = [*chain.from_iterable(map(self._sum_piece, pieces, totals)), *next_posts]

    def _sum_piece(self, terms: Sequence[Tensor], total: Tensor) -> list[Callable[[], object]]:
        # may destroy this rank's own slice, never a peer's: pending sends still read the other slices
        return sum_in_order(terms, total, self._rank, self._factor)

    @property
    def in_place(self) -> Callable[[], PointToPointExchange]:
        return self.post

    def start(self, out: Tensor) -> PointToPointExchange:
        """Send this rank's contributions, and post the first receives; see `PreparedReduction`."""
        if out is self._own:
            self._sum_in_place()
        elif self._sums:
            self._sum_into(out)
            # last, it lets go of that memory; weakly, since a cycle would keep the process group
            let_go = partial(DirectReduceScatter._sum_in_place, weakref.proxy(self))
            self._sums[-1].operations = [*self._sums[-1].operations, let_go]
        return self.post()

    def _sum_in_place(self) -> None:
        """Write the sums of later waits to this rank's part."""
        for window_sum, operations in zip(self._sums, self._in_place, strict=True):
            window_sum.operations = operations


class _WindowReceives:
    """The receives of a window after the first; a local work of `PointToPointExchange`."""

    def __init__(self, messages: PointToPointExchange, what: str) -> None:
        self.messages, self._what = messages, what

    def wait(self, *_: timedelta) -> None:
        self.messages.wait(self._what)

    def is_completed(self) -> bool:
        return not self.messages.is_in_flight


class CollectiveReduction:
    """The reduction of one bucket's gradients to their owners by a ring, or by the backend's collectives.

    Args:
        begin: starts it, in memory that stays in place.
        total: its result, this rank's segment.
        own: this rank's part of the memory: ``total``, or a copy is made.
    """

    def __init__(self, begin: Callable[[], InFlight], total: Tensor, own: Tensor) -> None:
        self._begin, self._sum, self._own = begin, total, own

    @property
    def in_place(self) -> Callable[[], InFlight]:
        return self._begin if self._own is self._sum else partial(self.start, self._own)

    def start(self, out: Tensor) -> InFlight:
        """Start the reduction; see `PreparedReduction`."""
        begun = self._begin()
        return begun if out is self._sum else _Copied(begun, self._sum, out)


class _Copied:
    """A reduction whose sum is copied to other memory."""

    def __init__(self, in_flight: InFlight, total: Tensor, out: Tensor) -> None:
        self._in_flight, self._sum, self._out = in_flight, total, out

    def wait(self, what: str) -> None:
        self._in_flight.wait(what)
        # on the stream that has waited for the sum
        self._out.copy_(self._sum)


def segment_reduction(
    comm: Communicator,
    whole: Tensor,
    parts: Sequence[Tensor],
    recv_buffer: Tensor,
    subject: tuple[int, ...],
    limit: int,
    factor: float = 1.0,
) -> DirectReduceScatter | CollectiveReduction:
    """Prepare the reduction of one bucket's gradients to their owners, by messages, a ring or native collectives.

    Args:
        comm: the owners.
        whole: this rank's contribution, 1-D contiguous; destroyed.
        parts: windows of ``whole``, one per rank in rank order.
        recv_buffer: receive buffer, 1-D, of the dtype of ``whole``, `recv_numel` elements.
        subject: the plan, the bucket, and everything else that must be the same.
        limit: elements of the bucket; bounds the elements received at once.
        factor: multiplies every rank's contribution before the sum; see `can_scale_in_sum`.
    """
    begin: Callable[[], InFlight]
    own = parts[comm.group_rank]
    if comm.is_alone:
        return CollectiveReduction(partial(Exchange, (), (), parts), own, own)
    if _sums_in_ring_order(comm, whole.numel(), whole.dtype, whole.device):
        begin = partial(comm.start_ring_reduce_scatter, parts, recv_buffer, factor, (*subject, _REDUCE))
        return CollectiveReduction(begin, own, own)
    if not comm.has_direct_messages(whole.device):
        begin, total = comm.prepare_reduce_scatter(whole, parts, recv_buffer, average=factor != 1.0)
        return CollectiveReduction(begin, total, own)
    return DirectReduceScatter(comm, parts, recv_buffer, limit, factor, subject)


class HierarchicalReduction:
    """The reduction of one bucket within a shard group, and then across the groups; see the module docstring."""

    def __init__(
        self,
        ranks: Ranks,
        within: InFlight,
        whole: Tensor,
        out: Tensor,
        recv_buffer: Tensor,
        subject: tuple[int, ...],
    ) -> None:
        assert ranks.replicas is not None, "there are groups to add up over"
        self._comm = ranks.replicas
        self._within = within
        self._out = out
        self._recv_buffer = recv_buffer
        self._wire_dtype = whole.dtype
        self._subject = subject
        self._error: RuntimeError | None = None
        self._has_ended = threading.Event()
        self._span: Span | None = None  # of the background thread; names the peer that it waits for
        self._is_in_background = self._comm.has_direct_messages(whole.device)
        # direct messages: a thread reduces across groups while backward goes on. Otherwise `wait` does, since an
        # accelerator's current stream belongs to the calling thread
        if self._is_in_background:
            ranks.run_in_background(self)

    def wait(self, what: str) -> None:
        """Block until this rank's segment is summed over everyone."""
        if not self._is_in_background and not self._has_ended.is_set():
            try:
                self.run()
            except RuntimeError as error:
                self.fail(error)
            except BaseException:
                self.fail(_interruption(what))
                raise
        try:
            await_background_job(self._has_ended, self._comm.wait_time_out)
        except RuntimeError as error:
            peer = "every rank" if self._span is None else name_of(self._span.peer)
            self.fail(lost_peer_error(peer, what, error))
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error

    def fail(self, error: RuntimeError) -> None:
        self._error = error
        self._has_ended.set()

    @torch.no_grad()
    def run(self) -> None:
        with self._comm.trace.label("reduce_across", self._subject[1]) as self._span:
            self._reduce()
        unfinished.discard(self)  # nothing is in flight: `opt.reset()` may have dropped it without `wait`
        self._has_ended.set()

    def _reduce(self) -> None:
        # outside of the `try`: this error concerns the own group, not a replica that waits for its group
        self._within.wait(name_of_reduction(self._subject[1]))
        total = self._out
        try:
            if total.numel():
                self._all_reduce_over_replicas(total)
        except RuntimeError as error:
            message = f"{error} (A replica waits for its shard group, which may have lost a rank.)"
            raise RuntimeError(coded(message, "[ZERO-503]")) from error

    def _all_reduce_over_replicas(self, total: Tensor) -> None:
        comm = self._comm
        numel = total.numel()
        wire = total if total.dtype == self._wire_dtype else total.to(self._wire_dtype)
        share = -(-numel // comm.world_size)
        parts = [wire[min(numel, n * share) : min(numel, (n + 1) * share)] for n in range(comm.world_size)]
        own = parts[comm.group_rank]
        # a narrower wire dtype: sum in fp32 outside of `wire`, round once, then gather the rounded parts
        out = own if sum_dtype(own.dtype) == own.dtype else torch.empty_like(own, dtype=sum_dtype(own.dtype))
        limit = self._recv_buffer.numel() or numel
        needed = recv_numel(comm, [part.numel() for part in parts], wire.dtype, wire.device, limit)
        recv_buffer = self._recv_buffer[:needed] if needed <= self._recv_buffer.numel() else wire.new_empty(needed)
        what = name_of_reduction(self._subject[1])
        segment_reduction(comm, wire, parts, recv_buffer, self._subject, limit).start(out).wait(what)
        if out is not own:
            own.copy_(out)
        comm.start_all_gather(parts, (*self._subject, _GATHER)).wait(what)
        if wire is not total:
            total.copy_(wire)


class _ReductionOverReplicas:
    """A reduction over everyone, see `HierarchicalReduction`; for the arguments see `segment_reduction`."""

    def __init__(
        self,
        ranks: Ranks,
        whole: Tensor,
        parts: Sequence[Tensor],
        recv_buffer: Tensor,
        subject: tuple[int, ...],
        limit: int,
        factor: float,
    ) -> None:
        self._ranks, self._whole, self._parts, self._recv_buffer = ranks, whole, parts, recv_buffer
        self._subject, self._limit, self._factor = subject, limit, factor

    @property
    def in_place(self) -> Callable[[], InFlight]:
        return partial(self.start, self._parts[self._ranks.shard.group_rank])

    def start(self, out: Tensor) -> InFlight:
        """Start the reduction; see `PreparedReduction`."""
        ranks = self._ranks
        assert ranks.replicas is not None, "there are groups to add up over"
        # with the round as it is now: a thread that goes on after `opt.reset()` must send nothing in the next round
        subject = (*self._subject, ranks.replicas.round)
        within = segment_reduction(
            ranks.shard, self._whole, self._parts, self._recv_buffer, subject, self._limit, self._factor
        )
        return HierarchicalReduction(ranks, within.start(out), self._whole, out, self._recv_buffer, subject)


def prepare_reduction(
    ranks: Ranks,
    whole: Tensor,
    parts: Sequence[Tensor],
    recv_buffer: Tensor,
    subject: tuple[int, ...],
    limit: int,
    factor: float = 1.0,
) -> PreparedReduction:
    """Prepare the reduction of one bucket over everyone; for the arguments see `segment_reduction`."""
    if ranks.replicas is None:
        return segment_reduction(ranks.shard, whole, parts, recv_buffer, subject, limit, factor)
    return _ReductionOverReplicas(ranks, whole, parts, recv_buffer, subject, limit, factor)


@torch.no_grad()
def average_in_place(comm: Communicator, tensors: Sequence[Tensor], divisor: int, cap_bytes: int = 25 << 20) -> None:
    """Replace tensors by their sums over ranks times ``1 / divisor``. A collective.

    As in DDP the reciprocal is multiplied first; tensors below 32 bits are summed in fp32. Tensors are dense, of the
    same shapes and dtypes in the same order on every rank, and travel ``cap_bytes`` at a time.
    """
    for run in _runs_of_one_kind(tensors, cap_bytes):
        flat = torch.cat([as_real(tensor).reshape(-1) for tensor in run])
        flat = flat.to(sum_dtype(flat.dtype)).mul_(1.0 / divisor)
        try:
            dist.all_reduce(flat, group=comm.process_group)
        except RuntimeError as error:
            raise lost_collective_error(comm.process_group, "an average of gradients", error) from error
        moved = 2 * (comm.world_size - 1) * flat.nbytes // comm.world_size
        comm.trace.add_bytes(moved, moved)
        for tensor, part in zip(run, flat.split([as_real(tensor).numel() for tensor in run]), strict=True):
            as_real(tensor).copy_(part.view(as_real(tensor).shape))


def _runs_of_one_kind(tensors: Sequence[Tensor], cap_bytes: int) -> Iterator[Sequence[Tensor]]:
    """Consecutive tensors of one dtype and device, each run of at most ``cap_bytes`` or a single tensor."""
    start = 0
    while start < len(tensors):
        kind = (tensors[start].dtype, tensors[start].device)
        end = start
        nbytes = 0
        while end < len(tensors) and (tensors[end].dtype, tensors[end].device) == kind:
            nbytes += tensors[end].nbytes
            if nbytes > cap_bytes and end > start:
                break
            end += 1
        yield tensors[start:end]
        start = end


def _sums_in_ring_order(comm: Transport, numel: int, dtype: torch.dtype, device: torch.device) -> bool:
    return sum_dtype(dtype) == dtype and comm.has_rings(device, numel * dtype.itemsize)


def can_scale_in_sum(comm: Communicator, wire: Tensor) -> bool:
    """True if the owner can scale contributions while it sums them, instead of in a separate pass before.

    False if the backend sums, and if the wire dtype would round a product or overflow.
    """
    return not comm.is_alone and comm.has_direct_messages(wire.device) and sum_dtype(wire.dtype) == wire.dtype


def sum_in_order(parts: Sequence[Tensor], out: Tensor, rank: int, factor: float = 1.0) -> list[Callable[[], object]]:
    """Operations that multiply the contributions of all ranks, which they destroy, and sum them in rank order.

    This rank's contribution may be ``out`` itself.
    """
    own = parts[rank]
    adds: list[Callable[[], object]] = [] if factor == 1.0 else [partial(torch._foreach_mul_, parts, factor)]
    if out.dtype != own.dtype:
        return [*adds, partial(out.copy_, parts[0]), *map(partial, repeat(out.add_), parts[1:])]
    # lower ranks first, into the first slice, and own last among them: `out` may be `own`, which must not be
    # overwritten before it is added
    adds += map(partial, repeat(parts[0].add_), parts[1:rank])
    if rank:
        adds.append(partial(torch.add, parts[0], own, out=out))
    elif out.data_ptr() != own.data_ptr():
        adds.append(partial(out.copy_, own))
    return [*adds, *map(partial, repeat(out.add_), parts[rank + 1 :])]


def name_of_reduction(bucket: int) -> str:
    """The reduction of a bucket, as messages name it."""
    return f"the reduction of bucket {bucket}"


def _interruption(what: str) -> RuntimeError:
    """The error of a sum of which an exception, such as KeyboardInterrupt, has left a part."""
    return RuntimeError(f"An exception has interrupted {what}, which is not complete. Call opt.reset(). [ZERO-308]")


def receive_window(numel: int, world_size: int, limit: int) -> int:
    """Elements of an owner's segment that each peer sends at once; the same number on every rank."""
    return min(numel, max(1, limit // max(1, world_size - 1)))


def _windows(numel: int, window: int) -> list[tuple[int, int]]:
    return list(pairwise([*range(0, numel, max(1, window)), numel])) if numel else []
