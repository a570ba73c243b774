"""Progress, times and memory, printed by rank 0 and written to CSV files and TensorBoard."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ddp_zero.core.comm import logger
from ddp_zero.deepspeed.config.config import Config
from ddp_zero.deepspeed.config.table import ConfigError, Finding, Kind
from ddp_zero.insight.stats import process_memory
from ddp_zero.tools.monitor import Writer, add_scalars, append_to_csv

_MIB = 1 << 20
_warned: set[str] = set()


def warn_once(findings: tuple[Finding, ...], rank: int) -> None:
    """Log once per process, on rank 0, the keys without effect, with their reasons."""
    for finding in findings:
        if finding.kind is Kind.NO_EFFECT and rank == 0 and finding.path not in _warned:
            _warned.add(finding.path)
            logger.warning("%s has no effect here: %s [ZERO-715]", finding.path, finding.text)


def report_of(config: Config, rank: int, device: torch.device) -> "Report | None":
    """The configured report, on rank 0 only, or None; ConfigError if TensorBoard is configured but not installed."""
    rest = config.rest
    wanted = rest.steps_per_print, rest.wall_clock_breakdown, rest.memory_breakdown, rest.dump_state
    is_wanted = any(wanted) or config.csv_monitor.enabled or config.tensorboard.enabled
    return Report(config, device) if is_wanted and rank == 0 else None


class Report:
    """Prints and writes after every step; see `report_of`.

    DeepSpeed's names: a CSV file ``Train_Samples_lr.csv`` for each number, a scalar ``Train/Samples/lr`` of
    TensorBoard, by the number of samples.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self._rest = config.rest
        self._device = device
        self._times: dict[str, float] = {}
        csv, tensorboard = config.csv_monitor, config.tensorboard
        self._csv = Path(csv.output_path) / csv.job_name if csv.enabled else None
        self._writer: Writer | None = None
        if tensorboard.enabled:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ConfigError(
                    '"tensorboard": {"enabled": true} needs the package tensorboard. pip install tensorboard, or '
                    "use csv_monitor. [ZERO-909]"
                ) from error
            self._writer = SummaryWriter(str(Path(tensorboard.output_path) / tensorboard.job_name))
        if config.rest.dump_state:
            print(config, flush=True)

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Add the time spent inside to the step's times, if configured."""
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

    def after_step(
        self, step: int, skipped: int, samples: int, lr: list[Any], momentum: list[Any], loss_scale: float | None
    ) -> None:
        """Print and write: skipped steps count as steps, samples are of all ranks, rates and momenta by group."""
        every = self._rest.steps_per_print
        if every and step % every == 0:
            print(f"step={step}, skipped={skipped}, lr={lr}, mom={momentum}", flush=True)
        if self._rest.wall_clock_breakdown:
            told = " | ".join(f"{name}: {value:.2f}" for name, value in self.times().items())
            print(f"step={step}, time (ms) | {told}", flush=True)
        if self._rest.memory_breakdown:
            print(f"step={step}, memory | {self._memory()}", flush=True)
        numbers = {"lr": lr[0]}
        if loss_scale is not None:
            numbers["loss_scale"] = loss_scale
        numbers |= {f"elapsed_time_ms_{name}": value for name, value in self.times().items()}
        if self._csv is not None:
            for name, number in numbers.items():
                append_to_csv(self._csv / f"Train_Samples_{name}.csv", {"step": samples, name: number})
        if self._writer is not None:
            add_scalars(self._writer, {"step": samples, **numbers}, "Train/Samples/")
            self._writer.flush()
        self._times.clear()

    def _memory(self) -> str:
        now, peak = process_memory(self._device)
        return f"now: {now / _MIB:.0f} MiB | peak: {peak / _MIB:.0f} MiB"

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()
