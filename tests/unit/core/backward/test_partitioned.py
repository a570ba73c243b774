"""Stage 2 in a job of one process: what ``param.grad`` shows, and what the buckets need."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from ddp_zero import ZeroRedundancyOptimizer, estimate, shard_optimizer
from ddp_zero.core.backward.forward_passes import ForwardPasses
from ddp_zero.core.backward.gradients import Gradients
from ddp_zero.core.backward.owned_sums import ReduceOptions
from ddp_zero.core.backward.partitioned import PartitionedGradients, gradients_of_stage
from ddp_zero.core.backward.scratch_buffers import SideStream
from ddp_zero.core.backward.visible_gradients import SummedGradients
from ddp_zero.core.local.placeholders import AbsentGradient
from ddp_zero.core.plan.buckets import SCRATCHES
from ddp_zero.optimizer import engine_of, shard_of
from tests.internals import free_buffers, pools_of


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(number: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(number))


def partitioned(**options: Any) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    """Stage 2 with a bucket for about each parameter."""
    ddp = DistributedDataParallel(model(), gradient_as_bucket_view=True, bucket_cap_mb=1e-4)
    return ddp, cast(ZeroRedundancyOptimizer, shard_optimizer(ddp, SGD, stage=2, lr=0.1, **options))


def backward(ddp: nn.Module, number: int) -> None:
    ddp(batch(number)).square().sum().backward()


def grads(ddp: nn.Module) -> list[Tensor | None]:
    return [param.grad for param in ddp.parameters()]


def assert_equal(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.usefixtures("job")
def test_gradients_of_owned_parameters_are_shown_where_a_step_follows() -> None:
    ddp, _ = partitioned(overlap=False)
    plain = model()
    for number in range(3):
        for one in (ddp, plain):
            one.zero_grad()
            backward(one, number)
        assert_equal(grads(ddp), grads(plain))


@pytest.mark.usefixtures("job")
def test_a_step_inside_backward_leaves_placeholders_that_refuse_a_further_pass() -> None:
    ddp, opt = partitioned(overlap=True)
    backward(ddp, 0)
    opt.step()
    opt.zero_grad()
    before = [param.detach().clone() for param in ddp.parameters()]
    backward(ddp, 1)
    assert all(isinstance(grad, AbsentGradient) and grad.consumed for grad in grads(ddp))
    assert not any(map(torch.equal, before, ddp.parameters()))
    opt.step()
    with pytest.raises(RuntimeError, match=r"\[ZERO-403\]"):
        backward(ddp, 2)


@pytest.mark.usefixtures("job")
def test_sums_are_carried_over_passes_in_any_number() -> None:
    ddp, opt = partitioned(overlap=False)
    for passes in (2, 1, 3):
        opt.zero_grad()
        total = [torch.zeros_like(param) for param in ddp.parameters()]
        for number in range(passes):
            if number < passes - 1:
                with opt.accumulate():
                    backward(ddp, number)
            else:
                backward(ddp, number)
            plain = model()
            backward(plain, number)
            # DDP's order: the sum so far comes second
            total = [cast(Tensor, grad) + earlier for earlier, grad in zip(total, grads(plain), strict=True)]
            assert_equal(grads(ddp), total)


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("overlap", [True, False])
def test_two_scratches_serve_any_number_of_buckets_and_come_back(overlap: bool) -> None:
    layers = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(8)])
    ddp = DistributedDataParallel(layers, gradient_as_bucket_view=True, bucket_cap_mb=1e-3)
    opt = shard_optimizer(ddp, SGD, stage=2, lr=0.1, overlap=overlap)
    hook = engine_of(opt).hook
    assert hook is not None
    ends: list[tuple[int, int]] = []
    for _ in range(4):
        ddp(torch.ones(2, 32)).sum().backward()
        opt.step()
        opt.zero_grad()
        ends.append(hook.gradients.buffer_bytes())
    buckets = shard_of(opt).plan.buckets
    assert len(buckets) >= 4
    largest = 4 * max(bucket.segments[0].numel for bucket in buckets)
    assert all(held <= SCRATCHES * largest for held, _ in ends[1:])
    assert len(set(ends[1:])) == 1, "no buffer is lost from iteration to iteration"
    assert "at most 2 scratch buffers" in hook.gradients.describe()[0]


@pytest.mark.usefixtures("job")
def test_buffers_are_as_estimated_where_a_second_iteration_needs_another() -> None:
    widths = [32, 8, 16, 4, 16, 12]  # reduced from the last layer on: 768, 256, 256, 512 and 1,024 bytes
    layers = nn.Sequential(*[nn.Linear(*pair, bias=False) for pair in pairwise(widths)])
    estimated = estimate(layers, SGD, ranks=1, stage=2, partition="parameters", bucket_cap_mb=1e-6)
    ddp = DistributedDataParallel(layers, bucket_cap_mb=1e-6)
    opt = shard_optimizer(ddp, SGD, stage=2, lr=0.1)
    for _ in range(4):
        ddp(torch.ones(2, 32)).sum().backward()
        opt.step()
        opt.zero_grad()
    hook = engine_of(opt).hook
    assert hook is not None
    _, most = hook.gradients.buffer_bytes()
    assert estimated["stage 2, inside backward"].device["buckets"] == most == 2048


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(("num_layers", "rests"), [(8, 2), (3, 0)])
def test_pages_of_idle_buffers_go_unless_they_are_large_beside_the_model(
    num_layers: int, rests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(num_layers)])
    ddp = DistributedDataParallel(layers, bucket_cap_mb=1e-3)
    opt = shard_optimizer(ddp, SGD, stage=2, lr=0.1, overlap=False)
    ended: list[bool] = []
    for pool in pools_of(opt):
        monkeypatch.setattr(pool, "rest", lambda: ended.append(True))
    ddp(torch.ones(2, 32)).sum().backward()
    assert len(ended) == rests


@pytest.mark.usefixtures("job")
def test_a_reset_leaves_buffers_to_peers_that_may_still_read_them() -> None:
    ddp, opt = partitioned(overlap=False)
    backward(ddp, 0)
    before = [buffer for pool in pools_of(opt) for buffer in free_buffers(pool)]
    assert before
    opt.reset()
    opt.zero_grad()
    backward(ddp, 1)
    after = [buffer for pool in pools_of(opt) for buffer in free_buffers(pool)]
    assert not any(one is other for one in before for other in after)


@pytest.mark.usefixtures("job")
def test_a_pass_that_is_not_reduced_is_refused_on_top_of_an_average_and_added_by_a_new_iteration() -> None:
    ddp, opt = partitioned(overlap=False)
    backward(ddp, 0)
    with ddp.no_sync(), pytest.raises(RuntimeError, match=r"\[ZERO-405\]"):
        backward(ddp, 1)
    opt.reset()
    opt.zero_grad()
    with ddp.no_sync():
        backward(ddp, 1)
    backward(ddp, 2)
    plain = model()
    backward(plain, 1)
    backward(plain, 2)
    assert_equal(grads(ddp), grads(plain))


@pytest.mark.usefixtures("job")
def test_a_penalty_outside_of_ddp_is_added_to_the_averages_and_refuses_a_further_pass() -> None:
    ddp, opt = partitioned(overlap=False)
    backward(ddp, 0)
    averages = [cast(Tensor, grad).clone() for grad in grads(ddp)]
    torch.stack([param.sum() for param in ddp.module.parameters()]).sum().backward()
    assert_equal(grads(ddp), [average + 1 for average in averages])
    with pytest.raises(RuntimeError, match=r"\[ZERO-404\]"):
        backward(ddp, 1)
    opt.reset()


@pytest.mark.usefixtures("job")
def test_a_new_hook_leaves_no_gradient_of_the_old_one() -> None:
    ddp, opt = partitioned(overlap=False)
    backward(ddp, 0)
    hook = engine_of(opt).hook
    assert hook is not None
    hook.gradients.detach()
    assert grads(ddp) == [None] * 6


# Which gradients a stage has


def never() -> bool:
    return False


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("options", "sums_in_fp32", "kind"),
    [
        (None, False, Gradients),
        (None, True, SummedGradients),
        (ReduceOptions(), False, PartitionedGradients),
        (ReduceOptions(), True, PartitionedGradients),
    ],
)
def test_a_stage_has_gradients_of_its_own(options: ReduceOptions | None, sums_in_fp32: bool, kind: type) -> None:
    ddp = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    sharded = shard_of(ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1))
    passes = ForwardPasses(lambda _: None)
    found = gradients_of_stage(options, sharded, ddp, None, SideStream(), passes, never, sums_in_fp32)
    assert type(found) is kind


@pytest.mark.usefixtures("job")
def test_stage_2_wraps_no_communication_hook() -> None:
    ddp = DistributedDataParallel(model())
    sharded = shard_of(ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1))
    with pytest.raises(ValueError, match=r"cannot wrap a communication hook.*\[ZERO-211\]"):
        gradients_of_stage(
            ReduceOptions(), sharded, ddp, cast(Any, print), SideStream(), ForwardPasses(lambda _: None), never, False
        )
