"""Jobs that hang or break in every way that one rank can cause: what is left names that rank, or says why it cannot.

Several cases run side by side: their ranks mostly wait for a time-out.
"""

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_zero
from ddp_zero import shard_optimizer
from ddp_zero.tools.postmortem.blame import Verdict, blame
from ddp_zero.tools.postmortem.command import report
from ddp_zero.tools.postmortem.records import read_folder
from tests.multiproc.harness import kill_this_process

GROUP_TIMEOUT = 8.0
VICTIM = 1
AT = 3
"""The step in which the victim does what its case says, from 0."""
AT_ONCE = 8

MODES: dict[str, dict[str, Any]] = {"stage 1": {"stage": 1, "overlap": False}, "stage 2": {"stage": 2}}


class KilledInStep(torch.optim.SGD):
    """Dies in the step of its first bucket once it is armed."""

    is_armed = False

    def step(self, closure: Any = None) -> Any:
        if KilledInStep.is_armed:
            kill_this_process()
        return super().step(closure)


class Loop:
    """A training loop of one rank; cases override the parts that its victim does differently.

    Args:
        rank: of this process.
        options: of the optimizer.
    """

    def __init__(self, rank: int, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.rank = rank
        caps: Any = [0.001]
        layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())]
        self.model = DistributedDataParallel(
            nn.Sequential(*layers), bucket_cap_mb_list=caps, gradient_as_bucket_view=True
        )
        self.opt = shard_optimizer(self.model, KilledInStep, lr=0.01, **options)

    def run(self) -> None:
        for step in range(AT + 3):
            self.is_odd = step == AT and self.rank == VICTIM
            inputs = self.load()
            loss = self.model(inputs).square().mean()
            self.backward(loss)
            self.step()
            self.opt.zero_grad()
            self.after_step(step)

    def load(self) -> torch.Tensor:
        return torch.randn(4, 16)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.opt.step()

    def after_step(self, step: int) -> None:
        pass

    def at_layer(self, layer: int, act: Callable[[], None]) -> None:
        """Act when backward comes to a layer, once the gradients of later layers are on their way."""
        self.model.module[layer].weight.register_hook(lambda grad: act())


class KilledInBackward(Loop):
    def backward(self, loss: torch.Tensor) -> None:
        if self.is_odd:
            self.at_layer(4, kill_this_process)
        loss.backward()


class KilledInReduction(Loop):
    """In the middle of DDP's, with buckets in flight."""

    def backward(self, loss: torch.Tensor) -> None:
        if self.is_odd:
            self.at_layer(0, kill_this_process)
        loss.backward()


class KilledInLocalStep(Loop):
    def backward(self, loss: torch.Tensor) -> None:
        KilledInStep.is_armed = self.is_odd
        loss.backward()


class KilledInDecision(Loop):
    def step(self) -> None:
        if self.is_odd:
            kill_this_process()
        self.opt.step()


