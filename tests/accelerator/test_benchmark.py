"""benchmarks.gpu on the simulated accelerator, so that it does not rot where there is no GPU."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator import simulation

pytestmark = pytest.mark.skipif(simulation.missing() is not None, reason=str(simulation.missing()))


def _run(folder: Path, *chosen: str) -> str:
    """The page."""
    simulation.compiled()  # here, not by all ranks while the time-out runs
    options = ["--ranks", "2", "--device", "sim", "--model", "tiny", "--rounds", "1", "--steps", "1"]
    command = [sys.executable, "-m", "benchmarks.gpu", *options, *chosen, "--results", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (page,) = folder.glob("*.md")
    assert page.read_text() == done.stdout
    return done.stdout


def test_modes_are_checked_and_measured(tmp_path: Path) -> None:
    name = "ddp_zero stage 2, sync in forward"
    page = _run(tmp_path, "--modes", name, "--modes", "FSDP2", "--timeline")
    checked, measured = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    assert checked == f"| {name} | none, bit for bit | the same | none |"
    assert measured.endswith("| none |"), "the host waits for nothing"
    (found,) = tmp_path.glob("*.json")
    assert json.loads(found.read_text())["measured"][name][0]["state_bytes"] > 0
    traces = list(tmp_path.glob("*.json.gz"))
    assert len(traces) == 3
    for trace in traces:
        with gzip.open(trace) as file:
            assert json.load(file)["traceEvents"]


def test_masters_are_checked(tmp_path: Path) -> None:
    page = _run(tmp_path, "--dtype", "bf16", "--check-only", "--modes", "stage 2, interleaved, fp32 masters")
    rows = [line for line in page.splitlines() if line.startswith("| ddp_zero")]
    assert rows == ["| ddp_zero stage 2, interleaved, fp32 masters | none, bit for bit | the same | none |"]
