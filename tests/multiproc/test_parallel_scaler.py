"""`torch.amp.GradScaler` over meshes: one skip for all ranks, one path of all scales, and the plain numbers."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.optim import AdamW

import ddp_zero
from ddp_zero.parallel import ParallelOptimizer
from tests.multiproc.cases import assert_identical, batches
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.mesh_twins import KINDS, MeshTwins, mesh_of_4
from tests.multiproc.parallel_models import CLIP, OPTIONS, tied_group
from tests.multiproc.scaled import OVERFLOWS, SCALE, STEPS, agree, new_scaler, spoil, train_scaled
from tests.multiproc.stages import Stages

case = Cases(timeout=180, group_timeout=30)


MODES: tuple[dict[str, Any], ...] = ({}, {"stage": 2}, {"max_grad_norm": CLIP}, {"overlap": False})


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
        train_scaled(MeshTwins(kind, mesh, **mode), clips_in)


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
    twins = MeshTwins("cut, without DDP", mesh)
    scaler = new_scaler(SCALE * (2 if setup.rank == 3 else 1))
    batch = next(batches(twins.place, 1))
    scaler.scale(twins.loss(twins.model, batch)).backward()
    with pytest.raises(
        RuntimeError, match=r"a torch\.amp\.GradScaler of scale 2048 and of 1024 on rank 0 .*\(global rank 3\)"
    ):
        scaler.step(twins.opt)
    dist.barrier()
    twins = MeshTwins("cut, without DDP", mesh, loss_scale=ddp_zero.DynamicLossScale())
    scaler = new_scaler()
    scaler.scale(twins.loss(twins.model, batch)).backward()
    with pytest.raises(RuntimeError, match=r"loss_scale= and is stepped by a torch\.amp\.GradScaler"):
        scaler.step(twins.opt)
    with pytest.raises(RuntimeError, match="Expected found_inf to be set by a torch"):
        twins.opt.found_inf = torch.zeros(())


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
