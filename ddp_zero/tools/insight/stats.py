"""``opt.stats()``: what a step took, sent and held, as one flat dict of numbers."""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from time import perf_counter_ns

import torch
from torch import Tensor

from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.step.record import Number
from ddp_zero.core.step.report import imbalance
from ddp_zero.tools.insight import memory
from ddp_zero.tools.insight.device_clock import StreamClock, has_streams
from ddp_zero.tools.insight.optimizer_parts import OptimizerParts
from ddp_zero.tools.record import flight
from ddp_zero.tools.record.recorder import Interval, Recorder

PHASES = (
    *("forward", "backward", "wait_reduce", "decide", "local_step"),
    *("sync", "wait_sync", "wait_errors", "share_errors", "step"),
)
"""Phases whose seconds `Stats.read` returns; the first two are known where a `Monitor` has the model."""

EXPOSED = ("wait_reduce", "wait_sync", "wait_errors", "share_errors", "join_streams")
"""Phases in which the training loop does nothing but wait for other ranks, or for the stream that does."""

_SAMPLED = 64  # memory by part is looked at in every so manieth step, and in the first three


class Stats:
    """The numbers of one optimizer. Reading them neither communicates nor waits for a device.

    Args:
        running: the optimizer.
    """

    def __init__(self, running: OptimizerParts) -> None:
        self._running = running
        self._recorder: Recorder = running.sharded.trace
        self._peaks: dict[str, int] = {}
        self._device = OnDevice()
        self._norm = ReadLater()
        self._began = perf_counter_ns()
        device = running.sharded.table.accelerator()
        if has_streams(device):
            self._recorder.clock = StreamClock(device)
        if self._recorder.when_ended is None:  # a copy of an optimizer shares its recorder
            self._recorder.when_ended = _weakly(self._sample_memory)
        everyone = running.sharded.everyone
        members = [everyone.global_rank(rank) for rank in (everyone.group_rank, *everyone.peers())]
        flight.identify(members[0], members, _time_out_of(everyone))

    def read(self) -> dict[str, float]:
        """The numbers; see `ZeroRedundancyOptimizer.stats`."""
        running, recorder = self._running, self._recorder
        self._device.add(recorder.on_device())
        totals, last = dict(recorder.totals), difference(recorder.at_end, recorder.before)
        on_host = recorder.clock is None
        in_all = seconds(totals) if on_host else self._device.total()
        sharded, record = running.sharded, running.sharded.last_step
        now, began = recorder.ended_at, recorder.began_at or self._began
        numbers: dict[str, float] = {
            "step": 0 if record is None else record.number,
            "skipped_steps": recorder.skipped,
            "period_s": (now - began) * 1e-9 if now else 0.0,
            **(seconds(last) if on_host else self._device.last),
            "sent_bytes": last.get("sent", 0),
            "received_bytes": last.get("received", 0),
            **{f"total_{name}": number for name, number in in_all.items()},
            "total_sent_bytes": totals["sent"],
            "total_received_bytes": totals["received"],
            "buckets": len(sharded.plan.buckets),
            "imbalance": imbalance(sharded.plan),
            "grad_norm": self._norm.read(None if record is None else record.norm),
        }
        return numbers | self._memory()

    def _memory(self) -> dict[str, float]:
        now = memory.parts(self._running)
        self._note_peaks(now)
        hook = self._running.hook
        if hook is not None:
            self._note_peaks({"buffer_bytes": hook.gradients.buffer_bytes()[1]})
        in_use, most = memory.of_process(self._running.sharded.table.accelerator())
        peaks = {f"peak_{name}": self._peaks[name] for name in now}
        return {**now, "used_bytes": in_use, **peaks, "peak_used_bytes": most}

    def _sample_memory(self) -> None:
        """At the end of a step, where gradients and state are there."""
        ended = self._recorder.step - 1
        if ended <= 3 or ended % _SAMPLED == 0:
            self.note_memory()

    def note_memory(self) -> None:
        """Look at the memory of every part, for its peak."""
        self._note_peaks(memory.parts(self._running))

    def _note_peaks(self, now: Mapping[str, int]) -> None:
        for name, nbytes in now.items():
            self._peaks[name] = max(self._peaks.get(name, 0), nbytes)


def difference(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """What was added between two copies of `Recorder.totals`."""
    return {name: total - before.get(name, 0) for name, total in after.items()}


def seconds(totals: Mapping[str, int]) -> dict[str, float]:
    """Seconds by phase, and those exposed, from nanoseconds by phase."""
    found = {f"{phase}_s": totals.get(phase, 0) * 1e-9 for phase in PHASES}
    exposed = sum(totals.get(phase, 0) for phase in EXPOSED) - totals.get("beside", 0)
    return {**found, "exposed_communication_s": exposed * 1e-9}


class OnDevice:
    """Adds up intervals of a device as they become known: over all steps, and for the last one that is complete.

    Attributes:
        last: seconds of the last step of which the device has passed everything, as `seconds` names them.
    """

    def __init__(self) -> None:
        self._all: Counter[str] = Counter()
        self._current: Counter[str] = Counter()
        self._step = 0
        self.last = seconds({})

    def add(self, intervals: list[Interval]) -> None:
        """Add intervals, in the order of steps. A later step's shows that the one before is complete."""
        for one in intervals:
            if one.step != self._step:
                if self._step:
                    self.last = seconds(self._current)
                self._current, self._step = Counter(), one.step
            nanoseconds = round(one.seconds * 1e9)
            hidden = (
                nanoseconds if one.is_beside and one.phase in EXPOSED else 0
            )  # `join_streams` is what is left of it
            for counter in (self._all, self._current):
                counter.update({one.phase: nanoseconds, "beside": hidden})

    def total(self) -> dict[str, float]:
        """Seconds over all steps."""
        return seconds(self._all)


class ReadLater:
    """Reads numbers that are on an accelerator without waiting for it: copies them, and returns what has arrived."""

    def __init__(self) -> None:
        self._asked: Tensor | None = None
        self._copy: Tensor | None = None
        self._event: torch.Event | None = None
        self._known = math.nan

    def read(self, number: Number) -> float:
        """The number, or the last one that has arrived; NaN if there is none."""
        if number is None:
            return math.nan
        if not isinstance(number, Tensor) or number.device.type == "cpu":
            return float(number)
        if number is not self._asked and self._event is None:
            self._asked = number
            self._copy = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
            self._event = torch.accelerator.current_stream(number.device).record_event()
        if self._event is not None and self._event.query() and self._copy is not None:
            self._known, self._event = float(self._copy), None
        return self._known


def _time_out_of(comm: Communicator) -> float:
    """In seconds; 0 for a backend that does not say."""
    try:
        return comm.time_out.total_seconds()
    except (AttributeError, RuntimeError):
        return 0.0


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    reference = weakref.WeakMethod(method)

    def call() -> None:
        """Call the method, if its object is alive."""
        alive = reference()
        if alive is not None:
            alive()

    return call
