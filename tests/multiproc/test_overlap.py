"""The step inside backward in every situation that a plain loop knows, always equal to DDP with the plain optimizer."""

import copy
import gc
import itertools
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_zero import (
    Phase,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    shard_optimizer,
)
from tests import internals
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
    optimizer_case,
)
from tests.multiproc.harness import Cases, Setup, run_ranks
from tests.pairwise import pairwise

case = Cases(group_timeout=30)

ADAMW = optimizer_case("AdamW foreach")
SGD = optimizer_case("SGD")
MOMENTUM = optimizer_case("SGD momentum")
BOTH = (False, True)


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
def _any_wrapped_hook(setup: Setup, configurations: list[tuple[Any, bool, bool]]) -> None:
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
def _products_of_gradients(setup: Setup) -> None:
    for stage, overlap, bucket_view in ((1, True, False), (1, True, True), (2, True, True), (2, False, True)):
        widths = (31, 3, 29, 3, 33, 1)  # of products of few rows last bits differ
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(*pair, bias=False) for pair in itertools.pairwise(widths)])
        shown = bucket_view and stage == 1  # then DDP's own gradients are those of its buckets
        plain = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=shown)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
        opt = shard_optimizer(ddp, MatrixProducts, stage=stage, overlap=overlap)
        reference = MatrixProducts(plain.parameters())
        before = [param.detach().clone() for param in ddp.parameters()]
        generator = torch.Generator().manual_seed(setup.rank)
        for step in range(4):
            inputs = torch.randn(7, widths[0], generator=generator)
            for each, optimizer in ((plain, reference), (ddp, opt)):
                optimizer.zero_grad()
                each(inputs).square().sum().backward()
                optimizer.step()
            assert_equal_models(plain, ddp, f"in step {step} of stage {stage}, {overlap=}, {bucket_view=}")
        assert not any(map(torch.equal, before, ddp.parameters())), "every parameter has moved"


@case(2)
def _power_sgd(setup: Setup) -> None:
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


@case(1, 3)
def _buckets_of_any_size(setup: Setup) -> None:
    for bucket_cap_mb in (1e-6, 0.0005, 0.002, 25):
        for split in BOTH:
            twins = build_overlapped_twins(ADAMW, split=split, interleaved=split, bucket_cap_mb=bucket_cap_mb)
            twins.train(setup, 4)
            plan = internals.plan_of(twins.opt)
            assert len(plan.buckets) == {1e-6: 10, 25: 1}.get(bucket_cap_mb, len(plan.buckets))
            if not split:
                assert all(sum(bool(segment.params) for segment in b.segments) == 1 for b in plan.buckets)
            assert f"{'bucket':>6}" in twins.opt.explain()
            assert_overlapped(twins.opt)


# Loops


@case(2, 3)
def _no_sync_accumulates(setup: Setup) -> None:
    for interleaved in BOTH:
        twins = build_overlapped_twins(MOMENTUM, interleaved=interleaved, gradient_as_bucket_view=interleaved)
        data = list(batches(setup.rank, 9))
        for first in range(0, 9, 3):
            before = [param.detach().clone() for param in twins.model.parameters()]
            for model in (twins.plain_model, twins.model):
                with model.no_sync():
                    for inputs, targets in data[first : first + 2]:
                        loss_of(model, inputs, targets).backward()
            for param, old in zip(twins.model.parameters(), before, strict=True):
                assert torch.equal(param, old)
            for model, optimizer in ((twins.plain_model, twins.plain), (twins.model, twins.opt)):
                loss_of(model, *data[first + 2]).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_equal_models(twins.plain_model, twins.model, f"after {first}")
        twins.assert_moved()
        assert_overlapped(twins.opt)


@case(2)
def _step_may_be_left_out_and_gradients_kept(setup: Setup) -> None:
    for set_to_none in BOTH:
        for bucket_view in BOTH:
            twins = build_overlapped_twins(MOMENTUM, gradient_as_bucket_view=bucket_view)
            for step, (inputs, targets) in enumerate(batches(setup.rank, 5)):
                for model, optimizer in ((twins.plain_model, twins.plain), (twins.model, twins.opt)):
                    loss = loss_of(model, inputs, targets)
                    if step != 3:  # once, gradients of two steps add up, as with plain DDP
                        optimizer.zero_grad(set_to_none=set_to_none)
                    loss.backward()
                twins.plain.step()
                if step > 0:  # the first step is due before the next forward pass
                    assert_equal_models(twins.plain_model, twins.model, f"after step {step}")
                for one, other in zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True):
                    assert_identical(one.grad, other.grad, "gradient")
            twins.assert_moved()


