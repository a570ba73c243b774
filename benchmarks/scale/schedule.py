"""A training step as a schedule: each rank computes, sends and receives, one thing of each kind at a time.

The computing lane is the thread that runs forward, backward and DDP's hook: if the hook waits, backward waits. Links
are full duplex. Collectives take a link in the order in which they are started, which is the plan's; `wire` gives their
duration. CPU time of copying, and of summing received segments, is not in the model.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.scale.wire import (
    Cut,
    Direct,
    Link,
    Together,
    Transfer,
    Transport,
    all_reduce,
    broadcasts,
    reduction,
    ring,
    sync,
)

STEPS = 4  # simulated, until one is like the one before


@dataclass(frozen=True)
class Phases:
    """Seconds that a rank computes in each step; the step is the unsharded optimizer's."""

    forward: float
    backward: float
    adamw: float


@dataclass(frozen=True, eq=False)
class Job:
    """The trained model, at one number of ranks.

    Attributes:
        ranks: number of ranks.
        phases: their computing times.
        overlapped: DDP's buckets in the order of their reduction, cut by the plan for a step inside backward.
        cut: the same buckets with ``partition="elements"``.
        standalone: the buckets of the plan for a step after backward.
        whole: all parameters as one, cut by largest first, as in torch's ZeroRedundancyOptimizer.
    """

    ranks: int
    phases: Phases
    overlapped: tuple[Cut, ...]
    cut: tuple[Cut, ...]
    standalone: tuple[Cut, ...]
    whole: Cut

    def share(self, bucket: Cut) -> float:
        """Each rank's share of all parameters, and so of the computation."""
        return bucket.total / self.whole.total

    def local_step(self, bucket: Cut) -> Tensor:
        """Seconds for each rank's step of its segment of a bucket."""
        return self.phases.adamw / self.whole.total * bucket.segments


class Lanes:
    """Each rank's computing, sending and receiving, with its progress.

    Args:
        ranks: number of ranks.
        link: link of each rank.
        transport: transport of collectives.
        free: collectives of this kind take no time, as if they were hidden.

    Attributes:
        clock: time at which each rank's computing lane is free.
        sent: bytes that a rank has sent, on average.
        transport: transport of collectives.
    """

    def __init__(self, ranks: int, link: Link, transport: Transport, free: str | None = None) -> None:
        self.clock = torch.zeros(ranks, dtype=torch.float64)
        self.sent = 0.0
        self.transport = transport
        self._link = link
        self._free = free
        self._sending = self.clock
        self._receiving = self.clock
        self._arrives: dict[tuple[str, int], Tensor] = {}

    def compute(self, seconds: float | Tensor) -> None:
        """Keep the computing lanes busy."""
        self.clock = self.clock + seconds

    def start(self, kind: str, bucket: int, transfer: Transfer) -> None:
        """Queue a collective for the links."""
        self.sent += transfer.sent
        if kind == self._free or len(self.clock) == 1:
            self._arrives[kind, bucket] = self.clock.max().expand_as(self.clock)
        elif isinstance(transfer, Together):
            lanes = torch.stack([self.clock, self._sending, self._receiving])
            end = (lanes.max() + transfer.seconds(self._link)).expand_as(self.clock)
            self._sending = self._receiving = self._arrives[kind, bucket] = end
        else:
            self._arrives[kind, bucket] = self._exchange(transfer)

    def wait(self, kind: str, bucket: int) -> None:
        """Let the computing lanes wait for a collective; not if there is none, as in the first forward."""
        if (kind, bucket) in self._arrives:
            self.clock = torch.maximum(self.clock, self._arrives[kind, bucket])

    def _exchange(self, transfer: Direct) -> Tensor:
        """Time at which each rank has exchanged all of its messages. The last of its peers may serve it last."""
        rate, message = self._link.bytes_per_second, self._link.message
        begins = torch.maximum(self.clock, self._sending)
        self._sending = begins + transfer.sent_bytes / rate + transfer.sends * message
        senders = transfer.sent_bytes > 0
        if not senders.any():
            return self.clock
        first, last = begins[senders].min(), self._sending[senders].max()
        listens = torch.maximum(self.clock, self._receiving).maximum(first)
        self._receiving = listens + transfer.received_bytes / rate + transfer.receives * message
        received = torch.where(transfer.received_bytes > 0, self._receiving.maximum(last), self.clock)
        return torch.maximum(self._sending, received) + self._link.latency


def forward(lanes: Lanes, job: Job, syncs: bool = False) -> None:
    """The last bucket in backward order is the first that forward needs."""
    for index in reversed(range(len(job.overlapped))):
        if syncs:
            lanes.wait("sync", index)
        lanes.compute(job.phases.forward * job.share(job.overlapped[index]))


def backward(lanes: Lanes, job: Job, on_bucket: Callable[[int], None]) -> None:
    """Call DDP's hook for each bucket as it fills up."""
    for index, bucket in enumerate(job.overlapped):
        lanes.compute(job.phases.backward * job.share(bucket))
        on_bucket(index)


