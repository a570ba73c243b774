"""Exchanges that outlast their step: sent in the order of the next forward pass, waited for on a parameter's use."""

import atexit
import contextlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.autograd.graph import increment_version

from ddp_zero.comm.communicator import Communicator
from ddp_zero.local.awaited import all_arrivals, arrived, can_await, expect
from ddp_zero.plan.shard_plan import Bucket
from ddp_zero.sync.parameter_sync import BucketSync, ParameterSync
from ddp_zero.sync.storage import ParameterStorage


class ForwardSync(ParameterSync):
    """Leaves a step's exchanges in flight when it ends; any use of a parameter waits for its bucket, see `awaited`.

    The link carries one message at a time, so buckets are sent in the order in which the next forward pass needs them.
    If backward steps the bucket that is needed first last, all are sent then, after the last reduction.

    Args:
        comm, storage, params, plan_digest: see `ParameterSync`. The storage must be the memory of the parameters.
        needed: all buckets of the plan, in the order in which a forward pass needs them.
    """

    def __init__(
        self,
        comm: Communicator,
        storage: ParameterStorage,
        params: Sequence[Tensor],
        plan_digest: int,
        needed: Sequence[Bucket],
    ) -> None:
        super().__init__(comm, storage, params, plan_digest, max_in_flight=max(1, len(needed)))
        self._needed = needed
        self._stepped: set[int] = set()
        self._left: dict[int, BucketSync] = {}  # of steps that are over
        self._error: RuntimeError | None = None
        self._one_waits = threading.RLock()  # a message can be waited for once: other threads block here
        self._process = os.getpid()  # the process that owns the messages left in flight

    def start(self, bucket: Bucket) -> None:
        """Mark a bucket as stepped, and start every exchange that was waiting only for it."""
        self._stepped.add(bucket.index)
        for needed in self._needed[len(self._in_flight) :]:
            if needed.index not in self._stepped:
                return
            super().start(needed)

    def finish(self) -> None:
        """End the step: send what was held back, and make any use of a parameter wait for its bucket."""
        started = {sync.bucket.index for sync in self._in_flight}
        for bucket in self._needed:
            if bucket.index in self._stepped - started:
                super().start(bucket)
        self._stepped.clear()
        self.complete()  # exchanges that an earlier step left
        self.errors.share()
        self._process = os.getpid()
        unnoticed = []
        for sync in self._in_flight:
            index, params = sync.bucket.index, self._params_of(sync)
            increment_version(sync.stepped)  # now: a graph from before the step must not read values still in flight
            self._left[index] = replace(sync, stepped=())
            if can_await(params):
                expect(params, _Arrival(self, index))
            else:
                unnoticed.append(index)
        self._in_flight.clear()
        self._comm.round += 1
        for index in unnoticed:
            self.complete_bucket(index)

    def raise_errors(self) -> None:
        """Raise this rank's own error; other ranks' errors are raised when the step's last bucket has arrived.

        Raises:
            Exception: this rank's own error.
            RuntimeError: with the errors of other ranks, if nothing is left in flight.
        """
        if self.errors.has_own:
            self.complete()
        if not self._left:
            self.errors.raise_any()

    def complete(self) -> None:
        """Wait for everything that steps left in flight.

        Raises:
            RuntimeError: if a peer failed, in its local step or otherwise, or the group's time-out passed.
        """
        for index in list(self._left):
            self.complete_bucket(index)

    def complete_bucket(self, index: int) -> None:
        """Wait for one bucket; returns at once if it has arrived.

        Raises:
            RuntimeError: if a peer failed or the group's time-out passed, at every call until `abandon`; with the last
                bucket of a step, if a local step failed; always in a process that was forked meanwhile.
        """
        self._check_process()
        with self._one_waits:
            if self._error is not None:
                raise RuntimeError(f"{self._error}. Call opt.reset() to go on with what has arrived.") from self._error
            if index not in self._left:
                return
            sync = self._left[index]
            try:
                self._finish(sync)
            except RuntimeError as error:
                self._error = error
                raise
            arrived(self._params_of(sync))
            del self._left[index]  # last: a process that is forked meanwhile must not reach the lock
            if self.when_arrived is not None:
                self.when_arrived()
            if not self._left:
                self.errors.raise_any()

    def is_under_way(self, bucket: int) -> bool:
        """True until the bucket has arrived."""
        return bucket in self._left

    def abandon(self) -> None:
        """Forget the current step; exchanges of earlier steps still arrive, unless one of them failed."""
        super().abandon()
        self._stepped.clear()
        if self._error is not None:
            for sync in self._left.values():
                arrived(self._params_of(sync))
            self._left.clear()
            self._error = None
            self.errors.forget(sent_too=True)

    def _check_process(self) -> None:
        """Check for a fork. Runs outside the lock, which a different thread of the parent may have held at the fork.

        Raises:
            RuntimeError: in a process that was forked while buckets were in flight: they arrive in its parent only.
        """
        if self._left and os.getpid() != self._process:
            raise RuntimeError(
                f"Expected parameters that have arrived, got a process (pid {os.getpid()}) that was forked from rank "
                f"{self._comm.group_rank} (pid {self._process}) with some in flight (sync='forward'). Call "
                "opt.finish_sync() before forking, as before a DataLoader starts its workers."
            )

    def _has_left(self) -> bool:
        return bool(self._left)

    def _params_of(self, sync: BucketSync) -> list[Tensor]:
        """All parameters of a bucket, this rank's included: memory that is being sent must not be written to."""
        return [self._params[param] for segment in sync.bucket.segments for param in segment.params]


@dataclass(frozen=True, eq=False)
class _Arrival:
    """Waits for a bucket. Keeps the sync alive: its messages arrive even if its optimizer is gone."""

    sync: ForwardSync
    bucket: int

    def __call__(self) -> None:
        self.sync.complete_bucket(self.bucket)


@atexit.register
def _complete_all() -> None:
    """Peers may still wait for what this process sends; exchanges of a parent that forked it are skipped."""
    for arrival in all_arrivals():
        if isinstance(arrival, _Arrival):
            with contextlib.suppress(RuntimeError):
                arrival()
