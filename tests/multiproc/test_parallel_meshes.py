"""Tensor and pipeline parallel ranks around the data-parallel ranks: parity, norms, decisions over the whole model."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from ddp_zero.parallel import ParallelOptimizer
from tests.internals import cuts_of
from tests.multiproc.cases import ToyLAMB, assert_identical, batches
from tests.multiproc.cut_models import CutBlock, FirstStage, LastStage, Whole, is_cut, token_batch
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.parity import Parity

STEPS = 4
CLIP = 0.05
OPTIONS: dict[str, Any] = {"lr": 1e-2}

case = Cases(timeout=120, group_timeout=30)


def norm_of(model: nn.Module) -> Tensor:
    """The norm of the whole model's gradients, to which every parameter adds enough to be missed."""
    norms = torch.stack([param.grad.norm() for param in model.parameters() if param.grad is not None])
    assert len(norms) == len(list(model.parameters()))
    total: Tensor = norms.norm()
    counted = (norms / total).square()
    assert counted.min() > 1e-5, f"a parameter that is left out, or counted twice, would not show: {counted}"
    return total


def scale_gradients(model: nn.Module, found: float) -> None:
    factor = torch.clamp(CLIP / (torch.tensor(found) + 1e-6), max=1.0)
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(factor)


def check_norm(opt: ParallelOptimizer, expected: Tensor, parity: Parity | None = None) -> float:
    assert opt.last_step is not None
    found = opt.last_step.grad_norm
    assert found is not None
    (Parity() if parity is None else parity).note_norm(found, expected)
    return found


def cut_groups(model: nn.Module, dim: str) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [(name, param) for name, param in named if not is_cut(name)]},
        {"params": [(name, param) for name, param in named if is_cut(name)], "sharded_over": dim},
    ]


def blocks(group: dist.ProcessGroup | None) -> nn.Module:
    return nn.Sequential(CutBlock(group, seed=1), CutBlock(group, seed=2))


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = model(batch[0]).square().mean()
    return loss


def everyones(data_ranks: int, step: int) -> tuple[Tensor, Tensor]:
    every = [list(batches(rank, step + 1))[step] for rank in range(data_ranks)]
    inputs, targets = (torch.cat(parts) for parts in zip(*every, strict=True))
    return inputs, targets


@case(4)
def _parameters_that_are_cut_by_hand_equal_the_plain_optimizer(setup: Setup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
    arguments = {"mesh": mesh, "data_parallel_dim": "data"}
    for mode in ({}, {"stage": 2}, {"max_grad_norm": CLIP}, {"stage": 2, "max_grad_norm": CLIP}):
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


def parallelized(mesh: DeviceMesh, hidden: int = 16) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, 8), nn.LayerNorm(8))
    # a plain tensor between the two would be taken for an equal part of the whole
    return parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})


def local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach()


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
        before = [local(param).clone() for param in model.parameters()]
        for step, batch in enumerate(batches(mesh.get_local_rank("data"), STEPS)):
            plain.zero_grad()
            (expected(batch[0]) - 0.1).pow(4).mean().backward()
            for param in expected.parameters():
                grad = local(param.grad).mul_(0.5)
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
                assert_identical(local(other), local(mine), f"{name} after step {step}, clipped: {clipped}")
        assert all(not torch.equal(local(param), old) for param, old in zip(model.parameters(), before, strict=True))
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
        assert_identical(whole[0].detach()[half].clone(), local(model[0]), f"the distributed tensor after step {step}")
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
        mine = torch.cat([torch.stack(norms), *(param.detach() for param in model)])
        every = [torch.empty_like(mine) for _ in range(4)]
        dist.all_gather(every, mine)
        assert all(torch.equal(mine, other) for other in every), f"ranks differ, {clips_in_step=}: {every}"
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
        assert_identical(expected[0].detach(), local(whole[0]), f"step {step}")
    flat = init_device_mesh("cpu", (4, 1), mesh_dim_names=("data", "tensor"))
    alone = nn.ParameterList([distribute_tensor(torch.ones(4, 4), flat["tensor"], [Shard(0)])])
    ParallelOptimizer(alone, ToyLAMB, mesh=flat, data_parallel_dim="data")  # nobody else holds a part


def token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, targets) / 4  # the mean over micro-batches, of which there are four