@case(2)
def _closures(setup: Setup) -> None:
    twins = build_overlapped_twins(ADAMW)
    for inputs, targets in batches(setup.rank, 4):
        losses = []
        for model, optimizer in ((twins.plain_model, twins.plain), (twins.model, twins.opt)):

            def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, inputs, targets)  # noqa: B023
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))  # type: ignore[arg-type]
        assert losses[0] == losses[1]
        assert_equal_models(twins.plain_model, twins.model, "after a closure")


@case(1, 3)
def _schedulers(setup: Setup) -> None:
    twins = build_overlapped_twins(ADAMW, 2, interleaved=True)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.02], total_steps=12)
        for optimizer in (twins.plain, twins.opt)
    ]

    def after_step(step: int) -> None:
        for scheduler, optimizer in zip(schedulers, (twins.plain, twins.opt), strict=True):
            scheduler.step()
            if step == 3:
                optimizer.param_groups[1]["weight_decay"] = 0.5

    twins.train(setup, 10, after_step=after_step)
    twins.assert_moved()


@case(2, 3)
def _one_line(setup: Setup) -> None:
    model = build_model()
    plain_model, ddp = DistributedDataParallel(copy.deepcopy(model)), DistributedDataParallel(model)
    plain = torch.optim.AdamW(plain_model.named_parameters(), lr=0.01)
    opt = shard_optimizer(ddp, torch.optim.AdamW, lr=0.01, interleaved=setup.world_size == 3)
    twins = Twins(plain_model, ddp, plain, opt, [p.detach().clone() for p in ddp.parameters()])
    twins.train(setup, 4)
    twins.assert_moved()
    opt.consolidate_state_dict()
    if setup.rank == 0:
        assert_identical(plain.state_dict(), opt.state_dict(), "state dict")
    with pytest.raises(ValueError, match="stage"):
        shard_optimizer(ddp, torch.optim.AdamW, stage=3)


# Models


