"""`Monitor`: reads `opt.stats()` every few steps and writes it where it is wanted."""

import os
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ddp_zero.optimizer import ZeroRedundancyOptimizer, sharded_of
from ddp_zero.tools.monitor.passes import Passes
from ddp_zero.tools.monitor.sinks import Row, Sink, sink_for
from ddp_zero.tools.monitor.text import breakdown, means, memory_line

Target = str | os.PathLike[str] | Sink | Any
_INSIDE = ("local_step", "wait_sync", "wait_errors")
_MEMORY = ("used", "peak_used", "parameter", "master", "state", "gradient", "buffer")


class Monitor:
    """Writes the numbers of an optimizer every ``every`` steps, after ``opt.step()``.

    A row is `opt.stats()`, with ``time`` in seconds since the epoch, and ``mean_x`` for each ``total_x``: its mean over
    the steps since the row before. Reading does not communicate, so ranks need not agree about monitors. Errors of a
    target, such as a full disk, are raised in ``opt.step()``.

    Args:
        opt: the optimizer.
        every: write in each step whose number is a multiple of this.
        to: targets: paths that end in ``.csv`` or ``.jsonl`` (lines are appended), a `TensorBoard` or a writer with
            ``add_scalar``, and functions that take a row.
        model: the DDP model, whose forward and backward passes are timed then: ``forward_s``, ``backward_s``.
        wall_clock_breakdown: print where the time goes, on average over the steps since the last time, in the words of
            DeepSpeed's option of that name; or a function that takes the line. Needs ``model``.
        memory_log: print the memory after each phase of such a step, or a function that takes the line.
        all_ranks: write on every rank, into files with the rank in their name. False: on rank 0 only.

    Raises:
        ValueError: for an ``every`` below 1, or ``wall_clock_breakdown`` without a model.
        TypeError: for a target that is none of these.
    """

    def __init__(
        self,
        opt: ZeroRedundancyOptimizer,
        every: int = 100,
        to: Iterable[Target] = (),
        *,
        model: nn.Module | None = None,
        wall_clock_breakdown: bool | Callable[[str], object] = False,
        memory_log: bool | Callable[[str], object] = False,
        all_ranks: bool = False,
    ) -> None:
        if every < 1:
            raise ValueError(f"Expected every to be a number of steps of at least 1, got {every}.")
        if wall_clock_breakdown and model is None:
            raise ValueError("Expected model= for wall_clock_breakdown, got none. Pass the DDP model.")
        self._opt = weakref.ref(opt)
        self._every = every
        self._rank = opt.rank
        self._writes = all_ranks or opt.rank == 0
        self._sinks = [sink_for(target, opt.rank if all_ranks else None) for target in to] if self._writes else []
        self._say_time = _printer(wall_clock_breakdown)
        self._say_memory = _printer(memory_log)
        self._before: Row = opt.stats()
        self._written = int(self._before["step"])
        self._hook = opt.register_step_post_hook(lambda *_: self.step())
        recorder = sharded_of(opt).trace
        self._under_way = self._written + 1
        self._is_inside = False
        self._passes = None if model is None else Passes(model, recorder, self._after_phase)

    def step(self) -> None:
        """Write if it is time to. ``opt.step()`` calls this; call it in loops that leave ``opt.step()`` out."""
        opt = self._opt()
        record = None if opt is None else opt.last_step
        if opt is None or record is None or not self._writes:
            return
        if record.number % self._every == 0 and record.number != self._written:
            self._under_way = record.number
            self._after_phase("step")
            self._write(opt.stats())

    def close(self) -> None:
        """Write no more, and flush what the targets still hold."""
        self._hook.remove()
        if self._passes is not None:
            self._passes.close()
        for sink in self._sinks:
            getattr(sink, "close", lambda: None)()

    def _write(self, numbers: Row) -> None:
        self._written = int(numbers["step"])
        found = means(self._before, numbers)
        self._before = numbers
        row = {"time": time.time(), **numbers, **found}
        for sink in self._sinks:
            sink(row)
        if self._say_time is not None:
            seconds = {name[len("mean_") : -len("_s")]: mean for name, mean in found.items() if name.endswith("_s")}
            if self._is_inside:
                seconds["inside_backward"] = sum(seconds[phase] for phase in _INSIDE)
            self._say_time(breakdown(self._rank, self._written, seconds))

    def _after_phase(self, phase: str) -> None:
        opt = self._opt()
        taken = 0 if opt is None or opt.last_step is None else opt.last_step.number
        if phase == "forward":
            self._under_way = taken + 1
        elif phase == "backward":
            self._is_inside = taken == self._under_way
        if self._say_memory is None or opt is None or not self._writes:
            return
        if self._under_way % self._every == 0:
            numbers = opt.stats()
            nbytes = {f"{part}_bytes": numbers[f"{part}_bytes"] for part in _MEMORY}
            self._say_memory(memory_line(self._rank, self._under_way, phase, nbytes))


def _printer(wanted: bool | Callable[[str], object]) -> Callable[[str], object] | None:
    if callable(wanted):
        return wanted
    return _print if wanted else None


def _print(line: str) -> None:
    print(line, flush=True)
