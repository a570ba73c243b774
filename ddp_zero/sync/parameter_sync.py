"""Sends what this rank stepped and receives what other ranks stepped, bucket after bucket."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import increment_version

from ddp_zero.comm.communicator import Communicator
from ddp_zero.comm.exchange import Exchange
from ddp_zero.comm.step_errors import StepErrors
from ddp_zero.comm.tracing import label
from ddp_zero.plan.shard_plan import Bucket
from ddp_zero.sync.storage import ParameterStorage


@dataclass(frozen=True)
class BucketSync:
    """A bucket whose exchange was started.

    Attributes:
        bucket: the bucket.
        segments: what is sent and received, by rank.
        exchange: the messages.
        stepped: the bucket's parameters that other ranks step: those with a gradient.
    """

    bucket: Bucket
    segments: Sequence[Tensor]
    exchange: Exchange
    stepped: Sequence[Tensor]


class ParameterSync:
    """Keeps a bounded number of bucket exchanges in flight, started and finished in plan order on every rank.

    Args:
        comm: the group.
        storage: where segment tensors come from.
        params: the parameters of the plan, by index.
        plan_digest: a number that differs if plans differ.
        max_in_flight: exchanges that may be in flight at once, at least 1; bounds the temporary memory of a packed
            storage to that many buckets.

    Attributes:
        storage: as given.
        when_arrived: called when a bucket that a step left in flight has arrived.
        errors: errors of local steps, shared with all ranks at the end of a step.
    """

    def __init__(
        self,
        comm: Communicator,
        storage: ParameterStorage,
        params: Sequence[Tensor],
        plan_digest: int,
        max_in_flight: int,
    ) -> None:
        self._comm = comm
        self.storage = storage
        self._params = params
        self._plan_digest = plan_digest
        self._max_in_flight = max_in_flight
        self._in_flight: deque[BucketSync] = deque()
        self.when_arrived: Callable[[], None] | None = None
        self.errors = StepErrors(comm, params, plan_digest)

    def start(self, bucket: Bucket) -> None:
        """Start the exchange of a bucket whose owned segment has been stepped."""
        if self._comm.world_size == 1:
            return
        while len(self._in_flight) >= self._max_in_flight:
            self._finish(self._in_flight.popleft())
        with label("sync", bucket=bucket.index):
            segments = self.storage.segments_to_sync(bucket, self._comm.group_rank)
            exchange = self._comm.start_exchange(segments, (self._plan_digest, bucket.index))
            self._in_flight.append(BucketSync(bucket, segments, exchange, self._stepped_elsewhere(bucket)))

    def finish(self) -> None:
        """End the step: wait for everything in flight and publish it.

        Raises:
            RuntimeError: if a peer failed or the group's time-out passed.
        """
        self.errors.share()
        while self._in_flight:
            self._finish(self._in_flight.popleft())
        self.errors.receive()
        self._comm.round += 1

    def raise_errors(self) -> None:
        """After `finish`: raise if the local step failed on any rank.

        Raises:
            Exception: this rank's own error.
            RuntimeError: with the errors of other ranks.
        """
        self.errors.raise_any()

    def complete(self) -> None:
        """Wait for all parameters of finished steps."""

    def is_under_way(self, bucket: int) -> bool:
        """True if a finished step left the exchange of a bucket in flight."""
        return False

    def abandon(self) -> None:
        """After an error: forget what is in flight without waiting for peers that may never answer."""
        self._in_flight.clear()
        self.errors.forget(sent_too=not self._has_left())
        self._comm.round += 1

    def _has_left(self) -> bool:
        """True if finished steps left anything in flight."""
        return False

    def _finish(self, sync: BucketSync) -> None:
        with label("wait_sync", bucket=sync.bucket.index):
            sync.exchange.wait(f"the sync of bucket {sync.bucket.index}")
        self.storage.publish(sync.bucket, sync.segments, self._comm.group_rank)
        increment_version(sync.stepped)  # as an in-place step does on the owner

    def _stepped_elsewhere(self, bucket: Bucket) -> list[Tensor]:
        """Parameters that others stepped: not those without a gradient, which a graph may still need in backward."""
        received = [segment.params for segment in bucket.segments if segment.owner != self._comm.group_rank]
        return [self._params[param] for params in received for param in params if self._params[param].grad is not None]