@case(4)
def _stages_share_an_embedding_norms_and_skips(setup: Setup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    train_stages(mesh, tensor=None, schedules=(ScheduleGPipe, Schedule1F1B))
    for stage, schedule in ((1, ScheduleGPipe), (2, Schedule1F1B)):
        train_stages(mesh, tensor=None, schedules=(schedule,), wraps=True, stage=stage)


def train_stages(
    mesh: DeviceMesh, tensor: dist.ProcessGroup | None, schedules: tuple[Any, ...], wraps: bool = False, stage: int = 1
) -> Parity:
    """Train beside both stages on one device; with ``wraps``, stages are DDP models that leave the embedding alone."""
    data_rank, stage_number = mesh.get_local_rank("data"), mesh.get_local_rank("pipe")
    tied, parity = tied_group(mesh), Parity()
    for schedule_class in schedules:
        part = FirstStage(tensor) if stage_number == 0 else LastStage(tensor)
        model: nn.Module = part
        if wraps:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(part, ["embedding", ".embedding"])
            model = DistributedDataParallel(part, process_group=mesh.get_group("data"), gradient_as_bucket_view=True)
        named = list(part.named_parameters())
        groups: list[dict[str, Any]] = [
            {"params": [(name, param) for name, param in named if name != "embedding" and not is_cut(name)]},
            {"params": [(name, param) for name, param in named if is_cut(name)]}
            | ({} if tensor is None else {"sharded_over": "tensor"}),
            {"params": [("embedding", part.embedding)], "process_group": tied},
        ]
        opt = ParallelOptimizer(
            model,
            AdamW,
            groups,
            mesh=mesh,
            data_parallel_dim="data",
            pipeline_dim="pipe",
            max_grad_norm=CLIP,
            stage=stage,
            **OPTIONS,
        )
        whole = Whole()
        one = AdamW(whole.parameters(), **OPTIONS)
        pipeline = PipelineStage(model, stage_number, 2, torch.device("cpu"), group=mesh.get_group("pipe"))
        schedule = schedule_class(pipeline, n_microbatches=4, loss_fn=token_loss, scale_grads=False)
        for step in range(STEPS):
            tokens, targets = token_batch(data_rank, step)
            opt.zero_grad()
            if stage_number == 0:
                schedule.step(tokens)
            else:
                schedule.step(target=targets)
            before = copy.deepcopy(part.state_dict())
            if step == 2 and stage_number == 1 and (wraps or dist.get_rank() == dist.get_world_size() - 1):
                part.block.bias.grad = torch.full_like(part.block.bias, float("nan"))
            opt.step()
            assert opt.last_step is not None
            if step == 2:
                assert not opt.last_step.stepped
                assert opt.last_step.nonfinite_parameter == "block.bias"
                assert_identical(before, part.state_dict(), "after a skip")
                continue
            one.zero_grad()
            every = [token_batch(rank, step) for rank in range(mesh["data"].size())]
            inputs, wanted = (torch.cat(parts) for parts in zip(*every, strict=True))
            nn.functional.cross_entropy(whole(inputs), wanted).backward()
            norm = norm_of(whole)
            check_norm(opt, norm, parity)
            scale_gradients(whole, float(norm))
            one.step()
        same = whole.first if stage_number == 0 else whole.last
        for name, param in part.named_parameters():
            if tensor is None or not is_cut(name):
                parity.note_one_device(param, same.get_parameter(name))
        both = [torch.empty_like(part.embedding) for _ in range(dist.get_world_size(tied))]
        dist.all_gather(both, part.embedding.detach(), group=tied)
        assert all(torch.equal(part.embedding, other) for other in both), "the tied embeddings differ"
    return parity


def tied_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that hold the same part of the embedding: both ends of the pipeline, all data-parallel ranks.

    In stages between them those at the ends of this rank's pipelines.
    """
    names = list(mesh.mesh_dim_names or ())
    others = [names.index(name) for name in names if name not in ("data", "pipe")]
    order = [*others, names.index("data"), names.index("pipe")]
    table = mesh.mesh.permute(order).flatten(0, -3) if others else mesh.mesh.permute(order)[None]
    found = [dist.new_group(sorted(row[:, [0, -1]].flatten().tolist())) for row in table]
    mine = [dist.get_rank() in row.flatten().tolist() for row in table]
    group: dist.ProcessGroup = found[mine.index(True)]
    return group


test_meshes = case.each()
