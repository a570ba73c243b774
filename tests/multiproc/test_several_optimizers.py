"""Several optimizers over one DDP model, beside DDP with as many plain optimizers."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from ddp_zero import ZeroRedundancyOptimizer, hook_with_zero_step, shard_optimizer
from tests.multiproc.cases import assert_equal_models, step_on, sum_in_rank_order
from tests.multiproc.harness import Cases, Setup

case = Cases(group_timeout=20)

Choose = Callable[[nn.Module], tuple[list[nn.Parameter], list[nn.Parameter]]]


class Net(nn.Module):
    """Matrices and vectors in turn, and a layer that only some passes use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 5), nn.Tanh())
        self.sometimes, self.last = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, inputs: Tensor, uses_all: bool = True) -> Tensor:
        hidden = self.layers(inputs)
        output: Tensor = self.last(self.sometimes(hidden) if uses_all else hidden)
        return output


def in_turn(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Every other parameter."""
    params = list(model.parameters())
    return params[::2], params[1::2]


def by_depth(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The first has the layers whose gradients come last."""
    params = list(model.parameters())
    return params[:5], params[5:]


def but_one(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """One parameter has a plain optimizer."""
    params = list(model.parameters())
    return params[1:4], params[4:]


class Both:
    """A model with two sharded optimizers, and a model with two plain optimizers."""

    def __init__(self, choose: Choose, ddp_options: dict[str, Any], *options: dict[str, Any]) -> None:
        module = Net()
        self.plain_ddp = DistributedDataParallel(copy.deepcopy(module), **ddp_options)
        if dist.get_world_size() > 2:
            self.plain_ddp.register_comm_hook(None, sum_in_rank_order)
        self.ddp = DistributedDataParallel(module, **ddp_options)
        groups, plain_groups = choose(module), choose(self.plain_ddp.module)
        first, second = options
        self.zeros: list[Any] = [
            shard_optimizer(self.ddp, AdamW, groups[0], lr=0.01, **{"stage": 2, **first}),
            shard_optimizer(self.ddp, SGD, groups[1], lr=0.1, momentum=0.9, **{"stage": 2, **second}),
        ]
        self.plain: list[Any] = [AdamW(plain_groups[0], lr=0.01), SGD(plain_groups[1], lr=0.1, momentum=0.9)]
        held = {param for group in groups for param in group}
        rest = [param for param in module.parameters() if param not in held]
        if rest:
            names = [name for name, param in module.named_parameters() if param not in held]
            others = [self.plain_ddp.module.get_parameter(name) for name in names]
            self.zeros.append(SGD(rest, lr=0.1))
            self.plain.append(SGD(others, lr=0.1))

    @property
    def sides(self) -> list[tuple[DistributedDataParallel, list[Any]]]:
        return [(self.plain_ddp, self.plain), (self.ddp, self.zeros)]

    def train(self, setup: Setup, steps: int, passes: int = 1, uses: Callable[[int], bool] = lambda _: True) -> None:
        before = [param.detach().clone() for param in self.ddp.parameters()]
        for step in range(steps):
            for ddp, optimizers in self.sides:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                for number in range(passes):
                    ddp.require_backward_grad_sync = number == passes - 1
                    ddp(inputs_of(setup, 10 * step + number), uses(step + setup.rank)).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
            assert_equal_models(self.plain_ddp, self.ddp, f"after step {step}")
        assert not any(torch.equal(one, other) for one, other in zip(self.ddp.parameters(), before, strict=True))


def inputs_of(setup: Setup, number: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * setup.rank + number))


SMALL = {"bucket_cap_mb": 1e-4}


@case(2, 3)
def _every_mode_equals_two_plain_optimizers(setup: Setup) -> None:
    interleaved, waiting = {"interleaved": True}, {"overlap": False}
    after = {"interleaved": False}
    # DDP adds up gradients of the plain optimizer in an order of its own, which counts from three ranks on
    for choose in (in_turn, by_depth, but_one)[: 3 if setup.world_size == 2 else 2]:
        for modes in ((interleaved, interleaved), (waiting, interleaved), (after, waiting)):
            both = Both(choose, SMALL, *modes)
            both.train(setup, 3)
            both.train(setup, 2, passes=2)


@case(2)
def _a_second_optimizer_in_stage_1_is_refused_and_the_named_remedy_equals_ddp(setup: Setup) -> None:
    for first in ({}, {"sync": "forward"}, {"overlap": False}):
        if "overlap" not in first:
            with pytest.raises(ValueError, match=r"To train by both, .*overlap=False in stage 1.*\[ZERO-206\]$"):
                Both(in_turn, SMALL, {"stage": 1, **first}, {"stage": 1})
        both = Both(in_turn, SMALL, {"stage": 1, **first}, {"stage": 1, "overlap": False})
        both.train(setup, 3)
        both.train(setup, 2, passes=2)


@case(2)
def _norms_are_those_of_each_optimizers_own_gradients(setup: Setup) -> None:
    both = Both(by_depth, {}, {"max_grad_norm": 0.05}, {"max_grad_norm": 0.1})
    for step in range(3):
        for ddp, optimizers in both.sides:
            for optimizer in optimizers:
                optimizer.zero_grad()
            ddp(inputs_of(setup, step)).square().mean().backward()
            for optimizer, limit in zip(optimizers, (0.05, 0.1), strict=True):
                if optimizers is both.plain:
                    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], limit)
                optimizer.step()
        assert_equal_models(both.plain_ddp, both.ddp, f"after step {step}")


