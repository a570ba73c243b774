"""The GAN example: two sharded optimizers in one process, equal to plain ones."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_two_sharded_optimizers_equal_plain_ones() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--steps", "12", "--batch-size", "16", "--width", "32", "--compare"]
    ended = subprocess.run(
        [*launch, str(ROOT / "examples" / "train_gan.py"), *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr
    assert "largest parameter difference to DDP + Adam: 0.0 (parameters moved: True)" in ended.stdout
    assert "of 8 modes covered" in ended.stdout
