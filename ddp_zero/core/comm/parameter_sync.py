"""All-gathers of stepped parameters, bucket after bucket; they may outlast their step, see `PendingSyncs`."""

import atexit
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, compress, filterfalse
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.exchange import InFlight
from ddp_zero.core.comm.ranks import Ranks, StepErrors
from ddp_zero.core.comm.recorder import Act
from ddp_zero.core.comm.script_end import script_has_failed
from ddp_zero.core.comm.tracing import logger
from ddp_zero.core.local.loop_options import LoopOptions
from ddp_zero.core.local.parameters import GradientSource
from ddp_zero.core.local.storage import ParameterStorage
from ddp_zero.core.plan.shard_plan import Bucket
from ddp_zero.error_codes import coded
from ddp_zero.values.placeholders import all_arrivals, can_await, intercept_uses, stop_intercepting

_exchange_of: Callable[[Any], Any] = attrgetter("exchange")
_unversioned_in: Callable[[Any], Any] = attrgetter("unversioned")

COPIES_IN_FLIGHT = 2
"""Buckets with a staging copy in flight at once: where storage is packed, or the backend gathers padded segments."""


class BucketSync:
    """The all-gather of one bucket's parameters, started in every step; prepared once if they stay in place."""

    def __init__(
        self, bucket: Bucket, storage: ParameterStorage, params: Sequence[Tensor], comm: Communicator, plan_digest: int
    ) -> None:
        self.bucket = bucket
        self.params = [params[index] for index in _indices(bucket, range(comm.world_size))]  # in the order of owners
        others = [rank for rank in range(comm.world_size) if rank != comm.group_rank]
        self._of_others = [params[index] for index in _indices(bucket, others)]
        own = set(_indices(bucket, [comm.group_rank]))
        # parameters that only other ranks step
        self.stepped_elsewhere = [params[index] for index in _indices(bucket, others) if index not in own]
        self._storage = storage
        self._comm = comm
        self._subject = (plan_digest, bucket.index)
        self.sync_label, self.wait_label = (comm.trace.label(phase, bucket.index) for phase in ("sync", "wait_sync"))
        self._what = f"the sync of bucket {bucket.index}"
        fixed = storage.fixed_segments(bucket)
        self._all_gather: Callable[[], InFlight] | None = None
        self.makes_copies = fixed is None or comm.staging_nbytes(fixed) > 0
        if fixed is not None:
            self._all_gather = comm.prepare_all_gather(fixed, self._subject)
        self._packed: Sequence[Tensor] = ()
        self.exchange: InFlight | None = None  # in flight
        # parameters that other ranks step and whose version counters are not incremented yet; without parameters that
        # have no gradient, which a graph may still need in backward
        self.unversioned: Sequence[Tensor] = ()

    def start(self, source: GradientSource) -> None:
        """Send the owned segment, and post the receives of all other segments, within ``sync_label``."""
        all_gather = self._all_gather
        if all_gather is None:  # they are packed anew in each step
            self._packed = self._storage.segments_to_sync(self.bucket, self._comm.group_rank)
            all_gather = self._comm.prepare_all_gather(self._packed, self._subject)
        self.exchange = all_gather()
        without = source.without
        self.unversioned = self._of_others
        if without or without is None:
            self.unversioned = _with_gradients(self._of_others, without)

    def increment_versions(self, source: GradientSource) -> None:
        """Increment versions of parameters that other ranks step now: a graph that needs the old values must raise.

        Not later, when the values are sent: some ranks would then go on with such a backward pass, and wait for others.
        """
        increment_version(_with_gradients(self.stepped_elsewhere, source.without))

    def wait(self) -> None:
        """Wait for the messages and write the parameters into the model, within ``wait_label``."""
        assert self.exchange is not None, "started before"
        self.exchange.wait(self._what)
        if self._all_gather is None:
            # the packed copy is this exchange's receive buffer: complete only now
            self._storage.write_back(self.bucket, self._packed, self._comm.group_rank)
            self._packed = ()
        self.exchange = None

    def receive(self) -> None:
        """Call `wait` within ``wait_label``, and increment version counters."""
        with self.wait_label:
            self.wait()
        if self.unversioned:
            increment_version(self.unversioned)


