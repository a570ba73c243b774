"""Messages and collectives in flight, from posting to completion. `communicator` chooses among them."""

import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work, get_rank

from ddp_zero.core.comm.recorder import Recorder, current
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.error_codes import coded

CHUNK_BYTES = 4 << 20
_enable_record_function = torch._C._autograd._enable_record_function
_ROUND = 0x9E3779B1  # odd, so that no two rounds within 2^30 share a tag

Started = TypeVar("Started")

all_gather_native = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_native = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Under their names since torch 2.13, or the earlier ones."""


class Waitable(Protocol):
    """The part of `torch.distributed.Work` that an exchange uses."""

    def wait(self, timeout: timedelta = ...) -> object: ...

    def is_completed(self) -> bool: ...


class NotPosted:
    """A message that could not be posted; waiting for it raises the error."""

    def __init__(self, error: RuntimeError) -> None:
        self._message = str(error)  # the error itself would keep the frames alive through which it is raised

    def wait(self, timeout: timedelta | None = None) -> object:
        raise RuntimeError(self._message)

    def is_completed(self) -> bool:
        return False


Pending = tuple[Callable[[], str], Waitable]
"""A function that names the peer, and the message in flight."""


class _Waiting(threading.local):
    """How this thread waits for messages.

    On Gloo a wait whose time-out passes closes all connections of its group. A background thread may wait for a message
    of an iteration that was dropped and that no peer will send, while later iterations use the group: it waits without
    a time-out, and `await_background` raises instead.
    """

    is_in_background = False


waiting = _Waiting()
_WITHOUT_END = timedelta(days=3650)
_background = {"messages": 0}  # received or sent by background threads: their progress


def wait_in_background(work: Waitable) -> None:
    """Block a background thread until a message is complete; see `_Waiting`."""
    work.wait(_WITHOUT_END)
    _background["messages"] += 1


def await_background(has_ended: threading.Event, limit: timedelta) -> None:
    """Block until a job of a background thread has ended. Raises RuntimeError if none makes progress for so long."""
    before = _background["messages"]
    while not has_ended.wait(limit.total_seconds()):
        if _background["messages"] == before:
            raise RuntimeError(f"Timed out: no message within {limit}")
        before = _background["messages"]


class InFlight(Protocol):
    """An operation that was started and must be waited for."""

    def wait(self, what: str) -> None:
        """Block until it is complete; see `Exchange.wait`."""


class Exchange:
    """Messages in flight. The tensors they read and write must stay untouched until `wait` returns."""

    _failure: str | None = None
    _waited = _num = 0  # completed works, and all

    def __init__(self, works: Sequence[Pending], tensors: Sequence[Tensor], limit: timedelta | None = None) -> None:
        self._works, self._num, self._is_kept = works, len(works), bool(works)
        self._limit = () if limit is None else (limit,)  # see `groups.message_limit`
        self._tensors = tensors  # keeps the memory alive that the backend reads and writes
        self._waited = 0  # waiting again for a completed work on Gloo would wait for a second message
        if works:
            # an exchange dropped before its wait is kept with its memory until the process ends: a peer may still read
            # or write there, and on Gloo freeing a buffer of a pending message breaks the connection
            unfinished.add(self)

    def wait(self, what: str, first: int | None = None) -> None:
        """Block until everything was received and sent. Can be called again after a signal handler has raised.

        ``what`` names the exchange in the error, such as ``the sync of bucket 3``. With ``first`` only so many leading
        messages are waited for. Raises RuntimeError if a peer failed, each time.
        """
        if self._failure is not None:
            raise RuntimeError(self._failure)
        works, span, is_in_background = self._works, current.span, waiting.is_in_background
        for position in range(self._waited, self._num if first is None else first):
            peer, work = works[position]
            if span is not None:  # as in `waits_for`
                span.message, span.peer = what, peer
            try:
                if is_in_background:
                    wait_in_background(work)
                else:
                    work.wait(*self._limit)
                self._waited = position + 1
            except BaseException as error:
                if self._waited == position:  # a signal handler may have raised after the message had arrived
                    self._waited += work.is_completed()
                if isinstance(error, RuntimeError):
                    # kept: the work counts as completed, so that a second wait would pass over it
                    self._failure = str(lost_peer_error(peer(), what, error))
                    raise RuntimeError(self._failure) from error
                raise
        if self._is_kept and self._waited == self._num:
            unfinished.discard(self)


def lost_peer_error(peer: str, what: str, error: RuntimeError) -> RuntimeError:
    has_ended = "onnection closed" in str(error) or "onnection reset" in str(error)
    hint = (
        " If that process ended with an error of its own, it names the rank that was lost first." if has_ended else ""
    )
    return RuntimeError(coded(f"Expected {peer} to take part in {what}, got: {error}.{hint}", "[ZERO-503]"))


ByPeer = Mapping[GroupRank, Sequence[Tensor]]
Post = tuple[Callable[..., Work], Callable[[], str], list[Tensor], GroupRank]
"""A method of a group, a function that names the peer, the chunk to send or to receive, and the peer."""


def posts_of(group: ProcessGroup, name: Callable[[GroupRank], str], sent: ByPeer, received: ByPeer) -> list[Post]:
    """The messages that carry tensors to and from peers, in chunks, in the order in which they are to be posted."""
    # receives first: Gloo moves a message only once its receive is posted, so a late receive stalls the peer
    return [
        (post, partial(name, peer), [chunk], peer)
        for post, messages in ((group.recv, received), (group.send, sent))
        for peer, tensors in messages.items()
        for chunk in chunks(tensors)
    ]


def post_all(posts: Sequence[Post], tag: int, works: list[Any]) -> list[Pending]:
    """Post messages in this order. Returns ``works``, a list of as many, with them in it."""
    _enable_record_function(False)  # see `start_unrecorded`
    try:
        for place, (post, name, chunk, peer) in enumerate(posts):
            try:
                works[place] = name, post(chunk, peer, tag)
            except RuntimeError as error:  # of a peer that is known to be gone: raised when it is waited for
                works[place] = name, NotPosted(error)
    finally:
        _enable_record_function(True)
    return works


class Member(Protocol):
    """The part of a `Communicator` that messages use."""

    process_group: ProcessGroup
    generation: int
    round: int
    message_limit: timedelta | None  # of each wait, see `groups.message_limit`

    @property
    def trace(self) -> Recorder: ...

    def name(self, group_rank: GroupRank) -> str: ...


class Messages(Exchange):
    """Messages between this rank and its peers in memory that stays in place: cut once, posted as often as needed.

    In flight from `post` until they were waited for.

    Args:
        sent: 1-D contiguous tensors for each peer.
        received: tensors to write for each peer, of the sizes and in the order in which it sends them.
        subject: see `Communicator.start_exchange`. Messages of a subject between two ranks keep their order.
        is_control: whether their bytes are none of parameters and gradients.
    """

    def __init__(
        self, comm: Member, sent: ByPeer, received: ByPeer, subject: tuple[int, ...], *, is_control: bool = False
    ) -> None:
        given, taken = ([one for tensors in pairs.values() for one in tensors] for pairs in (sent, received))
        super().__init__((), [*given, *taken], comm.message_limit)
        self._comm = comm
        self._posts = posts_of(comm.process_group, comm.name, sent, received)
        self.num_receives = len(chunks(taken))
        self._seed = seed_of(comm.generation, subject)
        self._most, self._none = len(self._posts), [None] * len(self._posts)
        self._sent, self._received = (0 if is_control else sum(one.nbytes for one in some) for some in (given, taken))

    def post(self) -> "Messages":
        """Post every receive, then every send."""
        comm, works = self._comm, list[Any](self._none)
        if self._waited < self._num:
            self._leave()
        self._works, self._num, self._waited, self._failure = works, self._most, 0, None
        # the tag of `in_round`, without its call
        post_all(self._posts, self._seed ^ comm.round * _ROUND & 0x3FFFFFFF | 0x40000000, works)
        span = current.span
        if span is not None and span.adds_bytes and span.recorder is comm.trace:
            span.sent += self._sent
            span.received += self._received
        else:
            comm.trace.add_bytes(self._sent, self._received)
        return self

    def _leave(self) -> None:
        """Leave messages of an iteration that was dropped to the peers, which may still read and write there."""
        Exchange(self._works[self._waited :], self._tensors)

    def __del__(self) -> None:
        if self._waited < self._num:
            self._leave()


def gather_directly(
    group: ProcessGroup,
    mine: Tensor,
    number: int,
    name: Callable[[GroupRank], str],
    what: str,
    limit: timedelta | None,
) -> list[Tensor]:
    """All-gather a small CPU tensor of one shape and dtype on a Gloo group; errors name the missing rank.

    ``number`` is the gather's number on the group, the same on every rank; for ``limit`` see `groups.message_limit`. A
    Gloo collective would only report a closed connection, and is not faster: it passes the tensors around a ring.
    """
    me, ranks = group.rank(), group.size()
    gathered = [torch.empty_like(mine) for _ in range(ranks)]
    gathered[me].copy_(mine)
    flat = [part.reshape(-1) for part in gathered]
    peers = [GroupRank((me + step) % ranks) for step in range(1, ranks)]
    posts = posts_of(group, name, {peer: [flat[me]] for peer in peers}, {peer: [flat[peer]] for peer in peers})
    # with the size: where ranks have come to gather different things, a message of another size would end the process
    tag = tag_of(-1, number, (mine.nbytes,))
    Exchange(post_all(posts, tag, [None] * len(posts)), gathered, limit).wait(what)
    return gathered


def tag_of(generation: int, round_: int, subject: tuple[int, ...]) -> int:
    """A 31-bit tag, never the tag of trees; tags of two rounds differ, and of two subjects except for one in 2^30."""
    return in_round(seed_of(generation, subject), round_)


def in_round(seed: int, round_: int) -> int:
    """The tag of a subject, by its `seed_of`, in a round."""
    return seed ^ round_ * _ROUND & 0x3FFFFFFF | 0x40000000


def seed_of(generation: int, subject: tuple[int, ...]) -> int:
    """The 30-bit part of a tag that is the same in every round."""
    return zlib.crc32(repr((generation, *subject)).encode()) & 0x3FFFFFFF


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


def start_by_owner(
    start: Callable[[Tensor, GroupRank], Work | None], parts: Sequence[Tensor], name: Callable[[GroupRank], str]
) -> list[Pending]:
    """Start a collective for each rank's part."""
    works: list[Pending] = []
    # in rank order on every rank, and parts without elements skipped by all: NCCL matches collectives by order of issue
    # alone
    for owner, part in enumerate(parts):
        if part.numel():
            work = start_unrecorded(partial(start, part, GroupRank(owner)))
            works.append((partial(name, GroupRank(owner)), require_work(work)))
    return works


