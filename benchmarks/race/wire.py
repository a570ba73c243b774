"""What `benchmarks.wire` runs on every rank: sums and gathers of one bucket, and nothing else."""

import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ddp_zero.comm import communicator
from ddp_zero.comm.communicator import Communicator
from ddp_zero.comm.reduction import SegmentReduction, room_numel

Exchange = Callable[[Communicator, torch.Tensor], None]
NEVER = 1 << 62


def all_reduce(comm: Communicator, whole: torch.Tensor) -> None:
    """Gloo's own, which DDP uses: as many bytes as a sum to the owners and a gather."""
    dist.all_reduce(whole)


def sum_and_gather(comm: Communicator, whole: torch.Tensor) -> None:
    """Stage 2's reduction and sync of a bucket with equal segments."""
    comm.round += 1
    parts = list(whole.tensor_split(comm.world_size))
    room = whole.new_empty(room_numel(comm, parts, whole.numel()))
    SegmentReduction(comm, whole, parts, parts[comm.group_rank], room, (0, 0), whole.numel()).wait()
    comm.start_exchange(parts, (0, 1)).wait("the gather")


def directly(comm: Communicator, whole: torch.Tensor) -> None:
    """From each rank to each."""
    with mock.patch.object(communicator, "RING_BYTES", NEVER):
        sum_and_gather(comm, whole)


def around_rings(comm: Communicator, whole: torch.Tensor) -> None:
    """Around rings, whatever the size."""
    with mock.patch.multiple(communicator, RING_BYTES=0, RING_RANKS=2):
        sum_and_gather(comm, whole)


WAYS: Mapping[str, Exchange] = {"all-reduce": all_reduce, "direct": directly, "ring": around_rings}


def measure_wire(job: Mapping[str, Any]) -> dict[str, list[list[float]]]:
    """Seconds of each round until the slowest rank is done, by way and size.

    Args:
        job: ``sizes`` in bytes, ``rounds``, and how many bytes each turn moves at least.
    """
    comm = Communicator(None)
    found: dict[str, list[list[float]]] = {name: [[] for _ in job["sizes"]] for name in WAYS}
    for round_number in range(job["rounds"] + 1):
        for place, nbytes in enumerate(job["sizes"]):
            whole = torch.zeros(nbytes // 4)
            repeats = max(1, job["turn_bytes"] // nbytes)
            for name, exchange in WAYS.items():
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(repeats):
                    exchange(comm, whole)
                dist.barrier()
                if round_number:  # the first one builds connections
                    found[name][place].append((time.perf_counter() - begin) / repeats)
    return found
