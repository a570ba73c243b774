"""Sends what this rank stepped and receives what other ranks stepped, bucket after bucket."""

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from ddp_zero.core.comm.bucket_sync import BucketSync
from ddp_zero.core.comm.pending_syncs import PendingSyncs
from ddp_zero.core.comm.ranks import Ranks
from ddp_zero.core.comm.step_errors import StepErrors
from ddp_zero.core.local.storage import ParameterStorage
from ddp_zero.core.plan.shard_plan import Bucket


class ParameterSync:
    """Keeps bucket exchanges in flight, started and finished in the same order on every rank.

    The link carries one message at a time, so a bucket that was stepped is sent when all that come before it in
    ``order`` were. If backward steps the bucket that is needed first last, all are sent then, after the last reduction.

    Args:
        ranks: the ranks; buckets travel within the shard group, errors to everyone.
        storage: where segment tensors come from. It must be the memory of the parameters if syncs may outlast a step.
        params: the parameters of the plan, by index.
        plan_digest: a number that differs if plans differ.
        order: all buckets of the plan, in the order in which they are sent.
        max_in_flight: exchanges that may be in flight at once, at least 1; bounds the temporary memory of a packed
            storage to that many buckets. None: no bound.
        may_outlast: whether exchanges may still be in flight when a step ends; any use of a parameter then waits for
            its bucket, see `PendingSyncs`.

    Attributes:
        storage: as given.
        errors: errors of local steps, shared with all ranks at the end of a step.
        left: what steps that have ended left in flight.
    """

    def __init__(
        self,
        ranks: Ranks,
        storage: ParameterStorage,
        params: Sequence[Tensor],
        plan_digest: int,
        order: Sequence[Bucket],
        *,
        max_in_flight: int | None = None,
        may_outlast: bool = False,
    ) -> None:
        self._ranks = ranks
        self.storage = storage
        self._order: list[BucketSync] = []
        if ranks.shard.world_size > 1:
            self._order = [BucketSync(bucket, storage, params, ranks.shard, plan_digest) for bucket in order]
        self._max_in_flight = len(order) if max_in_flight is None else max_in_flight
        self._may_outlast = may_outlast
        self._next = 0  # the place in `order` of the bucket whose turn it is
        self._held: set[int] = set()  # stepped, but not sent yet
        self._in_flight: deque[BucketSync] = deque()
        self.errors = StepErrors(ranks.everyone, params, plan_digest)
        self.left = PendingSyncs(ranks.shard, self.errors)

    def start(self, bucket: Bucket) -> None:
        """Start the exchange of a bucket whose owned segment has been stepped, and of those that waited only for it."""
        self._held.add(bucket.index)
        while self._next < len(self._order) and self._order[self._next].bucket.index in self._held:
            self._send(self._order[self._next])
            self._next += 1

    def end_step(self) -> None:
        """End the step: wait for everything in flight and publish it, or leave it in flight if it may outlast the step.

        Raises:
            RuntimeError: if a peer failed or the group's time-out passed.
        """
        for sync in self._order if self._held else ():
            if sync.bucket.index in self._held:
                self._send(sync)
        self._held.clear()
        self._next = 0
        self.left.complete()
        self.errors.share()
        if self._may_outlast:
            syncs, self._in_flight = self._in_flight, deque()
            self._ranks.begin_round()
            self.left.take(syncs)
            return
        while self._in_flight:
            self._in_flight.popleft().receive()
        self.errors.receive()
        self._ranks.begin_round()

    def raise_errors(self) -> None:
        """After `end_step`: raise if the local step failed on any rank.

        Other ranks' errors are raised when the step's last bucket has arrived, if it may outlast the step.

        Raises:
            Exception: this rank's own error.
            RuntimeError: with the errors of other ranks.
        """
        if self.errors.has_own:
            self.left.complete()
        if not self.left:
            self.errors.raise_any()

    def abandon(self) -> None:
        """After an error: forget what is in flight without waiting for peers that may never answer.

        What earlier steps left in flight still arrives, unless it has failed.
        """
        self._in_flight.clear()
        self._held.clear()
        self._next = 0
        self.errors.forget(sent_too=not self.left)
        self.left.abandon_failed()
        self._ranks.leave()
        self._ranks.begin_round()

    def _send(self, sync: BucketSync) -> None:
        while len(self._in_flight) >= self._max_in_flight:
            self._in_flight.popleft().receive()
        self._held.discard(sync.bucket.index)
        sync.start()
        self._in_flight.append(sync)
