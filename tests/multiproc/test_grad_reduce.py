"""The reduce-scatter of unequal slices: any sizes, dtypes, buffers, always the documented order of a sum, bitwise."""

import random
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_zero.core.comm import exchange
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.exchange import InFlight
from ddp_zero.core.comm.reduction import name_of_reduction, recv_numel, segment_reduction, sum_dtype
from tests import internals
from tests.multiproc.cases import gathered
from tests.multiproc.harness import Setup, run_ranks
from tests.multiproc.rings import rings_for_all


def _expected(mine: Tensor, first: int = 0) -> Tensor:
    """The sum over ranks in rank order, beginning with ``first`` and going around."""
    parts = gathered(mine)
    parts = [*parts[first:], *parts[:first]]
    total = parts[0].to(sum_dtype(mine.dtype))
    for part in parts[1:]:
        total = total + part
    return total


def _random_reductions(setup: Setup) -> int:
    comm = Communicator(None)
    everywhere = random.Random(0)
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
    for trial in range(40):
        sizes = [everywhere.choice([0, 0, 1, 3, 50, 1000]) for _ in range(setup.world_size)]
        numel, dtype = sum(sizes), everywhere.choice(dtypes)
        chunk = everywhere.choice([512, 4 << 20])
        whole = torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(100 * trial + setup.rank))
        expected = _expected(whole)
        parts = list(whole.split(sizes))
        start = sum(sizes[: setup.rank])
        own = parts[setup.rank]
        out = own if sum_dtype(dtype) == dtype else torch.empty(own.numel(), dtype=sum_dtype(dtype))
        needed = recv_numel(comm, sizes, dtype, whole.device)
        assert needed <= max(numel, setup.world_size - 1), "never more than the bucket"
        with mock.patch.object(exchange, "CHUNK_BYTES", chunk):
            recv_buffer = torch.empty(needed, dtype=dtype)
            prepared = segment_reduction(comm, whole, parts, recv_buffer, (7, trial), numel)
            reduction = prepared.start(out)
            reduction.wait("a reduction")
        assert torch.equal(out, expected[start : start + sizes[setup.rank]]), f"trial {trial}: {sizes} {dtype}"
        reduction.wait("a reduction")
        assert torch.equal(out, expected[start : start + sizes[setup.rank]]), "asked twice"
        of_other_memory = weakref.ref(out)
        is_in_place = out is own
        del out, reduction
        assert is_in_place or of_other_memory() is None, f"{type(prepared).__name__} keeps other memory"
    return 40


def _random_rings(setup: Setup) -> int:
    """Sums of which some are not waited for at once, between gathers."""
    comm = Communicator(None)
    everywhere = random.Random(1)
    pending: list[tuple[InFlight, Tensor, Tensor]] = []
    for trial in range(40):
        sizes = [everywhere.choice([0, 0, 1, 3, 50, 3000]) for _ in range(setup.world_size)]
        numel, dtype = sum(sizes), everywhere.choice([torch.float32, torch.float64, torch.complex64])
        factor = everywhere.choice([1.0, 0.3])
        whole = torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(100 * trial + setup.rank))
        expected = _expected(whole * factor, first=(setup.rank + 1) % setup.world_size).split(sizes)[setup.rank]
        parts = list(whole.split(sizes))
        out = everywhere.choice([parts[setup.rank], torch.empty(sizes[setup.rank], dtype=dtype)])
        with rings_for_all():
            recv_buffer = torch.empty(recv_numel(comm, sizes, dtype, whole.device), dtype=dtype)
            before = comm.trace.totals["sent"]
            started = segment_reduction(comm, whole, parts, recv_buffer, (7, trial), numel, factor).start(out)
            pending.append((started, out, expected))
            sent = comm.trace.totals["sent"] - before
            assert sent == (numel - sizes[setup.rank]) * dtype.itemsize, "all but this rank's own"
            segments = [torch.full((size,), rank if rank == setup.rank else -1) for rank, size in enumerate(sizes)]
            gather = comm.start_all_gather(segments, (8, trial))
        if everywhere.random() < 0.5:
            gather.wait("a gather")
            assert all(bool((segment == rank).all()) for rank, segment in enumerate(segments)), f"{trial}: {sizes}"
            while pending:
                reduction, place, total = pending.pop()
                for _ in range(2):
                    reduction.wait("a reduction")
                    assert torch.equal(place, total), f"trial {trial}: {sizes} {dtype}"
    return 40


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_random_rings_sum_in_ring_order_and_gather(world_size: int) -> None:
    assert run_ranks(_random_rings, world_size) == [40] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_random_reductions_sum_in_rank_order(world_size: int) -> None:
    assert run_ranks(_random_reductions, world_size) == [40] * world_size


