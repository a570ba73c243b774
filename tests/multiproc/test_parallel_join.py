"""Uneven inputs over a mesh: ranks at one place of the data dimension leave Join together, or all ranks raise."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.parallel import ParallelOptimizer
from tests import internals
from tests.multiproc.cases import batches
from tests.multiproc.experts import cut_mixture, dense_and_experts, expert_groups, wrapped_without_experts
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.joined_training import (
    FailingAdamW,
    go_on,
    joinables,
    step_plain,
    train_ours,
    train_plain_by_hand,
    train_plain_with_ddp,
)
from tests.multiproc.mesh_twins import KINDS, MeshTwins, mesh_of_4
from tests.multiproc.parallel_models import CLIP

UNEVEN = ((3, 1), (0, 2), (2, 5), (2, 2))
"""Batches of each place along the data dimension."""
IN_DDP: tuple[dict[str, Any], ...] = (
    {},
    {"stage": 2},
    {"overlap": False},
    {"overlap": False, "nonfinite": "skip"},
    {"max_grad_norm": CLIP},
    {"stage": 2, "max_grad_norm": CLIP},
)
WITHOUT_DDP: tuple[dict[str, Any], ...] = ({}, {"max_grad_norm": CLIP}, {"nonfinite": "skip"})

case = Cases(timeout=300, group_timeout=40)


Configuration = tuple[tuple[int, int], dict[str, Any], bool]
"""Batches of each place, options of the optimizer, and whether ranks that have joined count in averages."""


@case(
    4,
    few=[(UNEVEN[place % 4], mode, True) for place, mode in enumerate(IN_DDP[1::2], 1)],
    every=[*product(UNEVEN, IN_DDP, [True]), (UNEVEN[0], {"overlap": False}, False)],
)
def _parts_in_ddp_equal_the_plain_optimizer_under_join(setup: Setup, configurations: list[Configuration]) -> None:
    mesh = mesh_of_4()
    for uneven, mode, counts_all in configurations:
        twins = MeshTwins("cut, in DDP", mesh, **mode)
        steps = uneven[twins.place]
        norms = train_ours(twins, steps, divide_by_initial_world_size=counts_all)
        assert len(norms) == steps
        train_plain_with_ddp(twins, steps, norms, divide_by_initial_world_size=counts_all)
        twins.assert_equal(f"with {mode}, {uneven} batches, divided by all {counts_all}")
        twins.assert_moved()
        go_on(twins, uneven, is_clipped="max_grad_norm" in mode)


@case(
    4,
    few=[(KINDS[2], (UNEVEN[1], WITHOUT_DDP[1], True)), (KINDS[3], (UNEVEN[0], WITHOUT_DDP[0], False))],
    every=[
        *product(KINDS[2:], product(UNEVEN, WITHOUT_DDP, [True])),
        *product(KINDS[2:], product(UNEVEN[:1], WITHOUT_DDP, [False])),
    ],
)
def _parts_without_ddp_average_with_zeros_of_ranks_that_have_joined(
    setup: Setup, configurations: list[tuple[str, Configuration]]
) -> None:
    mesh = mesh_of_4()
    for kind, (uneven, mode, counts_all) in configurations:
        twins = MeshTwins(kind, mesh, **mode)
        norms = train_ours(twins, uneven[twins.place], divide_by_initial_world_size=counts_all)
        train_plain_by_hand(twins, uneven, norms, counts_all)
        twins.assert_equal(f"with {mode}, {uneven} batches, divided by all {counts_all}")
        twins.assert_moved()
        go_on(twins, uneven, is_clipped="max_grad_norm" in mode)


Early = tuple[tuple[str, dict[str, Any]], tuple[tuple[int, ...], str]]
"""The kind of a model and options of the optimizer; batches of each rank, and which ranks leave early."""
LEAVING: list[tuple[str, dict[str, Any]]] = [
    (KINDS[1], {}),
    (KINDS[1], {"stage": 2}),
    (KINDS[2], {"max_grad_norm": CLIP}),
]
EARLY = (((1, 2, 2, 2), "0"), ((1, 2, 1, 2), "0, 2"), ((1, 2, 2, 1), "0, 3"), ((2, 0, 2, 2), "1"))
LEAVING_EXPERTS = [(KINDS[0], IN_DDP[0]), (KINDS[0], IN_DDP[-1])]
EARLY_EXPERTS = (*EARLY[:2], ((2, 2, 2, 0), "3"))


@case(4, few=[*zip(LEAVING[1:], EARLY[1:3], strict=True)], every=[*product(LEAVING, EARLY)])
def _a_rank_that_leaves_before_its_peers_is_named_on_all_ranks(setup: Setup, configurations: list[Early]) -> None:
    mesh = mesh_of_4()
    for (kind, mode), (counts, left) in configurations:
        twins = MeshTwins(kind, mesh, **mode)
        with pytest.raises(RuntimeError, match=f"got global ranks {left} that have joined and .*ZERO-312"):
            train_ours(twins, counts[setup.rank])
        dist.barrier()  # nothing is left over that it could meet


@case(4, few=[*zip(LEAVING_EXPERTS, EARLY_EXPERTS[1:], strict=True)], every=[*product(LEAVING_EXPERTS, EARLY_EXPERTS)])
def _a_rank_that_leaves_before_those_it_exchanges_tokens_with_is_named_on_all(
    setup: Setup, configurations: list[Early]
) -> None:
    _a_rank_that_leaves_before_its_peers_is_named_on_all_ranks(setup, configurations)


@case(4)
def _a_rank_that_has_joined_and_fails_fails_all(setup: Setup) -> None:
    mesh = mesh_of_4()
    for kind in KINDS[1:3]:
        for mode in WITHOUT_DDP[:2]:
            twins = MeshTwins(kind, mesh, FailingAdamW, **mode)
            expected = ArithmeticError if setup.rank == 0 else RuntimeError
            with pytest.raises(expected, match="of rank 0"):
                train_ours(twins, (1, 3)[twins.place])
            dist.barrier()


def _scaled_iteration(twins: MeshTwins, scaler: Any) -> None:
    with Join(joinables(twins.model, twins.opt)):
        scaler.scale(twins.loss(twins.model, next(batches(twins.place, 1)))).backward()
        scaler.step(twins.opt)


@case(4)
def _a_grad_scaler_under_join_is_refused_on_every_rank(setup: Setup) -> None:
    mesh = mesh_of_4()
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("cut, in DDP", {}),
        ("cut, in DDP", {"overlap": False}),
        ("cut, in DDP", {"stage": 2, "max_grad_norm": CLIP}),
        ("cut, without DDP", {"max_grad_norm": CLIP}),
    )
    for kind, mode in cases:
        twins = MeshTwins(kind, mesh, **mode)
        before = [param.detach().clone() for param in twins.model.parameters()]
        with pytest.raises(RuntimeError, match=r"Join does not support torch\.amp\.GradScaler.*\[ZERO-310\]"):
            _scaled_iteration(twins, torch.amp.GradScaler("cpu", init_scale=64.0))
        dist.barrier()
        if mode:  # else the step was taken inside backward, before the scaler has called
            for param, old in zip(twins.model.parameters(), before, strict=True):
                assert torch.equal(param, old), f"{kind}, {mode}"


UNEVEN_EXPERTS = ((3, 3, 1, 1), (0, 0, 2, 2), (1, 1, 4, 4))
"""Batches of each rank: 0 and 1 exchange tokens, and so do 2 and 3; 0 and 2 hold the same experts, as do 1 and 3."""


def _train_plain_with_losses_of_zero(
    twins: MeshTwins, uneven: Sequence[int], norms: Sequence[float], scale: int
) -> None:
    """Every rank goes on to the end; without inputs its loss is zero, and no token of it has reached an expert."""
    last = [list[float](norms)]
    dist.broadcast_object_list(last, src=uneven.index(max(uneven)))
    for step, (batch, norm) in enumerate(zip(batches(twins.place, max(uneven)), last[0], strict=True)):
        twins.plain.zero_grad()
        has_joined = step >= uneven[twins.place]
        (twins.loss(twins.plain_model, batch) * (0.0 if has_joined else 1.0)).backward()
        for name, param in twins.plain_model.named_parameters():
            if ".experts." in name and has_joined:
                param.grad = None
        twins.reduce(twins.plain_model)
        if scale > 1 and any(step >= steps for steps in uneven):
            for param in twins.plain_model.parameters():
                if param.grad is not None:
                    param.grad.mul_(scale)  # averages of those that still train, half of all
        step_plain(twins, norm)


@case(
    4,
    few=[
        (UNEVEN_EXPERTS[place % 3], mode, mode != {"overlap": False})
        for place, mode in enumerate(({}, {"overlap": False}, {"stage": 2, "max_grad_norm": CLIP}))
    ],
    every=[*product(UNEVEN_EXPERTS, IN_DDP, [True]), *product(UNEVEN_EXPERTS, [{"overlap": False}], [False])],
)
def _experts_that_exchange_tokens_leave_together_and_their_replicas_go_on(
    setup: Setup, configurations: list[tuple[tuple[int, ...], dict[str, Any], bool]]
) -> None:
    mesh = mesh_of_4()
    for uneven, mode, counts_all in configurations:
        twins = MeshTwins("experts", mesh, **mode)
        norms = train_ours(twins, uneven[setup.rank], divide_by_initial_world_size=counts_all)
        _train_plain_with_losses_of_zero(twins, uneven, norms, scale=1 if counts_all else 2)
        twins.assert_equal(f"with {mode}, {uneven} batches, divided by all {counts_all}")
        twins.assert_moved()
        # the first rank's first backward pass orders DDP's buckets, and sums of four depend on their layout
        for batch in batches(twins.place, 1, 7) if uneven[0] else ():
            twins.zero_grad()
            twins.backward(batch)
            twins.opt.step()
            if "max_grad_norm" in mode:
                twins.clip_plain(CLIP)
            twins.plain.step()
            twins.assert_equal(f"one step after Join with {mode}, {uneven} batches")


@case(4)
def _an_exception_that_leaves_join_leaves_nothing_on_the_model(setup: Setup) -> None:
    mesh = mesh_of_4()
    for kind in KINDS[1:3]:
        twins = MeshTwins(kind, mesh)
        hooks = len(twins.model._forward_pre_hooks)
        with suppress(ArithmeticError), Join(joinables(twins.model, twins.opt)):
            for batch in batches(twins.place, 1):
                twins.loss(twins.model, batch).backward()
                twins.opt.step()
            assert internals.is_under_join(twins.opt)
            raise ArithmeticError
        assert not internals.is_under_join(twins.opt)
        assert "_check_global_requires_backward_grad_sync" not in vars(twins.model)
        assert len(twins.model._forward_pre_hooks) == hooks


@case(4)
def _join_is_refused_where_ranks_that_have_joined_would_be_missing(setup: Setup) -> None:
    mesh = mesh_of_4()
    spread, same = expert_groups(setup.rank, 4, 2)
    outer = wrapped_without_experts(cut_mixture(setup.rank, 2, 4, spread))
    experts = DistributedDataParallel(outer.module.experts.local, process_group=same)
    model = nn.ModuleList([outer, experts])
    groups = dense_and_experts(outer, same)
    opt = ParallelOptimizer(model, torch.optim.AdamW, groups)
    with pytest.raises(ValueError, match="multiple process groups"):  # of torch, whatever the optimizer
        Join([outer, experts])
    with pytest.raises(NotImplementedError, match=r"a second DDP model, here over parameter group 1: .*ZERO-812"):
        Join([outer, opt])
    stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    staged = ParallelOptimizer(
        nn.LayerNorm(2), torch.optim.AdamW, mesh=stages, data_parallel_dim="data", pipeline_dim="pipe"
    )
    with pytest.raises(NotImplementedError, match=r"over pipeline stages needs a schedule of torch.*ZERO-812"):
        Join([staged])
    twins = MeshTwins("cut, in DDP", mesh)
    with pytest.raises(ValueError, match=r"list the DDP model before its ParallelOptimizer.*ZERO-312"):
        Join([twins.opt, *joinables(twins.model)])
    with pytest.raises(NotImplementedError, match=r"=False with a communication hook.*ZERO-310"):
        Join(joinables(twins.model, twins.opt), divide_by_initial_world_size=False)


test_parallel_join = case.each()
