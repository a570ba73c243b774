"""Runs a function on several ranks, each a fresh process, and never waits longer than it was told to.

Processes are forked from a server that has imported torch once, so that a rank starts in a fraction of a second. A rank
that fails, dies or hangs fails the test with the traceback of every rank that has one.
"""

import contextlib
import gc
import math
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import HANG

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    # a first DDP model imports torch._dynamo, a third of a second that every rank would spend for itself
    # and most test files import these parts of this library and of torch, half a second where no bytecode is kept
    [
        *("torch", "torch._dynamo", "torch.distributed.optim", "torch.distributed.pipelining"),
        *("ddp_zero.public", "ddp_zero.deepspeed", "tests.internals"),
        *("tests.multiproc.harness", "tests.multiproc.cases"),
    ]
)


@dataclass(frozen=True)
class Setup:
    """Who this process is, and where it may write.

    Attributes:
        rank: of this process.
        world_size: number of ranks.
        device: of tensors.
        folder: one that all ranks of the job share, empty at first, and removed some time after the job.
    """

    rank: int
    world_size: int
    device: torch.device
    folder: Path

    def tell(self) -> None:
        """Note that this rank has seen what a test waits for."""
        (self.folder / f"told-{self.rank}").touch()

    def wait_until_told(self, ranks: int, timeout: float = 60.0) -> None:
        """Wait as a rank that is late does, until so many others have called `tell`."""
        deadline = time.monotonic() + timeout
        while len(list(self.folder.glob("told-*"))) < ranks and time.monotonic() < deadline:
            time.sleep(0.1)


Body = Callable[..., Any]


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: what it returned, its traceback, or neither if it was killed."""

    rank: int
    result: Any = None
    error: str | None = None
    killed: bool = False


def run_ranks(body: Body, world_size: int, *args: Any, timeout: float = HANG, group_timeout: float = 60.0) -> list[Any]:
    """Run ``body(setup, *args)`` on every rank of a fresh Gloo job and return what each returned, in rank order.

    Args:
        body: a function that another process can import.
        world_size: number of ranks.
        *args: handed to every rank.
        timeout: seconds after which all ranks are killed and the test fails.
        group_timeout: the process group's own time-out, in seconds.
    """
    outcomes = run_ranks_to_end(body, world_size, *args, timeout=timeout, group_timeout=group_timeout)
    _check(outcomes, world_size, body.__name__)
    return [outcome.result for outcome in outcomes]


_AFTER_A_FAILURE = 30.0
"""Seconds for the other ranks to end as well, and to say why, once one has failed."""


def _check(outcomes: list[Outcome], world_size: int, name: str) -> None:
    failures = [outcome for outcome in outcomes if outcome.killed or outcome.error is not None]
    if failures:
        told = "\n".join(f"--- rank {f.rank}: {f.error or 'killed'}" for f in failures)
        raise AssertionError(f"{len(failures)} of {world_size} ranks failed in {name}:\n{told}")


def run_ranks_to_end(
    body: Body, world_size: int, *args: Any, timeout: float = HANG, group_timeout: float = 60.0
) -> list[Outcome]:
    """As `run_ranks`, for tests in which ranks are meant to fail: returns how each one ended."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = CONTEXT.Pipe(duplex=False)
            work = (sender, body, rank, world_size, folder, group_timeout, args)
            process = CONTEXT.Process(target=_run_rank, args=work, daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, timeout, body.__name__)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], timeout: float, name: str, after_a_failure: float = math.inf) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout
    waiting = dict(enumerate(pipes))
    while waiting:
        ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            told = "\n".join(f"--- rank {o.rank}: {o.error}" for o in outcomes.values() if o.error)
            raise AssertionError(f"ranks {sorted(waiting)} of {name} did not end in time\n{told}")
        for rank, pipe in list(waiting.items()):
            if pipe in ready:
                try:
                    outcomes[rank] = pipe.recv()
                except EOFError:
                    outcomes[rank] = Outcome(rank, killed=True)
                del waiting[rank]
                if outcomes[rank].killed or outcomes[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + after_a_failure)
    return [outcomes[rank] for rank in sorted(outcomes)]


def _run_rank(
    pipe: Connection, body: Body, rank: int, world_size: int, folder: str, group_timeout: float, args: tuple[Any, ...]
) -> None:
    _settle_in()
    pipe.send(_run_body(body, rank, world_size, Path(folder), group_timeout, args))


def _settle_in() -> None:
    """Once per process."""
    gc.freeze()  # what the server has imported need not be looked at again by the garbage collector
    torch.set_num_threads(1)


def _run_body(
    body: Body, rank: int, world_size: int, folder: Path, group_timeout: float, args: tuple[Any, ...]
) -> Outcome:
    warnings.resetwarnings()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", r".*\[ZERO-324\]$")  # once in every loop that changes gradients before the step
    torch.manual_seed(1234 + rank)
    setup = Setup(rank, world_size, torch.device("cpu"), folder / "shared")
    try:
        setup.folder.mkdir(exist_ok=True)
        dist.init_process_group(
            "gloo",
            init_method=(folder / "rendezvous").as_uri(),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout),
        )
        outcome = Outcome(rank, result=body(setup, *args))
        with contextlib.suppress(RuntimeError):  # wait for ranks that still talk; some tests have lost one
            dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        outcome = Outcome(rank, error=traceback.format_exc())
    return outcome


