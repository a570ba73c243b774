"""Three replica groups of two ranks under torchrun; one at random is killed and restarted, ten times in a run."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from tests.frameworks.job import assert_equal

pytest.importorskip("torchft")

from torchft.coordination import LighthouseServer

from tests.frameworks.torchft_job import OPTIONS, build_model

GROUPS, RANKS, KILLS = 3, 2, 10
RUN_ON = 60
"""Steps after the last group has come back."""
PATIENCE = 120.0
ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(RANKS)]
TORCHRUN += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]


class Job:
    """The groups, each with a torchrun of its own."""

    def __init__(self, folder: Path, stage: int) -> None:
        self.folder, self._stage = folder, stage
        self._lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=2, join_timeout_ms=5000, heartbeat_timeout_ms=1500
        )
        self._agents: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, group: int) -> None:
        command = [
            *TORCHRUN,
            "--max-restarts",
            "100",
            "--monitor-interval",
            "0.1",
            "-m",
            "tests.frameworks.torchft_job",
        ]
        environment = dict(os.environ, TORCHFT_LIGHTHOUSE=self._lighthouse.address(), OMP_NUM_THREADS="1")
        with (self.folder / f"out-{group}").open("ab") as out:
            self._agents[group] = subprocess.Popen(
                [*command, str(self.folder), str(group), str(self._stage)],
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def kill(self, group: int, whole: bool, rank: int) -> None:
        """Kill one rank, whose group torchrun restarts; or the whole group with its torchrun, and start it again."""
        victims = [self._pid(group, one) for one in (range(RANKS) if whole else [rank])]
        if whole:
            self._agents[group].kill()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        if whole:
            self._agents[group].wait()
            self.start(group)

    def steps(self, group: int) -> list[int]:
        """The steps that a group has committed so far, by rank 0's log."""
        log = self.folder / f"log-{group}-0"
        return [int(line.split()[0]) for line in log.read_text().splitlines()] if log.exists() else []

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not is_so():
            if time.monotonic() > deadline:
                tails = [(self.folder / f"out-{group}").read_text()[-3000:] for group in range(GROUPS)]
                raise AssertionError(f"{what} has not happened in {PATIENCE} s:\n" + "\n\n---\n".join(tails))
            time.sleep(0.05)

    def end(self) -> None:
        """Kill what is left."""
        for group, agent in self._agents.items():
            if agent.poll() is None:
                agent.kill()
                for rank in range(RANKS):
                    try:
                        os.kill(self._pid(group, rank), signal.SIGKILL)
                    except (ProcessLookupError, FileNotFoundError):
                        pass
            agent.wait()
        self._lighthouse.shutdown()

    def wait(self) -> None:
        for agent in self._agents.values():
            assert agent.wait(PATIENCE) == 0

    def _pid(self, group: int, rank: int) -> int:
        return int((self.folder / f"pid-{group}-{rank}").read_text())


def train_under_fire(folder: Path, stage: int, kills: int, seed: int) -> dict[tuple[int, int], Any]:
    """What each rank has at the end, by group and rank."""
    chance = random.Random(seed)
    job = Job(folder, stage)
    try:
        for group in range(GROUPS):
            job.start(group)
        job.wait_until(lambda: all(len(job.steps(group)) > 5 for group in range(GROUPS)), "the first steps")
        for kill in range(kills):
            group, whole, rank = chance.randrange(GROUPS), chance.random() < 0.5, chance.randrange(RANKS)
            time.sleep(chance.random())
            before = len(job.steps(group))
            job.kill(group, whole, rank)
            job.wait_until(lambda: len(job.steps(group)) > before + 5, f"the return after kill {kill}")  # noqa: B023
        last = max(job.steps(group)[-1] for group in range(GROUPS)) + RUN_ON
        (folder / ".limit").write_text(str(last))
        (folder / ".limit").rename(folder / "limit")
        job.wait()
    finally:
        job.end()
    return {
        (group, rank): torch.load(folder / f"end-{group}-{rank}", weights_only=True)
        for group in range(GROUPS)
        for rank in range(RANKS)
    }


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_groups_that_die_and_return_end_bit_equal(stage: int, tmp_path: Path) -> None:
    ends = train_under_fire(tmp_path, stage, KILLS if stage else 4, seed=stage)
    for (group, rank), (params, state, step) in ends.items():
        assert_equal(ends[0, 0][0], params, f"parameters of group {group}, rank {rank}")
        assert_equal(ends[0, 0][1], state, f"state of group {group}, rank {rank}")
        assert step == ends[0, 0][2]
    if stage:
        _check_steps(tmp_path, ends[0, 0])


def _check_steps(folder: Path, end: Any) -> None:
    """Check that every step was taken once, by the averages of the groups that took part, and led to this end."""
    steps = end[2]
    averages: dict[int, dict[str, Any]] = defaultdict(dict)
    quorums: dict[int, set[int]] = defaultdict(set)
    for file in folder.glob("average-*"):
        step, quorum, _, _ = map(int, re.findall(r"\d+", file.name))
        quorums[step].add(quorum)
        for name, average in torch.load(file, weights_only=True).items():
            assert_equal(averages[step].setdefault(name, average), average, f"the average of {name} in step {step}")
    assert sorted(averages) == list(range(steps)), "steps are missing"
    for step, (quorum, *others) in sorted(quorums.items()):
        assert not others, f"step {step} was committed in two quorums"
        _check_average(folder, step, quorum, averages[step])
    for group in range(GROUPS):
        for rank in range(RANKS):
            log = [int(line.split()[0]) for line in (folder / f"log-{group}-{rank}").read_text().splitlines()]
            assert log == sorted(set(log)), f"group {group}, rank {rank} has committed a step twice"
    model = build_model()
    opt = AdamW(model.parameters(), **OPTIONS)
    for step in range(steps):
        for name, param in model.named_parameters():
            param.grad = averages[step][name]
        opt.step()
    assert_equal(end[0], dict(model.named_parameters()), "the plain optimizer with the same averages")


def _check_average(folder: Path, step: int, quorum: int, averages: dict[str, Any]) -> None:
    own = [torch.load(file, weights_only=True) for file in folder.glob(f"own-{step}-{quorum}-*")]
    (count,) = {count for count, _ in own}
    for name, average in averages.items():
        parts = [grads[name].double() for _, grads in own if name in grads]
        assert len(parts) == count, (step, name, "a group has not counted, or twice")
        torch.testing.assert_close(average.double(), sum(parts) / count, rtol=1e-5, atol=1e-8)


def test_the_example_trains_two_groups_that_end_alike() -> None:
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=5000)
    environment = dict(os.environ, TORCHFT_LIGHTHOUSE=lighthouse.address(), OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    command = [*TORCHRUN, str(ROOT / "examples" / "train_torchft.py"), "--steps", "100", "--group"]
    groups = [
        subprocess.Popen([*command, str(group)], env=environment, stdout=subprocess.PIPE, text=True) for group in (0, 1)
    ]
    try:
        printed = [group.communicate(timeout=PATIENCE)[0] for group in groups]
    finally:
        for group in groups:
            group.kill()
        lighthouse.shutdown()
    ends = [re.search(r"ends with parameters that add up to (\S+)", text) for text in printed]
    assert ends[0] is not None, printed
    assert ends[1] is not None, printed
    assert ends[0][1] == ends[1][1]
