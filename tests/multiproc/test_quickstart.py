"""README's first command: what it prints is true, on a small model."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_both_trainings_learn_and_end_with_equal_parameters(tmp_path: Path) -> None:
    sizes = ["--steps", "8", "--layers", "2", "--width", "64", "--context", "32"]
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), *sizes]
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('as in an environment with torch alone')")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = dict(re.findall(r"^(\w.*?\w(?:, median)?)  +([\d.]+ +[\d.]+)$", ended.stdout, re.MULTILINE))
    ddp, stage_2 = ({name: float(row.split()[column]) for name, row in rows.items()} for column in (0, 1))
    assert ddp["loss of the last step"] == stage_2["loss of the last step"] < 5.5
    assert "largest difference between the trained parameters: 0.0" in ended.stdout
    assert 0.4 < stage_2["MiB of optimizer state per rank"] / ddp["MiB of optimizer state per rank"] < 0.6
    assert stage_2["MiB of gradients after backward"] < 0.1 * ddp["MiB of gradients after backward"]
    assert stage_2["MiB at the peak of training"] > 0
    assert len(re.findall(r"^  step +\d+/8  loss [\d.]+  \d+ ms$", ended.stdout, re.MULTILINE)) == 4
    assert ended.stderr == ""
