"""A worker is killed under ``torchrun --max-restarts``: the job comes back and ends bit-equal to one unbroken."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.hosts.job import finish, started
from tests.multiproc.example_scripts import run_script, run_under_torchrun

SCRIPT = Path(__file__).with_name("restart_script.py")


def _arguments(folder: Path, dies_after: int, late: float = 0.0) -> list[str]:
    return [str(folder / "checkpoints"), str(folder / "result.pt"), str(dies_after), str(late)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[Tensor]:
    folder = tmp_path_factory.mktemp("unbroken")
    ended = run_script(SCRIPT, _arguments(folder, dies_after=-1))
    assert ended.code == 0, ended.errors
    parameters: list[Tensor] = torch.load(folder / "result.pt")
    return parameters


def _assert_restarted(folder: Path, printed: str, unbroken: list[Tensor]) -> None:
    assert "attempt 1 rank 1 starts at step 3" in printed
    assert "attempt 2" not in printed
    parameters: list[Tensor] = torch.load(folder / "result.pt")
    for param, expected in zip(parameters, unbroken, strict=True):
        torch.testing.assert_close(param, expected, rtol=0, atol=0)


def test_a_killed_worker_comes_back_and_ends_bit_equal(unbroken: list[Tensor], tmp_path: Path) -> None:
    ended = run_under_torchrun(SCRIPT, _arguments(tmp_path, dies_after=2), max_restarts=2, timeout=240)
    assert ended.code == 0, ended.errors
    _assert_restarted(tmp_path, ended.output, unbroken)


@pytest.mark.nightly
@pytest.mark.parametrize("late", [0.0, 2.0])
def test_a_worker_killed_under_torchrun_comes_back_too(unbroken: list[Tensor], tmp_path: Path, late: float) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    with started(tmp_path, *torchrun, str(SCRIPT), *_arguments(tmp_path, dies_after=2, late=late)) as process:
        code, printed, errors = finish(process, timeout=240)
    assert code == 0, errors
    _assert_restarted(tmp_path, printed, unbroken)