class Blocks(nn.Module):
    """Two blocks, recomputed in backward, and a head tied to the input layer."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embed = nn.Linear(8, 16, bias=False)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
        self.tied = nn.Linear(16, 8, bias=False)
        self.tied.weight = nn.Parameter(torch.randn(8, 16))
        self.out = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
        hidden = self.tied(hidden) + inputs @ self.tied.weight @ self.tied.weight.T
        output: Tensor = self.out(hidden)
        return output


@case(2, 3)
def _activation_checkpointing_and_tied_weights(setup: Setup) -> None:
    for reentrant in BOTH:
        for interleaved in BOTH:
            torch.manual_seed(0)
            twins = build_overlapped_twins(
                ADAMW, model=Blocks(reentrant), interleaved=interleaved, static_graph=reentrant
            )
            twins.train(setup, 4)
            twins.assert_moved()
            assert_overlapped(twins.opt)


@case(2)
def _compiled(setup: Setup) -> None:
    torch.manual_seed(0)
    twins = build_overlapped_twins(ADAMW, model=build_model(), bucket_cap_mb=1)
    plain, compiled = (torch.compile(model, backend="aot_eager") for model in (twins.plain_model, twins.model))
    for inputs, targets in batches(setup.rank, 4):
        for model, optimizer in ((plain, twins.plain), (compiled, twins.opt)):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        assert_equal_models(twins.plain_model, twins.model, "compiled")
    twins.assert_moved()
    assert_overlapped(twins.opt)


@case(3)
def _two_models_in_one_process(setup: Setup) -> None:
    twins = [build_overlapped_twins(case, interleaved=case is ADAMW) for case in (ADAMW, MOMENTUM)]
    for seed in range(3):
        for pair in twins:
            pair.train(setup, 2, seed=seed)
    for pair in twins:
        pair.assert_moved()


@case(2)
def _several_optimizers_on_one_model(setup: Setup) -> None:
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
def _groups_added_and_parameters_frozen(setup: Setup) -> None:
    model = build_model()
    plain_ddp = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.0015, find_unused_parameters=True)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0015, find_unused_parameters=True)
    first, second = list(plain_ddp.parameters()), list(ddp.parameters())
    plain = torch.optim.AdamW(first[:4], lr=0.01)
    opt = ZeroRedundancyOptimizer(
        second[:4], torch.optim.AdamW, overlap_with_ddp=True, parameters_as_bucket_view=True, lr=0.01
    )
    ddp.register_comm_hook(None, hook_with_zero_step_interleaved(None, ddp, opt, True))
    twins = Twins(plain_ddp, ddp, plain, opt, [p.detach().clone() for p in second])
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
def _a_group_added_while_overlapped(setup: Setup) -> None:
    for interleaved in BOTH:
        model = build_model()
        plain_ddp = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.0015)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0015)
        first, second = list(plain_ddp.parameters()), list(ddp.parameters())
        plain = torch.optim.AdamW(first[:4], lr=0.01)
        opt = ZeroRedundancyOptimizer(second[:4], torch.optim.AdamW, overlap_with_ddp=True, lr=0.01)
        build = hook_with_zero_step_interleaved if interleaved else hook_with_zero_step
        ddp.register_comm_hook(None, build(None, ddp, opt, True))
        twins = Twins(plain_ddp, ddp, plain, opt, [p.detach().clone() for p in second])
        twins.train(setup, 4)
        assert_overlapped(opt)
        outside = [nn.Parameter(torch.ones(5)) for _ in range(2)]
        plain.add_param_group({"params": [*first[4:], outside[0]], "lr": 0.02})
        opt.add_param_group({"params": [*second[4:], outside[1]], "lr": 0.02})
        for param in outside:
            param.grad = torch.full((5,), 0.5)
        for inputs, targets in batches(setup.rank, 4, seed=1):
            for one, optimizer in ((plain_ddp, plain), (ddp, opt)):
                loss_of(one, inputs, targets).backward()
                optimizer.step()
                for param in one.parameters():
                    param.grad = None
            assert_equal_models(plain_ddp, ddp, "after adding a group")
            assert_identical(outside[0], outside[1], "a parameter that DDP does not know")
        assert "in none of DDP's buckets" in opt.explain()
        assert not torch.equal(outside[1], torch.ones(5))
        outside[1].requires_grad_(False).grad = None
        outside[0].requires_grad_(False).grad = None
        twins.train(setup, 2, seed=2)
        assert_overlapped(opt)
        twins.assert_moved()


@case(2)
def _moved_parameters(setup: Setup) -> None:
    twins = build_overlapped_twins(ADAMW, interleaved=True)
    twins.train(setup, 3)
    for model in (twins.plain_model, twins.model):
        for param in model.parameters():
            param.data = param.data * 0.5
    twins.train(setup, 3, seed=1)
    twins.assert_moved()


@case(1, 3)
def _state_at_any_time(setup: Setup) -> None:
    for name in ("AdamW foreach", "Adagrad", "toy 8-bit Adam"):
        twins = build_overlapped_twins(optimizer_case(name), 2, interleaved=True)
        for step in range(4):  # before the first step, and after DDP has rebuilt its buckets
            for rank in (0, setup.world_size - 1):
                twins.opt.consolidate_state_dict(to=rank)
                if setup.rank == rank:
                    assert_identical(twins.plain.state_dict(), twins.opt.state_dict(), f"{name}, step {step}")
            saved = copy.deepcopy(twins.plain.state_dict())
            if step % 2:
                twins.opt.load_state_dict(saved)
                twins.plain.load_state_dict(saved)
            twins.train(setup, 1, seed=step)
        assert twins.opt.overlap_phase is Phase.REST
        assert 0 < len(twins.opt.state) < len(list(twins.model.parameters())) or setup.world_size == 1


# Join


@case(3)
def _uneven_inputs(setup: Setup) -> None:
    every_options: list[dict[str, Any]] = [
        {},
        {"find_unused_parameters": True},
        {"interleaved": True, "gradient_as_bucket_view": True},
    ]
    cases, every_inputs = (SGD, ADAMW, optimizer_case("toy 8-bit Adam")), ((3, 0, 5), (5, 4, 1), (2, 2, 2))
    # pairs: Join calls the step, which knows neither who calls it nor how many batches a rank has had
    for case, options, calls_step, inputs_of_rank in pairwise(cases, every_options, BOTH, every_inputs):
        twins = build_overlapped_twins(case, 2, **options)
        # In a second epoch the plain optimizers of ranks that joined early lack steps; only SGD does not miss them
        for epoch in range(2 if case is SGD else 1):
            _one_epoch(setup, twins, inputs_of_rank[setup.rank], epoch, calls_step, scheduled=case is not SGD)
            assert_equal_models(twins.plain_model, twins.model, f"{case.name} {options} {inputs_of_rank}")
        twins.assert_moved()


def _one_epoch(setup: Setup, twins: Twins, steps: int, seed: int, calls_step: bool, scheduled: bool) -> None:
    trained: list[tuple[nn.Module, Any, list[Any]]] = [
        (twins.plain_model, twins.plain, [twins.plain_model]),
        (twins.model, twins.opt, [twins.model, twins.opt]),
    ]
    for model, optimizer, joinables in trained:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9) if scheduled else None
        with Join(joinables):
            for inputs, targets in batches(setup.rank, steps, seed):
                optimizer.zero_grad()
                loss_of(model, inputs, targets).backward()
                if calls_step or optimizer is twins.plain:
                    optimizer.step()
                if scheduler is not None:
                    scheduler.step()
        optimizer.zero_grad()


# Misuse


@case(2)
def _a_hook_that_never_fires_is_told(setup: Setup) -> None:
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
def _a_hook_on_the_wrong_model_is_told(setup: Setup) -> None:
    ddp, other = DistributedDataParallel(build_model()), DistributedDataParallel(build_model())
    opt = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    other.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, opt))
    with pytest.raises(RuntimeError, match="parameters of a different DDP model"):
        loss_of(other, *next(batches(setup.rank, 1))).backward()


@case(2)
def _another_backward_before_the_step_is_told(setup: Setup) -> None:
    twins = build_overlapped_twins(MOMENTUM)
    twins.train(setup, 3)
    twins.zero_grad()
    inputs, targets = next(batches(setup.rank, 1))
    loss_of(twins.model, inputs, targets).backward()
    with pytest.raises(RuntimeError, match=r"(got a second backward|before the next backward) pass.*no_sync"):
        loss_of(twins.model, inputs, targets).backward()

    fresh = build_overlapped_twins(MOMENTUM)
    for _ in range(2):
        loss_of(fresh.model, inputs, targets).backward()
    with pytest.raises(RuntimeError, match="called once for 2 backward passes"):
        fresh.opt.step()


@case(2)
def _gradients_changed_too_late_are_told(setup: Setup) -> None:
    twins = build_overlapped_twins(ADAMW)
    for step, (inputs, targets) in enumerate(batches(setup.rank, 4)):
        loss_of(twins.model, inputs, targets).backward()
        if step == 2:
            nn.utils.clip_grad_norm_(twins.model.parameters(), 0.1)
            with pytest.raises(RuntimeError, match=r"parameter 0 \(group 0.*overlap_with_ddp=False"):
                twins.opt.step()
        else:
            twins.opt.step()
        twins.opt.zero_grad(set_to_none=step % 2 == 0)

    scaled = build_overlapped_twins(ADAMW)
    scaled.train(setup, 1)
    scaled.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(scaled.model, *next(batches(setup.rank, 1)))).backward()
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.step(scaled.opt)


@case(2)
def _sparse_gradients_are_told(setup: Setup) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2)))
    kept = shard_optimizer(ddp, torch.optim.SGD, lr=0.1)
    with pytest.raises(NotImplementedError, match=r"sparse gradient of parameter 0 'module.0.weight'"):
        ddp(torch.arange(8)).sum().backward()
    assert kept is not None


# Exceptions


class Fuse(torch.autograd.Function):
    """Passes its input on; blows in forward or in backward when told to."""

    blows: str | None = None

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        if Fuse.blows == "forward":
            raise ValueError("the fuse has blown")
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Fuse.blows == "backward":
            raise ValueError("the fuse has blown")
        return grad


class Fused(nn.Module):
    """A fuse between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.second(Fuse.apply(torch.tanh(self.first(inputs))))  # type: ignore[no-untyped-call]
        return output


