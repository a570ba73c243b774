"""Training with a GradScaler beside one that sees all gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ddp_zero.values.placeholders import on_this_rank
from tests.multiproc.cases import assert_identical, batches
from tests.multiproc.mesh_twins import MeshTwins
from tests.multiproc.parallel_models import CLIP, local_part

SCALE = 1024.0
OVERFLOWS = (1, 4)
STEPS = 6


def new_scaler(scale: float = SCALE) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)


def suboptimizers_of(twins: MeshTwins) -> torch.optim.Optimizer:
    """An optimizer over the plain copy's parts on this rank: a scaler alone does not take distributed tensors."""
    parts = []
    for param in twins.plain_model.parameters():
        part = nn.Parameter(local_part(param))
        part.grad = None if param.grad is None else local_part(param.grad)
        parts.append(part)
    return torch.optim.SGD(parts)


def found_by(scaler: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    (found,) = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
    flag: Tensor = found
    return flag


def agree(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    """What one device would find, which has all gradients: the findings of all ranks."""
    dist.all_reduce(found_by(scaler, optimizer), dist.ReduceOp.MAX)


def spoil(param: nn.Parameter) -> None:
    """An overflow in one gradient, if this rank has it."""
    grad: Any = param.grad
    held = grad.to_local() if isinstance(grad, DTensor) else on_this_rank(grad)
    if held is not None:
        held.view(-1)[0] = float("inf")


def spoiled_rank_and_name(kind: str) -> tuple[tuple[int, ...], str]:
    """Only ranks with this part have the overflow: all of them where DDP has averaged it, else one of them."""
    return {
        "experts": ((3,), "module.experts.local.1.0.weight"),
        "cut, in DDP": ((1, 3), "module.1.up"),
        "cut, without DDP": ((3,), "1.up"),
        "distributed tensors": ((3,), "0.weight"),
    }[kind]


def train_scaled(twins: MeshTwins, clips_in: str | None) -> None:
    """Both copies with a scaler each; ``clips_in`` the step, or the loop, after ``unscale_``; or not at all."""
    mine, theirs = new_scaler(), new_scaler()
    ranks, name = spoiled_rank_and_name(twins.kind)
    for step, batch in enumerate(batches(twins.place, STEPS)):
        before = [param.detach().clone() for param in twins.model.parameters()]
        for scaler, model, optimizer in ((theirs, twins.plain_model, twins.plain), (mine, twins.model, twins.opt)):
            optimizer.zero_grad()
            scaler.scale(twins.loss(model, batch)).backward()
            if step in OVERFLOWS and dist.get_rank() in ranks:
                param = model.get_parameter(name)
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                spoil(param)
        twins.reduce(twins.plain_model)
        if clips_in == "the loop":
            mine.unscale_(twins.opt)
            twins.opt.clip_grad_norm_(CLIP)
        mine.step(twins.opt)
        mine.update()
        shown = suboptimizers_of(twins)
        theirs.unscale_(shown)
        agree(theirs, shown)
        record = twins.opt.last_step
        assert record is not None
        assert record.stepped == (step not in OVERFLOWS), f"{twins.kind}: {step}"
        if clips_in is not None and step not in OVERFLOWS:
            twins.clip_plain(CLIP)
        if not found_by(theirs, shown):
            twins.plain.step()
        theirs.update()
        assert mine.get_scale() == theirs.get_scale(), f"{twins.kind}: {step}"
        twins.assert_equal(f"after step {step}, clipped in {clips_in}")
        if step in OVERFLOWS:
            assert_identical(before, [param.detach() for param in twins.model.parameters()], "after a skip")
    assert mine.get_scale() != SCALE
    twins.assert_moved()