def _with_gradients(params: Sequence[Tensor], without: set[Tensor] | None) -> Sequence[Tensor]:
    """The parameters with a gradient; for ``without`` see `GradientSource`."""
    if without is None:
        return [param for param in params if param.grad is not None]
    return [param for param in params if param not in without]


def _indices(bucket: Bucket, ranks: Iterable[int]) -> list[int]:
    """Indices of the parameters of which these ranks own elements, once each."""
    return list(dict.fromkeys(index for rank in ranks for index in bucket.segments[rank].params))


class PendingSyncs:
    """The syncs that ended steps have left in flight; false if there are none.

    When the last bucket of a step has arrived, the ``errors`` of its local steps are raised.
    """

    def __init__(self, comm: Communicator, errors: StepErrors) -> None:
        self._comm = comm
        self._errors = errors
        self.on_bucket_received: Callable[[], None] | None = None
        self._syncs: dict[int, BucketSync] = {}
        self._received: dict[int, _ReceivedOnStream] = {}  # buckets that some streams must still wait for
        self._error: RuntimeError | None = None
        self._wait_lock = threading.RLock()  # a message can be waited for once: other threads block here
        self.process = os.getpid()  # that owns the messages

    def __bool__(self) -> bool:
        return bool(self._syncs)

    @property
    def buckets(self) -> Collection[int]:
        """A live view of the buckets in flight, by index."""
        return self._syncs.keys()

    def take(self, syncs: Sequence[BucketSync]) -> None:
        """Take a step's syncs: uses of parameters then wait for their bucket. Waits now where uses go unnoticed."""
        self.process = os.getpid()
        # the syncs of earlier steps have all arrived: `end_step` completes them before this call
        not_intercepted = []
        # now: a graph from before the step must not read values still in flight
        increment_version([*chain.from_iterable(map(_unversioned_in, syncs))])
        for sync in syncs:
            index, sync.unversioned = sync.bucket.index, ()
            self._syncs[index] = sync
            if can_await(sync.params):
                # this rank's parameters too: memory that is being sent must not be written to
                intercept_uses(sync.params, _Arrival(self, index))
            else:
                not_intercepted.append(index)
        for index in not_intercepted:
            self.complete_bucket(index)

    def complete(self) -> None:
        """Wait for all buckets, and stop intercepting uses of parameters."""
        for index in list(self._syncs):
            self.complete_bucket(index)
        for index in list(self._received):
            self._received.pop(index).stop_intercepting()

    def complete_bucket(self, index: int, on_host: bool = False) -> None:
        """Make the current stream, or with ``on_host`` the host, wait for a bucket that has not arrived yet."""
        # outside of the lock, which another thread of the parent may have held at the fork
        if self._syncs and os.getpid() != self.process:
            raise RuntimeError(
                f"This process (pid {os.getpid()}) was forked from rank {self._comm.group_rank} (pid {self.process}) "
                "while parameters were in flight (sync='forward'). Call opt.finish_sync() before forking, as before a "
                "DataLoader starts its workers. [ZERO-504]"
            )
        with self._wait_lock:
            if self._error is not None:
                message = f"{self._error} Call opt.reset() to go on with the parameters that have arrived."
                raise RuntimeError(coded(message, "[ZERO-503]")) from self._error
            if index in self._syncs:
                self._receive(index)
            received = self._received.get(index)
            if received is not None and received.is_ordered_on_all_streams(on_host):
                self._received.pop(index).stop_intercepting()

    def _receive(self, index: int) -> None:
        sync = self._syncs[index]
        try:
            sync.receive()
        except RuntimeError as error:
            self._error = error
            raise
        params = sync.params
        device = next((param.device for param in params if param.device.type != "cpu"), None)
        if device is None:
            stop_intercepting(params)
        else:
            self._received[index] = _ReceivedOnStream(params, device)
        # last: a process that is forked before this line raises above, and never reaches the lock
        del self._syncs[index]
        if self.on_bucket_received is not None:
            self.on_bucket_received()
        if not self._syncs:
            self._errors.raise_any()

    def abandon_failed(self) -> None:
        """If an exchange has failed, drop all exchanges: parameters keep their present values."""
        if self._error is not None:
            for sync in self._syncs.values():
                stop_intercepting(sync.params)
            for received in self._received.values():
                received.stop_intercepting()
            self._syncs.clear()
            self._received.clear()
            self._error = None
            self._errors.forget(sent_too=True)


