"""The reducer in the place of DDP's, in a job of one process: what it reduces, when, and what it refuses.

A model is compared with a plain model. `Watched` notes each bucket that the hook gets.
"""

import gc
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
from torch.utils.checkpoint import checkpoint

from ddp_zero import ZeroRedundancyOptimizer, hook_with_zero_step, shard_optimizer
from ddp_zero.core.backward import planned_bucket
from ddp_zero.core.backward.planned_bucket import SMALL_BYTES
from ddp_zero.core.backward.planned_reducer import PlannedReducer
from ddp_zero.core.backward.reducer import (
    bucket_memory,
    count_reduced,
    in_buckets,
    is_finalized,
    reduce_zeros,
    reduced_parameters,
    reducer_of,
)
from ddp_zero.optimizer import engine_of
from tests.internals import hook_of

pytestmark = pytest.mark.usefixtures("job")


class Layers(nn.Module):
    """Three layers without biases, applied in this order."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.order = order
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def weight(self, place: int) -> Tensor:
        layer = self.layers[place]
        assert isinstance(layer, nn.Linear)
        return layer.weight

    def forward(self, x: Tensor) -> Tensor:
        for place in self.order:
            x = self.layers[place](x).tanh()
        return x


class SharedInCheckpoints(nn.Module):
    """A layer whose gradient accumulates twice in a pass, and one that no pass uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.shared, self.unused = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = cast(Tensor, checkpoint(self.shared, x, use_reentrant=True))
        return x


