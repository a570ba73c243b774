"""A rank's process: it lives for many cases, and does what the parent says through a pipe."""

import faulthandler
import gc
import os
import signal
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.machines import choose
from tests.fuzz.before.case import BeforeCase
from tests.fuzz.before.run_case import run_before_case
from tests.fuzz.case import Case
from tests.fuzz.faults import run_until_a_rank_fails
from tests.fuzz.loops.case import LoopCase
from tests.fuzz.loops.run_case import run_loop_case
from tests.fuzz.mesh.case import MeshCase
from tests.fuzz.mesh.run_case import run_mesh_case
from tests.fuzz.mesh.side import forget_groups
from tests.fuzz.run_case import Report, run_case
from tests.fuzz.sides import Place


@dataclass(frozen=True)
class Group:
    """Order of the parent: leave the process group, if any, and join this one."""

    path: str
    timeout: float
    device: str = "cpu"


@dataclass(frozen=True)
class Run:
    """Order of the parent: run a case."""

    case: Case | BeforeCase | LoopCase | MeshCase
    folder: str
    injects: str | None


@dataclass(frozen=True)
class Verdict:
    """The parent has heard of all ranks: whether to go on."""

    goes_on: bool


@dataclass(frozen=True)
class Done:
    """A rank has ended what it was ordered to do."""


def serve(pipe: Connection, rank: int, world_size: int, log: str) -> None:
    """Carry out orders until the pipe is closed; what would go to stderr goes to a file, stacks at SIGUSR1 too."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported is not looked at after every case
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        _carry_out(order, pipe, rank, world_size)
        pipe.send(Done())


def backend_on(device: str, rank: int, ranks: int, folder: Path) -> str:
    """Let models be built on a device, and return the backend for their process groups."""
    if device == "cpu":
        return "gloo"
    job = {"device": device, "backend": "nccl", "ranks": ranks, "late": False}
    machine = choose(job, folder)
    torch.set_default_device(machine.choose(rank))
    return machine.backend


def _carry_out(order: Any, pipe: Connection, rank: int, world_size: int) -> None:
    if isinstance(order, Group):
        forget_groups()
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            backend_on(order.device, rank, world_size, Path(order.path).parent),
            init_method=Path(order.path).as_uri(),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=order.timeout),
        )
    elif isinstance(order, Run):

        def ask(report: Report) -> bool:
            pipe.send(report)
            verdict: Verdict = pipe.recv()
            return verdict.goes_on

        case = order.case
        place = Place(rank, world_size, order.folder, order.injects)
        if isinstance(case, MeshCase):
            run_mesh_case(case, place, ask)
        elif isinstance(case, BeforeCase):
            run_before_case(case, place, ask)
        elif isinstance(case, LoopCase):
            run_loop_case(case, place, ask)
        elif case.fault is not None:
            run_until_a_rank_fails(case, place, ask)
        else:
            run_case(case, place, ask)
