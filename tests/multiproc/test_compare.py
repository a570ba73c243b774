"""benchmarks.race from its command line to its files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parent.parent.parent


def _compare(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks.race", "--model", "tiny", "--rounds", "2"]
    ended = subprocess.run(
        [*command, "--results", str(folder), *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr
    return ended


def _check(found: dict[str, Any], names: list[str]) -> None:
    assert list(found["modes"]) == names
    assert sum(found["model"]["bucket_bytes"]) == found["model"]["parameter_bytes"]
    assert min(found["phases"].values()) > 0
    for mode in found["modes"].values():
        assert len(mode["seconds"]) == 2
        assert min(mode["seconds"]) > 0
        assert len(mode["sent_bytes"]) == 2
        assert min(mode["sent_bytes"]) > found["model"]["parameter_bytes"]  # the bound, and headers
        assert mode["difference"] < 1e-6


def test_every_number_of_the_table_is_measured(tmp_path: Path) -> None:
    ended = _compare(tmp_path, "--modes", "stage 2, interleaved")
    found = json.loads((tmp_path / "compare-tiny-2ranks-stage-2-interleaved.json").read_text())
    _check(found, ["DDP + fused AdamW", "ddp_zero stage 2, interleaved"])
    assert found["link"] is None
    for mode in found["modes"].values():
        assert min(mode["peak_bytes"]) > 0
        assert len(mode["formula_bytes"]) == len(mode["peak_bytes_whole_run"]) == 2
    assert (tmp_path / "compare-tiny-2ranks-stage-2-interleaved.md").read_text() in ended.stdout


def test_modes_that_do_not_train_ddp_take_part(tmp_path: Path) -> None:
    _compare(tmp_path, "--modes", "FSDP2", "--modes", "torch Z", "--no-memory")
    found = json.loads((tmp_path / "compare-tiny-2ranks-fsdp2-torch-z.json").read_text())
    torchs = "torch ZeroRedundancyOptimizer"
    names = ["DDP + fused AdamW", torchs, f"{torchs}, bucket views", "FSDP2, no reshard after forward"]
    _check(found, names)
    assert not any(mode["peak_bytes"] for mode in found["modes"].values())


def test_comparisons_behind_slow_links_record_the_rate(tmp_path: Path) -> None:
    ended = _compare(tmp_path, "--link", "100mbit", "--modes", "stage 2, interleaved", "--no-memory")
    if ended.stdout.startswith("skipped:"):
        pytest.skip(ended.stdout)
    [path] = tmp_path.glob("compare-tiny-2ranks-100mbit-modes-*.json")  # the filter is too long for a name
    found = json.loads(path.read_text())
    _check(found, ["DDP + fused AdamW", "ddp_zero stage 2, interleaved"])
    assert found["link"] == {"gbit": 0.1}
    rates = [re.search(r"([0-9.]+) Gbit/s measured", fact) for fact in found["facts"]]
    assert [0.02 < float(rate.group(1)) < 0.13 for rate in rates if rate] == [True]  # slow machines send less
