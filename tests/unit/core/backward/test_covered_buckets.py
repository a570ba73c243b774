"""Stage 1 where DDP's buckets are not the plan's, in a job of one process with the real reducer.

Models are chains of layers of 256 bytes, two to a bucket. A layer is written by its place in the model: the plan's
buckets are ``[[3, 2], [1, 0]]``, whatever the order in which the layers run.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from ddp_zero import StepRegime, shard_optimizer
from ddp_zero.core.step.rank_shard import LocalBucket
from ddp_zero.core.step.runner import StepRunner
from ddp_zero.optimizer import engine_of, shard_of

CAP_MB = 512 / (1 << 20)
AS_REGISTERED = [0, 1, 2, 3]
BACKWARDS = [3, 2, 1, 0]
MIXED = [1, 3, 0, 2]
"""The gradients of layers 2 and 0 come first: each of DDP's final buckets has a half of either of the plan's."""


class Chain(nn.Module):
    """Layers that run in another order than they were registered in."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.order = order
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for place in self.order:
            x = self.layers[place](x).tanh()
        return x


class Run:
    """A sharded model beside a plain model, and what arrives and is stepped in each pass.

    Attributes:
        arrived: DDP's buckets in the last pass, as places of layers.
        complete: the plan's buckets that were complete with each.
        stepped: the plan's buckets in the order in which they were stepped, as places of layers, sorted.
    """

    def __init__(self, order: Sequence[int], **options: Any) -> None:
        model, plain = Chain(order), Chain(order)
        self.plain = plain
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=CAP_MB, **options)
        self.params = list(model.parameters())
        self.opt = shard_optimizer(self.ddp, SGD, interleaved=True, lr=0.1, momentum=0.9)
        self.plain_opt = SGD(plain.parameters(), lr=0.1, momentum=0.9)
        self.arrived: list[list[int]] = []
        self.complete: list[list[list[int]]] = []
        self.stepped: list[list[int]] = []
        engine = engine_of(self.opt)
        assert engine.attachment.hook is not None
        self.hook = engine.attachment.hook
        source: Any = self.hook.gradients.source
        self._start, self._step = source.start, StepRunner.step_bucket
        mock.patch.object(source, "start", self.start).start()
        mock.patch.object(StepRunner, "step_bucket", self.step_bucket).start()

    def start(self, state: Any, bucket: Any, index: int) -> tuple[Future[Any], Sequence[int]]:
        assert index == len(self.arrived)
        future, complete = self._start(state, bucket, index)
        self.arrived.append(self.places(bucket.parameters()))
        self.complete.append([self.places(self.hook.gradients.buckets[place].params) for place in complete])
        return future, complete

    def step_bucket(self, runner: StepRunner, own: LocalBucket, source: Any) -> None:
        table, (segment,) = shard_of(self.opt).table, own.bucket.segments
        self.stepped.append(self.places([table.params[one] for one in segment.params]))
        self._step(runner, own, source)

    def places(self, params: Sequence[Tensor]) -> list[int]:
        return [next(place for place, one in enumerate(self.params) if one is param) for param in params]

    def layout(self) -> list[list[int]]:
        shard = shard_of(self.opt)
        return [self.places([shard.table.params[index] for index in bucket]) for bucket in shard.binding.layout or ()]

    def iterate(self, number: int) -> None:
        """An iteration of both models, which end with the same bits."""
        self.arrived, self.complete, self.stepped = [], [], []
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(number))
        both: tuple[tuple[nn.Module, Optimizer], ...] = ((self.ddp, self.opt), (self.plain, self.plain_opt))
        for model, optimizer in both:
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(map(torch.equal, self.params, self.plain.parameters()))

    def regime(self) -> StepRegime:
        record = self.opt.last_step
        assert record is not None
        assert record.stepped
        return record.regime


@pytest.fixture(autouse=True)
def patches() -> Iterator[None]:
    yield
    mock.patch.stopall()


@pytest.mark.usefixtures("job")
def test_a_bucket_out_of_turn_is_refused_before_anything_is_stepped() -> None:
    run = Run(AS_REGISTERED)
    for number in range(2):
        run.iterate(number)
    before = [param.detach().clone() for param in run.params]
    run.stepped.clear()
    with (
        mock.patch.object(run.hook.gradients.source, "place_of", return_value=(1, False)),
        pytest.raises(RuntimeError, match=r"Expected bucket 0 next, got bucket 1 \(rank 0 .*\[ZERO-308\]"),
    ):
        run.ddp(torch.ones(5, 8)).sum().backward()
    assert not run.stepped
    assert all(map(torch.equal, run.params, before))


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize(
    ("order", "arrived", "complete", "layout"),
    [
        (AS_REGISTERED, [[3, 2], [1, 0]], [[[3, 2]], [[1, 0]]], [[3, 2], [1, 0]]),
        (BACKWARDS, [[0, 1], [2, 3]], [[[0, 1]], [[2, 3]]], [[1, 0], [3, 2]]),
        (MIXED, [[2, 0], [3, 1]], [[], [[3, 2], [1, 0]]], [[3, 2], [1, 0]]),
    ],
    ids=["as registered", "backwards", "mixed"],
)
def test_the_plan_is_followed_from_the_first_pass_on(
    order: list[int], arrived: list[list[int]], complete: list[list[list[int]]], layout: list[list[int]], as_views: bool
) -> None:
    run = Run(order, gradient_as_bucket_view=as_views)
    assert run.layout() == [[3, 2], [1, 0]]
    run.iterate(0)
    assert [sorted(bucket) for bucket in run.arrived] == [AS_REGISTERED], "DDP's first bucket has all"
    assert run.complete == [[[3, 2], [1, 0]]]
    assert run.regime() is StepRegime.DEFERRED
    for number in range(1, 5):
        before = run.layout()
        run.iterate(number)
        assert run.arrived == arrived
        assert run.stepped == [sorted(bucket) for bucket in before]
        assert run.regime() is StepRegime.OVERLAPPED
    assert run.layout() == layout, "once, in the order in which they become complete"
    assert [[sorted(one) for one in found] for found in run.complete] == [
        [sorted(one) for one in found] for found in complete
    ]
