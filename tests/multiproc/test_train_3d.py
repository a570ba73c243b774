"""The example over data, pipeline and tensor parallel ranks runs, at fewer ranks, and learns as one device does."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_stages_train_beside_one_device() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--steps", "12", "--batch-size", "8", "--context", "16", "--layers", "2", "--tensor-ranks", "1"]
    ended = subprocess.run(
        [*launch, str(ROOT / "examples" / "train_3d.py"), *options],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr
    found = [tuple(map(float, one)) for one in re.findall(r"loss (\d\.\d+), on one device (\d\.\d+)", ended.stdout)]
    assert len(found) == 6, ended.stdout
    assert found[-1][0] < found[0][0] - 0.5, "both began at ln(256) = 5.5"
    assert all(abs(mine - other) < 1e-4 for mine, other in found)
