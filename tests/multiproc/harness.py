"""Runs a function on several ranks, each a fresh process, and never waits longer than it was told to.

Processes are forked from a server that has imported torch once, so that a rank starts in a fraction of a second. A rank
that fails, dies or hangs fails the test with the traceback of every rank that has one.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed.optim", "ddp_zero", "tests.multiproc.harness"])


@dataclass(frozen=True)
class Setup:
    """Who this process is."""

    rank: int
    world_size: int
    device: torch.device


Body = Callable[..., Any]


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: what it returned, its traceback, or neither if it was killed."""

    rank: int
    result: Any = None
    error: str | None = None
    killed: bool = False


def run_ranks(
    body: Body, world_size: int, *args: Any, timeout: float = 120.0, group_timeout: float = 60.0
) -> list[Any]:
    """Run ``body(setup, *args)`` on every rank of a fresh Gloo job and return what each returned, in rank order.

    Args:
        body: a function that another process can import.
        world_size: number of ranks.
        *args: handed to every rank.
        timeout: seconds after which all ranks are killed and the test fails.
        group_timeout: the process group's own time-out, in seconds.
    """
    outcomes = run_ranks_to_end(body, world_size, *args, timeout=timeout, group_timeout=group_timeout)
    failures = [outcome for outcome in outcomes if outcome.killed or outcome.error is not None]
    if failures:
        told = "\n".join(f"--- rank {f.rank}: {f.error or 'killed'}" for f in failures)
        raise AssertionError(f"{len(failures)} of {world_size} ranks failed in {body.__name__}:\n{told}")
    return [outcome.result for outcome in outcomes]


def run_ranks_to_end(
    body: Body, world_size: int, *args: Any, timeout: float = 120.0, group_timeout: float = 60.0
) -> list[Outcome]:
    """As `run_ranks`, for tests in which ranks are meant to fail: returns how each one ended."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            work = (sender, body, rank, world_size, folder, group_timeout, args)
            process = _CONTEXT.Process(target=_run_rank, args=work, daemon=True)
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


def _collect(pipes: list[Connection], timeout: float, name: str) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout
    waiting = dict(enumerate(pipes))
    while waiting:
        ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            told = "\n".join(f"--- rank {o.rank}: {o.error}" for o in outcomes.values() if o.error)
            raise AssertionError(f"ranks {sorted(waiting)} of {name} did not end within {timeout} s\n{told}")
        for rank, pipe in list(waiting.items()):
            if pipe in ready:
                try:
                    outcomes[rank] = pipe.recv()
                except EOFError:
                    outcomes[rank] = Outcome(rank, killed=True)
                del waiting[rank]
    return [outcomes[rank] for rank in sorted(outcomes)]


def _run_rank(
    pipe: Connection, body: Body, rank: int, world_size: int, folder: str, group_timeout: float, args: tuple[Any, ...]
) -> None:
    warnings.simplefilter("error")
    gc.freeze()  # what the server has imported need not be looked at again by the garbage collector
    torch.set_num_threads(1)
    torch.manual_seed(1234 + rank)
    try:
        dist.init_process_group(
            "gloo",
            init_method=(Path(folder) / "rendezvous").as_uri(),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout),
        )
        outcome = Outcome(rank, result=body(Setup(rank, world_size, torch.device("cpu")), *args))
        with contextlib.suppress(RuntimeError):  # wait for ranks that still talk; some tests have lost one
            dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        outcome = Outcome(rank, error=traceback.format_exc())
    pipe.send(outcome)


def kill_this_process() -> None:
    """Die as a rank does that the kernel kills: at once, without cleaning up."""
    os.kill(os.getpid(), signal.SIGKILL)