def _without_direct_messages(setup: Setup) -> None:
    comm = Communicator(None)
    internals.take_for_backend(comm, "another backend")
    whole = torch.arange(10.0) * (setup.rank + 1)
    parts = list(whole.split([3, 7]))
    expected = (torch.arange(10.0) * 3).split([3, 7])[setup.rank]
    out = parts[setup.rank].clone()
    reduction = segment_reduction(comm, whole, parts, whole.new_empty(0), (1, 1), 10)
    for _ in range(2):
        whole.copy_(torch.arange(10.0) * (setup.rank + 1))
        reduction.start(out).wait("a reduction")
        assert torch.equal(out, expected)


def test_collectives_in_place_of_direct_messages_give_equal_sums() -> None:
    run_ranks(_without_direct_messages, 2)


def _ranks_that_disagree(setup: Setup) -> None:
    """Another bucket matches no message: an error when the group's time-out passes, never the wrong bytes."""
    comm = Communicator(None)
    whole = torch.ones(8)
    parts = list(whole.split(4))
    reduction = segment_reduction(comm, whole, parts, torch.empty(4), (1, setup.rank), 8).start(parts[setup.rank])
    for _ in range(2):  # never the segment as it was, however often it is asked for
        with pytest.raises(RuntimeError, match=rf"Expected rank {1 - setup.rank} .*reduction of bucket {setup.rank}"):
            reduction.wait(name_of_reduction(setup.rank))


def test_ranks_that_disagree_about_the_bucket_are_refused() -> None:
    run_ranks(_ranks_that_disagree, 2, group_timeout=3)


class _Stop(Exception):
    pass


def _stop(*_: Any) -> None:
    raise _Stop


@contextmanager
def _another_backend(comm: Communicator) -> Iterator[None]:
    with internals.taken_for_backend(comm, "another backend"):
        yield


ROUTES: dict[str, tuple[Callable[[Communicator], AbstractContextManager[Any]], int]] = {
    "direct": (lambda _: nullcontext(), 5000),
    "direct, in windows": (lambda _: nullcontext(), 700),
    "ring": (lambda _: rings_for_all(), 5000),
    "backend": (_another_backend, 5000),
}
"""Routes of a sum, and elements that are received at a time."""


def _interrupted_waits(setup: Setup) -> list[str]:
    """The other rank is late; a signal interrupts the wait for it, as Ctrl-C does. Returns the interrupted routes."""
    signal.signal(signal.SIGALRM, _stop)
    comm, interrupted = Communicator(None), []
    for place, (route, (patched, limit)) in enumerate(ROUTES.items()):
        whole = torch.randn(10_000, generator=torch.Generator().manual_seed(setup.rank))
        sizes = [5000, 5000]
        expected = _expected(whole).split(sizes)[setup.rank]
        parts = list(whole.split(sizes))
        out = torch.empty(5000)
        with patched(comm):
            recv_buffer = torch.empty(recv_numel(comm, sizes, whole.dtype, whole.device, limit))
            if setup.rank == 1:
                time.sleep(0.6)
            summed = segment_reduction(comm, whole, parts, recv_buffer, (9, place), limit).start(out)
            if setup.rank == 0:
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                try:
                    summed.wait("a reduction")
                except _Stop:
                    interrupted.append(route)
            for _ in range(2):
                summed.wait("a reduction")
                assert torch.equal(out, expected), route
        dist.barrier()
    return interrupted


def test_a_wait_that_a_signal_has_interrupted_can_be_repeated() -> None:
    assert run_ranks(_interrupted_waits, 2, group_timeout=30) == [list(ROUTES), []]


def _interrupted_sum(setup: Setup) -> None:
    comm = Communicator(None)
    whole = torch.ones(10)
    parts = list(whole.split(5))
    with mock.patch("ddp_zero.core.comm.reduction.sum_in_order", return_value=[_stop]):
        summed = segment_reduction(comm, whole, parts, torch.empty(5), (9, 0), 10).start(torch.empty(5))
    with pytest.raises(_Stop):
        summed.wait("a reduction")
    with pytest.raises(RuntimeError, match=r"interrupted .*bucket 0, which is not complete. Call opt.reset\(\)"):
        summed.wait("a reduction")


def test_a_sum_that_was_interrupted_halfway_is_refused() -> None:
    run_ranks(_interrupted_sum, 2)