class _ReceivedOnStream:
    """A bucket received on its device's current stream; other streams must wait for the event of that."""

    def __init__(self, params: Sequence[Tensor], device: torch.device) -> None:
        self._params = params
        self._device = device
        self._event = torch.accelerator.current_stream(device).record_event()
        self._ordered = {torch.accelerator.current_stream(device)}  # streams that come after the event

    def is_ordered_on_all_streams(self, on_host: bool) -> bool:
        """Make the current stream, or the host, wait. Returns True if no stream needs to wait any more."""
        if on_host:
            self._event.synchronize()
        if self._event.query():
            return True
        current = torch.accelerator.current_stream(self._device)
        if current not in self._ordered:
            # the copy ran on the stream that received the bucket: this stream must not read the parameters before
            current.wait_event(self._event)
            self._ordered.add(current)
        return False

    def stop_intercepting(self) -> None:
        """Make the current stream wait, and stop intercepting uses."""
        # later uses on other streams are not noticed: they order themselves after this stream, as with any tensor
        torch.accelerator.current_stream(self._device).wait_event(self._event)
        stop_intercepting(self._params)


@dataclass(frozen=True, eq=False)
class _Arrival:
    """Waits for a bucket when a parameter is used. Keeps the syncs alive even if their optimizer is gone."""

    syncs: PendingSyncs
    bucket: int

    def __call__(self, on_host: bool = False) -> None:
        self.syncs.complete_bucket(self.bucket, on_host)


@atexit.register
def _complete_all() -> None:
    # peers may still wait for this process's messages; not after an error, when they may not have taken the step. In a
    # forked process each wait raises and is skipped: the messages are the parent's
    if not script_has_failed():
        for syncs in dict.fromkeys(one.syncs for one in all_arrivals() if isinstance(one, _Arrival)):
            try:
                syncs.complete()
            except Exception as error:  # nothing has used the parameters since
                if syncs.process == os.getpid():
                    logger.error("%s", error)


