"""``python -m ddp_zero checkpoint info``: what a folder holds, in words."""

import sys
from pathlib import Path

import pytest
import torch

from ddp_zero.__main__ import main
from tests.unit.checkpoint.saved import TENSORS, save, trained


def told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[list[str], dict[str, str]]:
    """The lines, and those with a title by it."""
    monkeypatch.setattr(sys, "argv", ["ddp-zero", "checkpoint", "info", *map(str, arguments)])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    return lines, {line[2:16].strip(): line[16:] for line in lines[1:] if line[2:3] != " "}


def test_the_newest_checkpoint_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = trained()
    save(tmp_path, model)
    folder = save(tmp_path, model, optimizer, step=7, extra={"scheduler": [1], "rng": torch.zeros(3)})
    lines, rows = told(monkeypatch, capsys, tmp_path)
    assert lines[0] == str(folder)
    values = {name: value for name, value in model.state_dict().items() if name in TENSORS}
    floats = sum(value.numel() for value in values.values() if value.dtype is torch.float32)
    nbytes = int(rows.pop("bytes").replace(",", ""))
    assert rows == {
        "written by": "ddp_zero, 1 rank",
        "step": "7",
        "model": f"7 tensors; elements: {floats} of float32, 2 of bfloat16, 1 of int64",
        "frozen": "1 parameter",
        "optimizer": "torch.optim.adamw.AdamW, 2 groups",
        "state": "of 3 parameters: step, exp_avg, exp_avg_sq",
        "extra": "scheduler, rng",
    }
    state = sum(value.nbytes for one in optimizer.state.values() for value in one.values())
    own = sum(value.nbytes for value in values.values())
    assert nbytes == own + state + 3 * 4 + 4, "with rng, and a learning rate that is a tensor"


def test_tensors_are_listed_and_frozen_ones_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = trained()
    save(tmp_path, model, exclude_frozen=True)
    lines, rows = told(monkeypatch, capsys, tmp_path, "--tensors", "--verify")
    assert rows["frozen"] == "0 parameters, which may have been left out"
    assert "optimizer" not in rows
    assert "  embedding.weight: shape [5, 3] of float32" in lines
    assert not any("frozen:" in line or "head.weight" in line for line in lines)
    assert lines[-1] == "  everything fits its checksums"


def test_damage_is_found_where_everything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path, trained()[0])
    file = folder / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    place = raw.find(trained()[0].norm.weight.detach().numpy().tobytes())
    raw[place] ^= 1
    file.write_bytes(raw)
    told(monkeypatch, capsys, folder)
    monkeypatch.setattr(sys, "argv", ["ddp-zero", "checkpoint", "info", "--verify", str(folder)])
    assert main() == 1
    assert file.name in capsys.readouterr().err
