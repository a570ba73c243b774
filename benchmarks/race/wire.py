"""The program of every rank of `benchmarks.wire`: sums and gathers of one bucket, and nothing else."""

import time
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ddp_zero.core.comm import communicator
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.reduction import recv_numel, segment_reduction

Exchange = Callable[[Communicator, torch.Tensor], None]
NEVER = 1 << 62


def all_reduce(comm: Communicator, whole: torch.Tensor) -> None:
    """Gloo's own, which DDP uses: as many bytes as a sum to the owners and a gather."""
    dist.all_reduce(whole)


def sum_and_gather(comm: Communicator, whole: torch.Tensor, spread: float = 0.0) -> None:
    """Stage 2's reduction and sync of a bucket, in segments that differ from their mean by up to a part of it."""
    comm.round += 1
    last, mean = comm.world_size - 1, whole.numel() / comm.world_size
    places = sorted(range(comm.world_size), key=lambda rank: (rank * 5) % comm.world_size)  # large ones among small
    ends = accumulate(mean * (1 + spread * (2 * place / last - 1)) for place in places)
    parts = list(whole.tensor_split([round(end) for end in ends][:-1]))
    recv_buffer = _receive_buffer(comm, parts)
    segment_reduction(comm, whole, parts, recv_buffer, (0, 0), whole.numel()).start(parts[comm.group_rank]).wait(
        "a reduction"
    )
    comm.start_all_gather(parts, (0, 1)).wait("the gather")


def _receive_buffer(comm: Communicator, parts: list[torch.Tensor]) -> torch.Tensor:
    sizes = [part.numel() for part in parts]
    return parts[0].new_empty(recv_numel(comm, sizes, parts[0].dtype, parts[0].device))


def directly(comm: Communicator, whole: torch.Tensor) -> None:
    """From each rank to each."""
    with mock.patch.object(communicator, "RING_BYTES", NEVER):
        sum_and_gather(comm, whole)


def around_rings(comm: Communicator, whole: torch.Tensor) -> None:
    """Around rings, whatever the size."""
    with mock.patch.multiple(communicator, RING_BYTES=0, RING_RANKS=2):
        sum_and_gather(comm, whole)


def around_uneven_rings(comm: Communicator, whole: torch.Tensor) -> None:
    """As `around_rings`, with segments as whole parameters make them."""
    with mock.patch.multiple(communicator, RING_BYTES=0, RING_RANKS=2):
        sum_and_gather(comm, whole, spread=0.25)


def sum_of_bf16_directly(comm: Communicator, whole: torch.Tensor) -> None:
    """A sum alone, of as many elements in half the bytes; owners add them up in fp32."""
    comm.round += 1
    parts = list(whole.bfloat16().tensor_split(comm.world_size))
    out = whole.new_empty(parts[comm.group_rank].numel())
    recv_buffer = _receive_buffer(comm, parts)
    segment_reduction(comm, torch.cat(parts), parts, recv_buffer, (0, 0), whole.numel()).start(out).wait("a reduction")


def sum_around_rings(comm: Communicator, whole: torch.Tensor) -> None:
    """A sum alone, in fp32: how partial sums of bf16 gradients would have to travel around a ring."""
    comm.round += 1
    with mock.patch.multiple(communicator, RING_BYTES=0, RING_RANKS=2):
        parts = list(whole.tensor_split(comm.world_size))
        recv_buffer = _receive_buffer(comm, parts)
        segment_reduction(comm, whole, parts, recv_buffer, (0, 0), whole.numel()).start(parts[comm.group_rank]).wait(
            "a reduction"
        )


WAYS: Mapping[str, Exchange] = {
    "all-reduce": all_reduce,
    "direct": directly,
    "ring": around_rings,
    "ring, segments of 0.75 to 1.25": around_uneven_rings,
    "sum of bf16, direct": sum_of_bf16_directly,
    "sum in fp32, ring": sum_around_rings,
}


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
