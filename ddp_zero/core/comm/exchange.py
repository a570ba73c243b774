"""Messages and collectives in flight, from posting to completion. `communicator` chooses among them."""

import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work, get_rank
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from ddp_zero.core.comm.recorder import Recorder, current
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.error_codes import coded

CHUNK_BYTES = 4 << 20
_enable_record_function = torch._C._autograd._enable_record_function
ROUND, ROUND_BITS = 0x9E3779B1, 0x3FFFFFFF
"""A round changes tags by ``round * ROUND & ROUND_BITS``: odd, so that no two rounds within 2^30 share a tag."""

Started = TypeVar("Started")

all_gather_native = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_native = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""torch's functions by their names since torch 2.13, or by their earlier names."""

# bound to a group's own methods where it has them: torch's functions check tensors, group and context in each call,
# which takes as long as the backend takes to issue a small collective


def bind_all_gather(group: ProcessGroup, whole: Tensor, mine: Tensor) -> Callable[[], Work]:
    """Return a function that issues an all-gather of equal parts."""
    if not hasattr(group, "all_gather_single"):
        return partial(all_gather_native, whole, mine, group=group, async_op=True)
    options = AllgatherOptions()
    options.asyncOp = True
    return partial(group.all_gather_single, whole, mine, options)


def bind_reduce_scatter(group: ProcessGroup, mine: Tensor, whole: Tensor, average: bool = False) -> Callable[[], Work]:
    """Return a function that issues a reduce-scatter of equal parts."""
    mine = as_real(mine)
    whole = as_real(whole)
    op = dist.ReduceOp(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
    if not hasattr(group, "reduce_scatter_single"):
        return partial(reduce_scatter_native, mine, whole, op=op, group=group, async_op=True)
    options = dist.ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op, True
    return partial(group.reduce_scatter_single, mine, whole, options)


def bind_broadcast(group: ProcessGroup, part: Tensor, owner: GroupRank) -> Callable[[], Work]:
    """Return a function that issues a broadcast from the owner."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = owner, 0, True
    return partial(group.broadcast, [part], options)


def bind_reduce(group: ProcessGroup, part: Tensor, owner: GroupRank) -> Callable[[], Work]:
    """Return a function that issues a sum to the owner."""
    options = dist.ReduceOptions()
    options.rootRank, options.rootTensor, options.asyncOp = owner, 0, True
    return partial(group.reduce, [as_real(part)], options)


def bind_all_reduce(group: ProcessGroup, whole: Tensor) -> Callable[[], Work]:
    """Return a function that issues a sum to every rank."""
    options = dist.AllreduceOptions()
    options.asyncOp = True
    return partial(group.allreduce, [as_real(whole)], options)


def as_real(tensor: Tensor) -> Tensor:
    """A view of the same memory as real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Waitable(Protocol):
    """The part of `torch.distributed.Work` that an exchange uses."""

    def wait(self, timeout: timedelta = ...) -> object: ...

    def is_completed(self) -> bool: ...


class FailedWork:
    """Stands for a message that failed, or could not be posted: `wait` raises its error."""

    def __init__(self, error: RuntimeError) -> None:
        self._message = str(error)  # the error itself would keep the frames alive through which it is raised

    def wait(self, timeout: timedelta | None = None) -> object:
        raise RuntimeError(self._message)

    def is_completed(self) -> bool:
        return False


class LocalWork:
    """Operations of this rank that have a place among messages, and run in `wait`.

    They cannot be resumed: after an exception has interrupted them, `wait` raises ``interruption``.

    Attributes:
        is_due: whether they are still to run; set by each post of the messages.
    """

    def __init__(self, operations: Sequence[Callable[[], object]], interruption: RuntimeError) -> None:
        self.operations = operations
        self._interruption = str(interruption)
        self.is_due, self._is_done = True, False

    def wait(self, timeout: timedelta | None = None) -> object:
        if not self.is_due:
            raise RuntimeError(self._interruption)
        self.is_due = self._is_done = False
        for operate in self.operations:
            operate()
        self._is_done = True
        return True

    def is_completed(self) -> bool:
        return self._is_done and not self.is_due


PeerName = Callable[[], str]
"""Returns the name of a message's peer."""


class _WaitMode(threading.local):
    """How this thread waits for messages.

    On Gloo a wait whose time-out passes closes all connections of its group. A background thread may wait for a message
    of an iteration that was dropped and that no peer will send, while later iterations use the group: it waits without
    a time-out, and `await_background_job` raises instead.
    """

    is_in_background = False


wait_mode = _WaitMode()
_NO_TIME_OUT = timedelta(days=3650)
_background = {"messages": 0}  # sent or received by background threads so far: their progress


def wait_in_background(work: Waitable) -> None:
    """Block a background thread until a message is complete; see `_WaitMode`."""
    work.wait(_NO_TIME_OUT)
    _background["messages"] += 1


def await_background_job(has_ended: threading.Event, limit: timedelta) -> None:
    """Block until a background job has ended. Raises RuntimeError if no job makes progress within ``limit``."""
    before = _background["messages"]
    while not has_ended.wait(limit.total_seconds()):
        if _background["messages"] == before:
            raise RuntimeError(f"Timed out: no message within {limit}")
        before = _background["messages"]


class InFlight(Protocol):
    """An operation that was started and must be waited for."""

    def wait(self, what: str) -> None:
        """Block until the operation is complete; see `Exchange.wait`."""


class Exchange:
    """Messages in flight. The tensors they read and write must stay untouched until `wait` returns.

    Args:
        works: the messages, and `LocalWork` of this rank, in the order in which they are waited for.
        names: the name of each message's peer; None for `LocalWork`, whose errors are raised as they are.
        tensors: kept alive, since the backend reads and writes them.
        limit: the time-out of each wait, see `groups.message_time_out`.
    """

    _pending: Sequence[Waitable] = ()  # not waited for yet; on Gloo a second wait would wait for a second message
    _failure: str | None = None

    def __init__(
        self,
        works: Sequence[Waitable],
        names: Sequence[PeerName | None],
        tensors: Sequence[Tensor],
        limit: timedelta | None = None,
    ) -> None:
        self._pending = works
        self._names = names
        self._is_kept = bool(works)
        self._limit = () if limit is None else (limit,)
        self._tensors = tensors
        if works:
            # an exchange dropped before its wait is kept with its memory until the process ends: a peer may still read
            # or write there, and on Gloo freeing a buffer of a pending message breaks the connection
            unfinished.add(self)

    def wait(self, what: str) -> None:
        """Block until all messages are received and sent. Can be called again after a signal handler has raised.

        ``what`` names the exchange in the error, such as ``the sync of bucket 3``. Raises RuntimeError if a peer
        failed, each time.
        """
        span, limit, work = current.span, self._limit, None
        if span is not None:  # as in `record_wait`
            span.log += (what,)
            span.peer = self.awaited
        try:
            if wait_mode.is_in_background:
                for work in self._pending:
                    wait_in_background(work)
            else:
                for work in self._pending:
                    work.wait(*limit)
            self._pending = ()
        except BaseException as error:
            if work is not None and work in self._pending:
                self._keep_unfinished(work, what, error)
            raise
        if self._is_kept:
            unfinished.discard(self)

    @property
    def is_in_flight(self) -> bool:
        return bool(self._pending)

    def awaited(self) -> str:
        """The name of the peer whose message this exchange waits for, or has waited for last."""
        names = self._names[len(self._names) - len(self._pending) :] or self._names[-1:]
        # the last work is not asked: a backend may not be asked while its stream is captured
        awaited = (name for name, work in zip(names[:-1], self._pending, strict=False) if not work.is_completed())
        name = next(awaited, names[-1] if names else None)
        return "" if name is None else name()

    def _keep_unfinished(self, work: Waitable, what: str, error: BaseException) -> None:
        """Keep the works that an error in a `wait` has left. Raises RuntimeError if that work's peer failed."""
        position = self._pending.index(work)
        name = self._names[len(self._names) - len(self._pending) + position]
        if name is None or not isinstance(error, RuntimeError):
            # a signal handler may have raised after the message had arrived
            self._pending = self._pending[position + work.is_completed() :]
            return
        if self._failure is None:
            self._failure = str(lost_peer_error(name(), what, error))
            # the error is kept: its work counts as completed, so that a second wait would pass over it
            self._pending = [FailedWork(error), *self._pending[position + 1 :]]
        raise RuntimeError(self._failure) from error


def lost_peer_error(peer: str, what: str, error: RuntimeError) -> RuntimeError:
    """The error for a peer that takes no part, with the backend's error and a hint at the rank that was lost first."""
    has_ended = "onnection closed" in str(error) or "onnection reset" in str(error)
    hint = (
        " If that process ended with an error of its own, it names the rank that was lost first." if has_ended else ""
    )
    return RuntimeError(coded(f"Expected {peer} to take part in {what}, got: {error}.{hint}", "[ZERO-503]"))


TensorsByPeer = Mapping[GroupRank, Sequence[Tensor]]
Post = Callable[[int], Work]
"""Posts a message under a given tag."""


def bind_messages(
    group: ProcessGroup, name: Callable[[GroupRank], str], sent: TensorsByPeer, received: TensorsByPeer
) -> tuple[list[Post], list[PeerName]]:
    """Functions that post tensors to and from peers, a chunk each, in posting order; and the names of the peers."""
    # receives first: Gloo moves a message only once its receive is posted, so a late receive stalls the peer
    posted = [
        (partial(post, [chunk], peer), partial(name, peer))
        for post, messages in ((group.recv, received), (group.send, sent))
        for peer, tensors in messages.items()
        for chunk in chunks(tensors)
    ]
    return [post for post, _ in posted], [peer for _, peer in posted]


class Member(Protocol):
    """The part of a `Communicator` that messages use."""

    process_group: ProcessGroup
    generation: int
    round_tag: int  # see `tag_of`
    message_time_out: timedelta | None  # see `groups.message_time_out`

    @property
    def trace(self) -> Recorder: ...

    def name(self, group_rank: GroupRank) -> str: ...


class PreparedExchange(Exchange):
    """An exchange over memory that stays in place: made once, posted as often as needed.

    It is in flight from ``post`` until `wait` returns.

    Args:
        works: the messages or collectives, once posted.
        names: see `Exchange`.
        tensors: that they read and write.
        moved: bytes of parameters and gradients sent, and received, by each ``post``.
    """

    def __init__(
        self,
        comm: Member,
        works: list[Any],
        names: Sequence[PeerName | None],
        tensors: Sequence[Tensor],
        moved: tuple[int, int],
    ) -> None:
        super().__init__((), names, tensors, comm.message_time_out)
        self._comm, self._works = comm, works
        self._moved = (moved,)  # see `Span.log`

    def _abandon(self) -> None:
        """Keep works and memory of a dropped iteration until the process ends: peers may still read and write there."""
        unfinished.add(Exchange([*self._pending], (), self._tensors))
        self._failure = None

    def __del__(self) -> None:
        if self._pending:
            self._abandon()


class PointToPointExchange(PreparedExchange):
    """Sends to and receives from each peer, cut into chunks once: every receive is posted, then every send.

    Args:
        sent: 1-D contiguous tensors for each peer.
        received: tensors to write for each peer, of the sizes and in the order in which it sends them.
        subject: see `Communicator.start_all_gather`. Messages of a subject between two ranks keep their order.
        local_works: run when all messages are received, while sends may still be in flight; see `Exchange`.
        is_control: whether the messages carry neither parameters nor gradients, so that their bytes do not count.
    """

    def __init__(
        self,
        comm: Member,
        sent: TensorsByPeer,
        received: TensorsByPeer,
        subject: tuple[int, ...],
        local_works: Sequence[Waitable] = (),
        *,
        is_control: bool = False,
    ) -> None:
        to_send, to_receive = ([*chain.from_iterable(by_peer.values())] for by_peer in (sent, received))
        posts, peers = bind_messages(comm.process_group, comm.name, sent, received)
        num = len(chunks(to_receive))
        names: list[PeerName | None] = [*peers[:num], *[None] * len(local_works), *peers[num:]]
        works: list[Any] = [*[None] * num, *local_works, *[None] * (len(posts) - num)]
        places = (place for place, name in enumerate(names) if name is not None)
        nbytes_sent, nbytes_received = (sum(tensor.nbytes for tensor in part) for part in (to_send, to_receive))
        moved = (0, 0) if is_control else (nbytes_sent, nbytes_received)
        super().__init__(comm, works, names, [*to_send, *to_receive], moved)
        self._posts = list(zip(places, posts, strict=True))
        self._local_works = [work for work in local_works if isinstance(work, LocalWork)]
        self._base_tag = base_tag_of(comm.generation, subject)  # in round 0

    def post(self) -> "PointToPointExchange":
        """Post every receive, then every send."""
        if self._pending:
            self._abandon()
        for work in self._local_works:
            work.is_due = True
        comm = self._comm
        works = self._pending = self._works
        # with the round, so that a late message of an abandoned step matches no receive of this one
        tag = self._base_tag ^ comm.round_tag
        _enable_record_function(False)  # see `start_unrecorded`
        try:
            for place, post in self._posts:
                try:
                    works[place] = post(tag)
                except RuntimeError as error:  # the peer is known to be gone: `wait` raises this
                    works[place] = FailedWork(error)
        finally:
            _enable_record_function(True)
        span = current.span
        if span is not None and span.labels.recorder is comm.trace:  # as in `Recorder.add_bytes`
            span.log += self._moved
        else:
            comm.trace.add_bytes(*self._moved[0])
        return self


class CollectiveExchange(PreparedExchange):
    """Collectives of one group, issued in the same order on every rank.

    Args:
        issues: functions that issue a collective each.
        names: of the rank that each collective awaits.
        tensors: that they read and write.
        moved: bytes of parameters and gradients that are sent and received.
    """

    def __init__(
        self,
        comm: Member,
        issues: Sequence[Callable[[], Work]],
        names: Sequence[PeerName],
        tensors: Sequence[Tensor],
        moved: tuple[int, int],
    ) -> None:
        super().__init__(comm, [], names, tensors, moved)
        self._issues = issues
        self._limit = ()  # the backend's own

    def post(self) -> "CollectiveExchange":
        """Issue every collective."""
        if self._pending:
            self._abandon()
        works = self._pending = self._works
        works[:] = ()  # of the last time: a collective that is not issued must not count as complete
        for issue in self._issues:
            works += (issue(),)
        span = current.span
        if span is not None and span.labels.recorder is self._comm.trace:  # as in `Recorder.add_bytes`
            span.log += self._moved
        else:
            self._comm.trace.add_bytes(*self._moved[0])
        return self


def all_gather_by_messages(
    group: ProcessGroup,
    mine: Tensor,
    number: int,
    name: Callable[[GroupRank], str],
    what: str,
    limit: timedelta | None,
) -> list[Tensor]:
    """All-gather a small CPU tensor of one shape and dtype on a Gloo group; errors name the missing rank.

    ``number`` is the gather's number on the group, the same on every rank; ``limit`` is `groups.message_time_out`. A
    Gloo collective would only report a closed connection, and is not faster: it passes the tensors around a ring.
    """
    me, ranks = group.rank(), group.size()
    gathered = [torch.empty_like(mine) for _ in range(ranks)]
    gathered[me].copy_(mine)
    flat = [part.reshape(-1) for part in gathered]
    peers = [GroupRank((me + step) % ranks) for step in range(1, ranks)]
    posts, names = bind_messages(
        group, name, {peer: [flat[me]] for peer in peers}, {peer: [flat[peer]] for peer in peers}
    )
    # with the size: where ranks have come to gather different things, a message of another size would end the process
    tag = tag_of(-1, number, (mine.nbytes,))
    works = _post_all(posts, tag)
    Exchange(works, names, gathered, limit).wait(what)
    return gathered


def _post_all(posts: Sequence[Post], tag: int) -> list[Waitable]:
    """Post messages as `PointToPointExchange.post` does."""
    works = list[Waitable]()
    _enable_record_function(False)
    try:
        for post in posts:
            try:
                works.append(post(tag))
            except RuntimeError as error:
                works.append(FailedWork(error))
    finally:
        _enable_record_function(True)
    return works


def tag_of(generation: int, round_: int, subject: tuple[int, ...]) -> int:
    """A 31-bit tag, never the tag of trees; tags of two rounds differ, and of two subjects except for one in 2^30."""
    return base_tag_of(generation, subject) ^ round_ * ROUND & ROUND_BITS


def base_tag_of(generation: int, subject: tuple[int, ...]) -> int:
    """The tag of a subject in round 0."""
    return zlib.crc32(repr((generation, *subject)).encode()) & ROUND_BITS | 0x40000000


def require_work(work: Work | None) -> Work:
    """The collective in flight; RuntimeError if this rank is not a member of the group."""
    if work is None:
        raise RuntimeError(
            "This process is not a member of the process group: a collective did not start. Build the "
            "optimizer on the members alone. [ZERO-502]"
        )
    return work


def start_unrecorded(start: Callable[[], Started]) -> Started:
    """Start an operation that may outlast a profiler, without its own profiler ranges."""
    # Gloo closes a message's range when the message ends. If the profiler has ended before, torch writes to memory that
    # the profiler has freed (SIGSEGV and SIGABRT with torch 2.13.0). NCCL closes its ranges at once
    _enable_record_function(False)
    try:
        return start()
    finally:
        _enable_record_function(True)


def chunks(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The bytes of tensors in chunks, so that a backend can have several in flight."""
    filled = (tensor for tensor in tensors if tensor.numel())
    return [chunk for tensor in filled for chunk in torch.split(tensor.view(torch.uint8), CHUNK_BYTES)]


def every_rank() -> str:
    """The name of the peers of a collective."""
    return "every rank"


def contiguous_span(segments: Sequence[Tensor]) -> Tensor | None:
    """One tensor over 1-D segments of one size that are adjacent in memory; None if they are not."""
    first = segments[0]
    numel = first.numel()
    starts = range(first.storage_offset(), first.storage_offset() + numel * len(segments), max(1, numel))
    memory = first.untyped_storage().data_ptr()
    are_adjacent = (
        part.numel() == numel and part.storage_offset() == start and part.untyped_storage().data_ptr() == memory
        for part, start in zip(segments, starts, strict=False)
    )
    return first.as_strided((numel * len(segments),), (1,)) if numel and all(are_adjacent) else None


class PaddedAllGather:
    """An all-gather of segments padded to equal size, 1-D bytes in rank order; see `padded_size`.

    This rank's segment is sent, all others are written.
    """

    def __init__(self, group: ProcessGroup, segments: Sequence[Tensor], nbytes: int, device: torch.device) -> None:
        self._segments = segments
        self._me = get_rank(group)
        self._gathered = torch.empty(nbytes * len(segments), dtype=torch.uint8, device=device)
        mine = self._gathered[self._me * nbytes : (self._me + 1) * nbytes]
        mine[: segments[self._me].numel()].copy_(segments[self._me])
        work = bind_all_gather(group, self._gathered, mine)()
        self._exchange = Exchange([work], [every_rank], [self._gathered])

    def wait(self, what: str) -> None:
        """Block as `Exchange.wait` does, then write the segments."""
        self._exchange.wait(what)
        if self._gathered.device.type != "cpu":
            # where a sync outlasts its step, this stream reads memory that was allocated on another stream
            self._gathered.record_stream(torch.accelerator.current_stream(self._gathered.device))
        parts = self._gathered.chunk(len(self._segments))
        for rank, (segment, padded) in enumerate(zip(self._segments, parts, strict=True)):
            if rank != self._me:
                segment.copy_(padded[: segment.numel()])


def bind_padded_reduce_scatter(
    group: ProcessGroup, parts: Sequence[Tensor], recv_buffer: Tensor
) -> tuple[Callable[[], Work], Tensor]:
    """Bind a reduce-scatter of 1-D parts, one per rank, padded to equal size; see `padded_size`.

    ``recv_buffer`` has room for the padded parts, and for a padded part more: this rank's sum. Returns a function that
    issues the reduce-scatter, and the tensor that will hold this rank's part of the sum.
    """
    *slots, padded_sum = recv_buffer.chunk(len(parts) + 1)
    copies = [slot[: part.numel()] for slot, part in zip(slots, parts, strict=True)]
    paddings = [slot[part.numel() :] for slot, part in zip(slots, parts, strict=True) if part.numel() < slot.numel()]
    reduce_scatter = bind_reduce_scatter(group, padded_sum, recv_buffer[: len(parts) * padded_sum.numel()])

    def issue() -> Work:
        torch._foreach_copy_(copies, [*parts])
        for padding in paddings:
            padding.zero_()
        return reduce_scatter()

    return issue, padded_sum[: parts[get_rank(group)].numel()]


unfinished: set[Exchange] = set()
"""Exchanges that were not waited for, with their memory; see `Exchange.__init__`."""
