"""Starts the jobs of `tests.frameworks.ray_job`, and reads what they leave."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests import HANG

ROOT = Path(__file__).parents[2]
JOB = "tests.frameworks.ray_job"


def run_cases(folder: Path, cases: list[str]) -> None:
    """Run cases on one cluster of Ray."""
    _run([sys.executable, "-m", JOB, str(folder), *cases], HANG * len(cases))


def under_torchrun(folder: Path, ranks: int, stage: int, last: int) -> None:
    """Begin or continue the same job under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", JOB]
    _run([*command, str(folder), str(stage), str(last)])


def end_of(folder: Path) -> Any:
    """Parameters and state."""
    return torch.load(folder / "end", weights_only=True)


def run_example(folder: Path, *options: str) -> str:
    """Run ``examples/train_ray.py``, and return what it prints."""
    return _run([sys.executable, "examples/train_ray.py", "--storage", str(folder), *options])


def _run(command: list[str], timeout: float = HANG) -> str:
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout[-6000:]}\n{ended.stderr[-6000:]}"
    return ended.stdout
