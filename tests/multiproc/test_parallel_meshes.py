"""Tensor and pipeline parallel ranks around the data-parallel ranks: parity, norms, decisions over the whole model."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from ddp_zero.parallel import ParallelOptimizer
from tests.internals import cuts_of
from tests.multiproc.cases import ToyLAMB, assert_identical, assert_same_on_all_ranks, batches
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.parallel_models import (
    CLIP,
    OPTIONS,
    STEPS,
    blocks,
    check_norm,
    cut_groups,
    local_part,
    norm_of,
    parallelized,
    scale_gradients,
    squared,
    train_stages,
)

case = Cases(timeout=120, group_timeout=30)


def everyones(data_ranks: int, step: int) -> tuple[Tensor, Tensor]:
    every = [list(batches(rank, step + 1))[step] for rank in range(data_ranks)]
    inputs, targets = (torch.cat(parts) for parts in zip(*every, strict=True))
    return inputs, targets


BY_HAND: tuple[dict[str, Any], ...] = ({"max_grad_norm": CLIP}, {"stage": 2}, {}, {"stage": 2, "max_grad_norm": CLIP})


@case(4, few=BY_HAND[:2], every=BY_HAND)
def _parameters_that_are_cut_by_hand_equal_the_plain_optimizer(
    setup: Setup, configurations: tuple[dict[str, Any], ...]
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
    arguments = {"mesh": mesh, "data_parallel_dim": "data"}
    for mode in configurations:
        ddp_options: Any = {"process_group": data, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.0004}
        expected, ddp = (DistributedDataParallel(blocks(tensor), **ddp_options) for _ in range(2))
        plain, whole = AdamW(expected.parameters(), **OPTIONS), blocks(None)
        one = AdamW(whole.parameters(), **OPTIONS)
        opt = ParallelOptimizer(ddp, AdamW, cut_groups(ddp, "tensor"), **arguments, **mode, **OPTIONS)  # type: ignore[arg-type]
        for step, batch in enumerate(batches(mesh.get_local_rank("data"), STEPS)):
            for model, optimizer in ((expected, plain), (ddp, opt)):
                optimizer.zero_grad()
                squared(model, batch).backward()
            whole.zero_grad()
            squared(whole, everyones(2, step)).backward()
            opt.step()
            norm = norm_of(whole)
            if "max_grad_norm" in mode:
                scale_gradients(expected, check_norm(opt, norm))
                scale_gradients(whole, float(norm))
            plain.step()
            one.step()
            for (name, mine), other in zip(ddp.named_parameters(), expected.parameters(), strict=True):
                assert_identical(other.detach(), mine.detach(), f"{name} after step {step}: {mode}")
        torch.testing.assert_close(ddp.module[0].bias, whole.get_parameter("0.bias"), rtol=0, atol=1e-4)
        assert not torch.equal(ddp.module[0].up, blocks(tensor).get_parameter("0.up"))
    opt.zero_grad()
    opt.detach()
    with pytest.raises(TypeError, match=r"holds a part, got ToyLAMB"):
        ParallelOptimizer(ddp, ToyLAMB, cut_groups(ddp, "tensor"), overlap=False, **arguments)  # type: ignore[arg-type]


@case(4)
def _distributed_tensors_are_stepped_in_place(setup: Setup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data = mesh.get_group("data")
    for clipped in (None, CLIP):
        expected, model = parallelized(mesh["tensor"]), parallelized(mesh["tensor"])
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8))
        plain = AdamW(expected.parameters(), foreach=False, **OPTIONS)
        opt = ParallelOptimizer(
            model, AdamW, mesh=mesh, data_parallel_dim="data", max_grad_norm=clipped, foreach=False, **OPTIONS
        )
        before = [local_part(param).clone() for param in model.parameters()]
        for step, batch in enumerate(batches(mesh.get_local_rank("data"), STEPS)):
            plain.zero_grad()
            (expected(batch[0]) - 0.1).pow(4).mean().backward()
            for param in expected.parameters():
                grad = local_part(param.grad).mul_(0.5)
                dist.all_reduce(grad, group=data)
            opt.zero_grad()
            assert all(param.grad is None for param in model.parameters())
            (model(batch[0]) - 0.1).pow(4).mean().backward()
            opt.step()
            if clipped is not None:
                if step == 0:
                    (whole(everyones(2, step)[0]) - 0.1).pow(4).mean().backward()
                    check_norm(opt, norm_of(whole))
                assert opt.last_step is not None
                scale_gradients(expected, opt.last_step.grad_norm or 0.0)
            plain.step()
            for (name, mine), other in zip(model.named_parameters(), expected.parameters(), strict=True):
                assert_identical(local_part(other), local_part(mine), f"{name} after step {step}, clipped: {clipped}")
        assert all(
            not torch.equal(local_part(param), old) for param, old in zip(model.parameters(), before, strict=True)
        )
    with pytest.raises(TypeError, match=r"ddp_zero\.parallel"):
        ZeroRedundancyOptimizer(model.parameters(), AdamW)


@case(2)
def _gradients_of_distributed_tensors_are_zeroed_where_those_of_others_are(setup: Setup) -> None:
    """A parameter that is not used after ``zero_grad(set_to_none=False)`` steps by momentum, as any does in torch."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    whole = nn.ParameterList([torch.arange(4.0), torch.arange(4.0)])
    model = nn.ParameterList(
        [distribute_tensor(whole[0].detach().clone(), mesh["tensor"], [Shard(0)]), whole[1].clone()]
    )
    options: dict[str, Any] = {"lr": 0.5, "momentum": 0.9}
    plain = SGD(whole, **options)
    opt = ParallelOptimizer(model, SGD, mesh=mesh, data_parallel_dim="data", **options)
    for step in range(3):
        for params, optimizer in ((whole, plain), (model, opt)):
            optimizer.zero_grad(set_to_none=False)
            if step == 0:
                for param in params:
                    param.sum().backward()
            optimizer.step()
        half = slice(2 * setup.rank, 2 * setup.rank + 2)
        assert_identical(
            whole[0].detach()[half].clone(), local_part(model[0]), f"the distributed tensor after step {step}"
        )
        assert_identical(whole[1].detach(), model[1].detach(), f"the other one after step {step}")


