"""What a monitor makes of numbers: means, rows of files, scalars."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from ddp_zero.tools.monitor import add_scalars, append_to_csv, means


def test_means_are_those_of_the_steps_between_two_readings() -> None:
    before = {"step": 10, "total_wait_sync_s": 1.0, "total_sent_bytes": 100}
    after = {"step": 14, "total_wait_sync_s": 3.0, "total_sent_bytes": 500, "imbalance": 1.2}
    assert means(before, after) == {"mean_wait_sync_s": 0.5, "mean_sent_bytes": 100.0}
    assert means(after, after) == {"mean_wait_sync_s": 0.0, "mean_sent_bytes": 0.0}


def test_append_to_csv_appends_rows_and_refuses_other_columns(tmp_path: Path) -> None:
    for _ in range(2):  # as after a restart
        append_to_csv(tmp_path / "new" / "a.csv", {"step": 1, "x": 0.5})
    with (tmp_path / "new" / "a.csv").open() as file:
        assert list(csv.reader(file)) == [["step", "x"], ["1", "0.5"], ["1", "0.5"]]
    with pytest.raises(ValueError, match=r"a\.csv with the columns step, y, got step, x"):
        append_to_csv(tmp_path / "new" / "a.csv", {"step": 1, "y": 0.5})


def test_a_summary_writer_gets_finite_scalars_at_their_step(tmp_path: Path) -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def add_scalar(self, tag: str, scalar_value: Any, global_step: int) -> None:
            written.append((tag, scalar_value, global_step))

        def flush(self) -> None: ...

    row = {"step": 40, "time": 2.0, "grad_norm": math.nan, "sent_bytes": 8}
    add_scalars(Writer(), row, "ddp_zero/")
    assert written == [("ddp_zero/time", 2.0, 40), ("ddp_zero/sent_bytes", 8, 40)]


def test_numbers_are_written_with_torchs_summary_writer(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        add_scalars(writer, {"step": 3, "sent_bytes": 8}, "ddp_zero/")
    (file,) = tmp_path.glob("events.*")
    assert b"ddp_zero/sent_bytes" in file.read_bytes()