class Pool:
    """Ranks that stay for several bodies, each of which has a process group of its own.

    A rank that fails, dies or does not end takes the pool with it.

    Args:
        world_size: number of ranks.
        device: what its processes train on. A simulated device cannot be registered after a backward pass without it,
            and stays registered.
    """

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        self.world_size, self.device = world_size, device
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(theirs, rank, world_size), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, body: Body, *args: Any, timeout: float, group_timeout: float) -> list[Any]:
        """As `run_ranks`; the pool is closed if a rank fails."""
        folder = tempfile.mkdtemp(dir=self._folder.name)  # kept: what a body leaves behind may still look for its files
        try:
            for pipe in self._pipes:
                pipe.send((body, folder, group_timeout, args))
            name = getattr(body, "func", body).__name__
            outcomes = _collect(self._pipes, timeout, name, _AFTER_A_FAILURE)
            _check(outcomes, self.world_size, name)
            return [outcome.result for outcome in outcomes]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes.clear()
        self._folder.cleanup()

    @property
    def is_open(self) -> bool:
        """Whether it can run bodies."""
        return bool(self._processes)


def _serve(pipe: Connection, rank: int, world_size: int) -> None:
    _settle_in()
    while True:
        try:
            body, folder, group_timeout, args = pipe.recv()
        except EOFError:
            return
        pipe.send(_run_body(body, rank, world_size, Path(folder), group_timeout, args))
        gc.collect()
        gc.freeze()  # what outlives a body, such as modules it has imported, need not be looked at after every other


class Cases:
    """Registers the cases of a test file, each a body that all ranks run, and runs those of one size in one pool.

        case = Cases(group_timeout=30)

        @case(2, 3)
        def _does_this(setup: Setup) -> None: ...

        @case(4, few=[("a", 1), ("b", 2)], every=list(product("ab", (1, 2))))
        def _does_that(setup: Setup, configurations: Sequence[tuple[str, int]]) -> None: ...

        test_situations = case.each()

    Args:
        around: called on every rank with the setup and the body, instead of the body.
        timeout: see `run_ranks`.
        group_timeout: see `run_ranks`.
        device: see `Pool`.
    """

    _pool: Pool | None = None  # one at a time, whatever file it is for

    def __init__(
        self, around: Body | None = None, *, timeout: float = HANG, group_timeout: float = 60.0, device: str = "cpu"
    ) -> None:
        self._around, self._device = around, device
        self._timeouts = {"timeout": timeout, "group_timeout": group_timeout}
        self._bodies: dict[str, tuple[Body, tuple[int, ...], list[pytest.MarkDecorator]]] = {}

    def __call__(
        self,
        *world_sizes: int,
        marks: Sequence[pytest.MarkDecorator] = (),
        few: Collection[Any] = (),
        every: Collection[Any] = (),
    ) -> Callable[[Body], Body]:
        """Register a body for jobs of these sizes.

        Args:
            *world_sizes: numbers of ranks.
            marks: of pytest.
            few: if given, handed to the body: configurations in which each value of each factor is met.
            every: handed to the body in a further case, of the nightly tier.
        """

        def register(body: Body) -> Body:
            name = body.__name__.strip("_")
            assert name not in self._bodies, f"two cases {name}"
            self._bodies[name] = partial(body, configurations=few) if few else body, world_sizes, list(marks)
            if every:
                in_full = partial(body, configurations=every)
                self._bodies[f"{name}_in_full"] = in_full, world_sizes, [*marks, pytest.mark.nightly]
            return body

        return register

    def each(self) -> Callable[..., None]:
        """A test whose parameter ``run`` runs one case; those of one size follow each other."""
        jobs = [(size, name, body, marks) for name, (body, sizes, marks) in self._bodies.items() for size in sizes]
        runs = [
            pytest.param(partial(self._run, body, size), id=f"{name}-{size}", marks=marks)
            for size, name, body, marks in sorted(jobs, key=itemgetter(0))
        ]

        @pytest.mark.parametrize("run", runs)
        def test(run: Callable[[], None]) -> None:
            run()

        return test

    @classmethod
    def pool_of(cls, world_size: int, device: str = "cpu") -> Pool:
        """The ranks that stay, if there are so many for this device; else new ones instead."""
        pool = cls._pool
        if pool is None or not pool.is_open or (pool.world_size, pool.device) != (world_size, device):
            if pool is not None:
                pool.close()
            pool = cls._pool = Pool(world_size, device)
        return pool

    def _run(self, body: Body, world_size: int) -> None:
        pool = Cases.pool_of(world_size, self._device)
        if self._around is None:
            pool.run(body, **self._timeouts)
        else:
            pool.run(self._around, body, **self._timeouts)


def kill_this_process() -> None:
    """Die as a rank does that the kernel kills: at once, without cleaning up."""
    os.kill(os.getpid(), signal.SIGKILL)
