"""Processes that are killed: under torchrun the job goes on from memory, and ends bit-equal to one unbroken."""

import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.job import finish, started
from tests.snapshots.jobs import SCRIPT, Job, Step, crash_often, starts_of, wrong_steps

STEPS = 14


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def _run(folder: Path, memory: Path, *arguments: str) -> list[Step]:
    """A job under torchrun; the last steps with each number, of rank 0."""
    folder.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    command = [*torchrun, str(SCRIPT), str(memory / folder.name), str(folder), f"--steps={STEPS}", *arguments]
    with started(folder, *command) as process:
        code, _, errors = finish(process, timeout=240)
    assert code == 0, errors
    return [step for start in starts_of(folder / "rank-0") for step in start.steps]


@pytest.mark.nightly
def test_a_killed_worker_comes_back_from_memory_and_ends_bit_equal(tmp_path: Path, memory: Path) -> None:
    unbroken = _run(tmp_path / "unbroken", memory)
    broken = _run(tmp_path / "broken", memory, "--dies-after=10")
    first, second = starts_of(tmp_path / "broken" / "rank-1")
    assert [first.steps[-1].number, second.step] == [10, 10]
    assert "step 10 is restored from the snapshot" in second.told
    assert len({step.digest for step in unbroken}) == STEPS, "every step has moved the parameters"
    assert {step.number: step.digest for step in broken} == {step.number: step.digest for step in unbroken}
    assert [path.name for path in memory.glob("*/*")] == [".lock", ".lock"], "both have given back their memory"


@pytest.mark.nightly
@pytest.mark.parametrize("mode", [("--stage=1",), ("--partition=elements",), ("--copies=0",)])
def test_ranks_that_are_killed_at_random_moments_lose_few_steps(
    mode: tuple[str, ...], tmp_path: Path, memory: Path
) -> None:
    job = Job(memory / "broken", tmp_path / "broken", 2, None, "--steps=1000000", "--every=4", "--pause=0.05", *mode)
    try:
        crashes = crash_often(job, 4, loses_hosts=False, order=random.Random(1))
    finally:
        job.stop()
    assert max(crash.lost_steps for crash in crashes) <= 4
    last = max(step.number for starts in job.starts() for start in starts for step in start.steps)
    unbroken = Job(memory / "unbroken", tmp_path / "unbroken", 2, None, f"--steps={last}", *mode)
    unbroken.start()
    assert set(unbroken.wait_for_the_end(240)) == {0}
    assert wrong_steps(job, starts_of(unbroken.log / "rank-0")[0].steps) == []
