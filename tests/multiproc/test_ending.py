"""Ranks that end at different times: one that is done answers the others, and keeps none waiting."""

import sys
from pathlib import Path

import torch

from tests.hosts.job import finish, started

SCRIPT = Path(__file__).with_name("ending_script.py")


def _run(folder: Path, mode: str) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with started(folder, *torchrun, str(SCRIPT), mode, str(folder / "state.pt")) as process:
        code, printed, errors = finish(process, timeout=120)
    assert code == 0, errors
    return printed


def test_the_last_line_of_a_script_may_save_on_one_rank(tmp_path: Path) -> None:
    _run(tmp_path, "the last line saves")
    assert len(torch.load(tmp_path / "state.pt")["state"]) == 2


def test_a_rank_that_waits_for_one_that_has_ended_is_told(tmp_path: Path) -> None:
    assert "rank 0 has seen that rank 1 has ended" in _run(tmp_path, "one rank trains on")
