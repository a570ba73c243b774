"""The example with a mixture of experts runs, and both models learn."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_experts_train_beside_a_dense_model() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--steps", "30", "--batch-size", "8", "--context", "32", "--width", "32", "--layers", "1"]
    ended = subprocess.run(
        [*launch, str(ROOT / "examples" / "train_moe.py"), *options],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr
    assert "shared by global ranks 0 | 1; this rank's are 0; averaged in opt.step()" in ended.stdout
    found = re.search(r"dense (\d\.\d+), mixture (\d\.\d+)", ended.stdout)
    assert found is not None, ended.stdout
    assert all(float(loss) < 5.0 for loss in found.groups()), "both began at ln(256) = 5.5"