def ddp_backward(lanes: Lanes, job: Job) -> None:
    """All-reduces beside backward, awaited at its end."""
    buckets = job.overlapped
    backward(lanes, job, lambda index: lanes.start("reduce", index, all_reduce(buckets[index].total, job.ranks)))
    for index in range(len(buckets)):
        lanes.wait("reduce", index)


def ddp_step(lanes: Lanes, job: Job) -> None:
    """DDP and the unsharded optimizer."""
    forward(lanes, job)
    ddp_backward(lanes, job)
    lanes.compute(job.phases.adamw)


def torch_zero_step(lanes: Lanes, job: Job) -> None:
    """DDP, a local step, then broadcasts."""
    forward(lanes, job)
    ddp_backward(lanes, job)
    lanes.compute(job.local_step(job.whole))
    lanes.start("sync", 0, broadcasts(job.whole, lanes.transport))
    lanes.wait("sync", 0)


def fsdp_step(lanes: Lanes, job: Job) -> None:
    """Even shards in groups as large as DDP's buckets: gathered in forward, where they stay, reduced in backward."""
    blocks = lanes.transport is Transport.GLOO
    evenly = [Cut.evenly(bucket.total, job.ranks) for bucket in job.overlapped]

    def reduce(index: int) -> None:
        scattered = ring(evenly[index])
        lanes.start("reduce", index, all_reduce(evenly[index].total, job.ranks) if blocks else scattered)
        if blocks:
            lanes.wait("reduce", index)

    for index in reversed(range(len(evenly))):
        lanes.start("sync", index, ring(evenly[index]))
        if blocks:
            lanes.wait("sync", index)
            lanes.compute(job.phases.forward * job.share(evenly[index]))
    if not blocks:
        forward(lanes, job, syncs=True)
    backward(lanes, job, reduce)
    for index in range(len(evenly)):
        lanes.wait("reduce", index)
    lanes.compute(job.phases.adamw / job.ranks)


def standalone_step(lanes: Lanes, job: Job) -> None:
    """Stage 1 after backward: bucket k travels while bucket k + 1 is stepped."""
    forward(lanes, job)
    ddp_backward(lanes, job)
    for index, bucket in enumerate(job.standalone):
        lanes.compute(job.local_step(bucket))
        lanes.start("sync", index, sync(bucket, lanes.transport))
    for index in range(len(job.standalone)):
        lanes.wait("sync", index)


def cut_step(lanes: Lanes, job: Job, syncs_in_forward: bool = False) -> None:
    """Stage 2 interleaved, of buckets that are cut into equal parts."""
    overlapped_step(lanes, replace(job, overlapped=job.cut), stage=2, lag=1, syncs_in_forward=syncs_in_forward)


def overlapped_step(lanes: Lanes, job: Job, stage: int, lag: int | None, syncs_in_forward: bool = False) -> None:
    """The step of the hook, see `ddp_zero.core.backward.hook`; in stage 2 a reduction waits for the reduction before.

    ``syncs_in_forward``: all buckets are sent after the last step, starting with the bucket that forward needs first.
    """
    buckets = job.overlapped
    forward(lanes, job, syncs_in_forward)

    def finish(index: int) -> None:
        lanes.wait("reduce", index)
        lanes.compute(job.local_step(buckets[index]))
        if not syncs_in_forward:
            lanes.start("sync", index, sync(buckets[index], lanes.transport))

    def on_bucket(index: int) -> None:
        if stage == 2:
            if index:
                lanes.wait("reduce", index - 1)
            lanes.start("reduce", index, reduction(buckets[index], lanes.transport))
        else:
            lanes.start("reduce", index, all_reduce(buckets[index].total, job.ranks))
        is_last = index == len(buckets) - 1
        if lag is not None and index >= lag and not is_last:
            finish(index - lag)
        if is_last:
            first = 0 if lag is None else max(0, index - lag)
            for bucket in range(first, index + 1):
                finish(bucket)

    backward(lanes, job, on_bucket)
    for index in reversed(range(len(buckets))):
        if syncs_in_forward:
            lanes.start("sync", index, sync(buckets[index], lanes.transport))
        else:
            lanes.wait("sync", index)


Step = Callable[[Lanes, Job], None]


@dataclass(frozen=True)
class Forecast:
    """A step, once every step is like the one before.

    Attributes:
        seconds: from one step to the next.
        exposed: seconds that would be saved if syncs took no time.
        sent: bytes that a rank sends in a step, on average.
    """

    seconds: float
    exposed: float
    sent: float


def forecast(step: Step, job: Job, link: Link, transport: Transport) -> Forecast:
    """Simulate a mode."""
    lanes, hidden = Lanes(job.ranks, link, transport), Lanes(job.ranks, link, transport, free="sync")
    seconds, without = _last_period(step, lanes, job), _last_period(step, hidden, job)
    return Forecast(seconds, seconds - without, lanes.sent / STEPS)


def _last_period(step: Step, lanes: Lanes, job: Job) -> float:
    began = 0.0
    for _ in range(STEPS):
        began = float(lanes.clock.max())
        step(lanes, job)
    return float(lanes.clock.max()) - began
