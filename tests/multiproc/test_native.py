"""The collectives that NCCL has natively, run on Gloo: equal segments by padding, where that adds at most an eighth."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_zero.core.comm import exchange
from ddp_zero.core.comm.communicator import Communicator
from tests.multiproc.cases import assert_overlapped, at_stage, build_overlapped_twins, optimizer_case
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.test_elements import CAP, CUT, large_model

case = Cases()


@contextmanager
def as_on_nccl() -> Iterator[dict[str, int]]:
    """Communicators that believe in NCCL; yields how often each collective was called meanwhile."""
    counts = {"gather": 0, "scatter": 0, "broadcast": 0}
    built = Communicator.__init__

    def build(comm: Communicator, *args: Any, **options: Any) -> None:
        built(comm, *args, **options)
        comm._backends = {"cpu": "nccl"}

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    with (
        mock.patch.object(Communicator, "__init__", build),
        mock.patch.object(exchange, "all_gather_native", counting("gather", exchange.all_gather_native)),
        mock.patch.object(exchange, "reduce_scatter_native", counting("scatter", exchange.reduce_scatter_native)),
        mock.patch.object(dist, "broadcast", counting("broadcast", dist.broadcast)),
    ):
        yield counts


def _segments(sizes: list[int], rank: int) -> list[Tensor]:
    return [torch.full((size,), float(10 * owner + rank)) for owner, size in enumerate(sizes)]


@case(2, 3)
def _segments_of_similar_size_are_padded(setup: Setup) -> None:
    sizes, ranks = [101, 97, 100][: setup.world_size], range(setup.world_size)
    with as_on_nccl() as counts:
        comm = Communicator(None)
        mine = _segments(sizes, setup.rank)
        comm.start_exchange(mine, (0,)).wait("the test")
        for owner, segment in enumerate(mine):
            assert torch.equal(segment, torch.full((sizes[owner],), 11.0 * owner))
        assert comm.sent_bytes == 4 * 101 * (setup.world_size - 1)
        whole = torch.cat(_segments(sizes, setup.rank))
        room = torch.empty(comm.sum_room_numel(whole.device, sizes))
        found, total = comm.start_sum(whole, whole.split(sizes), room)
        found.wait("the test")
        assert torch.equal(total, torch.full((sizes[setup.rank],), float(sum(10 * setup.rank + r for r in ranks))))
        assert comm.sent_bytes == 2 * 4 * 101 * (setup.world_size - 1)
    assert counts == {"gather": 1, "scatter": 1, "broadcast": 0}


@case(2)
def _segments_that_differ_much_are_broadcast(setup: Setup) -> None:
    with as_on_nccl() as counts:
        mine = _segments([100, 10], setup.rank)
        Communicator(None).start_exchange(mine, (0,)).wait("the test")
        assert [float(segment[0]) for segment in mine] == [0.0, 11.0]
    assert counts == {"gather": 0, "scatter": 0, "broadcast": 2}


@case(2)
def _training_has_the_same_numbers(setup: Setup) -> None:
    with as_on_nccl() as counts:
        for place, one in enumerate((optimizer_case("AdamW fused"), optimizer_case("SGD momentum"))):
            with at_stage(1 + place):
                twins = build_overlapped_twins(one, model=large_model(), bucket_cap_mb=CAP, zero_options=CUT)
            twins.train(setup, 4)
            twins.assert_moved()
            assert_overlapped(twins.opt)
    assert counts["gather"] > counts["broadcast"]
    assert counts["scatter"] > 0


@case.each
def test_native(run: Callable[[], None]) -> None:
    run()
