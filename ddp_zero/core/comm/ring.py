"""Ring sums and gathers on Gloo: each rank receives from the rank before it and sends to the rank after it.

In a direct exchange N - 1 flows meet at each link, which slows them down from about four ranks on; in a ring there is
one flow in each direction. See `ddp_zero.core.plan.ring` for the schedule. Chunks must be forwarded while the training
loop computes, so threads do it.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import Work

from ddp_zero.core.comm.exchange import await_background_job, wait_in_background, wait_mode
from ddp_zero.core.comm.recorder import record_wait
from ddp_zero.core.plan.ring import Chunk, RingSchedule, chunk_numel
from ddp_zero.error_codes import coded

_RECEIVES_AHEAD = 8  # Gloo begins to send a message when its receive is posted
LEAST_BYTES, MOST_BYTES = 64 << 10, 256 << 10  # of a chunk
_THREADS = 2

Job = TypeVar("Job", bound="BackgroundJob")


@dataclass(frozen=True)
class Neighbours:
    """The two ranks that a rank exchanges messages with."""

    receive: Callable[[Tensor], Work]  # posts a receive into a contiguous tensor from the rank before
    send: Callable[[Tensor], Work]  # posts a send of a contiguous tensor to the rank after
    before: Callable[[], str]  # name of the rank before, for messages
    after: Callable[[], str]  # name of the rank after, for messages
    limit: timedelta  # of a wait without progress


class BackgroundJob(Protocol):
    """A job that a thread of a `RingWorker` runs."""

    def run(self) -> None:
        """Run to the end, or raise."""

    def fail(self, error: RuntimeError) -> None:
        """Take the error of `run`, or of an earlier job in the thread."""


class RingTransfer:
    """A sum or a gather in flight. The tensors must stay untouched until `wait` returns.

    Args:
        schedule: this rank's chunks in order.
        segments: 1-D contiguous, one per rank. A gather writes all but this rank's segment. A sum destroys them all,
            and writes this rank's sum to its segment.
        recv_buffer: of a sum, 1-D, of the dtype of the segments, at least `ring_recv_numel` elements; None for a
            gather, which receives in place.
        factor: a sum multiplies this rank's part by this factor beforehand.
    """

    def __init__(
        self,
        neighbours: Neighbours,
        schedule: RingSchedule,
        segments: Sequence[Tensor],
        recv_buffer: Tensor | None = None,
        factor: float = 1.0,
    ) -> None:
        self._neighbours = neighbours
        self._schedule = schedule
        self._segments = segments
        self._recv_buffer = recv_buffer
        self._factor = factor
        self._sends: deque[Work] = deque()
        self._error: RuntimeError | None = None
        self._has_received = threading.Event()

    def wait(self, what: str) -> None:
        """Block as `Exchange.wait` does."""
        record_wait(what, self._neighbours.before)
        peer = self._neighbours.before
        try:
            if self._error is None:
                await_background_job(self._has_received, self._neighbours.limit)
            error = self._error
            if self._sends and error is None:
                record_wait(what, self._neighbours.after)
            # peers still read these chunks: the segments may change only after all sends
            while self._sends and error is None:
                peer = self._neighbours.after
                self._sends[0].wait(self._neighbours.limit)
                self._sends.popleft()
        except RuntimeError as failure:
            self._error = error = failure  # a failed send counts as completed: a second wait would pass over it
        if error is not None:
            message = (
                f"Expected {peer()}, or through it another rank of the ring, to take part in {what}, got: {error}."
            )
            raise RuntimeError(coded(message, "[ZERO-503]")) from error
        unfinished.discard(self)

    def fail(self, error: RuntimeError) -> None:
        self._error = error
        self._has_received.set()

    @torch.no_grad()
    def run(self) -> None:
        schedule = self._schedule
        for chunk in schedule.first:
            self._send(self._scaled_contribution(chunk))
        # several receives ahead, so that the rank before never waits for this thread
        posted = deque(self._receive(position) for position in range(min(_RECEIVES_AHEAD, len(schedule.received))))
        for position, chunk in enumerate(schedule.received):
            work, received = posted.popleft()
            wait_in_background(work)
            total = received
            if self._recv_buffer is not None:
                # summed into this rank's copy, which is sent on: the slot is free for the next receive at once
                total = self._scaled_contribution(chunk).add_(received)
            if position < schedule.passed_on:
                self._send(total)
            # reuses the slot of this chunk, which has been added up
            if position + _RECEIVES_AHEAD < len(schedule.received):
                posted.append(self._receive(position + _RECEIVES_AHEAD))
        self._has_received.set()

    def _receive(self, position: int) -> tuple[Work, Tensor]:
        chunk = self._schedule.received[position]
        if self._recv_buffer is None:
            received = self._window(chunk)
        else:
            slot = position % _RECEIVES_AHEAD * (self._recv_buffer.numel() // _RECEIVES_AHEAD)
            received = self._recv_buffer[slot : slot + chunk.stop - chunk.start]
        return self._neighbours.receive(received.view(torch.uint8)), received

    def _send(self, tensor: Tensor) -> None:
        self._sends.append(self._neighbours.send(tensor.view(torch.uint8)))

    def _scaled_contribution(self, chunk: Chunk) -> Tensor:
        """This rank's contribution to a chunk, multiplied by the factor in place."""
        window = self._window(chunk)
        return window if self._recv_buffer is None or self._factor == 1.0 else window.mul_(self._factor)

    def _window(self, chunk: Chunk) -> Tensor:
        return self._segments[chunk.owner][chunk.start : chunk.stop]


