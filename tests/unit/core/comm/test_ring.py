"""Ring transfers over links of this process, a thread per rank: the bits of a sum, gathers, errors, and order."""

import itertools
import queue
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ddp_zero.core.comm import ring
from ddp_zero.core.comm.ring import Neighbours, RingTransfer, RingWorker, ring_chunk, ring_recv_numel
from ddp_zero.core.plan.ring import sum_schedule
from tests import HANG

SIZES = [[40, 3, 17], [0, 64], [5, 0, 0, 9], [1, 1, 1, 1, 1]]


class Received:
    """A posted receive, whose bytes arrive when it is waited for."""

    def __init__(self, link: "queue.Queue[Tensor]", target: Tensor) -> None:
        self._link, self._target = link, target

    def wait(self, *_: timedelta) -> None:
        self._target.copy_(self._link.get(timeout=HANG))


def _neighbours(links: "list[queue.Queue[Tensor]]", rank: int) -> Neighbours:
    before, after = links[rank - 1], links[rank]

    def send(tensor: Tensor) -> Any:
        after.put(tensor.clone())
        return mock.Mock()

    return Neighbours(
        receive=lambda tensor: Received(before, tensor),  # type: ignore[arg-type, return-value]
        send=send,
        before=lambda: f"rank {(rank - 1) % len(links)}",
        after=lambda: f"rank {(rank + 1) % len(links)}",
        limit=timedelta(seconds=HANG),
    )


def _run(transfers: list[RingTransfer]) -> None:
    workers = [RingWorker(threads=1) for _ in transfers]
    for worker, transfer in zip(workers, transfers, strict=True):
        worker.start(transfer)
    for transfer in transfers:
        transfer.wait("a test")


def _segments(sizes: list[int], rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator) for size in sizes]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "LEAST_BYTES", 16)
    monkeypatch.setattr(ring, "MOST_BYTES", 64)


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_sum_has_the_bits_of_its_order(sizes: list[int], factor: float) -> None:
    ranks, chunk, numel = len(sizes), ring_chunk(sizes, 4), ring_recv_numel(sizes, 4)
    links = [queue.Queue[Tensor]() for _ in sizes]
    parts = [_segments(sizes, rank) for rank in range(ranks)]
    expected = []
    for owner in range(ranks):
        others = [parts[(owner + hop) % ranks][owner] * factor for hop in range(1, ranks + 1)]
        total = others[0]
        for part in others[1:]:
            total = part + total
        expected.append(total)
    _run(
        [
            RingTransfer(
                _neighbours(links, rank), sum_schedule(sizes, rank, chunk), parts[rank], torch.empty(numel), factor
            )
            for rank in range(ranks)
        ]
    )
    for owner in range(ranks):
        assert torch.equal(parts[owner][owner], expected[owner]), owner
    assert all(link.empty() for link in links)


class Job:
    """A job of a worker that notes that it ran, or how it failed."""

    def __init__(self, log: list[str], name: str, act: Callable[[], None] = lambda: None) -> None:
        self.log, self.name, self.act = log, name, act
        self.done: queue.Queue[None] = queue.Queue()

    def run(self) -> None:
        self.act()
        self.log.append(self.name)
        self.done.put(None)

    def fail(self, error: RuntimeError) -> None:
        self.log.append(f"{self.name}: {error}")
        self.done.put(None)


def test_threads_take_jobs_in_turn_and_in_order() -> None:
    log: list[str] = []
    worker = RingWorker(threads=2)
    gate = queue.Queue[None]()
    jobs = [Job(log, "a", lambda: gate.get(timeout=HANG)), *(Job(log, name) for name in "bcd")]
    for job in jobs:
        worker.start(job)
    for job in (jobs[1], jobs[3]):
        job.done.get(timeout=HANG)
    assert log == ["b", "d"], "of the second thread, while the first waits"
    gate.put(None)
    for job in (jobs[0], jobs[2]):
        job.done.get(timeout=HANG)
    assert log == ["b", "d", "a", "c"]
    for job in jobs:
        ring.unfinished.discard(job)


def test_a_chunk_is_a_quarter_of_the_largest_segment_within_its_limits() -> None:
    for sizes, itemsize in itertools.product(([40, 3], [1], [4000, 8]), (2, 4)):
        assert ring_chunk(sizes, itemsize) == max(16 // itemsize, min(64 // itemsize, -(-max(sizes) // 4)))
        assert ring_recv_numel(sizes, itemsize) == 8 * ring_chunk(sizes, itemsize)
