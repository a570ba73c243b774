"""Ranks that end at different times: one that is done answers the others, and keeps none waiting."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.hosts.job import REPOSITORY, finish, started
from tests.multiproc.ending_script import fail_as_worker
from tests.multiproc.harness import CONTEXT

SCRIPT = Path(__file__).with_name("ending_script.py")


def _run(folder: Path, *modes: str) -> list[str]:
    """What both ranks print in each mode.

    They end as a script does, with their interpreter, which is what these tests are about.
    """
    with started(folder, sys.executable, str(SCRIPT), str(folder), *modes) as process:
        code, printed, errors = finish(process, timeout=120)
    told = [(folder / f"{mode}.txt").read_text() for mode in modes]
    assert code == 0, (printed, errors, told)
    return told


def test_the_last_line_saves_on_one_rank_and_a_dropped_last_update_is_reported(tmp_path: Path) -> None:
    _, told = _run(tmp_path, "the last line saves", "the last update is dropped")
    assert len(torch.load(tmp_path / "state.pt")["state"]) == 2
    assert told.count("got the end of training (rank ") == 2, told
    assert told.count("[ZERO-307]") == 2, told


@pytest.mark.nightly
def test_a_wait_for_a_rank_that_has_ended_names_it(tmp_path: Path) -> None:
    (told,) = _run(tmp_path, "one rank trains on")
    assert "rank 0 has seen that rank 1 has ended" in told


def _exits(ranks: int, ending: str, *modes: str, each: int = 0) -> None:
    """Every rank ends with its code while messages would wait for an hour."""
    command = [sys.executable, "-m", "tests.exits", "--each", str(each or ranks), "--ranks", str(ranks)]
    command += ["--ending", ending]
    for mode in modes:
        command += ["--mode", mode]
    found = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1800 if each else 600, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_ranks_that_end_together_leave_the_store_quietly() -> None:
    """One of them has its server."""
    _exits(3, "together", "stage 2, all ask")


@pytest.mark.nightly
def test_200_failing_exits_are_ordinary() -> None:
    """Of as many jobs of two ranks, one of which fails."""
    _exits(2, "rank 0 raises", "stage 2, all ask", each=400)


@pytest.mark.nightly
@pytest.mark.parametrize("ending", ["rank 0 raises", "rank 0 trains on", "rank 1 ends early"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_that_fails_in_any_mode_ends_as_well(ranks: int, ending: str) -> None:
    _exits(ranks, ending)


@pytest.mark.parametrize("how", ["raises", "exits"])
def test_a_worker_of_multiprocessing_that_fails_ends_as_well(tmp_path: Path, how: str) -> None:
    workers = [CONTEXT.Process(target=fail_as_worker, args=(rank, str(tmp_path), how)) for rank in range(2)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
        assert [worker.exitcode for worker in workers] == [3 if how == "exits" else 1, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
