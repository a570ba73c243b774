"""The step inside backward in every situation that a plain loop knows, always equal to DDP with the plain optimizer."""

import copy
import itertools
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved, shard_optimizer
from tests.multiproc.cases import (
    Twins,
    assert_equal_models,
    assert_identical,
    assert_overlapped,
    at_stage,
    batches,
    build_model,
    build_overlapped_twins,
    loss_of,
)
from tests.multiproc.harness import Cases, Setup, run_ranks
from tests.multiproc.overlap_loops import ADAMW, BOTH, LOOPS, MOMENTUM
from tests.pairwise import pairwise

case = Cases(group_timeout=30)
for loop, sizes in LOOPS:
    case(*sizes)(loop)


# Hooks


def _own_hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """A reduction that leaves the bucket alone and returns a new tensor; it clips each bucket, too."""
    reduced = bucket.buffer().clone()
    future = dist.all_reduce(reduced, group=state, async_op=True).get_future()
    size = dist.get_world_size(state)
    result: torch.futures.Future[Tensor] = future.then(lambda done: (done.value()[0] / size).clamp(-0.01, 0.01))
    return result


HOOKS = [None, allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook, _own_hook]


@case(2, few=pairwise(HOOKS, BOTH, BOTH), every=[*product(HOOKS, BOTH, BOTH)])
def _a_wrapped_hook_equals_ddp_with_it(setup: Setup, configurations: list[tuple[Any, bool, bool]]) -> None:
    for wrapped, interleaved, bucket_view in configurations:
        twins = build_overlapped_twins(
            ADAMW, 2, wrapped=wrapped, interleaved=interleaved, gradient_as_bucket_view=bucket_view
        )
        twins.train(setup, 4)
        twins.assert_moved()
        assert_overlapped(twins.opt)


