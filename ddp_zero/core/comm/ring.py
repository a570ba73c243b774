"""Sums and gathers around a ring, on Gloo: each rank receives from the rank before it and sends to the one after it.

In a direct exchange N - 1 flows meet at each link, which slows them down from about four ranks on; in a ring there is
one in each direction. Chunks must be passed on while the training loop computes, so a thread does it; see
`ddp_zero.core.plan.ring` for what it does.

Two threads take turns, so that a link is not idle at the end of a transfer: one begins the next one while the other
still receives. Each runs its own transfers one after the other, in the order in which they were started, which is the
same on every rank.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import Work

from ddp_zero.core.plan.ring import Chunk, RingSchedule, chunk_numel
from ddp_zero.tools.record.recorder import waits_for

_RECEIVES_AHEAD = 8  # Gloo begins to send a message when its receive is posted
_LEAST_BYTES, _MOST_BYTES = 64 << 10, 256 << 10  # of a chunk
_THREADS = 2

Job = TypeVar("Job", bound="Background")


@dataclass(frozen=True)
class Neighbours:
    """The two ranks that a rank exchanges messages with.

    Attributes:
        receive: posts a receive into a contiguous tensor from the rank before.
        send: posts a send of one to the rank after.
        before: the name of the rank before, in messages.
    """

    receive: Callable[[Tensor], Work]
    send: Callable[[Tensor], Work]
    before: Callable[[], str]
    after: Callable[[], str]


class Background(Protocol):
    """What a `RingWorker` runs."""

    def run(self) -> None:
        """Do all of it; may raise."""

    def fail(self, error: RuntimeError) -> None:
        """Take the error of `run`, or of a job before."""


class RingTransfer:
    """A sum or a gather in flight. The tensors must stay untouched until `wait` returns.

    Args:
        segments: 1-D contiguous, one per rank. A gather writes those of other ranks. A sum destroys them; this rank's
            then holds the sum.
        room: what a sum receives into, 1-D, of the dtype of the segments, at least `ring_room_numel` elements; None for
            a gather, which receives in place.
        factor: a sum multiplies this rank's part by it beforehand.
    """

    def __init__(
        self,
        neighbours: Neighbours,
        schedule: RingSchedule,
        segments: Sequence[Tensor],
        room: Tensor | None = None,
        factor: float = 1.0,
    ) -> None:
        self._neighbours = neighbours
        self._schedule = schedule
        self._segments = segments
        self._room = room
        self._factor = factor
        self._sends: deque[Work] = deque()
        self._error: RuntimeError | None = None
        self._has_received = threading.Event()

    def wait(self, what: str) -> None:
        """Block until everything was received and sent. Can be called again after a signal handler has raised.

        Args:
            what: the name of the transfer in the error message, such as ``the sync of bucket 3``.
        """
        waits_for(what, self._neighbours.before)
        self._has_received.wait()
        error, peer = self._error, self._neighbours.before
        try:
            if self._sends and error is None:
                waits_for(what, self._neighbours.after)
            while self._sends and error is None:
                self._sends[0].wait()
                self._sends.popleft()
        except RuntimeError as found:
            error, peer = found, self._neighbours.after
        if error is not None:
            raise RuntimeError(
                f"Expected {peer()}, or through it another rank of the ring, to take part in {what}, got: {error}"
            ) from error
        _unfinished.discard(self)

    def fail(self, error: RuntimeError) -> None:
        """End it with an error, for `wait` to raise."""
        self._error = error
        self._has_received.set()

    @torch.no_grad()
    def run(self) -> None:
        """Receive everything, passing on what others need."""
        schedule = self._schedule
        for chunk in schedule.first:
            self._send(self._own_part(chunk))
        posted = deque(self._receive(position) for position in range(min(_RECEIVES_AHEAD, len(schedule.received))))
        for position, chunk in enumerate(schedule.received):
            work, landed = posted.popleft()
            work.wait()
            total = landed
            if self._room is not None:
                total = self._own_part(chunk).add_(landed)
            if position < schedule.passed_on:
                self._send(total)
            if position + _RECEIVES_AHEAD < len(schedule.received):
                posted.append(self._receive(position + _RECEIVES_AHEAD))
        self._has_received.set()

    def _receive(self, position: int) -> tuple[Work, Tensor]:
        chunk = self._schedule.received[position]
        if self._room is None:
            landed = self._window(chunk)
        else:
            slot = position % _RECEIVES_AHEAD * (self._room.numel() // _RECEIVES_AHEAD)
            landed = self._room[slot : slot + chunk.stop - chunk.start]
        return self._neighbours.receive(landed.view(torch.uint8)), landed

    def _send(self, tensor: Tensor) -> None:
        self._sends.append(self._neighbours.send(tensor.view(torch.uint8)))

    def _own_part(self, chunk: Chunk) -> Tensor:
        window = self._window(chunk)
        return window if self._room is None or self._factor == 1.0 else window.mul_(self._factor)

    def _window(self, chunk: Chunk) -> Tensor:
        return self._segments[chunk.owner][chunk.start : chunk.stop]


class RingWorker:
    """Runs transfers in threads. After an error in one, all that follow it in its thread fail with it."""

    def __init__(self, threads: int = _THREADS) -> None:
        self._queues: deque[queue.SimpleQueue[Background | None]] = deque()
        for _ in range(threads):
            transfers: queue.SimpleQueue[Background | None] = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(transfers,), name="ddp_zero ring", daemon=True).start()
            weakref.finalize(self, transfers.put, None)
            self._queues.append(transfers)

    def start(self, transfer: Job) -> Job:
        """Start a transfer, behind those started before in the same thread; returns it."""
        _unfinished.add(transfer)
        self._queues[0].put(transfer)
        self._queues.rotate()
        return transfer


def ring_chunk(sizes: Sequence[int], itemsize: int) -> int:
    """Elements of a chunk for segments of these sizes, of so many bytes each."""
    return chunk_numel(sizes, _LEAST_BYTES // itemsize, _MOST_BYTES // itemsize)


def ring_room_numel(sizes: Sequence[int], itemsize: int) -> int:
    """Elements of room that a sum of such segments needs."""
    return _RECEIVES_AHEAD * ring_chunk(sizes, itemsize)


def _serve(transfers: "queue.SimpleQueue[Background | None]") -> None:
    """Run transfers until None comes. Holds no transfer while it waits: that would keep the process group alive."""
    error: RuntimeError | None = None
    while (transfer := transfers.get()) is not None:
        if error is None:
            try:
                transfer.run()
            except Exception as found:
                error = found if isinstance(found, RuntimeError) else RuntimeError(f"{type(found).__name__}: {found}")
        if error is not None:
            transfer.fail(error)
        del transfer


def has_ended(job: Background) -> None:
    """Stop keeping a job that has nothing in flight any more."""
    _unfinished.discard(job)


_unfinished: set[Background] = set()
"""Kept until they were waited for: peers may still read and write their memory, see `Exchange`."""
