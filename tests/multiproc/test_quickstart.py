"""README's first command, on a small model, and the files of the quickstart: what they print is true."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.multiproc.example_scripts import Ended, run_script

ROOT = Path(__file__).parents[2]


FORKED = f"""
import runpy, sys
from multiprocessing import context
context._concrete_contexts["spawn"] = context._concrete_contexts["fork"]
sys.path.insert(0, {str(ROOT / "examples")!r})
runpy.run_path({str(ROOT / "examples" / "quickstart.py")!r}, run_name="__main__")
"""
"""The script, whose ranks are forked, where each would import torch again, four times in all."""


def _run(folder: Path, options: list[str], forks: bool) -> Ended:
    if forks:
        script = folder / "forked.py"
        script.write_text(FORKED)
        return run_script(script, options, None, folder=folder, timeout=240)
    (folder / "numpy.py").write_text("raise ModuleNotFoundError('as in an environment with torch alone')")
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), *options]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_both_trainings_learn_and_end_with_equal_parameters(tmp_path: Path, forks: bool) -> None:
    ended = _run(tmp_path, ["--steps", "8", "--layers", "2", "--width", "64", "--context", "32"], forks)
    assert ended.code == 0, ended.output + ended.errors
    rows = dict(re.findall(r"^(\w.*?\w(?:, median)?)  +([\d.]+ +[\d.]+)$", ended.output, re.MULTILINE))
    ddp, stage_2 = ({name: float(row.split()[column]) for name, row in rows.items()} for column in (0, 1))
    assert ddp["loss of the last step"] == stage_2["loss of the last step"] < 5.5
    assert "largest difference between the trained parameters: 0.0" in ended.output
    assert 0.4 < stage_2["MiB of optimizer state per rank"] / ddp["MiB of optimizer state per rank"] < 0.6
    assert stage_2["MiB of gradients after backward"] < 0.1 * ddp["MiB of gradients after backward"]
    assert stage_2["MiB at the peak of training"] > 0
    steps = re.findall(r"^  step +(\d)/8  (\w.*?)  +loss [\d.]+  \d+ ms$", ended.output, re.MULTILINE)
    assert sorted(steps) == [(number, mode) for number in "18" for mode in ("DDP", "ddp_zero stage 2")]
    assert ended.errors == ""


def test_a_report_of_times_that_are_far_apart_says_that_the_machine_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    names = runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    for step_ms, is_busy in (([100.0, 101.0, 102.0, 103.0], False), ([100.0, 120.0, 140.0, 300.0], True)):
        training = names["Training"]([1.0], step_ms, 0, 0, 0, [torch.zeros(1)])
        end = names["report"](dict.fromkeys(names["MODES"], training)).splitlines()[-1]
        assert ("busy" in end) == is_busy, end


# not in README's command while this is unexplained: in two early whole runs a rank had not ended 120 s after its last
# line, in none of 370 runs of the scripts by themselves
@pytest.mark.nightly
def test_each_step_of_the_quickstart_prints_the_losses_of_ddp() -> None:
    printed = {}
    for file in sorted((ROOT / "examples" / "quickstart").glob("*.py")):
        ended = run_script(file)
        assert ended.code == 0, ended.errors
        printed[file.name] = re.findall(r"^step \d loss (\S+)$", ended.output, re.MULTILINE)
    losses, *others = printed.values()
    assert len(others) == 2
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True), "every step moves the parameters"
    assert others == [losses] * 2
