"""``opt.stats()``: times, bytes and memory of steps, as one flat dict of numbers."""

import json
import math
import resource
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d

from ddp_zero.core.comm import Communicator, Interval
from ddp_zero.core.engine import Engine
from ddp_zero.core.local import weakly
from ddp_zero.core.plan import ShardPlan
from ddp_zero.insight import flight

PHASES = (
    *("wait_reduce", "decide", "local_step"),
    *("sync", "wait_sync", "wait_errors", "share_errors", "step"),
)
"""Phases whose seconds `Stats.read` returns."""

EXPOSED = ("wait_reduce", "wait_sync", "wait_errors", "share_errors", "join_streams")
"""Phases in which the training loop only waits for other ranks, or for a stream that waits for them."""

SNAPSHOT_COUNTS = (
    *("snapshots", "late_snapshots", "failed_snapshots", "failed_snapshot_copies"),
    *("snapshot_step", "snapshot_bytes", "snapshot_s", "total_snapshot_s"),
)
"""Numbers about snapshots, under the names of ``opt.stats()``."""

_LAST_COLLECTIVES = 64
_SAMPLED = 64  # memory by part is sampled in every 64th step, and in the first three


class Stats:
    """The numbers of one optimizer. Reading them neither communicates nor waits for a device."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._recorder = engine.shard.trace
        self._peaks: dict[str, int] = {}
        self._device = OnDevice()
        self._norm = ReadLater()
        self._began = perf_counter_ns()
        device = engine.shard.table.accelerator()
        if has_streams(device):
            self._recorder.clock = StreamClock(device)
        if self._recorder.on_step_ended is None:  # a copy of an optimizer shares its recorder
            self._recorder.on_step_ended = weakly(self._sample_memory)
        everyone = engine.shard.everyone
        members = [everyone.global_rank(rank) for rank in (everyone.group_rank, *everyone.peers())]
        flight.identify(members[0], members, _time_out_of(everyone), last_collectives)

    def read(self) -> dict[str, float]:
        """The numbers; see `ZeroRedundancyOptimizer.stats`."""
        engine, recorder = self._engine, self._recorder
        self._device.add(recorder.take_intervals())
        totals = dict(recorder.totals)
        last = difference(recorder.totals_at_end, recorder.totals_at_begin)
        on_host = recorder.clock is None
        in_all = seconds(totals) if on_host else self._device.total()
        shard, record = engine.shard, engine.runner.last_step
        now = recorder.ended_at
        began = recorder.began_at or self._began
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
            "buckets": len(shard.plan.buckets),
            "imbalance": imbalance(shard.plan),
            **dict.fromkeys(SNAPSHOT_COUNTS, 0.0),
            **recorder.snapshots,
            "grad_norm": self._norm.read(None if record is None else record.norm),
        }
        return numbers | self._memory()

    def _memory(self) -> dict[str, float]:
        now = self.note_memory()
        if (buffers := self._buffers()) is not None:
            self._note_peaks({"buffer_bytes": buffers.most_bytes})
        in_use, most = process_memory(self._engine.shard.table.accelerator())
        peaks = {f"peak_{name}": self._peaks[name] for name in now}
        return {**now, "used_bytes": in_use, **peaks, "peak_used_bytes": most}

    def _sample_memory(self) -> None:
        ended = self._recorder.step - 1
        if ended <= 3 or ended % _SAMPLED == 0:
            self.note_memory()

    def note_memory(self) -> dict[str, int]:
        """Count current memory in the peaks; returns its bytes by part, with buffers that buckets share."""
        buffers = self._buffers()
        now = {**self._engine.shard.memory_parts(), "buffer_bytes": 0 if buffers is None else buffers.nbytes}
        self._note_peaks(now)
        return now

    def _buffers(self) -> Any:
        hook = self._engine.attachment.hook
        return None if hook is None else hook.gradients.context

    def _note_peaks(self, now: Mapping[str, int]) -> None:
        for name, nbytes in now.items():
            self._peaks[name] = max(self._peaks.get(name, 0), nbytes)


def _time_out_of(comm: Communicator) -> float:
    """In seconds; 0 for a backend that does not tell."""
    try:
        return comm.time_out.total_seconds()
    except (AttributeError, RuntimeError):
        return 0.0


def last_collectives() -> list[list[Any]] | None:
    """The newest collectives that torch's flight recorder has, DDP's and the script's too, oldest first.

    A row: process group, number in it, operation, sizes, begin (seconds since the epoch), unfinished.
    Gloo and NCCL record them unless ``TORCH_FR_BUFFER_SIZE`` is 0; Gloo records no messages between two ranks. None if
    this torch, this backend or the environment records none.
    """
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None or not dist.is_initialized():
        return None
    entries = json.loads(dump()).get("entries", [])
    collectives = [entry for entry in entries if not entry["is_p2p"]]
    return [_row(entry) for entry in collectives[-_LAST_COLLECTIVES:]] or None


def _row(entry: dict[str, Any]) -> list[Any]:
    operation = entry["profiling_name"].rpartition(":")[2]
    goes_on = not entry["retired"] and entry["state"] != "completed"
    sizes = json.dumps(entry["input_sizes"])
    begun = round(entry["time_created_ns"] * 1e-9, 6)
    return [str(entry["process_group"][0]), entry["collective_seq_id"], operation, sizes, begun, goes_on]


# Time


def difference(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """The growth between two copies of `Recorder.totals`."""
    return {name: total - before.get(name, 0) for name, total in after.items()}


def seconds(totals: Mapping[str, int]) -> dict[str, float]:
    """Seconds by phase, and exposed ones, from nanoseconds by phase."""
    found = {f"{phase}_s": totals.get(phase, 0) * 1e-9 for phase in PHASES}
    exposed = sum(totals.get(phase, 0) for phase in EXPOSED) - totals.get("beside", 0)
    return {**found, "exposed_communication_s": exposed * 1e-9}


class OnDevice:
    """Adds up intervals of a device as they become known: over all steps, and for the last complete step."""

    def __init__(self) -> None:
        self._all: Counter[str] = Counter()
        self._current: Counter[str] = Counter()
        self._step = 0
        self.last = seconds({})  # of the last step that the device has completed

    def add(self, intervals: list[Interval]) -> None:
        """Add intervals, in the order of steps. A later step's interval completes the step before."""
        for one in intervals:
            if one.step != self._step:
                if self._step:
                    self.last = seconds(self._current)
                self._current, self._step = Counter(), one.step
            nanoseconds = round(one.seconds * 1e9)
            # hidden behind the default stream, but for its `join_streams`
            hidden = nanoseconds if one.is_on_side_stream and one.phase in EXPOSED else 0
            for counter in (self._all, self._current):
                counter.update({one.phase: nanoseconds, "beside": hidden})

    def total(self) -> dict[str, float]:
        return seconds(self._all)


