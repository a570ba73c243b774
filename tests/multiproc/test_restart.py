"""A worker is killed under ``torchrun --max-restarts``: the job comes back and ends bit-equal to one unbroken."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.hosts.job import finish, started

SCRIPT = Path(__file__).with_name("restart_script.py")


def _run(folder: Path, dies_after: int, late: float = 0.0) -> tuple[list[Tensor], str]:
    """The parameters at the end, and what the ranks have printed."""
    folder.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    arguments = [str(folder / "checkpoints"), str(folder / "result.pt"), str(dies_after), str(late)]
    with started(folder, *torchrun, str(SCRIPT), *arguments) as process:
        code, printed, errors = finish(process, timeout=240)
    assert code == 0, errors
    parameters: list[Tensor] = torch.load(folder / "result.pt")
    return parameters, printed


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[Tensor]:
    parameters, printed = _run(tmp_path_factory.mktemp("unbroken") / "run", dies_after=-1)
    assert "attempt 1" not in printed
    return parameters


@pytest.mark.parametrize("late", [0.0, 2.0])
def test_a_killed_worker_comes_back_and_ends_bit_equal(unbroken: list[Tensor], tmp_path: Path, late: float) -> None:
    parameters, printed = _run(tmp_path / "run", dies_after=2, late=late)
    assert "attempt 1 rank 1 starts at step 3" in printed
    assert "attempt 2" not in printed
    for param, expected in zip(parameters, unbroken, strict=True):
        torch.testing.assert_close(param, expected, rtol=0, atol=0)
