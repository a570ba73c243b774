"""What rank 0 prints and writes about the training: progress, times, memory; CSV files and TensorBoard."""

import csv
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ddp_zero.core.comm.tracing import logger
from ddp_zero.deepspeed.config.config import Config
from ddp_zero.deepspeed.config.keys import ConfigError, Finding, Kind
from ddp_zero.deepspeed.config.sections import WriterSection

_warned: set[str] = set()


def warn_once(findings: tuple[Finding, ...], rank: int) -> None:
    """Log once in a process, on rank 0, which keys have no effect, and why."""
    for finding in findings:
        if finding.kind is Kind.NO_EFFECT and rank == 0 and finding.path not in _warned:
            _warned.add(finding.path)
            logger.warning("%s has no effect here: %s", finding.path, finding.text)


@dataclass
class Progress:
    """Numbers after a step.

    Attributes:
        step: steps so far, skipped ones included.
        skipped: of these.
        samples: so far, on all ranks.
        lr: of each parameter group.
        momentum: of each parameter group.
        loss_scale: of fp16, or None.
    """

    step: int
    skipped: int
    samples: int
    lr: list[Any]
    momentum: list[Any]
    loss_scale: float | None


class Monitor:
    """Prints and writes on rank 0, and does nothing on other ranks.

    Args:
        config: says what.
        rank: of this process.
        device: of the model.

    Raises:
        ConfigError: on rank 0, if TensorBoard is asked for and not installed.
    """

    def __init__(self, config: Config, rank: int, device: torch.device) -> None:
        self._rest = config.rest
        self._is_first = rank == 0
        self._device = device
        self._times: dict[str, float] = {}
        self._writers: list[_CSV | _TensorBoard] = []
        if config.csv_monitor.enabled and self._is_first:
            self._writers.append(_CSV(config.csv_monitor))
        if config.tensorboard.enabled and self._is_first:
            self._writers.append(_TensorBoard(config.tensorboard))
        if config.rest.dump_state and self._is_first:
            print(config, flush=True)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the time that is spent here to that of the step, if it is asked for."""
        if not self._rest.wall_clock_breakdown:
            yield
            return
        begin = self._now()
        try:
            yield
        finally:
            self._times[what] = self._times.get(what, 0.0) + self._now() - begin

    def times(self) -> dict[str, float]:
        """Milliseconds by name, since the last step."""
        return {name: 1000 * seconds for name, seconds in self._times.items()}

    def after_step(self, progress: Progress) -> None:
        """Print and write what is due."""
        if self._is_first:
            self._print(progress)
            samples = progress.samples
            events = [("Train/Samples/lr", progress.lr[0], samples)]
            if progress.loss_scale is not None:
                events.append(("Train/Samples/loss_scale", progress.loss_scale, samples))
            events += [
                (f"Train/Samples/elapsed_time_ms_{name}", value, samples) for name, value in self.times().items()
            ]
            for writer in self._writers:
                writer.write(events)
        self._times.clear()

    def _print(self, progress: Progress) -> None:
        every = self._rest.steps_per_print
        if every and progress.step % every == 0:
            print(
                f"step={progress.step}, skipped={progress.skipped}, lr={progress.lr}, mom={progress.momentum}",
                flush=True,
            )
        if self._rest.wall_clock_breakdown:
            told = " | ".join(f"{name}: {value:.2f}" for name, value in self.times().items())
            print(f"step={progress.step}, time (ms) | {told}", flush=True)
        if self._rest.memory_breakdown:
            print(f"step={progress.step}, memory | {self._memory()}", flush=True)

    def _memory(self) -> str:
        if self._device.type == "cpu":
            with open("/proc/self/status") as status:
                lines = dict(line.split(":", 1) for line in status if ":" in line)
            return " | ".join(f"{name}: {lines[key].strip()}" for name, key in (("now", "VmRSS"), ("peak", "VmHWM")))
        accelerator = torch.accelerator
        now, peak = accelerator.memory_allocated(self._device), accelerator.max_memory_allocated(self._device)
        return f"now: {now >> 20} MiB | peak: {peak >> 20} MiB"

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


@dataclass
class _CSV:
    """A file per number, with a column of samples and one of values."""

    section: WriterSection
    _known: set[str] = field(default_factory=set)

    def write(self, events: list[tuple[str, Any, int]]) -> None:
        """Append a row to the file of each number: events are its name, its value, and samples so far."""
        folder = Path(self.section.output_path) / self.section.job_name
        folder.mkdir(parents=True, exist_ok=True)
        for name, value, samples in events:
            with (folder / f"{name.replace('/', '_')}.csv").open("a", newline="") as file:
                rows = csv.writer(file)
                if name not in self._known:
                    self._known.add(name)
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([samples, value])


class _TensorBoard:
    """Files of events for TensorBoard, with a scalar per number."""

    def __init__(self, section: WriterSection) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                'Expected TensorBoard for "tensorboard": {"enabled": true}, got none. pip install tensorboard, or use '
                "csv_monitor."
            ) from error
        self._writer: Any = SummaryWriter(log_dir=str(Path(section.output_path) / section.job_name))

    def write(self, events: list[tuple[str, Any, int]]) -> None:
        """Add a scalar for each number: events are its name, its value, and samples so far."""
        for name, value, samples in events:
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()
