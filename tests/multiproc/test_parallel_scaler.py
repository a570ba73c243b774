"""`torch.amp.GradScaler` over meshes: one skip for all ranks, one path of all scales, and the plain numbers."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import ddp_zero
from ddp_zero.core.local.placeholders import on_this_rank
from ddp_zero.parallel import ParallelOptimizer
from tests.multiproc.beside_parallel import KINDS, Beside, mesh_of_4
from tests.multiproc.cases import assert_identical, batches
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.test_parallel_meshes import CLIP, OPTIONS, local, tied_group
from tests.multiproc.test_parallel_stages import Stages

SCALE = 1024.0
OVERFLOWS = (1, 4)
STEPS = 6

case = Cases(timeout=180, group_timeout=30)


def new_scaler(scale: float = SCALE) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)


def parts_of(beside: Beside) -> torch.optim.Optimizer:
    """An optimizer over the plain copy's parts on this rank: a scaler alone does not take distributed tensors."""
    parts = []
    for param in beside.expected.parameters():
        part = nn.Parameter(local(param))
        part.grad = None if param.grad is None else local(param.grad)
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


MODES: tuple[dict[str, Any], ...] = ({}, {"stage": 2}, {"max_grad_norm": CLIP}, {"overlap": False})


def train(beside: Beside, clips_in: str | None) -> None:
    """Both copies with a scaler each; ``clips_in`` the step, or the loop, after ``unscale_``; or not at all."""
    mine, theirs = new_scaler(), new_scaler()
    ranks, name = spoiled_rank_and_name(beside.kind)
    for step, batch in enumerate(batches(beside.place, STEPS)):
        before = [param.detach().clone() for param in beside.model.parameters()]
        for scaler, model, optimizer in ((theirs, beside.expected, beside.plain), (mine, beside.model, beside.opt)):
            optimizer.zero_grad()
            scaler.scale(beside.loss(model, batch)).backward()
            if step in OVERFLOWS and dist.get_rank() in ranks:
                param = model.get_parameter(name)
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                spoil(param)
        beside.reduce()
        if clips_in == "the loop":
            mine.unscale_(beside.opt)
            beside.opt.clip_grad_norm_(CLIP)
        mine.step(beside.opt)
        mine.update()
        shown = parts_of(beside)
        theirs.unscale_(shown)
        agree(theirs, shown)
        record = beside.opt.last_step
        assert record is not None
        assert record.stepped == (step not in OVERFLOWS), f"{beside.kind}: {step}"
        if clips_in is not None and step not in OVERFLOWS:
            beside.clip(CLIP)
        if not found_by(theirs, shown):
            beside.plain.step()
        theirs.update()
        assert mine.get_scale() == theirs.get_scale(), f"{beside.kind}: {step}"
        beside.assert_equal(f"after step {step}, clipped in {clips_in}")
        if step in OVERFLOWS:
            assert_identical(before, [param.detach() for param in beside.model.parameters()], "after a skip")
    assert mine.get_scale() != SCALE
    beside.assert_moved()


IN_THE_LOOP: list[tuple[dict[str, Any], str | None]] = [
    ({"overlap": False}, "the loop"),
    ({"stage": 2, "overlap": False}, "the loop"),
]
WAYS: list[tuple[dict[str, Any], str | None]] = [
    *((mode, "the step" if "max_grad_norm" in mode else None) for mode in MODES),
    *IN_THE_LOOP,
]
"""Options of the optimizer, and where gradients are clipped."""


@case(
    4,
    few=[(KINDS[0], WAYS[1]), (KINDS[1], WAYS[5]), (KINDS[1], WAYS[0]), (KINDS[2], WAYS[4]), (KINDS[3], WAYS[2])],
    every=[*product(KINDS[:3], WAYS), *product(KINDS[3:], [*WAYS[:3:2], *IN_THE_LOOP])],
)
def _scales_and_numbers_are_those_of_a_scaler_that_sees_all_gradients(
    setup: Setup, configurations: list[tuple[str, tuple[dict[str, Any], str | None]]]
) -> None:
    mesh = mesh_of_4()
    for kind, (mode, clips_in) in configurations:
        train(Beside(kind, mesh, **mode), clips_in)