class RingWorker:
    """Runs transfers in threads. After an error in a transfer, all later transfers in its thread fail with it."""

    def __init__(self, threads: int = _THREADS) -> None:
        self._queues: deque[queue.SimpleQueue[BackgroundJob | None]] = deque()
        # two threads in turn, so that the link is not idle at the end of a transfer: a thread begins the next transfer
        # while the other still receives. Each runs its transfers in order of their start, the same on every rank
        for _ in range(threads):
            transfers: queue.SimpleQueue[BackgroundJob | None] = queue.SimpleQueue()
            threading.Thread(target=_run_jobs, args=(transfers,), name="ddp_zero ring", daemon=True).start()
            weakref.finalize(self, transfers.put, None)
            self._queues.append(transfers)

    def start(self, transfer: Job) -> Job:
        """Start a transfer, after those started before in the same thread; returns it."""
        unfinished.add(transfer)
        self._queues[0].put(transfer)
        self._queues.rotate()
        return transfer


def ring_chunk(sizes: Sequence[int], itemsize: int) -> int:
    """Elements of a chunk for segments of these sizes and this many bytes per element."""
    return chunk_numel(sizes, LEAST_BYTES // itemsize, MOST_BYTES // itemsize)


def ring_recv_numel(sizes: Sequence[int], itemsize: int) -> int:
    """Elements of the receive buffer that a sum of such segments needs."""
    return _RECEIVES_AHEAD * ring_chunk(sizes, itemsize)


def _run_jobs(jobs: "queue.SimpleQueue[BackgroundJob | None]") -> None:
    error: RuntimeError | None = None
    wait_mode.is_in_background = True
    while (job := jobs.get()) is not None:
        if error is None:
            try:
                job.run()
            except Exception as failure:
                # whoever waits for a message expects a RuntimeError
                name = type(failure).__name__
                error = failure if isinstance(failure, RuntimeError) else RuntimeError(f"{name}: {failure}")
        # later jobs fail, too: their messages would be taken for those that the failed job has left
        if error is not None:
            job.fail(error)
        # a job kept while the thread waits would keep its process group alive
        del job


unfinished: set[BackgroundJob] = set()
"""Transfers and jobs, kept until their `wait`: peers may still read and write their memory, see `Exchange`."""
