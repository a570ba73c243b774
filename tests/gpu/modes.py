"""The modes that are tried on GPUs."""

import os
import time
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.gpu.machines import delay_side_stream, share_gpus
from ddp_zero.core.comm.communicator import Communicator
from tests.accelerator import simulation
from tests.accelerator.modes import GROUPS, MODES, Mode, Report, run
from tests.multiproc.harness import Setup, run_ranks

GPUS = torch.cuda.device_count()
EXACT_RANKS = 2  # with more, NCCL adds in an order of its own in every kind of collective
ROUNDING = 2e-3
LIMIT = 1200.0


class Gpus:
    """What `run` asks of the simulated accelerator, as far as a GPU can tell."""

    def set_device(self, index: int) -> None:
        torch.cuda.set_device(index)

    def synchronize(self, _: int) -> None:
        torch.cuda.synchronize()

    def clear_reports(self) -> None:
        """There are none."""

    def races(self) -> list[str]:
        return []

    def faults(self) -> list[str]:
        return []

    def messages(self) -> list[tuple[str, str, str, int]]:
        return []

    def host_syncs(self) -> list[tuple[str, str]]:
        return []


def modes_of(ranks: int) -> list[Mode]:
    """Without offload, whose steps on the host round as the host does: test_offload.py."""
    default = MODES[0].backend
    alike = [mode for mode in MODES if mode.backend == default and "offload" not in mode.options]
    return [*alike, *([GROUPS] if ranks == 4 else [])]


def train(
    setup: Setup, backend: str, is_late: bool, names: Sequence[str], has_beside: bool, seconds: float
) -> dict[str, Report]:
    """Train in each of these modes; none is begun after so many seconds of this job."""
    started = time.monotonic()
    chosen = [mode for mode in modes_of(setup.world_size) if mode.name in names]
    machine: Any
    if backend == "simccl":
        os.environ["SIMULATED_DEVICE_FOLDER"] = str(setup.folder)
        machine, device = simulation.load(setup.world_size, is_late), torch.device("sim", setup.rank)
    else:
        share_gpus(setup.rank, setup.world_size)
        torch.use_deterministic_algorithms(True)
        machine, device = Gpus(), torch.device("cuda", setup.rank % GPUS)
        if is_late:
            delay_side_stream()
    # a script that trains on another stream than the one on which DDP was built, which keeps nodes of the graph
    warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
    reports = dict[str, Report]()
    with mock.patch.object(Communicator, "is_alone", property(lambda _: False, lambda *_: None), create=True):
        for mode in chosen:
            is_over = torch.tensor(time.monotonic() - started > seconds)
            dist.all_reduce(is_over, dist.ReduceOp.MAX)
            if is_over:
                break
            through = f"cpu:gloo,{device.type}:{backend}"
            reports[mode.name] = run(mode, setup, machine, device, through, has_beside and not mode.joins)
    return reports


def faults(
    backend: str, ranks: int, names: Sequence[str], has_beside: bool = False, seconds: float = LIMIT
) -> tuple[int, list[str]]:
    """How many modes there was time for, and what is wrong with them, on time and late."""
    on_time, late = (
        run_ranks(
            train, ranks, backend, is_late, names, has_beside, seconds / 2, timeout=seconds + 60, group_timeout=60.0
        )
        for is_late in (False, True)
    )
    allowed = 0.0 if ranks <= EXACT_RANKS or backend == "simccl" else ROUNDING
    found = []
    done = [name for name in on_time[0] if name in late[0]]
    for rank, name in ((rank, name) for rank in range(ranks) for name in done):
        first, second = on_time[rank][name], late[rank][name]
        place = f"{name}, {backend}, rank {rank} of {ranks}"
        if max(first.largest, second.largest) > allowed:
            found.append(f"{place}: differs by {first.largest:.2g}, late by {second.largest:.2g}")
        if first.digest != second.digest:
            found.append(f"{place}: other numbers when the side stream is late")
        if not (first.moved and second.moved):
            found.append(f"{place}: a parameter has not moved")
        for one in (first, second):
            found += [f"{place}: {fault}" for fault in (*one.races, *one.faults)]
            if one.beside is not None and not allowed:
                found += [f"{place}: not the plain side's {what}" for what in one.beside.wrong]
    return len(done), found
