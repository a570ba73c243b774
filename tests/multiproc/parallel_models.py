"""Models that are cut over ranks or into stages, with their groups, norms and losses."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero.parallel import ParallelOptimizer
from tests.multiproc.cases import assert_identical, assert_same_on_all_ranks
from tests.multiproc.cut_models import CutBlock, FirstStage, LastStage, Whole, is_cut, token_batch
from tests.multiproc.parity import Parity

STEPS = 4
CLIP = 0.05
OPTIONS: dict[str, Any] = {"lr": 1e-2}


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


def parallelized(mesh: DeviceMesh, hidden: int = 16) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, 8), nn.LayerNorm(8))
    # a plain tensor between the two would be taken for an equal part of the whole
    return parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})


def local_part(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, targets) / 4  # the mean over micro-batches, of which there are four


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
        assert_same_on_all_ranks([part.embedding], tied, "in the tied embedding")
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