class Stopped(Loop):
    def backward(self, loss: torch.Tensor) -> None:
        if self.is_odd:
            self.at_layer(2, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        loss.backward()


class SlowLoader(Loop):
    def load(self) -> torch.Tensor:
        if self.is_odd:
            time.sleep(30 * GROUP_TIMEOUT)
        return torch.randn(4, 16)


class SkippedStep(Loop):
    def step(self) -> None:
        if not self.is_odd:
            self.opt.step()


class SkippedBackward(Loop):
    def backward(self, loss: torch.Tensor) -> None:
        if not self.is_odd:
            loss.backward()


class SkippedBarrier(Loop):
    def after_step(self, step: int) -> None:
        if not self.is_odd:
            dist.barrier()


class LoneBarrier(Loop):
    def after_step(self, step: int) -> None:
        if self.is_odd:
            dist.barrier()


class Raising(Loop):
    def load(self) -> torch.Tensor:
        if self.is_odd:
            raise ValueError("a broken file")
        return torch.randn(4, 16)


class Leaving(Loop):
    def load(self) -> torch.Tensor:
        if self.is_odd:
            raise SystemExit(0)
        return torch.randn(4, 16)


class StateOfTheDead(Loop):
    """All others ask for the state, of which the dead rank holds a part."""

    def after_step(self, step: int) -> None:
        if self.is_odd:
            kill_this_process()
        if step == AT:
            time.sleep(1.0)
            self.opt.state_dict()


CASES: dict[str, tuple[type[Loop], dict[str, Any]]] = {
    "killed in backward": (KilledInBackward, {}),
    "killed in a reduction": (KilledInReduction, {}),
    "killed in the step": (KilledInLocalStep, {}),
    "killed before a clip decision": (KilledInDecision, {"max_grad_norm": 1.0}),
    "stopped": (Stopped, {}),
    "slow loader": (SlowLoader, {}),
    "step skipped": (SkippedStep, {}),
    "step skipped, clipped": (SkippedStep, {"max_grad_norm": 1.0}),
    "backward skipped": (SkippedBackward, {}),
    "barrier skipped": (SkippedBarrier, {}),
    "lone barrier": (LoneBarrier, {}),
    "exception": (Raising, {}),
    "left early": (Leaving, {}),
    "state of a dead rank": (StateOfTheDead, {}),
}

ALIKE = ["killed in a reduction", "slow loader", "step skipped", "lone barrier"]
"""Cases that end as the one beside them does."""

PAIRED = ["barrier skipped", "lone barrier", "step skipped, clipped", "backward skipped"]
"""Cases in which two ranks went different ways, and nothing tells which was meant."""


def _be_a_rank(rank: int, world_size: int, folder: str, case: str, mode: str) -> None:
    warnings.simplefilter("ignore")
    os.dup2(os.open(Path(folder) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    ddp_zero.record_to(Path(folder) / "records")
    dist.init_process_group(
        "gloo",
        init_method=(Path(folder) / "rendezvous").as_uri(),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT),
    )
    loop, options = CASES[case]
    loop(rank, {**MODES[mode], **options}).run()


def _stage(folder: Path, case: str, mode: str, world_size: int) -> Path:
    """Run a job until all but the victim have ended, and then end it too; returns where the records are."""
    context = multiprocessing.get_context("forkserver")
    processes: list[BaseProcess] = []
    for rank in range(world_size):
        processes.append(context.Process(target=_be_a_rank, args=(rank, world_size, str(folder), case, mode)))
        processes[-1].start()
    try:
        deadline = time.monotonic() + 20 * GROUP_TIMEOUT  # starting alone takes a minute on a busy machine
        for rank in range(world_size):
            if rank != VICTIM:
                processes[rank].join(max(0.0, deadline - time.monotonic()))
                assert processes[rank].exitcode is not None, f"rank {rank} hangs in {case}, {mode}"
        processes[VICTIM].join(1.0)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return folder / "records"


Stage = tuple[str, str, int]
"""A case, a mode and a number of ranks."""


class Stages:
    """Runs the chosen cases a few at a time, ahead of the tests that ask for their outcomes.

    No more than a few ahead: another process of pytest-xdist may run the others.

    Args:
        folder: for files.
        chosen: the cases, in the order of their tests.
    """

    def __init__(self, folder: Path, chosen: list[Stage]) -> None:
        self._folder = folder
        self._chosen = chosen
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._jobs: dict[Stage, Future[Path]] = {}

    def verdict(self, case: str, mode: str, world_size: int) -> tuple[Verdict, str]:
        place = self._chosen.index((case, mode, world_size))
        for stage in self._chosen[place : place + AT_ONCE]:
            if stage not in self._jobs:
                folder = self._folder / str(len(self._jobs))
                folder.mkdir()
                self._jobs[stage] = self._pool.submit(_stage, folder, *stage)
        records = read_folder(self._jobs[case, mode, world_size].result())
        text = report(records)
        print(f"--- {case}, {mode}, {world_size} ranks\n{text}")
        return blame(records), text

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def stages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    chosen: list[Any] = [
        tuple(item.callspec.params[name] for name in ("case", "mode", "ranks"))
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == Path(__file__) and "stages" in item.fixturenames
    ]
    stages = Stages(tmp_path_factory.mktemp("stages"), chosen)
    yield stages
    stages.close()


def _alternate(cases: Iterable[str], ranks: int) -> list[Any]:
    """Each case in both modes, in one of them, by turns, in the nightly tier alone; there those of `ALIKE` in both."""
    return [
        pytest.param(case, mode, ranks, marks=[pytest.mark.nightly] * ((place + turn) % 2 or case in ALIKE))
        for place, case in enumerate(cases)
        for turn, mode in enumerate(MODES)
    ]


@pytest.mark.parametrize(("case", "mode", "ranks"), _alternate(CASES, 3))
def test_the_rank_that_caused_it_is_named(case: str, mode: str, ranks: int, stages: Stages) -> None:
    verdict, text = stages.verdict(case, mode, ranks)
    assert list(verdict.culprits) == [VICTIM], text
    if verdict.waits and mode == "stage 2" and "killed" in case:
        assert max(wait.bucket for wait in verdict.waits.values()) >= 0 or "clip" in case, text


@pytest.mark.parametrize(("case", "mode", "ranks"), _alternate(PAIRED, 2))
def test_of_two_ranks_that_went_different_ways_the_wrong_one_is_never_named(
    case: str, mode: str, ranks: int, stages: Stages
) -> None:
    verdict, text = stages.verdict(case, mode, ranks)
    assert list(verdict.culprits) == [VICTIM] or (not verdict.culprits and "cannot tell, because" in text), text