@case(2, 3)
def _two_optimizers_with_unused_parameters_or_static_graphs_equal_ddp(setup: Setup) -> None:
    both = Both(in_turn, {**SMALL, "find_unused_parameters": True}, {}, {"overlap": False})
    both.train(setup, 4, uses=lambda number: number % 2 == 0)
    Both(in_turn, {**SMALL, "find_unused_parameters": True}, {}, {}).train(setup, 4, uses=lambda step: step % 2 == 0)
    if setup.world_size == 2:  # or DDP adds up gradients of the plain optimizer in an order of its own
        Both(but_one, {**SMALL, "find_unused_parameters": True}, {}, {"overlap": False}).train(setup, 4, passes=2)
    Both(in_turn, {**SMALL, "static_graph": True}, {}, {}).train(setup, 4)


@case(2)
def _a_pass_for_others_while_all_of_its_parameters_are_frozen_is_no_step_of_an_optimizer(setup: Setup) -> None:
    for first, second in product(({}, {"interleaved": False}, {"overlap": False}), ({}, {"interleaved": False})):
        both = Both(by_depth, SMALL | {"find_unused_parameters": True}, first, second)
        for step in range(4):
            for ddp, optimizers in both.sides:
                groups = by_depth(ddp.module)
                for number in (0, 1, 1) if step % 2 else (1, 0):
                    for param in groups[1 - number]:
                        param.requires_grad_(False)
                    optimizers[number].zero_grad()
                    step_on(optimizers[number], ddp(inputs_of(setup, 10 * step + number)).square().mean())
                    for param in groups[1 - number]:
                        param.requires_grad_(True)
            assert_equal_models(both.plain_ddp, both.ddp, f"{first} {second} after step {step}")
        both.train(setup, 2)


@case(2)
def _a_rank_that_runs_out_of_inputs_under_join_leaves_the_others_equal_to_ddp(setup: Setup) -> None:
    """Whoever is listed first: what an optimizer does inside backward comes before any step in the loop."""
    for finds, second, order in product((False, True), ({}, {"overlap": False}), (1, -1)):
        both = Both(by_depth, {**SMALL, "find_unused_parameters": finds}, {}, second)
        for ddp, optimizers in both.sides:
            joinables = [ddp] if optimizers is both.plain else [ddp, *optimizers[::order]]
            with Join(joinables):
                for step in range(2 + 2 * setup.rank):
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                    ddp(inputs_of(setup, step), not finds or step % 2 == 0).square().mean().backward()
                    for optimizer in optimizers:
                        optimizer.step()
        if setup.rank == 1:  # plain optimizers of rank 0 have not stepped as often
            assert_equal_models(both.plain_ddp, both.ddp, f"after Join, finds unused: {finds}, {second}, order {order}")
        assert not {name for name in vars(both.ddp) if name.startswith("_match")}, "Join's part of the model is left"


@case(2)
def _a_second_optimizer_on_a_hook_registered_by_hand_is_refused(setup: Setup) -> None:
    module = Net()
    ddp = DistributedDataParallel(module)
    first, second = in_turn(module)
    opt = ZeroRedundancyOptimizer(first, SGD, lr=0.1, stage=2)
    ddp.register_comm_hook(None, hook_with_zero_step(None, ddp, opt))
    other = ZeroRedundancyOptimizer(second, SGD, lr=0.1, stage=2)
    with pytest.raises(ValueError, match="ZERO-206"):
        other.attach(ddp)


test_several_optimizers = case.each()
