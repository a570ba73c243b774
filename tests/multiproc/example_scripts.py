"""Runs the scripts in ``examples/`` as a user would."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def run_example(script: str, options: str) -> str:
    """Run a script under torchrun on two ranks, and return what it prints; it must end well within three minutes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*launch, str(ROOT / "examples" / script), *options.split()],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
