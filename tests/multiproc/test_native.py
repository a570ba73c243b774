"""The collectives that NCCL has natively, run on Gloo: equal segments by padding, where that adds at most an eighth."""

import copy
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_zero import wrap
from ddp_zero.core.comm import communicator, exchange
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.engine import partition_choice
from tests import internals
from tests.multiproc.cases import (
    assert_overlapped,
    at_stage,
    batches,
    build_overlapped_twins,
    loss_of,
    optimizer_case,
    step_on,
)
from tests.multiproc.cut_models import CAP, CUT, large_model
from tests.multiproc.harness import Cases, Setup

case = Cases()


@contextmanager
def as_on_nccl() -> Iterator[dict[str, int]]:
    """Communicators that believe in NCCL; yields how often each collective was called meanwhile."""
    counts = {"gather": 0, "scatter": 0, "broadcast": 0, "average": 0}
    built = Communicator.__init__

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    def bind_reduce_scatter(group: Any, mine: Tensor, whole: Tensor, averages: bool = False) -> Callable[[], Any]:
        scatter = exchange_scatter_of(group, mine, whole)

        def issue() -> Any:
            if averages:  # which Gloo does not have: as NCCL does
                counts["average"] += 1
                whole.mul_(1.0 / dist.get_world_size())
            return scatter()

        return counting("scatter", issue)

    def build(comm: Communicator, *args: Any, **options: Any) -> None:
        built(comm, *args, **options)
        internals.take_for_backend(comm, "nccl")

    exchange_scatter_of, bind_all_gather, bind_broadcast = (
        exchange.bind_reduce_scatter,
        exchange.bind_all_gather,
        exchange.bind_broadcast,
    )
    issuers: dict[str, Any] = {
        "bind_all_gather": lambda *args: counting("gather", bind_all_gather(*args)),
        "bind_reduce_scatter": bind_reduce_scatter,
        "bind_broadcast": lambda *args: counting("broadcast", bind_broadcast(*args)),
    }
    with (
        mock.patch.object(Communicator, "__init__", build),
        mock.patch.multiple(exchange, **issuers),
        mock.patch.multiple(communicator, **issuers),
    ):
        yield counts


@contextmanager
def as_if_large() -> Iterator[None]:
    """Models and buckets of any size are taken for large models."""
    with mock.patch.object(communicator, "RING_BYTES", 0), mock.patch.object(partition_choice, "RING_BYTES", 0):
        yield


def _segments(sizes: list[int], rank: int) -> list[Tensor]:
    return [torch.full((size,), float(10 * owner + rank)) for owner, size in enumerate(sizes)]


@case(2, 3)
def _segments_of_similar_size_are_padded(setup: Setup) -> None:
    sizes, ranks = [101, 97, 100][: setup.world_size], range(setup.world_size)
    with as_on_nccl() as counts:
        comm = Communicator(None)
        mine = _segments(sizes, setup.rank)
        comm.start_all_gather(mine, (0,)).wait("the test")
        for owner, segment in enumerate(mine):
            assert torch.equal(segment, torch.full((sizes[owner],), 11.0 * owner))
        assert comm.trace.totals["sent"] == 4 * 101 * (setup.world_size - 1)
        whole = torch.cat(_segments(sizes, setup.rank))
        recv_buffer = torch.empty(comm.reduce_scatter_recv_numel(whole.device, sizes))
        start, total = comm.prepare_reduce_scatter(whole, whole.split(sizes), recv_buffer)
        start().wait("the test")
        assert torch.equal(total, torch.full((sizes[setup.rank],), float(sum(10 * setup.rank + r for r in ranks))))
        assert comm.trace.totals["sent"] == 2 * 4 * 101 * (setup.world_size - 1)
    assert counts == {"gather": 1, "scatter": 1, "broadcast": 0, "average": 0}


@case(2, 3)
def _equal_segments_that_adjoin_are_moved_in_place(setup: Setup) -> None:
    with as_on_nccl() as counts:
        comm, sizes = Communicator(None), [64] * setup.world_size
        memory = torch.cat(_segments(sizes, setup.rank))
        mine = list(memory.split(64))
        comm.start_all_gather(mine, (0,)).wait("the test")
        assert memory.tolist() == [11.0 * owner for owner in range(setup.world_size) for _ in range(64)]
        whole = torch.cat(_segments(sizes, setup.rank))
        parts = list(whole.split(64))
        assert comm.reduce_scatter_recv_numel(whole.device, sizes) == 0
        assert comm.can_average(parts) is (setup.world_size == 2)
        start, total = comm.prepare_reduce_scatter(whole, parts, whole.new_empty(0), average=comm.can_average(parts))
        start().wait("the test")
        assert total.data_ptr() == parts[setup.rank].data_ptr()
        expected = float(sum(10 * setup.rank + rank for rank in range(setup.world_size)))
        assert total.tolist() == [expected / (2 if setup.world_size == 2 else 1)] * 64
    assert counts == {"gather": 1, "scatter": 1, "broadcast": 0, "average": int(setup.world_size == 2)}