@case(4)
def _stages_follow_one_scale(setup: Setup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    tied = tied_group(mesh)
    arguments: dict[str, Any] = {"mesh": mesh, "data_parallel_dim": "data", "pipeline_dim": "pipe"}
    modes: tuple[tuple[bool, dict[str, Any]], ...] = ((False, {}), (True, {"stage": 2}))
    for wraps, mode in modes:
        ours, theirs = (Stages(mesh, Schedule1F1B, wraps, learns_shapes=False) for _ in range(2))
        opt = ParallelOptimizer(ours.model, AdamW, ours.groups(tied), **arguments, **mode, **OPTIONS)
        plain = AdamW(theirs.part.parameters(), **OPTIONS)
        scalers = new_scaler(), new_scaler()
        for scaler, stages in zip(scalers, (ours, theirs), strict=True):
            scaler.scale(torch.ones(()))  # stages without a loss have no other call that creates the scale
            stages.scale = scaler.scale
        mine, other = scalers
        for step in range(STEPS):
            for stages, optimizer in ((theirs, plain), (ours, opt)):
                optimizer.zero_grad()
                stages.run(step)
                if step in OVERFLOWS and stages.number == 1:
                    spoil(stages.part.block.bias)
            theirs.reduce_by_hand(tied)
            mine.step(opt)
            mine.update()
            other.unscale_(plain)
            agree(other, plain)
            other.step(plain)
            other.update()
            assert opt.last_step is not None
            assert opt.last_step.stepped == (step not in OVERFLOWS)
            assert mine.get_scale() == other.get_scale()
            for param, expected in zip(ours.part.parameters(), theirs.part.parameters(), strict=True):
                assert_identical(expected.detach(), param.detach(), f"step {step}, {wraps=}")


@case(4)
def _scales_that_differ_and_a_second_scale_are_refused_on_every_rank(setup: Setup) -> None:
    mesh = mesh_of_4()
    beside = Beside("cut, without DDP", mesh)
    scaler = new_scaler(SCALE * (2 if setup.rank == 3 else 1))
    batch = next(batches(beside.place, 1))
    scaler.scale(beside.loss(beside.model, batch)).backward()
    with pytest.raises(
        RuntimeError, match=r"a torch\.amp\.GradScaler of scale 2048 and of 1024 on rank 0 .*\(global rank 3\)"
    ):
        scaler.step(beside.opt)
    dist.barrier()
    beside = Beside("cut, without DDP", mesh, loss_scale=ddp_zero.DynamicLossScale())
    scaler = new_scaler()
    scaler.scale(beside.loss(beside.model, batch)).backward()
    with pytest.raises(RuntimeError, match=r"loss_scale= and is stepped by a torch\.amp\.GradScaler"):
        scaler.step(beside.opt)
    with pytest.raises(RuntimeError, match="Expected found_inf to be set by a torch"):
        beside.opt.found_inf = torch.zeros(())


@case(4)
def _a_rank_without_gradients_updates_its_scale_as_all_others(setup: Setup) -> None:
    mesh = mesh_of_4()
    model = nn.ParameterList([torch.ones(3)])
    opt = ParallelOptimizer(
        model,
        AdamW,
        [{"params": list(model), "sharded_over": "tensor"}],
        mesh=mesh,
        data_parallel_dim="data",
        **OPTIONS,
    )
    scaler = new_scaler()
    scaler.scale(torch.ones(()))
    for step in range(3):
        opt.zero_grad()
        if mesh.get_local_rank("tensor") == 1:  # a part that this batch has not used has none
            model[0].grad = torch.full((3,), float("inf") if step == 1 and setup.rank == 1 else SCALE)
        scaler.step(opt)
        scaler.update()
        assert scaler.get_scale() == (SCALE if step == 0 else SCALE / 2)
    assert torch.equal(model[0], torch.ones(3)) == (mesh.get_local_rank("tensor") == 0)


test_parallel_scaler = case.each()
