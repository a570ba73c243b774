"""Loops around a step inside backward, which both stages run."""

import copy
import gc
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

from ddp_zero import Phase, hook_with_zero_step
from tests import internals
from tests.multiproc.cases import (
    Twins,
    assert_equal_models,
    assert_identical,
    assert_overlapped,
    batches,
    build_model,
    build_overlapped_twins,
    loss_of,
    optimizer_case,
    step_on,
)
from tests.multiproc.harness import Setup
from tests.pairwise import pairwise

ADAMW = optimizer_case("AdamW foreach")
SGD = optimizer_case("SGD")
MOMENTUM = optimizer_case("SGD momentum")
BOTH = (False, True)


def buckets_of_any_size(setup: Setup) -> None:
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


def no_sync_accumulates(setup: Setup) -> None:
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
                step_on(optimizer, loss_of(model, *data[first + 2]))
            assert_equal_models(twins.plain_model, twins.model, f"after {first}")
        twins.assert_moved()
        assert_overlapped(twins.opt)


def closures(setup: Setup) -> None:
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


def schedulers(setup: Setup) -> None:
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


def activation_checkpointing_and_tied_weights(setup: Setup) -> None:
    for reentrant in BOTH:
        for interleaved in BOTH:
            torch.manual_seed(0)
            twins = build_overlapped_twins(
                ADAMW, model=Blocks(reentrant), interleaved=interleaved, static_graph=reentrant
            )
            twins.train(setup, 4)
            twins.assert_moved()
            assert_overlapped(twins.opt)


def compiled(setup: Setup) -> None:
    torch.manual_seed(0)
    twins = build_overlapped_twins(ADAMW, model=build_model(), bucket_cap_mb=1)
    plain_compiled, sharded_compiled = (
        torch.compile(model, backend="aot_eager") for model in (twins.plain_model, twins.model)
    )
    for inputs, targets in batches(setup.rank, 4):
        for model, optimizer in ((plain_compiled, twins.plain), (sharded_compiled, twins.opt)):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        assert_equal_models(twins.plain_model, twins.model, "compiled")
    twins.assert_moved()
    assert_overlapped(twins.opt)


def two_models_in_one_process(setup: Setup) -> None:
    twins = [build_overlapped_twins(case, interleaved=case is ADAMW) for case in (ADAMW, MOMENTUM)]
    for seed in range(3):
        for pair in twins:
            pair.train(setup, 2, seed=seed)
    for pair in twins:
        pair.assert_moved()


def moved_parameters(setup: Setup) -> None:
    twins = build_overlapped_twins(ADAMW, interleaved=True)
    twins.train(setup, 3)
    for model in (twins.plain_model, twins.model):
        for param in model.parameters():
            param.data = param.data * 0.5
    twins.train(setup, 3, seed=1)
    twins.assert_moved()


def state_at_any_time(setup: Setup) -> None:
    for name in ("AdamW foreach", "Adagrad", "toy 8-bit Adam"):
        twins = build_overlapped_twins(optimizer_case(name), 2, interleaved=True)
        for step in range(4):  # before the first step, and after DDP has rebuilt its buckets
            for rank in (0, setup.world_size - 1):
                twins.assert_same_state(f"{name}, step {step}", to=rank)
            saved = copy.deepcopy(twins.plain.state_dict())
            if step % 2:
                twins.opt.load_state_dict(saved)
                twins.plain.load_state_dict(saved)
            twins.train(setup, 1, seed=step)
        assert twins.opt.overlap_phase is Phase.REST
        assert 0 < len(twins.opt.state) < len(list(twins.model.parameters())) or setup.world_size == 1


def uneven_inputs(setup: Setup) -> None:
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
            one_epoch(setup, twins, inputs_of_rank[setup.rank], epoch, calls_step, scheduled=case is not SGD)
            assert_equal_models(twins.plain_model, twins.model, f"{case.name} {options} {inputs_of_rank}")
        twins.assert_moved()


def one_epoch(setup: Setup, twins: Twins, steps: int, seed: int, calls_step: bool, scheduled: bool) -> None:
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


def another_backward_before_the_step_is_told(setup: Setup) -> None:
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


def exceptions_leave_an_optimizer_that_can_go_on(setup: Setup) -> None:
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


LOOPS: list[tuple[Callable[[Setup], None], tuple[int, ...]]] = [
    (buckets_of_any_size, (1, 3)),
    (no_sync_accumulates, (2, 3)),
    (closures, (2,)),
    (schedulers, (1, 3)),
    (activation_checkpointing_and_tied_weights, (2, 3)),
    (compiled, (2,)),
    (two_models_in_one_process, (3,)),
    (moved_parameters, (2,)),
    (state_at_any_time, (1, 3)),
    (uneven_inputs, (3,)),
    (another_backward_before_the_step_is_told, (2,)),
    (exceptions_leave_an_optimizer_that_can_go_on, (2, 3)),
]
"""With the numbers of ranks that they are for."""
