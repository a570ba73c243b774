"""Writes the numbers of `opt.stats()` every few steps, to a CSV file and to TensorBoard.

from torch.utils.tensorboard import SummaryWriter
from ddp_zero.tools.files import by_rank
from ddp_zero.tools.monitor import Monitor

monitor = Monitor(opt, every=50, csv="stats.csv", writer=SummaryWriter("runs/1"))
"""

import csv as csv_format
import math
import os
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ddp_zero.optimizer import ZeroRedundancyOptimizer
from ddp_zero.tools.files import by_rank

__all__ = ["Monitor", "Writer"]

Row = Mapping[str, float]


class Writer(Protocol):
    """The part of `torch.utils.tensorboard.SummaryWriter` that a monitor calls."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int) -> Any:
        """Write a number, by the number of the step that has ended."""

    def flush(self) -> Any:
        """Have the numbers outlive the process. Called once for all numbers of a step."""


class Monitor:
    """Writes the numbers of an optimizer every ``every`` steps, after ``opt.step()``, on rank 0.

    A row is `opt.stats()`, with ``time`` in seconds since the epoch, and ``mean_x`` for each ``total_x``: its mean over
    the steps since the previous row. Reading does not communicate. Errors of writing, such as a full disk, are raised
    in ``opt.step()``.

    Args:
        opt: the optimizer.
        every: write in each step whose number is a multiple of this.
        csv: path of a file of comma-separated values; rows are appended, the first line names the columns.
        writer: a `SummaryWriter`, or what has its ``add_scalar`` and ``flush``. It gets each finite number as a scalar
            ``ddp_zero/<name>`` at the step's number.

    Raises:
        ValueError: for an ``every`` below 1; when a row is written, for an existing file with other columns.
    """

    def __init__(
        self,
        opt: ZeroRedundancyOptimizer,
        every: int = 100,
        *,
        csv: str | os.PathLike[str] | None = None,
        writer: Writer | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"Expected every to be a number of steps of at least 1, got {every}. [ZERO-906]")
        self._opt = weakref.ref(opt)
        self._every = every
        self._csv = None if csv is None else Path(csv)
        self._writer = writer
        self._before: Row = opt.stats()
        self._hook = opt.register_step_post_hook(lambda *_: self.step()) if opt.rank == 0 else None

    def step(self) -> None:
        """Write if due. ``opt.step()`` calls this; call it in loops that omit ``opt.step()``."""
        opt = self._opt()
        record = None if opt is None else opt.last_step
        if opt is None or record is None or self._hook is None:
            return
        if record.number % self._every == 0 and record.number != self._before["step"]:
            numbers = opt.stats()
            row = {"time": time.time(), **numbers, **means(self._before, numbers)}
            self._before = numbers
            if self._csv is not None:
                with by_rank("rank 0", "Free space, or write to another file. [ZERO-906]"):
                    append_to_csv(self._csv, row)
            if self._writer is not None:
                add_scalars(self._writer, row, "ddp_zero/")

    def close(self) -> None:
        """Stop writing, and flush the writer."""
        if self._hook is not None:
            self._hook.remove()
            if self._writer is not None:
                self._writer.flush()


def means(before: Row, after: Row) -> dict[str, float]:
    """Means over the steps between two readings of `opt.stats()`: of each ``total_x``, as ``mean_x``."""
    steps = max(after["step"] - before["step"], 1)
    totals = [name for name in after if name.startswith("total_")]
    return {name.replace("total_", "mean_", 1): (after[name] - before[name]) / steps for name in totals}


def append_to_csv(path: Path, row: Row) -> None:
    """Append a row; ValueError if the file, as after a restart, has other columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="", encoding="utf-8") as file:
        file.seek(0)
        known = next(csv_format.reader(file), None)
        if known not in (None, list(row)):
            raise ValueError(
                f"Expected {path} with the columns {', '.join(row)}, got {', '.join(known or ())}. Write to a new "
                "file. [ZERO-906]"
            )
        writer = csv_format.writer(file)
        if known is None:
            writer.writerow(row)
        writer.writerow(row.values())


def add_scalars(writer: Writer, row: Row, prefix: str) -> None:
    """Add the finite numbers of a row as scalars at its ``step``."""
    for name, number in row.items():
        if name != "step" and math.isfinite(number):
            writer.add_scalar(prefix + name, number, int(row["step"]))