def contiguous_span(segments: Sequence[Tensor]) -> Tensor | None:
    """The memory of adjacent 1-D segments of one size, as one tensor; else None."""
    first, numel = segments[0], segments[0].numel()
    starts = range(first.storage_offset(), first.storage_offset() + numel * len(segments), max(1, numel))
    memory = first.untyped_storage().data_ptr()
    lie_so = (
        one.numel() == numel and one.storage_offset() == start and one.untyped_storage().data_ptr() == memory
        for one, start in zip(segments, starts, strict=False)
    )
    return first.as_strided((numel * len(segments),), (1,)) if numel and all(lie_so) else None


class PaddedGather:
    """An all-gather of segments padded to equal size, 1-D bytes in rank order; see `padded_size`.

    This rank's segment is sent, all others are written.
    """

    def __init__(self, group: ProcessGroup, segments: Sequence[Tensor], nbytes: int, device: torch.device) -> None:
        self._segments = segments
        self._me = get_rank(group)
        self._gathered = torch.empty(nbytes * len(segments), dtype=torch.uint8, device=device)
        mine = self._gathered[self._me * nbytes : (self._me + 1) * nbytes]
        mine[: segments[self._me].numel()].copy_(segments[self._me])
        work = all_gather_native(self._gathered, mine, group=group, async_op=True)
        self._exchange = Exchange([(lambda: "every rank", work)], [self._gathered])

    def wait(self, what: str) -> None:
        """As `Exchange.wait`; then the segments are written."""
        self._exchange.wait(what)
        if self._gathered.device.type != "cpu":
            # this stream reads memory that was allocated on another one where a sync outlasts its step
            self._gathered.record_stream(torch.accelerator.current_stream(self._gathered.device))
        parts = self._gathered.chunk(len(self._segments))
        for rank, (segment, padded) in enumerate(zip(self._segments, parts, strict=True)):
            if rank != self._me:
                segment.copy_(padded[: segment.numel()])


def start_padded_sum(group: ProcessGroup, parts: Sequence[Tensor], recv_buffer: Tensor) -> tuple[Exchange, Tensor]:
    """Start a reduce-scatter of parts, one per rank and 1-D, padded to equal size; see `padded_size`.

    ``recv_buffer`` has room for as many padded parts and one more, for this rank's sum. Returns the sum in flight, and
    the tensor that will hold this rank's part of it.
    """
    *padded_parts, mine = recv_buffer.chunk(len(parts) + 1)
    for part, padded in zip(parts, padded_parts, strict=True):
        padded[: part.numel()].copy_(part)
        padded[part.numel() :].zero_()
    whole = recv_buffer[: len(parts) * mine.numel()]
    work = reduce_scatter_native(mine, whole, group=group, async_op=True)
    return Exchange([(lambda: "every rank", work)], [whole, mine]), mine[: parts[get_rank(group)].numel()]


unfinished: set[Exchange] = set()
