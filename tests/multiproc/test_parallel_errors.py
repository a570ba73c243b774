"""One rank's step fails, and every rank raises at once, whatever it holds."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero.parallel import ParallelOptimizer
from tests import internals
from tests.multiproc.cases import batches, loss_of
from tests.multiproc.cut_models import is_cut
from tests.multiproc.experts import cut_mixture, dense_and_experts, expert_groups, wrapped_without_experts
from tests.multiproc.failing import FailingAdamW, fail_at_once, iterations
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.parallel_models import OPTIONS, blocks, cut_groups, parallelized, squared, tied_group
from tests.multiproc.stages import Stages

# a rank that waited for the time-out of its group would fail the test
case = Cases(timeout=300, group_timeout=600)


def mse(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(model, *batch)


@case(4)
def _an_error_in_the_step_of_an_expert_or_of_what_is_dense_reaches_every_rank(setup: Setup) -> None:
    spread, same = expert_groups(setup.rank, 4, 2)
    modes: tuple[dict[str, Any], ...] = ({"overlap": False}, {"stage": 2}, {"stage": 2, "max_grad_norm": 1.0})
    for mode in modes:
        for member, rank in ((0, 1), (1, 3)):
            model: Any = cut_mixture(setup.rank, 2, 4, spread)
            ddp = wrapped_without_experts(model, gradient_as_bucket_view=True)
            opt = ParallelOptimizer(ddp, FailingAdamW, dense_and_experts(ddp, same), **mode, **OPTIONS)
            fail_at_once(opt, iterations(opt, ddp, mse, setup.rank), member, rank)


@case(4)
def _an_error_in_the_step_of_a_part_reaches_the_ranks_with_other_parts(setup: Setup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    arguments: dict[str, Any] = {"mesh": mesh, "data_parallel_dim": "data"}
    data_rank = mesh.get_local_rank("data")
    modes: tuple[dict[str, Any], ...] = ({}, {"stage": 2, "max_grad_norm": 1.0})
    for mode in modes:
        ddp = DistributedDataParallel(
            blocks(mesh.get_group("tensor")), process_group=mesh.get_group("data"), gradient_as_bucket_view=True
        )
        opt = ParallelOptimizer(ddp, FailingAdamW, cut_groups(ddp, "tensor"), **arguments, **mode, **OPTIONS)
        fail_at_once(opt, iterations(opt, ddp, squared, data_rank), 0, 2)
    model = parallelized(mesh["tensor"])
    opt = ParallelOptimizer(model, FailingAdamW, foreach=False, **arguments, **OPTIONS)
    fail_at_once(opt, iterations(opt, model, squared, data_rank), 0, 3)


@case(4, few=[(place % 2 == 0, place) for place in range(4)], every=[*product((True, False), range(4))])
def _an_error_beside_matrices_that_are_stepped_whole_reaches_the_ranks_with_other_parts(
    setup: Setup, configurations: list[tuple[bool, int]]
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data, arguments = mesh.get_group("data"), {"mesh": mesh, "data_parallel_dim": "data"}
    for wraps, fails in configurations:
        model = blocks(mesh.get_group("tensor"))
        if wraps:
            options: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0004}
            model = DistributedDataParallel(model, process_group=data, **options)
        named = list(model.named_parameters())
        groups: list[dict[str, Any]] = [{"params": [param for name, param in named if not is_cut(name)]}]
        for place, kind in enumerate(("up", "down")):
            cut = [param for name, param in named if name.endswith(kind)]
            groups.append({"params": cut, "sharded_over": {"tensor": place}, "optimizer_class": torch.optim.Muon})
        opt = ParallelOptimizer(model, FailingAdamW, groups, **arguments, **OPTIONS)  # type: ignore[arg-type]
        iteration = iterations(opt, model, squared, mesh.get_local_rank("data"))
        for _ in range(2):
            iteration()
            opt.step()
        inner: Any = opt.members[0].optim
        for part in inner.suboptimizers.values():
            part.fails = setup.rank == fails
        iteration()
        expected = "out of order" if setup.rank == fails else rf"out of order \(global rank {fails}\)"
        with pytest.raises((ValueError, RuntimeError), match=expected):
            opt.step()
        dist.barrier()


FAILING_STAGES: list[tuple[bool, dict[str, Any]]] = [(False, {}), (True, {"stage": 2}), (True, {"max_grad_norm": 1.0})]


@case(4, few=FAILING_STAGES[:2], every=FAILING_STAGES)
def _an_error_in_the_step_of_a_stage_reaches_the_other_stages(
    setup: Setup, configurations: list[tuple[bool, dict[str, Any]]]
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    tied = tied_group(mesh)
    arguments: dict[str, Any] = {"mesh": mesh, "data_parallel_dim": "data", "pipeline_dim": "pipe"}
    for wraps, mode in configurations:
        stages = Stages(mesh, Schedule1F1B, wraps, learns_shapes=True)
        opt = ParallelOptimizer(stages.model, FailingAdamW, stages.groups(tied), **arguments, **mode, **OPTIONS)

        def iteration(opt: ParallelOptimizer = opt, stages: Stages = stages) -> None:
            opt.zero_grad()
            stages.run(0)

        fail_at_once(opt, iteration, 0, 3)


@case(4)
def _a_stage_that_cannot_be_built_is_an_error_on_the_other_stages_too(setup: Setup) -> None:
    """Stages that can be built go on to the member that they share with it, and would wait there."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("data", "pipe", "tensor"))
    tied, number = tied_group(mesh), mesh.get_local_rank("pipe")
    whole = torch.arange(8.0).view(4, 2)
    part = distribute_tensor(whole, mesh["tensor"], [Shard(0)]) if number == 0 else whole
    model = nn.ParameterDict({"own": nn.Parameter(part), "tied": nn.Parameter(torch.ones(3))})
    groups: list[dict[str, Any]] = [{"params": [model["own"]]}, {"params": [model["tied"]], "process_group": tied}]
    arguments: dict[str, Any] = {"mesh": mesh, "data_parallel_dim": "data", "pipeline_dim": "pipe", **OPTIONS}
    with pytest.raises((NotImplementedError, RuntimeError), match=r"sync='forward' does not support .*\[ZERO-812\]"):
        ParallelOptimizer(model, AdamW, groups, sync="forward", **arguments)
    ParallelOptimizer(model, AdamW, groups, **arguments)