class ReadLater:
    """Reads numbers on an accelerator without waiting for it: copies them, and returns the last copy that arrived."""

    def __init__(self) -> None:
        self._asked: Tensor | None = None
        self._copy: Tensor | None = None
        self._event: torch.Event | None = None
        self._known = math.nan

    def read(self, number: Tensor | float | None) -> float:
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
            self._known = float(self._copy)
            self._event = None
        return self._known


class Mark(NamedTuple):
    """An event on a stream; ``is_on_side_stream`` if that is not the device's default stream."""

    event: torch.Event
    is_on_side_stream: bool


def has_streams(device: torch.device) -> bool:
    """True if `StreamClock` can measure time on the device."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "default_stream")


class StreamClock:
    """Marks the current stream of an accelerator that `has_streams`. Never waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)

    def mark(self) -> Mark:
        """An event after all work enqueued on the current stream so far."""
        current = torch.accelerator.current_stream(self._device)
        event = torch.Event(self._device, enable_timing=True)
        event.record(current)
        return Mark(event, current != self._module.default_stream(self._device))

    def seconds(self, begun: Mark, ended: Mark) -> float | None:
        """The time between two marks, or None if the device has not passed both yet."""
        if not (begun.event.query() and ended.event.query()):
            return None
        return float(begun.event.elapsed_time(ended.event)) * 1e-3

    def is_on_side_stream(self, mark: Mark) -> bool:
        """True for a mark on another stream than the device's default one, as inside backward's step."""
        return mark.is_on_side_stream


# Memory


def process_memory(device: torch.device) -> tuple[float, float]:
    """Current and peak bytes: allocated on an accelerator, or resident in the process; NaN if unknown."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        if not hasattr(module, "max_memory_allocated"):  # an accelerator whose module does not count
            return math.nan, math.nan
        return module.memory_allocated(device), module.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return math.nan, most
    now = int(statm.read_text().split()[1]) * resource.getpagesize()
    return now, max(now, most)


# Balance


class Share(NamedTuple):
    """One rank's part of a plan: numbers of parameters (whole or cut) and elements, bytes, and trainable bytes."""

    parameters: int
    elements: int
    nbytes: int
    trained: int


def share_of(plan: ShardPlan, rank: int) -> Share:
    parameters = elements = nbytes = trained = 0
    for spec, pieces in zip(plan.specs, plan.pieces, strict=True):
        for piece in pieces:
            if piece.owner == rank:
                numel = piece.stop - piece.start
                size = spec.bytes_of(numel)
                parameters += 1
                elements += numel
                nbytes += size
                trained += size if spec.active else 0
    return Share(parameters, elements, nbytes, trained)


def imbalance(plan: ShardPlan) -> float:
    """The largest share of trainable bytes over the mean share, 1.0 if there are none."""
    trained = [share_of(plan, rank).trained for rank in range(plan.world_size)]
    return max(trained) * plan.world_size / sum(trained) if any(trained) else 1.0
