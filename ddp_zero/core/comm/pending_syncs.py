"""Exchanges that outlast their step: any use of a parameter waits for its bucket, see `core.local.placeholders`."""

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_zero.core.comm.bucket_sync import BucketSync
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.step_errors import StepErrors
from ddp_zero.core.local.placeholders import all_arrivals, arrived, can_await, expect


class PendingSyncs:
    """What steps that have ended left in flight; false if that is nothing.

    Args:
        comm: the group.
        errors: errors of local steps, raised when the last bucket of a step has arrived.

    Attributes:
        when_arrived: called when a bucket has arrived.
    """

    def __init__(self, comm: Communicator, errors: StepErrors) -> None:
        self._comm = comm
        self._errors = errors
        self.when_arrived: Callable[[], None] | None = None
        self._syncs: dict[int, BucketSync] = {}
        self._received: dict[int, _Received] = {}  # buckets of an accelerator that are not there for all streams yet
        self._error: RuntimeError | None = None
        self._one_waits = threading.RLock()  # a message can be waited for once: other threads block here
        self._process = os.getpid()  # the process that owns the messages

    def __bool__(self) -> bool:
        return bool(self._syncs)

    def __contains__(self, bucket: int) -> bool:
        return bucket in self._syncs

    def take(self, syncs: Iterable[BucketSync]) -> None:
        """At the end of a step: make any use of a parameter wait for its bucket; wait now where no use can be noticed.

        Args:
            syncs: of this step, in flight; those of earlier steps have arrived.
        """
        self._process = os.getpid()
        unnoticed = []
        for sync in syncs:
            index = sync.bucket.index
            sync.count_changes()  # now: a graph from before the step must not read values still in flight
            self._syncs[index] = sync
            if can_await(sync.params):
                # this rank's parameters too: memory that is being sent must not be written to
                expect(sync.params, _Arrival(self, index))
            else:
                unnoticed.append(index)
        for index in unnoticed:
            self.complete_bucket(index)

    def complete(self) -> None:
        """Wait for everything.

        Raises:
            RuntimeError: if a peer failed, in its local step or otherwise, or the group's time-out passed.
        """
        for index in list(self._syncs):
            self.complete_bucket(index)
        for index in list(self._received):
            self._received.pop(index).make_ordinary()

    def complete_bucket(self, index: int, on_host: bool = False) -> None:
        """Wait for one bucket; returns at once if it has arrived.

        Args:
            index: the bucket.
            on_host: see `ddp_zero.core.local.placeholders.Arrival`.

        Raises:
            RuntimeError: if a peer failed or the group's time-out passed, at every call until `abandon_failed`; with
                the last bucket of a step, if a local step failed; always in a process that was forked meanwhile.
        """
        self._check_process()
        with self._one_waits:
            if self._error is not None:
                raise RuntimeError(f"{self._error}. Call opt.reset() to go on with what has arrived.") from self._error
            if index in self._syncs:
                self._receive(index)
            received = self._received.get(index)
            if received is not None and received.is_there_for_all(on_host):
                self._received.pop(index).make_ordinary()

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
            arrived(params)
        else:
            self._received[index] = _Received(params, device)
        del self._syncs[index]  # last: a process that is forked meanwhile must not reach the lock
        if self.when_arrived is not None:
            self.when_arrived()
        if not self._syncs:
            self._errors.raise_any()

    def abandon_failed(self) -> None:
        """If an exchange failed, forget it and all others: parameters keep the values that they have."""
        if self._error is not None:
            for sync in self._syncs.values():
                arrived(sync.params)
            for received in self._received.values():
                received.make_ordinary()
            self._syncs.clear()
            self._received.clear()
            self._error = None
            self._errors.forget(sent_too=True)

    def _check_process(self) -> None:
        """Check for a fork. Runs outside the lock, which a different thread of the parent may have held at the fork.

        Raises:
            RuntimeError: in a process that was forked while buckets were in flight: they arrive in its parent only.
        """
        if self._syncs and os.getpid() != self._process:
            raise RuntimeError(
                f"Expected parameters that have arrived, got a process (pid {os.getpid()}) that was forked from rank "
                f"{self._comm.group_rank} (pid {self._process}) with some in flight (sync='forward'). Call "
                "opt.finish_sync() before forking, as before a DataLoader starts its workers."
            )


class _Received:
    """A bucket that the current stream of its device has received, which others must wait for.

    Args:
        params: of the bucket.
        device: an accelerator.
    """

    def __init__(self, params: Sequence[Tensor], device: torch.device) -> None:
        self._params = params
        self._device = device
        self._event = torch.accelerator.current_stream(device).record_event()
        self._ordered = {torch.accelerator.current_stream(device)}  # streams that come after the event

    def is_there_for_all(self, on_host: bool) -> bool:
        """Make the current stream wait, or the host. Returns whether no stream needs to wait any more."""
        if on_host:
            self._event.synchronize()
        if self._event.query():
            return True
        current = torch.accelerator.current_stream(self._device)
        if current not in self._ordered:
            current.wait_event(self._event)
            self._ordered.add(current)
        return False

    def make_ordinary(self) -> None:
        """Make the current stream wait; those after it are not noticed any more."""
        torch.accelerator.current_stream(self._device).wait_event(self._event)
        arrived(self._params)


@dataclass(frozen=True, eq=False)
class _Arrival:
    """Waits for a bucket. Keeps the syncs alive: messages arrive even if their optimizer is gone."""

    left: PendingSyncs
    bucket: int

    def __call__(self, on_host: bool = False) -> None:
        self.left.complete_bucket(self.bucket, on_host)


@atexit.register
def _complete_all() -> None:
    """Peers may still wait for what this process sends; exchanges of a parent that forked it are skipped."""
    for arrival in all_arrivals():
        if isinstance(arrival, _Arrival):
            with contextlib.suppress(RuntimeError):
                arrival()
