"""What rank 0 prints and writes: TensorBoard, CSV files, progress, times and memory; and that others do nothing."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_zero.deepspeed.config.config import Config
from ddp_zero.deepspeed.config.table import ConfigError
from ddp_zero.deepspeed.progress import Report, report_of

CPU = torch.device("cpu")
MODULE = "torch.utils.tensorboard"


class Writer:
    """As `torch.utils.tensorboard.SummaryWriter`, but what it writes stays here."""

    made: "list[Writer]"

    def __init__(self, log_dir: str) -> None:
        self.log_dir, self.scalars, self.flushed = log_dir, list[tuple[str, float, int]](), 0
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None:
        self.flushed = len(self.scalars)


def asked_for(rank: int, **document: Any) -> Report | None:
    return report_of(Config.parse({"train_batch_size": 8, **document}, 2), rank, CPU)


def report(**document: Any) -> Report:
    found = asked_for(0, **document)
    assert found is not None
    return found


def after(watch: Report, step: int, loss_scale: float | None = 128.0) -> None:
    watch.after_step(step, 0, 8 * step, [0.5, 0.25], [0.9, 0.9], loss_scale)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> "list[Writer]":
    Writer.made = []
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(SummaryWriter=Writer))
    return Writer.made


def block(folder: Path, **more: Any) -> dict[str, Any]:
    return {"enabled": True, "output_path": str(folder), "job_name": "job", **more}


def test_tensorboard_gets_rate_and_scale_by_samples(written: list[Writer], tmp_path: Path) -> None:
    watch = report(tensorboard=block(tmp_path))
    for step in (1, 2):
        after(watch, step)
    after(watch, 3, loss_scale=None)
    (writer,) = written
    assert writer.log_dir == str(tmp_path / "job")
    rates = [("Train/Samples/lr", 0.5, samples) for samples in (8, 16, 24)]
    scales = [("Train/Samples/loss_scale", 128.0, samples) for samples in (8, 16)]
    assert sorted(writer.scalars) == sorted(rates + scales)
    assert writer.flushed == len(writer.scalars)


def test_times_are_written_where_they_are_measured(written: list[Writer], tmp_path: Path) -> None:
    watch = report(tensorboard=block(tmp_path), wall_clock_breakdown=True)
    for name in ("forward", "backward", "step"):
        with watch.measure(name):
            pass
    after(watch, 1)
    assert watch.times() == {}, "of one step only"
    (writer,) = written
    names = {name for name, _, _ in writer.scalars}
    assert {f"Train/Samples/elapsed_time_ms_{one}" for one in ("forward", "backward", "step")} < names


def test_only_rank_0_writes_and_only_where_it_is_asked_to(
    written: list[Writer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = {"steps_per_print": 1, "memory_breakdown": True, "wall_clock_breakdown": True, "dump_state": True}
    assert asked_for(1, tensorboard=block(tmp_path), csv_monitor=block(tmp_path), **everything) is None
    assert asked_for(0, tensorboard=block(tmp_path, enabled=False), csv_monitor={}) is None
    assert written == []
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_tensorboard_that_is_not_installed_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    with pytest.raises(
        ConfigError, match=r"needs the package tensorboard\. pip install tensorboard, or use csv_monitor"
    ):
        report(tensorboard=block(tmp_path))
    assert asked_for(1, tensorboard=block(tmp_path)) is None


def test_event_files_of_tensorboard_are_written(tmp_path: Path) -> None:
    reading = "tensorboard.backend.event_processing.event_accumulator"
    module = pytest.importorskip(reading, reason="tensorboard is not installed")
    watch = report(tensorboard=block(tmp_path))
    for step in (1, 2):
        after(watch, step)
    read = module.EventAccumulator(str(tmp_path / "job"))
    read.Reload()
    assert [(one.step, one.value) for one in read.Scalars("Train/Samples/lr")] == [(8, 0.5), (16, 0.5)]
    assert [(one.step, one.value) for one in read.Scalars("Train/Samples/loss_scale")] == [(8, 128.0), (16, 128.0)]


def test_a_csv_file_per_number_goes_on_after_a_restart(tmp_path: Path) -> None:
    for step in (1, 2):
        after(report(csv_monitor=block(tmp_path)), step)
    rows = {file.name: file.read_text().split() for file in (tmp_path / "job").iterdir()}
    assert rows == {
        "Train_Samples_lr.csv": ["step,lr", "8,0.5", "16,0.5"],
        "Train_Samples_loss_scale.csv": ["step,loss_scale", "8,128.0", "16,128.0"],
    }


def test_after_step_prints_progress_times_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    watch = report(steps_per_print=2, memory_breakdown=True, wall_clock_breakdown=True, dump_state=True)
    assert capsys.readouterr().out.startswith("Config(batch=Batch(train=8")
    with watch.measure("forward"):
        pass
    after(watch, 1)
    first = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0].partition(" | ")[0] for line in first] == ["step=1, time (ms)", "step=1, memory"]
    after(watch, 2)
    assert capsys.readouterr().out.splitlines()[0] == "step=2, skipped=0, lr=[0.5, 0.25], mom=[0.9, 0.9]"