class MatrixProducts(torch.optim.Optimizer):
    """Multiplies gradients as matrices where they lie: last bits of a product depend on where a matrix begins."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    update = param.grad @ param.grad.T @ param.grad
                    param.sub_(update / update.norm(), alpha=group["lr"])


@case(2)
def _matrix_products_of_gradients_equal_those_under_ddp(setup: Setup) -> None:
    for stage, overlap, bucket_view in ((1, True, False), (1, True, True), (2, True, True), (2, False, True)):
        widths = (31, 3, 29, 3, 33, 1)  # of products of few rows last bits differ
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(*pair, bias=False) for pair in itertools.pairwise(widths)])
        shown = bucket_view and stage == 1  # then DDP's own gradients are those of its buckets
        plain = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=shown)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
        opt = shard_optimizer(ddp, MatrixProducts, stage=stage, overlap=overlap)
        reference = MatrixProducts(plain.parameters())
        twins = Twins(plain, ddp, reference, opt, loss=lambda model, inputs: model(inputs).square().sum())
        generator = torch.Generator().manual_seed(setup.rank)
        for step in range(4):
            twins.iterate(torch.randn(7, widths[0], generator=generator))
            twins.assert_equal(f"in step {step} of stage {stage}, {overlap=}, {bucket_view=}")
        twins.assert_moved()


@case(2)
def _power_sgd_equals_ddp_with_it(setup: Setup) -> None:
    def state() -> powerSGD_hook.PowerSGDState:
        return powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
        )

    twins = build_overlapped_twins(
        ADAMW, wrapped=powerSGD_hook.powerSGD_hook, states=(state(), state()), bucket_cap_mb=25
    )
    twins.train(setup, 4)
    twins.assert_moved()
    assert_overlapped(twins.opt)


# Loops


@case(2)
def _a_loop_without_opt_step_or_without_one_zero_grad_equals_ddp(setup: Setup) -> None:
    for set_to_none in BOTH:
        for bucket_view in BOTH:
            twins = build_overlapped_twins(MOMENTUM, gradient_as_bucket_view=bucket_view)
            for step, (inputs, targets) in enumerate(batches(setup.rank, 5)):
                for model, optimizer in twins.sides:
                    loss = loss_of(model, inputs, targets)
                    if step != 3:  # once, gradients of two steps add up, as with plain DDP
                        optimizer.zero_grad(set_to_none=set_to_none)
                    loss.backward()
                twins.plain.step()
                if step > 0:  # the first step is due before the next forward pass
                    twins.assert_equal(f"after step {step}")
                for one, other in zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True):
                    assert_identical(one.grad, other.grad, "gradient")
            twins.assert_moved()


# Models


@case(2)
def _two_optimizers_on_one_model_equal_two_plain_ones(setup: Setup) -> None:
    model = build_model()
    plain_ddp = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.0015)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0015)
    halves = [[list(one.parameters())[i::2] for i in (0, 1)] for one in (plain_ddp, ddp)]
    plain = [torch.optim.AdamW(halves[0][0], lr=0.01), torch.optim.SGD(halves[0][1], lr=0.1)]
    opts = [
        ZeroRedundancyOptimizer(halves[1][0], torch.optim.AdamW, overlap_with_ddp=True, lr=0.01),
        ZeroRedundancyOptimizer(halves[1][1], torch.optim.SGD, overlap_with_ddp=True, lr=0.1),
    ]
    inner = hook_with_zero_step_interleaved(allreduce_hook, ddp, opts[0], shard_buckets=True)
    ddp.register_comm_hook(None, hook_with_zero_step(inner, ddp, opts[1]))
    for inputs, targets in batches(setup.rank, 4):
        for one, optimizers in ((plain_ddp, plain), (ddp, opts)):
            loss_of(one, inputs, targets).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_equal_models(plain_ddp, ddp, "two optimizers")


# Changes while training


@case(2, 3)
def _added_groups_and_frozen_parameters_equal_ddp(setup: Setup) -> None:
    model = build_model()
    plain_ddp = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.0015, find_unused_parameters=True)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0015, find_unused_parameters=True)
    first, second = list(plain_ddp.parameters()), list(ddp.parameters())
    plain = torch.optim.AdamW(first[:4], lr=0.01)
    opt = ZeroRedundancyOptimizer(
        second[:4], torch.optim.AdamW, overlap_with_ddp=True, parameters_as_bucket_view=True, lr=0.01
    )
    ddp.register_comm_hook(None, hook_with_zero_step_interleaved(None, ddp, opt, True))
    twins = Twins(plain_ddp, ddp, plain, opt)
    twins.train(setup, 3)
    plain.add_param_group({"params": first[4:], "lr": 0.02})
    opt.add_param_group({"params": second[4:], "lr": 0.02})
    twins.train(setup, 3, seed=1)
    for params in (first, second):
        params[1].requires_grad_(False)
    twins.train(setup, 3, seed=2)
    for params in (first, second):
        params[1].requires_grad_(True)
    twins.train(setup, 3, seed=3)
    assert "overlapped" in opt.explain()
    twins.assert_moved()


@case(2, 3)
def _a_group_added_after_steps_inside_backward_equals_ddp(setup: Setup) -> None:
    for interleaved in BOTH:
        model = build_model()
        plain_ddp = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.0015)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0015)
        first, second = list(plain_ddp.parameters()), list(ddp.parameters())
        plain = torch.optim.AdamW(first[:4], lr=0.01)
        opt = ZeroRedundancyOptimizer(second[:4], torch.optim.AdamW, overlap_with_ddp=True, lr=0.01)
        build = hook_with_zero_step_interleaved if interleaved else hook_with_zero_step
        ddp.register_comm_hook(None, build(None, ddp, opt, True))
        twins = Twins(plain_ddp, ddp, plain, opt)
        twins.train(setup, 4)
        assert_overlapped(opt)
        outside = [nn.Parameter(torch.ones(5)) for _ in range(2)]
        plain.add_param_group({"params": [*first[4:], outside[0]], "lr": 0.02})
        opt.add_param_group({"params": [*second[4:], outside[1]], "lr": 0.02})
        for param in outside:
            param.grad = torch.full((5,), 0.5)
        for batch in batches(setup.rank, 4, seed=1):
            twins.backward(*batch)
            twins.both(lambda _, optimizer: optimizer.step())
            twins.both(lambda model, _: model.zero_grad())  # not the parameter outside
            twins.assert_equal("after adding a group")
            assert_identical(outside[0], outside[1], "a parameter that DDP does not know")
        assert "in none of DDP's buckets" in opt.explain()
        assert not torch.equal(outside[1], torch.ones(5))
        outside[1].requires_grad_(False).grad = None
        outside[0].requires_grad_(False).grad = None
        twins.train(setup, 2, seed=2)
        assert_overlapped(opt)
        twins.assert_moved()


# Join


# Misuse


@case(2)
def _hooks_that_are_missing_or_of_other_models_are_refused(setup: Setup) -> None:
    model = build_model()
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    ddp, stranger = DistributedDataParallel(model), DistributedDataParallel(build_model())
    with pytest.raises(RuntimeError, match="register_comm_hook"):
        opt.step()
    with pytest.raises(ValueError, match="none of the parameters of this DDP model"):
        hook_with_zero_step(allreduce_hook, stranger, opt)
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        hook_with_zero_step(allreduce_hook, model, opt)  # type: ignore[arg-type]
    standalone = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="overlap_with_ddp=True"):
        hook_with_zero_step(allreduce_hook, ddp, standalone)
    hook = hook_with_zero_step(allreduce_hook, ddp, opt)
    with pytest.raises(ValueError, match="one hook per optimizer"):
        hook_with_zero_step_interleaved(allreduce_hook, ddp, opt)
    ddp.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match="register"):
        ddp.register_comm_hook(None, hook)
    inputs, targets = next(batches(setup.rank, 1))
    loss_of(model, inputs, targets).backward()  # past DDP
    with pytest.raises(RuntimeError, match=r"no forward pass has gone through DDP.*\[ZERO-308\]$"):
        opt.step()
    with ddp.no_sync():
        loss_of(ddp, inputs, targets).backward()
    with pytest.raises(RuntimeError, match=r"outside ddp.no_sync"):
        opt.step()
    loss_of(ddp, inputs, targets).backward()
    opt.step()
    with pytest.raises(RuntimeError, match=r"\[ZERO-308\]$"):
        opt.step()
    with pytest.raises(TypeError, match="grad_scaler"):
        opt.step(grad_scaler=1)


@case(2)
def _a_hook_registered_on_another_model_is_refused_in_backward(setup: Setup) -> None:
    ddp, other = DistributedDataParallel(build_model()), DistributedDataParallel(build_model())
    opt = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    other.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, opt))
    with pytest.raises(RuntimeError, match="parameters of a different DDP model"):
        loss_of(other, *next(batches(setup.rank, 1))).backward()


# Exceptions


test_overlap = case.each()


def _in_a_subgroup(setup: Setup, members: list[int], stage: int) -> None:
    group = dist.new_group(members)
    if setup.rank in members:
        with at_stage(stage):
            _train_in_a_group(setup, members, group)


def _train_in_a_group(setup: Setup, members: list[int], group: Any) -> None:
    for interleaved in BOTH:
        for split in BOTH:
            twins = build_overlapped_twins(ADAMW, 2, process_group=group, interleaved=interleaved, split=split)
            twins.train(setup, 4)
            twins.assert_moved()
            assert_overlapped(twins.opt)
    wrong = DistributedDataParallel(build_model(), process_group=group)
    if members != list(range(setup.world_size)):
        other = dist.new_group([setup.rank], use_local_synchronization=True)
        opt = ZeroRedundancyOptimizer(
            wrong.parameters(), torch.optim.SGD, process_group=other, overlap_with_ddp=True, lr=0.1
        )
        with pytest.raises(ValueError, match="same ranks"):
            hook_with_zero_step(allreduce_hook, wrong, opt)


@pytest.mark.parametrize(
    ("members", "world_size", "stage"),
    [
        ([2, 3], 4, 2),
        ([1, 2], 3, 1),
        *(pytest.param([1, 2, 3], 4, stage, marks=pytest.mark.nightly) for stage in (1, 2)),
        *(pytest.param([0, 1], 2, stage, marks=pytest.mark.nightly) for stage in (1, 2)),
    ],
)
def test_overlap_in_groups_whose_ranks_are_not_those_of_the_job(
    members: list[int], world_size: int, stage: int
) -> None:
    run_ranks(_in_a_subgroup, world_size, members, stage)
