"""Sends what this rank stepped and receives what the others did, bucket after bucket in plan order."""

from collections import deque

from torch import Tensor

from ddp_zero.collectives import Communicator, Exchange
from ddp_zero.flat import ParameterStorage
from ddp_zero.plan import Bucket
from ddp_zero.tracing import label


class ParameterSync:
    """Keeps a bounded number of bucket exchanges in flight, started and finished in the same order on every rank.

    Args:
        comm: the group.
        storage: where segment tensors come from.
        plan_digest: a number that differs where plans differ.
        max_in_flight: exchanges that may be in flight at once, at least 1; bounds the temporary memory of a packed
            storage to that many buckets.
    """

    def __init__(self, comm: Communicator, storage: ParameterStorage, plan_digest: int, max_in_flight: int) -> None:
        self._comm = comm
        self._storage = storage
        self._plan_digest = plan_digest
        self._max_in_flight = max_in_flight
        self._in_flight: deque[tuple[Bucket, list[Tensor], Exchange]] = deque()

    def start(self, bucket: Bucket) -> None:
        """Start the exchange of a bucket whose owned segment has been stepped."""
        if self._comm.world_size == 1:
            return
        while len(self._in_flight) >= self._max_in_flight:
            self._finish_oldest()
        with label("sync", bucket=bucket.index):
            segments = self._storage.segments_to_sync(bucket, self._comm.group_rank)
            self._in_flight.append(
                (bucket, segments, self._comm.start_exchange(segments, (self._plan_digest, bucket.index)))
            )

    def finish(self) -> None:
        """Wait for everything in flight and publish it.

        Raises:
            RuntimeError: if a peer failed or the group's time-out passed.
        """
        while self._in_flight:
            self._finish_oldest()
        self._comm.round += 1

    def abandon(self) -> None:
        """After an error: forget what is in flight without waiting for peers that may never answer."""
        while self._in_flight:
            _, _, exchange = self._in_flight.popleft()
            exchange.abandon()
        self._comm.round += 1

    def _finish_oldest(self) -> None:
        bucket, segments, exchange = self._in_flight.popleft()
        with label("wait_sync", bucket=bucket.index):
            exchange.wait(f"the sync of bucket {bucket.index}")
        self._storage.publish(bucket, segments, self._comm.group_rank)
