"""The reducer in the place of DDP's, in a job of one process: what it reduces, when, and what it refuses.

A model is compared with a plain model. `Watched` notes each bucket that the hook gets.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import GradBucket, Reducer  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from ddp_zero import ZeroRedundancyOptimizer, hook_with_zero_step, shard_optimizer
from ddp_zero.core.backward import planned_bucket
from ddp_zero.core.backward.planned_bucket import SMALL_BYTES
from ddp_zero.core.backward.planned_reducer import PlannedReducer
from ddp_zero.core.ddp.reducer import bucket_memory, in_buckets, reduced_parameters, reducer_of

pytestmark = pytest.mark.usefixtures("job")


class Layers(nn.Module):
    """Three layers without biases, applied in this order."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.order = order
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for place in self.order:
            x = self.layers[place](x).tanh()
        return x


class Watched:
    """Stage 2 with a bucket for each layer, whose hook notes what it gets.

    Attributes:
        seen: the names of the parameters of each bucket.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        self.ddp = DistributedDataParallel(module, bucket_cap_mb=1e-5, **options)
        self.opt = ZeroRedundancyOptimizer(self.ddp.parameters(), SGD, lr=0.1, stage=2)
        self._names: dict[Tensor, str] = {param: name for name, param in module.named_parameters()}
        self.seen = list[list[str]]()
        self.hook = hook_with_zero_step(None, self.ddp, self.opt)
        self.ddp.register_comm_hook(None, self.on_bucket)

    def on_bucket(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        self.seen.append([self._names[param] for param in bucket.parameters()])
        return self.hook(state, bucket)

    @property
    def planned(self) -> PlannedReducer:
        return planned_of(self.ddp)

    def backward(self, number: int) -> None:
        backward(self.ddp, number)

    def step(self) -> None:
        self.opt.step()
        self.opt.zero_grad()
        self.seen.clear()


def planned_of(ddp: DistributedDataParallel) -> PlannedReducer:
    (planned,) = reducer_of(ddp).planned
    assert isinstance(planned, PlannedReducer)
    return planned


def batch(number: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(number), requires_grad=True)


def backward(module: nn.Module, number: int) -> None:
    module(batch(number)).square().sum().backward()


def grads(module: nn.Module) -> list[Tensor | None]:
    return [param.grad for param in module.parameters()]


def assert_equal(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert [one is None for one in found] == [one is None for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one is None or torch.equal(one, cast(Tensor, other))


def name(*places: int) -> list[list[str]]:
    """The buckets of these layers."""
    return [[f"layers.{place}.weight"] for place in places]


# Buckets


def test_a_full_bucket_waits_for_those_before_it() -> None:
    watched = Watched(Layers(2, 1, 0))  # the last bucket of the plan is full first
    seen: list[int] = []
    for param in watched.ddp.parameters():
        param.register_post_accumulate_grad_hook(lambda _: seen.append(len(watched.seen)))
    watched.backward(0)
    assert seen == [0, 0, 0]
    watched.step()
    seen.clear()
    watched.backward(1)
    assert seen == [0, 1, 2], "the plan follows the order of the first pass"
    assert watched.seen == name(0, 1, 2)


def test_the_launch_order_is_that_in_which_buckets_became_full(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(Layers(0, 1, 2))
    watched.backward(0)
    assert watched.planned.launch_order() == [0, 1, 2]
    other = Watched(Layers(2, 1, 0))
    other.ddp(batch(0))
    orders: list[list[int] | None] = []
    ask = other.planned.launch_order

    def note() -> list[int] | None:
        orders.append(ask())
        return orders[-1]

    monkeypatch.setattr(other.planned, "launch_order", note)
    other.backward(0)
    assert orders == [[2, 1, 0]]
    monkeypatch.undo()
    assert other.planned.launch_order() is None, "of buckets in a new order nothing is known yet"
    other.step()
    other.backward(1)
    assert other.planned.launch_order() == [0, 1, 2]


def test_the_launch_order_stays_where_ranks_may_use_different_parameters() -> None:
    watched = Watched(Layers(2, 1, 0), find_unused_parameters=True)
    watched.backward(0)
    assert watched.planned.launch_order() == [0, 1, 2]
    watched.step()
    watched.backward(1)
    assert watched.seen == name(2, 1, 0)


# Small gradients and large ones


class Sized(nn.Module):
    """One bucket with a small gradient, a large one, and a small one that arrives first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        rows = SMALL_BYTES // 16
        self.first, self.large, self.last = (
            nn.Linear(4, 4, bias=False),
            nn.Linear(4, rows, bias=False),
            nn.Linear(rows, 1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(self.large(self.first(x)).tanh()))


def test_large_gradients_leave_at_once_and_small_ones_together() -> None:
    module, plain = Sized(), Sized()
    ddp = DistributedDataParallel(module)
    opt = shard_optimizer(ddp, SGD, stage=2, overlap=False, lr=0.1)
    found: list[tuple[bool, bool]] = []

    def note(_: Tensor) -> None:
        found.append((module.last.weight.grad is None, module.large.weight.grad is None))

    module.first.weight.register_post_accumulate_grad_hook(note)
    backward(ddp, 0)
    backward(plain, 0)
    assert found == [(False, True)]
    assert_equal(grads(module), grads(plain))
    opt.step()


@pytest.mark.parametrize("limit", [0, 64, 1 << 40])
def test_gradients_have_the_same_values_however_they_are_copied(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_bucket, "SMALL_BYTES", limit)
    ddp, plain = DistributedDataParallel(Sized()), Sized()
    opt = shard_optimizer(ddp, SGD, stage=2, overlap=False, lr=0.1)
    for number in range(2):
        with opt.accumulate():
            backward(ddp, number)
        backward(plain, number)
    assert_equal(grads(ddp), grads(plain))


# Passes that are reduced, and others


def test_a_forward_pass_in_evaluation_leaves_the_reducer_unprepared() -> None:
    watched = Watched(Layers(0, 1, 2))
    watched.backward(0)
    watched.step()
    watched.ddp.eval()
    with torch.no_grad():
        watched.ddp(batch(1))
    assert not watched.planned.is_prepared
    watched.ddp.train()
    watched.backward(2)
    assert watched.seen == name(2, 1, 0)


# The place of DDP's reducer


@pytest.mark.parametrize("as_views", [True, False])
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_install_frees_ddps_reducer_and_detach_builds_another(as_views: bool, options: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(Layers(0, 1, 2), gradient_as_bucket_view=as_views, **options)
    plain, own = Layers(0, 1, 2), weakref.ref(reducer_of(ddp))
    opt = shard_optimizer(ddp, SGD, stage=2, overlap=False, lr=0.1)
    planned = planned_of(ddp)
    assert planned.is_installed
    assert own() is None
    stand_in = reducer_of(ddp)
    planned.install()
    assert reducer_of(ddp) is stand_in, "its place is taken once"
    backward(ddp, 0)
    ddp.zero_grad()
    opt.detach()
    assert not planned.is_installed
    assert isinstance(reducer_of(ddp), Reducer)
    assert sum(storage.nbytes() for storage in bucket_memory(ddp)) == 3 * 64
    planned.remove()
    with pytest.raises(RuntimeError, match=r"prepare_for_backward\(\).* that of an earlier one.*ZERO-301"):
        stand_in.prepare_for_backward([])
    for number in range(3):
        ddp.zero_grad()
        plain.zero_grad()
        backward(ddp, number)
        backward(plain, number)
        assert_equal(grads(ddp), grads(plain))
    assert in_buckets(ddp) == reduced_parameters(ddp)


def test_methods_that_it_lacks_are_those_of_ddps_reducer() -> None:
    watched = Watched(Layers(0, 1, 2))
    watched.backward(0)
    stands_in = reducer_of(watched.ddp)
    assert not hasattr(PlannedReducer, "get_backward_stats")
    assert not hasattr(stands_in, "no_such_method")
    assert [name for name in dir(Reducer) if not (name.startswith("__") or hasattr(stands_in, name))] == []
    watched.ddp._set_ddp_runtime_logging_sample_rate(7)


# Several optimizers


def test_a_waiting_bucket_does_not_block_another_model() -> None:
    first, second = Watched(Layers(0, 1, 2)), Watched(Layers(0, 1, 2))
    waits, goes_on, hook = threading.Event(), threading.Event(), first.hook

    def wait(state: Any, bucket: GradBucket) -> Future[Tensor]:
        waits.set()
        assert goes_on.wait(20)
        return hook(state, bucket)

    first.hook = wait
    threads = [threading.Thread(target=one.backward, args=(0,), daemon=True) for one in (first, second)]
    threads[0].start()
    assert waits.wait(20)
    threads[1].start()
    threads[1].join(20)
    assert second.seen == name(2, 1, 0)
    assert first.seen == name(2)
    goes_on.set()
    threads[0].join(20)
    assert first.seen == name(2, 1, 0)