@case(2)
def _segments_that_differ_much_are_broadcast(setup: Setup) -> None:
    with as_on_nccl() as counts:
        mine = _segments([100, 10], setup.rank)
        Communicator(None).start_all_gather(mine, (0,)).wait("the test")
        assert [float(segment[0]) for segment in mine] == [0.0, 11.0]
    assert counts == {"gather": 0, "scatter": 0, "broadcast": 2, "average": 0}


@case(2)
def _training_with_collectives_of_equal_parts_equals_ddp(setup: Setup) -> None:
    with as_on_nccl() as counts:
        for place, one in enumerate((optimizer_case("AdamW fused"), optimizer_case("SGD momentum"))):
            with at_stage(1 + place):
                twins = build_overlapped_twins(one, model=large_model(), bucket_cap_mb=CAP, zero_options=CUT)
            twins.train(setup, 4)
            twins.assert_moved()
            assert_overlapped(twins.opt)
    assert counts["gather"] > counts["broadcast"]
    assert counts["scatter"] > 0


@case(2, 4)
def _by_default_parameters_are_cut_where_the_backend_and_size_allow(setup: Setup) -> None:
    """By default: equal parts on NCCL, around rings and in a direct exchange, unless tiny; the numbers of DDP."""
    expected = {"nccl": "elements", "gloo": "elements", "gloo, tiny": "parameters"}
    modes: list[dict[str, Any]] = [{}, {"stage": 2}, {"stage": 2, "max_grad_norm": 0.1}]
    for backend, options in product(expected, modes):
        kept = "parameters" if "max_grad_norm" in options else expected[backend]
        model = large_model()
        plain = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True, bucket_cap_mb=CAP)
        reference = AdamW(plain.parameters(), lr=1e-2)
        with as_on_nccl() if backend == "nccl" else as_if_large() if backend == "gloo" else nullcontext():
            ddp, opt = wrap(model, AdamW, ddp={"bucket_cap_mb": CAP}, lr=1e-2, **options)
            assert f'partition="auto" is "{kept}" here: ' in opt.explain()
            comm = internals.communicator_of(opt)
            assert internals.cuts_parameters(opt) is (kept == "elements")
            assert (comm.gathering_group is not comm.process_group) is (backend == "nccl")
            for inputs, targets in batches(setup.rank, 5):
                for one, optimizer in ((plain, reference), (ddp, opt)):
                    loss_of(one, inputs, targets).backward()
                    if "max_grad_norm" in options and one is plain:
                        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
            same = 0.0 if setup.world_size == 2 else 1e-5  # at four ranks sums have another order
            for one, other in zip(plain.module.parameters(), ddp.module.parameters(), strict=True):
                torch.testing.assert_close(other, one, rtol=same, atol=same)


class _Copies(TorchDispatchMode):
    """Counts what copies memory, where it is called by this library.

    Not how Gloo does what NCCL does in place, nor the copy of each gradient into its bucket, which DDP makes as well.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("copy_", "cat", "clone", "_foreach_copy_", "_to_copy"):
            frames = [f"{frame.name} in {frame.filename}" for frame in traceback.extract_stack()]
            ours = [frame for frame in frames if "/ddp_zero/" in frame]
            by_gloo = ours and re.match(r"(wait|wait_in_background) in .*exchange\.py$", ours[-1])
            fills = ours and re.match(r"(copy_in|copy_rest) in .*planned_bucket\.py$", ours[-1])
            self.found += [f"{name}: {ours[-1]}"] if ours and not (by_gloo or fills) else []
        return func(*args, **(kwargs or {}))


@case(2)
def _a_bucket_is_one_collective_each_way_and_no_copy(setup: Setup) -> None:
    modes: list[dict[str, Any]] = [{}, {"interleaved": False}, {"sync": "forward"}]
    with as_on_nccl() as counts:
        for options in modes:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 96), nn.Tanh(), nn.Linear(96, 3))
            ddp, opt = wrap(model, AdamW, ddp={"bucket_cap_mb": CAP}, stage=2, lr=1e-2, foreach=True, **options)
            for number, (inputs, targets) in enumerate(batches(setup.rank, 6)):
                buckets, before, copies = internals.plan_of(opt).buckets, dict(counts), _Copies()
                with copies if number == 5 else nullcontext():
                    step_on(opt, loss_of(ddp, inputs, targets))
            opt.finish_sync()
            assert len(buckets) > 1
            assert all(bucket.is_even for bucket in buckets)
            moved = [counts[name] - before[name] for name in ("scatter", "average", "gather")]
            assert moved == [len(buckets)] * 3
            assert copies.found == [], f"{options}: {copies.found}"


test_native = case.each()