@case(4)
def _an_error_before_the_decision_reaches_every_rank(setup: Setup) -> None:
    spread, same = expert_groups(setup.rank, 4, 2)
    for member, clips in ((0, None), (1, 1.0)):
        ddp = wrapped_without_experts(cut_mixture(setup.rank, 2, 4, spread), gradient_as_bucket_view=True)
        opt = ParallelOptimizer(ddp, AdamW, dense_and_experts(ddp, same), overlap=False, max_grad_norm=clips, **OPTIONS)
        loss_of(ddp, *next(batches(setup.rank, 1))).backward()
        if setup.rank == 2:
            opt.members[member].param_groups[0]["params"].pop()
        with pytest.raises(RuntimeError, match="the parameters that the optimizer was built with in group 0") as raised:
            opt.step()
        assert setup.rank == 2 or "(global rank 2)" in str(raised.value)
        dist.barrier()


@case(4)
def _ranks_that_all_fail_before_the_decision_meet_the_others_in_it(setup: Setup) -> None:
    """The ranks of one expert raise in a collective of their own, and the others wait for them in the decision."""
    spread, same = expert_groups(setup.rank, 4, 2)
    ddp = wrapped_without_experts(cut_mixture(setup.rank, 2, 4, spread), gradient_as_bucket_view=True)
    opt = ParallelOptimizer(ddp, AdamW, dense_and_experts(ddp, same), stage=2, max_grad_norm=1.0, **OPTIONS)
    loss_of(ddp, *next(batches(setup.rank, 1))).backward()

    def refuses(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("these experts were not averaged")

    before = [param.detach().clone() for param in ddp.parameters()]
    if setup.rank % 2:
        internals.break_averaging_check(opt.members[1], refuses)
    shown = "these experts were not averaged" + ("" if setup.rank % 2 else r" \(global ranks 1, 3\)")
    with pytest.raises(RuntimeError, match=shown):
        opt.step()
    assert all(torch.equal(param, old) for param, old in zip(ddp.parameters(), before, strict=True))
    dist.barrier()


@case(4)
def _ranks_that_decide_differently_all_hear_of_it_whichever_level_shows_it(setup: Setup) -> None:
    """Of the ranks of a level only those of one group compare with the rank that differs."""
    meshes = [((2, 2), ("data", "tensor")), ((1, 2, 2), ("data", "other", "tensor"))]
    for shape, names in meshes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = nn.ParameterList([torch.ones(4, 4), torch.ones(3, 3)])
        groups: Any = [{"params": [param], "max_grad_norm": 0.5} for param in model.parameters()]
        opt = ParallelOptimizer(model, AdamW, groups, mesh=mesh, data_parallel_dim="data", **OPTIONS)
        second = opt.param_groups[1]
        told = r"averaging gradients to succeed on every rank, got RuntimeError: Expected one decision .*ZERO-820\]$"
        for other, call in ((3, opt.step), (0, opt.step), (1, partial(opt.clip_grad_norm_, 1.0))):
            before = [param.detach().clone() for param in model.parameters()]
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            is_other = setup.rank == other
            second["max_grad_norm"] = 0.25 if is_other and call == opt.step else 0.5
            with pytest.raises(RuntimeError, match=told):
                (call if is_other else opt.step)()
            dist.barrier()
            assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
            second["max_grad_norm"] = 0.5
            opt.step()  # averages that were taken are not taken again
            assert opt.last_step is not None
            assert opt.last_step.stepped
            assert not any(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
            opt.zero_grad()


@case(4)
def _a_norm_that_is_not_finite_raises_on_every_rank_and_the_next_step_passes(setup: Setup) -> None:
    spread, same = expert_groups(setup.rank, 4, 2)
    ddp = wrapped_without_experts(cut_mixture(setup.rank, 2, 4, spread), gradient_as_bucket_view=True)
    opt = ParallelOptimizer(ddp, AdamW, dense_and_experts(ddp, same), overlap=False, **OPTIONS)
    for step, batch in enumerate(batches(setup.rank, 2)):
        opt.zero_grad()
        loss_of(ddp, *batch).backward()
        if step == 0:
            weight = ddp.module.get_parameter("experts.local.1.0.weight")
            if setup.rank == 3:
                weight.grad = torch.full_like(weight, float("inf"))
            with pytest.raises(RuntimeError, match="Expected a finite norm"):
                opt.clip_grad_norm_(1.0, error_if_nonfinite=True)
            continue
        assert torch.isfinite(opt.clip_grad_norm_(1.0, error_if_nonfinite=True))
        opt.step()
        assert opt.last_step is not None
        assert opt.last_step.stepped


@case(4)
def _an_error_in_a_loop_without_opt_step_is_raised_before_the_next_forward_pass(setup: Setup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    ddp = DistributedDataParallel(
        blocks(mesh.get_group("tensor")), process_group=mesh.get_group("data"), gradient_as_bucket_view=True
    )
    groups = cut_groups(ddp, "tensor")
    opt = ParallelOptimizer(ddp, FailingAdamW, groups, mesh=mesh, data_parallel_dim="data", **OPTIONS)
    feed = batches(mesh.get_local_rank("data"), 4)
    for _ in range(3):
        squared(ddp, next(feed)).backward()
        opt.zero_grad()
    inner: Any = opt.members[0].optim
    inner.fails = setup.rank == 0
    batch = next(feed)
    squared(ddp, batch).backward()
    if setup.rank in (0, 2):  # the ranks that share its parameters
        with pytest.raises((ValueError, RuntimeError), match="out of order"):
            ddp(batch[0])
    dist.barrier()


test_errors = case.each()