class Watched:
    """Stage 2 with a bucket for each layer, whose hook notes what it gets.

    Attributes:
        seen: the names of the parameters of each bucket.
        places: its index, and whether it is the last.
        kinds: whose bucket it is.
        sums: of its elements.
    """

    def __init__(self, module: nn.Module, owned: Sequence[Tensor] | None = None, **options: Any) -> None:
        self.ddp = DistributedDataParallel(module, bucket_cap_mb=1e-5, **options)
        params = self.ddp.parameters() if owned is None else owned
        self.opt = ZeroRedundancyOptimizer(params, SGD, lr=0.1, stage=2)
        self._names: dict[Tensor, str] = {param: name for name, param in module.named_parameters()}
        self.seen, self.places, self.kinds = list[list[str]](), list[tuple[int, bool]](), list[type]()
        self.sums = list[float]()
        self.hook = hook_with_zero_step(None, self.ddp, self.opt)
        self.ddp.register_comm_hook(None, self.on_bucket)

    def on_bucket(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        self.seen.append([self._names[param] for param in bucket.parameters()])
        self.places.append((bucket.index(), bucket.is_last()))
        self.kinds.append(type(bucket))
        self.sums.append(bucket.buffer().sum().item())
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
        self.places.clear()
        self.sums.clear()


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


def test_an_evaluation_prepares_nothing() -> None:
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


def test_a_second_backward_over_the_same_forward_is_not_reduced() -> None:
    watched, plain = Watched(Layers(0, 1, 2)), Layers(0, 1, 2)
    for module in (watched.ddp, plain):
        loss = module(batch(0)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert watched.seen == name(2, 1, 0), "of the first"
    assert_equal(grads(watched.ddp), grads(plain))


def test_a_forward_pass_without_backward_is_of_no_consequence() -> None:
    watched, plain = Watched(Layers(0, 1, 2)), Layers(0, 1, 2)
    watched.ddp(batch(0))
    assert watched.planned.is_prepared
    assert not watched.planned.has_begun
    watched.backward(1)
    backward(plain, 1)
    assert watched.seen == name(2, 1, 0)
    assert_equal(grads(watched.ddp), grads(plain))


# `torch.autograd.grad`, which accumulates nothing


OPTIONS: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("wants_params", [False, True])
def test_a_gradient_penalty_is_part_of_the_pass_that_follows(options: dict[str, Any], wants_params: bool) -> None:
    watched, plain = Watched(Layers(0, 1, 2), **options), Layers(0, 1, 2)
    for number in range(3):
        for module in (watched.ddp, plain):
            module.zero_grad()
            x = batch(number)
            out = module(x)
            wanted = list(module.parameters()) if wants_params else [x]
            penalty = torch.autograd.grad(out.sum(), wanted, create_graph=True)
            assert grads(module) == [None] * 3
            torch.stack([out.square().sum(), *(grad.square().sum() for grad in penalty)]).sum().backward()
        assert watched.seen == name(2, 1, 0)
        assert_equal(grads(watched.ddp), grads(plain))
        watched.step()
        with torch.no_grad():
            for own, other in zip(plain.parameters(), watched.ddp.parameters(), strict=True):
                own.copy_(other)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_that_are_only_asked_for_begin_no_reduction(options: dict[str, Any]) -> None:
    watched, plain = Watched(Layers(0, 1, 2), **options), Layers(0, 1, 2)
    torch.autograd.grad(watched.ddp(batch(0)).sum(), list(watched.ddp.parameters()))
    assert not watched.planned.has_begun
    watched.backward(1)
    backward(plain, 1)
    assert watched.seen == name(2, 1, 0)
    assert_equal(grads(watched.ddp), grads(plain))


# Passes that leave out gradients


class MayStop(Layers):
    """Leaves out its last layer, on request."""

    leaves_out = True

    def forward(self, x: Tensor) -> Tensor:
        for place in self.order[: len(self.order) - self.leaves_out]:
            x = self.layers[place](x).tanh()
        return x


def test_a_pass_that_leaves_out_a_gradient_shows_the_others_again() -> None:
    watched, plain = Watched(MayStop(0, 1, 2)), MayStop(0, 1, 2)
    watched.backward(0)
    backward(plain, 0)
    assert watched.seen == []
    assert watched.planned.has_begun
    assert watched.planned.landed() == {param for param in watched.ddp.parameters() if param.grad is not None}
    assert_equal(grads(watched.ddp), grads(plain))


def test_the_forward_pass_after_it_is_refused_and_names_a_parameter() -> None:
    watched = Watched(MayStop(0, 1, 2))
    watched.backward(0)
    assert not is_finalized(watched.ddp)
    with pytest.raises(RuntimeError, match=r"all 3 .*got 2, and none of 'layers\.2\.weight' \(rank 0.*\[ZERO-301\]"):
        watched.ddp.forward(batch(1))  # not through the checks of the library, which come first


def test_the_rest_of_its_gradients_may_come_in_a_further_pass() -> None:
    watched, plain = Watched(MayStop(0, 1, 2)), MayStop(0, 1, 2)
    watched.backward(0)
    backward(plain, 0)
    for module in (watched.ddp.module, plain):
        module.weight(2).sum().backward()
    assert watched.seen == name(2, 1, 0)
    assert is_finalized(watched.ddp)
    assert_equal(grads(watched.ddp), grads(plain))


def test_a_reset_drops_it() -> None:
    watched, plain = Watched(MayStop(0, 1, 2)), MayStop(0, 1, 2)
    watched.backward(0)
    watched.opt.reset()
    watched.opt.zero_grad()
    assert is_finalized(watched.ddp)
    for module in (watched.ddp.module, plain):
        module.leaves_out = False
    watched.backward(1)
    backward(plain, 1)
    assert watched.seen == name(2, 1, 0)
    assert_equal(grads(watched.ddp), grads(plain))


def test_a_pass_that_an_exception_has_interrupted_is_known() -> None:
    watched = Watched(Layers(0, 1, 2))

    def interrupt(_: Tensor) -> None:
        raise ValueError("interrupted")

    next(iter(watched.ddp.parameters())).register_hook(interrupt)
    with pytest.raises(ValueError, match="interrupted"):
        watched.backward(0)
    assert not is_finalized(watched.ddp)
    with pytest.raises(RuntimeError, match=r"got 2, and none of 'layers\.0\.weight'.*\[ZERO-301\]"):
        watched.ddp.forward(batch(1))


def test_a_gradient_that_accumulates_twice_is_refused() -> None:
    watched = Watched(SharedInCheckpoints())
    with pytest.raises(RuntimeError, match=r"one gradient of 'shared\.weight' in a backward pass.*\[ZERO-301\]"):
        watched.backward(0)


# Unused parameters, and graphs that do not change


def test_a_static_graph_learns_how_often_each_gradient_accumulates() -> None:
    watched, plain = Watched(SharedInCheckpoints(), static_graph=True), SharedInCheckpoints()
    seen: list[int] = []
    watched.ddp.module.first.weight.register_post_accumulate_grad_hook(lambda _: seen.append(len(watched.seen)))
    for number in range(3):
        plain.zero_grad()
        watched.backward(number)
        backward(plain, number)
        used = [["shared.weight"], ["first.weight"]]
        assert watched.seen == ([*used, ["unused.weight"]] if number == 2 else [["unused.weight"], *used])
        assert not watched.planned.is_learning
        assert_equal(grads(watched.ddp), grads(plain))
        watched.step()
        with torch.no_grad():
            for own, other in zip(plain.parameters(), watched.ddp.parameters(), strict=True):
                own.copy_(other)
    assert seen == [0, 2, 1], "at the end of the first pass, and in each bucket's time after"


def test_a_static_graph_may_begin_with_a_pass_in_no_sync() -> None:
    watched, plain = Watched(SharedInCheckpoints(), static_graph=True), SharedInCheckpoints()
    with watched.ddp.no_sync():
        watched.backward(0)
    assert watched.seen == []
    watched.backward(1)
    for number in range(2):
        backward(plain, number)
    assert len(watched.seen) == 3
    assert_equal(grads(watched.ddp), grads(plain))


# Parameters that the optimizer does not have


def test_the_average_of_another_parameter_that_no_rank_has_used_is_not_shown() -> None:
    module = MayStop(0, 1, 2)
    watched = Watched(module, owned=[module.weight(1)], find_unused_parameters=True)
    watched.backward(0)
    assert [grad is None for grad in grads(module)] == [False, False, True]


# The place of DDP's reducer


@pytest.mark.parametrize("as_views", [True, False])
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_ddps_reducer_goes_with_its_memory_and_another_comes(as_views: bool, options: dict[str, Any]) -> None:
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


def test_a_parameter_that_was_frozen_since_is_in_the_new_reducer() -> None:
    module = Layers(0, 1, 2)
    module.weight(2).requires_grad_(False)
    ddp = DistributedDataParallel(module)
    opt = shard_optimizer(ddp, SGD, [module.weight(0), module.weight(1)], stage=2, overlap=False, lr=0.1)
    module.weight(1).requires_grad_(False)
    module.weight(2).requires_grad_(True)
    opt.detach()
    assert count_reduced(ddp) == 2
    assert not module.weight(1).requires_grad
    assert [name for name, _ in in_buckets(ddp)] == ["layers.0.weight", "layers.1.weight"]


def test_a_reducer_that_is_kept_is_given_back_and_its_memory_stays() -> None:
    module, plain = Layers(0, 1, 2), Layers(0, 1, 2)
    backward(module, 0)
    backward(plain, 0)
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=True)
    own, views = reducer_of(ddp), grads(module)
    opt = shard_optimizer(ddp, SGD, stage=2, overlap=False, lr=0.1)
    assert_equal(views, grads(plain))
    assert_equal(grads(ddp), grads(plain))
    assert not any(one is other for one, other in zip(views, grads(ddp), strict=True)), "copied out"
    own.prepare_for_backward([])
    backward(module, 1)
    backward(plain, 1)
    assert_equal(grads(ddp), grads(plain))
    ddp.zero_grad()
    opt.detach()
    assert reducer_of(ddp) is own


def test_gradients_in_the_memory_of_ddps_buckets_survive() -> None:
    ddp, plain = DistributedDataParallel(Layers(0, 1, 2), gradient_as_bucket_view=True), Layers(0, 1, 2)
    for module in (ddp, plain):
        backward(module, 0)
    opt = shard_optimizer(ddp, SGD, stage=2, overlap=False, lr=0.1)
    assert all(grad is not None and grad.untyped_storage().nbytes() for grad in grads(ddp))
    assert_equal(grads(ddp), grads(plain))
    for module in (ddp, plain):
        backward(module, 1)
    assert_equal(grads(ddp), grads(plain))
    opt.step()


def test_a_forward_pass_before_it_takes_its_place_leaves_ddps_reducer_at_rest() -> None:
    ddp, plain = DistributedDataParallel(Layers(0, 1, 2)), Layers(0, 1, 2)
    ddp(batch(0))
    opt = shard_optimizer(ddp, SGD, stage=2, overlap=False, lr=0.1)
    for module in (ddp, plain):
        backward(module, 1)
    assert_equal(grads(ddp), grads(plain))
    opt.step()


def test_what_it_does_not_have_is_asked_of_ddps_reducer() -> None:
    watched = Watched(Layers(0, 1, 2))
    watched.backward(0)
    stands_in = reducer_of(watched.ddp)
    assert not hasattr(PlannedReducer, "get_backward_stats")
    assert not hasattr(stands_in, "no_such_method")
    assert [name for name in dir(Reducer) if not (name.startswith("__") or hasattr(stands_in, name))] == []
    watched.ddp._set_ddp_runtime_logging_sample_rate(7)


def test_a_forward_pass_alone_leaves_no_cycle() -> None:
    ddp = DistributedDataParallel(Layers(0, 1, 2))
    opt = shard_optimizer(ddp, SGD, stage=2, overlap=False, lr=0.1)
    backward(ddp, 0)
    opt.step()
    ddp(batch(1))
    references = [weakref.ref(one) for one in (ddp, opt, planned_of(ddp), engine_of(opt).hook)]
    gc.collect()
    gc.disable()
    try:
        del ddp, opt
        assert [reference() for reference in references] == [None] * 4
    finally:
        gc.enable()


# A bucket of DDP's own reducer


def test_other_parameters_are_taken_over_too() -> None:
    module, plain = Layers(0, 1, 2), Layers(0, 1, 2)
    watched = Watched(module, owned=[module.weight(1)])
    watched.ddp.forward(batch(0)).square().sum().backward()
    backward(plain, 0)
    assert_equal(grads(watched.ddp), grads(plain))


# A rank that has joined


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_a_joined_rank_takes_part_in_every_bucket_with_zeros(options: dict[str, Any]) -> None:
    module = Layers(0, 1, 2)
    watched = Watched(module, owned=[module.weight(0), module.weight(1)], **options)
    watched.backward(0)
    watched.step()
    module.zero_grad()
    reduce_zeros(watched.ddp)
    assert watched.seen == name(1, 0)
    assert watched.places == [(0, False), (1, True)]
    assert watched.sums == [0, 0]
    assert not watched.planned.is_prepared
    assert grads(module) == [None] * 3


# Several optimizers


def test_reducers_of_two_optimizers_follow_one_another_and_go_one_by_one() -> None:
    plain, ddp = Layers(0, 1, 2), DistributedDataParallel(Layers(0, 1, 2), bucket_cap_mb=1e-5)
    params = list(ddp.parameters())
    opts = [shard_optimizer(ddp, SGD, some, stage=2, lr=0.1, overlap=False) for some in (params[1:], params[:1])]
    first, second = reducer_of(ddp).planned
    for number, is_first_there in enumerate((True, True, False)):
        if not is_first_there:
            hook_of(opts.pop(0)).detach()
            assert reducer_of(ddp).planned == [second]
        ddp.zero_grad()
        plain.zero_grad()
        backward(ddp, number)
        backward(plain, number)
        assert_equal(grads(ddp), grads(plain))
    assert not first.is_installed
    hook_of(opts.pop()).detach()
    assert isinstance(reducer_of(ddp), Reducer)
    assert all(storage.nbytes() for storage in bucket_memory(ddp))


def test_a_bucket_that_waits_for_other_ranks_holds_up_no_other_model() -> None:
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
