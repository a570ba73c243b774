"""Runs the scripts in ``examples/`` as a user would."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def run_example(script: str, options: str) -> str:
    """Run a script under torchrun on two ranks, and return what it prints; it must end well within three minutes."""
    ended = end_of_example(script, options)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def end_of_example(script: str, options: str) -> "subprocess.CompletedProcess[str]":
    """As `run_example`, however it ends."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*launch, str(ROOT / "examples" / script), *options.split()],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
