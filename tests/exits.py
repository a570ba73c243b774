"""Ends jobs over and over, several at once as the load, and counts the exits that are not ordinary.

    python -m tests.exits --each 200
    python -m tests.exits --each 6 --ranks 3 --ending "rank 0 trains on"

A rank trains a few steps, calls ``destroy_process_group()`` and returns from its main program, so that the interpreter
and the C++ libraries tear down as in a user's script. Ranks are forked from a process that has imported torch and has
no threads; ``--fresh`` starts an interpreter for each instead. Rank 0 has the server of the job's store, as without
torchrun. Ranks that end together print nothing. With another ``--ending`` some ranks fail when all others have ended
well: they must end as well, with code 1, long before the time-out of their messages.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what a first step imports, before ranks are forked
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import shard_optimizer

_STEPS = 5
_TIMEOUT = 180.0  # seconds after which an exit counts as a hang
_LONG = 3600.0  # seconds: the time-out of messages where a rank that waits for it hangs


def _mixed_model() -> nn.Module:
    """Linear layers of two dtypes: DDP builds buckets of each."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float64)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.second(self.first(inputs).double())
            return outputs

    return Mixed()


def _plain_model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])


def _reduce_in_python(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    future: torch.futures.Future[Any] = work.get_future()
    reduced: torch.futures.Future[torch.Tensor] = future.then(lambda done: done.value()[0])
    return reduced


def _train_with_hook(build: Callable[[], nn.Module], static_graph: bool = False) -> None:
    ddp = DistributedDataParallel(build(), static_graph=static_graph, bucket_cap_mb=0.0003)
    ddp.register_comm_hook(None, _reduce_in_python)
    _train(ddp, torch.optim.AdamW(ddp.parameters(), foreach=False))


def _train_sharded(build: Callable[[], nn.Module], static_graph: bool = False, **options: Any) -> None:
    ddp = DistributedDataParallel(
        build(), static_graph=static_graph, bucket_cap_mb=0.0003, gradient_as_bucket_view=True
    )
    _train(ddp, shard_optimizer(ddp, torch.optim.AdamW, foreach=False, **options))


def _shard_group() -> dist.ProcessGroup:
    ranks = dist.get_world_size()
    group: dist.ProcessGroup = dist.new_subgroups(2 if ranks % 2 == 0 else ranks)[0]
    return group


def _train(ddp: nn.Module, opt: Any) -> None:
    for _ in range(_STEPS):
        _step(ddp, opt)
    _Ending.trains_on = partial(_step, ddp, opt)
    _Ending.asks = opt.state_dict


def _step(ddp: nn.Module, opt: Any) -> None:
    ddp(torch.randn(4, 8)).square().mean().backward()
    opt.step()
    opt.zero_grad()


class _Ending:
    """Keeps the model and the optimizer, as a script without functions does."""

    trains_on: Callable[[], None]
    asks: Callable[[], object]


def _train_and_ask() -> None:
    """Two optimizers, and every rank asks all others twice."""
    for _ in range(2):
        _train_sharded(_plain_model, stage=2)
        _Ending.asks()
        _Ending.asks()


def _train_both() -> None:
    """DDP with a hook in Python and a sharded optimizer in one script, as where the abort was seen."""
    _train_with_hook(_mixed_model, static_graph=True)
    _train_sharded(_mixed_model, static_graph=True, interleaved=True)


MODES: dict[str, Callable[[], None]] = {
    "DDP with a Python hook": lambda: _train_with_hook(_plain_model),
    "DDP with a Python hook, static graph, two dtypes": lambda: _train_with_hook(_mixed_model, static_graph=True),
    "stage 1 standalone": lambda: _train_sharded(_plain_model, overlap=False),
    "stage 1 overlapped": lambda: _train_sharded(_plain_model, interleaved=False),
    "stage 1 interleaved": lambda: _train_sharded(_plain_model, interleaved=True),
    "stage 1, static graph, two dtypes": lambda: _train_sharded(_mixed_model, static_graph=True),
    "stage 2": lambda: _train_sharded(_plain_model, stage=2),
    "stage 2, all ask": _train_and_ask,
    "stage 2, static graph, two dtypes": lambda: _train_sharded(_mixed_model, static_graph=True, stage=2),
    "stage 2, sync in forward": lambda: _train_sharded(_plain_model, stage=2, sync="forward"),
    "stage 2, elements": lambda: _train_sharded(_plain_model, stage=2, partition="elements"),
    "stage 2, clipped": lambda: _train_sharded(_plain_model, stage=2, max_grad_norm=1.0),
    "stage 2, shard groups": lambda: _train_sharded(_plain_model, stage=2, shard_group=_shard_group()),
    "both in one script, static graph, two dtypes": _train_both,
}


ENDINGS = ("together", "rank 0 raises", "rank 0 trains on", "rank 1 ends early")


def _store(rank: int, job: "_Job") -> TCPStore:
    told = job.folder / "port"
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, job.ranks, True, wait_for_workers=False)
        (job.folder / "port.part").write_text(str(store.port))
        (job.folder / "port.part").rename(told)
        return store
    while not told.exists():
        time.sleep(0.01)
    return TCPStore("127.0.0.1", int(told.read_text()), job.ranks, False)


