"""What a monitor makes of numbers: means, lines, files."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_zero.tools.monitor import Csv, JsonLines, Passes, TensorBoard, breakdown, means, memory_line, sink_for
from ddp_zero.tools.record.recorder import Recorder


def test_means_are_those_of_the_steps_between_two_readings() -> None:
    before = {"step": 10, "total_wait_sync_s": 1.0, "total_sent_bytes": 100}
    after = {"step": 14, "total_wait_sync_s": 3.0, "total_sent_bytes": 500, "imbalance": 1.2}
    assert means(before, after) == {"mean_wait_sync_s": 0.5, "mean_sent_bytes": 100.0}
    assert means({}, after) == {"mean_wait_sync_s": 3.0 / 14, "mean_sent_bytes": 500 / 14}
    assert means(after, after) == {"mean_wait_sync_s": 0.0, "mean_sent_bytes": 0.0}


def test_the_breakdown_has_the_words_of_deepspeed() -> None:
    seconds = {"forward": 0.010, "backward": 0.030, "wait_reduce": 0.004, "local_step": 0.005, "decide": 0.0005}
    seconds |= {"wait_sync": 0.002, "wait_errors": 0.0, "share_errors": 0.001}
    mean = {f"mean_{phase}_s": number for phase, number in seconds.items()}
    assert breakdown(1, 200, mean) == (
        "[Rank 1] step 200, time (ms) | fwd: 10.00 | bwd: 30.00 | bwd_inner: 26.00 | bwd_allreduce: 4.00 | "
        "step: 8.50 | step_inner: 5.00 | step_allgather: 3.00"
    )
    assert "| bwd_inner: 19.00 |" in breakdown(1, 200, mean, is_inside=True), "5 ms of step and 2 of waits are in it"


def test_a_line_of_memory_is_in_mib() -> None:
    parts = ("used", "peak_used", "parameter", "master", "state", "gradient", "buffer")
    line = memory_line(0, 3, "backward", {f"{part}_bytes": 0 for part in parts} | {"used_bytes": 3 << 20, "step": 3})
    assert line == (
        "[Rank 0] step 3, after backward, memory (MiB) | used: 3.00 | peak_used: 0.00 | parameter: 0.00 | "
        "master: 0.00 | state: 0.00 | gradient: 0.00 | buffer: 0.00"
    )


def test_files_are_appended_to_and_other_columns_refused(tmp_path: Path) -> None:
    for _ in range(2):  # as after a restart
        Csv(tmp_path / "new" / "a.csv")({"step": 1, "x": 0.5})
        JsonLines(tmp_path / "new" / "a.jsonl")({"step": 1, "x": math.nan})
    with (tmp_path / "new" / "a.csv").open() as file:
        assert list(csv.reader(file)) == [["step", "x"], ["1", "0.5"], ["1", "0.5"]]
    lines = (tmp_path / "new" / "a.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "x": None}] * 2
    with pytest.raises(ValueError, match=r"a\.csv with the columns step, y, got step, x"):
        Csv(tmp_path / "new" / "a.csv")({"step": 1, "y": 0.5})


class Writer:
    """As that of `torch.utils.tensorboard`."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.flushed = False

    def add_scalar(self, tag: str, number: float, step: int) -> None:
        self.scalars.append((tag, number, step))

    def flush(self) -> None:
        self.flushed = True


def test_a_writer_of_tensorboard_gets_finite_scalars_at_their_step() -> None:
    writer = Writer()
    sink: Any = sink_for(writer, None)
    sink({"step": 40, "time": 2.0, "grad_norm": math.nan, "sent_bytes": 8})
    assert writer.scalars == [("ddp_zero/time", 2.0, 40), ("ddp_zero/sent_bytes", 8, 40)]
    sink.close()
    assert writer.flushed


def test_a_folder_of_tensorboard_is_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    sink = TensorBoard(tmp_path)
    sink({"step": 3, "sent_bytes": 8})
    sink.close()
    (file,) = tmp_path.glob("events.*")
    assert b"ddp_zero/sent_bytes" in file.read_bytes()


def test_targets_are_told_apart(tmp_path: Path) -> None:
    rows: list[Any] = []
    assert sink_for(rows.append, None) == rows.append
    sink_for(str(tmp_path / "a.csv"), 3)({"step": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["a-rank3.csv"]
    for wrong in ("a.txt", 7, tmp_path):
        with pytest.raises(TypeError, match=r"Expected a path that ends in \.csv or \.jsonl"):
            sink_for(wrong, None)


class Nested(nn.Module):
    """Returns its output within other values, as models of frameworks do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> dict[str, Any]:
        return {"loss": [self.layer(inputs).sum()], "name": "x"}


def test_passes_are_phases_and_change_nothing() -> None:
    model, recorder = Nested(), Recorder()
    phases: list[str] = []
    inputs = torch.randn(3, 2)
    model(inputs)["loss"][0].backward()
    expected = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    passes = Passes(model, recorder, phases.append)
    for _ in range(2):
        model.zero_grad()
        model(inputs)["loss"][0].backward()
    with torch.no_grad():
        model(inputs)
    passes.close()
    model(inputs)["loss"][0].backward()
    assert phases == ["forward", "backward", "forward", "backward", "forward"]
    assert set(recorder.totals) == {"sent", "received", "forward", "backward"}
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert param.grad is not None
        assert torch.equal(param.grad, 2 * grad)