def _blow(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    with pytest.raises(ValueError, match="fuse"):
        loss_of(model, inputs, targets).backward()


@case(2, 3)
def _exceptions_leave_an_optimizer_that_can_go_on(setup: Setup) -> None:
    for where, bucket_view in product(("forward", "backward"), BOTH):
        torch.manual_seed(0)
        twins = build_overlapped_twins(ADAMW, model=Fused(), bucket_cap_mb=0.0001, gradient_as_bucket_view=bucket_view)
        twins.train(setup, 4)
        before = copy.deepcopy(twins.model.state_dict())
        twins.zero_grad()
        inputs, targets = next(batches(setup.rank, 1, seed=5))
        Fuse.blows = where
        _blow(twins.plain_model, inputs, targets)
        _blow(twins.model, inputs, targets)
        Fuse.blows = None
        assert_identical(dict(before), dict(twins.model.state_dict()), "parameters after the exception")
        if where == "backward":  # DDP itself cannot go on: it waits for the buckets that never came
            with pytest.raises(RuntimeError, match=r"No gradient for parameter 0.*call opt.reset"):
                twins.opt.step()
            twins.wrap_again(bucket_cap_mb=0.0001)
            with pytest.raises(ValueError, match="one hook per optimizer"):
                hook_with_zero_step(None, twins.model, twins.opt)
            gc.collect()  # the old models' autograd hooks go with them
            twins.opt.reset()
            twins.model.register_comm_hook(None, hook_with_zero_step(None, twins.model, twins.opt, True))
        else:
            twins.opt.reset()
        twins.zero_grad()
        twins.train(setup, 4, seed=1)
        twins.assert_moved()
        assert_overlapped(twins.opt)


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


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("members", "world_size"), [([2, 3], 4), ([1, 2], 3), ([0, 1], 2), ([1, 2, 3], 4)])
def test_overlap_in_groups_whose_ranks_are_not_those_of_the_job(
    members: list[int], world_size: int, stage: int
) -> None:
    run_ranks(_in_a_subgroup, world_size, members, stage)
