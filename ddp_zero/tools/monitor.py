"""Writes the numbers of `opt.stats()` every few steps: to files, TensorBoard, a function, or as text.

from ddp_zero.tools.monitor import Monitor

monitor = Monitor(opt, every=50, to=["stats.csv"], model=model, wall_clock_breakdown=True)
"""

import csv
import json
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ddp_zero.core.backward.reducer import at_end_of_backward
from ddp_zero.core.offload.placement import tensors_in
from ddp_zero.optimizer import ZeroRedundancyOptimizer, shard_of
from ddp_zero.tools.record.recorder import Recorder, Span

__all__ = ["Csv", "JsonLines", "Monitor", "TensorBoard"]

Row = Mapping[str, float]
Sink = Callable[[Row], object]
Target = str | os.PathLike[str] | Sink | Any

_MIB = 1 << 20
_MEMORY = ("used", "peak_used", "parameter", "master", "state", "gradient", "buffer")


class Monitor:
    """Writes the numbers of an optimizer every ``every`` steps, after ``opt.step()``.

    A row is `opt.stats()`, with ``time`` in seconds since the epoch, and ``mean_x`` for each ``total_x``: its mean over
    the steps since the previous row. Reading does not communicate, so ranks may have different monitors. Errors of a
    target, such as a full disk, are raised in ``opt.step()``.

    Args:
        opt: the optimizer.
        every: write in each step whose number is a multiple of this.
        to: targets: paths that end in ``.csv`` or ``.jsonl`` (lines are appended), a `TensorBoard` or a writer with
            ``add_scalar``, and functions of a row.
        model: the DDP model, to time its forward and backward passes: ``forward_s``, ``backward_s``.
        wall_clock_breakdown: print the average time of each part since the last output, in the terms of DeepSpeed's
            option of that name; or a function of the line. Needs ``model``.
        memory_log: print the memory after each phase of such a step; or a function of the line.
        all_ranks: write on every rank, into files with the rank in their name. False: on rank 0 only.

    Raises:
        ValueError: for an ``every`` below 1, or ``wall_clock_breakdown`` without a model.
        TypeError: for an unsupported target.
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
            raise ValueError(f"Expected every to be a number of steps of at least 1, got {every}. [ZERO-906]")
        if wall_clock_breakdown and model is None:
            raise ValueError("wall_clock_breakdown needs model=. Pass the DDP model. [ZERO-906]")
        self._opt = weakref.ref(opt)
        self._every = every
        self._rank = opt.rank
        self._writes = all_ranks or opt.rank == 0
        self._sinks = [sink_for(target, opt.rank if all_ranks else None) for target in to] if self._writes else []
        self._say_time = _printer(wall_clock_breakdown)
        self._say_memory = _printer(memory_log)
        self._before: Row = opt.stats()
        self._written = int(self._before["step"])
        self._under_way = self._written + 1
        self._is_inside = False
        self._hook = opt.register_step_post_hook(lambda *_: self.step())
        self._passes = None if model is None else Passes(model, shard_of(opt).trace, self._after_phase)

    def step(self) -> None:
        """Write if due. ``opt.step()`` calls this; call it in loops that omit ``opt.step()``."""
        opt = self._opt()
        record = None if opt is None else opt.last_step
        if opt is None or record is None or not self._writes:
            return
        if record.number % self._every == 0 and record.number != self._written:
            self._under_way = record.number
            self._after_phase("step")
            self._write(opt.stats())

    def close(self) -> None:
        """Stop writing, and flush the targets."""
        self._hook.remove()
        if self._passes is not None:
            self._passes.close()
        for sink in self._sinks:
            getattr(sink, "close", lambda: None)()

    def _write(self, numbers: Row) -> None:
        self._written = int(numbers["step"])
        mean = means(self._before, numbers)
        self._before = numbers
        row = {"time": time.time(), **numbers, **mean}
        for sink in self._sinks:
            sink(row)
        if self._say_time is not None:
            self._say_time(breakdown(self._rank, self._written, mean, self._is_inside))

    def _after_phase(self, phase: str) -> None:
        opt = self._opt()
        taken = 0 if opt is None or opt.last_step is None else opt.last_step.number
        if phase == "forward":
            self._under_way = taken + 1
        elif phase == "backward":
            self._is_inside = taken == self._under_way
        is_due = self._writes and self._under_way % self._every == 0
        if self._say_memory is not None and opt is not None and is_due:
            self._say_memory(memory_line(self._rank, self._under_way, phase, opt.stats()))


def _printer(wanted: bool | Callable[[str], object]) -> Callable[[str], object] | None:
    if callable(wanted):
        return wanted
    return partial(print, flush=True) if wanted else None


# Text


def means(before: Row, after: Row) -> dict[str, float]:
    """Means over the steps between two readings of `opt.stats()`: of each ``total_x``, as ``mean_x``."""
    steps = max(after["step"] - before.get("step", 0), 1)
    totals = [name for name in after if name.startswith("total_")]
    return {name.replace("total_", "mean_", 1): (after[name] - before.get(name, 0)) / steps for name in totals}


def breakdown(rank: int, step: int, mean: Row, is_inside: bool = False) -> str:
    """The time of a step by part, in the terms of DeepSpeed's ``wall_clock_breakdown``.

    ``bwd_allreduce`` is the time that backward waits for reductions, ``bwd_inner`` the rest of backward without a step
    inside it; ``step`` is the local step and all waits of the step.

    Args:
        rank: this rank.
        step: number of the last step.
        mean: `means` over some steps.
        is_inside: True if the step runs inside backward.
    """

    def seconds(*phases: str) -> float:
        return sum(mean.get(f"mean_{phase}_s", 0.0) for phase in phases)

    waits = seconds("wait_sync", "wait_errors", "share_errors")
    stepped_inside = seconds("local_step", "wait_sync", "wait_errors") if is_inside else 0.0
    told = {
        "fwd": seconds("forward"),
        "bwd": seconds("backward"),
        "bwd_inner": max(seconds("backward") - seconds("wait_reduce") - stepped_inside, 0.0),
        "bwd_allreduce": seconds("wait_reduce"),
        "step": seconds("local_step", "decide") + waits,
        "step_inner": seconds("local_step"),
        "step_allgather": waits,
    }
    return f"[Rank {rank}] step {step}, time (ms) | " + " | ".join(f"{name}: {1e3 * s:.2f}" for name, s in told.items())


def memory_line(rank: int, step: int, phase: str, numbers: Row) -> str:
    """Memory at the end of a phase, by part, in MiB, from `opt.stats()`."""
    parts = " | ".join(f"{part}: {numbers[f'{part}_bytes'] / _MIB:.2f}" for part in _MEMORY)
    return f"[Rank {rank}] step {step}, after {phase}, memory (MiB) | {parts}"


# Targets


class Csv:
    """Appends rows to a file of comma-separated values; the first line names the columns.

    Args:
        path: path of the file. Its existing columns, as after a restart, must be the same.

    Raises:
        ValueError: if they are not, when a row is written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def __call__(self, row: Row) -> None:
        """Append a row."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+", newline="", encoding="utf-8") as file:
            file.seek(0)
            known = next(csv.reader(file), None)
            if known not in (None, list(row)):
                raise ValueError(
                    f"Expected {self._path} with the columns {', '.join(row)}, got {', '.join(known or ())}. Write to "
                    "a new file. [ZERO-906]"
                )
            writer = csv.writer(file)
            if known is None:
                writer.writerow(row)
            writer.writerow(row.values())


class JsonLines:
    """Appends each row to a file as one JSON object on a line; null for a number that is not finite.

    Args:
        path: path of the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def __call__(self, row: Row) -> None:
        """Append a row."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        finite = {name: number if math.isfinite(number) else None for name, number in row.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")


class TensorBoard:
    """Writes each finite number as a scalar ``ddp_zero/<name>`` at the row's step.

    Args:
        where: a folder for event files, or a writer with ``add_scalar`` such as the one of `torch.utils.tensorboard`.
        prefix: prefix of the names of scalars.

    Raises:
        ImportError: for a folder, if the package ``tensorboard`` is not installed.
    """

    def __init__(self, where: Any, prefix: str = "ddp_zero/") -> None:
        self._prefix = prefix
        if hasattr(where, "add_scalar"):
            self._writer = where
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "ddp_zero.tools.monitor.TensorBoard needs the package tensorboard. Run pip install tensorboard, or "
                "write to a .csv or .jsonl file. [ZERO-909]"
            ) from error
        self._writer = SummaryWriter(os.fspath(where))

    def __call__(self, row: Row) -> None:
        """Add the scalars of a row."""
        for name, number in row.items():
            if name != "step" and math.isfinite(number):
                self._writer.add_scalar(f"{self._prefix}{name}", number, int(row["step"]))

    def close(self) -> None:
        """Flush pending events."""
        self._writer.flush()


def sink_for(target: Any, rank: int | None) -> Sink:
    """The sink of a target of a `Monitor`; TypeError for an unsupported one.

    With ``rank``, the name of a file includes it, since every rank writes one.
    """
    if hasattr(target, "add_scalar"):
        return TensorBoard(target)
    if isinstance(target, str | os.PathLike):
        path = Path(target)
        if rank is not None:
            path = path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
        kinds: dict[str, Sink] = {".csv": Csv(path), ".jsonl": JsonLines(path)}
        if path.suffix in kinds:
            return kinds[path.suffix]
    elif callable(target):
        found: Sink = target
        return found
    raise TypeError(
        f"Expected a path that ends in .csv or .jsonl, a TensorBoard writer or a function, got {target!r}. For a "
        "folder of TensorBoard use ddp_zero.tools.monitor.TensorBoard(folder). [ZERO-906]"
    )


# Forward and backward passes

_LAST = 2
"""Nested rounds of callbacks after which the step at the end of backward has run, see `backward.hook`."""


class Passes:
    """Records the passes of a model as phases ``forward`` and ``backward``. Changes no values and no graph.

    A backward pass begins when the gradient of an output of the model is computed, and ends with the engine's run,
    after DDP's and the optimizer's final callbacks.

    Args:
        model: the model.
        recorder: recorder of the optimizer.
        when_ended: called with the phase when a pass has ended.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, when_ended: Callable[[str], None]) -> None:
        self._recorder = recorder
        self._when_ended = when_ended
        self._spans: dict[str, Span] = {}
        self._hooks = (
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward, always_call=True),
        )

    def close(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        for span in self._spans.values():  # left open by an error
            span.stop()
        self._spans = {"forward": self._recorder.span("forward").start()}

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._end("forward")
        for tensor in tensors_in(output, scalars=True):
            if tensor.requires_grad:
                tensor.register_hook(self._gradient_of_output)

    def _gradient_of_output(self, grad: Tensor) -> None:
        if "backward" not in self._spans:
            self._spans["backward"] = self._recorder.span("backward").start()
            at_end_of_backward(partial(_again, _LAST, partial(self._end, "backward")))

    def _end(self, phase: str) -> None:
        span = self._spans.pop(phase, None)
        if span is not None:
            span.stop()
            self._when_ended(phase)


def _again(times: int, callback: Callable[[], None]) -> None:
    """Run the callback after ``times`` nested rounds of engine callbacks."""
    at_end_of_backward(partial(_again, times - 1, callback) if times > 1 else callback)
