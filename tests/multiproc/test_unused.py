"""Parameters that a pass leaves unused: stepped inside backward, beside DDP with the plain optimizer."""

import copy
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero import shard_optimizer
from tests.multiproc.cases import Twins, assert_overlapped, sum_in_rank_order
from tests.multiproc.harness import Cases, Setup

case = Cases(group_timeout=20)

SMALL: dict[str, Any] = {"bucket_cap_mb": 2e-4}
FINDS: dict[str, Any] = {**SMALL, "find_unused_parameters": True}


class Maybe(nn.Module):
    """Each branch, and either end, can go unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 12)
        self.branches = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])
        self.ends = nn.ModuleList([nn.Linear(12, 3) for _ in range(2)])

    def forward(self, inputs: Tensor, branches: list[int], ends: tuple[int, ...] = (0, 1)) -> list[Tensor]:
        hidden = self.first(inputs)
        for index in branches:
            hidden = hidden + torch.tanh(self.branches[index](hidden))
        return [self.ends[end](hidden) for end in ends]


def twins_of(ddp_options: dict[str, Any], stage: int = 2, **options: Any) -> Twins:
    module = Maybe()
    plain_model = DistributedDataParallel(copy.deepcopy(module), **ddp_options)
    if stage == 2 and dist.get_world_size() > 2:
        plain_model.register_comm_hook(None, sum_in_rank_order)
    model = DistributedDataParallel(module, **ddp_options)
    opt = shard_optimizer(model, AdamW, stage=stage, lr=0.01, **options)
    return Twins(plain_model, model, AdamW(plain_model.parameters(), lr=0.01), opt)


def train(twins: Twins, setup: Setup, plans: Iterator[list[list[int]]], steps: int) -> None:
    """A plan says which branches each pass of a step uses; all but the last are in ``no_sync()``."""
    for step in range(steps):
        plan = next(plans)
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            for number, branches in enumerate(plan):
                ddp.require_backward_grad_sync = number == len(plan) - 1
                loss_of(ddp(inputs_of(setup, 10 * step + number), branches)).backward()
            optimizer.step()
        twins.assert_equal(f"after step {step}")
        used = [None if param.grad is None else True for param in twins.plain_model.parameters()]
        assert [None if param.grad is None else True for param in twins.model.parameters()] == used


def loss_of(outputs: list[Tensor]) -> Tensor:
    return torch.stack([output.square().mean() for output in outputs]).sum()


def inputs_of(setup: Setup, number: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * setup.rank + number))


def any_plans(setup: Setup, seed: int) -> Iterator[list[list[int]]]:
    """Other branches on every rank in every step, some on none."""
    everywhere, here = random.Random(seed), random.Random(100 * seed + setup.rank)
    while True:
        nobody = {index for index in range(4) if everywhere.random() < 0.3}
        passes = 1 + (everywhere.random() < 0.3)
        yield [[index for index in range(4) if index not in nobody and here.random() < 0.5] for _ in range(passes)]


EVERY_MODE: list[dict[str, Any]] = [
    {},
    {"interleaved": False},
    {"partition": "elements"},
    {"sync": "forward"},
    {"overlap": False},
    {"parameters_as_bucket_view": False},
    {"stage": 1},
    {"stage": 1, "interleaved": True},
    {"stage": 1, "partition": "elements"},
    {"stage": 1, "sync": "forward"},
    {"stage": 1, "accumulate_in_fp32": True},
]


@case(2, 3, few=EVERY_MODE[::2] + EVERY_MODE[5:6], every=EVERY_MODE)
def _a_step_inside_backward_leaves_out_what_no_rank_has_used(
    setup: Setup, configurations: list[dict[str, Any]]
) -> None:
    for seed, options in enumerate(configurations):
        twins = twins_of({**FINDS, "bucket_cap_mb": (2e-4, 1.2e-3)[seed % 2]}, **options)
        train(twins, setup, any_plans(setup, seed), 7)
        twins.assert_moved()
        if options.get("overlap", True):
            assert_overlapped(twins.opt)


@case(4, marks=[pytest.mark.nightly])
def _a_step_inside_backward_in_shard_groups_leaves_out_what_no_rank_has_used(setup: Setup) -> None:
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    twins = twins_of(FINDS, shard_group=groups[setup.rank // 2])
    plans = any_plans(setup, 1)
    for step in range(8):
        branches = next(plans)[-1]
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            loss_of(ddp(inputs_of(setup, step), branches)).backward()
            optimizer.step()
        for one, other in zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True):
            torch.testing.assert_close(one, other)
    twins.assert_moved()
    assert_overlapped(twins.opt)


@case(2, 3)
def _a_static_graph_steps_inside_backward_once_it_is_known(setup: Setup) -> None:
    """Branch 3 is used by nobody, branch 0 by the first rank alone."""
    for stage, overlap in ((1, True), (2, True), (2, False)):
        twins = twins_of({**SMALL, "static_graph": True}, stage, overlap=overlap)
        branches = [[0, 1, 2] if setup.rank == 0 else [1, 2]]
        train(twins, setup, iter([branches] * 5), 5)
        if overlap:
            assert_overlapped(twins.opt)
        unmoved = [torch.equal(*both) for both in zip(twins.model.parameters(), twins.before, strict=True)]
        assert unmoved == ["branches.3" in name for name, _ in twins.model.named_parameters()]


@case(2)
def _a_graph_over_parameters_that_a_step_has_left_out_stays_usable(setup: Setup) -> None:
    """Their values are as they were, and so must be their version counters, on every rank."""
    for stage in (1, 2):
        twins = twins_of(FINDS, stage)
        train(twins, setup, any_plans(setup, 0), 2)
        hidden = torch.randn(4, 12, requires_grad=True)
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            beside = ddp.module.ends[1](hidden).square().mean()
            used_elsewhere = ddp.module.branches[0](hidden).square().mean()
            loss_of(ddp(inputs_of(setup, 5), [setup.rank], (0,))).backward()
            optimizer.step()
            torch.autograd.grad(beside, hidden)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(used_elsewhere, hidden)


@case(2, 3)
def _a_rank_that_runs_out_of_inputs_under_join_leaves_the_others_equal_to_ddp(setup: Setup) -> None:
    for stage, lead in product((1, 2), (0, setup.world_size - 1)):
        twins = twins_of(FINDS, stage)
        for ddp, optimizer in twins.sides:
            plans = any_plans(setup, lead)
            with Join([ddp] if optimizer is twins.plain else [ddp, optimizer]):
                for step in range(3 + 3 * (setup.rank == lead)):
                    optimizer.zero_grad()
                    loss_of(ddp(inputs_of(setup, step), next(plans)[-1])).backward()
                    optimizer.step()
        if setup.rank == lead:  # plain optimizers of the others have not stepped as often
            twins.assert_equal(f"after Join, {lead} longest")


@case(2)
def _a_gradient_set_on_an_unused_parameter_after_backward_is_refused(setup: Setup) -> None:
    """A plain loop steps it; a step inside backward cannot, and must not leave it out silently."""
    for stage, is_frozen in product((1, 2), (False, True)):
        ddp = DistributedDataParallel(Maybe(), **FINDS)
        target = ddp.module.branches[3].weight
        target.requires_grad_(not is_frozen)
        zero = shard_optimizer(ddp, AdamW, stage=stage, lr=0.01)
        for step in range(3):
            zero.zero_grad()
            loss_of(ddp(inputs_of(setup, step), [0])).backward()
            if step == 2:
                target.grad = torch.ones_like(target)
                with pytest.raises(RuntimeError, match=r"gradient of parameter .*branches\.3\.weight.*ZERO-304"):
                    zero.step()
            else:
                zero.step()


test_unused = case.each()