class ParameterSync:
    """All-gathers of all buckets, started and finished in the same order on every rank.

    The link carries one message at a time, so a stepped bucket is sent after all buckets before it in ``order``. If
    backward steps the first bucket of ``order`` last, all buckets are sent then, after the last reduction.

    Args:
        ranks: buckets travel within the shard group, errors to everyone.
        storage: source of the segment tensors. It must be the memory of the parameters if syncs may outlast a step.
        order: all buckets of the plan, in the order in which they are sent.
        may_outlast: True if exchanges may still be in flight when a step ends; any use of a parameter then waits for
            its bucket, see `PendingSyncs`. Else at most `COPIES_IN_FLIGHT` exchanges that make copies are in flight.
    """

    def __init__(
        self,
        ranks: Ranks,
        storage: ParameterStorage,
        params: Sequence[Tensor],
        plan_digest: int,
        order: Sequence[Bucket],
        *,
        may_outlast: bool = False,
    ) -> None:
        self._ranks = ranks
        self.storage = storage
        self._order: list[BucketSync] = []
        if not ranks.shard.is_alone:
            self._order = [BucketSync(bucket, storage, params, ranks.shard, plan_digest) for bucket in order]
        self._num = len(self._order)
        self._sync_of = {sync.bucket.index: sync for sync in self._order}
        # by bucket: the syncs to start once that bucket is stepped, in order
        self._due_after: dict[int, list[BucketSync]] = {index: [] for index in self._sync_of}
        last_stepped = accumulate((sync.bucket.index for sync in self._order), max)
        for index, sync in zip(last_stepped, self._order, strict=True):
            self._due_after[index].append(sync)
        self._may_outlast = may_outlast
        self._wait_for_all: dict[bool, Callable[[], None]] = {}  # a wait for all syncs, by whether a profiler is on
        self.errors = StepErrors(ranks.everyone, params, plan_digest)
        self.pending_syncs = PendingSyncs(ranks.shard, self.errors)

    def acts(self, index: int) -> list[Act]:
        """The acts that start the exchanges due once a bucket's owned segment has been stepped.

        All buckets are stepped in the order of the plan. Acts are given the source of their gradients.
        """
        stepped = self._sync_of.get(index)
        if stepped is None:  # this rank is alone
            return []
        # never "whichever is stepped": ranks step buckets at different times, and exchanges issued in different orders
        # deadlock on NCCL
        due = self._due_after[index]
        sends: list[Act] = [(sync.sync_label, self._sender(sync)) for sync in due]
        if not stepped.stepped_elsewhere:
            return sends
        return [(due[0].sync_label if due else None, stepped.increment_versions), *sends]

    def _sender(self, sync: BucketSync) -> Callable[[GradientSource], object]:
        is_limited = sync.makes_copies and not self._may_outlast
        return partial(self._send_copy, sync) if is_limited else sync.start

    def end_step(self, options: LoopOptions | None = None) -> None:
        """End the step: wait for all syncs in flight, or hand them to `pending_syncs` if they may outlast the step.

        For ``options`` see `StepErrors.share`. Raises RuntimeError if a peer failed or the group's time-out passed.
        """
        # raises errors of the step before, whose blocks `share` would replace
        self.pending_syncs.complete()
        self.errors.share(options)
        in_flight = self._in_flight()
        if self._may_outlast:
            self._ranks.begin_round()
            self.pending_syncs.take(in_flight)
            return
        try:
            self._wait_for(in_flight)()
        finally:
            arrived = filterfalse(_exchange_of, in_flight)
            increment_version([*chain.from_iterable(map(_unversioned_in, arrived))])
        self.errors.receive()
        self._ranks.begin_round()

    def raise_errors(self, own_at_once: bool = False) -> None:
        """After `end_step`: raise if the local step failed on any rank, or ranks were given different options.

        If buckets may outlast the step, `pending_syncs` raises when the last has arrived; with ``own_at_once`` this
        rank's own error is raised now, for a caller that tells it to all ranks.
        """
        # else no earlier: in the step of another optimizer its peers would wait for this rank
        if own_at_once and self.errors.has_local_error:
            self.pending_syncs.complete()
        if not self.pending_syncs:
            self.errors.raise_any()

    def abandon(self) -> None:
        """After an error: drop exchanges in flight without waiting for peers that may never answer.

        Exchanges left by earlier steps still arrive, unless they have failed.
        """
        self.errors.forget(sent_too=not self.pending_syncs)
        self.pending_syncs.abandon_failed()
        for sync in self._in_flight():
            if sync.bucket.index not in self.pending_syncs.buckets:
                sync.exchange = None
        self._ranks.abandon_threads()
        # a new round: messages of the dropped exchanges match nothing posted later
        self._ranks.begin_round()

    def _send_copy(self, sync: BucketSync, source: GradientSource) -> None:
        copies = [sync for sync in self._in_flight() if sync.makes_copies]
        if len(copies) >= COPIES_IN_FLIGHT:
            copies[0].receive()  # the oldest: all ranks finish exchanges in plan order
        sync.start(source)

    def _in_flight(self) -> list[BucketSync]:
        """The syncs that were started and not waited for, in order; also of earlier steps, if these have left some."""
        return [*compress(self._order, map(_exchange_of, self._order))]

    def _wait_for(self, syncs: Sequence[BucketSync]) -> Callable[[], None]:
        """A function that waits for these syncs, in order."""
        trace = self._ranks.shard.trace
        key = trace.is_profiling()
        if len(syncs) < self._num or key not in self._wait_for_all:
            waits = trace.sequence([(sync.wait_label, sync.wait) for sync in syncs])
            if len(syncs) < self._num:
                return waits
            self._wait_for_all[key] = waits
        return self._wait_for_all[key]