@case(4)
def _distributed_tensors_in_ddp_are_trained_without_a_hook_and_refused_with_one(setup: Setup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    arguments: dict[str, Any] = {"mesh": mesh, "data_parallel_dim": "data"}

    def wrapped() -> tuple[DistributedDataParallel, list[Tensor]]:
        ddp = DistributedDataParallel(
            parallelized(mesh["tensor"]), device_mesh=mesh["data"], gradient_as_bucket_view=True
        )
        return ddp, list(ddp.parameters())  # the first forward pass takes the parts out of their modules

    (expected, theirs), (ddp, ours) = wrapped(), wrapped()
    before = [param.detach().clone() for param in ours]
    plain, opt = AdamW(expected.parameters(), **OPTIONS), shard_optimizer(ddp, AdamW, overlap=False, **OPTIONS)
    for inputs, _ in batches(mesh.get_local_rank("data"), STEPS):
        for model, optimizer in ((expected, plain), (ddp, opt)):
            optimizer.zero_grad()
            (model(inputs) - 0.1).pow(4).mean().backward()
            optimizer.step()
    assert_identical(list(theirs), list(ours), "parameters")
    assert all(not torch.equal(old, new) for old, new in zip(before, ours, strict=True))
    refused: tuple[dict[str, Any], ...] = ({}, {"stage": 2, "overlap": False}, {"overlap": False, "max_grad_norm": 1.0})
    for options in refused:
        for along in ({}, arguments):
            with pytest.raises(NotImplementedError, match=r"Distributed tensors such as '0.weight'.*without DDP"):
                shard_optimizer(wrapped()[0], AdamW, **options, **along, **OPTIONS)


@case(4)
def _norms_in_float64_are_equal_where_a_rank_counts_nothing_of_a_member(setup: Setup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for clips_in_step in (True, False):
        torch.manual_seed(0)
        # replicated over "tensor": its second rank counts none of the first member's parameters
        model = nn.ParameterList([torch.randn(5, dtype=torch.float64), torch.randn(7, dtype=torch.float64)])
        arguments: Any = {"mesh": mesh, "data_parallel_dim": "data", "max_grad_norm": CLIP if clips_in_step else None}
        opt = ParallelOptimizer(model, AdamW, [{"params": [param]} for param in model], **arguments, **OPTIONS)
        before = copy.deepcopy(model)
        norms = []
        for step, (inputs, _) in enumerate(batches(mesh.get_local_rank("data"), STEPS)):
            for param in model:
                param.grad = inputs.double().flatten()[: param.numel()] * (step + 1.1)
            if not clips_in_step:
                norms.append(opt.clip_grad_norm_(CLIP).double())
            opt.step()
            assert opt.last_step is not None
            norms.append(torch.tensor(opt.last_step.grad_norm, dtype=torch.float64))
        assert_same_on_all_ranks([torch.stack(norms), *model], when=f"{clips_in_step=}")
        assert all(norm != norm.float() for norm in norms), "norms have the bits of float64"
        assert all(not torch.equal(old, new) for old, new in zip(before, model, strict=True))


class Undeclared(AdamW):
    """Nobody has said that it steps each element by itself."""


@case(4)
def _optimizers_that_look_at_whole_parameters_get_whole_ones_or_none(setup: Setup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    arguments: dict[str, Any] = {"mesh": mesh, "data_parallel_dim": "data"}
    own = dist.new_group([setup.rank], use_local_synchronization=True)

    def factory(params: Any, **options: Any) -> ToyLAMB:
        return ToyLAMB(params, **options)

    for build in (ToyLAMB, torch.optim.Adafactor, Undeclared, factory):
        for dim in (0, 1):
            parts = nn.ParameterList([distribute_tensor(torch.ones(4, 4), mesh["tensor"], [Shard(dim)])])
            if build is not factory:  # parts meet where the class is known; tests/multiproc/test_parallel_whole.py
                assert len(cuts_of(ParallelOptimizer(parts, build, **arguments))) == 1
                continue
            with pytest.raises(TypeError, match=r"Expected an optimizer that steps each element by itself"):
                ParallelOptimizer(parts, build, **arguments)
        plain = nn.ParameterList([torch.ones(4, 4), torch.ones(2, 4)])
        for ranks in ({}, {"process_group": mesh.get_group("data")}, {"process_group": own}):
            for dims in ("tensor", ["tensor"]):
                groups = [{"params": [plain[0]]}, {"params": [plain[1]], "sharded_over": dims, **ranks}]
                with pytest.raises(TypeError, match=r"shape \[2, 4\].* along \['tensor'\] holds a part"):
                    ParallelOptimizer(plain, build, groups, **arguments)
    whole = nn.ParameterList([distribute_tensor(torch.ones(4, 4), mesh["tensor"], [Replicate()])])
    expected = nn.ParameterList([torch.ones(4, 4)])
    opt, plain_opt = ParallelOptimizer(whole, ToyLAMB, **arguments), ToyLAMB(expected.parameters())
    for step in range(2):
        grad = torch.arange(16.0).view(4, 4) + step
        expected[0].grad = grad.clone()
        whole[0].grad = distribute_tensor(grad.clone(), mesh["tensor"], [Replicate()])
        opt.step()
        plain_opt.step()
        assert_identical(expected[0].detach(), local_part(whole[0]), f"step {step}")
    flat = init_device_mesh("cpu", (4, 1), mesh_dim_names=("data", "tensor"))
    alone = nn.ParameterList([distribute_tensor(torch.ones(4, 4), flat["tensor"], [Shard(0)])])
    ParallelOptimizer(alone, ToyLAMB, mesh=flat, data_parallel_dim="data")  # nobody else holds a part


@case(4)
def _stages_share_an_embedding_norms_and_skips(setup: Setup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    train_stages(mesh, tensor=None, schedules=(ScheduleGPipe, Schedule1F1B))
    for stage, schedule in ((1, ScheduleGPipe), (2, Schedule1F1B)):
        train_stages(mesh, tensor=None, schedules=(schedule,), wraps=True, stage=stage)


test_meshes = case.each()