def _be_a_rank(mode: str, rank: int, job: "_Job") -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=_store(rank, job),
        rank=rank,
        world_size=job.ranks,
        timeout=timedelta(seconds=_TIMEOUT / 2 if job.ending == ENDINGS[0] else _LONG),
    )
    MODES[mode]()
    if job.ending == ENDINGS[0]:
        dist.destroy_process_group()
        return
    (job.folder / f"rank-{rank}.trained").touch()
    if job.expected(rank):
        while len(list(job.folder.glob("*.trained"))) < job.ranks:
            time.sleep(0.05)
        time.sleep(1.0)  # for the others to end
        if job.ending != "rank 0 raises":
            _Ending.trains_on()
            _Ending.trains_on()  # late parameters of the first step are used here
        raise ValueError(f"rank {rank} fails when others have ended")


@dataclass(frozen=True)
class _Job:
    """A job of one mode."""

    folder: Path
    ranks: int
    ending: str

    def expected(self, rank: int) -> int:
        """Exit code of a rank."""
        fails = {"together": False, "rank 1 ends early": rank != 1}
        return int(fails.get(self.ending, rank == 0))


class _EndAsRank(Exception):
    """Unwinds a forked process to the end of its main program, where it is a rank."""


def _fork_rank(mode: str, rank: int, job: _Job) -> int:
    child = os.fork()
    if child:
        return child
    log = os.open(job.folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    raise _EndAsRank(mode, rank, job)


def _fresh_rank(mode: str, rank: int, job: _Job) -> int:
    with (job.folder / f"rank-{rank}.log").open("wb") as log:
        command = [sys.executable, "-m", "tests.exits", "--rank", str(rank), "--mode", mode]
        command += ["--folder", str(job.folder), "--ranks", str(job.ranks), "--ending", job.ending]
        return subprocess.Popen(command, stdout=log, stderr=log).pid


def _wait(processes: dict[int, int]) -> list[str]:
    """The outcome of each process, given its exit code; kills those that have not ended in time."""
    deadline, outcomes = time.monotonic() + _TIMEOUT, dict[int, str]()
    while len(outcomes) < len(processes):
        for process, expected in processes.items():
            if process not in outcomes and (ended := os.waitpid(process, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(ended[1])
                outcomes[process] = "ordinary" if code == expected else f"code {code}"
        if time.monotonic() > deadline:
            for process in processes:
                if process not in outcomes:
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
                    outcomes[process] = "hung"
        time.sleep(0.02)
    return [outcomes[process] for process in processes]


def _count(given: argparse.Namespace, modes: list[str], start: Callable[[str, int, _Job], int]) -> bool:
    """Prints a line per mode. Returns whether every exit was ordinary."""
    all_ordinary, ranks = True, given.ranks
    for mode in modes:
        begun, counts, told = time.monotonic(), Counter[str](), list[str]()
        for first in range(0, given.each, ranks * given.at_once):
            number = min(given.at_once, (given.each - first + ranks - 1) // ranks)
            jobs = [_Job(Path(tempfile.mkdtemp()), ranks, given.ending) for _ in range(number)]
            processes = {start(mode, rank, job): job.expected(rank) for job in jobs for rank in range(ranks)}
            for at, outcome in enumerate(_wait(processes)):
                log = (jobs[at // ranks].folder / f"rank-{at % ranks}.log").read_text(errors="replace")
                if outcome == "ordinary" and given.ending == ENDINGS[0] and log:
                    outcome = "not quiet"
                counts[outcome] += 1
                if outcome != "ordinary":
                    told.append(f"    rank {at % ranks}, {outcome}: {log[-2000:]}")
            for job in jobs:
                shutil.rmtree(job.folder)
        found = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        print(f"{mode}: {found} ({time.monotonic() - begun:.0f} s)", *told, sep="\n", flush=True)
        all_ordinary &= set(counts) == {"ordinary"}
    return all_ordinary


def main() -> int:
    """Count exits, or be one rank of a job. Returns 1 if an exit was not ordinary."""
    parser = argparse.ArgumentParser(prog="python -m tests.exits", description=__doc__.split("\n")[0])
    parser.add_argument("--each", type=int, default=200, help="exits of each mode, one of each rank")
    parser.add_argument("--at-once", type=int, default=6, help="jobs side by side")
    parser.add_argument("--mode", action="append", choices=MODES, help="default: all of them")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ending", choices=ENDINGS, default=ENDINGS[0], help="of the ranks of a job")
    parser.add_argument("--fresh", action="store_true", help="an interpreter for each rank, instead of forks")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        _be_a_rank(given.mode[0], given.rank, _Job(Path(given.folder), given.ranks, given.ending))
        return 0
    modes = given.mode or [mode for mode in MODES if given.ending == ENDINGS[0] or "DDP" not in mode]
    try:
        return not _count(given, modes, _fresh_rank if given.fresh else _fork_rank)
    except _EndAsRank as rank:
        job = rank.args
    _be_a_rank(*job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
